"""Random programs that train: models of several blocks, optimizers, reads, sizes that change."""

from __future__ import annotations

import copy
import random
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch

from . import programs_images, programs_sequences
from .cases import Case, Failure
from .minimise import without_parts
from .programs_model import Spec, Step, backward_and_update, batch, build, loss_of, optimizer
from .programs_optimizers import draw_optimizer
from .programs_source import source
from .programs_twin import (
    Gradients,
    State,
    differences,
    gradients_of,
    repeat,
    results,
    state_of,
    to_cpu,
)

READS = ("loss", "print", "gradient", "parameter", "activation", "compare", "array", "wait")
# Of a case; what was begun is compared, then the case ends.
SECONDS = 40.0
HOWS = ("eager",) * 8 + ("compile", "threads", "stream", "modes")


class Programs:
    """Training programs."""

    name = "programs"
    seconds_a_case = 300.0
    cases_a_process = 12

    def start(self) -> None:
        warnings.simplefilter("ignore")
        import torch._dynamo

        torch._dynamo.config.cache_size_limit = 64

    def draw(self, rng: random.Random) -> Case:
        how = rng.choice(HOWS)
        count = rng.choice([2, 3]) if how == "threads" else 1
        specs = [draw_spec(rng, how) for _ in range(count)]
        compile = rng.choice(["blocking", "blocking", "background"])
        return Case("programs", {"how": how, "compile": compile, "specs": specs})

    def run(self, case: Case) -> Failure | None:
        data = case.data
        if any(refused(spec) for spec in data["specs"]):
            return None
        failures: list[Failure | None] = [None] * len(data["specs"])

        def one(i: int) -> None:
            failures[i] = train(data["specs"][i], data["how"], data["compile"])

        threads = [threading.Thread(target=one, args=[i]) for i in range(1, len(failures))]
        for thread in threads:
            thread.start()
        one(0)
        for thread in threads:
            thread.join()
        return next((f for f in failures if f is not None), None)

    def shrink(self, case: Case) -> Iterator[Case]:
        for data in smaller(case.data):
            yield Case("programs", data)

    def source(self, case: Case) -> str:
        return source(case.data)


# --- drawing --------------------------------------------------------------------------------------


def draw_spec(r: random.Random, how: str) -> Spec:
    family = r.choice(["sequences", "sequences", "images"])
    width = r.choice([4, 6, 8])
    draw_block = (programs_images if family == "images" else programs_sequences).draw
    spec: Spec = {
        "family": family,
        "width": width,
        "seed": r.randrange(1 << 20),
        "blocks": [draw_block(r, width) for _ in range(r.choice([1, 1, 1, 2, 2, 3, 4]))],
        "loss": r.choice(["classes", "smooth", "mse", "each"]),
        "optimizer": draw_optimizer(r),
        "decay": r.choice([1.0, 1.0, 0.97]),
        "clip": r.choice([0.0, 0.0, 1.0]),
        "autocast": r.random() < 0.08,
    }
    batches = r.sample([1, 2, 3, 4, 5, 8, 16], r.choice([1, 2, 3]))
    lengths = r.sample(range(2, 14), r.choice([1, 2, 5]))
    square = r.random() < 0.5
    often = r.choice([0.05, 0.2, 0.5])
    accumulates = r.random() < 0.2
    # Threads each have their mode.
    switches = how == "modes" or how == "threads" and r.random() < 0.5
    spec["steps"] = []
    zeroes = True
    for _ in range(r.choice([6, 12, 24, 48])):
        n = r.choice(lengths)
        sizes = [n] if family == "sequences" else [n, n if square else r.choice(lengths)]
        step: Step = {
            "batch": r.choice(batches),
            "size": sizes,
            "seed": r.randrange(1 << 20),
            "reads": [what for what in READS if r.random() < often / 3],
            "check": r.random() < often,
            "zeroes": zeroes,
            "to_none": r.random() < 0.8,
            "updates": not accumulates or r.random() < 0.5,
        }
        if switches:
            step["mode"] = r.choice(["fused", "fused", "strict", "debug"])
        zeroes = step["updates"]
        spec["steps"].append(step)
    spec["steps"][-1]["check"] = True
    return spec


# --- running --------------------------------------------------------------------------------------


def refused(spec: Spec) -> bool:
    """Whether the CPU raises at some size."""
    model = build(spec)
    fresh = state_of(model, optimizer(spec, model))
    seen = set()
    for step in spec["steps"]:
        key = (step["batch"], *step["size"])
        if key not in seen:
            seen.add(key)
            try:
                repeat(spec, fresh, [step])
            except Exception:
                return True
    return False


def train(spec: Spec, how: str, compile: str) -> Failure | None:
    """Train on the device, and judge it every few steps."""
    from tpu_core.config import override

    with ExitStack() as stack:
        stack.enter_context(override(compile=compile))
        # A mode reads the configuration when it is set.
        stack.enter_context(torch.tpu.set_eager_mode(torch.tpu.eager_mode))
        if how == "stream":
            side = torch.Stream(device="tpu")
            side.wait_stream(torch.tpu.current_stream())
            stack.enter_context(torch.tpu.stream(side))
        try:
            return steps_of(spec, how)
        except Exception as error:
            first = str(error).strip().splitlines()[:1]
            text = "".join(c for c in "".join(first) if not c.isdigit())[:60]
            return Failure("error", f"{type(error).__name__}: {text}", detail(error))


def detail(error: Exception) -> str:
    import traceback

    return "".join(traceback.format_exception(error))[-3000:]


def steps_of(spec: Spec, how: str) -> Failure | None:
    end = time.monotonic() + SECONDS
    model = build(spec)
    # Adagrad's state is made with it, on the device that the parameters are on then.
    before = spec["seed"] % 2 and spec["optimizer"]["name"] != "Adagrad"
    optim = optimizer(spec, model if before else model.to("tpu"))
    model.to("tpu")
    state: State = state_of(model, optim)
    call: Any = model
    if how == "compile":
        torch._dynamo.reset()
        call = torch.compile(model, dynamic=True)
    begun: list[Step] = []
    losses: list[Any] = []
    used: list[Gradients | None] = []
    for step in spec["steps"]:
        if used and used[-1] and not (step["zeroes"] and step["to_none"]):  # they are written to
            used[-1] = {k: g.clone() for k, g in used[-1].items()}
        with torch.tpu.set_eager_mode(step.get("mode") or torch.tpu.eager_mode):
            if step["zeroes"]:
                optim.zero_grad(set_to_none=step["to_none"])
            data = {k: v.to("tpu") for k, v in batch(spec, step).items()}
            model.read = read_activation if "activation" in step["reads"] else None
            loss = loss_of(call, spec, data)
            read(step, "early", loss, model)
            backward_and_update(loss, model, optim, spec, step)
            read(step, "late", loss, model)
        begun.append(step)
        losses.append(loss.detach())
        used.append(gradients_of(spec, model) if step["updates"] else None)
        del loss, data
        late = time.monotonic() > end
        if step["check"] or late:
            got = {f"loss {i}": to_cpu(x) for i, x in enumerate(losses)}
            now = state_of(model, optim)
            used = to_cpu(used)
            wrong = differences(spec, state, begun, got | results(now, used), used)
            if wrong:
                kinds = [k.split(" ")[0].split("@")[0] for k, _ in wrong]
                text = "\n".join(text for _, text in wrong[:6])
                at = spec["steps"].index(step)
                return Failure("value", f"{kinds[0]}", f"{how}, step {at}, {len(wrong)}: {text}")
            state, begun, losses, used = now, [], [], []
        if late:
            return None
    return None


def read_activation(x: torch.Tensor) -> None:
    float(x.detach().mean())


def read(step: Step, when: str, loss: torch.Tensor, model: torch.nn.Module) -> None:
    """Reads at random times: before the backward pass or after the step."""
    for what in step["reads"]:
        if (step["seed"] + len(what)) % 2 == (when == "early"):
            continue
        if what == "loss":
            loss.item()
        elif what == "print":
            str(loss)
        elif what == "compare":
            bool(loss > 1.0)
        elif what == "array":
            loss.detach().cpu().numpy()
        elif what == "wait":
            torch.tpu.synchronize()
        elif what == "parameter":
            next(model.parameters()).detach().cpu()
        elif what == "gradient" and (grad := next(model.parameters()).grad) is not None:
            grad.norm().item()


# --- smaller programs -----------------------------------------------------------------------------


def smaller(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if len(data["specs"]) > 1:
        for i in range(len(data["specs"])):
            yield {**data, "specs": [data["specs"][i]]}
    if data["how"] != "eager" and len(data["specs"]) == 1:
        yield {**data, "how": "eager"}
    if data["compile"] != "blocking":
        yield {**data, "compile": "blocking"}
    for i, spec in enumerate(data["specs"]):
        for other in smaller_specs(spec):
            yield {**data, "specs": [*data["specs"][:i], other, *data["specs"][i + 1 :]]}


def smaller_specs(spec: Spec) -> Iterator[Spec]:
    for blocks in without_parts(spec["blocks"]):
        yield {**spec, "blocks": blocks}
    for steps in without_parts(spec["steps"], 1):
        steps = copy.deepcopy(steps)
        steps[-1]["check"] = True
        yield {**spec, "steps": steps}
    plain: Spec = {
        **{"optimizer": {"name": "SGD", "lr": 0.01}, "autocast": False, "decay": 1.0},
        **{"clip": 0.0, "loss": "classes"},
    }
    for k, v in plain.items():
        if spec[k] != v:
            yield {**spec, k: v}
    steps = copy.deepcopy(spec["steps"])
    for step in steps:
        step.update(reads=[], zeroes=True, to_none=True, updates=True)
    if steps != spec["steps"]:
        yield {**spec, "steps": steps}
    for key in ("batch", "size"):
        values = sorted({str(step[key]) for step in spec["steps"]})
        for value in values[1:]:
            steps = copy.deepcopy(spec["steps"])
            first = next(step[key] for step in steps if str(step[key]) != value)
            for step in steps:
                if str(step[key]) == value:
                    step[key] = first
            yield {**spec, "steps": steps}
