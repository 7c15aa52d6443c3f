"""Fused mode: ops are recorded and a whole segment, at best a training step, runs as one program.

Segments end at host reads and after each optimizer step. A loop that has neither is cut where it
repeats, and what does not repeat at ``TPU_SEGMENT_OPS`` ops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpu_core.extend import Mode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from tpu_core.extend import BuildContext, ProgramProvider


# The modules are imported with the first program: the mode is looked up before JAX is imported.
def bucketed(context: BuildContext) -> ProgramProvider:
    """One program for many sizes, and parts beyond the recompile limit."""
    from tpu_eager.bucketing.policy import Bucketed

    return Bucketed(context)


def background(context: BuildContext) -> ProgramProvider:
    """Op by op, while a program is compiled in the background."""
    from tpu_eager.background.scheduler import Background

    return Background(context)


def fill(dtypes: Sequence[torch.dtype], progress: Callable[[str, int, int], None]) -> None:
    """Compile common ops for buckets of sizes."""
    from tpu_eager.op_library.builder import fill

    fill(dtypes, progress)


FUSED = Mode(
    "fused",
    max_ops=None,
    cut_after_optimizer_step=True,
    cut_at_repetitions=True,
    providers=(bucketed, background),
    fill=fill,
)
