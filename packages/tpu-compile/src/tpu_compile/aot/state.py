"""Parameters, buffers and optimizer state of a model as inputs of a program.

A `Leaf` is one input. Where equal layers are scanned, the parameters of one name in all of them
are one leaf with a dimension in front.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch._subclasses import FakeTensorMode

from tpu_compile.aot.sharding import Rules, Spec, spec_of
from tpu_compile.aot.trace import fake_like, values_unknown
from tpu_compile.torch_compat import first_state
from tpu_core.errors import MeshError

Optimizer = torch.optim.Optimizer
# Those that treat each element by itself, so that a stack is updated as its parts would be.
_ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam),
    *(torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta),
    *(torch.optim.ASGD, torch.optim.Rprop),
)


@dataclass(frozen=True)
class Leaf:
    """An input of a program.

    Attributes:
        name: ``"blocks.*.up.weight"`` where several layers' parameters are stacked.
        kind: ``"parameter"``, ``"buffer"``, ``"optimizer state"``, ``"batch"`` or
            ``"random seed"``.
        shape, dtype: Of the whole tensor.
        spec: Its partition spec.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: Spec = ()


@dataclass(frozen=True)
class Run:
    """Equal layers that follow each other in a container.

    Attributes:
        container: Its name in the model; empty for the model itself.
        names: Of the layers, in the container.
        gradient_checkpointing: Whether the layers ask for it, as those of transformers do.
        remat: Keep only the layers' inputs for the backward pass.
    """

    container: str
    names: tuple[str, ...]
    gradient_checkpointing: bool = False
    remat: bool = False

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Full names of the layers."""
        return tuple(".".join(p for p in (self.container, n) if p) for n in self.names)

    @property
    def label(self) -> str:
        """The layers' common name, ``"blocks.*"``."""
        return ".".join(p for p in (self.container, "*") if p)


class ModelState:
    """The parameters and buffers of a model, and how each is divided.

    Args:
        model: The model, on any device.
        rules: Shardings by name.
        mesh: The mesh.
        runs: Layers whose tensors are stacked.

    Attributes:
        leaves: The inputs that the tensors become, in the order of the model's names.
        tensors: The model's tensor of each leaf; the first of a stack.
        stacks: For each leaf that is stacked, its `Run` and its name in the layer.
        specs: Partition spec of each parameter and buffer, by its own name.
        owners: Leaf of each parameter and buffer, by its own name; tied ones share a leaf.
        requires_grad: For each leaf, whether it is a parameter that is trained.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        rules: Rules,
        mesh: Mapping[str, int],
        runs: Sequence[Run] = (),
    ) -> None:
        self.model = model
        self.leaves: list[Leaf] = []
        self.tensors: list[torch.Tensor] = []
        self.stacks: dict[int, tuple[Run, str]] = {}
        self.owners: dict[str, int] = {}
        self.specs: dict[str, Spec] = {}
        self.requires_grad: list[bool] = []
        places: dict[int, int] = {}
        stacked = {
            f"{prefix}.": (run, place) for run in runs for place, prefix in enumerate(run.prefixes)
        }
        for name, tensor, kind in _named_tensors(model):
            if id(tensor) in places:
                self.owners[name] = places[id(tensor)]
                self.specs[name] = spec_of(name, tensor, rules, mesh)
                continue
            found = next(((p, *v) for p, v in stacked.items() if name.startswith(p)), None)
            self.specs[name] = spec = spec_of(name, tensor, rules, mesh)
            if found and found[2] > 0:
                prefix, run, _ = found
                first = f"{run.prefixes[0]}.{name[len(prefix) :]}"
                place = self.owners[first]
                if self.leaves[place].spec[1:] != spec:
                    raise MeshError(
                        f"'{first}' and '{name}' are divided differently, and their layers are "
                        f"scanned as one.",
                        values={first: self.leaves[place].spec[1:], name: spec},
                        remedy="Give both one sharding, or compile with scan=False.",
                    )
            else:
                place = len(self.leaves)
                self.tensors.append(tensor)
                self.requires_grad.append(kind == "parameter" and tensor.requires_grad)
                shape = tuple(tensor.shape)
                if found:
                    prefix, run, _ = found
                    inner = name[len(prefix) :]
                    self.stacks[place] = (run, inner)
                    shape, spec = (len(run.names), *shape), (None, *spec)
                    name_of_leaf = f"{run.label}.{inner}"
                else:
                    name_of_leaf = name
                self.leaves.append(Leaf(name_of_leaf, kind, shape, tensor.dtype, spec))
            self.owners[name] = places[id(tensor)] = place

    def trained(self) -> list[int]:
        """Leaves that get gradients."""
        return [i for i, wanted in enumerate(self.requires_grad) if wanted]

    def stacks_of(self, run: Run) -> dict[str, int]:
        """Leaf of each tensor of a run's layers, by its name in the layer."""
        return {inner: i for i, (r, inner) in self.stacks.items() if r is run}

    def fakes(self, mode: FakeTensorMode) -> list[torch.Tensor]:
        """A fake tensor for each leaf."""
        return [
            fake_like(t, mode, (len(self.stacks[i][0].names),) if i in self.stacks else ())
            for i, t in enumerate(self.tensors)
        ]

    @contextmanager
    def swapped(self, values: Sequence[torch.Tensor]) -> Iterator[None]:
        """The model with other tensors in its parameters and buffers, one a leaf.

        Those of scanned layers stay: the layers do not run.
        """
        kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for prefix, module in self.model.named_modules():
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for table in tables:
                kept.append((table, dict(table)))
                for name, tensor in table.items():
                    full = f"{prefix}.{name}" if prefix else name
                    if tensor is not None and self.owners[full] not in self.stacks:
                        table[name] = values[self.owners[full]]
        try:
            yield
        finally:
            for table, before in kept:
                table.update(before)


def _named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, str]]:
    for name, p in model.named_parameters(remove_duplicate=False):
        yield name, p, "parameter"
    for name, b in model.named_buffers(remove_duplicate=False):
        yield name, b, "buffer"


class OptimizerState:
    """A `torch.optim.Optimizer` whose parameters and state are inputs of a program.

    Args:
        optimizer: Of the model's parameters, or makes one of them.
        state: The model's.
        mode: Of the fake tensors.
    """

    def __init__(
        self,
        optimizer: Optimizer | Callable[..., Optimizer],
        state: ModelState,
        mode: FakeTensorMode,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            optimizer = optimizer(p for p in state.model.parameters() if p.requires_grad)
        self._optimizer = optimizer
        leaf_of = {
            id(t): state.owners[name]
            for name, t in state.model.named_parameters(remove_duplicate=False)
        }
        self._groups: list[list[int]] = []
        for group in optimizer.param_groups:
            unknown = [p for p in group["params"] if id(p) not in leaf_of]
            if unknown:
                raise ValueError(
                    f"{len(unknown)} parameters of the optimizer are not the model's. Make it of "
                    f"model.parameters(), after the model was moved or replaced."
                )
            self._groups.append(list(dict.fromkeys(leaf_of[id(p)] for p in group["params"])))
        everything = [i for group in self._groups for i in group]
        if len(set(everything)) < len(everything):
            raise NotStackable("their parameters are in several groups of the optimizer")
        if state.stacks and not isinstance(optimizer, _ELEMENTWISE):
            name = type(optimizer).__name__
            raise NotStackable(f"{name} may update a stack of parameters unlike each by itself")
        parameters = {
            i: t.requires_grad_() for i, t in enumerate(state.fakes(mode)) if i in everything
        }
        with values_unknown(), mode:
            made = {i: first_state(optimizer, p) for i, p in parameters.items()}
            twin = self.twin(parameters, made)
            for p in parameters.values():
                p.grad = torch.empty_like(p)
            self.step(twin)
        self.leaves: list[Leaf] = []
        self.fakes: list[torch.Tensor] = []
        self._keys: list[tuple[int, str]] = []
        self._constants: dict[tuple[int, str], Any] = {}
        # Steps that are counted on the host, of optimizers that know no other way.
        self._host: dict[tuple[int, str], torch.dtype] = {}
        for i, p in parameters.items():
            for key, value in twin.state[p].items():
                if not isinstance(value, torch.Tensor):
                    self._constants[i, key] = value
                    continue
                if value.device.type != "tpu":
                    self._host[i, key] = value.dtype
                    continue
                leaf = state.leaves[i]
                spec = leaf.spec if tuple(value.shape) == leaf.shape else ()
                self.leaves.append(
                    Leaf(
                        f"{leaf.name}.{key}",
                        "optimizer state",
                        tuple(value.shape),
                        value.dtype,
                        spec,
                    )
                )
                self.fakes.append(value.detach())
                self._keys.append((i, key))

    def twin(
        self, parameters: Mapping[int, torch.Tensor], state: Mapping[int, dict[str, Any]]
    ) -> Optimizer:
        """The optimizer over other parameters, given by leaf."""
        other = copy.copy(self._optimizer)
        other.param_groups = [
            {**_options(group), "params": [parameters[i] for i in leaves if i in parameters]}
            for group, leaves in zip(self._optimizer.param_groups, self._groups)
        ]
        other.state = defaultdict(dict, {parameters[i]: dict(v) for i, v in state.items()})
        return other

    def resumed(
        self, parameters: Mapping[int, torch.Tensor], values: Sequence[torch.Tensor]
    ) -> Optimizer:
        """The optimizer in the middle of training.

        Args:
            parameters: By leaf.
            values: One for each of ``leaves``.
        """
        state: dict[int, dict[str, Any]] = defaultdict(dict)
        for (i, key), value in self._constants.items():
            state[i][key] = copy.copy(value)
        for (i, key), dtype in self._host.items():
            state[i][key] = torch.tensor(1, dtype=dtype)
        for (i, key), tensor in zip(self._keys, values):
            state[i][key] = tensor
        return self.twin(parameters, state)

    def values(
        self, optimizer: Optimizer, parameters: Mapping[int, torch.Tensor]
    ) -> list[torch.Tensor]:
        """The tensors of an optimizer's state, in the order of ``leaves``."""
        return [optimizer.state[parameters[i]][key] for i, key in self._keys]

    @staticmethod
    def step(optimizer: Optimizer) -> None:
        """One step, without the profiler's marks around it."""
        step: Any = type(optimizer).step
        step = getattr(step, "__wrapped__", step)
        if all("capturable" in group for group in optimizer.param_groups):
            # Else it would ask for devices that it knows.
            with mock.patch.object(torch.compiler, "is_compiling", lambda: True):
                step(optimizer)
        else:
            step(optimizer)


class NotStackable(ValueError):
    """An optimizer cannot update the parameters of scanned layers as one; the text says why."""


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    # Steps are counted on the device, where a program can; the per-tensor form is the plainest.
    forced = {"capturable": True, "foreach": False, "fused": None}
    return {k: forced.get(k, v) for k, v in group.items() if k != "params"}
