"""Random programs of views, writes and copies give on the device what they give on the CPU.

After each step the tensors' geometry, the storages they share and the errors raised must be the
same; at the program's end, every byte of every storage. A failure names its seed and the smallest
program that was found to fail; ``Program(...).run()`` runs that again.
"""

from __future__ import annotations

import pytest
import torch

from aliasing.programs import Program, failure, shrunk
from tpu_core import _C, modes
from tpu_core.config import override
from tpu_eager.background import scheduler
from tpu_eager.fused import background, bucketed

# Every op its own program; cut at any place; the whole program at once.
STRICT = modes.STRICT
PARTS = modes.Mode("parts", max_ops=5)
WHOLE = modes.Mode("whole", max_ops=0)
# As tpu-eager's: on padded arrays, and op by op while another process compiles.
FUSED = modes.Mode("fused", max_ops=2000, cut_at_repetitions=True, providers=(bucketed, background))


def check(mode: modes.Mode, seeds: range) -> None:
    def run(program: Program) -> None:
        with override(compile="background"), modes.using(mode):
            program.run()

    for seed in seeds:
        program = Program.of_seed(seed)
        if failure(program, run):
            smallest = shrunk(program, run)
            raise AssertionError(f"seed {seed}, mode {mode.name}:\n{smallest!r}") from failure(
                smallest, run
            )


@pytest.mark.parametrize(
    "mode, count",
    [(WHOLE, 60), (PARTS, 40), (STRICT, 40), (FUSED, 40)],
    ids=["whole", "parts", "strict", "fused"],
)
def test_dozens_of_programs(mode: modes.Mode, count: int) -> None:
    check(mode, range(count))


def test_programs_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_SHARE", float("inf"))
    before = torch.tpu.metrics()["pieces"]
    check(FUSED, range(500, 530))
    assert torch.tpu.metrics()["pieces"] > before + 30


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("mode", [WHOLE, PARTS, STRICT, FUSED], ids=lambda m: m.name)
def test_thousands_of_programs(mode: modes.Mode, part: int) -> None:
    start = 1000 * (part + 1)
    check(mode, range(start, start + 150))
    _C.clear_programs()


def test_failing_program_is_shrunk_to_what_it_fails_by() -> None:
    def run(program: Program) -> None:
        names = [name for name, _ in program.steps]
        assert "fill" not in names or "t" not in names

    numbers = (1, 2, 3)
    steps = tuple((name, numbers) for name in ("view", "fill", "select", "t", "zero"))
    smallest = shrunk(Program((numbers, numbers), steps), run)
    assert smallest == Program((numbers,), (("fill", numbers), ("t", numbers)))
    assert eval(repr(smallest)) == smallest
