"""Calls of the submodules of a module: inputs, results and their gradients, on the host."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from tpu_core.comparison.products import TpuProducts
from tpu_core.comparison.trees import differentiable, exactly, mapped, tensors


@dataclass
class Call:
    """One call of a submodule.

    Attributes:
        name: Its qualified name; empty for the module itself.
        module: The submodule.
        args, kwargs: Arguments of the call; tensors are copies on the CPU in float64.
        outputs: Its tensor results, on the device until `RecordedCalls.settle`.
        dtypes: Their dtypes.
        output_gradients: Gradients of the loss in its results, by position.
        input_gradients: Gradients that flow back through this call into its tensor arguments.
        input_dtypes: Dtypes of its tensor arguments.
        started: Number of calls that had begun before it.
        products: Number of emulated products before it.
        through: Positions of the tensor arguments that are results, too.
        aliases: Position of a tensor argument by the id of its alias.
        epsilon: Largest machine epsilon of its results and of what it is made of; with emulated
            products within it, at least their rounding.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[torch.Tensor] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    output_gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    input_gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    input_dtypes: list[torch.dtype] = field(default_factory=list)
    started: int = 0
    products: int = 0
    epsilon: float = 0.0
    through: list[int] = field(default_factory=list)
    aliases: dict[int, int] = field(default_factory=dict)


@dataclass
class RecordedCalls:
    """The calls of a run, in the order in which they ended: what a call is made of comes first."""

    ended: list[Call] = field(default_factory=list)

    def settle(self) -> None:
        """Copy what is left on the device to the host, in float64."""
        for call in self.ended:
            for i in call.through:
                call.input_gradients.pop(i, None)
            call.outputs = [exactly(t) for t in call.outputs]
            for gradients in (call.output_gradients, call.input_gradients):
                gradients.update({i: exactly(g) for i, g in gradients.items()})


@contextmanager
def recorded(module: nn.Module, products: TpuProducts | None = None) -> Iterator[RecordedCalls]:
    """Record the calls of all submodules within a block.

    A tensor argument is exchanged for an alias of it, so that the gradient that this call
    contributes is seen apart from those of other uses.

    Args:
        module: The module.
        products: The emulation of a TPU's products that is in force, or None.
    """
    calls = RecordedCalls()
    open_calls: list[Call] = []
    handles = []
    sources: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # aliases, and what they are of
    numbers = itertools.count()

    def before(name: str, m: nn.Module, args: Any, kwargs: Any) -> Any:
        host_args, host_kwargs = mapped(exactly, (args, kwargs))
        call = Call(name, m, host_args, host_kwargs, started=next(numbers))
        call.products = products.count if products else 0
        open_calls.append(call)
        aliases: dict[int, torch.Tensor] = {}  # query is key, as nn.MultiheadAttention asks
        position = 0

        def alias(t: torch.Tensor) -> torch.Tensor:
            nonlocal position
            i, position = position, position + 1
            call.input_dtypes.append(t.dtype)
            if not (torch.is_grad_enabled() and differentiable(t)) or isinstance(t, nn.Parameter):
                return t
            if id(t) not in aliases:
                aliases[id(t)] = made = t.view_as(t)
                call.aliases[id(made)] = i
                sources[id(made)] = made, t
                made.register_hook(_keep(call.input_gradients, i))
            return aliases[id(t)]

        return _pytree.tree_map_only(torch.Tensor, alias, (args, kwargs))

    def argument(call: Call, t: torch.Tensor) -> int | None:
        """Position of the argument that a result is, through whatever calls it went."""
        while id(t) not in call.aliases:
            if id(t) not in sources:
                return None
            t = sources[id(t)][1]
        return call.aliases[id(t)]

    def after(m: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = open_calls.pop()
        for i, t in enumerate(tensors(output)):
            # A later in-place op must not change what is compared.
            call.outputs.append(t.detach().clone())
            call.dtypes.append(t.dtype)
            given = argument(call, t)
            if given is not None:  # later uses of it cannot be told from this one's
                call.through.append(given)
            elif differentiable(t):
                t.register_hook(_keep(call.output_gradients, i))
        inner = [c.epsilon for c in calls.ended if c.started > call.started]
        call.epsilon = max([0.0, *inner, *map(_epsilon, [*call.dtypes, *call.input_dtypes])])
        if products and products.count > call.products:
            call.epsilon = max(call.epsilon, products.epsilon)
        calls.ended.append(call)

    for name, m in module.named_modules():

        def pre(m: nn.Module, args: Any, kwargs: Any, name: str = name) -> Any:
            return before(name, m, args, kwargs)

        handles.append(m.register_forward_pre_hook(pre, with_kwargs=True))
        handles.append(m.register_forward_hook(after, with_kwargs=True))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _epsilon(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def _keep(gradients: dict[int, torch.Tensor], i: int) -> Any:
    def hook(gradient: torch.Tensor) -> None:
        gradients[i] = gradient.detach().clone()

    return hook
