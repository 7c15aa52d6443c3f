"""Random programs of views, writes and copies give on the device what they give on the CPU.

After each step the tensors' geometry, the storages they share and the errors raised must be the
same; at the program's end, every byte of every storage. A failure names its seed and the smallest
program that was found to fail; ``Program(...).run()`` runs that again.
"""

from __future__ import annotations

import functools

import pytest

from aliasing.programs import Program, check, shrunk
from tpu_core import _C, modes

# Every op its own program; cut at any place; the whole program at once. Those of tpu-eager are
# tested there.
STRICT = modes.STRICT
PARTS = modes.Mode("parts", max_ops=5)
WHOLE = modes.Mode("whole", max_ops=0)


@pytest.mark.parametrize(
    "mode, count",
    [(WHOLE, 60), (PARTS, 40), (STRICT, 40)],
    ids=["whole", "parts", "strict"],
)
def test_dozens_of_programs(mode: modes.Mode, count: int) -> None:
    check(range(count), functools.partial(modes.using, mode))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(10))
@pytest.mark.parametrize("mode", [WHOLE, PARTS, STRICT], ids=lambda m: m.name)
def test_thousands_of_programs(mode: modes.Mode, part: int) -> None:
    start = 1000 * (part + 1)
    check(range(start, start + 150), functools.partial(modes.using, mode))
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
