"""Models that PyTorch's parallelisms have been applied to, as one program for all devices.

`DistributedDataParallel`, `fully_shard` and `parallelize_module` prepare a model to be run by one
rank of many: parameters become DTensors, and hooks communicate before and after each module. A plan
is of whole tensors, which XLA divides. So the model runs without that communication, and what the
hooks say of how tensors are divided is written into the program.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _apply_to_tensors
from torch.nn import Module
from torch.nn.modules import module as module_hooks
from torch.nn.parallel import DistributedDataParallel

from tpu_compile import torch_compat
from tpu_compile.aot import sharding_ops
from tpu_compile.aot.resharding import Resharding
from tpu_compile.aot.sharding import Spec, axis_names, names_of, placed
from tpu_core.errors import MeshError

# Mesh of the module whose hook runs: a redistribution says placements alone.
_hook_mesh: ContextVar[Any] = ContextVar("hook_mesh", default=None)


def unwrapped(model: Module) -> Module:
    """The model in a `DistributedDataParallel`; its gradients are summed over the data axis."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def mesh_of(model: Module) -> dict[str, int] | None:
    """The whole mesh over which a model's DTensors are divided; None where there are none.

    Raises:
        MeshError: There are several, or its axes have no names.
    """
    roots: dict[Any, str] = {}
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            roots.setdefault(p.device_mesh._get_root_mesh(), name)
    if not roots:
        return None
    if len(roots) > 1:
        raise MeshError(
            "Parameters of the model are divided over several meshes.",
            values={name: str(root) for root, name in roots.items()},
            remedy="Make one mesh with init_device_mesh, and give its parts: mesh['data'].",
        )
    (root,) = roots
    names = root.mesh_dim_names or (("data",) if root.ndim == 1 and _states(model) else ())
    if len(names) != root.ndim:
        raise MeshError(
            f"The axes of the mesh have no names: {root}.",
            remedy='Name them: init_device_mesh("tpu", sizes, mesh_dim_names=("data", "model")).',
        )
    return dict(zip(names, root.shape))


@dataclass(frozen=True)
class Gathered:
    """Use of a parameter of a module under `fully_shard`.

    Attributes:
        axis: Of the mesh, which divides the parameter where it is kept.
        dtype: That of the forward and backward pass.
        group: Of those that are gathered again for the backward pass; None where they are kept.
    """

    axis: str
    dtype: torch.dtype | None
    group: int | None


class FullyShard:
    """A model under `fully_shard`: parameters are gathered while their module runs.

    With ``reshard_after_forward`` they are gathered again for the backward pass. A number of
    devices to reshard to is taken as True.

    Args:
        model: Any model.
        mesh: Size of each axis of the plan's mesh.
        specs: Partition spec of each parameter, by name.
    """

    def __init__(self, model: Module, mesh: Mapping[str, int], specs: Mapping[str, Spec]) -> None:
        self._states = _states(model)
        gathered: dict[int, Gathered] = {}
        self._resharding = Resharding()
        self._groups: dict[int, int] = {}
        for number, state in enumerate(self._states):
            # The first module to run, the root, keeps its parameters unless it is told not to.
            keeps = state._auto_reshard_after_forward and model in state._modules
            for group in torch_compat.parameter_groups(state):
                again = group.post_forward_mesh_info is not None and not keeps
                if again:
                    self._groups.update((id(m), number) for m in state._modules)
                for p in group.fsdp_params:
                    info = p.mesh_info
                    if info.shard_mesh_dim is None:
                        continue
                    name = (info.mesh.mesh_dim_names or tuple(mesh))[info.shard_mesh_dim]
                    is_float = p.sharded_param.dtype.is_floating_point
                    dtype = state._mp_policy.param_dtype if is_float else None
                    gathered[id(p.sharded_param)] = Gathered(name, dtype, number if again else None)
        self._uses: dict[int, list[tuple[str, Gathered, Spec]]] = {}
        for prefix, module in model.named_modules():
            for name, p in module._parameters.items():
                if id(p) in gathered:
                    full = f"{prefix}.{name}" if prefix else name
                    use = (name, gathered[id(p)], specs[full])
                    self._uses.setdefault(id(module), []).append(use)
        self._kept: list[dict[str, Any]] = []

    @contextmanager
    def applied(self) -> Iterator[None]:
        """While a model is traced in the block, its parameters are gathered where they are used."""
        if not self._states:
            yield
            return
        with ExitStack() as stack:
            for state in self._states:
                stack.enter_context(_without_communication(state))
            for hook in (
                module_hooks.register_module_forward_pre_hook(lambda m, _: self.enter(m)),
                module_hooks.register_module_forward_hook(
                    lambda m, _, output: self.leave(m, output), always_call=True
                ),
            ):
                stack.callback(hook.remove)
            if self._groups:
                stack.enter_context(self._resharding.saving())
            yield

    def enter(self, module: Module) -> None:
        """Put gathered parameters in the place of a module's own."""
        table: Any = module._parameters
        # In a layer that stands for a loop the model's own are left: the loop has others.
        uses = [u for u in self._uses.get(id(module), ()) if not isinstance(table[u[0]], DTensor)]
        self._kept.append({name: table[name] for name, _, _ in uses})
        for name, use, spec in uses:
            whole = tuple(tuple(a for a in names_of(axes) if a != use.axis) for axes in spec)
            value = table[name] if use.dtype is None else table[name].to(use.dtype)
            division = sharding_ops.closed(whole)
            table[name] = sharding_ops.divide(value, division, sharding_ops.closed(spec))
            if use.group is not None:
                self._resharding.gathered(table[name], value, division, use.group)

    def leave(self, module: Module, output: Any) -> None:
        """Put a module's own parameters back."""
        table: Any = module._parameters
        table.update(self._kept.pop())
        if (group := self._groups.get(id(module))) is not None:
            self._resharding.returned(output, group)


def _states(model: Module) -> list[Any]:
    """Those of the modules that `fully_shard` was called with."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed.fsdp import FSDPModule

    found = (m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule))
    return list({id(state): state for state in found}.values())


@contextmanager
def _without_communication(state: Any) -> Iterator[None]:
    """The modules of a state with hooks that convert inputs and outputs, and do nothing else."""
    policy = state._mp_policy

    def before(_: Module, args: Any, kwargs: Any) -> Any:
        dtype = policy.param_dtype if policy.cast_forward_inputs else None
        return _floats_as(dtype, args), _floats_as(dtype, kwargs)

    def after(_: Module, args: Any, output: Any) -> Any:
        return _floats_as(policy.output_dtype, output)

    with ExitStack() as stack:
        for module in state._modules:
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                kept = {k: h for k, h in hooks.items() if not _calls(h, state)}
                stack.enter_context(_contents(hooks, kept))
            handles = (
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                module.register_forward_hook(after),
            )
            for handle in handles:
                stack.callback(handle.remove)
        yield


def _floats_as(dtype: torch.dtype | None, values: Any) -> Any:
    if dtype is None:
        return values
    return _apply_to_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, values)


def _calls(hook: Callable[..., Any], state: Any) -> bool:
    """Return whether a hook is a method of ``state``, or a function around one."""
    held = [*_cells(hook).values(), hook]
    return any(getattr(value, "__self__", None) is state for value in held)


def _cells(function: Callable[..., Any]) -> dict[str, Any]:
    """Closure variables of a function."""
    if not inspect.isfunction(function):
        return {}
    return dict(inspect.getclosurevars(function).nonlocals)


@contextmanager
def _contents(table: Any, contents: Mapping[Any, Any]) -> Iterator[None]:
    """A dictionary with other items in the block."""
    before = dict(table)
    table.clear()
    table.update(contents)
    try:
        yield
    finally:
        table.clear()
        table.update(before)


@contextmanager
def placements_as_annotations(model: Module) -> Iterator[None]:
    """In the block DTensor's functions take whole tensors, and note how they are divided.

    Args:
        model: Its hooks, such as those of `parallelize_module`, call them.
    """

    def from_local(x: Any, device_mesh: Any = None, placements: Any = None, **_: Any) -> Any:
        return _annotated(x, device_mesh, placements)

    def redistribute(x: Any, device_mesh: Any = None, placements: Any = None, **_: Any) -> Any:
        return _annotated(x, device_mesh or _hook_mesh.get(), placements)

    names = {
        "redistribute": redistribute,
        "to_local": lambda x, **_: x,
        "placements": None,  # unlike any: each redistribution is asked for
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(DTensor, "from_local", from_local))
        for name, value in names.items():
            stack.enter_context(mock.patch.object(torch.Tensor, name, value, create=True))
        for module in model.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                known = {k: _with_mesh(h) for k, h in hooks.items()}
                stack.enter_context(_contents(hooks, known))
        yield


def _with_mesh(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that tells the mesh it was made with."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh = next((v for v in _cells(hook).values() if isinstance(v, DeviceMesh)), None)
    if mesh is None:
        return hook

    def with_mesh(*args: Any, **kwargs: Any) -> Any:
        token = _hook_mesh.set(mesh)
        try:
            return hook(*args, **kwargs)
        finally:
            _hook_mesh.reset(token)

    return with_mesh


def _annotated(x: torch.Tensor, device_mesh: Any, placements: Any) -> torch.Tensor:
    if device_mesh is None or placements is None:
        raise MeshError(
            "A tensor is redistributed in the model's forward pass, and its mesh is not known.",
            remedy="Give the mesh: x.redistribute(device_mesh, placements).",
        )
    by_axis = dict(zip(axis_names(device_mesh), placements))
    spec = placed("an activation", by_axis, x.dim())
    dims = tuple(names_of(axes) for axes in spec)
    used = {axis for axes in dims for axis in axes}
    forward = sharding_ops.TensorSharding(dims, tuple(a for a in by_axis if a not in used))
    # What is whole is often a sum of gradients, which XLA had better scatter where it is divided.
    backward = sharding_ops.TensorSharding(dims) if used else None
    return sharding_ops.divide(x, forward, backward)
