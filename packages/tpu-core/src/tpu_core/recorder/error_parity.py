"""Error parity: PyTorch's own error for a wrong call.

PyTorch's meta functions find most mistakes, but word some of them differently from its kernels,
and let a few pass. So where a meta function complains, and for suspicious calls
(`tpu_core.recorder.suspicions`), the op is tried on the CPU with placeholders of the same geometry.

Only ops of PyTorch are tried: a kernel of another library may do more than compute, and refuse
the CPU as such.

No error is raised from what a placeholder holds. A call that passes with one kind of placeholder is
no mistake of its arguments. One that fails with all of them is `Refused`: it runs on the CPU with
the real values, which raises PyTorch's error or has a result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from tpu_core.errors import GraphCaptureError
from tpu_core.recorder.functional_variants import lowering_of, overload_name

# Placeholders cost nothing until they are filled; a call that is all right after all does.
_MOST_BYTES = 1 << 28

# Neither XLA nor any op of PyTorch takes more.
_MOST_DIMS = 64

# Whole numbers of 1 divide, of 0 are in range of every index.
_FILLS = (1, 0)

_ERRORS = (RuntimeError, IndexError, TypeError, ValueError)


class Refused(Exception):
    """A call that the CPU's op refuses, whatever the values of its tensors.

    Args:
        target: The overload that the CPU has in place of the one that was called.
    """

    def __init__(self, target: torch._ops.OpOverload) -> None:
        super().__init__(target)
        self.target = target

    def run(self, op: torch._ops.OpOverload, args: tuple[Any, ...]) -> Any:
        """Run the call on the CPU with its real values; handles all calls of its signature."""
        from tpu_core.recorder import fallback

        try:
            return fallback.run_on_cpu(op, args, self.target)
        except GraphCaptureError as error:  # the values are not there
            error.add_note(f"PyTorch refuses this call: {op} outside of the capture says why.")
            raise
        except _ERRORS as error:
            # PyTorch's error for the user's call, without the frames below it.
            raise of_device(error) from None


_Error = TypeVar("_Error", bound=Exception)


def of_device(error: _Error) -> _Error:
    """An error of a CPU kernel with the device's name where the kernel has its own:
    `"bitwise_and_cpu" not implemented for 'Float'`.
    """
    own = [a.replace('_cpu"', '_tpu"') if isinstance(a, str) else a for a in error.args]
    return type(error)(*own)


def check(op: torch._ops.OpOverload, target: torch._ops.OpOverload, args: Sequence[Any]) -> None:
    """Raise `Refused` if ``target`` refuses arguments like these on the CPU.

    Args:
        op: The overload that was called; its schema names the arguments.
        target: The overload that the CPU has in its place.
        args: Its arguments, on device ``tpu``.
    """
    if _is_tried(op, args) and fails(op, target, args):
        raise Refused(target) from None


def doubt(op: torch._ops.OpOverload, target: torch._ops.OpOverload, args: Sequence[Any]) -> None:
    """Raise `Refused` for a call that the meta function refuses, if the CPU has the op."""
    convert = MetaReplicas("cpu", _FILLS[0])
    if _is_tried(op, args) and _fails(op, target, args, convert) is not None:
        raise Refused(target) from None


def _is_tried(op: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    return op.namespace == "aten" and size_of(args) <= _MOST_BYTES


def fails(
    op: torch._ops.OpOverload,
    target: torch._ops.OpOverload,
    args: Sequence[Any],
    placeholders: Callable[[int], MetaReplicas] | None = None,
) -> bool:
    """Return whether a call fails with all kinds of placeholders.

    Args:
        op, target, args: As of `check`.
        placeholders: Makes those of a fill; of the arguments' geometry unless given.
    """
    make = placeholders or functools.partial(MetaReplicas, "cpu")
    return all(_fails(op, target, args, make(fill)) for fill in _FILLS)


def _fails(
    op: torch._ops.OpOverload,
    target: torch._ops.OpOverload,
    args: Sequence[Any],
    convert: MetaReplicas,
) -> bool | None:
    """Return whether a call with placeholders raises; None where that says nothing about the
    call.
    """
    schema = op._schema.arguments
    call = [
        torch.device("cpu")
        if a.name == "device"
        else torch.Generator()
        if a.name == "generator"
        else None
        if a.name == "pin_memory"
        else convert(x)
        for a, x in zip(schema, args)
    ]
    positional = [v for a, v in zip(schema, call) if not a.kwarg_only]
    keywords = {a.name: v for a, v in zip(schema, call) if a.kwarg_only}
    try:
        with torch.no_grad(), _draws_restored(op):
            target(*positional, **keywords)
    except NotImplementedError as error:
        # `"bitwise_and_cpu" not implemented for 'Float'` is a mistake; for a dtype that the CPU
        # alone does not have, or an op that it does not have, it is none.
        text = str(error)
        lacks_dtype = any(name in text for name in _CPU_LACKS) and not has_no_more(op)
        return None if lacks_dtype or lacks_kernel(error) else True
    except _ERRORS:
        return True
    return False


@contextmanager
def _draws_restored(op: torch._ops.OpOverload) -> Iterator[None]:
    """The state of the CPU's generator is kept: a trial draws nothing that the user would miss."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        yield
        return
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


# Names of dtypes, as messages have them: 'Half', or of torch 2.15 "Got Half". Not 'ComplexHalf',
# which XLA has not either.
_CPU_LACKS = tuple(
    before + name
    for before in ("'", "Got ")
    for name in ("Half", "BFloat16", "Float8", "UInt16", "UInt32", "UInt64")
)

# What PyTorch's dispatcher says of an op, and its kernels of ops that are for other backends.
_NO_KERNEL = (
    "Could not run",
    "no fallback function is registered",
    "please use TORCH_LIBRARY_IMPL",
)


def lacks_kernel(error: NotImplementedError) -> bool:
    """Return whether an error of the CPU says that it does not have the op, and not that the op
    does not take such arguments, for which torch 2.15 has the same class.
    """
    return any(words in str(error) for words in _NO_KERNEL)


def has_no_more(op: torch._ops.OpOverload) -> bool:
    """Return whether the device has no more dtypes for the op than the CPU: XLA calls LAPACK, and
    has neither bits of floats, nor transforms or complex numbers of narrow ones.
    """
    entry = lowering_of(op)
    if entry is not None and entry.family in ("linalg", "lu", "fft"):
        return True
    name = overload_name(op)
    return name.startswith(
        ("aten.bitwise_", "aten.__", "aten.gcd", "aten.lcm", "aten.complex.", "aten.polar.")
    )


def size_of(args: Sequence[Any]) -> int:
    """Bytes of the storages of all tensors among arguments."""
    return sum(x.untyped_storage().nbytes() for x in tensors(args))


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors of an argument, or of a list of arguments."""
    if isinstance(tree, (list, tuple)):
        return [t for x in tree for t in tensors(x)]
    return [tree] if isinstance(tree, torch.Tensor) else []


class MetaReplicas:
    """Tensors on another device in place of those on ``tpu``, with the same geometry and no values.

    Tensors that share a storage have twins that do, as PyTorch's overlap checks compare storages:
    ``x[1:].copy_(x[:-1])`` must look the same. One tensor has one twin: an ``out=`` that is also an
    operand must not be resized.

    Args:
        device: Device of the replicas.
        fill: Value of all elements of new storages.
    """

    def __init__(self, device: str, fill: int = 0) -> None:
        self.device = device
        self._fill = fill
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._twins: dict[int, torch.Tensor] = {}

    def __call__(self, x: Any) -> Any:
        """The replica of a tensor, or an argument of an op with the replicas of its tensors."""
        if isinstance(x, (list, tuple)):
            return [self(item) for item in x]
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in self._twins:
            self._twins[id(x)] = self._of_host(x) if x.device.type != "tpu" else self._twin(x)
        return self._twins[id(x)]

    def _of_host(self, x: torch.Tensor) -> torch.Tensor:
        """Placeholder for a tensor that is not on ``tpu``."""
        return x

    def _twin(self, x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        twin = self._storages.get(storage._cdata)
        # The device is named because torch.set_default_device may be in force.
        empty = torch.empty(0, dtype=x.dtype, device=self.device)
        if twin is None:
            twin = torch.UntypedStorage(storage.nbytes(), device=self.device)
            if self.device == "cpu":
                self._initialize(empty.set_(twin))
            self._storages[storage._cdata] = twin
        return empty.set_(twin, x.storage_offset(), x.size(), x.stride())

    def _initialize(self, memory: torch.Tensor) -> None:
        memory.fill_(self._fill)


class SmallReplicas(MetaReplicas):
    """Contiguous CPU tensors with other sizes.

    Args:
        sizes: The size for each that is replaced; numbers of lists among them too.
        fill: Value of all elements.
    """

    def __init__(self, sizes: Mapping[int, int], fill: int) -> None:
        super().__init__("cpu", fill)
        self._sizes = sizes

    def __call__(self, x: Any) -> Any:
        """As of `MetaReplicas`; an integer that is such a size is replaced."""
        if isinstance(x, int) and not isinstance(x, bool):
            return self._sizes.get(x, x)
        return super().__call__(x)

    def _twin(self, x: torch.Tensor) -> torch.Tensor:
        shape = [self._sizes.get(n, n) for n in x.shape]
        twin = torch.empty(shape, dtype=x.dtype, device="cpu")
        self._initialize(twin)
        return twin


class Copies(MetaReplicas):
    """MetaReplicas on the CPU with the values of the tensors.

    Args:
        read: The value of a tensor on ``tpu``, as a CPU tensor.
    """

    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__("cpu")
        self._read = read

    def _twin(self, x: torch.Tensor) -> torch.Tensor:
        twin = super()._twin(x)
        if x.numel() and x.dim() <= _MOST_DIMS:
            # One element of a dim that shows the same memory again and again.
            dims = [slice(1) if s == 0 else slice(None) for s in x.stride()]
            twin[tuple(dims)].copy_(self._read(x)[tuple(dims)])
        return twin

    def _initialize(self, memory: torch.Tensor) -> None:
        pass  # all that is read is copied
