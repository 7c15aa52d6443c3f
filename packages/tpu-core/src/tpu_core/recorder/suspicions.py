"""Calls about which PyTorch's meta functions may be silent where its kernels complain."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpu_core.recorder.error_parity import has_no_more, size_of
from tpu_core.recorder.error_parity import tensors as _tensors
from tpu_core.recorder.functional_variants import is_out_variant, overload_name, written_arguments

# A trial for the dtypes alone must not cost more than the step that it is in.
_MOST_BYTES_FOR_DTYPES = 1 << 24


def suspicious(op: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    """Return whether the meta function of ``op`` may have let a mistake pass."""
    named = {a.name: x for a, x in zip(op._schema.arguments, args)}
    if _dim_out_of_range(named) or _may_overlap(op, args) or _out_differs(op, args):
        return True
    if _does_not_fit(args) or _out_of_bounds(op, args) or _first_of_dtypes(op, args):
        return True
    if divides(op) and _may_be_zero(named.get("other")):
        return True
    if isinstance(named.get("alpha"), bool) or _imaginary_for_reals(args):
        return True
    name = overload_name(op).split(".")[1]
    if name.startswith("_foreach_") and name.endswith("_"):
        if _whole_numbers(named["self"]) or _outgrows(named):
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


def _imaginary_for_reals(args: Sequence[Any]) -> bool:
    return any(isinstance(x, complex) for x in args) and not any(
        x.is_complex() for x in _tensors(args)
    )


def _may_overlap(op: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    """Return whether a written tensor shows memory twice, or memory that another argument shows."""
    names = written_arguments(op)
    if not names:
        return False
    written = [x for a, x in zip(op._schema.arguments, args) if a.name in names]
    storages = Counter(x.untyped_storage()._cdata for x in _tensors(args))
    return any(
        storages[x.untyped_storage()._cdata] > 1
        or any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride()))
        for x in _tensors(written)
    )


def _out_differs(op: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    """Return whether an ``out=`` tensor has a dtype that no operand has."""
    if not is_out_variant(op):
        return False
    outs = {x.dtype for a, x in zip(op._schema.arguments, args) if a.is_out for x in _tensors(x)}
    operands = [x for a, x in zip(op._schema.arguments, args) if not a.is_out]
    return not outs <= {x.dtype for x in _tensors(operands)}


def _does_not_fit(args: Sequence[Any]) -> bool:
    """Return whether a number does not fit the dtype of a tensor; `hash_refusable` in the
    extension.
    """
    numbers = [
        x
        for a in args
        for x in _numbers(a)
        if not isinstance(x, (bool, complex)) and not abs(x) <= 127
    ]
    numbers += [x.item() for x in _tensors(args) if x.device.type == "cpu" and x.dim() == 0]
    return bool(numbers) and any(
        _overflows(number, x.dtype) for number in numbers for x in _tensors(args)
    )


def _overflows(number: Any, dtype: torch.dtype) -> bool:
    if isinstance(number, complex) or dtype is torch.bool:
        return False
    if dtype.is_floating_point or dtype.is_complex:
        return math.isfinite(number) and abs(number) > torch.finfo(dtype).max
    info = torch.iinfo(dtype)
    return not -info.max - 1 <= number <= info.max


_DIVISIONS = frozenset({"div", "divide", "floor_divide", "fmod", "remainder"})


def divides(op: torch._ops.OpOverload) -> bool:
    """Return whether PyTorch's kernel raises an error where an integer is divided by zero."""
    return overload_name(op).split(".")[1].rstrip("_") in _DIVISIONS


def _may_be_zero(divisor: Any) -> bool:
    """Return whether the host knows a divisor to be 0 in some dtype: 256 is in eight bits."""
    if isinstance(divisor, torch.Tensor):
        if divisor.device.type != "cpu" or divisor.dim() or divisor.is_floating_point():
            return False
        divisor = divisor.item()
    return isinstance(divisor, int) and divisor & 0xFF == 0


def _out_of_bounds(op: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    """Return whether a number lies outside the bounds that PyTorch's kernel checks."""
    from tpu_core.recorder.op_schema import bounds

    for place, least, most, other in bounds(op):
        number = args[place]
        upper = args[other] if other >= 0 else most
        if number is not None and upper is not None and not least <= number <= upper:
            return True
    return False


_FLOATS = frozenset({torch.float32, torch.float64})
_HALVES = frozenset({torch.float16, torch.bfloat16})
# Ops of which a trial says nothing: `histc` takes more dtypes on CUDA than on the CPU, which
# programs ask for by the device's type; offsets of ones and zeros do not count the rows.
NOT_TRIED = frozenset({"histc", "_padded_dense_to_jagged_forward"})
_passed: set[tuple[Any, ...]] = set()


@functools.cache
def _are_dtypes(op: torch._ops.OpOverload) -> tuple[bool, ...]:
    """Of each argument, whether it is a dtype, in whose place the dispatcher has a number."""
    return tuple("ScalarType" in str(a.real_type) for a in op._schema.arguments)


def _dtypes_of(op: torch._ops.OpOverload, args: Sequence[Any]) -> tuple[Any, ...]:
    """The op with the dtypes, the types of numbers, and the names of methods of a call."""
    dtypes = tuple(x.dtype for x in _tensors(args))
    given = zip(_are_dtypes(op), args)
    names = tuple(x for is_dtype, x in given if isinstance(x, str) or (is_dtype and x is not None))
    return op, dtypes, names, tuple(frozenset(map(type, _numbers(a))) for a in args)


def _numbers(argument: Any) -> list[Any]:
    items = argument if isinstance(argument, (list, tuple)) else [argument]
    return [x for x in items if isinstance(x, (int, float, complex))]


def _first_of_dtypes(op: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    """Return whether no such call has passed with these dtypes, and not all of them are common.

    Few kernels take every dtype, and meta functions seldom know which. Backward ops are called by
    autograd, with what the device's forward ops saved: statistics in float32, as on CUDA, which
    the CPU's kernels refuse.
    """
    name = overload_name(op)
    key = _dtypes_of(op, args)
    _, dtypes, named, _ = key
    if "backward" in name and any(d.is_floating_point or d.is_complex for d in dtypes):
        return False
    if name.split(".")[1] in NOT_TRIED:
        return False
    # Results of integers or booleans have an ``out=`` of their own dtype, whatever the operands'.
    if not named and len(set(dtypes)) == 1 and not is_out_variant(op):
        if dtypes[0] in _FLOATS or (dtypes[0] in _HALVES and not has_no_more(op)):
            return False
    return key not in _passed and size_of(args) <= _MOST_BYTES_FOR_DTYPES


def passed(op: torch._ops.OpOverload, args: Sequence[Any]) -> None:
    """Suspect the dtypes of a call no more, now that the CPU's op took them."""
    _passed.add(_dtypes_of(op, args))


def _whole_numbers(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether a result may not fit the dtype that it is written to."""
    return any(not (x.is_floating_point() or x.is_complex()) for x in tensors)


def _outgrows(args: Arguments) -> bool:
    """Return whether a foreach op's operand does not broadcast to the tensor that is written."""

    def fits(y: torch.Tensor, x: torch.Tensor) -> bool:
        sizes = zip(reversed(x.shape), reversed(y.shape))
        return y.dim() <= x.dim() and all(n in (1, m) for m, n in sizes)

    return any(
        isinstance(y, torch.Tensor) and not fits(y, x)
        for others in args.values()
        if isinstance(others, (list, tuple))
        for x, y in zip(args["self"], others)
    )


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
    return any(
        x.dtype is torch.bool if isinstance(x, torch.Tensor) else isinstance(x, bool)
        for x in args.values()
    )


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
    if args["groups"] < 1 or weight.shape[0] % args["groups"]:
        return True
    channels = weight.shape[1] * args["groups"] if args["transposed"] else weight.shape[0]
    if not args["input"].numel() or not weight.numel():
        return True
    # PyTorch refuses it where it is smaller than neither the stride nor the dilation.
    extra = args["output_padding"] if args["transposed"] else ()
    if any(n >= min(*args["stride"], *args["dilation"]) for n in extra if n):
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


def _is_not(x: Any, dtype: torch.dtype) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype is not dtype


def _list_norm(args: Arguments) -> bool:
    return isinstance(args["ord"], bool) or args["dtype"] is not None


def _outgrows_target(args: Arguments) -> bool:
    """Return whether shapes differ where PyTorch computes in the memory of an operand's copy."""
    optional = (args.get("weight"), args.get("pos_weight"))
    return any(x is not None and x.shape != args["self"].shape for x in (args["target"], *optional))


def _has_dtype(args: Arguments, dtype: torch.dtype) -> bool:
    return any(x.dtype is dtype for x in _tensors(list(args.values())))


_SUSPICIONS: dict[str, Callable[[Arguments], bool]] = {
    **dict.fromkeys(
        "mm bmm addmm baddbmm addbmm mv addmv dot vdot linear".split(),
        _dtypes_differ,
    ),
    **dict.fromkeys(
        ("complex", "polar"), lambda args: _dtypes_differ(args) or _has_dtype(args, torch.bfloat16)
    ),
    **dict.fromkeys(
        "bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift "
        "gcd lcm".split(),
        _floats,
    ),
    **dict.fromkeys("convolution convolution_overrideable".split(), _convolution),
    **dict.fromkeys("max min argmax argmin".split(), _nothing_to_reduce),
    **dict.fromkeys(
        "abs neg sign floor ceil round trunc relu remainder fmod sub rsub".split(), _bools
    ),
    **dict.fromkeys("_softmax _log_softmax std var std_mean var_mean".split(), _no_floats),
    **dict.fromkeys("index_put _index_put_impl".split(), _put),
    "fill": _imaginary,
    "index_select": _index_not_integer,
    "index_add": _source_shape,
    "searchsorted": lambda args: _is_not(args.get("sorter"), torch.int64),
    **dict.fromkeys("_foreach_norm _foreach_powsum".split(), _list_norm),
    "binary_cross_entropy_with_logits": _outgrows_target,
    "bucketize": lambda args: args["boundaries"].dim() != 1,
    "masked_scatter": lambda args: args["mask"].dtype is not torch.bool,
    "random": _range,
    "multinomial": _draws,
    "glu_jvp": lambda args: 2 * args["glu"].numel() != args["x"].numel(),
    **dict.fromkeys(("any", "all"), lambda args: "out" in args),
    "as_strided_scatter": lambda args: True,
    **dict.fromkeys(
        ("gelu", "gelu_backward"), lambda args: args["approximate"] not in ("none", "tanh")
    ),
}
