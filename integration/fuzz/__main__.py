"""Command line: ``python -m fuzz FUZZER --seconds 60 --seed 7``."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from .cases import CORPUS, TIERS, Settings
from .frame import FUZZERS, Options, Report, replay, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("fuzzer", nargs="*", help=", ".join(FUZZERS) + "; default all")
    parser.add_argument("--seconds", type=float, default=60, help="time of each fuzzer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--count", type=int, help="number of cases")
    parser.add_argument("--mode", default="fused", choices=("fused", "strict", "debug"))
    parser.add_argument("--compile", default="blocking", choices=("blocking", "background"))
    parser.add_argument("--cache", default="off", choices=("off", "on"))
    parser.add_argument("--tiers", default="drawn", choices=("drawn", *TIERS))
    parser.add_argument("--plant", help="a fault of fuzz.planted")
    parser.add_argument("--minimise-seconds", type=float, default=60)
    parser.add_argument("--most-findings", type=int, default=20)
    parser.add_argument("--stop-at-first", action="store_true", help="do not minimise")
    parser.add_argument("--keep", action="store_true", help="write findings into the corpus")
    parser.add_argument("--corpus", type=Path, default=CORPUS)
    parser.add_argument("--replay", action="store_true", help="run the corpus, draw nothing")
    parser.add_argument("--json", type=Path, help="write the reports there")
    parser.add_argument("-v", "--verbose", action="store_true")
    a = parser.parse_args()
    if unknown := set(a.fuzzer) - set(FUZZERS):
        parser.error(f"no fuzzer {sorted(unknown)}; there are {', '.join(FUZZERS)}")
    a.draw_tiers = a.tiers == "drawn"
    tiers = "compiled" if a.draw_tiers else a.tiers
    settings = Settings(a.mode, a.compile, a.cache, a.plant, tiers)
    reports = []
    for name in a.fuzzer or FUZZERS:
        if a.replay:
            report = Report(name, a.seed, findings=replay(name, a.corpus, a.plant))
        else:
            names = Options.__dataclass_fields__
            options = Options(**{k: v for k, v in vars(a).items() if k in names})
            report = run(name, options, settings)
        print(report.text(), flush=True)
        reports.append(report)
    if a.json:
        a.json.write_text(json.dumps([asdict(report) for report in reports], indent=1))
    return int(any(report.findings for report in reports))


if __name__ == "__main__":
    sys.exit(main())
