"""Check that the layers of a stack are equal."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)


def check_equal(layers: Sequence[nn.Module], may_differ: Collection[str] = ()) -> None:
    """Check that layers compute the same function of their own parameters and buffers.

    Compared are the submodules' names and types, parameters, buffers, and attributes that are
    numbers, strings, dtypes or tuples of them.

    Args:
        layers: The layers.
        may_differ: Names of attributes that are left out.

    Raises:
        ValueError: Names the layer and the first difference.
    """
    first = dict(_facts(layers[0], may_differ))
    for i, layer in enumerate(layers[1:], start=1):
        found = dict(_facts(layer, may_differ))
        if found == first:
            continue
        name = next(n for n in {**first, **found} if first.get(n) != found.get(n))
        raise ValueError(
            "scan_layers runs one layer's program for all layers, and these are not equal.\n"
            f"  layer 0: {name}: {first.get(name, 'missing')}\n"
            f"  layer {i}: {name}: {found.get(name, 'missing')}\n"
            "What to do: make the layers equal, call those that differ outside of scan_layers, or, "
            "if the layer's result does not depend on it, name the attribute in may_differ."
        )


def _facts(layer: nn.Module, may_differ: Collection[str]) -> Iterator[tuple[str, str]]:
    """Facts that must be equal, by name."""
    for path, module in layer.named_modules():
        prefix = f"{path}." if path else ""
        yield f"type of {path}" if path else "type", type(module).__qualname__
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            yield prefix + name, "None" if tensor is None else describe(tensor)
        for name, value in vars(module).items():
            if not name.startswith("_") and name not in may_differ and _is_plain(value):
                yield prefix + name, repr(value)
        if module._forward_hooks or module._forward_pre_hooks:
            # Hooks would be called once, when the layer is traced, and for the first layer alone.
            raise ValueError(
                f"scan_layers cannot call the forward hooks of {path or 'a layer'} "
                f"({type(module).__qualname__}). What to do: remove them, or call the layers one "
                "by one."
            )


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def describe(tensor: torch.Tensor) -> str:
    """Shape, dtype and so on, as messages show them."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    grad = "" if tensor.requires_grad or not tensor.is_floating_point() else ", without gradient"
    kind = " parameter" if isinstance(tensor, nn.Parameter) else ""
    return f"{dtype}{list(tensor.shape)}{kind} on {tensor.device.type}{grad}"
