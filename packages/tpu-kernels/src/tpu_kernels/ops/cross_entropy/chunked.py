"""The loss by a loop of XLA's over the vocabulary."""

from __future__ import annotations

import functools
from types import MappingProxyType

from tpu_kernels.ops.cross_entropy import divided, loops
from tpu_kernels.ops.cross_entropy.names import BACKWARD, FORWARD
from tpu_kernels.ops.registry import Implementation

CHUNKED = Implementation(
    "chunked",
    "A loop of XLA's over parts of the vocabulary: memory grows with the tokens times a part.",
    functions=MappingProxyType(
        {
            FORWARD: functools.partial(divided.forward, loops.forward),
            BACKWARD: functools.partial(divided.backward, loops.backward),
        }
    ),
)
