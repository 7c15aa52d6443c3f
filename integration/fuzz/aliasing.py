"""Random views, writes and copies in rounds of changing sizes, against the CPU.

The steps are those of the packages' property tests of aliasing (`integration/aliasing`). A case
runs them round after round in one process, each round on tensors of other sizes, so that what one
round compiled, padded or donated is met by the next. After each step the tensors' geometry, the
storages that they share and the errors must be the same; after each round, or at the end, every
byte of every storage.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from aliasing.programs import CHANGES, DTYPES, OTHERS, STEPS, VIEWS, on_device
from aliasing.worlds import (
    Skip,
    World,
    assert_same_geometry,
    assert_same_storages,
    assert_same_values,
    message,
    run_step,
)

from .cases import Case, Failure
from .minimise import smaller_numbers, without_parts

SHAPES = ((2, 3), (4,), (2, 3, 2), (6,), (3, 2), (4, 4), (5, 4), (3, 3, 3), (1, 3), (), (8, 3))
NAMES = {str(d).removeprefix("torch."): d for d in DTYPES}
MODES = ("fused", "fused", "fused", "strict", "switching")


class Aliasing:
    """The fuzzer `aliasing`."""

    name = "aliasing"
    seconds_a_case = 60.0
    cases_a_process = 40

    def draw(self, rng: Random) -> Case:
        def numbers() -> list[int]:
            return [rng.randrange(60) for _ in range(7)]

        first = [
            {
                "shape": list(rng.choice(SHAPES)),
                "dtype": rng.choice(("float32", "float32", rng.choice(sorted(NAMES)))),
                "order": rng.randrange(4),
            }
            for _ in range(rng.randint(1, 3))
        ]
        if rng.random() < 0.5:  # of one shape, so that more steps of two tensors are right
            first = [{**f, "shape": first[0]["shape"]} for f in first]
        # Few steps repeat exactly where sizes change; many meet more of each other.
        count = rng.choice((rng.randint(1, 6), rng.randint(1, 6), rng.randint(5, 20)))
        steps = [
            [rng.choice(rng.choice((VIEWS, CHANGES, OTHERS))).__name__, numbers()]
            for _ in range(count)
        ]
        rounds: list[list[list[int]]] = [[]]
        for _ in range(rng.randint(2, 5)):
            sizes = sorted({n for f in first for n in f["shape"] if n > 1})
            chosen = rng.sample(sizes, min(len(sizes), rng.choice((1, 1, 2, 0))))
            rounds.append([[n, max(1, n + rng.choice((-1, 1, 2, 3, 5)))] for n in chosen])
        data = {"first": first, "steps": steps, "rounds": rounds}
        data["mode"] = rng.choice(MODES)
        data["reads"] = rng.choice(("round", "round", "end"))
        return Case(self.name, data)

    def run(self, case: Case) -> Failure | None:
        data = case.data
        ended: list[tuple[World, World]] = []
        try:
            for i, sizes in enumerate(data["rounds"]):
                strict = data["mode"] == "strict" or data["mode"] == "switching" and i % 2
                # A process that is strict as a whole stays so.
                with torch.tpu.set_eager_mode("strict" if strict else torch.tpu.eager_mode):
                    worlds = self._round(data, sizes)
                if data["reads"] == "round":
                    _assert_same(*worlds)
                else:
                    ended.append(worlds)
            for worlds in ended:
                _assert_same(*worlds)
        except Difference as error:
            return Failure("aliasing", error.step, str(error))
        return None

    def _round(self, data: dict[str, Any], sizes: list[list[int]]) -> tuple[World, World]:
        cpu, device = World("cpu", decides=True), World("tpu", decides=False)
        for f in data["first"]:
            t = first_tensor(f, dict(map(tuple, sizes)))
            cpu.tensors.append(t)
            device.tensors.append(on_device(t))
        for name, numbers in data["steps"]:
            try:
                expected = run_step(STEPS[name], cpu, numbers)
            except Skip:
                continue
            actual = run_step(STEPS[name], device, numbers)
            if message(actual) != message(expected):
                text = f"on the device {actual!r}, on the CPU {expected!r}"
                raise Difference(name, text)
            try:
                assert_same_geometry(cpu, device)
            except AssertionError as error:
                raise Difference(name, str(error)) from error
        return cpu, device

    def shrink(self, case: Case) -> Iterator[Case]:
        data = case.data
        for part in ("steps", "rounds", "first"):
            for kept in without_parts(data[part], least=part != "steps"):
                yield Case(self.name, {**data, part: kept})
        for part, plain in (("reads", "round"), ("mode", "fused")):
            if data[part] != plain:
                yield Case(self.name, {**data, part: plain})
        for i, f in enumerate(data["first"]):
            for plain in ({**f, "dtype": "float32"}, {**f, "order": 0}, {**f, "shape": [2, 3]}):
                if plain != f:
                    first = [*data["first"][:i], plain, *data["first"][i + 1 :]]
                    yield Case(self.name, {**data, "first": first})
        for i, (name, numbers) in enumerate(data["steps"]):
            for j, n in enumerate(numbers):
                for smaller in list(smaller_numbers(n))[:1]:
                    new = [name, [*numbers[:j], smaller, *numbers[j + 1 :]]]
                    steps = [*data["steps"][:i], new, *data["steps"][i + 1 :]]
                    yield Case(self.name, {**data, "steps": steps})

    def source(self, case: Case) -> str:
        """A replay of the case, and the ops that it calls on the CPU as a comment."""
        lines = ["from fuzz.aliasing import Aliasing", "from fuzz.cases import Case"]
        lines += [f"print(Aliasing().run(Case('aliasing', {case.data!r})))"]
        for sizes in case.data["rounds"]:
            lines += [f"# round {sizes}", *(f"#   {op}" for op in ops_of(case.data, sizes))]
        return "\n".join(lines)


class Difference(Exception):
    """The device and the CPU differ; ``step``: after which step."""

    def __init__(self, step: str, text: str) -> None:
        super().__init__(f"{step}: {text}")
        self.step = step


def _assert_same(cpu: World, device: World) -> None:
    try:
        for c, d in zip(cpu.tensors, device.tensors):
            assert_same_values(c, d)
        assert_same_storages(cpu, device)
    except AssertionError as error:
        raise Difference("end", str(error)) from error


def first_tensor(f: dict[str, Any], sizes: dict[int, int]) -> torch.Tensor:
    """A tensor of small whole numbers, dense in some order of its dims or with gaps."""
    shape = [sizes.get(n, n) for n in f["shape"]]
    values = (torch.arange(torch.Size(shape).numel()) % 5).reshape(shape).to(NAMES[f["dtype"]])
    if f["order"] == 1:
        back = tuple(reversed(range(values.dim())))
        return values.permute(back).contiguous().permute(back)
    if f["order"] == 3 and values.dim():
        return torch.stack([values, values], -1).select(-1, 1)
    return values


class _Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def shown(a: Any) -> str:
            if isinstance(a, torch.Tensor):
                return f"{str(a.dtype).removeprefix('torch.')}{list(a.shape)}"
            if isinstance(a, (list, tuple)):
                return f"[{', '.join(map(shown, a))}]"
            return repr(a)

        parts = [shown(a) for a in args]
        parts += [f"{k}={shown(v)}" for k, v in (kwargs or {}).items()]
        self.lines.append(f"{op}({', '.join(parts)})")
        return op(*args, **(kwargs or {}))


def ops_of(data: dict[str, Any], sizes: list[list[int]]) -> list[str]:
    """The ops of one round, as the CPU is called."""
    cpu = World("cpu", decides=True)
    lines: list[str] = []
    cpu.tensors += [first_tensor(f, dict(map(tuple, sizes))) for f in data["first"]]
    for name, numbers in data["steps"]:
        log = _Log()
        try:
            with log:
                error = run_step(STEPS[name], cpu, numbers)
        except Skip:
            continue
        lines += [f"{name}:", *(f"  {line}" for line in log.lines[-4:])]
        if error is not None:
            lines.append(f"  raises {type(error).__name__}")
    return lines
