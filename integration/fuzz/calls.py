"""Random ops with random arguments, several calls each in one process, against the CPU.

A case is a few calls of one function: on equal tensors with other static arguments, on tensors of
other sizes with equal arguments, or both, so that cached programs, padded programs and those that
stand in for others are met. Functions come from the schemas of ATen, from the samples of OpInfo and
from small compositions.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from random import Random
from typing import Any

from . import calls_compositions, calls_excluded, calls_opinfo, calls_schema
from .calls_judge import error_of_the_read, errors_differ, left_over, results_differ
from .calls_worlds import AFTER, Call, World, name_of
from .cases import Case, Failure
from .minimise import without_parts
from .values import (
    dtype_of,
    is_tensor,
    mapped,
    resized,
    smaller_tensors,
    source,
    tensors,
    text_of,
)

THEN = """def then(t):
    if isinstance(t, torch.Tensor):
        return ({}) if t.is_floating_point() else t
    return [then(x) for x in t] if isinstance(t, (tuple, list)) else t"""


class Calls:
    """The fuzzer `calls`."""

    name = "calls"
    seconds_a_case = 60.0
    cases_a_process = 60

    # --- drawing ----------------------------------------------------------------------------

    def draw(self, rng: Random) -> Case:
        kind = rng.choices(("compositions", "schema", "opinfo"), (4, 4, 3))[0]
        calls = getattr(self, f"_from_{kind}")(rng)
        data = {
            "calls": [c for c in calls if _small(c)] or calls[:1],
            "reads": rng.choice(("each", "each", "end")),
            "via": rng.choice(("none", "none", "clone")),
            "after": rng.choice(("none", "none", "none", "double", "sum", "either", "either")),
        }
        if data["after"] == "either":
            data["calls"] = _kept_in_turn(rng, data["calls"])
        if rng.random() < 0.15:
            data["grad"] = True
        return Case(self.name, data)

    def _from_compositions(self, rng: Random) -> list[Call]:
        name, call = calls_compositions.drawn(rng)
        calls = [call]
        for _ in range(rng.randint(2, 5)):
            x = calls[-1]["args"][0]
            shape = tuple(x["t"])
            pick = rng.random()
            if pick < 0.35:  # static arguments change, and nothing else
                call = calls_compositions.call_of(rng, name, shape, x["dtype"])
                calls.append({**call, "args": [x]})
                continue
            if pick < 0.7:  # sizes change, and static arguments
                shape = tuple(n + rng.choice((1, 2, 3)) if rng.random() < 0.5 else n for n in shape)
            elif pick < 0.8:
                shape = calls_compositions.shape(rng)
            calls.append(calls_compositions.call_of(rng, name, shape, x["dtype"]))
        for c in calls:
            c["name"] = name
        return calls

    def _from_schema(self, rng: Random) -> list[Call]:
        draw, call = calls_schema.drawn(rng)
        calls = [call]
        for _ in range(rng.randint(2, 4)):
            pick = rng.random()
            if pick < 0.5:
                call = draw.redrawn(call)
            if pick > 0.35:
                call = calls_opinfo.with_other_sizes(rng, call)
            calls.append(call)
        return calls

    def _from_opinfo(self, rng: Random) -> list[Call]:
        call = calls_opinfo.drawn(rng)
        if call is None:
            return self._from_compositions(rng)
        calls = [call]
        for _ in range(rng.randint(1, 3)):
            pick = rng.random()
            if pick < 0.5:
                call = calls_opinfo.with_other_static(rng, call)
            if pick > 0.35:
                call = calls_opinfo.with_other_sizes(rng, call)
            calls.append(call)
        return calls

    # --- running ----------------------------------------------------------------------------

    def run(self, case: Case) -> Failure | None:
        failure = self._run(case)
        if failure is not None and calls_excluded.meant(failure.kind, failure.key, failure.text):
            return None
        return failure

    def _run(self, case: Case) -> Failure | None:
        data = case.data
        cpu, device = World("cpu", data), World("tpu", data)
        pending = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for i, call in enumerate(data["calls"]):
                print(f"call {i} on the CPU: {text_of(call)[:2000]}", flush=True)
                want = cpu.call(call)
                print(f"call {i} on the device", flush=True)
                got = device.call(call)
                failure = errors_differ(call, want, got) or error_of_the_read(call, want, got)
                if failure:
                    return failure
                if want.error is not None and "out" in call["kwargs"]:
                    pending.clear()  # the CPU may have resized it before it raised
                if data["reads"] == "each":
                    failure = results_differ(call, want, got)
                    if failure:
                        return failure
                else:
                    pending.append((call, want, got))
            # Results alias inputs that later calls may have written: on both sides alike.
            for call, want, got in pending:
                failure = results_differ(call, want, got)
                if failure:
                    return failure
            return left_over(name_of(data["calls"][-1]))

    def key(self, case: Case) -> str:
        return name_of(case.data["calls"][0])

    def ignores(self, log: str) -> bool:
        """Whether a process ended in the CPU's own call."""
        return log.rfind("on the CPU:") > log.rfind("on the device")

    # --- shrinking --------------------------------------------------------------------------

    def shrink(self, case: Case) -> Iterator[Case]:
        data = case.data

        def case_of(**changed: Any) -> Case:
            return Case(self.name, {**data, **changed})

        for kept in without_parts(data["calls"], least=1):
            yield case_of(calls=kept)
        for field, plain in (("after", "none"), ("via", "none"), ("reads", "each")):
            if data[field] != plain:
                yield case_of(**{field: plain})
        if data.get("grad"):
            yield case_of(grad=False)
        sizes = sorted({n for t in tensors(data["calls"]) for n in t["t"] if n > 1}, reverse=True)
        for n in sizes:
            for smaller in {1, 2, n - 1} - {n}:
                yield case_of(calls=[_resized(c, {n: smaller}) for c in data["calls"]])
        yield from self._simpler_tensors(case)
        for i, call in enumerate(data["calls"]):
            for k in call["kwargs"]:
                kwargs = {name: v for name, v in call["kwargs"].items() if name != k}
                new = {**call, "kwargs": kwargs}
                yield case_of(calls=[*data["calls"][:i], new, *data["calls"][i + 1 :]])

    def _simpler_tensors(self, case: Case) -> Iterator[Case]:
        texts = {text_of(t): t for t in tensors(case.data["calls"])}
        for text, spec in texts.items():
            for simpler in smaller_tensors(spec):

                def change(v: Any, text: str = text, simpler: Any = simpler) -> Any:
                    return simpler if is_tensor(v) and text_of(v) == text else v

                calls = [mapped_call(c, change) for c in case.data["calls"]]
                yield Case(self.name, {**case.data, "calls": calls})

    # --- as Python --------------------------------------------------------------------------

    def source(self, case: Case) -> str:
        data = case.data
        names = {}
        lines = ["import torch", "import torch.nn.functional as F"]
        bodies: list[str] = []
        for t in tensors([[c["args"], c["kwargs"]] for c in data["calls"]]):
            text = text_of(t)
            if text not in names:
                names[text] = f"t{len(names)}"
                bodies.append(f"    {names[text]} = {source(t)}")
                if data["via"] == "clone":
                    bodies.append(f"    {names[text]} = {names[text]}.clone()")

        def expression(v: Any) -> str:
            if is_tensor(v):
                return names[text_of(v)]
            if isinstance(v, list):
                return f"[{', '.join(map(expression, v))}]"
            if isinstance(v, dict) and "tuple" in v:
                return f"({''.join(expression(x) + ', ' for x in v['tuple'])})"
            return source(v)

        results = []
        for i, c in enumerate(data["calls"]):
            parts = [expression(v) for v in c["args"]]
            parts += [f"{k}={expression(v)}" for k, v in c["kwargs"].items()]
            fn = f"({c['fn']})" if c["fn"].startswith("lambda") else c["fn"]
            call = f"{fn}({', '.join(parts)})"
            if data["after"] == "either":
                call = f"(lambda r: (r, then(r), [r, then(r)])[{c.get('keep', 0)}])({call})"
            elif data["after"] != "none":
                call = f"then({call})"
            if data["reads"] == "each":
                bodies.append(f"    print({call})")
            else:
                bodies.append(f"    r{i} = {call}")
                results.append(f"r{i}")
        if data["after"] != "none":
            lines.append(THEN.format(AFTER[data["after"]]))
        if data.get("grad"):
            lines.append("# gradients are compared, too: see `gradients` in fuzz/calls_worlds.py")
        lines += ["for d in ('cpu', 'tpu'):", *bodies]
        if results:
            lines.append(f"    print({', '.join(results)})")
        return "\n".join(lines)


def mapped_call(call: Call, change: Any) -> Call:
    return {
        **call,
        "args": [mapped(a, change) for a in call["args"]],
        "kwargs": {k: mapped(v, change) for k, v in call["kwargs"].items()},
    }


def _resized(call: Call, sizes: dict[int, int]) -> Call:
    return mapped_call(call, lambda v: resized(v, sizes) if is_tensor(v) else v)


def _kept_in_turn(rng: Random, calls: list[Call]) -> list[Call]:
    """The calls, one of them once for each choice of what is kept of its results.

    Its programs have the same ops on the same tensors, and none may serve for another but one that
    returns more.
    """
    calls = [{**c, "keep": rng.randrange(3)} for c in calls]
    i = rng.randrange(len(calls))
    turns = [{**calls[i], "keep": k} for k in rng.sample(range(3), 3)]
    return [*calls[:i], *turns, *calls[i + 1 :]]


def _small(call: Call) -> bool:
    total = 0
    for t in tensors([call["args"], call["kwargs"]]):
        n = 1
        for size in t["t"]:
            n *= size
        total += n * dtype_of(t["dtype"]).itemsize
    return total < 100_000
