"""The recorder's cold path: what a call of a new signature produces, and how it is lowered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tpu_core import _C
from tpu_core.dtypes import code_of_dtype, dtype_of_code, to_numpy_dtype
from tpu_core.lowering.implementations import choices
from tpu_core.lowering.precision import precision_name
from tpu_core.lowering.registry import Lowering
from tpu_core.lowering.views import Access
from tpu_core.pjrt import jax_settings
from tpu_core.pjrt.jax_settings import JaxSettings
from tpu_core.recorder import (
    checked,
    compute,
    data_dependent,
    decompose,
    fallback,
    overlapping_lists,
    plan,
    trial,
    windows,
)
from tpu_core.recorder.dynamic_arguments import sizes_of
from tpu_core.recorder.error_parity import Refused
from tpu_core.recorder.functional_variants import (
    fill_and_mutate,
    fills_and_mutates,
    functional,
    is_out_variant,
    lowering_of,
    overload_name,
    written_arguments,
)
from tpu_core.recorder.meta import MetaTensors, is_random, run_meta
from tpu_core.recorder.template import aval_of, template_of

RECORD, PYTHON, RESIZE = (_C.ENUMS["Signature"][name] for name in ("RECORD", "PYTHON", "RESIZE"))


def access_of(description: tuple[Any, ...]) -> Access:
    """An `Access` from the extension's tuple, whose dtypes are ``c10::ScalarType`` codes."""
    form, base_dtype, base_sizes, base_strides, dtype, sizes, strides, offset, dims, over, chain = (
        description
    )
    return Access(
        form,
        to_numpy_dtype(dtype_of_code(base_dtype)),
        base_sizes,
        base_strides,
        to_numpy_dtype(dtype_of_code(dtype)),
        sizes,
        strides,
        offset,
        dims,
        over,
        chain,
    )


def _geometry(t: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    to_numpy_dtype(t.dtype)
    return code_of_dtype(t.dtype), tuple(t.size()), tuple(t.stride())


@dataclass
class _Results:
    """New results of a call, as its meta function describes them.

    Attributes:
        geometry: Of each tensor, dtype code, sizes and strides; None for an undefined one.
        avals: Shapes and dtypes, as the lowering or graph returns them.
        lists: Lengths of the lists among the results.
        constants: Integers, which the meta function knows.
        not_computed: Positions of the constants among the results: no output of the node.
    """

    geometry: list[Any] = field(default_factory=list)
    avals: list[Any] = field(default_factory=list)
    lists: list[int] = field(default_factory=list)
    constants: list[int] = field(default_factory=list)
    not_computed: set[int] = field(default_factory=set)


def _results(op: torch._ops.OpOverload, result: Any, has_lowering: bool) -> _Results:
    returns = result if isinstance(result, (tuple, list)) else (result,)
    if len(op._schema.returns) == 1 and isinstance(result, list):
        returns = (result,)
    found = _Results()
    for r, schema in zip(returns, op._schema.returns):
        if schema.alias_info and schema.alias_info.is_write:
            continue
        if isinstance(r, int) and not isinstance(r, bool):
            if has_lowering:  # it returns None there; a graph has no number among its results
                found.not_computed.add(len(found.geometry) + len(found.constants))
                found.avals.append(None)
            found.constants.append(r)
            continue
        found.avals.append(aval_of(r))
        if isinstance(r, (list, tuple)):
            found.lists.append(len(r))
            found.geometry.extend(_geometry(t) for t in r)
        else:
            found.geometry.append(_geometry(r) if isinstance(r, torch.Tensor) else None)
    return found


def new_signature(
    op: torch._ops.OpOverload,
    args: tuple[Any, ...],
    reads: Sequence[tuple[Any, ...]],
    writes: Sequence[tuple[Any, ...]],
    packs: Sequence[int],
) -> tuple[Any, ...]:
    """Answer the extension about a signature it has not seen.

    Returns:
        (kind, plan or handler, geometry of each new output, lengths of list returns, int returns,
        identity, whether it is checked): the identity is hashed where op and arguments do not say
        what is computed.
    """
    entry = lowering_of(op)
    if (handler := _handler(op, args, entry)) is not None:
        return PYTHON, handler, (), (), ()
    try:
        result, twins = run_meta(op, args)
    except Refused as refused:
        # Not the exception itself, whose frames hold the operands.
        return PYTHON, Refused(refused.target).run, (), (), ()
    except NotImplementedError:
        if entry is None:
            return PYTHON, fallback.run_on_cpu, (), (), ()
        if not all(r.alias_info and r.alias_info.is_write for r in op._schema.returns):
            raise
        # An in-place op without a meta function makes no output whose shape one would have to know.
        convert = MetaTensors()
        result, twins = None, [convert(a) for a in args]
        if is_out_variant(op):
            _resize_twins(op, args, twins)
    if overlapping_lists.items_depend(op, args):
        return PYTHON, overlapping_lists.call_each, (), (), ()
    if is_out_variant(op) and (resize := _resize(op, args, twins)) is not None:
        return RESIZE, resize, (), (), ()

    found = _results(op, result, entry is not None)
    names = set(written_arguments(op))
    # A functional overload returns its own results, then the new value of each mutated argument.
    mutated = [
        aval_of(twin)
        for a, twin in zip(op._schema.arguments, twins)
        if a.name in names and twin is not None
    ]
    try:
        computed = _compute(op, args, entry, twins, (*found.avals, *mutated))
    except decompose.UndecomposedOp:
        return PYTHON, fallback.run_on_cpu, (), (), ()
    outputs = len(found.geometry) + len(writes) + len(found.not_computed)
    settings = JaxSettings.in_force() if entry is not None and entry.identity else None
    identity = _identity(entry, args, settings)
    node = plan.NodePlan(
        overload_name(op),
        template_of(op, args, entry),
        [access_of(r) for r in reads],
        [access_of(w) for w in writes],
        computed,
        [i for i in range(outputs) if i not in found.not_computed],
        is_random(op) if entry is None else bool(entry.draws(args, {})),
        precision_name(),
        choices(),
        sizes_of(op),
        identity,
        torch.get_default_dtype(),
        settings,
    )
    if not trial.lowers(node, packs):
        return PYTHON, Refused(op).run, (), (), ()
    node.checks = checked.level_of(node)
    return RECORD, node, found.geometry, found.lists, found.constants, identity, node.checks > 0


def _handler(
    op: torch._ops.OpOverload, args: tuple[Any, ...], entry: Lowering | None
) -> Callable[..., Any] | None:
    """A function that runs calls of a signature in place of a recording, or None."""
    if (dynamic := data_dependent.needs_python(op, args)) is not None:
        return dynamic
    if any(isinstance(a, int) and a >= 1 << 63 for a in args):
        return Refused(op).run  # no number travels in 64 bits without a sign
    if windows.has_window(op) and not windows.fits(args):
        return Refused(op).run
    return fill_and_mutate if entry is not None and fills_and_mutates(op) else None


def _compute(
    op: torch._ops.OpOverload,
    args: tuple[Any, ...],
    entry: Lowering | None,
    twins: Sequence[Any],
    out: tuple[Any, ...],
) -> compute.Compute:
    """The lowering of a call, or the graph that its decomposition makes.

    Raises:
        UndecomposedOp: It has neither.
    """
    if entry is not None:
        contiguous = tuple(x.is_contiguous() for x in args if isinstance(x, torch.Tensor))
        return compute.LoweringCompute(entry, out, contiguous)
    target = functional(op)
    assert target is not None
    arguments = zip(op._schema.arguments, twins)
    return compute.GraphCompute(
        target, tuple(_on_meta(t) for a, t in arguments if not a.is_out), out
    )


def _identity(entry: Lowering | None, args: tuple[Any, ...], settings: JaxSettings | None) -> str:
    if entry is None:
        return ""
    if entry.identity is None:
        return entry.key_part()
    with jax_settings.as_recorded(settings):
        return entry.key_part(*(aval_of(a) if _holds_tensors(a) else a for a in args))


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensors, value))
    return isinstance(value, torch.Tensor)


def _on_meta(x: Any) -> Any:
    """A CPU tensor as a meta tensor."""
    if isinstance(x, torch.Tensor) and x.device.type == "cpu":
        return x.to("meta")
    return x


def _resize_twins(op: torch._ops.OpOverload, args: tuple[Any, ...], twins: list[Any]) -> None:
    """Give the twins of ``out=`` tensors the shapes of the functional overload's results."""
    schema = op._schema.arguments
    if (target := functional(op)) is None:
        return
    try:
        result, _ = run_meta(target, [x for a, x in zip(schema, args) if not a.is_out])
    except NotImplementedError:
        return
    results = result if isinstance(result, (tuple, list)) else (result,)
    for twin, made in zip((t for a, t in zip(schema, twins) if a.is_out), results):
        twin.resize_(made.shape)


def _resize(op: torch._ops.OpOverload, args: tuple[Any, ...], twins: list[Any]) -> Any:
    """A function that resizes the ``out=`` tensors as PyTorch does, or None where they fit."""
    schema = op._schema.arguments
    outs = [i for i, a in enumerate(schema) if a.is_out and isinstance(args[i], torch.Tensor)]
    changed = [i for i in outs if args[i].shape != twins[i].shape]
    if not changed:
        return None
    geometry = {i: (twins[i].shape, twins[i].stride()) for i in outs}
    # A resized tensor has the strides of a new one; meta functions in Python of ``out=`` overloads
    # leave it contiguous.
    if (target := functional(op)) is not None:
        result, _ = run_meta(target, [x for a, x in zip(schema, args) if not a.is_out])
        results = result if isinstance(result, (tuple, list)) else (result,)
        geometry = {i: (t.shape, t.stride()) for i, t in zip(outs, results)}

    def resize(actual: tuple[Any, ...]) -> None:
        for i in changed:
            shape, strides = geometry[i]
            actual[i].resize_(shape)
            if actual[i].stride() != strides:
                actual[i].as_strided_(shape, strides)

    return resize
