"""Fake implementations for device ``tpu``, for ops whose meta function in PyTorch is another
device's.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def know_geometry(module: ModuleType) -> None:
    """Have ``torch._subclasses.fake_impls`` ask us about results of these ops on the device."""
    module.register_op_impl(torch.ops.aten._grouped_mm.default)(_grouped_mm)


def _grouped_mm(mode: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    from tpu_core.extend import meta_function

    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if any(x.device.type != "tpu" for x in tensors):
        return NotImplemented
    with mode:
        return meta_function("aten._grouped_mm.default")(*args, **kwargs)
