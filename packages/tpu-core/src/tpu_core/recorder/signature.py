"""The recorder's cold path: what a call of a new signature produces, and how it is lowered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch
from torch.utils._pytree import tree_map

from tpu_core import _C
from tpu_core.lowering.dtypes import code_of_dtype, dtype_of_code, to_numpy_dtype
from tpu_core.lowering.evaluate import DROPPED_ARGUMENTS
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
)
from tpu_core.recorder.dynamic_arguments import sizes_of
from tpu_core.recorder.error_parity import Refused
from tpu_core.recorder.functional_variants import (
    OVERWRITING,
    fill_and_mutate,
    fills_and_mutates,
    functional,
    is_out_variant,
    lowering_of,
    overload_name,
    written_arguments,
)
from tpu_core.recorder.meta import MetaTensors, is_random, run_meta

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


def _aval(t: Any) -> Any:
    if isinstance(t, torch.Tensor):
        return jax.ShapeDtypeStruct(tuple(t.shape), to_numpy_dtype(t.dtype))
    if isinstance(t, (list, tuple)):
        return [_aval(x) for x in t]
    return None


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
    if (dynamic := data_dependent.needs_python(op, args)) is not None:
        return PYTHON, dynamic, (), (), ()
    if any(isinstance(a, int) and a >= 1 << 63 for a in args):
        return PYTHON, Refused(op).run, (), (), ()  # no number travels in 64 bits without a sign
    if entry is not None and fills_and_mutates(op):
        return PYTHON, fill_and_mutate, (), (), ()
    try:
        result, twins = run_meta(op, args)
    except Refused as refused:
        return PYTHON, refused.run, (), (), ()
    except NotImplementedError:
        if entry is None:
            return PYTHON, fallback.run_on_cpu, (), (), ()
        if not all(r.alias_info and r.alias_info.is_write for r in op._schema.returns):
            raise
        # An in-place op without a meta function makes no output whose shape one would have to know.
        result, twins = None, [tree_map(MetaTensors(), a) for a in args]
        if is_out_variant(op):
            _resize_twins(op, args, twins)
    if overlapping_lists.items_depend(op, args):
        return PYTHON, overlapping_lists.call_each, (), (), ()
    if is_out_variant(op) and (resize := _resize(op, args, twins)) is not None:
        return RESIZE, resize, (), (), ()

    returns = result if isinstance(result, (tuple, list)) else (result,)
    if len(op._schema.returns) == 1 and isinstance(result, list):
        returns = (result,)
    if not op._schema.returns:
        returns = ()
    fresh: list[Any] = []
    avals: list[Any] = []
    lists: list[int] = []
    constants: list[int] = []
    not_computed: set[int] = set()  # numbers that the meta function knows: no output of the node
    for r, schema in zip(returns, op._schema.returns):
        if schema.alias_info and schema.alias_info.is_write:
            continue
        avals.append(_aval(r))
        if isinstance(r, (list, tuple)):
            lists.append(len(r))
            fresh.extend(_geometry(t) for t in r)
        elif isinstance(r, torch.Tensor):
            fresh.append(_geometry(r))
        elif isinstance(r, int) and not isinstance(r, bool):
            not_computed.add(len(fresh) + len(constants))
            constants.append(r)
            if entry is None:  # a graph has no number among its results, a lowering None
                avals.pop()
        else:
            fresh.append(None)

    read_accesses = [access_of(r) for r in reads]
    write_accesses = [access_of(w) for w in writes]
    names = set(written_arguments(op))
    template = _template(op, args, entry, names)
    # A functional overload returns its own results, then the new value of each mutated argument.
    mutated = [
        _aval(twin)
        for a, twin in zip(op._schema.arguments, twins)
        if a.name in names and twin is not None
    ]
    count = len(fresh)
    total = count + len(write_accesses)
    out = (*avals, *mutated)
    random = bool(entry and entry.draws(args, {}))
    if entry is not None:
        contiguous = tuple(x.is_contiguous() for x in args if isinstance(x, torch.Tensor))
        computed: compute.Compute = compute.LoweringCompute(entry, out, contiguous)
    else:
        not_computed.clear()
        target = functional(op)
        assert target is not None
        outs = {a.name for a in op._schema.arguments if a.is_out}
        functional_args = tuple(
            _on_meta(t) for a, t in zip(op._schema.arguments, twins) if a.name not in outs
        )
        try:
            computed = compute.GraphCompute(target, functional_args, out)
        except decompose.UndecomposedOp:
            return PYTHON, fallback.run_on_cpu, (), (), ()
        random = is_random(op)
    settings = JaxSettings.in_force() if entry is not None and entry.identity else None
    identity = _identity(entry, args, settings)
    node = plan.NodePlan(
        overload_name(op),
        template,
        read_accesses,
        write_accesses,
        computed,
        [i for i in range(total + len(not_computed)) if i not in not_computed],
        random,
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
    return RECORD, node, fresh, lists, constants, identity, node.checks > 0


def _identity(entry: Lowering | None, args: tuple[Any, ...], settings: JaxSettings | None) -> str:
    if entry is None:
        return ""
    if entry.identity is None:
        return entry.key_part()
    with jax_settings.as_recorded(settings):
        return entry.key_part(*(_aval(a) if _holds_tensors(a) else a for a in args))


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


def _template(
    op: torch._ops.OpOverload, args: tuple[Any, ...], entry: Any, written: set[str]
) -> list[tuple[str, bool, Any]]:
    """The arguments with placeholders, walked in the order in which the extension walks them."""
    from tpu_core.recorder import op_schema

    overwrites = is_out_variant(op) or overload_name(op) in OVERWRITING
    static = entry.static if entry else None
    template: list[tuple[str, bool, Any]] = []
    index = 0
    scalars = op_schema.takes_scalars(op, entry)

    def tensor(t: Any, is_written: bool) -> Any:
        nonlocal index
        if not isinstance(t, torch.Tensor):  # a number that PyTorch had wrapped in a tensor
            return plan.Number() if isinstance(t, (int, float)) and not isinstance(t, bool) else t
        if t.device.type == "cpu" and t.dim() == 0 and scalars and not t.is_complex():
            return plan.Number(to_numpy_dtype(t.dtype))
        if is_written and overwrites:
            return plan.written(plan.Blank(_aval(t)))
        operand = plan.Operand(index)
        index += 1
        return plan.written(operand) if is_written else operand

    def number(value: Any, name: str) -> Any:
        lifted = static is not None and name not in static
        if lifted and isinstance(value, (int, float)) and not isinstance(value, bool):
            return plan.Number()
        return value

    for a, value in zip(op._schema.arguments, args):
        policy = op_schema.policy_of(op, a)
        name, keyword = a.name, a.kwarg_only
        if policy in (op_schema.DROP, op_schema.GENERATOR) or name in DROPPED_ARGUMENTS:
            continue
        if a.is_out:
            name = plan.hidden(name)
        is_written = a.name in written
        if value is None:
            held: Any = None
        elif policy == op_schema.TENSOR:
            held = tensor(value, is_written)
        elif policy == op_schema.TENSOR_LIST:
            held = [None if t is None else tensor(t, is_written) for t in value]
        elif policy == op_schema.NUMBER:
            held = number(value, a.name)
        elif policy == op_schema.INTEGERS:
            held = [plan.Number() for _ in value]
        elif policy == op_schema.NUMBER_LIST:
            lifted = entry is not None and a.name not in entry.static
            if lifted and op_schema.alike(value):
                held = plan.Repeated(len(value))
            else:
                held = [number(v, a.name) for v in value]
        elif str(a.real_type) in ("ScalarType", "Optional[ScalarType]") and isinstance(value, int):
            held = dtype_of_code(value)
        else:
            held = value
        template.append((name, keyword, held))
    return template
