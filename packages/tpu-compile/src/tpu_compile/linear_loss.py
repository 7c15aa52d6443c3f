"""Losses of linear layers' logits, found in a program and computed without the logits.

A language model ends in ``F.cross_entropy(F.linear(hidden, weight), target)``, with casts, views
and slices between. Where the vocabulary is large the logits are the largest tensor of all. Another
package may offer a function that gives the same loss without them; it names it in the entry-point
group ``tpu_compile.losses``, as ``cross_entropy``. Programs are searched before autograd has seen
them, so that the gradient is that of the function.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import Any, Protocol

import torch
import torch.nn.functional as F

GROUP = "tpu_compile.losses"

_RESHAPES = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"}
_CASTS = {"float", "double", "to", "contiguous", "clone"}
_DTYPES = {torch.bfloat16, torch.float16, torch.float32, torch.float64}
_SLICES = {"getitem", "__getitem__"}
_QUOTIENTS = {"truediv", "__truediv__", "div", "true_divide"}
_PRODUCTS = {"mul", "__mul__"}
_WRITES = {
    *("setitem", "delitem", "iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod"),
    *("imul", "ior", "ipow", "irshift", "isub", "itruediv", "ixor"),
    *("batch_norm", "instance_norm"),  # running statistics
}
_OWNERS: tuple[Any, ...] = (torch, torch.Tensor, F, operator)
_SIGNATURE = inspect.signature(F.cross_entropy)
Step = tuple[str, Any]
"""What is done to rows of logits: ``("reshape", leading dims)`` or ``("slice", index)``."""


class LinearLoss(Protocol):
    """An implementation found by entry point."""

    def refused(
        self,
        tokens: int,
        features: int,
        vocabulary: int,
        dtype: torch.dtype,
        devices: int,
        axes: Sequence[str],
    ) -> str | None:
        """Reason to build logits for a loss of these sizes, or None.

        Args:
            tokens, features, vocabulary: Sizes; of tokens that vary, an example.
            dtype: Of the logits.
            devices: Among which the program is divided.
            axes: Of the mesh, that divide the layer's weights and not the batch.
        """

    def __call__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        ignore_index: int,
        reduction: str,
        label_smoothing: float,
        softcap: float,
    ) -> torch.Tensor:
        """The loss of ``hidden`` ``(tokens, features)`` and ``target`` ``(tokens,)``."""


@functools.cache
def offered() -> LinearLoss | None:
    """The function that an installed package offers."""
    found = [point for point in entry_points(group=GROUP) if point.name == "cross_entropy"]
    loss: LinearLoss | None = found[0].load() if found else None
    return loss


@dataclass(frozen=True, slots=True)
class Logits:
    """Facts about a tensor that holds logits.

    Attributes:
        hidden, weight, bias: Of the layer, as the program has them: tensors or nodes.
        sizes: Features and vocabulary.
        dtype: Of the layer's result.
        steps: Reshapes and slices of the rows since.
        divided: The number that the logits were divided by, if any; a cap begins so.
        bounded: Whether a tanh followed.
        softcap: The cap, 0 for none.
        chain: Keys of the tensors from the layer's result to this one.
    """

    hidden: Any
    weight: Any
    bias: Any
    sizes: tuple[int, int]
    dtype: torch.dtype
    steps: tuple[Step, ...] = ()
    divided: float = 0.0
    bounded: bool = False
    softcap: float = 0.0
    chain: tuple[Any, ...] = ()


def name_of(target: Any) -> str:
    """The name of a method, or of a function of PyTorch's; empty for a function of others."""
    if isinstance(target, str):
        return target
    name = getattr(target, "__name__", "")
    return name if any(getattr(owner, name, None) == target for owner in _OWNERS) else ""


def from_linear(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    value: Callable[[Any], Any],
    made: Any,
    casts: bool,
) -> Logits | None:
    """The logits of a call of `torch.nn.functional.linear`; None where they cannot be left out.

    Args:
        args, kwargs: Of the call.
        value: Gives the tensor that an argument is.
        made: The tensor that the call gives.
        casts: Whether the call is under autocast.
    """
    given = [*args, *(kwargs.get(name) for name in ("input", "weight", "bias")[len(args) :])]
    hidden, of_weight, of_bias = given
    tensors = [value(x) for x in given if x is not None]
    if made.device.type != "tpu" or made.dtype not in _DTYPES or made.dim() < 2:
        return None
    if len(tensors) < 2 or not all(isinstance(x, torch.Tensor) for x in tensors):
        return None
    if not casts and any(x.dtype != made.dtype for x in tensors):
        return None  # an error, which fake tensors do not raise
    weight, *bias = tensors[1:]
    if weight.dim() != 2 or 0 in weight.shape or not all(isinstance(n, int) for n in weight.shape):
        return None
    vocabulary, features = weight.shape
    if bias and tuple(bias[0].shape) != (vocabulary,):
        return None  # broadcast
    return Logits(hidden, of_weight, of_bias, (features, vocabulary), made.dtype)


def after(
    logits: Logits,
    name: str,
    rest: Sequence[Any],
    kwargs: Mapping[str, Any],
    before: Any,
    made: Any,
) -> Logits | None:
    """The logits after an op; None where they are not known any more.

    Args:
        logits: Before it.
        name: Of the function or method, as `name_of` gives it.
        rest: Its arguments behind the logits.
        kwargs: Its keyword arguments.
        before, made: The tensors that hold the logits before and after.
    """
    is_whole = made.dim() >= 1 and made.shape[-1] == logits.sizes[1]
    if not is_whole or made.device != before.device or "out" in kwargs:
        return None
    if name in _CASTS:
        return logits if made.dtype == before.dtype or _is_exact(before.dtype, made.dtype) else None
    if made.dtype != before.dtype:
        return None
    if name in _RESHAPES or name in _SLICES:
        step = _step(name, rest, before, made)  # of a reshape, what is made says everything
        return replace(logits, steps=(*logits.steps, step)) if step is not None else None
    if kwargs:
        return None  # such as `rounding_mode`
    open_cap = bool(logits.divided)
    if name in _QUOTIENTS and _is_number(rest) and not open_cap and not logits.softcap:
        return replace(logits, divided=float(rest[0]))
    if name == "tanh" and open_cap and not logits.bounded:
        return replace(logits, bounded=True)
    if name in _PRODUCTS and _is_number(rest) and logits.bounded and rest[0] == logits.divided:
        return replace(logits, divided=0.0, bounded=False, softcap=logits.divided)
    return None


def _is_exact(before: torch.dtype, made: torch.dtype) -> bool:
    """Return whether a cast is to float32, in which losses are computed, from less."""
    return made is torch.float32 and before in (torch.bfloat16, torch.float16)


def _is_number(rest: Sequence[Any]) -> bool:
    if len(rest) != 1 or type(rest[0]) not in (int, float):
        return False
    return 0 < rest[0] < math.inf


def _step(name: str, rest: Sequence[Any], before: Any, made: Any) -> Step | None:
    if name in _RESHAPES:
        lead = [n if isinstance(n, int) else -1 for n in made.shape[:-1]]
        return ("reshape", tuple(lead)) if lead.count(-1) <= 1 else None
    index = rest[0] if isinstance(rest[0], tuple) else (rest[0],)
    return ("slice", index) if _keeps_columns(index, before.dim()) else None


def _keeps_columns(index: tuple[Any, ...], dims: int) -> bool:
    """Return whether an index is one of rows alone, known without the values of tensors."""
    for part in index:
        ends = (part.start, part.stop, part.step) if isinstance(part, slice) else (part,)
        if not all(end is None or end is Ellipsis or isinstance(end, int) for end in ends):
            return False
    if any(isinstance(part, bool) for part in index):
        return False
    taken = [part for part in index if part is not None]
    reaches_last = len(taken) == dims if Ellipsis not in taken else taken[-1] is not Ellipsis
    return not reaches_last or taken[-1] == slice(None)


def may_write(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call in a graph of Dynamo's may write to its arguments.

    Args:
        target: A function, or the name of a method.
        args, kwargs: Of the call.
    """
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    name = name_of(target)
    if name.startswith("__") and name.endswith("__"):
        return name == "__setitem__" or name.startswith("__i")
    # A function of others may do anything.
    if not name or name.endswith("_") or name in _WRITES or kwargs.get("out") is not None:
        return True
    if isinstance(target, str):
        return False
    try:
        given = inspect.signature(target).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # a function in C, of which none has such arguments
        return False
    return bool(given.get("inplace")) or given.get("max_norm") is not None


@dataclass(frozen=True, slots=True)
class Options:
    """Of a call of `torch.nn.functional.cross_entropy`, without those that are tensors."""

    ignore_index: int
    reduction: str
    label_smoothing: float


def call_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any, Options] | None:
    """Logits, target and options of a call of the loss; None where it has class weights."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if any(given[name] is not None for name in ("weight", "size_average", "reduce")):
        return None
    smoothing = given["label_smoothing"]
    if type(given["ignore_index"]) is not int or type(smoothing) not in (int, float):
        return None
    options = Options(given["ignore_index"], given["reduction"], float(smoothing))
    return given["input"], given["target"], options


def verdict(
    logits: Logits, value: Any, target: Any, devices: int = 1, axes: Sequence[str] = ()
) -> str | None:
    """Reason to compute a loss with logits; None where it needs none.

    Args:
        logits: That it is of.
        value, target: The tensors that it is called with.
        devices, axes: See `LinearLoss.refused`.
    """
    function = offered()
    if function is None:
        return "no installed package offers a loss without them"
    if value.dim() != 2 or target.dim() != 1 or target.dtype != torch.int64:
        return "classes are not the last of two dimensions, or targets are no indices of int64"
    if logits.divided:
        return "they are divided by a number"
    features, vocabulary = logits.sizes
    tokens = value.shape[0]
    if not isinstance(tokens, int):
        tokens = tokens.node.hint or 0  # either way is right: no guard for it
    return function.refused(tokens, features, vocabulary, logits.dtype, devices, axes)


def without_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    steps: Sequence[Step],
    dtype: torch.dtype,
    result: torch.dtype,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    softcap: float,
) -> torch.Tensor:
    """The loss; what was done to rows of logits is done to the hidden states.

    Args:
        hidden, weight, bias: Of the layer.
        target: Of the loss.
        steps: See `Logits`.
        dtype: That the layer computes in.
        result: Dtype of the loss.
        ignore_index, reduction, label_smoothing, softcap: Of the loss.
    """
    function = offered()
    assert function is not None  # the verdict
    with torch.autocast("tpu", enabled=False):
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        for kind, value in steps:
            if kind == "reshape":
                hidden = hidden.reshape(*value, hidden.size(-1))
            else:
                hidden = hidden[tuple(value)]
        return function(
            hidden,
            weight,
            target,
            None if bias is None else bias.to(dtype),
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            softcap=softcap,
        ).to(result)
