"""Sharing tensors with JAX, without a copy both ways."""

from __future__ import annotations

from typing import Any

import torch

from tpu_core import _C


def to_jax(t: torch.Tensor) -> Any:
    """The value of a ``tpu`` tensor as a `jax.Array` on the same device.

    The array shares the tensor's memory and does not change: a later in-place op gives the tensor a
    new value. A tensor that is a view of part of a storage is copied on the device first. Gradients
    do not flow through.

    Raises:
        ValueError: The tensor is not on device ``tpu``.

    Example:
        >>> jnp.sum(tpu_core.to_jax(torch.ones(3, device="tpu")))
        Array(3., dtype=float32)
    """
    if t.device.type != "tpu":
        raise ValueError(f"to_jax takes a tensor on device 'tpu', not on '{t.device}'.")
    t = t.detach().resolve_conj().resolve_neg()
    if not _C.is_whole(t):
        t = _C.own_value(t)
    array = _C.value_array(t, "to_jax")
    _C.mark_shared(t)
    return array


def from_jax(array: Any, device: Any = None) -> torch.Tensor:
    """A `jax.Array` as a ``tpu`` tensor that shares its memory.

    In-place ops on the tensor leave the array as it is. An array that lives elsewhere is copied to
    the device first.

    Args:
        array: A fully addressable array on one device.
        device: Where the tensor shall be; the array's own ``tpu`` device unless given.

    Raises:
        TypeError: The array's dtype has no counterpart in torch.
        ValueError: The array is sharded over several devices.
    """
    from tpu_core.lowering.dtypes import TO_TORCH
    from tpu_core.runtime import runtime

    devices = runtime().client.devices
    if len(array.devices()) != 1:
        raise ValueError(f"from_jax takes an array on one device, not on {len(array.devices())}.")
    (held,) = array.devices()
    if device is not None:
        index = torch.device(device).index or 0
    else:
        index = _C.current_device()
        if held in devices and devices[index] != held:
            index = devices.index(held)
    if held != devices[index]:
        import jax

        array = jax.device_put(array, devices[index])
    dtype = TO_TORCH.get(array.dtype)
    if dtype is None:
        raise TypeError(f"JAX's {array.dtype} has no counterpart in torch.")
    shell = torch.empty(array.shape, dtype=dtype, device=torch.device("tpu", index))
    return _C.from_array(array, shell, True)


# What Dynamo says where one of them stands in a function that is compiled as one graph.
for _function in (to_jax, from_jax):
    vars(_function).update(
        _torchdynamo_disable=True,
        _torchdynamo_disable_msg="JAX arrays are not part of a graph. For a JAX function inside of "
        "a compiled one, make it an op with tpu_kernels.jax_op; else share tensors outside of it, "
        "or compile without fullgraph=True",
    )
