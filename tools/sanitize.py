"""Build the C++ extensions for a sanitizer and run the tests of concurrency with them.

``python tools/sanitize.py [address|undefined|thread] [pytest's options]``. The exit status is 0 if
the tests pass and the sanitizer reports nothing, in their child processes neither; reports are
printed, each once. Each source is a translation unit of its own here, so that both ways of building
are tried, and locks check themselves. Before the tests, a library with a fault is loaded into
Python as the extension is: the sanitizer must report it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
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
# In a forked child gcc 12's thread sanitizer keeps the threads of the parent: a thread that the
# child starts may get the id of one, which ends the child.
OF_FORKS = "packages/tpu-core/tests/test_robustness_processes.py"
LIBRARIES = {"address": "libasan.so", "undefined": "libubsan.so", "thread": "libtsan.so"}
OPTIONS = {
    # Python and jaxlib keep much until the process ends. XLA's allocations may fail and be retried.
    "address": "detect_leaks=0:allocator_may_return_null=1:use_sigaltstack=0",
    "undefined": "print_stacktrace=1",
    # Python, PyTorch and jaxlib are not instrumented. Their locks, the GIL among them, order what
    # threads do, so they are followed; memory that the C library reads and writes for them is not.
    # (Suppressions by `called_from_lib` leave their locks out as well, and nearly all that one
    # thread hands to another is a race then.) Orders of locks are checked by the extension itself.
    "thread": "ignore_noninstrumented_modules=1:history_size=7:detect_deadlocks=0:"
    "report_mutex_bugs=0:report_signal_unsafe=0:die_after_fork=0",
}
VARIABLES = {"address": "ASAN_OPTIONS", "undefined": "UBSAN_OPTIONS", "thread": "TSAN_OPTIONS"}

# Two threads are in `fault` at once.
FAULTY = """
#include <atomic>
std::atomic<int> here{0};
volatile int number = 0x7fffffff;
volatile char* memory = new char[8];
extern "C" void fault(int kind) {
  here.fetch_add(1, std::memory_order_relaxed);
  while (here.load(std::memory_order_relaxed) < 2) {}
  if (kind == 0) memory[8 + number % 2] = 1;
  else for (int i = 0; i < 1000; ++i) number = number + 1;
}
"""
CALLER = """
import ctypes, sys, threading
fault, kind = ctypes.CDLL(sys.argv[1]).fault, int(sys.argv[2])
threads = [threading.Thread(target=fault, args=(kind,)) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def compiler() -> str:
    return os.environ.get("CXX", "c++")


def library(name: str) -> str:
    """Path of a library of the compiler's."""
    command = (compiler(), f"-print-file-name={name}")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def finds_fault(kind: str, prefix: list[str], env: dict[str, str], folder: Path) -> bool:
    """Return whether the sanitizer, loaded before Python, reports a fault in a library."""
    source, built = folder / "faulty.cpp", folder / "faulty.so"
    source.write_text(FAULTY)
    flags = (f"-fsanitize={kind}", "-g", "-O1", "-shared", "-fPIC", "-std=c++20")
    subprocess.run([compiler(), *flags, str(source), "-o", str(built)], check=True)
    number = str(list(LIBRARIES).index(kind))
    command = [*prefix, sys.executable, "-c", CALLER, str(built), number]
    subprocess.run(command, env=env, capture_output=True, check=False)
    found = reports(folder)
    for path in folder.glob("report.*"):
        path.unlink()
    return any("faulty.cpp" in text for text in found)


def reports(folder: Path) -> Counter[str]:
    """Reports of all processes, one for each place in the sources, and how often it came."""
    found: dict[str, str] = {}
    counts: Counter[str] = Counter()
    border = re.compile(r"^(?:=+\n)+|(?=^\S+:\d+:\d+: runtime error)", re.M)
    for path in sorted(folder.glob("report.*")):
        for part in border.split(path.read_text()):
            summary = re.search(r"^(?:SUMMARY: |\S+: runtime error).*$", part, re.M)
            if summary:
                counts[found.setdefault(summary.group(), part)] += 1
    return counts


def main() -> int:
    kind, *options = sys.argv[1:] or ["address"]
    if kind not in LIBRARIES:
        sys.exit(f"no sanitizer {kind!r}: one of {', '.join(LIBRARIES)}")
    env = {"TPU_CORE_SEPARATE": "1", **os.environ, "TPU_CORE_SANITIZE": kind}
    # Loaded before Python: libstdc++ too, whose exceptions are intercepted.
    preload = f"{library(LIBRARIES[kind])} {library('libstdc++.so.6')}"
    with tempfile.TemporaryDirectory(prefix="tpu-sanitize-") as name:
        folder = Path(name)
        sanitized = {
            **env,
            **{"LD_PRELOAD": preload, "PYTHONMALLOC": "malloc", "OMP_NUM_THREADS": "1"},
            VARIABLES[kind]: f"{OPTIONS[kind]}:log_path={folder / 'report'}",
        }
        # The thread sanitizer wants the addresses that the system gave before it made them random.
        prefix = ["setarch", "--addr-no-randomize"] if kind == "thread" else []
        if not finds_fault(kind, prefix, sanitized, folder):
            sys.exit(f"{kind} sanitizer: it does not report a fault that is there")
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        for package in EXTENSIONS:
            subprocess.run(command, cwd=package, env=env, check=True)
        names_tests = any(option.endswith(".py") or "::" in option for option in options)
        default = [test for test in TESTS if kind != "thread" or test != OF_FORKS]
        chosen = [] if names_tests else default
        pytest = [sys.executable, "-m", "pytest", "-p", "no:xdist", "--timeout=1200"]
        pytest += ["-m", "not slow", "--deselect", FORKS, *chosen, *options]
        code = subprocess.run([*prefix, *pytest], cwd=ROOT, env=sanitized).returncode
        found = reports(folder)
    for text, count in found.items():
        print(f"\n--- {count} times:\n{text}")
    tests = "the tests pass" if code == 0 else f"pytest ends with status {code}"
    print(f"{kind} sanitizer: {tests}; {len(found)} places with reports")
    return code or bool(found)


if __name__ == "__main__":
    sys.exit(main())
