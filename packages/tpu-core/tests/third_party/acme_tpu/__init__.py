"""A package that extends the device by an op, a kernel, an eager mode and a command.

Its entry points are in ``acme_tpu-1.0.dist-info/entry_points.txt``; a project writes them in its
``pyproject.toml``. Nothing of tpu-core is used but `tpu_core.extend`, `errors` and `config`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import typer

from tpu_core.config import config
from tpu_core.errors import UnsupportedOpError
from tpu_core.extend import (
    BuildContext,
    KernelSelection,
    Mode,
    Program,
    ProgramProvider,
    ProgramRequest,
    Segment,
    Target,
    find_lowering,
    hide_lines_of,
    load_lowerings,
    record_op,
    register,
)

# --- an op: schema, shapes, gradient, lowering --------------------------------------------------

library = torch.library.Library("acme", "DEF")
library.define("swiglu(Tensor gate, Tensor up, float beta=1.0) -> Tensor")
library.define("swiglu_backward(Tensor grad, Tensor gate, Tensor up, float beta) -> Tensor[]")


def swiglu(gate: jax.Array, up: jax.Array, beta: Any = 1.0) -> jax.Array:
    """``gate * sigmoid(beta * gate) * up``; ``beta`` is an input of the program."""
    return gate * jax.nn.sigmoid(beta * gate) * up


def swiglu_backward(grad: jax.Array, gate: jax.Array, up: jax.Array, beta: Any) -> list[jax.Array]:
    """Gradients of both operands."""
    return list(jax.vjp(lambda g, u: swiglu(g, u, beta), gate, up)[1](grad))


def _meta(gate: torch.Tensor, up: torch.Tensor, beta: float = 1.0) -> torch.Tensor:
    if gate.shape != up.shape:
        raise UnsupportedOpError(f"swiglu takes one shape, not {gate.shape} and {up.shape}.")
    return torch.empty_like(gate)


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return *torch.ops.acme.swiglu_backward(grad, *ctx.saved_tensors, ctx.beta), None


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.beta = inputs[2]


library.impl("swiglu", _meta, "Meta")
library.impl("swiglu_backward", lambda g, x, y, b: [torch.empty_like(t) for t in (x, y)], "Meta")
torch.library.register_autograd("acme::swiglu", _gradients, setup_context=_keep, lib=library)
register("acme.swiglu.default", swiglu)
register("acme.swiglu_backward.default", swiglu_backward)
record_op("acme::swiglu")
record_op("acme::swiglu_backward", is_differentiable=False)
hide_lines_of(__file__)  # errors and reports name the caller's line

# --- a kernel: another way to compute an op that has a lowering ---------------------------------


def _silu_by_tanh(x: jax.Array) -> jax.Array:
    return 0.5 * x * (1 + jnp.tanh(0.5 * x))


class Silu:
    """`torch.nn.functional.silu` by the hyperbolic tangent, for floats."""

    name = "acme_silu"

    def choose(
        self,
        overload: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Target,
        choice: str | None,
    ) -> Callable[..., Any] | None:
        if choice == "plain" or args[0].dtype != np.float32:
            return None
        KernelSelection(self.name, "tanh").note()
        return _silu_by_tanh


SILU = Silu()

# --- an eager mode: where segments are cut, and a look at each that has run ---------------------

SEGMENTS: list[int] = []  # ops of each


def _count(segment: Segment, inputs: list[Any], outputs: list[Any]) -> None:
    SEGMENTS.append(len(segment.nodes))


BY_FOURS = Mode("by_fours", max_ops=4, inspect=_count)

# --- a program provider: a policy of the mode for segments that have no program ------------------


class OpByOp(ProgramProvider):
    """Runs a segment op by op until its third time, when the next provider compiles it."""

    def __init__(self, context: BuildContext) -> None:
        self._context = context
        self._times: dict[str, int] = {}
        self.compiled: list[str] = []

    def provide(self, request: ProgramRequest) -> Program | list[Any] | None:
        if request.missing is None:
            return None
        key = self._context.exact_key(request.segment)
        self._times[key] = self._times.get(key, 0) + 1
        return [] if self._times[key] < 3 else None

    def note_exact(self, segment: Segment, program: Program) -> None:
        self.compiled.append(program.key)


PATIENT = Mode("patient", max_ops=4, providers=(OpByOp,))

# --- a command ------------------------------------------------------------------------------------

app = typer.Typer(help="Say how an op is computed.")


@app.command()
def show(op: str) -> None:
    load_lowerings()
    entry = find_lowering(op)
    print(op, entry.family if entry else "has no lowering", config().cache_dir)
