"""Cases of the fuzzers ``xla`` and ``programs`` can be drawn again; their judges see errors."""

from __future__ import annotations

import os
import random

import pytest
import torch

from fuzz import programs, programs_twin, workers, xla_program
from fuzz.frame import fuzzer
from fuzz.programs_model import build, optimizer
from fuzz.xla import compare
from fuzz.xla_reference import Unknown, Value, result


def drawn(name: str, seed: object):
    return fuzzer(name).draw(random.Random(f"{seed}"))


@pytest.mark.parametrize("name", ["xla", "programs"])
def test_cases_depend_on_the_seed_alone(name: str) -> None:
    for i in range(5):
        assert drawn(name, i) == drawn(name, i)
        assert drawn(name, i) != drawn(name, i + 1)


def test_the_text_of_a_computation_runs() -> None:
    f = fuzzer("xla")
    for i in range(10):
        data = {**drawn("xla", i).data, "grad": False, "how": "eager"}
        scope: dict = {}
        text = f.source(type(drawn("xla", i))("xla", data)).replace("'tpu'", "'cpu'")
        exec(text, scope)
        values = xla_program.reference(data)
        for k, got in zip(data["outputs"], scope["got"]):
            if values[k] is not None:
                assert compare("", got, values[k]) is None


def test_the_text_of_a_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    case = drawn("programs", 3)
    for spec in case.data["specs"]:
        del spec["steps"][2:]
    data = {**case.data, "how": "eager"}
    text = fuzzer("programs").source(type(case)("programs", data)).replace('"tpu"', '"cpu"')
    exec(compile(text, "source", "exec"), {})
    assert capsys.readouterr().out


def test_whole_sums_are_compared_bit_by_bit_and_others_by_their_noise() -> None:
    x = torch.arange(100.0)
    whole = result("sum_all", [Value(x, True)], {}, 0)
    assert whole.same
    assert compare("sum", torch.tensor(4950.0), whole) is None
    assert compare("sum", torch.tensor(4950.0005), whole) is not None
    rounded = result("sum_all", [Value(x / 3, True)], {}, 0)
    assert not rounded.same
    assert compare("sum", torch.tensor(1650.0002), rounded) is None
    assert compare("sum", torch.tensor(1651.0), rounded) is not None
    assert not result("sum_all", [Value(x * 2**20, True)], {}, 0).same
    with pytest.raises(Unknown):
        result("floor", [rounded], {}, 0)


def measures(data: dict) -> tuple[int, ...]:
    ops = sum("op" in n for n in data["nodes"])
    sizes = sum(sum(n.get("shape", ())) for n in data["nodes"])
    swapped = sum("swapped" in n for n in data["nodes"])
    return ops, len(data["outputs"]), data["grad"], data["how"] != "eager", sizes, swapped


def test_a_smaller_computation_is_smaller() -> None:
    f = fuzzer("xla")
    for i in range(5):
        case = drawn("xla", i)
        for _, other in zip(range(10), f.shrink(case)):
            before, after = measures(case.data), measures(other.data)
            assert after[0] <= before[0]
            assert any(x < y for x, y in zip(after, before))


def program(name: str = "SGD", **options: object) -> dict:
    spec = programs.draw_spec(random.Random("spec"), "eager")
    blocks = [{"kind": "Linear", "act": "tanh", "bias": True}]
    chosen = {"name": name, "lr": 0.1, **options}
    return {**spec, "family": "sequences", "blocks": blocks, "optimizer": chosen, "clip": 0.0} | {
        "autocast": False,
        "loss": "mse",
    }


def test_a_step_that_is_wrong_by_a_percent_is_found() -> None:
    spec = program()
    step = {**spec["steps"][0], "size": [5], "updates": True, "zeroes": True, "to_none": True}
    model = build(spec)
    state = programs_twin.state_of(model, optimizer(spec, model))
    got = programs_twin.repeat(spec, state, [step], variant=2)  # as if by another order of sums
    assert programs_twin.differences(spec, state, [step], got) == []
    for name in ("loss 0", "gradient head.weight", "state stem.weight"):
        kind, key = name.split(" ", 1)
        before = state.model[key] if kind == "state" else 0.0
        wrong = {**got, name: before + (got[name] - before) * 1.01}
        found = programs_twin.differences(spec, state, [step], wrong)
        assert [k for k, _ in found] == [name]
        nothing = {k: v for k, v in got.items() if k != name}
        assert programs_twin.differences(spec, state, [step], nothing) == [("missing", name)]


def test_gradients_of_nearly_nothing_are_judged_apart_from_the_steps_that_they_make() -> None:
    spec = program("Adam", eps=1e-8)
    step = {**spec["steps"][0], "batch": 1, "size": [5], "updates": True}
    step |= {"zeroes": True, "to_none": True}
    model = build(spec)
    state = programs_twin.state_of(model, optimizer(spec, model))
    own = programs_twin.repeat(spec, state, [step])
    used = {k.split(" ")[1]: v for k, v in own.items() if k.startswith("gradient ")}
    row = int((used["table.weight"] == 0).all(1).nonzero()[0])  # of a token that is not drawn
    rounded = {k: v.clone() for k, v in used.items()}
    rounded["table.weight"][row] = 1e-9

    def judged(grads: dict, **wrong: torch.Tensor) -> list[str]:
        got = programs_twin.repeat(spec, state, [step], 0, [grads])
        got |= {f"gradient@0 {k}": v for k, v in grads.items()}
        got |= {k.replace("_", " ", 1): v for k, v in wrong.items()}
        return [k for k, _ in programs_twin.differences(spec, state, [step], got, [grads])]

    assert judged(rounded) == []
    # A full step where there is no gradient, and none where there is one.
    for grads, table in ((used, rounded), (rounded, used)):
        other = programs_twin.repeat(spec, state, [step], 0, [table])["state table.weight"]
        assert judged(grads, **{"state_table.weight": other}) == ["state table.weight"]
    for k, v in used.items():
        assert judged({**used, k: v * 1.01}) == [f"gradient@0 {k}"]


@pytest.mark.parametrize(
    ("used", "late"),
    [((0, 0), True), ((0, 1, 1), True), ((0, 1, 2, 3, 4), False), ((0, 100), True)],
)
def test_a_case_that_computes_on_a_busy_machine_has_not_timed_out(
    used: tuple[int, ...], late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = workers.Worker.__new__(workers.Worker)
    worker._from, answers = os.pipe()
    worker._child = 0
    left = list(used)

    def processor_seconds(session: int) -> float:
        found = left.pop(0) * 0.02
        if len(left) == 0 and not late:
            workers._write(answers, None)
        return found

    monkeypatch.setattr(workers, "processor_seconds", processor_seconds)
    if late:
        with pytest.raises(TimeoutError):
            worker._answer(0.1)
    else:
        assert worker._answer(0.1) is None
    assert not left
    os.close(worker._from)
    os.close(answers)
