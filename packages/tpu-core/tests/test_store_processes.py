"""The executable cache on disk, written by several processes at once or by one that is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import tpu_core.cache.store
from tpu_core.cache import ExecutableStore


def run_python(code, *arguments):
    source = str(Path(tpu_core.cache.store.__file__).parents[2])
    prelude = f"import sys; sys.path.insert(0, {source!r})\n"
    return subprocess.Popen(
        [sys.executable, "-c", prelude + code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )


WRITER = """
from tpu_core.cache import ExecutableStore
store = ExecutableStore(sys.argv[1], 1 << 30)
payload = sys.argv[2].encode() * 200_000
sys.stdin.readline()  # both start at once
for i in range(30):
    assert store.put("shared", payload, {"who": sys.argv[2]})
    entry = store.get("shared")
    assert entry is not None
    assert entry.payload == entry.manifest["who"].encode() * 200_000
print(store.counts.dropped)
"""


def test_two_processes_that_write_one_entry_at_once_never_read_half_of_it(tmp_path):
    writers = [run_python(WRITER, tmp_path / "cache", name) for name in "ab"]
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        out, err = writer.communicate(timeout=100)
        assert writer.returncode == 0, err
        assert out.strip() == "0"
        assert "CacheWarning" not in err
    store = ExecutableStore(tmp_path / "cache", 1 << 30)
    entry = store.get("shared")
    assert entry.payload == entry.manifest["who"].encode() * 200_000
    assert store.verify() == []
    assert [p.name for p in store.directory.rglob(".tmp-*")] == []


EVICTING_WRITER = """
import random
from tpu_core.cache import ExecutableStore
name, limit = sys.argv[2], int(sys.argv[3])
store, draw = ExecutableStore(sys.argv[1], limit), random.Random(name)
sys.stdin.readline()  # all start at once
for i in range(100):
    assert store.put(f"{name} {i}", name.encode() * draw.randrange(1000, 8000), {})
    for who in "abc":  # there and whole, or evicted
        entry = store.get(f"{who} {draw.randrange(i + 1)}")
        assert entry is None or set(entry.payload.decode()) == {who}
print(store.counts.dropped, store.counts.evicted > 0)
"""


def test_the_limit_holds_against_processes_that_write_at_once(tmp_path):
    limit = 200_000
    writers = [run_python(EVICTING_WRITER, tmp_path / "cache", name, limit) for name in "abc"]
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        out, err = writer.communicate(timeout=100)
        assert (writer.returncode, out, err) == (0, "0 True\n", "")
    store = ExecutableStore(tmp_path / "cache", limit)
    # Each looks at the folder again after a tenth of the limit of its own.
    assert 0 < store.size() <= limit * 1.3
    assert store.verify() == []
    store.put("last", bytes(limit // 20), {})
    assert store.size() <= limit


def test_a_writer_killed_half_way_leaves_no_entry(tmp_path):
    code = (
        "import os\nfrom tpu_core.cache import store as module\n"
        "def kill(*args): os._exit(9)\n"
        "module.os.replace = kill\n"
        "module.ExecutableStore(sys.argv[1], 1 << 30).put('key', b'payload', {})\n"
    )
    process = run_python(code, tmp_path / "cache")
    process.communicate(timeout=100)
    assert process.returncode == 9
    store = ExecutableStore(tmp_path / "cache", 1 << 30)
    assert store.get("key") is None
    assert store.counts.dropped == 0
    assert store.put("key", b"payload", {})
