"""Functional variants: the lowering that computes an in-place, ``out=`` or mutating overload.

Only functional overloads have lowerings. The others are matched to one by name and by the rest of
their arguments, so that nothing is written twice.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tpu_core.lowering.registry import REGISTRY, Lowering

# Overloads that mutate arguments which their schema does not mark: (registry entry, arguments). The
# entries under ``tpu`` stand for functional overloads that PyTorch does not have.
_STATISTICS = ("running_mean", "running_var")
UNMARKED_MUTATION: dict[str, tuple[str, tuple[str, ...]]] = {
    "aten.native_batch_norm.default": (
        "aten._native_batch_norm_legit_functional.default",
        _STATISTICS,
    ),
    "aten.batch_norm_gather_stats_with_counts.default": (
        "tpu.batch_norm_gather_stats_with_counts.default",
        _STATISTICS,
    ),
    "aten.batch_norm_update_stats.default": ("tpu.batch_norm_update_stats.default", _STATISTICS),
}

# Overwritten without being read: their old value is no input of the program.
OVERWRITING = frozenset(
    f"aten.{name}"
    for name in (
        "copy_.default fill_.Scalar fill_.Tensor zero_.default normal_.default uniform_.default "
        "random_.default random_.from random_.to bernoulli_.float bernoulli_.Tensor "
        "exponential_.default geometric_.default log_normal_.default cauchy_.default "
        "_foreach_zero_.default"
    ).split()
) | {"tpu.arange_.default"}


# Arguments of a factory that an ``out=`` tensor decides.
_TENSOR_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})


@functools.cache
def overload_name(op: torch._ops.OpOverload) -> str:
    """``"aten.add.Tensor"``."""
    return str(op)


@functools.cache
def written_arguments(op: torch._ops.OpOverload) -> tuple[str, ...]:
    """Names of the arguments that the overload mutates, in schema order."""
    unmarked = UNMARKED_MUTATION.get(overload_name(op))
    if unmarked:
        return unmarked[1]
    arguments = op._schema.arguments
    return tuple(a.name for a in arguments if a.alias_info and a.alias_info.is_write)


@functools.cache
def is_out_variant(op: torch._ops.OpOverload) -> bool:
    """Return whether the mutated arguments are ``out=`` arguments."""
    return any(a.is_out for a in op._schema.arguments)


def fills_and_mutates(op: torch._ops.OpOverload) -> bool:
    """Return whether an overload has ``out=`` arguments and mutates others."""
    outs = tuple(a.name for a in op._schema.arguments if a.is_out)
    return bool(outs) and outs != written_arguments(op)


def fill_and_mutate(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Call such an overload by its functional one: results, then values of mutated arguments."""
    target = functional(op)
    assert target is not None
    schema, written = op._schema.arguments, written_arguments(op)
    outs = [x for a, x in zip(schema, args) if a.is_out]
    mutated = [x for a, x in zip(schema, args) if a.name in written and not a.is_out]
    results = target(*(x for a, x in zip(schema, args) if not a.is_out))
    for t, result in zip((*outs, *(x for x in mutated if x is not None)), results):
        if t.dtype != result.dtype:
            raise RuntimeError(
                f"Expected out tensor to have dtype {result.dtype}, but got {t.dtype} instead"
            )
        if result.shape == (0,):
            continue  # statistics of a batch norm in evaluation: the CPU leaves out= as it was
        if t.shape != result.shape:
            t.resize_(result.shape)
        t.copy_(result)
    return tuple(outs)


def _key(op: torch._ops.OpOverload, without: frozenset[str] = frozenset()) -> tuple[Any, ...]:
    return tuple((a.name, str(a.real_type)) for a in op._schema.arguments if a.name not in without)


@functools.cache
def functional(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The functional overload that computes ``op``: itself, or its counterpart without mutation.

    Example:
        >>> functional(torch.ops.aten.add_.Tensor)
        <OpOverload(op='aten.add', overload='Tensor')>
    """
    name = overload_name(op)
    if name in UNMARKED_MUTATION:
        entry = UNMARKED_MUTATION[name][0]
        return overload_of(entry) if entry.startswith("aten.") else None
    if not written_arguments(op):
        return op
    namespace, packet_name, _ = name.split(".")
    library = getattr(torch.ops, namespace)
    outs = frozenset(a.name for a in op._schema.arguments if a.is_out)
    if outs:
        outs |= _TENSOR_OPTIONS
    base = packet_name if outs else packet_name.removesuffix("_")
    wanted = _key(op, outs)
    matches = []
    for candidate in (base, f"{base}_functional"):
        packet = getattr(library, candidate, None)
        if packet is None:
            continue
        for overload in packet.overloads():
            other = getattr(packet, overload)
            if not written_arguments(other) and _key(other, outs & _TENSOR_OPTIONS) == wanted:
                matches.append(other)
    matches.sort(key=lambda m: overload_name(m) not in REGISTRY)
    return matches[0] if matches else None


def overload_of(name: str) -> torch._ops.OpOverload:
    """The overload of a name such as ``"aten.add.Tensor"``."""
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def lowering_of(op: torch._ops.OpOverload) -> Lowering | None:
    """The registry's entry that computes ``op``, whatever its variant."""
    name = overload_name(op)
    if name == "tpu.arange_.default":
        return REGISTRY.get("tpu.arange.default")
    if name in UNMARKED_MUTATION:
        return REGISTRY.get(UNMARKED_MUTATION[name][0])
    target = functional(op)
    return REGISTRY.get(overload_name(target)) if target is not None else None


def recorded_overloads() -> list[str]:
    """Qualified names (``"aten::add.Tensor"``) of every overload that a lowering serves.

    Overloads with a CompositeImplicitAutograd kernel are left out unless they have a derivative
    formula, or none on the CPU either: a kernel for the device would take their gradient away.
    """
    names = ["tpu::arange_"]
    packets: dict[str, Any] = {}
    for entry in REGISTRY:
        namespace, packet, _ = entry.op.split(".")
        if namespace == "aten":
            for candidate in (packet, f"{packet}_", packet.removesuffix("_functional") + "_"):
                packets.setdefault(candidate, None)
    packets.update(dict.fromkeys(name.split(".")[1] for name in UNMARKED_MUTATION))
    for packet_name in packets:
        overloads: Any = getattr(torch.ops.aten, packet_name, None)
        if overloads is None:
            continue
        for overload in overloads.overloads():
            op = getattr(overloads, overload)
            if _is_ours(op) and lowering_of(op) is not None:
                names.append(op.name())
    return [*names, *HOST_FACTORIES]


@functools.cache
def _dispatcher_names() -> frozenset[str]:
    return frozenset(torch._C._dispatch_get_all_op_names())


# Factories whose composite kernel calls a CPU-only one.
HOST_FACTORIES = ("aten::kaiser_window", "aten::kaiser_window.periodic", "aten::kaiser_window.beta")

# Kernels of their own in the extension.
_NATIVE = frozenset(
    "aten::copy_ aten::empty.memory_format aten::empty_strided aten::as_strided aten::view "
    "aten::_reshape_alias aten::unfold aten::set_.source_Storage "
    "aten::set_.source_Storage_storage_offset aten::set_.source_Tensor aten::set_ aten::resize_ "
    "aten::_copy_from aten::_local_scalar_dense aten::equal aten::is_set_to aten::arange.start_out "
    "aten::record_stream aten::_fused_sdp_choice aten::_has_compatible_shallow_copy_type".split()
)


# Composites with a derivative formula, which an override for the device keeps.
_DIFFERENTIABLE = frozenset({"aten::_fused_rms_norm"})
# Composites for which the CPU has a kernel and no derivative: one op where the composite is seven.
# PyTorch calls them where no graph is being built.
_WITHOUT_DERIVATIVE = frozenset({"aten::silu_backward", "aten::mish_backward"})


def has_own_kernel(op: torch._ops.OpOverload) -> bool:
    """Return whether the extension has a kernel of the overload, which records no op of that
    name.
    """
    return op.name() in _NATIVE


def _is_ours(op: torch._ops.OpOverload) -> bool:
    name = op.name()
    # Overloads of TorchScript alone (``aten::add.int``) are not in the dispatcher.
    if (
        name not in _dispatcher_names()
        or name in _NATIVE
        or any(str(a.type) == "Dict" for a in op._schema.arguments)
    ):
        return False
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    if is_composite and name not in _DIFFERENTIABLE | _WITHOUT_DERIVATIVE:
        return False
    # Factories, views and aliases keep PyTorch's composite kernels: they allocate or reinterpret.
    if not any("Tensor" in str(a.type) for a in op._schema.arguments):
        return False
    return (
        not any(r.alias_info and not r.alias_info.is_write for r in op._schema.returns)
        and overload_name(op) not in _KEPT_COMPOSITE
    )


# Served by allocation and copies, which share memory where they can; assertions read on the host.
_KEPT_COMPOSITE = frozenset(
    f"aten.{name}"
    for name in (
        "clone.default _to_copy.default empty_like.default zeros_like.default ones_like.default "
        "full_like.default new_zeros.default new_ones.default new_full.default new_empty.default "
        "new_empty_strided.default rand_like.default randn_like.default randint_like.default "
        "arange.out contiguous.default lift_fresh.default detach.default alias.default "
        # Their composites check more than the lists' shapes, requires_grad for one.
        "unbind_copy.int_out split_copy.Tensor_out "
        "_assert_async.default _assert_async.msg _assert_tensor_metadata.default "
        "_linalg_check_errors.default"
    ).split()
)
