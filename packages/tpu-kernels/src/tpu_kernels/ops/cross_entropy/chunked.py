"""The loss by a loop of XLA's over the vocabulary."""

from __future__ import annotations

import functools
from types import MappingProxyType

from tpu_kernels.ops.cross_entropy import loops, sharded
from tpu_kernels.ops.cross_entropy.arguments import BACKWARD, FORWARD
from tpu_kernels.ops.registry import Implementation

CHUNKED = Implementation(
    "chunked",
    "A loop of XLA's over parts of the vocabulary: memory grows with the tokens times a part.",
    functions=MappingProxyType(
        {
            FORWARD: functools.partial(sharded.forward, loops.forward),
            BACKWARD: functools.partial(sharded.backward, loops.backward),
        }
    ),
)
