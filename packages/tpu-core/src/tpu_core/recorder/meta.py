"""Output shapes, strides and dtypes from PyTorch's meta functions, which also raise PyTorch's
errors.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tpu_core import _C, interruptible, torch_compat
from tpu_core.recorder import memory_formats, patterns
from tpu_core.recorder.error_parity import MetaReplicas, check, doubt
from tpu_core.recorder.functional_variants import overload_name
from tpu_core.recorder.meta_functions import META_FUNCTIONS
from tpu_core.recorder.suspicions import passed, suspicious

torch_compat.complete_meta_functions()
memory_formats.name_device_of_meta()
# Overloads without a meta function whose outputs are those of another overload.
_LIKE = {
    "aten.convolution_overrideable.default": torch.ops.aten.convolution.default,
}


# Written in Python, these meta functions refuse a 0-d CPU tensor in place of a number.
_HOST_VALUE = frozenset(
    f"aten.{name}"
    for name in (
        "masked_fill.Tensor masked_fill_.Tensor index_fill.int_Tensor index_fill_.int_Tensor"
    ).split()
)


# What `torch._check` imports, and sympy with it: half a second.
_CHECKS = "torch.fx.experimental.symbolic_shapes"


def _checks_in_python(op: torch._ops.OpOverload) -> bool:
    table = torch._decomp.global_decomposition_table["meta"]
    return op in table and not op._schema.is_mutable


def _is_broken_import(error: Exception) -> bool:
    """Return whether it says that a module is not there as a whole, and nothing about a call."""
    if isinstance(error, AttributeError):
        return isinstance(error.obj, ModuleType)
    return isinstance(error, ImportError)


def is_random(op: torch._ops.OpOverload) -> bool:
    """Return whether the overload draws random numbers."""
    return torch.Tag.nondeterministic_seeded in op.tags


class MetaTensors(MetaReplicas):
    """Meta twins; a 0-d CPU tensor, which may stand for a number, stays what it is."""

    def __init__(self) -> None:
        super().__init__("meta")

    def _of_host(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cpu" and x.dim() == 0:
            return x.detach()
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")


# The kernel that a structured overload has on every backend runs the checks and the geometry of
# PyTorch's own C++ and hands over to the out= overload. The key of a backend that nobody has
# reaches it; meta functions written in Python shadow it under the meta key, with other words and
# fewer checks.
_ANY_BACKEND = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse2)


class _ShapeOnlyMode(TorchDispatchMode):
    """Leaves the ``out=`` overload out.

    Under the meta key it may be a reference in Python, whose first call imports Dynamo: a second.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it means to import it

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        outs = [kwargs[a.name] for a in func._schema.arguments if a.is_out]
        if not outs:
            return func(*args, **kwargs)
        return outs[0] if len(outs) == 1 else tuple(outs)


# Structured overloads whose ``out=`` overload checks no more than the kernel of the geometry.
_CHECKED = frozenset(
    f"aten.{name}"
    for name in (
        "mm.default bmm.default sum.dim_IntList mean.dim amax.default amin.default cumsum.default "
        "_softmax.default _softmax_backward_data.default _log_softmax.default "
        "_log_softmax_backward_data.default"
    ).split()
)
# As well, where this argument has a dtype that class indices have: in torch 2.11 the kernel of the
# geometry takes any.
_TARGETS = {"aten.nll_loss_forward.default": 1, "aten.nll_loss_backward.default": 2}


def _is_checked(op: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    """Return whether the ``out=`` overload has nothing to complain of once the geometry is
    known.
    """
    if overload_name(op) in _CHECKED:
        return True
    if (place := _TARGETS.get(overload_name(op))) is not None:
        return args[place].dtype in (torch.int64, torch.uint8)
    if overload_name(op) == "aten.addmm.default":
        bias, _, matrix = args[:3]
        return bias.dim() == 1 and bias.size(0) in (1, matrix.size(-1))
    return torch.Tag.pointwise in op.tags


@functools.cache
def _has_structured_kernel(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        name, "CompositeExplicitAutogradNonFunctional"
    )


def _writes_nothing(op: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    """Return whether an index is empty: the structured kernel's meta function selects row 0 of
    it.
    """
    if op._schema.name.rstrip("_") not in ("aten::index_add", "aten::index_reduce"):
        return False
    x, _, index, source = args[:4]
    return 0 in (index.numel(), x.numel(), source.numel())


def _wrap(argument: torch._C.Argument, value: Any) -> Any:
    """``value``, or what a number becomes where the schema wants a tensor: ``x + 2``."""
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        return value.to("meta")  # a 0-d operand; the first one's device is taken for all
    is_number = isinstance(value, (bool, int, float, complex))
    return _C.wrapped_number(value) if is_number and "Tensor" in str(argument.type) else value


def distinct_items(op: torch._ops.OpOverload, args: Sequence[Any]) -> list[int] | None:
    """For a foreach op, the first item that has the geometry and dtypes of each item of its lists.

    An optimizer's lists have an item for each parameter, of few distinct shapes: meta functions are
    asked about those alone.

    Args:
        op: Any overload.
        args: Its positional arguments.

    Returns:
        An index for each item; None where the op is none that treats items alone, or where lengths
        differ.
    """
    lists = [a for a in args if isinstance(a, (list, tuple))]
    if not op._schema.name.startswith("aten::_foreach_") or len({len(a) for a in lists}) != 1:
        return None
    if any(isinstance(a, torch.Tensor) and a.dim() for a in args):  # one element an item
        return None
    first: dict[Any, int] = {}
    kinds = (tuple(map(_kind, items)) for items in zip(*lists))
    return [first.setdefault(kind, i) for i, kind in enumerate(kinds)]


def _kind(item: Any) -> Any:
    if not isinstance(item, torch.Tensor):
        return type(item)
    return item.device.type, item.dtype, item.size(), item.stride(), item.layout


def _of_each(
    target: Any, positional: Sequence[Any], keywords: dict[str, Any], kinds: list[int]
) -> Any:
    """Call ``target`` with one item of each kind; a result for every item."""
    items = sorted(set(kinds))
    chosen = [[a[i] for i in items] if isinstance(a, (list, tuple)) else a for a in positional]
    result = target(*chosen, **keywords)
    if not isinstance(result, (list, tuple)):
        return result
    place = {item: i for i, item in enumerate(items)}
    return [result[place[kind]] for kind in kinds]


def run_meta(op: torch._ops.OpOverload, args: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Run ``op`` on meta tensors.

    Returns:
        Its result, and the meta arguments (an ``out=`` one is resized by the call).

    Raises:
        Refused: PyTorch refuses these arguments on the CPU too, whose words users know.
        Exception: The meta function refuses an op that the CPU does not have.
    """
    schema = op._schema.arguments
    with _disable_current_modes(), torch.no_grad(), memory_formats.meta_of_cpu():
        convert = MetaTensors()
        twins = [convert(a) for a in args]
        if overload_name(op) in _HOST_VALUE:
            twins = [t.to("meta") if isinstance(t, torch.Tensor) else t for t in twins]
        call = [
            torch.device("meta")
            if a.name == "device"
            else None
            if a.name in ("generator", "pin_memory")
            else t
            for a, t in zip(schema, twins)
        ]
        target = _LIKE.get(overload_name(op), op)
        positional = [v for a, v in zip(schema, call) if not a.kwarg_only]
        keywords = {a.name: v for a, v in zip(schema, call) if a.kwarg_only}
        special, is_complete = META_FUNCTIONS.get(overload_name(op)), False
        if _CHECKS not in sys.modules and _checks_in_python(target):
            interruptible.import_whole(_CHECKS)
        try:
            if special:
                result = special(*call)
            elif (kinds := distinct_items(op, positional)) is not None:
                result = _of_each(target, positional, keywords, kinds)
            elif _has_structured_kernel(target.name()) and not _writes_nothing(op, args):
                wrapped = [*map(_wrap, target._schema.arguments, positional)]
                is_complete = _is_checked(op, args)
                with _ShapeOnlyMode() if is_complete else nullcontext():
                    result = target.redispatch(_ANY_BACKEND, *wrapped, **keywords)
            else:
                result = target(*positional, **keywords)
        except NotImplementedError:
            _check(op, target, args)
            raise
        except Exception as error:
            interruptible.pass_on(error)
            if not _is_broken_import(error):
                doubt(op, target, args)
            raise
        _check(op, target, args, is_complete)
        return memory_formats.as_on_cpu(op, twins, result), twins


def _check(
    op: torch._ops.OpOverload,
    target: torch._ops.OpOverload,
    args: Sequence[Any],
    is_complete: bool = False,
) -> None:
    """Try a call on the CPU where the meta function may have let a mistake pass."""
    if suspicious(op, args):
        check(op, target, args)
        passed(op, args)
    elif not is_complete and patterns.is_unlike_others(op, target, args):
        check(op, target, args)
        patterns.passed(op, args)
