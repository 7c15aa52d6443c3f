"""PyTorch's own complaint about a wrong call, in the words that users know.

PyTorch's meta functions find most mistakes, but word some of them differently from its kernels,
and let a few pass. So where a meta function complains, and for the calls in `_SUSPICIONS`, the op
is called on the CPU with empty tensors of the same geometry, and what it raises is raised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tpu_core.recorder.variants import overload_name, written_arguments

# Empty tensors cost nothing until a kernel touches them; a call that is all right after all does.
_MOST_BYTES = 1 << 28


def complain(op: torch._ops.OpOverload, target: torch._ops.OpOverload, args: Sequence[Any]) -> None:
    """Raise what ``target`` raises on the CPU for arguments like these, if it does.

    Args:
        op: The overload that was called; its schema names the arguments.
        target: The overload that the CPU has in its place.
        args: Its arguments, on device ``tpu``.
    """
    if sum(x.untyped_storage().nbytes() for x in _tensors(args)) > _MOST_BYTES:
        return
    convert = Twins("cpu")
    schema = op._schema.arguments
    call = [
        torch.device("cpu")
        if a.name == "device"
        else None
        if a.name in ("generator", "pin_memory")
        else tree_map(convert, x)
        for a, x in zip(schema, args)
    ]
    positional = [v for a, v in zip(schema, call) if not a.kwarg_only]
    keywords = {a.name: v for a, v in zip(schema, call) if a.kwarg_only}
    try:
        with torch.no_grad():
            target(*positional, **keywords)
    except NotImplementedError as error:
        # `"bitwise_and_cpu" not implemented for 'Float'` is a mistake; for a dtype that the CPU
        # alone does not have, or an op that it does not have, it is none.
        text = str(error)
        mistake = "not implemented for" in text or "not supported for complex types" in text
        if not mistake or any(name in text for name in _CPU_LACKS):
            return
        raise NotImplementedError(text.replace('_cpu"', '_tpu"')) from None
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        raise type(error)(*error.args) from None


_CPU_LACKS = ("Half", "BFloat16", "Float8", "UInt16", "UInt32", "UInt64")


class Twins:
    """Tensors on another device in place of those on ``tpu``, with the same geometry and no values.

    Tensors that share a storage have twins that do, as PyTorch's overlap checks compare storages:
    ``x[1:].copy_(x[:-1])`` must look the same. One tensor has one twin: an ``out=`` that is also an
    operand must not be resized.

    Args:
        device: Where the twins are.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._twins: dict[int, torch.Tensor] = {}

    def __call__(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in self._twins:
            self._twins[id(x)] = self._of_host(x) if x.device.type != "tpu" else self._twin(x)
        return self._twins[id(x)]

    def _of_host(self, x: torch.Tensor) -> torch.Tensor:
        """What stands for a tensor that is not on ``tpu``."""
        return x

    def _twin(self, x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        twin = self._storages.get(storage._cdata)
        if twin is None:
            twin = torch.UntypedStorage(storage.nbytes(), device=self.device)
            if self.device == "cpu" and not x.is_floating_point():
                twin.fill_(0)  # type: ignore[attr-defined] # indices in range; of StorageBase
            self._storages[storage._cdata] = twin
        # The device is named because torch.set_default_device may be in force.
        empty = torch.empty(0, dtype=x.dtype, device=self.device)
        return empty.set_(twin, x.storage_offset(), x.size(), x.stride())


def suspicious(op: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    """Whether the meta function of ``op`` may have let a mistake pass."""
    named = {a.name: x for a, x in zip(op._schema.arguments, args)}
    # Few kernels take complex numbers, and meta functions seldom know which.
    if _dim_out_of_range(named) or _may_overlap(op, args) or _complex(args):
        return True
    name = overload_name(op).split(".")[1]
    if name.startswith("_foreach_") and name.endswith("_") and _whole_numbers(named["self"]):
        return True
    test = _SUSPICIONS.get(name.rstrip("_"))
    return test is not None and test(named)


Arguments = dict[str, Any]


def _dim_out_of_range(args: Arguments) -> bool:
    dim, x = args.get("dim"), args.get("self")
    if dim is None or not isinstance(x, torch.Tensor):
        return False
    n = max(x.dim(), 1)
    return any(not -n <= d < n for d in (dim if isinstance(dim, (list, tuple)) else [dim]))


def _may_overlap(op: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    """Whether a written tensor shows memory twice, or memory that another argument shows."""
    names = written_arguments(op)
    written = [x for a, x in zip(op._schema.arguments, args) if a.name in names]
    storages = Counter(x.untyped_storage()._cdata for x in _tensors(args))
    return any(
        storages[x.untyped_storage()._cdata] > 1
        or any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride()))
        for x in _tensors(written)
    )


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _complex(args: Sequence[Any]) -> bool:
    return any(x.is_complex() for x in _tensors(args))


def _whole_numbers(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a result may not fit the dtype that it is written to."""
    return any(not (x.is_floating_point() or x.is_complex()) for x in tensors)


def _dtypes_differ(args: Arguments) -> bool:
    return len({x.dtype for x in args.values() if isinstance(x, torch.Tensor)}) > 1


def _floats(args: Arguments) -> bool:
    return any(
        x.is_floating_point() or x.is_complex()
        if isinstance(x, torch.Tensor)
        else isinstance(x, (float, complex))
        for x in args.values()
    )


def _bools(args: Arguments) -> bool:
    return any(x.dtype is torch.bool for x in args.values() if isinstance(x, torch.Tensor))


def _no_floats(args: Arguments) -> bool:
    return not (args["self"].is_floating_point() or args["self"].is_complex())


def _imaginary(args: Arguments) -> bool:
    return isinstance(args.get("value"), complex) and not args["self"].is_complex()


def _put(args: Arguments) -> bool:
    x, values = args["self"], args["values"]
    if values.dtype != x.dtype:
        return True
    indices = tuple(
        slice(None) if i is None else torch.empty(i.shape, dtype=torch.int64, device="meta")
        for i in args["indices"]
    )
    target = torch.empty(x.shape, device="meta")[indices].shape
    try:
        return torch.broadcast_shapes(values.shape, target) != target
    except RuntimeError:
        return True


def _index_not_integer(args: Arguments) -> bool:
    return args["index"].dtype not in (torch.int64, torch.int32)


def _nothing_to_reduce(args: Arguments) -> bool:
    return args["self"].numel() == 0 and args.get("dim") is None


def _convolution(args: Arguments) -> bool:
    weight, bias = args["weight"], args.get("bias")
    if min(args["padding"]) < 0 or min(*args["stride"], *args["dilation"]) < 1:
        return True
    channels = weight.shape[1 if args["transposed"] else 0]
    if args["transposed"]:
        channels *= args["groups"]
    elif channels % args["groups"]:
        return True
    return (bias is not None and tuple(bias.shape) != (channels,)) or _dtypes_differ(args)


def _range(args: Arguments) -> bool:
    return args.get("to") is not None and (args.get("from") or 0) >= args["to"]


def _draws(args: Arguments) -> bool:
    x, n = args["self"], args["num_samples"]
    if x.dim() == 0 or not x.is_floating_point() or n < 1:
        return True
    return x.shape[-1] > 1 << 24 or (not args["replacement"] and n > x.shape[-1])


def _source_shape(args: Arguments) -> bool:
    x, source = args["self"], args["source"]
    return x.dim() != source.dim()


_SUSPICIONS: dict[str, Callable[[Arguments], bool]] = {
    **dict.fromkeys(
        "mm bmm addmm baddbmm addbmm mv addmv dot vdot linear complex polar".split(),
        _dtypes_differ,
    ),
    **dict.fromkeys(
        "bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift "
        "gcd lcm".split(),
        _floats,
    ),
    **dict.fromkeys("convolution convolution_overrideable".split(), _convolution),
    **dict.fromkeys("max min argmax argmin".split(), _nothing_to_reduce),
    **dict.fromkeys("abs neg sign floor ceil round trunc relu remainder fmod rsub".split(), _bools),
    **dict.fromkeys("_softmax _log_softmax std var std_mean var_mean".split(), _no_floats),
    **dict.fromkeys("index_put _index_put_impl".split(), _put),
    "fill": _imaginary,
    "index_select": _index_not_integer,
    "index_add": _source_shape,
    "bucketize": lambda args: args["boundaries"].dim() != 1,
    "masked_scatter": lambda args: args["mask"].dtype is not torch.bool,
    "random": _range,
    "multinomial": _draws,
}
