"""Compiled optimizers: their step counts live on the device, as Dynamo has it on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


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
