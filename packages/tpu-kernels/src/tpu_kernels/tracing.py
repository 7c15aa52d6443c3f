"""A JAX function traced once for each set of argument shapes, and what may be wrong with it."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from torch.utils._python_dispatch import _disable_current_modes

from tpu_core import extend
from tpu_core.errors import JaxFunctionError, TpuError
from tpu_core.extend import AbstractChip, JaxSettings, Platform, Target
from tpu_kernels.digest import digest

_WIDE_FLOATS = frozenset({np.dtype(np.float64), np.dtype(np.complex128)})
_NARROW = {np.dtype(np.int64): np.dtype(np.int32), np.dtype(np.uint64): np.dtype(np.uint32)}


@dataclass(frozen=True, slots=True)
class Traced:
    """A traced function.

    Attributes:
        closed: Its ops and constants.
        digest: See `tpu_kernels.digest`.
        out: Shapes and dtypes of its flat results.
        call: The function of flat arrays.
    """

    closed: ClosedJaxpr
    digest: str
    out: tuple[jax.ShapeDtypeStruct, ...]
    call: Callable[..., list[jax.Array]]


def is_wide(avals: Sequence[Any], enabled: bool) -> bool:
    """Return whether a function of such arguments is traced with 64-bit types on.

    As in JAX, ``jnp.ones(3)`` is float32 and integers have 32 bits, unless the user ``enabled`` x64
    or an argument is float64.
    """
    return enabled or any(a.dtype in _WIDE_FLOATS for a in avals)


def narrow(aval: Any, wide: bool) -> Any:
    """The argument's shape and dtype as the function sees it."""
    dtype = aval.dtype if wide else _NARROW.get(aval.dtype, aval.dtype)
    return jax.ShapeDtypeStruct(aval.shape, dtype)


_USUAL = JaxSettings()


def absent_chip() -> str | None:
    """Generation of the TPU that is traced for, where it is none that is attached."""
    if Platform.resolve().name == "tpu":
        return None
    where = Target.current()
    if where.platform == "tpu":
        return where.kind
    traced = AbstractChip.traced()
    return None if traced is None else traced.kind


def trace(
    name: str,
    fn: Callable[..., list[Any]],
    avals: Sequence[Any],
    wide: bool,
    origin: Any = None,
    chip: str | None = None,
    settings: JaxSettings = _USUAL,
) -> Traced:
    """Trace a function of flat arrays.

    Args:
        name: Of the op, for messages.
        fn: Returns a flat list of arrays.
        avals: Shapes and dtypes of its arguments.
        wide: Whether 64-bit types are on.
        origin: The user's function, whose closure and globals are searched for leaked tracers.
        chip: Name of the chip for a function that asks for it; see `absent_chip`.
        settings: Of JAX, when the op was called.

    Raises:
        JaxFunctionError: The function raises, leaks tracers, or has side effects.
    """
    arguments = [narrow(a, wide) for a in avals]
    # A function that uses PyTorch itself, as one of Helion does, shall not see the fake tensors of
    # who asks for the shapes.
    named = nullcontext() if chip is None else AbstractChip(chip).attached()
    settings = settings._replace(enable_x64=wide)
    with settings.applied(), _disable_current_modes(), named:
        try:
            closed = jax.make_jaxpr(fn)(*arguments)
        except TpuError:
            raise
        except Exception as error:
            raise complaint(name, avals, error) from error
    if any(isinstance(c, jax.core.Tracer) for c in closed.consts):
        raise _left_behind(name, avals)
    _refuse_effects(name, closed)
    if origin is not None:
        _refuse_leaks(name, origin)
    # The user may write to an array before it is lowered.
    consts = [c.copy() if isinstance(c, np.ndarray) else c for c in closed.consts]
    closed = ClosedJaxpr(closed.jaxpr, consts)
    run = jax.extend.core.jaxpr_as_fun(closed)

    def call(*arrays: jax.Array) -> list[jax.Array]:
        with jax.enable_x64(wide):
            return list(run(*(jnp.asarray(x, a.dtype) for x, a in zip(arrays, arguments))))

    out = tuple(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in closed.out_avals)
    return Traced(closed, digest(closed), out, call)


def complaint(name: str, avals: Sequence[Any], error: Exception) -> JaxFunctionError:
    """Error to raise for an exception of the user's function."""
    text = str(error).split("\n\n", maxsplit=1)[0].strip()
    values = _described(avals)
    if isinstance(error, jax.errors.UnexpectedTracerError):
        return _left_behind(name, avals)
    if isinstance(error, jax.errors.ConcretizationTypeError):
        return JaxFunctionError(
            f"The JAX function of {name} needs the value of an array while it is traced: {text}",
            values=values,
            line=line_in_function(error),
            remedy="Use jnp.where or lax.cond, or declare the argument static (annotate it as int, "
            'float, bool or str, or name it in static=("...",)).',
        )
    remedy = next((r for start, r in _REMEDIES.items() if start in text), _RAISED)
    return JaxFunctionError(
        f"The JAX function of {name} raised {type(error).__name__}: {text}",
        values=values,
        line=line_in_function(error),
        remedy=remedy,
    )


_RAISED = "Correct the function there, or call the op with arguments that it takes."
_REMEDIES = {
    "Reverse-mode differentiation does not work": "Write the loop as lax.scan, give jax_op a "
    "gradient (backward=f), or say that there is none (differentiable=False).",
    "Batching rule for": "Write the function with what JAX can batch, or call the op for each "
    "example; gradients without is_grads_batched=True and vectorize=True.",
}
_FOLDERS = tuple(
    os.path.dirname(file) + os.sep
    for file in (jax.__file__, np.__file__, os.path.dirname(extend.__file__))
)
_MODULES = os.path.dirname(os.__file__)
_HERE = os.path.dirname(__file__)


def line_in_function(error: BaseException) -> str | None:
    """The innermost line that is neither ours nor that of JAX, ``"model.py:31"``."""
    lines = (
        (frame.f_code.co_filename, number)
        for frame, number in traceback.walk_tb(error.__traceback__)
    )
    theirs = [
        f"{file}:{number}"
        for file, number in lines
        if not file.startswith(_FOLDERS) and os.path.dirname(file) not in (_MODULES, _HERE)
    ]
    return theirs[-1] if theirs else None


def _described(avals: Sequence[Any]) -> dict[str, str]:
    return {"arguments": ", ".join(f"{a.dtype}{list(a.shape)}" for a in avals)}


def _left_behind(name: str, avals: Sequence[Any]) -> JaxFunctionError:
    return JaxFunctionError(
        f"The JAX function of {name} uses a value that an earlier trace has left behind.",
        values=_described(avals),
        remedy="Return the value instead of keeping it in a global, an attribute or a closure.",
    )


_CALLBACKS = frozenset({"pure_callback", "io_callback", "debug_callback", "debug_print"})


def _primitives(jaxpr: Jaxpr) -> set[str]:
    found = set()
    for eqn in jaxpr.eqns:
        found.add(eqn.primitive.name)
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            found |= _primitives(inner)
    return found


def _refuse_effects(name: str, closed: ClosedJaxpr) -> None:
    primitives = _primitives(closed.jaxpr)
    if "custom_lin" in primitives:  # JAX says so as late as when it lowers the program
        raise JaxFunctionError(
            f"The JAX function of {name} has a jax.custom_vjp in it, which has no derivative in "
            "forward mode.",
            remedy="Use reverse mode (torch.autograd.grad, torch.func.vjp), or jax.custom_jvp.",
        )
    callbacks = sorted(primitives & _CALLBACKS)
    if callbacks or closed.effects:
        what = ", ".join(callbacks) or ", ".join(sorted(map(str, closed.effects)))
        raise JaxFunctionError(
            f"The JAX function of {name} has side effects: {what}.",
            remedy="Remove callbacks and debug prints: the program is kept in a cache and run by "
            "processes that do not have the Python function.",
        )


def _refuse_leaks(name: str, fn: Callable[..., Any]) -> None:
    place = leaked(fn)
    if place is not None:
        raise JaxFunctionError(
            f"The JAX function of {name} leaks a traced value: {place} holds one after the call.",
            remedy="Return the value instead of keeping it. The function runs once for each set of "
            "argument shapes, not at each call, so it cannot have side effects.",
        )


def leaked(fn: Callable[..., Any]) -> str | None:
    """Place in a function, its closure or globals that holds a tracer of a trace that ended."""
    owner = getattr(fn, "__self__", None)
    target = getattr(fn, "__func__", getattr(fn, "__wrapped__", fn))
    code = getattr(target, "__code__", None)
    places: list[tuple[str, Any]] = [] if owner is None else [(type(owner).__name__, owner)]
    if code is not None:
        cells = zip(code.co_freevars, target.__closure__ or ())
        places += [(f"'{n}'", c.cell_contents) for n, c in cells if _is_filled(c)]
        names = set(code.co_names) & target.__globals__.keys()
        places += [(f"global '{n}'", target.__globals__[n]) for n in sorted(names)]
    return next((place for place, value in places if _holds_tracer(value)), None)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _holds_tracer(value: Any) -> bool:
    """Return whether it is a tracer, or a container or plain object with one inside."""
    if isinstance(value, jax.core.Tracer):
        return True
    if isinstance(value, (list, tuple, set)):
        return any(isinstance(v, jax.core.Tracer) for v in value)
    held = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    if not isinstance(held, dict) or isinstance(value, type(re)):
        return False
    return any(isinstance(v, jax.core.Tracer) for v in held.values())
