"""Schema of an overload as the recorder reads it. Mirrors ``OpDescription`` in the
extension.
"""

from __future__ import annotations

import functools
import math
import struct
import sys
from collections.abc import Sequence
from typing import Any

import torch

from tpu_core import _C
from tpu_core.lowering.registry import Lowering
from tpu_core.recorder import (
    checked,
    ctc,
    data_dependent,
    fallback,
    fastpaths,
    meta,
    suspicions,
    windows,
)
from tpu_core.recorder.decompose import decomposition_of
from tpu_core.recorder.functional_variants import (
    OVERWRITING,
    is_out_variant,
    lowering_of,
    overload_name,
    written_arguments,
)

TENSOR, TENSOR_LIST, NUMBER, NUMBER_LIST, STATIC, DROP, GENERATOR, INTEGERS = map(
    _C.ENUMS["Argument"].__getitem__,
    "TENSOR TENSOR_LIST NUMBER NUMBER_LIST STATIC DROP GENERATOR INTEGERS".split(),
)

_DROPPED = frozenset({"device", "pin_memory"})
# Families whose ops take 0-d CPU tensors for numbers, as TensorIterator does.
_SCALAR_FAMILIES = frozenset(
    {"pointwise", "comparison", "ternary", "special", "foreach", "optimizer", "activation"}
)
_SCALAR_OPS = frozenset(
    f"aten.{name}"
    for name in (
        "fill.Tensor index_put.default _index_put_impl.default masked_fill.Tensor where.self "
        "index_fill.int_Tensor lerp.Tensor copy.default floor_divide.default"
    ).split()
)
# Index tensors may live on the CPU, as on CUDA.
_HOST_OPS = frozenset(
    {"aten.index.Tensor", "aten.index_put.default", "aten._index_put_impl.default"}
)
# Integers that are run-time inputs: distances and places in a tensor, which follow no size of it.
_PLACES = frozenset(
    {
        ("aten::roll", "shifts"),
        ("aten::select_backward", "index"),
        ("aten::slice_backward", "start"),
        ("aten::slice_backward", "end"),
    }
)
# Integers that are run-time inputs as numbers are: a mask over a cache that grows has another
# diagonal in each step.
_DIAGONALS = frozenset((f"aten::{op}", "diagonal") for op in ("tril", "tril_", "triu", "triu_"))
# Numbers that hardly ever change are constants of the programs until they do. As run-time inputs,
# each at a place of its own, they would make each layer's normalisation another kernel.
_STEADY = frozenset({"diagonal", "eps", "momentum"})
_TINY = math.ulp(0.0)
_HUGE = sys.float_info.max
# What PyTorch's kernels ask of number arguments: the least and the most that they take, or the
# argument that is the most.
_BOUNDS: dict[str, dict[str, tuple[float, float | str]]] = {
    **dict.fromkeys(
        ("bernoulli_.float", "bernoulli.p", "native_dropout.default"), {"p": (0.0, 1.0)}
    ),
    **dict.fromkeys(
        (
            *("normal_.default", "normal.Tensor_float", "normal.float_float"),
            *("normal_functional.default", "normal.out"),
        ),
        {"std": (0.0, math.inf)},
    ),
    "uniform_.default": {"from": (-math.inf, "to")},
    "exponential_.default": {"lambd": (_TINY, math.inf)},
    "geometric_.default": {"p": (_TINY, math.nextafter(1.0, 0.0))},
    "log_normal_.default": {"std": (_TINY, math.inf)},
    "cauchy_.default": {"sigma": (_TINY, math.inf)},
    **dict.fromkeys(("renorm.default", "renorm_.default"), {"maxnorm": (0.0, math.inf)}),
    **dict.fromkeys(
        ("histc.default", "histc.out"), {"min": (-_HUGE, "max"), "max": (-_HUGE, _HUGE)}
    ),
    # Refused where they are given the result of an in-place op.
    "elu_backward.default": {"alpha": (0.0, math.inf)},
    "leaky_relu_backward.default": {"negative_slope": (0.0, math.inf)},
    **dict.fromkeys(("celu.default", "celu_.default"), {"alpha": (_TINY, math.inf)}),
    **dict.fromkeys(("softshrink.default", "softshrink.out"), {"lambd": (0.0, math.inf)}),
    **dict.fromkeys(("smooth_l1_loss.default", "smooth_l1_loss.out"), {"beta": (0.0, math.inf)}),
    **dict.fromkeys(("huber_loss.default", "huber_loss.out"), {"delta": (_TINY, math.inf)}),
    "rrelu_with_noise.default": {"lower": (-math.inf, "upper")},
    "rrelu_with_noise_.default": {"lower": (-math.inf, "upper")},
}
_PRECISION_FAMILIES = frozenset(
    {"matmul", "convolution", "attention", "linalg", "distance", "rnn", "grouped_mm", "int4"}
)


def policy_of(op: torch._ops.OpOverload, argument: Any) -> int:
    """The treatment of an argument, one of the constants above."""
    if (op._schema.name, argument.name) in _PLACES:
        return INTEGERS
    if (op._schema.name, argument.name) in _DIAGONALS:
        return NUMBER
    kind = str(argument.real_type)
    if "Tensor" in kind:
        return TENSOR_LIST if "List" in kind else TENSOR
    if "Generator" in kind:
        return GENERATOR
    if argument.name in _DROPPED or "Device" in kind:
        return DROP
    if kind in ("number", "float", "Optional[number]", "Optional[float]"):
        return NUMBER
    if kind == "List[number]":
        return NUMBER_LIST
    return STATIC


def _returns(op: torch._ops.OpOverload) -> list[int] | None:
    """Codes of the returns, or None where one cannot be recorded."""
    arguments = op._schema.arguments
    codes = []
    for r in op._schema.returns:
        kind = str(r.type)
        if r.alias_info and r.alias_info.is_write:
            before = r.alias_info.before_set
            codes.append(
                next(
                    i
                    for i, a in enumerate(arguments)
                    if a.alias_info and a.alias_info.before_set == before
                )
            )
        elif kind == "Tensor":
            codes.append(-1)
        elif kind == "List[Tensor]":
            codes.append(-2)
        elif kind == "int":
            codes.append(-3)
        else:
            return None
    return codes


def takes_scalars(op: torch._ops.OpOverload, entry: Lowering | None) -> bool:
    """Return whether 0-d CPU tensors may stand among the operands."""
    if entry is not None and (entry.family in _SCALAR_FAMILIES or entry.op in _SCALAR_OPS):
        return True
    return torch.Tag.pointwise in op.tags


def fills(op: torch._ops.OpOverload) -> bool:
    """Return whether an op stores a number, of which True is 1."""
    return overload_name(op) in ("aten.fill_.Scalar", "aten.fill_.Tensor")


def _has_products(entry: Lowering | None) -> bool:
    """Return whether the float32 matmul precision may decide what an op computes."""
    if entry is None:
        return False
    # Ops of other packages stand for whole graphs.
    return entry.family in _PRECISION_FAMILIES or not entry.op.startswith(("aten.", "tpu."))


def alike(values: Sequence[Any]) -> bool:
    """Return whether a list holds one number several times; the extension then lifts it once."""
    kinds = {type(v) for v in values}
    if len(values) < 2 or not (kinds == {int} or kinds == {float}):
        return False
    return len({struct.pack("d", v) if isinstance(v, float) else v for v in values}) == 1


def overload(name: str, overload_name: str) -> torch._ops.OpOverload:
    """The overload object of a qualified name (``"aten::add"``, ``"Tensor"``)."""
    namespace, packet = name.split("::")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload_name or "default")


@functools.cache
def bounds(op: torch._ops.OpOverload) -> list[tuple[int, float, float, int]]:
    """Bounds of numbers: position, least, most, and the argument that is the most or -1."""
    asked = _BOUNDS.get(overload_name(op).removeprefix("aten."), {})
    places = {a.name: i for i, a in enumerate(op._schema.arguments)}
    return [
        (places[name], least, math.inf, places[most])
        if isinstance(most, str)
        else (places[name], least, most, -1)
        for name, (least, most) in asked.items()
    ]


def describe(name: str, overload_name_: str) -> dict[str, Any]:
    """Answer the extension's question about an overload; called once per overload."""
    op = overload(name, overload_name_)
    arguments = op._schema.arguments
    written = set(written_arguments(op))
    entry = lowering_of(op)
    returns = _returns(op)
    handler = data_dependent.handler_of(op) or fastpaths.handler_of(op) or ctc.handler_of(op)
    decomposed = False
    if handler is None and entry is None:
        decomposed = returns is not None and decomposition_of(op) is not None
        if not decomposed:
            handler = fallback.run_on_cpu
    if returns is None and handler is None:
        handler = fallback.run_on_cpu
    static = entry.static if entry else frozenset()
    policies = [policy_of(op, a) for a in arguments]
    return {
        "op": op,
        "policies": policies,
        # A decomposition is traced with its numbers, so they are part of the signature.
        "compiled_in": [decomposed or a.name in static for a in arguments],
        "steady": [a.name in _STEADY for a in arguments],
        "writes": [a.name in written for a in arguments],
        "write_only": is_out_variant(op) or overload_name(op) in OVERWRITING,
        "returns": returns or [],
        "bounds": bounds(op),
        "random": bool(entry and entry.random) or (decomposed and meta.is_random(op)),
        "chance": entry.chance[0] if entry and entry.chance else -1,
        "scalar_operands": takes_scalars(op, entry),
        "host_operands": bool(entry and entry.op in _HOST_OPS),
        "jax_settings": bool(entry and entry.identity),
        "precision": decomposed or _has_products(entry),
        "wide_numbers": overload_name(op) == "tpu.arange_.default",
        "divides": suspicions.divides(op),
        "fills": fills(op),
        "window": windows.has_window(op),
        "checks": checked.may_check(entry, decomposed),
        "handler": handler,
    }
