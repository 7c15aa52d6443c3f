"""Meshes over a topology, and which axis of the mesh divides which dimension of a tensor.

A `Spec` has an item a dimension: the axis that divides it, several of them, or None. Rules map
names of parameters to specs; placements of DTensors say the same by mesh axis.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
    _StridedShard,
)

from tpu_compile.aot.chips import Topology
from tpu_core.errors import MeshError

Axes = str | tuple[str, ...] | None
Spec = tuple[Axes, ...]
Rule = Sequence[Axes] | Mapping[str, Placement]
RuleFunction = Callable[[str, tuple[int, ...], Mapping[str, int]], Rule | None]
Rules = Mapping[str | re.Pattern[str], Rule] | RuleFunction | None
"""Pattern of names -> spec, or a function of name, shape and mesh that returns one."""

# Axes over which batches are divided unless the caller says otherwise.
_DATA_AXES = ("data", "dp", "dp_replicate", "dp_shard", "replicate", "shard", "fsdp", "batch")


def check_mesh(mesh: Mapping[str, int] | None, topology: Topology) -> dict[str, int]:
    """The mesh, one axis ``data`` over all devices unless given.

    Raises:
        MeshError: Its sizes do not multiply to the number of devices.
    """
    mesh = dict(mesh) if mesh else {"data": topology.devices}
    count = math.prod(mesh.values())
    if count != topology.devices or min(mesh.values()) < 1:
        n, chips = topology.devices, topology.chips
        each = f" ({chips} chips of {topology.chip.devices})" if topology.chip.devices > 1 else ""
        raise MeshError(
            f"The mesh has {count} devices, and {topology.name} has {n}{each}.",
            values={"mesh": ", ".join(f"{k}={v}" for k, v in mesh.items())},
        )
    return mesh


def batch_spec(batch: Axes | Sequence[Axes], mesh: Mapping[str, int]) -> Spec:
    """Sharding of batches: along their first dimension over the data axes unless given.

    Args:
        batch: ``"data"`` for the first dimension, a spec, or ``"auto"``.
        mesh: The mesh.
    """
    if batch == "auto":
        found = tuple(a for a in _DATA_AXES if a in mesh)
        return (found if len(found) > 1 else found[0],) if found else ()
    if isinstance(batch, str):
        return (batch,)
    return tuple(batch) if batch else ()


def spec_of(name: str, tensor: torch.Tensor, rules: Rules, mesh: Mapping[str, int]) -> Spec:
    """Sharding of a parameter or buffer.

    Its placements if it is a DTensor, else the first rule whose pattern matches the whole name
    (``*`` and ``?`` of shells, or a compiled regular expression), else nothing is divided.

    Raises:
        MeshError: The specs do not fit the mesh or the shape.
    """
    shape = tuple(tensor.shape)
    placements = getattr(tensor, "placements", None)
    if placements is not None:
        of_dtensor: Any = tensor  # a DTensor, whose module is not imported to ask
        axes = axis_names(of_dtensor.device_mesh, mesh)
        spec = placed(name, dict(zip(axes, placements)), len(shape))
        return check_spec(name, shape, _even(shape, spec, mesh), mesh)
    rule = find_rule(name, shape, rules, mesh)
    spec = placed(name, rule, len(shape)) if isinstance(rule, Mapping) else tuple(rule or ())
    return check_spec(name, shape, spec, mesh)


def axis_names(device_mesh: Any, mesh: Mapping[str, int] | None = None) -> tuple[str, ...]:
    """Names of a DeviceMesh's axes: those of ``mesh`` where it has none."""
    return tuple(device_mesh.mesh_dim_names or mesh or ("data",))


def _even(shape: tuple[int, ...], spec: Spec, mesh: Mapping[str, int]) -> Spec:
    """``spec``, with axes that do not divide their dimension moved to the largest that they divide.

    A DTensor may have uneven parts, and empty ones; inputs of a program may not.
    """
    parts = [list(names_of(axes)) for axes in spec]
    for dim, axes in enumerate(parts):
        while axes and shape[dim] % math.prod(mesh.get(a, 1) for a in axes):
            axis = axes.pop()
            free = [
                d
                for d, others in enumerate(parts)
                if d != dim and not others and shape[d] % mesh[axis] == 0
            ]
            if free:
                parts[max(free, key=lambda d: shape[d])].append(axis)
    return tuple(tuple(axes) if len(axes) > 1 else axes[0] if axes else None for axes in parts)


def find_rule(
    name: str, shape: tuple[int, ...], rules: Rules, mesh: Mapping[str, int]
) -> Rule | None:
    """The rule that matches a tensor, or None."""
    if callable(rules):
        return rules(name, shape, mesh)
    return next((r for p, r in (rules or {}).items() if _matches(p, name)), None)


def _matches(pattern: str | re.Pattern[str], name: str) -> bool:
    if isinstance(pattern, str):
        return fnmatch.fnmatchcase(name, pattern)
    return pattern.fullmatch(name) is not None


def placed(name: str, placements: Mapping[str, Placement], dims: int) -> Spec:
    """The spec that says the same as placements.

    Args:
        name: Of the tensor, for errors.
        placements: By mesh axis.
        dims: Number of the tensor's dimensions.

    Raises:
        MeshError: One of them is neither `Shard` nor `Replicate`, or divides a dimension that the
            tensor lacks.
    """
    spec: list[list[str]] = [[] for _ in range(dims)]
    # `fully_shard` divides what tensor parallelism has left to a device: its axis is the minor one.
    for axis, placement in sorted(
        placements.items(), key=lambda item: isinstance(item[1], _StridedShard)
    ):
        if isinstance(placement, (Shard, _StridedShard)):
            if not -dims <= placement.dim < dims:
                raise MeshError(
                    f"'{name}' has the placement {placement} over '{axis}', and it has {dims} "
                    "dimensions.",
                    remedy="Divide one of its dimensions, or place it by Replicate().",
                )
            spec[placement.dim].append(axis)
        elif isinstance(placement, Partial) or not isinstance(placement, Replicate):
            raise MeshError(
                f"'{name}' has the placement {placement} over '{axis}'.",
                remedy="Only Shard(dim) and Replicate() are supported.",
            )
    return tuple(tuple(axes) if len(axes) > 1 else axes[0] if axes else None for axes in spec)


def names_of(axes: Axes) -> tuple[str, ...]:
    """The mesh axes of one dimension."""
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def check_spec(name: str, shape: Sequence[int], spec: Spec, mesh: Mapping[str, int]) -> Spec:
    """``spec``, if the mesh has its axes and they divide the dimensions.

    Raises:
        MeshError: Not so; names the tensor.
    """
    values = {"tensor": f"{name} {list(shape)}", "sharding": spec, "mesh": dict(mesh)}
    if len(spec) > len(shape):
        raise MeshError(
            f"The sharding of '{name}' has {len(spec)} items, and it has {len(shape)} dimensions.",
            values=values,
            remedy="Give an item for each dimension, or fewer.",
        )
    used = [axis for axes in spec for axis in names_of(axes)]
    for axis in used:
        if axis not in mesh or used.count(axis) > 1:
            wrong = "is used twice" if axis in mesh else "is not an axis of the mesh"
            raise MeshError(
                f"In the sharding of '{name}', '{axis}' {wrong}.",
                values=values,
                remedy=f"The mesh's axes are {', '.join(mesh)}; use each once for a tensor.",
            )
    for dim, axes in enumerate(spec):
        parts = math.prod(mesh[a] for a in names_of(axes))
        if shape[dim] % parts:
            raise MeshError(
                f"Dimension {dim} of '{name}' has {shape[dim]} elements, which {parts} devices do "
                f"not divide.",
                values=values,
                remedy="Divide another dimension, or choose a size that is a multiple.",
            )
    return spec


def shard_shape(shape: Sequence[int], spec: Spec, mesh: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of one device's part."""
    parts = [math.prod(mesh[a] for a in names_of(axes)) for axes in spec]
    parts += [1] * (len(shape) - len(parts))
    return tuple(n // p for n, p in zip(shape, parts))


def fsdp(axis: str = "data", base: Rules = None) -> RuleFunction:
    """Rules of fully sharded data parallelism: each parameter divided along its largest dimension.

    A dimension that the axis does not divide is left alone. XLA gathers a parameter where it is
    used and scatters its gradient.

    Args:
        axis: Of the mesh.
        base: Rules of tensor parallelism: ``axis`` divides the largest of the other dimensions.

    Raises:
        MeshError: Its mesh has no such axis; as a plan is made, not by this call.

    Example:
        >>> rules = fsdp("data", {"*.up.weight": ("model", None), "*.down.weight": (None, "model")})
        >>> plan = tpu_compile.aot(model, batch, topology="v5e:4x4", mesh=mesh, shardings=rules)
    """

    def rule(name: str, shape: tuple[int, ...], mesh: Mapping[str, int]) -> Spec:
        if axis not in mesh:
            raise MeshError(
                f"fsdp divides parameters over '{axis}', which is not an axis of the mesh.",
                values={"mesh": dict(mesh)},
                remedy=f"Name one of its axes, {', '.join(mesh)}, or give the mesh an axis "
                f"'{axis}'.",
            )
        found = find_rule(name, shape, base, mesh) or ()
        if isinstance(found, Mapping):
            found = placed(name, found, len(shape))
        spec = [*found, *[None] * (len(shape) - len(found))]
        free = [d for d, axes in enumerate(spec) if axes is None and shape[d] % mesh[axis] == 0]
        if free:
            spec[max(free, key=lambda d: shape[d])] = axis
        return tuple(spec)

    return rule
