"""Hooks for Dynamo where it traces an optimizer's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def setting_capturable(set_capturable: Callable[..., None]) -> Callable[..., None]:
    """Dynamo's ``OptimizerVariable._set_capturable`` for parameters on ``tpu`` too.

    Adam and others count their steps in a tensor for each parameter, on the CPU unless
    ``capturable``. Such a graph would be of two devices, and run op by op.

    Args:
        set_capturable: Dynamo's, which knows a list of devices.
    """

    def set_capturable_on_device(variable: Any, tx: Any) -> None:
        optimizer = variable.value
        for group in optimizer.param_groups:
            parameters = group["params"]
            # Counts that exist already are moved by Dynamo.
            if "capturable" in group and not any(p in optimizer.state for p in parameters):
                group["capturable"] |= all(p.device.type == "tpu" for p in parameters)
        set_capturable(variable, tx)

    return set_capturable_on_device


def asking_cudagraphs(is_static: Callable[[torch.Tensor], bool]) -> Callable[[torch.Tensor], bool]:
    """Dynamo's ``_is_static_for_cudagraphs``, asked of CUDA's tensors only.

    Args:
        is_static: Dynamo's, which imports Inductor to say True of all others: seconds.
    """

    def is_static_for_cudagraphs(x: torch.Tensor) -> bool:
        return not x.is_cuda or is_static(x)

    return is_static_for_cudagraphs
