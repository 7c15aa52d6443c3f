"""JAX settings that decide what a traced function computes.

A JAX function that is an op is traced for the user's settings at the call: they are part of the
op's signature and of its plan, since lowering may come later, under others, in another thread.
Lowerings of our own are always traced for the same settings, whatever the user's are.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
from jax._src import config as states


class JaxSettings(NamedTuple):
    """Settings of JAX, under the names of its context managers; JAX's own defaults unless given.

    Attributes:
        enable_x64: Whether 64-bit types are on.
        default_matmul_precision: Of products that name none.
        numpy_dtype_promotion: ``"standard"`` or ``"strict"``.
        default_prng_impl: Generator of new random keys.
        threefry_partitionable: Choice of the random numbers that a key gives.

    Example:
        >>> with JaxSettings(enable_x64=True).applied():
        ...     jaxpr = jax.make_jaxpr(f)(x)
    """

    enable_x64: bool = False
    default_matmul_precision: Any = None
    numpy_dtype_promotion: Any = states.NumpyDtypePromotion.STANDARD
    default_prng_impl: str = "threefry2x32"
    threefry_partitionable: bool = True

    @staticmethod
    def in_force() -> JaxSettings:
        """The user's settings in this thread."""
        return JaxSettings(*_values())

    @staticmethod
    def recorded() -> JaxSettings | None:
        """Settings when the op being lowered was recorded; None where none is being lowered."""
        return _recorded.get()

    def text(self) -> str:
        """Settings that are not JAX's defaults, as keys of programs have them; "" for none.

        Example:
            >>> JaxSettings(enable_x64=True).text()
            'enable_x64=True'
        """
        pairs = zip(JaxSettings._fields, self, USUAL)
        return " ".join(f"{name}={value}" for name, value, usual in pairs if value != usual)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Trace with these settings in this thread, and with no complaint about ranks."""
        with ExitStack() as stack:
            for name, value in zip(JaxSettings._fields, self):
                stack.enter_context(getattr(jax, name)(value))
            stack.enter_context(jax.numpy_rank_promotion("allow"))
            yield


USUAL = JaxSettings()
"""JAX's own defaults."""

_LOWERING = USUAL._replace(enable_x64=True)

_recorded: ContextVar[JaxSettings | None] = ContextVar("tpu_jax_settings", default=None)

_x64, _precision, _promotion, _prng, _partitionable = (
    getattr(states, name) for name in JaxSettings._fields
)


def _values() -> tuple[Any, ...]:
    # Spelled out: each call of a JAX function asks.
    return _x64.value, _precision.value, _promotion.value, _prng.value, _partitionable.value


def code() -> int:
    """64 bits for `JaxSettings.in_force`, the same in every process; 0 for JAX's defaults."""
    found = _values()
    return 0 if found == USUAL else _code(JaxSettings(*found))


@functools.lru_cache(maxsize=256)
def _code(settings: JaxSettings) -> int:
    return int.from_bytes(hashlib.sha256(settings.text().encode()).digest()[:8], "little")


@contextmanager
def as_recorded(settings: JaxSettings | None) -> Iterator[None]:
    """Lower a JAX function for the settings of the time when it was recorded."""
    token = _recorded.set(settings)
    try:
        yield
    finally:
        _recorded.reset(token)


def lowering() -> AbstractContextManager[None]:
    """The settings for which lowerings of our own are traced: JAX's defaults, with 64-bit types."""
    return _LOWERING.applied()
