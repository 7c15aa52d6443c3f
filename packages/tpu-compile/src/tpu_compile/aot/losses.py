"""Losses in programs that are traced for a topology; see `tpu_compile.linear_loss`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from tpu_compile.linear_loss import (
    Logits,
    after,
    call_of,
    from_linear,
    name_of,
    verdict,
    without_logits,
)


class LeavingOutLogits(TorchFunctionMode):
    """Computes losses without logits where it seems that nothing else reads them.

    A model is traced as it runs: whether something reads the logits later is known at the end. Then
    `was_wrong` says that the program has to be traced without this mode.

    Args:
        devices: Among which the program is divided.
        batch: Axes of the mesh that divide the batch.

    Attributes:
        axes: Those that divide each parameter, by identity.
        notes: Decisions and their reasons.
    """

    def __init__(self, devices: int, batch: Sequence[str]) -> None:
        super().__init__()
        self.axes: dict[int, list[str]] = {}
        self.notes: list[str] = []
        self._devices, self._batch = devices, batch
        # By identity: tensors that are kept alive keep theirs.
        self._known: dict[int, tuple[torch.Tensor, Logits]] = {}
        self._uses: dict[int, int] = defaultdict(int)
        self._conditions: dict[int, tuple[Any, ...] | None] = {}
        self._replaced: list[Logits] = []

    @property
    def was_wrong(self) -> bool:
        """True if logits are read that a loss was computed without."""
        return any(self._uses[key] != 1 for logits in self._replaced for key in logits.chain)

    def returns(self, results: Any) -> None:
        """Say what the program returns: that is read, too."""
        self._use(tree_flatten(results)[0])

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__self__", None) is torch.Tensor.data:
            self._known.clear()  # writes to it change no version
        if func is F.cross_entropy and (found := self._loss(args, kwargs)) is not None:
            return found
        made = func(*args, **kwargs)
        if not any(isinstance(x, torch.Tensor) for x in tree_flatten(made)[0]):
            return made  # a shape, a dtype
        self._use(tree_flatten((args, kwargs))[0])
        if isinstance(made, torch.Tensor):
            self._follow(func, args, kwargs, made)
        return made

    def _use(self, values: Sequence[Any]) -> None:
        for value in values:
            if id(value) in self._known:
                self._uses[id(value)] += 1

    def _follow(self, func: Any, args: Sequence[Any], kwargs: Any, made: torch.Tensor) -> None:
        found = None
        if func is F.linear:
            casts = torch.is_autocast_enabled("tpu")
            found = from_linear(args, kwargs, lambda x: x, made, casts)
            if found is not None:
                self._conditions[id(made)] = _conditions(found)
        elif args and id(args[0]) in self._known:
            source, logits = self._known[id(args[0])]
            if made is source:  # such as `contiguous` of what is
                self._uses[id(made)] -= 1
            else:
                found = after(logits, name_of(func), args[1:], kwargs, source, made)
        if found is not None:
            self._known[id(made)] = made, replace(found, chain=(*found.chain, id(made)))

    def _loss(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        call = call_of(args, kwargs)
        if call is None or id(call[0]) not in self._known:
            return None
        source, target, options = call
        _, logits = self._known[id(source)]
        shape = f"The logits {list(source.shape)} of a loss"
        conditions = self._conditions[logits.chain[0]]
        if conditions is None or conditions != _conditions(logits):
            self.notes.append(
                f"{shape} are built: the layer ran without gradients, or its inputs were written."
            )
            return None
        axes = [a for a in self.axes.get(id(logits.weight), ()) if a not in self._batch]
        reason = verdict(logits, source, target, self._devices, axes)
        if reason is not None:
            self.notes.append(f"{shape} are built: {reason}.")
            return None
        self.notes.append(f"{shape} are not built: nothing else reads them.")
        self._use([source])
        self._replaced.append(logits)
        # What it would have been is traced for its dtype, and dropped as nothing reads it.
        dtype = F.cross_entropy(*args, **kwargs).dtype
        return without_logits(
            logits.hidden,
            logits.weight,
            logits.bias,
            target,
            logits.steps,
            logits.dtype,
            dtype,
            options.ignore_index,
            options.reduction,
            options.label_smoothing,
            logits.softcap,
        )


def _conditions(logits: Logits) -> tuple[Any, ...] | None:
    """The gradient mode, and the versions of what the layer reads; None if unknown."""
    tensors = [x for x in (logits.hidden, logits.weight, logits.bias) if x is not None]
    if any(x.is_inference() for x in tensors):
        return None
    return torch.is_grad_enabled(), *(x._version for x in tensors)
