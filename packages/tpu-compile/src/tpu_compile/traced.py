"""Functions that Dynamo traces as it does the user's; it skips the rest of this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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


def layer_step(
    layer: torch.nn.Module, names: Sequence[str], args: Sequence[Any]
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The body of a loop over layers, for PyTorch's ``scan``.

    Args:
        layer: A layer.
        names: Of its parameters and buffers, in the order of the loop's values.
        args: Arguments of every layer, beside the hidden state.
    """

    def step(hidden: torch.Tensor, values: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        result = torch.func.functional_call(layer, dict(zip(names, values)), (hidden, *args))
        return result, result.new_zeros(())

    return step
