"""Values and gradients of a function on a device, to be compared with the CPU's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def value_and_gradients(
    function: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    device: str,
    backward: bool = True,
) -> list[torch.Tensor]:
    """The result of a function, and the gradients of the inputs, as CPU tensors.

    Args:
        function: Takes the inputs and returns one tensor.
        inputs: CPU tensors.
        device: Device of the computation.
        backward: Whether gradients are asked for; each element of the result has another one.
    """
    tensors = [t.detach().to(device) for t in inputs]
    leaves = [t.requires_grad_() for t in tensors if backward and t.is_floating_point()]
    result = function(*tensors)
    results = [result.detach()]
    if backward:
        weight = torch.linspace(0.5, 1.5, result.numel()).reshape(result.shape).to(device)
        results += torch.autograd.grad((result * weight).sum(), leaves)
    return [r.cpu() for r in results]
