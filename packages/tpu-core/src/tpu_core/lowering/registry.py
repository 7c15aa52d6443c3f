"""The one registry of ATen lowerings.

A lowering is a function over JAX values that computes one *functional* ATen overload. Eager,
``torch.compile``, export and the docs all read this table; in-place and ``out=`` overloads are
derived from the functional entry (`tpu_core.lowering.variants`), never written.

Calling convention of a lowering
    * It is called with the arguments of the overload's schema. ``layout``, ``device``,
      ``pin_memory``, ``memory_format`` and ``generator`` are dropped before the call.
    * A ``Tensor`` arrives as a JAX array of the tensor's logical shape and dtype (x64 is on), an
      optional one may be ``None``, a ``Tensor[]`` is a list.
    * A ``Scalar`` or ``float`` argument arrives either as a Python number or as a 0-d *weakly
      typed* JAX array: numbers are run-time inputs of the executable, so that a changing learning
      rate compiles nothing. A lowering that must branch on such an argument in Python names it in
      ``static``.
    * ``int``, ``int[]``, ``bool``, ``str`` and ``torch.dtype`` arguments are Python values.
    * A parameter called ``out`` receives a tuple of `jax.ShapeDtypeStruct`: what PyTorch's meta
      function says the results are (``None`` for an undefined output).
    * A parameter called ``contiguous`` receives one bool a ``Tensor`` argument, in the schema's
      order: ``Tensor.is_contiguous()``. The few ops whose saved results depend on it, and whose
      gradient formulas ask for it again, need it (`tpu_core.lowering.lu`).
    * A random op (``random=True``) receives ``key``, a ``uint32[2]`` array that is different for
      every call; see `tpu_core.lowering.random`.
    * It returns one JAX array, or a tuple in the order of the schema's returns (lists for
      ``Tensor[]`` returns). Results are cast to the dtypes of ``out``; a wrong shape is an error.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import marshal
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from tpu_core.cache.sources import digest_around


@dataclass(frozen=True, slots=True)
class Lowering:
    """One entry of the registry.

    Attributes:
        op: Name of the functional overload, as ``str(torch.ops.aten.add.Tensor)`` prints it.
        fn: Function over JAX values, see `register`.
        family: The file that holds it (``"pointwise"``, ``"reduction"``, ...).
        static: Names of number arguments that are compiled in rather than passed at run time.
        random: Whether ``fn`` takes a ``key``.
        chance: Position and name of the number that is 0 in a call of a random op that draws
            nothing, or None where each call draws.
        wants_out: Whether ``fn`` takes ``out``.
        location: ``file:line`` of the registration, for error messages and the docs.
        wants_contiguous: Whether ``fn`` takes ``contiguous``.
        identity, symbolic: See `register`.
        DROPPED_ARGUMENTS: Arguments of overloads that no lowering is called with.

    Example:
        >>> find_lowering("aten.native_dropout.default").random
        True
        >>> kept = {k: v for k, v in kwargs.items() if k not in Lowering.DROPPED_ARGUMENTS}
    """

    DROPPED_ARGUMENTS: ClassVar[frozenset[str]] = frozenset(
        {"layout", "device", "pin_memory", "memory_format", "generator"}
    )

    op: str
    fn: Callable[..., Any]
    family: str
    static: frozenset[str]
    random: bool
    wants_out: bool
    location: str
    wants_contiguous: bool = False
    identity: Callable[..., str] | None = None
    chance: tuple[int, str] | None = None
    symbolic: bool = False

    @property
    def is_foreign(self) -> bool:
        """True if it is of another package, registered in this process alone."""
        return not self.location.startswith(_OWN)

    @property
    def takes_symbolic_dims(self) -> bool:
        """True if one trace of it, with symbolic dims, may stand for all sizes."""
        return self.symbolic or not self.is_foreign

    def source(self) -> str:
        """Digest of the package that it is in; else of its file, or of its code."""
        return _digest_of(self.location.rpartition(":")[0], inspect.unwrap(self.fn))

    def key_part(self, *args: Any, **kwargs: Any) -> str:
        """Text for the keys of programs with a call of it; empty where tpu-core's sources say all.

        Args:
            *args, **kwargs: Those of the call, `jax.ShapeDtypeStruct` in place of tensors; read
                where the op has an identity alone.
        """
        if self.identity is not None:
            return self.identity(*args, **kwargs)
        return self.source() if self.is_foreign else ""

    def draws(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call with these arguments draws random numbers; ``key`` is None if it
        does not.

        Args:
            args: Positional arguments of the overload.
            kwargs: Its keyword arguments.
        """
        if self.chance is None:
            return self.random
        position, name = self.chance
        return (args[position] if position < len(args) else kwargs.get(name, 0)) != 0


# Where the lowerings are that every process loads.
_OWN = str(Path(__file__).parent) + os.sep


@functools.cache
def _digest_of(file: str, function: Any) -> str:
    try:
        return digest_around(Path(file))
    except OSError:  # of no file
        code = marshal.dumps(function.__code__) if inspect.isfunction(function) else b""
        return hashlib.sha256(code).hexdigest()


class Registry:
    """Lowerings by overload name. A second registration of one overload is an error."""

    def __init__(self) -> None:
        self._entries: dict[str, Lowering] = {}

    def add(self, entry: Lowering) -> None:
        previous = self._entries.get(entry.op)
        if previous is not None:
            raise ValueError(
                f"{entry.op} has two lowerings: {previous.location} and {entry.location}. Remove "
                f"one."
            )
        self._entries[entry.op] = entry

    def get(self, op: str) -> Lowering | None:
        return self._entries.get(op)

    def __contains__(self, op: str) -> bool:
        return op in self._entries

    def __iter__(self) -> Iterator[Lowering]:
        return iter(sorted(self._entries.values(), key=lambda e: e.op))

    def __len__(self) -> int:
        return len(self._entries)


REGISTRY = Registry()


def register(
    op: str,
    fn: Callable[..., Any],
    *,
    static: tuple[str, ...] = (),
    random: bool | str = False,
    location: str | None = None,
    identity: Callable[..., str] | None = None,
    symbolic: bool = False,
) -> None:
    """Register ``fn`` as the lowering of the functional overload ``op`` (``"aten.add.Tensor"``).

    Args:
        op: Full overload name, namespace included; the overload ``default`` is spelled out.
        fn: Function over JAX values, see the calling convention.
        static: Number arguments that must be Python values, by their names in the schema.
        random: Whether the op draws random numbers; ``fn`` is then called with ``key=``. The name
            of a number among the parameters of ``fn``: it draws unless that is 0.
        location: ``file:line`` shown in errors and docs; the definition of ``fn`` unless given.
        identity: For an op whose name and arguments do not say what it computes: a text, the same
            in every process, that becomes part of the keys of its programs. It is called with the
            overload's arguments, `jax.ShapeDtypeStruct` in place of tensors, once for a signature.
        symbolic: Whether ``fn`` may be traced once for all sizes, with symbolic dims of
            `jax.export` in place of those that vary. How they compare is noted; a look-up by their
            hash, in a set or a dict, is not, and must decide nothing. Else it is traced at each
            new size.

    Raises:
        ValueError: The overload already has a lowering, or its name lacks namespace or overload;
            ``static`` or ``random`` names none of its arguments.

    Example:
        >>> register("mylib.scale.default", lambda x, by: x * by)
    """
    if op.count(".") != 2:
        raise ValueError(
            f"'{op}' is not a full overload name such as 'aten.add.Tensor' or 'aten.mm.default'."
        )
    code = inspect.unwrap(fn).__code__ if hasattr(inspect.unwrap(fn), "__code__") else None
    where = location or (f"{code.co_filename}:{code.co_firstlineno}" if code else repr(fn))
    family = where.rsplit("/", 1)[-1].split(".py", 1)[0]
    parameters = list(inspect.signature(fn).parameters)
    _check_static(op, static, where)
    chance = None
    if isinstance(random, str):
        if random not in parameters:
            raise ValueError(
                f"random='{random}' names no parameter of the lowering of {op} ({where}); they are "
                f"{', '.join(parameters)}."
            )
        chance = parameters.index(random), random
    REGISTRY.add(
        Lowering(
            op=op,
            fn=fn,
            family=family,
            static=frozenset(static),
            random=bool(random),
            wants_out="out" in parameters,
            location=where,
            wants_contiguous="contiguous" in parameters,
            identity=identity,
            chance=chance,
            symbolic=symbolic,
        )
    )


def _check_static(op: str, static: tuple[str, ...], where: str) -> None:
    """Refuse a name that is no argument of the op: its number would be passed at run time."""
    if not static:
        return
    namespace, name, overload = op.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), name, None), overload, None)
    if found is None:  # defined after its lowering
        return
    arguments = [a.name for a in found._schema.arguments]
    if unknown := [n for n in static if n not in arguments]:
        raise ValueError(
            f"static={unknown} names no argument of {op} ({where}); they are "
            f"{', '.join(arguments)}."
        )


def lowering(
    *ops: str, static: tuple[str, ...] = (), random: bool | str = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator form of `register`; several overloads may share a function.

    Example:
        >>> @lowering("aten.mm.default")
        ... def mm(a, b):
        ...     return jnp.matmul(a, b)
    """

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            register(op, fn, static=static, random=random)
        return fn

    return decorate


def register_table(rows: dict[str, Callable[..., Any]], *, static: tuple[str, ...] = ()) -> None:
    """Register a family of ops given as a table from overload name to function."""
    frame = inspect.currentframe()
    caller = frame.f_back if frame else None
    where = f"{caller.f_code.co_filename}:{caller.f_lineno}" if caller else None
    for op, fn in rows.items():
        register(op, fn, static=static, location=where)
