"""Child process of a run: reads names of entries from stdin, writes a JSON line for each.

A line before an entry says that it has begun, so that the parent knows what a crash ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from typing import Any

import torch

from conformance import modules, ops, optimizers
from conformance.compare import Different
from conformance.entries import Entry, entries
from tpu_core.errors import TpuError


class TooLong(BaseException):
    """An entry took longer than it may."""


def _alarm(*_: Any) -> None:
    raise TooLong


def run(entry: Entry, samples: int, seconds: int = 0) -> dict[str, Any]:
    """Run one entry.

    Returns:
        ``entry``, ``outcome`` (passed, wrong, raised, too long), ``detail``, ``samples``,
        ``fallbacks`` (overloads that ran on the CPU) and ``seconds``.
    """
    before = torch.tpu.metrics()
    started = time.perf_counter()
    detail, count = "", 0
    module = {"m": modules, "o": optimizers}.get(
        entry.part[0] if entry.part.startswith(("module", "optimizer")) else "", ops
    )
    signal.alarm(seconds)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            count = module.check(entry, samples)
            torch.tpu.synchronize()  # what nothing reads must have worked too
        outcome = "passed"
    except Different as error:
        outcome, detail = "wrong", str(error)
    except TooLong:
        outcome, detail = "too long", f"over {seconds} s"
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[-2:]
        where = " < ".join(f"{os.path.basename(f.filename)}:{f.lineno}" for f in reversed(frames))
        notes = "; ".join(getattr(error, "__notes__", []))
        outcome = "raised"
        detail = f"{type(error).__name__}: {str(error)[:400]} [{notes}] ({where})"
    finally:
        signal.alarm(0)
        with contextlib.suppress(TpuError):  # ops of this entry must not fail in the next one
            torch.tpu.synchronize()
    after = torch.tpu.metrics()
    fallbacks = sorted(
        key.removeprefix("fallback.")
        for key, value in after.items()
        if key.startswith("fallback.") and value != before.get(key, 0)
    )
    return {
        "entry": str(entry),
        "outcome": outcome,
        "detail": detail,
        "samples": count,
        "fallbacks": fallbacks,
        "seconds": round(time.perf_counter() - started, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=120)
    options = parser.parse_args()
    by_name = {str(e): e for e in entries()}
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what ops print is not a result
    signal.signal(signal.SIGALRM, _alarm)
    for name in sys.stdin.read().split():
        print(json.dumps({"begins": name}), file=results)
        if name == os.environ.get("CONFORMANCE_CRASH"):  # for the test of this
            os.abort()
        print(json.dumps(run(by_name[name], options.samples, options.seconds)), file=results)
    results.flush()
    os._exit(0)  # what is left to compile in the background is not wanted


if __name__ == "__main__":
    main()
