"""Sharing tensors: with JAX, without a copy both ways, and by DLPack."""

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
        device: Device of the tensor; the array's own ``tpu`` device unless given.

    Raises:
        TypeError: The array's dtype has no counterpart in torch.
        ValueError: The array is sharded over several devices.

    Example:
        >>> from_jax(jnp.ones(3)).device
        device(type='tpu', index=0)
    """
    from tpu_core.dtypes import TO_TORCH
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


# DLPack's numbers of devices (DLDeviceType), by platform.
_DLPACK_DEVICES = {"cpu": 1, "cuda": 2}
_DLPACK_CPU = _DLPACK_DEVICES["cpu"]


def dlpack_device(t: torch.Tensor) -> tuple[int, int]:
    """`torch.Tensor.__dlpack_device__` of a ``tpu`` tensor: DLPack's device type, and the index.

    Raises:
        BufferError: DLPack has no number for the platform's devices.
    """
    from tpu_core.runtime import runtime

    client = runtime().client
    kind = _DLPACK_DEVICES.get(client.platform.name)
    if kind is None:
        raise BufferError(
            f"DLPack knows no device of the platform '{client.platform.name}': copy the tensor to "
            "the host (t.cpu()), or share it with JAX by tpu_core.to_jax(t)."
        )
    on_host = kind == _DLPACK_CPU
    return kind, 0 if on_host else client.devices[t.device.index or 0].local_hardware_id


def dlpack(
    t: torch.Tensor,
    *,
    stream: Any = None,
    max_version: tuple[int, int] | None = None,
    dl_device: tuple[int, int] | None = None,
    copy: bool | None = None,
) -> Any:
    """`torch.Tensor.__dlpack__` of a ``tpu`` tensor: a capsule.

    Memory is shared where the consumer leaves it as it is: where it asks by ``copy=False``, and for
    those that use the protocol from before versions, JAX among them, which have read-only arrays.
    Others get a copy on the host, because a write would reach other tensors of the same value.

    Raises:
        BufferError: The tensor requires a gradient, or is lazily conjugated or negated, or cannot
            be where ``dl_device`` says without a copy.
    """
    if t.requires_grad:
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
    if t.is_conj() or t.is_neg():
        raise BufferError("Can't export tensors with the conjugate or negative bit set")
    here = dlpack_device(t)
    there = here if dl_device is None else (int(dl_device[0]), int(dl_device[1]))
    moves = there != here
    if moves and (there[0] != _DLPACK_CPU or copy is False):
        raise BufferError(f"Can't export a tensor of DLPack device {here} to {there}")
    if moves or copy or (max_version is not None and copy is None):
        return t.cpu().__dlpack__(max_version=max_version)
    return to_jax(t).__dlpack__(stream=None if stream == -1 else stream)


# What Dynamo says where one of them stands in a function that is compiled as one graph.
for _function in (to_jax, from_jax):
    vars(_function).update(
        _torchdynamo_disable=True,
        _torchdynamo_disable_msg="JAX arrays are not part of a graph. For a JAX function inside of "
        "a compiled one, make it an op with tpu_kernels.jax_op; else share tensors outside of it, "
        "or compile without fullgraph=True",
    )
