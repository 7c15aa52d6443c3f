"""``_foreach_*`` ops: the per-tensor lowering, once a tensor.

The table is derived from PyTorch's schemas: lists (of tensors or numbers) are walked together, all
other arguments are shared. An op whose per-tensor overload has no lowering gets none either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tpu_core.lowering import arithmetic, creation, matmul, pointwise, reduction, special, ternary
from tpu_core.lowering.evaluate import call_lowering
from tpu_core.lowering.registry import REGISTRY, Lowering, register

# Imported for their entries, which are looked up below.
_SOURCES = (arithmetic, creation, matmul, pointwise, reduction, special, ternary)

# Per-tensor overloads that do not follow from the names, without namespace.
_EXCEPTIONS = {
    "maximum.List": "maximum.default",
    "minimum.List": "minimum.default",
    "maximum.Scalar": "clamp_min.default",
    "minimum.Scalar": "clamp_max.default",
    "clamp_min.Scalar": "clamp_min.default",
    "clamp_max.Scalar": "clamp_max.default",
    "addcmul.Scalar": "addcmul.default",
    "addcmul.Tensor": "addcmul.default",
    "addcdiv.Scalar": "addcdiv.default",
    "addcdiv.Tensor": "addcdiv.default",
    "pow.List": "pow.Tensor_Tensor",
    "pow.Scalar": "pow.Tensor_Scalar",
    "pow.ScalarAndTensor": "pow.Scalar",
    "norm.Scalar": "linalg_vector_norm.default",
    "powsum.Scalar": "linalg__powsum.default",
}


def _per_tensor(name: str, overload: str) -> str:
    overload = "Scalar" if overload == "ScalarList" else overload
    target = _EXCEPTIONS.get(f"{name}.{overload}")
    if target is None:
        target = f"{name}.{'Tensor' if overload == 'List' else overload}"
    return f"aten.{target}"


def _functional_overloads() -> Iterator[torch._ops.OpOverload]:
    for qualified in sorted(torch._C._dispatch_get_all_op_names()):
        if qualified.startswith("aten::_foreach_"):
            name, _, overload = qualified.removeprefix("aten::").partition(".")
            op = getattr(getattr(torch.ops.aten, name), overload or "default")
            if not op._schema.is_mutable:
                yield op


def _names(op: torch._ops.OpOverload) -> list[str]:
    return [a.name for a in op._schema.arguments if a.name not in Lowering.DROPPED_ARGUMENTS]


def _renamed(op: torch._ops.OpOverload, target: torch._ops.OpOverload) -> dict[str, str]:
    """Argument names of the foreach op, and what the per-tensor op calls them."""
    names = _names(target)
    return {
        name: name if name in names else names[position] for position, name in enumerate(_names(op))
    }


def _applied(op: torch._ops.OpOverload, entry: Lowering) -> Callable[..., list[Any]]:
    target = _overload(entry.op)
    renamed = _renamed(op, target)
    keywords = {a.name for a in target._schema.arguments if a.kwarg_only}
    # Numbers that come as one tensor of them (addcmul's ``scalars``).
    numbers = {a.name for a in target._schema.arguments if str(a.type) == "number"}
    types = {a.name: str(a.type) for a in op._schema.arguments}
    packed = {n for n, new in renamed.items() if types[n] == "Tensor" and new in numbers}

    def apply(*args: Any, out: Any, **kwargs: Any) -> list[Any]:
        given = {**dict(zip(renamed, args)), **kwargs}
        results = []
        for i, expected in enumerate(out[0]):
            one = {
                renamed[n]: v[i] if isinstance(v, (list, tuple)) or n in packed else v
                for n, v in given.items()
            }
            # The positional arguments of the target are those that its schema has first.
            positional = tuple(v for n, v in one.items() if n not in keywords)
            named = {n: v for n, v in one.items() if n in keywords}
            results.extend(call_lowering(entry, positional, named, (expected,)))
        return results

    return apply


def _overload(op: str) -> torch._ops.OpOverload:
    _, name, overload = op.split(".")
    return getattr(getattr(torch.ops.aten, name), overload)


def _register_all() -> None:
    for op in _functional_overloads():
        _, name, overload = str(op).split(".")
        entry = REGISTRY.get(_per_tensor(name.removeprefix("_foreach_"), overload))
        if entry is None:
            continue
        renamed = _renamed(op, _overload(entry.op))
        static = tuple(n for n, new in renamed.items() if new in entry.static)
        register(str(op), _applied(op, entry), static=static)


_register_all()
