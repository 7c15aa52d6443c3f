"""Differences between the supported releases of jax. Each branch names the release it is for, and
goes with it; the faults of releases are in `tpu_core.pjrt.known_faults`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from jax._src import core as jax_core
from jax.extend.core import JaxprEqn

T = TypeVar("T")


def parts_of_scan(scan: JaxprEqn, operands: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
    """Operands of a scan by role: constants, initial carry, scanned-over arrays."""
    params = scan.params
    if "num_carry" in params:  # jax 0.10
        first = params["num_consts"]
        then = first + params["num_carry"]
        return list(operands[:first]), list(operands[first:then]), list(operands[then:])
    consts, carry, xs = map(list, params["ft_in"].update(operands).unpack())
    return consts, carry, xs


def current_trace() -> Any:
    """JAX's current trace: an object of its own inside each loop, branch and jitted function."""
    return jax_core.trace_ctx.trace
