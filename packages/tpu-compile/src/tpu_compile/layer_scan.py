"""`scan_layers`: a stack of equal layers that is compiled as one of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from inspect import isroutine
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tpu_compile.torch_compat import TRACES_WITH_MODULES

if TYPE_CHECKING:
    from tpu_compile.layers import Layer

Tensor = torch.Tensor


def scan_layers(
    modules: Iterable[nn.Module],
    x: Tensor,
    *args: Any,
    remat: bool = False,
    may_differ: Collection[str] = (),
) -> Tensor:
    """Call equal layers one after the other, as one loop in the program.

    Computes ``for m in modules: x = m(x, *args)``. The loop's body is compiled once, so that
    compiling takes as long for 48 layers as for 4. Works in eager, under `torch.compile` and in
    `torch.export`; on other devices than ``tpu`` the layers are simply called.

    Args:
        modules: The layers, equal but for the values of their parameters and buffers; each keeps
            its own, with a gradient of its own; the layers' gradients share memory, which is
            freed with the last of them. Dropout draws another mask for each layer.
        x: The first layer's input. A layer returns a tensor of the same shape and dtype.
        args: Further arguments of every layer: tensors, which may have gradients, and constants.
        remat: Keep each layer's input alone for the backward pass, which computes the layer again.
        may_differ: Names of attributes in which layers may differ, since their results do not
            depend on them, ``{"layer_idx"}`` say.

    Returns:
        The last layer's result.

    Raises:
        ValueError: The layers are not equal, or one changes shape or dtype of the hidden state.

    Example:
        >>> hidden = tpu_compile.scan_layers(model.blocks, hidden, mask, remat=True)
    """
    layers = list(modules)
    if not layers or x.device.type != "tpu":
        for layer in layers:
            x = layer(x, *args)
        return x
    if torch.compiler.is_dynamo_compiling() and not TRACES_WITH_MODULES:
        for layer in layers:
            x = checkpoint(layer, x, *args, use_reentrant=False) if remat else layer(x, *args)
        return x
    # Dynamo traces this function; what it calls takes neither None nor sets from it.
    given = [a for a in args if a is not None]
    missing = [i for i, a in enumerate(args) if a is None]
    return run_layers(layers, x, given, missing, remat, sorted(may_differ))


def run_layers(
    layers: list[nn.Module],
    x: Tensor,
    given: Sequence[Any],
    missing: Sequence[int],
    remat: bool,
    may_differ: Sequence[str],
) -> Tensor:
    """`scan_layers` on the device; AOTAutograd traces it, with the layers' tensors as inputs.

    Args:
        layers, x, remat, may_differ: See `scan_layers`.
        given: The further arguments that are not None.
        missing: Positions of those that are.
    """
    args = list(given)
    for i in missing:
        args.insert(i, None)
    first = layers[0]
    if torch.compiler.is_exporting():
        _check(layers, may_differ)
        return _as_scan(layers, x, args)
    call = _Arguments(first, args)
    own = [t for m in layers for _, t in (*m.named_parameters(), *m.named_buffers())]
    tensors = [x, *own, *call.tensors]
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    signature = (
        tuple(map(_geometry, tensors)),
        tuple(_settings(m) for layer in layers for m in layer.modules()),
        _exact(call.constants),
        (len(layers), differentiable, remat, tuple(may_differ)),
        (torch.is_autocast_enabled("tpu"), torch.get_autocast_dtype("tpu")),
        torch.get_default_dtype(),
    )
    known = _PROGRAMS.setdefault(first, {})
    if signature not in known:
        _check(layers, may_differ)
        inputs = [x, *own[: len(call.names)], *call.tensors]
        buffers = sum(1 for _ in first.named_buffers())
        known[signature] = _trace(call, inputs, buffers, differentiable, remat)
    program = known[signature]
    from tpu_compile.layer_ops import LayerStack

    key = torch.randint(2**32, (2,), device=x.device) if program.draws else None
    result: Sequence[Tensor] = LayerStack.apply(program, len(layers), key, *tensors)
    for k, stacked in zip(program.written, result[1:]):
        for tensor, new in zip(own[k - 1 :: program.own], stacked.unbind()):
            tensor.copy_(new)
    return result[0]


# By first layer, then by everything that tracing it depends on.
_PROGRAMS: WeakKeyDictionary[nn.Module, dict[Any, Layer]] = WeakKeyDictionary()


class _Arguments:
    """The arguments of a layer, taken apart: tensors become inputs of a graph.

    Args:
        first: A layer.
        args: Arguments of the call, beside the hidden state.
    """

    def __init__(self, first: nn.Module, args: Sequence[Any]) -> None:
        self.layer = first
        self.names = [name for name, _ in (*first.named_parameters(), *first.named_buffers())]
        self.tensors = [a for a in args if isinstance(a, Tensor)]
        self.constants = tuple(None if isinstance(a, Tensor) else (a,) for a in args)

    def run(self, x: Tensor, *inputs: Tensor) -> Tensor:
        """The layer as a function of its inputs, in the order of `tpu_compile.layers.Layer`."""
        rest = iter(inputs[len(self.names) :])
        args = [next(rest) if c is None else c[0] for c in self.constants]
        values = dict(zip(self.names, inputs))
        result = torch.func.functional_call(self.layer, values, (x, *args))
        same = isinstance(result, Tensor) and (result.shape, result.dtype) == (x.shape, x.dtype)
        if not same:
            made = _brief(result) if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(
                "A layer of scan_layers returns the next layer's input: a tensor of its own "
                f"input's shape and dtype.\n  input: {_brief(x)}\n  result: {made}\n"
                "What to do: wrap the layer in a module that returns only the hidden state, in the "
                "dtype in which it came."
            )
        return result.clone() if result is x else result


def _brief(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def _geometry(t: Tensor) -> tuple[Any, ...]:
    # Sizes that vary become numbers: a program is for one shape.
    return tuple(map(int, t.shape)), t.dtype, t.requires_grad, t.device


_PLAIN = frozenset({bool, int, float, complex, str, type(None), torch.dtype})


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """Settings that a module's function depends on beside its tensors; cheap, as each call asks."""
    plain = [(k, _exact(v)) for k, v in vars(module).items() if _is_plain(v)]
    called = [(k, v) for k, v in vars(module).items() if isroutine(v)]
    hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
    return type(module), *plain, *called, *hooks


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def _exact(value: Any) -> Any:
    """A key of a constant: 1, 1.0 and True are equal, and so are 0.0 and -0.0."""
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_exact, value))
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


def _check(layers: Sequence[nn.Module], may_differ: Collection[str]) -> None:
    from tpu_compile.layer_check import check_equal

    check_equal(layers, may_differ)


def _trace(
    call: _Arguments,
    inputs: Sequence[Tensor],
    buffers: int,
    differentiable: bool,
    remat: bool,
) -> Layer:
    """The layer, traced with tensors like ``inputs``; of its own ones ``buffers`` are the last."""
    from torch._functorch.aot_autograd import aot_export_joint_simple
    from torch._guards import tracing
    from torch.utils._python_dispatch import _disable_current_modes

    from tpu_compile import layer_ops, layers
    from tpu_compile.graphs import decompositions
    from tpu_core.extend import Target

    layer_ops.define()
    own = len(call.names)
    first, last = 1 + own - buffers, 1 + own

    def pure(*values: Tensor) -> tuple[Tensor, ...]:
        new = [v.clone() for v in values[first:last]]
        return call.run(*values[:first], *new, *values[last:]), *new

    with _disable_current_modes(), tracing(None), torch.enable_grad():
        like = [
            torch.empty(tuple(map(int, t.shape)), dtype=t.dtype, device=t.device).requires_grad_(
                differentiable and (t.requires_grad or (i == 0 and t.is_floating_point()))
            )
            for i, t in enumerate(inputs)
        ]
        joint: Any = aot_export_joint_simple(
            pure, tuple(like), trace_joint=differentiable, decompositions=decompositions()
        )
    return layers.partition(
        joint,
        own,
        buffers=buffers,
        differentiable=differentiable,
        remat=remat,
        on_tpu=Target.current().platform == "tpu",
    )


def _as_scan(layers: Sequence[nn.Module], x: Tensor, args: Sequence[Any]) -> Tensor:
    """The layers as PyTorch's own loop, which an exported program can hold."""
    from torch._higher_order_ops.scan import scan

    from tpu_compile.traced import layer_step

    call = _Arguments(layers[0], args)
    states = [dict((*m.named_parameters(), *m.named_buffers())) for m in layers]
    stacked = [torch.stack([s[name] for s in states]) for name in call.names]

    step = layer_step(layers[0], call.names, args)
    last: Tensor = scan(step, x, stacked)[0]
    return last
