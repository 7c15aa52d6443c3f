"""Functions that Dynamo traces as it does the user's; it skips the rest of this package."""

from __future__ import annotations

from collections.abc import Callable

import torch


def admitting_device(check: Callable[..., None]) -> Callable[..., None]:
    """A check of ``flex_attention``'s inputs that lets those on ``tpu`` pass.

    Args:
        check: PyTorch's, which knows a list of devices.
    """

    def validate_device(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if query.device.type != "tpu":
            check(query, key, value)

    return validate_device
