"""Mark what `torch.utils.checkpoint` recomputes, for the compiler to keep it apart.

Forward, recomputation and backward may end in one program, where XLA would see that equal ops are
computed twice and keep the first result: the memory that checkpointing is to save. PyTorch has no
hook around the recomputation, so its two entry points are wrapped when the device starts. They
record a marker before and after it; `tpu_core.compiler.recomputation` does the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter

from tpu_core import _C, modes

_library = torch.library.Library("tpu", "FRAGMENT")
_library.define("recompute(Tensor self, bool begin) -> Tensor")


def watch() -> None:
    """Wrap the recomputation of both kinds of checkpoint; a second call does nothing."""
    _watch_reentrant(checkpoint.CheckpointFunction)
    _watch_frames(checkpoint._CheckpointFrame)


def _watch_reentrant(function: Any) -> None:
    original = function.backward
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def backward(ctx: Any, *grads: Any) -> Any:
        run = ctx.run_function

        @functools.wraps(run, updated=())
        def recompute(*args: Any) -> Any:
            with _marked(_devices(args)):
                return run(*args)

        ctx.run_function = recompute
        try:
            return original(ctx, *grads)
        finally:
            ctx.run_function = run

    function.backward = staticmethod(backward)


def _watch_frames(frame_class: Any) -> None:
    original = frame_class.__init__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def init(self: Any, recompute_fn: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        # The frame would hold itself through its function.
        saved: list[Any] = []

        @functools.wraps(recompute_fn)
        def recompute(*inputs: Any) -> None:
            # Keyword arguments are not among the inputs, but what the forward pass saved is known.
            kept = (m["device"] for m in saved if m is not None)
            with _marked(_devices(inputs).union(kept)):
                recompute_fn(*inputs)

        original(self, recompute, *args, **kwargs)
        saved = self.x_metadatas

    frame_class.__init__ = init


def _devices(values: Any) -> set[torch.device]:
    return {x.device for x in tree_iter(values) if isinstance(x, torch.Tensor)}


@contextmanager
def _marked(devices: Iterable[torch.device]) -> Iterator[None]:
    """Record a marker before and after the block, on each ``tpu`` among the devices."""
    begun = [_mark(None, d) for d in devices if d.type == "tpu"] if _merges() else []
    try:
        yield
    finally:
        for marker in begun:
            _mark(marker, marker.device)


def _merges() -> bool:
    """Return whether ops that are called now share a program with others."""
    if torch.compiler.is_compiling() or _traced():
        return False
    bound, *_ = _C.thread_mode() or modes.current().native()
    return bound != 1


def _traced() -> bool:
    keys = torch._C._TorchDispatchModeKey
    return any(
        torch._C._get_dispatch_mode(k) is not None for k in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL)
    )


def _mark(begun: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    # A mode that looks at the recomputed ops, as selective checkpointing does, expects those of the
    # forward pass.
    with _disable_current_modes(), torch.no_grad():
        like = torch.empty(0, device=device) if begun is None else begun
        return torch.ops.tpu.recompute(like, begun is None)
