"""The library's programs: the ops of some steps, each at several sizes, compiled for buckets."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from tpu_core.config import override
from tpu_core.errors import NotPaddableError, TpuError
from tpu_core.extend import (
    BuildContext,
    Mode,
    PaddedPrograms,
    Program,
    ProgramProvider,
    ProgramRequest,
    Segment,
    package_digest,
)
from tpu_eager.op_library.samples import DEVICE, SIZES, samples

logger = logging.getLogger("tpu_core")

Progress = Callable[[str, int, int], None]
"""Called with a text, the number of programs made, and of those to make."""

# Buckets of a size, by the number of sizes that an op has: their combinations are programs.
_RUNGS: dict[int, tuple[int, ...]] = {
    1: (32, 256, 2048, 16384, 131072),
    2: (32, 128, 512, 2048),
    3: (32, 256, 2048),
    4: (16, 64, 512),
}
_OTHER = (64,)
_RECORDINGS = 3  # of an op
_MOST_CANDIDATES = 10  # for them
_MOST_ELEMENTS = 1 << 24  # of one operand or result


class OpLibrary(ProgramProvider):
    """Takes the ops of what is run, and compiles them for buckets of sizes.

    Args:
        context: The client's.
    """

    def __init__(self, context: BuildContext) -> None:
        self._context = context
        self._padded = PaddedPrograms(context, package_digest("tpu_eager"))
        self._ops: dict[str, list[Segment]] = {}

    def provide(self, request: ProgramRequest) -> Program | list[Any] | None:
        """CPU kernels for the segment, where they can run it: its own program is of no use."""
        s = request.segment
        for i, node in enumerate(s.nodes):
            # A list has as many tensors as a model has parameters.
            if node.plan is None or "_foreach_" in node.name:
                continue
            op = s.piece(i, f"{s.key} {i}")
            known = self._ops.setdefault(self._padded.form(op), [])
            if all(self._padded.integers(op) != self._padded.integers(k) for k in known):
                known.append(op)
        return [(0, len(s.nodes), True)] if request.may_be_divided and not s.on_host else None

    def compile(self, progress: Progress) -> None:
        """Compile what was taken."""
        found = [b for ops in self._ops.values() if (b := self._family(ops)) is not None]
        wanted = [(b, list(_combinations(b))) for b in found]
        total, done = sum(len(buckets) for _, buckets in wanted), 0
        for bucketed, buckets in wanted:
            s = bucketed.segment()
            for combination in buckets:
                progress(f"{s.op_names()} {list(combination)}", done, total)
                done += 1
                try:
                    self._compile(bucketed, combination)
                except (NotPaddableError, TpuError) as error:
                    logger.info("not in the op library: %s: %s", s.op_names(), error)
                    break
            if bucketed.programs:
                self._padded.save(bucketed)
        progress("", total, total)

    def _family(self, ops: list[Segment]) -> Any:
        """The op with sizes that vary; None where its sizes are not understood."""
        best = None
        # Sizes that follow from each other in some steps do not in others.
        for some in itertools.combinations(ops[:_MOST_CANDIDATES], _RECORDINGS):
            bucketed = self._padded.of_recordings(some)
            if best is None or bucketed.independent_sizes() > best.independent_sizes():
                best = bucketed
        if best is None or not best.independent_sizes():
            return None
        s = best.recordings[0].segment
        values = best.solve(s, self._padded.integers(s), learns=False)
        return None if values is None else best

    def _compile(self, bucketed: Any, buckets: tuple[int, ...]) -> None:
        recording = bucketed.recordings[0].segment
        values = bucketed.solve(recording, self._padded.integers(recording), learns=False)
        rng = np.random.default_rng(0)
        arrays = [_filled(recording, i, rng) for i in recording.inputs()]
        self._padded.obtain(bucketed, recording, values, buckets, arrays)
        bucketed.programs[buckets] = None  # in the cache: a thousand executables are gigabytes


def _filled(s: Segment, slot: int, rng: np.random.Generator) -> Any:
    """An input to check a program on: integers are indices, so that they are small."""
    shape, dtype = s.slots[slot].shape, s.slots[slot].dtype
    if np.issubdtype(dtype, np.integer) or dtype == np.bool_:
        return np.zeros(shape, dtype)
    return rng.standard_normal(shape).astype(dtype)


def _combinations(bucketed: Any) -> Iterator[tuple[int, ...]]:
    """Buckets of the sizes of an op, of which no value is too large."""
    s: Segment = bucketed.segment()
    products = _products(bucketed.fit.values)
    count = len(bucketed.fit.symbols)
    free = [i for i in range(count) if i not in products]
    for rungs in itertools.product(_RUNGS.get(len(free), _OTHER), repeat=len(free)):
        buckets = dict(zip(free, rungs))
        for i, (scale, factors) in products.items():
            buckets[i] = scale * math.prod(buckets[k] for k in factors)
        ordered = tuple(buckets[i] for i in range(count))
        largest = max(math.prod(bucketed.bound(i, ordered)) for i in range(len(s.slots)))
        if largest <= _MOST_ELEMENTS:
            yield ordered


def _products(rows: Sequence[Sequence[int]]) -> dict[int, tuple[int, tuple[int, int]]]:
    """Sizes that are multiples of the product of two others, as rows of a batch of sequences.

    An op may be given any other sizes; these have no buckets of their own, which keeps the
    combinations few.
    """
    columns = list(zip(*rows))
    found: dict[int, tuple[int, tuple[int, int]]] = {}
    for i, column in enumerate(columns):
        others = [k for k in range(len(columns)) if k != i and k not in found]
        for j, k in itertools.combinations(others, 2):
            scales = {divmod(n, x * y) for n, x, y in zip(column, columns[j], columns[k])}
            if len(scales) == 1 and (scale := scales.pop())[1] == 0 and scale[0] > 0:
                found[i] = scale[0], (j, k)
                break
    used = {k for _, factors in found.values() for k in factors}
    return {i: product for i, product in found.items() if i not in used}


def fill(dtypes: Sequence[torch.dtype], progress: Progress) -> None:
    """Compile the library for the device, and keep it in the cache.

    Args:
        dtypes: Of the parameters; float32 and bfloat16 where there are none.
        progress: Called before each program.
    """
    made: list[OpLibrary] = []

    def library(context: BuildContext) -> ProgramProvider:
        made.append(OpLibrary(context))
        return made[-1]

    mode = Mode("op library", max_ops=None, cut_after_optimizer_step=True, providers=(library,))
    device = torch.get_device_module(DEVICE)
    settings = override(tiers="compiled", compile="blocking", verify="off")
    with device.set_eager_mode(mode), settings:
        for dtype in dtypes or (torch.float32, torch.bfloat16):
            for name, sample in samples():
                progress(f"{name}, {str(dtype).removeprefix('torch.')}", 0, 0)
                for sizes in SIZES:
                    sample(sizes, dtype)
        device.synchronize()
        made[0].compile(progress)
