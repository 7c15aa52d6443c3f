"""The chip that JAX traces programs for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

# What libtpu calls some chips, and what all others do.
_NAMES = {"TPU v5 lite": "TPU v5e", "TPU v5": "TPU v5p", "TPU v6 lite": "TPU v6e"}

_traced_for: ContextVar[str | None] = ContextVar("tpu_chip_traced_for", default=None)


def name_of(kind: str) -> str:
    """The name of a chip that libtpu says is of ``kind``: TPU v5e for TPU v5 lite."""
    return _NAMES.get(kind, kind)


def chip(kind: str) -> AbstractDevice:
    """Chip of a mesh, for functions that ask JAX for the attached one.

    Args:
        kind: Of a device of one core, ``"TPU v5e"``.
    """
    return AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")


def abstract_mesh(axes: Mapping[str, int], kind: str | None = None) -> AbstractMesh:
    """A mesh whose programs XLA divides as it likes, between what is asked for.

    Since jax 0.11 a mesh that does not say so makes the division a part of each array's type.

    Args:
        axes: Size of each axis.
        kind: The name of its chips, as of `chip`.

    Example:
        >>> abstract_mesh({"data": 4, "model": 2}, "TPU v5e").size
        8
    """
    device = None if kind is None else chip(kind)
    types = (AxisType.Auto,) * len(axes)
    return AbstractMesh(tuple(axes.values()), tuple(axes), types, abstract_device=device)


def traced_for() -> str | None:
    """The chip of the innermost block of `tracing_for`.

    Example:
        >>> traced_for()
        'TPU v5e'
    """
    return _traced_for.get()


@contextmanager
def tracing_for(kind: str) -> Iterator[None]:
    """A program is traced in the block that will be lowered for this chip; see `chip_named`.

    Example:
        >>> with tracing_for("TPU v5e"):
        ...     captured = capture(job)
    """
    token = _traced_for.set(kind)
    try:
        yield
    finally:
        _traced_for.reset(token)


@contextmanager
def chip_named(kind: str) -> Iterator[None]:
    """Functions that ask JAX for the attached chip are told this one.

    Pallas asks while it traces a kernel: ``pltpu.get_tpu_info``, ``pltpu.emit_pipeline``. Where no
    TPU is attached it would be told that the chip is a CPU.

    Args:
        kind: As of `chip`.

    Example:
        >>> with chip_named("TPU v5e"):
        ...     jaxpr = jax.make_jaxpr(kernel)(x)
    """
    with use_abstract_mesh(abstract_mesh({}, kind)):
        yield
