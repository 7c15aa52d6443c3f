"""Build the C++ extensions for a sanitizer and run the tests of concurrency with them.

``python tools/sanitize.py [address|undefined|thread] [pytest's options]``. Each source is a
translation unit of its own here, so that both ways of building are tried, and locks check
themselves. Python, PyTorch and jaxlib are not instrumented: what the thread sanitizer says of them
is suppressed (``tools/thread_sanitizer.txt``).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Packages with an extension.
EXTENSIONS = tuple(ROOT / "packages" / name for name in ("tpu-core", "tpu-distributed"))
TESTS = (
    *(
        f"packages/tpu-core/tests/test_{name}.py"
        for name in (
            *("robustness_threads", "robustness_processes", "signals", "promises", "deep_chains"),
            *("unboxed_kernels", "list_calls", "storages", "storage_writes", "host_kernels"),
            *("tiering", "memory_history", "failed_segments", "profiler", "third_party"),
        )
    ),
    "packages/tpu-eager/tests/test_background.py",
    "packages/tpu-eager/tests/test_liveness.py",
    "packages/tpu-distributed/tests/test_all_reduce_of_hosts.py",
)
# A fork while another thread allocates leaves gcc 12's own allocator locked in the child.
FORKS = (
    "packages/tpu-core/tests/test_robustness_processes.py"
    "::test_data_loader_workers_beside_threads_that_train"
)
LIBRARIES = {"address": "libasan.so", "undefined": "libubsan.so", "thread": "libtsan.so"}
# Python and jaxlib keep much until the process ends. XLA's allocations may fail and be retried.
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:use_sigaltstack=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": f"suppressions={ROOT / 'tools' / 'thread_sanitizer.txt'}:history_size=4:"
    "report_mutex_bugs=0:report_signal_unsafe=0",
}


def library(name: str) -> str:
    """Path of a library of the compiler's."""
    command = (os.environ.get("CXX", "c++"), f"-print-file-name={name}")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    kind, *options = sys.argv[1:] or ["address"]
    if kind not in LIBRARIES:
        sys.exit(f"no sanitizer {kind!r}: one of {', '.join(LIBRARIES)}")
    env = {**os.environ, "TPU_CORE_SANITIZE": kind, "TPU_CORE_SEPARATE": "1"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    for package in EXTENSIONS:
        subprocess.run(command, cwd=package, env=env, check=True)
    # Loaded before Python: libstdc++ too, whose exceptions are intercepted.
    preload = f"{library(LIBRARIES[kind])} {library('libstdc++.so.6')}"
    env |= {"LD_PRELOAD": preload, "PYTHONMALLOC": "malloc", "OMP_NUM_THREADS": "1", **OPTIONS}
    # The thread sanitizer wants the addresses that the system gave before it made them random.
    plain = ["setarch", "--addr-no-randomize"] if kind == "thread" else []
    chosen = [] if any(option.endswith(".py") or "::" in option for option in options) else TESTS
    pytest = [sys.executable, "-m", "pytest", "-p", "no:xdist", "--timeout=600", "-m", "not slow"]
    pytest += ["--deselect", FORKS]
    return subprocess.run([*plain, *pytest, *chosen, *options], cwd=ROOT, env=env).returncode


if __name__ == "__main__":
    sys.exit(main())
