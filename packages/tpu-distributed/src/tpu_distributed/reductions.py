"""Reduce ops of c10d in terms of StableHLO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch.distributed as dist

from tpu_distributed.stablehlo import ProgramWriter, Value

_OPS = {
    "SUM": "add",
    "AVG": "add",
    "PREMUL_SUM": "add",
    "PRODUCT": "multiply",
    "MIN": "minimum",
    "MAX": "maximum",
    "BAND": "and",
    "BOR": "or",
    "BXOR": "xor",
}
_OF_ROWS: dict[str, Any] = {
    "SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
}
_BITWISE = ("and", "or", "xor")


@dataclass(frozen=True)
class Reduction:
    """A reduce op.

    Attributes:
        name: As in c10d: ``"SUM"``.
        factor: Of ``PREMUL_SUM``: what each rank's value is multiplied with.
    """

    name: str
    factor: float = 1.0

    @staticmethod
    def of(op: Any) -> Reduction:
        """The reduction of what the backend is given: a number, or an op with a factor.

        Raises:
            ValueError: There is no such op.
        """
        if not isinstance(op, int):
            return Reduction("PREMUL_SUM", float(op.__getstate__()[1]))
        found = _BY_NUMBER.get(op)
        if found is None:
            raise ValueError(f"Reduce op {op} is not supported on device 'tpu'.")
        return found

    @property
    def on_host(self) -> str | None:
        """The op that hosts sum, multiply or compare by; None where there is none."""
        op = {"AVG": "SUM", "PREMUL_SUM": "SUM"}.get(self.name, self.name)
        return op if op in _OF_ROWS else None

    def of_rows(self, rows: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        """The reduction of arrays on the host, in order."""
        function = _OF_ROWS.get(self.name, np.add)
        if self.name == "PREMUL_SUM":
            rows = [row * np.asarray(self.factor, row.dtype) for row in rows]
        result = np.array(rows[0])
        for row in rows[1:]:
            function(result, row, out=result)
        return result / np.asarray(len(rows), result.dtype) if self.name == "AVG" else result

    @cached_property
    def text(self) -> str:
        """For the description of a call."""
        return self.name.lower() + (f" {self.factor:g}" if self.name == "PREMUL_SUM" else "")

    def __str__(self) -> str:
        return self.text

    def all_reduce(self, p: ProgramWriter, x: Value) -> Value:
        """The reduction over all replicas.

        Raises:
            ValueError: The op is not defined for the element type.
        """
        op = self._op(x)
        if op in _BITWISE and not (x.element == "i1" and op != "xor"):
            # XLA reduces across devices by arithmetic ops only.
            return p.reduce_rows(p.all_gather(x), op)
        return self._finish(p, p.all_reduce(self._prepare(p, x), op))

    def reduce_scatter(self, p: ProgramWriter, x: Value) -> Value:
        """Row ``i`` of the reduction on replica ``i``; errors as of `all_reduce`."""
        op = self._op(x)
        if op in _BITWISE:
            return p.reduce_rows(p.all_to_all(x), op)
        if not p.scatters:
            rows = p.all_to_all(self._prepare(p, x))
            return self._finish(p, p.reduce_rows(rows, op))
        return self._finish(p, p.reduce_scatter(self._prepare(p, x), op))

    def _op(self, x: Value) -> str:
        op = _OPS[self.name]
        if op in _BITWISE and x.element.startswith(("f", "bf", "complex")):
            raise ValueError(f"ReduceOp.{self.name} takes integers or bools, not {x.element}.")
        return op

    def _prepare(self, p: ProgramWriter, x: Value) -> Value:
        if self.name != "PREMUL_SUM":
            return x
        factor = p.broadcast(p.constant(f"{self.factor:.17e}", x.element), x.shape)
        return p.binary("multiply", x, factor)

    def _finish(self, p: ProgramWriter, x: Value) -> Value:
        if self.name != "AVG":
            return x
        count = p.constant(str(p.size), "i64")
        return p.binary("divide", x, p.broadcast(p.convert(count, x.element), x.shape))


_BY_NUMBER = {
    getattr(dist.ReduceOp.RedOpType, name).value: Reduction(name)
    for name in _OPS
    if name != "PREMUL_SUM"
}
