"""Parameters and buffers of a model as inputs of a program.

A `Leaf` is one input. Where equal layers are scanned, the parameters of one name in all of them
are one leaf with a dimension in front.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from tpu_compile.aot.sharding import Rules, Spec, spec_of
from tpu_compile.aot.trace import fake_like
from tpu_core.errors import MeshError


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
        names = ((n, i) for n, i in self.owners.items() if i not in self.stacks)
        with holding(self.model, {name: values[i] for name, i in names}):
            yield


@contextmanager
def holding(model: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """A module with other tensors in its parameters and buffers, by name."""
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for prefix, module in model.named_modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            kept.append((table, dict(table)))
            for name in table:
                full = f"{prefix}.{name}" if prefix else name
                if full in values:
                    table[name] = values[full]
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
