"""Python's part of `torch.accelerator.Graph`: errors, and a look at optimizers.

Ops are captured and replayed by the extension (``csrc/recorder/capture.cpp`` and ``graph.cpp``).
"""

from __future__ import annotations

from typing import Any

import torch

from tpu_core import _C
from tpu_core.errors import GraphCaptureError


def failed(what: str, line: str) -> None:
    """Raise the error of a graph.

    Raises:
        GraphCaptureError: Always.
    """
    raise GraphCaptureError(what, line=line or None)


def before_optimizer_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Refuse a step that counts on the host: each replay would take the numbers of the first.

    Raises:
        GraphCaptureError: A graph is being captured, and the optimizer is not ``capturable``.
    """
    counts_on_host = any(
        group.get("capturable") is False and not group.get("fused")
        for group in optimizer.param_groups
    )
    if counts_on_host:
        name = type(optimizer).__name__
        _C.refuse_in_capture(
            _C.current_device(), f"step() of {name}, which was made without capturable=True,"
        )
