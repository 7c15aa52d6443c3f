"""The state of an optimizer as inputs of a program."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch._subclasses import FakeTensorMode

from tpu_compile.aot.state import Leaf, ModelState
from tpu_compile.aot.trace import values_unknown
from tpu_compile.torch_compat import first_state

Optimizer = torch.optim.Optimizer
# Those that treat each element by itself, so that a stack is updated as its parts would be.
_ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam),
    *(torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta),
    *(torch.optim.ASGD, torch.optim.Rprop),
)


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
        # A copy lacks it, and torch 2.15 asks for "capturable" then, which some optimizers lack.
        vars(other)["_warned_capturable_if_run_uncaptured"] = True
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
            state[i][key] = torch.tensor(1, dtype=dtype, device="cpu")
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
