"""The loss by kernels: logits stay in the chip's own memory, one block at a time."""

from __future__ import annotations

import functools
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np
from jax import Array

from tpu_core.array_types import Float, Int, Shaped
from tpu_core.extend import Target
from tpu_kernels.ops.cross_entropy import kernels, sharded
from tpu_kernels.ops.cross_entropy.arguments import BACKWARD, FORWARD, LossArguments
from tpu_kernels.ops.cross_entropy.kernels import TileSizes
from tpu_kernels.ops.cross_entropy.loops import of_target
from tpu_kernels.ops.cross_entropy.sharded import HAS_TOKENS_DIVIDED
from tpu_kernels.ops.mosaic import calling
from tpu_kernels.ops.registry import Implementation, Rule

_MIB = 2**20
# VMEM of a core, MiB, as `jax.experimental.pallas.tpu` has it, by both names that chips go by.
_VMEM = {
    "TPU v4": 16,
    **dict.fromkeys(("TPU v5e", "TPU v5 lite"), 128),
    **dict.fromkeys(("TPU v5p", "TPU v5"), 64),
    **dict.fromkeys(("TPU v6e", "TPU v6 lite"), 128),
    "TPU7x": 64,
}
# What the interpreter, which has no VMEM, is given the blocks of.
_INTERPRETED = "TPU v5e"
# 512 rows that stay are 1,024 operations for each byte of those that pass, more than a chip has for
# a byte of its memory. Mosaic takes three times as long for twice as many that pass.
_KEPT, _PASSING = (512, 256, 128), (256, 128)


def blocks(features: int, size: int, kind: str | None) -> TileSizes | None:
    """The largest blocks that fit into a chip's VMEM; None where none do, or it is not known.

    Args:
        features: Of a row.
        size: Bytes of an element.
        kind: Generation of the chip.
    """
    vmem = _VMEM.get(kind or "", 0) * _MIB

    def fits(kept: int, passing: int) -> bool:
        # Two of what is moved while the other is used, sums in float32 and what is added to them.
        rows = features * (2 * size * (2 * kept + passing) + 8 * kept)
        # An exact product of float32 has its operands in parts.
        parts = features * 8 * (kept + passing) if size == 4 else 0
        return rows + parts + 16 * kept * passing <= 0.8 * vmem

    sides = ((kept, passing) for kept in _KEPT for passing in _PASSING if passing <= kept)
    found = next((side for side in sides if fits(*side)), None)
    return TileSizes(*found, int(0.95 * vmem)) if found else None


def _blocks(hidden: Float[Array, "tokens features"]) -> TileSizes:
    where = Target.current()
    kind = where.kind if where.platform == "tpu" else _INTERPRETED
    found = blocks(hidden.shape[1], hidden.dtype.itemsize, kind)
    assert found is not None  # a rule
    return found


def _filled(x: Shaped[Array, " tokens *rest"], blocks: TileSizes) -> Shaped[Array, " _ *rest"]:
    """Tokens, the first dimension, up to whole blocks."""
    missing = -x.shape[0] % blocks.kept
    return jnp.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1)))


def forward(
    hidden: Float[Array, "tokens features"],
    weight: Float[Array, "vocabulary features"],
    target: Int[Array, " tokens"],
    bias: None,
    smoothing: float,
    softcap: float,
    chunk: int,
    slopes: bool,
) -> tuple[Float[Array, " tokens"], Float[Array, " tokens"], Float[Array, "_ features"]]:
    """As `tpu_kernels.ops.cross_entropy.loops.forward`, for what `PALLAS` takes."""
    sides, tokens = _blocks(hidden), hidden.shape[0]
    filled = _filled(hidden, sides)
    with calling(hidden.dtype, 2 * (1 + slopes) * filled.size * weight.shape[0]):
        logsumexp, *expected = kernels.forward(filled, weight, softcap, sides, slopes)
    logsumexp = logsumexp[0, :tokens]
    picked = (hidden.astype(np.float32) * weight[target].astype(np.float32)).sum(1)
    if softcap:
        picked = softcap * jnp.tanh(picked / softcap)
    if not slopes:
        return logsumexp - picked, logsumexp, jnp.zeros((0, hidden.shape[1]), hidden.dtype)
    own = of_target(picked, weight, target, softcap)
    slope = expected[0][:tokens].astype(np.float32) - own
    return logsumexp - picked, logsumexp, slope.astype(hidden.dtype)


def backward(
    grad: Float[Array, " tokens"],
    logsumexp: Float[Array, " tokens"],
    hidden: Float[Array, "tokens features"],
    weight: Float[Array, "vocabulary features"],
    target: Int[Array, " tokens"],
    bias: None,
    smoothing: float,
    softcap: float,
    chunk: int,
) -> tuple[Float[Array, "vocabulary features"], Float[Array, " _"]]:
    """As `tpu_kernels.ops.cross_entropy.loops.backward`, for what `PALLAS` takes."""
    sides = _blocks(hidden)
    filled = _filled(hidden, sides)
    sums, wanted, grads = (
        _filled(x, sides)[None] for x in (logsumexp, target.astype(np.int32), grad)
    )
    with calling(hidden.dtype, 4 * filled.size * weight.shape[0]):
        made = kernels.backward(filled, weight, sums, wanted, grads, softcap, sides)
    return made, jnp.zeros(0, weight.dtype)


def _fits(a: LossArguments, target: Target) -> bool:
    kind = target.kind if target.platform == "tpu" else _INTERPRETED
    return blocks(a.features, 4 if a.dtype == "float32" else 2, kind) is not None


PALLAS = Implementation(
    "pallas",
    "Kernels that keep a block of logits in VMEM. The logits are computed twice, and the hidden "
    "states' gradient with the first.",
    platforms=("tpu",),
    dtypes=("bfloat16", "float32"),
    rules=(
        Rule("There are tokens.", lambda a, target: a.tokens > 0),
        Rule(
            "The features are a multiple of 128.",
            lambda a, target: a.features > 0 and a.features % 128 == 0,
        ),
        Rule("The layer has no bias.", lambda a, target: not a.bias),
        Rule("There is no label smoothing.", lambda a, target: a.smoothing == 0),
        Rule("No chunk is given: the kernels have blocks.", lambda a, target: a.chunk == 0),
        HAS_TOKENS_DIVIDED,
        Rule(
            "The chip is a TPU v4, v5e, v5p, v6e or 7x, and 128 tokens and columns fit its VMEM.",
            _fits,
        ),
    ),
    functions=MappingProxyType(
        {
            FORWARD: functools.partial(sharded.forward, forward),
            BACKWARD: functools.partial(sharded.backward, backward),
        }
    ),
)
