"""Random programs, one index in each of them wrong, and the same programs without a mistake.

A case is a program of some steps that runs in rounds, each with other indices and often of another
size. In a round with a mistake the CPU raises, and the device must raise the same at the next read;
in a round without one it must raise nothing and have the CPU's values. Rounds follow each other, so
that a program with a mistake is one that the cache, padding and tiers have met without.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch

from .cases import Case, Failure
from .minimise import without_parts
from .mistakes_steps import OTHERS, STEPS

ROUNDS = 10
HOWS = ("eager", "eager", "eager", "gradient", "compile")
# The CPU's texts differ by the kernel that its vectorization takes, or name one of several indices.
ANY_TEXT = ("embedding_bag", "one_hot")


class Mistakes:
    """The fuzzer `mistakes`."""

    name = "mistakes"
    seconds_a_case = 200.0
    cases_a_process = 50

    def start(self) -> None:
        import torch._dynamo as dynamo

        from tpu_core.config import reload

        warnings.simplefilter("ignore")
        os.environ["TPU_CHECKS"] = "all"  # division is not checked by default
        reload()
        torch.tpu.init()
        dynamo.config.cache_size_limit = 64

    def draw(self, rng: Random) -> Case:
        how = rng.choice(HOWS)
        known = [
            name
            for name, step in STEPS.items()
            if (how == "compile" or not step.compiled)
            and (how != "gradient" or step.keeps_gradient)
        ]
        steps = [rng.choice([*known, *known, *OTHERS]) for _ in range(rng.randint(1, 5))]
        at = rng.randrange(len(steps))
        steps[at] = rng.choice(known)
        sizes = [[rng.randrange(3, 40), rng.randrange(3, 12)] for _ in range(rng.choice([1, 1, 3]))]
        rounds = [
            {"size": rng.choice(sizes), "bad": k % 2 == 1, "seed": rng.randrange(1 << 20)}
            for k in range(ROUNDS)
        ]
        rng.shuffle(rounds)
        return Case("mistakes", {"how": how, "steps": steps, "at": at, "rounds": rounds})

    def run(self, case: Case) -> Failure | None:
        data = case.data
        torch._dynamo.reset()
        program = program_of(data["steps"], data["how"])
        on_device = torch.compile(program, dynamic=False) if data["how"] == "compile" else program
        for number, round_ in enumerate(data["rounds"]):
            given = inputs(data, round_)
            expected = outcome(program, given, "cpu")
            found = outcome(on_device, given, "tpu")
            if failure := judge(data, round_, expected, found):
                return Failure(
                    failure[0], data["steps"][data["at"]], f"round {number}: {failure[1]}"
                )
        return None

    def shrink(self, case: Case) -> Iterator[Case]:
        data = case.data
        for rounds in without_parts(data["rounds"]):
            if rounds:
                yield Case("mistakes", {**data, "rounds": rounds})
        for k in range(len(data["steps"])):
            if k != data["at"]:
                steps = [*data["steps"][:k], *data["steps"][k + 1 :]]
                yield Case(
                    "mistakes", {**data, "steps": steps, "at": data["at"] - (k < data["at"])}
                )
        if data["how"] != "eager" and not any(
            STEPS[s].compiled for s in data["steps"] if s in STEPS
        ):
            yield Case("mistakes", {**data, "how": "eager"})

    def source(self, case: Case) -> str:
        return "\n".join(
            [
                f"# from the folder integration: {case.data['how']}, {case.data['steps']}",
                "from fuzz.cases import Case",
                "from fuzz.mistakes import Mistakes",
                "f = Mistakes()",
                "f.start()",
                f"print(f.run(Case('mistakes', {case.data!r})))",
            ]
        )


def program_of(steps: list[str], how: str) -> Callable[..., torch.Tensor]:
    """The program: of a matrix and the indices of each step."""

    def program(x: torch.Tensor, indices: list[list[torch.Tensor]]) -> torch.Tensor:
        for name, given in zip(steps, indices, strict=True):
            x = STEPS[name].apply(x, *given) if name in STEPS else OTHERS[name](x)
        return x

    if how != "gradient":
        return program

    def gradient(x: torch.Tensor, indices: list[list[torch.Tensor]]) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(program(x * 1.5, indices).square().mean(), x)
        return found

    return gradient


def inputs(data: dict[str, Any], round_: dict[str, Any]) -> tuple[Any, Any]:
    """The matrix and the indices of a round, on the CPU."""
    r = Random(round_["seed"])
    n, m = round_["size"]
    indices = [
        STEPS[name].draw(r, n, m, round_["bad"] and k == data["at"]) if name in STEPS else []
        for k, name in enumerate(data["steps"])
    ]
    # No two of them cancel.
    return torch.linspace(0.1, 2.9, n * m).cos().reshape(n, m), indices


def outcome(program: Callable[..., torch.Tensor], given: Any, device: str) -> Any:
    """The result, or the error that the program or the read of its result raises."""
    x, indices = given
    try:
        moved = [[i.to(device) for i in each] for each in indices]
        return program(x.to(device), moved).cpu()
    except (IndexError, RuntimeError) as error:
        if device == "tpu":
            try:
                torch.tpu.synchronize()
            except (IndexError, RuntimeError) as later:
                return RuntimeError(f"two errors: {error}; {later}")
        return error


def judge(
    data: dict[str, Any], round_: dict[str, Any], expected: Any, found: Any
) -> tuple[str, str] | None:
    """Kind and text of a failure, or None."""
    is_bad = round_["bad"]
    if isinstance(expected, Exception) != is_bad:
        return "exception", f"the CPU: {expected!r}"
    if is_bad and not isinstance(found, Exception):
        return "no error", f"the CPU raises {expected!r}"
    if isinstance(found, Exception):
        same = type(found) is type(expected)
        if is_bad and not data["steps"][data["at"]].startswith(ANY_TEXT):
            same = same and str(found).splitlines()[0] == str(expected).splitlines()[0]
        return None if same else ("error", f"{found!r}, the CPU: {expected!r}")
    if torch.allclose(found, expected, rtol=1e-3, atol=1e-4, equal_nan=True):
        return None
    return "value", f"off by {(found - expected).abs().max():.3g}"
