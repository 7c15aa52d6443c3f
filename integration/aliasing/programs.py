"""Random programs: drawn from a seed, run in both worlds, and shrunk where they fail."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

from .index_steps import INDEXED_WRITES
from .other_steps import OTHERS
from .storage_steps import STORAGE_CHANGES
from .view_steps import VIEWS
from .worlds import (
    Picks,
    Skip,
    StepFunction,
    World,
    assert_same_geometry,
    assert_same_storages,
    assert_same_values,
    message,
    run_step,
)
from .write_steps import WRITES

# Few shapes, so that signatures repeat and strict programs are found in the cache.
SHAPES = ((2, 3), (4,), (2, 3, 2), (6,), (3, 2), (1, 3), (), (2, 3, 1, 2), (0, 3))
DTYPES = (
    torch.float32, torch.float32, torch.float32, torch.int64, torch.bool, torch.complex64,
    torch.uint8, torch.int32, torch.bfloat16, torch.float64,
)  # fmt: skip
CHANGES = WRITES + INDEXED_WRITES + STORAGE_CHANGES
STEPS = {step.__name__: step for step in VIEWS + CHANGES + OTHERS}
MOST_STEPS = 25

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """Numbers that choose the first tensors, and steps by name with the numbers of their choices.

    The repr of a failing program is an expression that makes it again.
    """

    first: tuple[Numbers, ...]
    steps: tuple[tuple[str, Numbers], ...]

    @classmethod
    def of_seed(cls, seed: int) -> Program:
        draw = random.Random(seed)

        def numbers() -> Numbers:
            return tuple(draw.randrange(60) for _ in range(7))

        def step() -> StepFunction:
            return draw.choice(draw.choice((VIEWS, CHANGES, OTHERS)))

        first = tuple(numbers() for _ in range(draw.randint(1, 3)))
        count = draw.randint(1, MOST_STEPS)
        return cls(first, tuple((step().__name__, numbers()) for _ in range(count)))

    def run(self) -> None:
        """Run on the CPU and on the device, side by side.

        Raises:
            AssertionError: They differ.
        """
        cpu, device = World("cpu", decides=True), World("tpu", decides=False)
        for n in self.first:
            t = first_tensor(Picks(n))
            cpu.tensors.append(t)
            device.tensors.append(on_device(t))
        for name, n in self.steps:
            step = STEPS[name]
            try:
                expected = run_step(step, cpu, n)
            except Skip:
                continue
            actual = run_step(step, device, n)
            assert message(actual) == message(expected), (
                f"{name}: on the device {actual!r}, on the CPU {expected!r}"
            )
            assert_same_geometry(cpu, device)
        for c, d in zip(cpu.tensors, device.tensors):
            assert_same_values(c, d)
        assert_same_storages(cpu, device)


def first_tensor(p: Picks) -> torch.Tensor:
    """A tensor of small whole numbers, dense in some order of its dims or with gaps."""
    shape, dtype = p.of(SHAPES), p.of(DTYPES)
    values = (torch.arange(torch.Size(shape).numel()) % 5).reshape(shape).to(dtype)
    order = p.below(4)
    if order == 1:
        back = tuple(reversed(range(values.dim())))
        return values.permute(back).contiguous().permute(back)
    if order == 2 and values.dim() == 4:
        return values.contiguous(memory_format=torch.channels_last)
    if order == 3 and values.dim():
        return torch.stack([values, values], -1).select(-1, 1)
    return values


def on_device(t: torch.Tensor) -> torch.Tensor:
    """The same tensor on the device; one that shows part of a storage has the whole storage
    there."""
    if t.storage_offset() == 0:
        return t.to("tpu")
    n = t.untyped_storage().nbytes() // t.element_size()
    whole = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage(), 0, (n,), (1,))
    return whole.to("tpu").as_strided(t.shape, t.stride(), t.storage_offset())


def failure(program: Program, run: Callable[[Program], None]) -> Exception | None:
    """What running the program raises."""
    try:
        run(program)
    except Exception as error:
        return error
    return None


def shrunk(program: Program, run: Callable[[Program], None], attempts: int = 100) -> Program:
    """A failing program without the steps and tensors that it fails without."""
    smaller = True
    while smaller:
        smaller = False
        for part in ("steps", "first"):
            for i in reversed(range(len(getattr(program, part)))):
                kept = getattr(program, part)[:i] + getattr(program, part)[i + 1 :]
                candidate = replace(program, **{part: kept})
                attempts -= 1
                if attempts and candidate.first and failure(candidate, run):
                    program, smaller = candidate, True
    return program


def check(seeds: Iterable[int], context: Callable[[], AbstractContextManager[object]]) -> None:
    """Run the programs of seeds, each in a context that sets the mode.

    Raises:
        AssertionError: One of them fails; the message has its seed and the smallest that does.
    """

    def run(program: Program) -> None:
        with context():
            program.run()

    for seed in seeds:
        program = Program.of_seed(seed)
        if failure(program, run):
            smallest = shrunk(program, run)
            raise AssertionError(f"seed {seed}:\n{smallest!r}") from failure(smallest, run)
