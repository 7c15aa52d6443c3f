"""Ops of other packages: lookup of lowerings, recording, calls past the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tpu_core import _C
from tpu_core.dtypes import TO_TORCH
from tpu_core.lowering.registry import REGISTRY, Lowering

if TYPE_CHECKING:
    from tpu_core.compiler.programs import Program
    from tpu_core.compiler.segment import Segment


def find_lowering(op: object) -> Lowering | None:
    """The lowering of a functional overload, or None where there is none.

    Args:
        op: The overload, ``torch.ops.aten.mm.default``, or its name, ``"aten.mm.default"``. Those
            of ATen are there once the device is started, or after `load_lowerings`.

    Example:
        >>> find_lowering("aten.mm.default").fn(a, b)  # JAX values
    """
    return REGISTRY.get(str(op))


def meta_function(op: str) -> Callable[..., Any]:
    """The device's own meta function of an overload, where PyTorch's is another device's.

    Args:
        op: Name of the overload, ``"aten._grouped_mm.default"``.

    Raises:
        KeyError: PyTorch's own serves the device.

    Example:
        >>> meta_function("aten._grouped_mm.default")(a, b, offs).shape  # of meta tensors
    """
    from tpu_core.recorder.meta_functions import META_FUNCTIONS

    return META_FUNCTIONS[op]


def record_op(
    name: str,
    *,
    is_differentiable: bool = True,
    derivatives: tuple[Callable[[], None], Callable[[], None]] | None = None,
    spanning: Callable[[Segment], Program | None] | None = None,
) -> None:
    """Have the device record an op that `torch.library` defines, rather than run it on the CPU.

    Its lowering is registered with `register`. Gradients are those of
    `torch.library.register_autograd` unless an argument says otherwise.

    Args:
        name: Of the op, all overloads of it: ``"mylib::scale"``.
        is_differentiable: False lets the op pass autograd by: its results require no gradient.
        derivatives: Two functions, each called once, before the first call for which autograd needs
            it: the first defines the op's backward, the second its forward-mode derivative.
        spanning: For an op that runs on the devices of several processes: makes the program of each
            new segment that has it, whose ``handlers`` are None. Where it returns None the segment
            runs op by op; it is called again where a program gives None.

    Raises:
        RuntimeError: No library has defined the op.

    Example:
        >>> library = torch.library.Library("mylib", "DEF")
        >>> library.define("scale(Tensor x, float by) -> Tensor")
        >>> library.impl("scale", lambda x, by: torch.empty_like(x), "Meta")
        >>> register("mylib.scale.default", lambda x, by: x * by)
        >>> record_op("mylib::scale")
    """
    schemas = torch._C._jit_get_schemas_for_operator(name)
    if not schemas:
        raise RuntimeError(f"No library has defined the op '{name}'.")
    _C.register_overloads([name])
    if derivatives is not None:
        _C.register_differentiable(name, *derivatives)
    elif not is_differentiable:
        _C.register_not_differentiable(name)
    if spanning is not None:
        from tpu_core.compiler.spanning import register_spanning

        for schema in schemas:
            overload = schema.overload_name or "default"
            register_spanning(f"{name.replace('::', '.')}.{overload}", spanning)


def op_caller(
    name: str, general: Callable[..., Any], others: tuple[Any, ...] | None = None
) -> Callable[..., Any]:
    """A function that calls an op with less overhead than ``torch.ops`` has.

    Args:
        name: Of the op, ``"mylib::scale"``.
        general: Called in its place, with the same arguments, wherever PyTorch may have to act
            between the call and the device: for subclasses, tensors of other devices, gradients,
            modes, transforms.
        others: For an op ``(Tensor[], ...) -> Tensor[]`` whose other arguments are the same in
            every call: these. The function takes the list of tensors alone.

    Example:
        >>> scale = op_caller("mylib::scale", torch.ops.mylib.scale.default)
        >>> y = scale(x, 2.0)
        >>> step = op_caller("mylib::step", lambda tensors: run(tensors, 0.1), others=(0.1,))
        >>> new = step([x, y])
    """
    if others is None:
        return _C.op_caller(name, general)
    return _C.list_caller(name, others, general)


def call_through(type: type) -> None:
    """Have calls of instances of a class go to their attribute ``_call``, which may change.

    Args:
        type: A class without ``__call__``; each instance sets ``_call`` to a callable.

    Example:
        >>> call_through(JaxOp)
        >>> op._call = op_caller("mylib::scale", general)
        >>> y = op(x, 2.0)
    """
    _C.call_through(type)


def to_torch_dtype(dtype: Any) -> torch.dtype | None:
    """PyTorch's dtype of a NumPy or JAX dtype; None where it has none, as for random keys.

    Example:
        >>> to_torch_dtype(jnp.bfloat16)
        torch.bfloat16
    """
    try:
        return TO_TORCH.get(np.dtype(dtype))
    except TypeError:  # one of JAX's own
        return None
