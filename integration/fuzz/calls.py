"""Random ops with random arguments, several calls each in one process, against the CPU.

A case is a few calls of one function: on equal tensors with other static arguments, on tensors of
other sizes with equal arguments, or both, so that cached programs, padded programs and those that
stand in for others are met. Functions come from the schemas of ATen, from the samples of OpInfo and
from small compositions.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from random import Random
from typing import Any

import torch

from . import calls_compositions, calls_excluded, calls_opinfo, calls_schema
from .cases import Case, Failure
from .compare import difference, tolerance
from .minimise import without_parts
from .values import (
    decoded,
    dtype_of,
    is_tensor,
    made,
    mapped,
    resized,
    smaller_tensors,
    source,
    tensors,
    text_of,
)

Call = dict[str, Any]
# What is done with each floating result: a later op in the same program. Of "either", both are
# recorded and a call says which is kept: the result, what was made of it, or both.
AFTER = {
    "double": "t + t",
    "sum": "t.sum(-1) if t.dim() else t * 2",
    "either": "t + 1",
    "none": "t",
}
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
                failure = _errors(call, want, got)
                if failure:
                    return failure
                if data["reads"] == "each":
                    failure = _results(call, want, got)
                    if failure:
                        return failure
                else:
                    pending.append((call, want, got))
            # Results alias inputs that later calls may have written: on both sides alike.
            for call, want, got in pending:
                failure = _results(call, want, got)
                if failure:
                    return failure
            return _left_over(name_of(data["calls"][-1]))

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
            lines.append("# gradients are compared as well: see `gradients` in fuzz/calls.py")
        lines += ["for d in ('cpu', 'tpu'):", *bodies]
        if results:
            lines.append(f"    print({', '.join(results)})")
        return "\n".join(lines)


class Outcome:
    """What a call gave: a result, what it wrote, gradients; or an error."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.result: Any = None
        self.written: list[torch.Tensor] = []
        self.gradients: Any = None
        self.dtypes: set[torch.dtype] = set()


class World:
    """The tensors of a case on one device; equal descriptions are one tensor."""

    def __init__(self, device: str, data: dict[str, Any]) -> None:
        self._device = device
        self._data = data
        self._made: dict[str, torch.Tensor] = {}

    def _tensor(self, spec: dict[str, Any]) -> torch.Tensor:
        text = text_of(spec)
        if text not in self._made:
            t = made(spec, self._device)
            if self._data["via"] == "clone":
                t = t.clone()
            self._made[text] = t
        return self._made[text]

    def _leaf(self, spec: dict[str, Any]) -> torch.Tensor:
        t = self._tensor(spec)
        if t.dtype.is_floating_point or t.dtype.is_complex:
            return t.detach().requires_grad_()
        return t

    def call(self, call: Call) -> Outcome:
        """Call the function on this device's tensors."""
        outcome = Outcome()
        used: dict[str, torch.Tensor] = {}
        grad = self._data.get("grad", False)

        def make(spec: dict[str, Any]) -> torch.Tensor:
            text = text_of(spec)
            if text not in used:
                used[text] = self._leaf(spec) if grad else self._tensor(spec)
            return used[text]

        try:
            args = [decoded(a, self._device, make) for a in call["args"]]
            kwargs = {k: decoded(v, self._device, make) for k, v in call["kwargs"].items()}
            outcome.dtypes = {t.dtype for t in used.values()}
            result = function(call["fn"])(*args, **kwargs)
            then = function(f"lambda t: {AFTER[self._data['after']]}")
            outcome.result = after(result, then)
            if self._data["after"] == "either":
                kept = (result, outcome.result, [result, outcome.result])
                outcome.result = kept[call.get("keep", 0)]
            if grad:
                outcome.gradients = gradients(result, list(used.values()))
            if writes(call):
                outcome.written = list(used.values())
        except Exception as error:
            outcome.error = error
        return outcome


_functions: dict[str, Any] = {}


def function(text: str) -> Any:
    """The function that a source text names."""
    if text not in _functions:
        names = {"torch": torch, "F": torch.nn.functional}
        _functions[text] = eval(text, names)
    return _functions[text]


def after(result: Any, then: Any) -> Any:
    """The result with an op applied to each floating tensor."""
    if isinstance(result, torch.Tensor) and result.dtype.is_floating_point:
        return then(result)
    if isinstance(result, (tuple, list)):
        return [after(r, then) for r in result]
    return result


def gradients(result: Any, leaves: list[torch.Tensor]) -> Any:
    """Gradients of a weighted sum of the differentiable results."""
    flat: list[torch.Tensor] = []

    def collect(r: Any) -> None:
        if isinstance(r, torch.Tensor) and r.requires_grad:
            flat.append(r)
        elif isinstance(r, (tuple, list)):
            for x in r:
                collect(x)

    collect(result)
    wanted = [t for t in leaves if t.requires_grad]
    if not flat or not wanted:
        return None
    weights = [
        (torch.arange(r.numel()) % 5 - 1).reshape(r.shape).to(r.dtype).to(r.device) for r in flat
    ]
    return torch.autograd.grad(flat, wanted, weights, allow_unused=True)


def name_of(call: Call) -> str:
    """A function's short name, which findings are counted by."""
    if "name" in call:
        return f"composition {call['name']}"
    return call["fn"].removeprefix("torch.").removeprefix("ops.")


def writes(call: Call) -> bool:
    """Whether the function writes to its arguments."""
    fn = call["fn"]
    return fn.split(".")[-1].endswith("_") or bool(re.search(r"aten\.\w+_\.", fn)) or "out" in fn


def _errors(call: Call, want: Outcome, got: Outcome) -> Failure | None:
    key = name_of(call)
    w, g = want.error, got.error
    if w is None and g is None:
        return None
    if w is None:
        assert g is not None
        if excused_on_device(g):
            want.error = g  # its results are not compared
            return None
        return Failure("error", key, f"the device raises {type(g).__name__}: {g}")
    if g is None:
        if excused_on_cpu(w):
            return None
        return Failure("no error", key, f"the CPU raises {type(w).__name__}: {w}")
    if not isinstance(g, type(w)) and not excused_on_cpu(w) and not excused_on_device(g):
        text = f"cpu {type(w).__name__}: {w}\ndevice {type(g).__name__}: {g}"
        return Failure("error type", key, text)
    return None


def excused_on_cpu(error: Exception) -> bool:
    """Whether an error of the CPU's is not asked of the device."""
    text = f"{type(error).__name__}: {error}"
    if calls_excluded.BY_VALUE.search(text):
        return True
    # Dtypes that the CPU has no kernel for, and options (LU without pivots).
    missing = r"not implemented (for|on the CPU)|not supported|[Uu]nsupported|only support"
    return bool(re.search(rf"{missing}|Could not run", text))


def excused_on_device(error: Exception) -> bool:
    """Whether an error of the device is documented."""
    return bool(re.search(r"TPU1005|complex32", str(error)))


def _results(call: Call, want: Outcome, got: Outcome) -> Failure | None:
    if want.error is not None:
        return None
    key = name_of(call)
    least = tolerance(*(d for d in want.dtypes if d.is_floating_point or d.is_complex))
    pairs = (
        ("result", want.result, got.result),
        ("written", want.written, got.written),
        ("gradients", want.gradients, got.gradients),
    )
    for path, w, g in pairs:
        try:
            strides = path == "result" and not calls_excluded.LAYOUT_OF_A_LIBRARY.search(key)
            found = difference(w, g, least=least, strides=strides, path=path)
        except Exception as error:
            text = f"{path}: {type(error).__name__}: {error}"
            return Failure("late error", key, text)
        if found:
            kind, text = found
            return Failure(kind if path != "gradients" else f"gradient {kind}", key, text)
    return None


def _left_over(key: str) -> Failure | None:
    """An error of a call whose results were not read: it must not meet the next case."""
    try:
        torch.tpu.synchronize()
    except Exception as error:
        if excused_on_device(error):
            return None
        return Failure("late error", key, f"{type(error).__name__}: {error}")
    return None


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
