"""The chip that JAX traces programs for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

# What libtpu calls some chips, and what all others do.
_NAMES = {"TPU v5 lite": "TPU v5e", "TPU v5": "TPU v5p", "TPU v6 lite": "TPU v6e"}


def name_of(kind: str) -> str:
    """The name of a chip that libtpu says is of ``kind``: TPU v5e for TPU v5 lite."""
    return _NAMES.get(kind, kind)


@dataclass(frozen=True, slots=True)
class AbstractChip:
    """A generation of TPUs, as functions that JAX traces see it.

    Attributes:
        kind: Of a device of one core, ``"TPU v5e"``; None for any.

    Example:
        >>> with AbstractChip("TPU v5e").attached():
        ...     jaxpr = jax.make_jaxpr(kernel)(x)
    """

    kind: str | None = None

    def mesh(self, axes: Mapping[str, int]) -> AbstractMesh:
        """A mesh of such chips whose programs XLA divides as it likes, between what is asked for.

        Since jax 0.11 a mesh that does not say so makes the division a part of each array's type.

        Args:
            axes: Size of each axis.

        Example:
            >>> AbstractChip("TPU v5e").mesh({"data": 4, "model": 2}).size
            8
        """
        device = None
        if self.kind is not None:
            device = AbstractDevice(device_kind=self.kind, num_cores=1, platform="tpu")
        types = (AxisType.Auto,) * len(axes)
        return AbstractMesh(tuple(axes.values()), tuple(axes), types, abstract_device=device)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """In the block, functions that ask JAX for the attached chip are told this one.

        Pallas asks while it traces a kernel: ``pltpu.get_tpu_info``, ``pltpu.emit_pipeline``. Where
        no TPU is attached it would be told that the chip is a CPU.
        """
        with use_abstract_mesh(self.mesh({})):
            yield

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """In the block, a program is traced that will be lowered for this chip; see `traced`.

        Example:
            >>> with AbstractChip("TPU v5e").tracing():
            ...     captured = capture(job)
        """
        token = _traced_for.set(self)
        try:
            yield
        finally:
            _traced_for.reset(token)

    @staticmethod
    def traced() -> AbstractChip | None:
        """The chip of the innermost block of `tracing`, or None."""
        return _traced_for.get()


_traced_for: ContextVar[AbstractChip | None] = ContextVar("tpu_chip_traced_for", default=None)
