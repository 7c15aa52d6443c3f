"""Abstract evaluation of a lowering when its op is recorded.

A lowering that fails when a segment is compiled fails at a later and unrelated line. So the first
call of an op with uncommon dtypes, without elements or without dims is evaluated on shapes and
dtypes alone. All signatures of a GPT's train step would take as long as its whole warm start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tpu_core import interruptible
from tpu_core.dtypes import cast
from tpu_core.errors import TpuError
from tpu_core.lowering.implementations import as_recorded
from tpu_core.lowering.precision import precision
from tpu_core.lowering.views import Access
from tpu_core.pjrt import client as pjrt
from tpu_core.pjrt import jax_settings
from tpu_core.recorder import compute
from tpu_core.recorder.plan import NodePlan


def lowers(node: NodePlan, packs: Sequence[int]) -> bool:
    """Return whether the lowering of a node takes operands of its shapes and dtypes.

    Args:
        node: The op to record.
        packs: Index of the pack of each of its numbers.
    """
    if node.compute.is_local:  # a JAX function of the user's: traced when it runs
        return True
    key = (node.op, tuple(_kind(a) for a in node.reads), _dtypes(node))
    if key in _taken or _is_common(node):
        return True
    if _lowers(node, packs):
        _taken.add(key)
        return True
    return False


_FLOATS = frozenset(np.dtype(t) for t in (np.float32, np.float64, np.float16, jnp.bfloat16))
_taken: set[Any] = set()


def _kind(access: Access) -> tuple[Any, ...]:
    return access.dtype, len(access.sizes) == 0, 0 in access.sizes


def _dtypes(node: NodePlan) -> tuple[Any, ...]:
    """Dtypes of the results, and those that arguments name."""
    made = tuple(o.dtype for o in compute.flatten(node.compute.out) if o is not None)
    return *made, *(v for _, _, v in node.template if isinstance(v, torch.dtype))


def _is_common(node: NodePlan) -> bool:
    """Return whether the lowering surely takes it: one floating-point dtype, perhaps with indices,
    and elements; or no user can call the op with others than those that its tests have.
    """
    if node.op.startswith(("tpu.", "aten._scaled_dot_product_")) or "backward" in node.op:
        return True
    kinds = [_kind(a) for a in node.reads]
    dtypes = {dtype for dtype, *_ in kinds}.union(_dtypes(node))
    if len(dtypes) > 1:
        dtypes.discard(np.dtype(np.int64))
    if any(empty for *_, empty in kinds) or (len(kinds) == 1 and kinds[0][1]):
        return False
    # XLA calls LAPACK, which has no halves.
    wide = all(dtype.itemsize > 2 for dtype in dtypes) or "linalg" not in node.op
    return len(dtypes) == 1 and dtypes <= _FLOATS and wide


def _lowers(node: NodePlan, packs: Sequence[int]) -> bool:
    tensors = [jax.ShapeDtypeStruct(a.sizes, a.dtype) for a in node.reads]
    numbers = [jax.ShapeDtypeStruct((), pjrt.PACK_DTYPES[k]) for k in packs]
    key = jax.ShapeDtypeStruct((2,), np.uint32) if node.random else None

    def call(tensors: list[Any], numbers: list[Any], key: Any) -> list[Any]:
        positional, keywords, _ = node.arguments(
            tensors, map(pjrt.weak, numbers), lambda base, *_: base, cast, jnp.zeros
        )
        with (
            precision(node.precision),
            as_recorded(node.choices),
            jax_settings.as_recorded(node.jax_settings),
        ):
            return node.compute(positional, keywords, key)

    try:
        with jax_settings.lowering():
            jax.eval_shape(call, tensors, numbers, key)
    except TpuError:
        return True  # says what to do, with the line of the op
    except Exception as error:
        interruptible.pass_on(error)
        return False
    return True
