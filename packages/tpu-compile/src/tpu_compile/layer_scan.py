"""`scan_layers`: a stack of equal layers that is compiled as one of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from inspect import isroutine
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd.function import once_differentiable
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
    params = [p for m in layers for _, p in m.named_parameters()]
    buffers = [b for m in layers for _, b in m.named_buffers()]
    differentiable = torch.is_grad_enabled() and any(
        t.requires_grad for t in (x, *params, *call.tensors)
    )
    n = len(call.params), len(call.buffers), len(call.tensors)
    signature = (
        tuple(_geometry(t) for t in (x, *params, *buffers, *call.tensors)),
        tuple(_settings(m) for layer in layers for m in layer.modules()),
        _exact(call.constants),
        (len(layers), differentiable, remat, tuple(may_differ)),
        (torch.is_autocast_enabled("tpu"), torch.get_autocast_dtype("tpu")),
        torch.get_default_dtype(),
    )
    known = _PROGRAMS.setdefault(first, {})
    if signature not in known:
        _check(layers, may_differ)
        inputs = [x, *params[: n[0]], *buffers[: n[1]], *call.tensors]
        known[signature] = _trace(call, inputs, n, differentiable, remat)
    program = known[signature]
    key = torch.randint(2**32, (2,), device=x.device) if program.draws else None
    if differentiable:
        result: list[Tensor] = _Stack.apply(
            program, len(layers), key, buffers, x, *params, *call.tensors
        )
    else:
        result = torch.ops.tpu_compile.layers_forward(
            x, params, buffers, call.tensors, key, program.key, len(layers)
        )
    each = iter(result[1:])
    for k in program.written:
        for i in range(len(layers)):
            buffers[k + i * n[1]].copy_(next(each))
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
        self.params = [name for name, _ in first.named_parameters()]
        self.buffers = [name for name, _ in first.named_buffers()]
        self.tensors = [a for a in args if isinstance(a, Tensor)]
        self.constants = tuple(None if isinstance(a, Tensor) else (a,) for a in args)

    def run(self, x: Tensor, *inputs: Tensor) -> Tensor:
        """The layer as a function of its inputs, in the order of `tpu_compile.layers.Layer`."""
        names = [*self.params, *self.buffers]
        rest = iter(inputs[len(names) :])
        args = [next(rest) if c is None else c[0] for c in self.constants]
        values = dict(zip(names, inputs))
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
    counts: tuple[int, int, int],
    differentiable: bool,
    remat: bool,
) -> Layer:
    from torch.utils._python_dispatch import _disable_current_modes

    from tpu_compile import layers

    layers.define()
    with _disable_current_modes():
        like = [
            torch.empty(tuple(map(int, t.shape)), dtype=t.dtype, device=t.device).requires_grad_(
                differentiable and (t.requires_grad or (i == 0 and t.is_floating_point()))
            )
            for i, t in enumerate(inputs)
        ]
    return layers.trace(call.run, like, counts, differentiable, remat)


class _Stack(torch.autograd.Function):
    """The loop with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, layer: Layer, count: int, key: Tensor | None, buffers: list[Tensor], *rest: Tensor
    ) -> Any:
        x, *tensors = rest
        each = count * layer.counts[0]
        params, others = tensors[:each], tensors[each:]
        result = torch.ops.tpu_compile.layers_forward(
            x, params, buffers, others, key, layer.key, count
        )
        new = len(layer.written) * count
        ctx.layer, ctx.count, ctx.key, ctx.sizes = layer, count, key, (each, len(others))
        # A buffer that is written is among what the loop made; autograd would refuse its new value.
        read = {k - 1 - layer.counts[0] for k in layer.kept}
        ctx.buffers = [
            b if i % max(layer.counts[1], 1) in read else b.detach() for i, b in enumerate(buffers)
        ]
        ctx.save_for_backward(*tensors, *result[1 + new :])
        results = result[: 1 + new]
        ctx.mark_non_differentiable(*results[1:])
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        layer, (each, shared) = ctx.layer, ctx.sizes
        saved = ctx.saved_tensors
        params, others = list(saved[:each]), list(saved[each : each + shared])
        found = torch.ops.tpu_compile.layers_backward(
            grad.contiguous(),
            params,
            ctx.buffers,
            others,
            ctx.key,
            list(saved[each + shared :]),
            layer.key,
            ctx.count,
        )
        grads: list[Tensor | None] = [None] * (each + shared)
        made = iter(found[1:])
        own, rest = layer.grouped()
        # Views: a copy for each layer would be a kernel for each.
        for k, joined in zip(own, made):
            shape = params[k - 1].shape
            parts = joined.split(shape[0]) if shape else joined.unbind()
            grads[k - 1 : each : layer.counts[0]] = parts
        for k in rest:
            grads[each + k] = next(made)
        return None, None, None, None, found[0], *grads


def _as_scan(layers: Sequence[nn.Module], x: Tensor, args: Sequence[Any]) -> Tensor:
    """The layers as PyTorch's own loop, which an exported program can hold."""
    from torch._higher_order_ops.scan import scan

    from tpu_compile.traced import layer_step

    call = _Arguments(layers[0], args)
    names = [*call.params, *call.buffers]
    states = [dict((*m.named_parameters(), *m.named_buffers())) for m in layers]
    stacked = [torch.stack([s[name] for s in states]) for name in names]

    step = layer_step(layers[0], names, args)
    last: Tensor = scan(step, x, stacked)[0]
    return last
