"""Annotations of arrays and tensors with dtype and shape: ``Float[Array, "rows columns"]``.

They are those of jaxtyping where it is imported before this module, as in the tests, whose import
hook checks arguments and results against them. Elsewhere they are `typing.Annotated`: a type
checker and `typing.get_type_hints` see the type of the array, and jaxtyping need not be installed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if not TYPE_CHECKING and "jaxtyping" in sys.modules:
    from jaxtyping import (
        BFloat16,
        Bool,
        Float,
        Float32,
        Inexact,
        Int,
        Int8,
        Int32,
        Integer,
        Num,
        Shaped,
        UInt8,
        UInt32,
    )
else:
    from typing import Annotated as BFloat16
    from typing import Annotated as Bool
    from typing import Annotated as Float
    from typing import Annotated as Float32
    from typing import Annotated as Inexact
    from typing import Annotated as Int
    from typing import Annotated as Int8
    from typing import Annotated as Int32
    from typing import Annotated as Integer
    from typing import Annotated as Num
    from typing import Annotated as Shaped
    from typing import Annotated as UInt8
    from typing import Annotated as UInt32

__all__ = [
    "BFloat16",
    "Bool",
    "Float",
    "Float32",
    "Inexact",
    "Int",
    "Int8",
    "Int32",
    "Integer",
    "Num",
    "Shaped",
    "UInt8",
    "UInt32",
]
