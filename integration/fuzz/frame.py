"""The loop of every fuzzer: draw, run in a child process, minimise what fails, report.

A fuzzer is a class of `FUZZERS` with the methods of `Fuzzer`. Case ``i`` of a seed depends on the
seed and ``i`` alone, so ``--first i --count 1`` draws it again.
"""

from __future__ import annotations

import importlib
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from .cases import (
    CORPUS,
    TIERS,
    Case,
    Failure,
    Finding,
    Settings,
    corpus,
    keep,
    tiers_of_case,
)
from .minimise import minimise
from .workers import Worker, run_alone

FUZZERS = {
    "calls": "fuzz.calls:Calls",
    "aliasing": "fuzz.aliasing:Aliasing",
    "programs": "fuzz.programs:Programs",
    "xla": "fuzz.xla:Xla",
    "mistakes": "fuzz.mistakes:Mistakes",
}


class Fuzzer(Protocol):
    """What a fuzzer provides.

    Attributes:
        name: As in `FUZZERS`.
        seconds_a_case: Time limit of one case; beyond it is a finding.
        cases_a_process: Cases that one child runs before a new one takes its place. What a case
            does depends on those before it (caches, promoted programs), which is wanted.

    Optional: ``start()`` runs once in each child, before its first case; ``key(case)`` names what a
    crash or time-out of a case is about; ``ignores(log)`` tells from a child's output that a crash
    is not the device's.
    """

    name: str
    seconds_a_case: float
    cases_a_process: int

    def draw(self, rng: random.Random) -> Case:
        """A random case. Must not use the device: it runs in the parent."""
        ...

    def run(self, case: Case) -> Failure | None:
        """Run a case on the CPU and on the device, in a child process."""
        ...

    def shrink(self, case: Case) -> Iterator[Case]:
        """Smaller cases, the smallest first. Must not use the device."""
        ...

    def source(self, case: Case) -> str:
        """The case as a Python program that needs torch alone."""
        ...


def fuzzer(name: str) -> Fuzzer:
    module, attribute = FUZZERS[name].split(":")
    made: Fuzzer = getattr(importlib.import_module(module), attribute)()
    return made


@dataclass
class Report:
    """What a run did."""

    name: str
    seed: int
    seconds: float = 0.0
    cases: int = 0
    failures: int = 0
    processes: int = 0
    first_failure: float | None = None
    findings: list[Finding] = field(default_factory=list)

    def text(self) -> str:
        lines = [
            f"fuzz {self.name}: {self.cases} cases in {self.seconds:.0f} s, {self.processes} "
            f"processes, {self.failures} failures, {len(self.findings)} of them different "
            f"(seed {self.seed})"
        ]
        for finding in self.findings:
            f = finding.failure
            lines += ["", f"--- {f.kind}: {f.key} ({finding.found})", f.text.strip()]
            lines += ["", finding.source.rstrip()]
        return "\n".join(lines)


@dataclass
class Options:
    """How long a run is and what it does with what it finds."""

    seconds: float = 60.0
    seed: int = 0
    first: int = 0
    count: int | None = None
    minimise_seconds: float = 60.0
    most_findings: int = 20
    stop_at_first: bool = False
    keep: bool = False
    draw_tiers: bool = False
    corpus: Path = CORPUS
    verbose: bool = False


def prepare() -> None:
    """Import what children need, without starting the device."""
    import torch

    torch.set_num_threads(1)
    for module in ("jax", "tpu_core", "tpu_core.runtime", "tpu_core.lowering", "tpu_eager"):
        importlib.import_module(module)


def source_of(f: Fuzzer, cases: tuple[Case, ...], settings: Settings) -> str:
    """The cases as one Python program."""
    lines = ["import os", f"os.environ.update({settings.environment()!r})"]
    for case in cases:
        if case.tiers:
            tiers, patience = TIERS[case.tiers]
            lines += ["import torch", "from tpu_core.tiers import switch", "torch.tpu.init()"]
            lines += [f"switch({tiers!r}, {patience})"]
        lines.append(f.source(case))
    return "\n".join(lines)


def run(name: str, options: Options, settings: Settings) -> Report:
    """Run a fuzzer for some time."""
    f = fuzzer(name)
    prepare()
    report = Report(name, options.seed)
    start = time.monotonic()
    seen: list[Failure] = []
    worker: Worker | None = None
    i = options.first

    def say(text: str) -> None:
        if options.verbose:
            print(text, file=sys.stderr, flush=True)

    while (
        time.monotonic() - start < options.seconds
        and (options.count is None or i < options.first + options.count)
        and len(report.findings) < options.most_findings
    ):
        case = f.draw(random.Random(f"{options.seed}/{i}"))
        if options.draw_tiers:
            case = replace(case, tiers=tiers_of_case(f"{options.seed}/{i}"))
        if worker is None or not worker.alive or len(worker.cases) >= f.cases_a_process:
            if worker is not None:
                worker.close()
            worker = Worker(f, settings)
            report.processes += 1
        failure = worker.run(case, f.seconds_a_case)
        report.cases += 1
        if failure is not None:
            report.failures += 1
            elapsed = time.monotonic() - start
            if report.first_failure is None:
                report.first_failure = elapsed
            history = worker.cases
            worker.close()  # what failed may have left it in any state
            if not any(failure.is_like(other) for other in seen):
                seen.append(failure)
                say(f"case {i}, {elapsed:.1f} s: {failure.kind} {failure.key}: {failure.text}")
                cases, last, again = minimise(
                    f,
                    history,
                    failure,
                    settings,
                    seconds=0 if options.stop_at_first else options.minimise_seconds,
                    trial_seconds=f.seconds_a_case,
                    report=say,
                )
                found = f"seed {options.seed}, case {i}, after {elapsed:.1f} s"
                found += "" if again else "; not minimised"
                source = source_of(f, cases, settings)
                finding = Finding(last, cases, settings, found, source)
                report.findings.append(finding)
                say(source)
                if options.keep:
                    say(str(keep(finding, options.corpus)))
                if options.stop_at_first:
                    break
        i += 1
    if worker is not None:
        worker.close()
    report.seconds = time.monotonic() - start
    return report


def replay(name: str, folder: Path = CORPUS, planted: str | None = None) -> list[Finding]:
    """Run the corpus of a fuzzer; returns what fails still.

    Args:
        name: The fuzzer.
        folder: The corpus.
        planted: A fault to run with, whatever a finding was found with.
    """
    f = fuzzer(name)
    prepare()
    failing = []
    for path, finding in corpus(name, folder):
        settings = replace(finding.settings, planted=planted)
        failure = run_alone(f, finding.cases, settings, f.seconds_a_case)
        if failure is not None:
            failing.append(Finding(failure, finding.cases, settings, path.name))
    return failing
