"""The shared tier of the cache: round trips, damage, stores that do not answer, and the exit."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
import uuid
import warnings

import fsspec
import pytest

from interpreter import clean, run
from tpu_core.cache import Entry, ExecutableStore, SharedTier, TieredStore, open_store
from tpu_core.cache.store import relative_path
from tpu_core.config import Config
from tpu_core.errors import CacheWarning

LIMIT = 1 << 20


@pytest.fixture(params=["file", "memory"])
def url(request, tmp_path):
    if request.param == "file":
        return f"file://{tmp_path}/shared/programs"
    return f"memory://{uuid.uuid4()}/programs"


def tiers(folder, url, timeout=30.0):
    return TieredStore(ExecutableStore(folder, LIMIT), SharedTier(url, timeout))


def shared_file(url, key):
    filesystem, root = fsspec.core.url_to_fs(url)
    return filesystem, f"{root}/{relative_path(key)}"


def test_another_machine_finds_what_one_has_put_and_keeps_it_on_disk(url, tmp_path):
    one, other = tiers(tmp_path / "one", url), tiers(tmp_path / "other", url)
    assert other.get("key") is None
    assert one.put("key", b"\x00payload", {"ops": 57})
    assert one.shared.flush()
    expected = Entry({"ops": 57}, b"\x00payload")
    assert other.get("key") == expected
    assert other.disk.get("key") == expected
    assert (other.shared.counts.misses, other.shared.counts.hits) == (1, 1)
    # The disk answers first.
    filesystem, path = shared_file(url, "key")
    filesystem.rm(path)
    assert other.get("key") == expected
    assert other.shared.counts.misses == 1


def test_a_folder_holds_whole_entries_and_nothing_else(tmp_path):
    store = tiers(tmp_path / "one", f"file://{tmp_path}/shared")
    for i in range(3):
        store.put(f"key {i}", b"payload", {})
    assert store.shared.flush()
    files = [f for f in (tmp_path / "shared").rglob("*") if f.is_file()]
    assert sorted(files) == sorted(
        tmp_path / "shared" / relative_path(f"key {i}") for i in range(3)
    )


DAMAGE = {
    "truncated": lambda data: data[:-1],
    "a payload bit": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "empty": lambda data: b"",
    "a pickle": lambda data: __import__("pickle").dumps(exit),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_entry_is_a_miss_with_one_warning_and_is_replaced(damage, url, tmp_path):
    one, other = tiers(tmp_path / "one", url), tiers(tmp_path / "other", url)
    one.put("key", b"payload", {})
    assert one.shared.flush()
    filesystem, path = shared_file(url, "key")
    filesystem.pipe_file(path, damage(filesystem.cat_file(path)))
    with pytest.warns(CacheWarning, match="it is compiled again") as caught:
        assert other.get("key") is None
        assert other.get("key") is None
    assert len(caught) == 1
    assert other.shared.counts.damaged == 2
    assert other.disk.get("key") is None
    other.put("key", b"payload", {})
    assert other.shared.flush()
    assert tiers(tmp_path / "third", url).get("key") == Entry({}, b"payload")


def test_an_entry_under_another_keys_name_is_not_taken(url, tmp_path):
    one = tiers(tmp_path / "one", url)
    one.put("a", b"payload of a", {})
    assert one.shared.flush()
    filesystem, path = shared_file(url, "a")
    _, other_path = shared_file(url, "b")
    filesystem.makedirs(other_path.rsplit("/", 1)[0], exist_ok=True)
    filesystem.pipe_file(other_path, filesystem.cat_file(path))
    with pytest.warns(CacheWarning, match="belongs to another key"):
        assert one.get("b") is None


UNREACHABLE = {
    "no such protocol": "nosuch://bucket/programs",
    "refused connection": "ftp://127.0.0.1:9/programs",
    "a file in the way": "file:///dev/null/programs",
}


@pytest.mark.parametrize("address", UNREACHABLE.values(), ids=UNREACHABLE.keys())
def test_a_store_that_cannot_be_used_costs_one_warning(address, tmp_path):
    store = tiers(tmp_path / "disk", address)
    with pytest.warns(CacheWarning) as caught:
        for i in range(3):
            assert store.get(f"key {i}") is None
            assert store.put(f"key {i}", b"payload", {})
        assert store.shared.flush()
    assert len(caught) == 1
    message = str(caught[0].message)
    assert address in message
    assert "cannot be" in message and "unset TPU_CACHE_URL" in message
    assert store.get("key 0") == Entry({}, b"payload")
    assert store.shared.counts.given_up == 3


def test_credentials_are_not_printed(tmp_path):
    store = tiers(tmp_path / "disk", "nosuch://user:secret@bucket/programs")
    with pytest.warns(CacheWarning) as caught:
        store.get("key")
    assert "secret" not in str(caught[0].message)


def test_a_store_that_does_not_answer_is_left_alone_for_a_while(tmp_path, monkeypatch):
    tier = SharedTier(f"memory://{uuid.uuid4()}", timeout=0.05)
    release, asked = threading.Event(), []

    def hang(key):
        asked.append(key)
        release.wait(60)
        raise FileNotFoundError

    monkeypatch.setattr(tier, "_read", hang)
    with pytest.warns(CacheWarning, match="no answer in 0.05 s") as caught:
        assert [tier.get(f"key {i}") for i in range(5)] == [None] * 5
    assert len(caught) == 1
    assert asked == ["key 0"]
    release.set()
    # Tried again after a pause, which doubles.
    now = time.monotonic()
    monkeypatch.setattr("tpu_core.cache.shared.time.monotonic", lambda: now + 61)
    assert tier.get("key 5") is None
    assert asked == ["key 0", "key 5"]
    assert tier.counts.misses == 1


def test_put_does_not_wait_for_the_upload(tmp_path, monkeypatch):
    store = tiers(tmp_path / "disk", f"memory://{uuid.uuid4()}")
    release = threading.Event()
    write = store.shared._write

    def slow(key, data):
        release.wait(60)
        write(key, data)

    monkeypatch.setattr(store.shared, "_write", slow)
    store.put("key", b"payload", {})
    assert not store.shared.flush(timeout=0)
    assert store.shared.get("key") is None
    release.set()
    assert store.shared.flush()
    assert store.shared.get("key") == Entry({}, b"payload")


def test_uploads_that_would_fill_memory_are_given_up(monkeypatch):
    tier = SharedTier(f"memory://{uuid.uuid4()}", timeout=30)
    monkeypatch.setattr("tpu_core.cache.shared._MOST_PENDING_BYTES", 10)
    tier.put("large", bytes(11), {})
    tier.put("small", bytes(10), {})
    assert tier.flush()
    assert (tier.counts.given_up, tier.counts.uploads) == (1, 1)


def test_a_store_that_can_only_be_read_serves_and_warns_once(url, tmp_path, monkeypatch):
    one, other = tiers(tmp_path / "one", url), tiers(tmp_path / "other", url)
    one.put("key", b"payload", {})
    assert one.shared.flush()

    def denied(key, data):
        raise PermissionError("read-only")

    monkeypatch.setattr(other.shared, "_write", denied)
    with pytest.warns(CacheWarning, match="cannot be written") as caught:
        other.put("new", b"payload", {})
        other.shared.flush()
        other.put("newer", b"payload", {})
        other.shared.flush()
    assert len(caught) == 1
    assert other.get("key") == Entry({}, b"payload")


def test_a_folder_that_cannot_be_used_leaves_the_shared_tier(url, tmp_path):
    (tmp_path / "file").touch()
    store = tiers(tmp_path / "file" / "cache", url)
    with pytest.warns(CacheWarning, match="Not a directory"):
        assert store.put("key", b"payload", {}) is False
    assert store.shared.flush()
    assert store.get("key") == Entry({}, b"payload")


def test_the_shared_tier_is_off_unless_it_is_named(tmp_path):
    assert isinstance(open_store(Config(cache_dir=tmp_path)), ExecutableStore)
    named = Config(cache_dir=tmp_path, cache_url="memory://programs", cache_timeout=3)
    store = open_store(named)
    assert isinstance(store, TieredStore)
    assert (store.shared.url, store.shared.timeout) == ("memory://programs", 3.0)
    assert open_store(Config(cache="off", cache_url="memory://programs")) is None


PROGRAM = """
import torch
x = torch.arange(6.0, device="tpu").reshape(2, 3)
total = (x * 2 + 1).sum().item()
m = torch.tpu.metrics()
print(total, m["compiles"] > 0, m["cache_hits_disk"] > 0)
"""


def test_a_second_machine_compiles_nothing(tmp_path):
    shared = {"TPU_CACHE_URL": f"file://{tmp_path}/shared"}
    first = clean(PROGRAM, TPU_CACHE_DIR=str(tmp_path / "one"), **shared)
    assert first == "36.0 True False\n"
    second = clean(PROGRAM, TPU_CACHE_DIR=str(tmp_path / "two"), **shared)
    assert second == "36.0 False True\n"
    # What it took from the shared cache is now on its disk.
    assert clean(PROGRAM, TPU_CACHE_DIR=str(tmp_path / "two")) == "36.0 False True\n"


def test_a_program_with_a_store_that_never_answers_runs_and_ends(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections, says nothing
        url = f"ftp://127.0.0.1:{server.getsockname()[1]}/programs"
        result = run(
            PROGRAM, TPU_CACHE_DIR=str(tmp_path), TPU_CACHE_URL=url, TPU_CACHE_TIMEOUT="0.5"
        )
    assert (result.returncode, result.stdout) == (0, "36.0 True False\n")
    assert result.stderr.count("CacheWarning") == 1
    assert f"{url} cannot be read (TimeoutError: no answer in 0.5 s)" in result.stderr


SLOW = """
import os, sys, time, warnings
from tpu_core.cache import SharedTier
tier = SharedTier("memory://slow", timeout=float(sys.argv[1]))
write = tier._write
def slow(key, data):
    time.sleep(float(sys.argv[2]))
    write(key, data)
    os.write(1, b"stored ")
tier._write = slow
tier.put("key", b"payload", {})
print("end", flush=True)
"""


@pytest.mark.parametrize("timeout, delay, stored", [("60", "0.3", True), ("0.2", "600", False)])
def test_the_end_of_a_process_waits_for_uploads_and_not_for_ever(timeout, delay, stored):
    result = subprocess.run(
        [sys.executable, "-c", SLOW, timeout, delay], capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == ("end\nstored " if stored else "end\n")
    assert result.stderr.count("CacheWarning") == (0 if stored else 1)
    assert stored or "1 programs were not stored" in result.stderr


ASYNCHRONOUS = """
import time
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.memory import MemoryFileSystem
from tpu_core.cache import SharedTier
class Slow(MemoryFileSystem):
    def pipe_file(self, path, value, **options):
        time.sleep(0.2)
        super().pipe_file(path, value, **options)
        print("stored", path, flush=True)
tier = SharedTier("memory://", timeout=60)
tier._filesystem = AsyncFileSystemWrapper(Slow()), "/programs"
if sys.argv[1] == "read":
    assert tier.get("a") is None
for key in "ab":
    tier.put(key, b"payload", {})
print("end", flush=True)
"""


@pytest.mark.parametrize("before", ["nothing", "read"])
def test_an_asynchronous_filesystem_still_works_at_the_end_of_a_process(before):
    # It runs calls in threads of concurrent.futures, which refuses new ones in atexit's functions.
    if before == "nothing" and sys.version_info[:2] == (3, 12):
        pytest.skip("Python 3.12 starts no thread in a process that ends; a look-up has made one")
    printed = clean(f"import sys; sys.argv[1:] = [{before!r}]\n{ASYNCHRONOUS}").splitlines()
    # An attempt that found no thread may be made by the one there is, and again at the next.
    assert printed[0] == "end"
    assert len(set(printed[1:])) == 2


FORKED = """
import os, sys, threading
from tpu_core.cache import SharedTier
tier = SharedTier("memory://forked", timeout=5)
release = threading.Event()
tier._write = lambda key, data: release.wait()
tier.put("key", b"payload", {})
if os.fork() == 0:
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.wait()[1]))
release.set()
"""


def test_a_forked_child_does_not_wait_for_its_parents_uploads():
    # Python 3.12 warns of a fork where there are threads.
    quiet = "-Wignore:This process:DeprecationWarning"
    assert clean(FORKED, quiet) == "3\n"  # a child that waited would have warned


def test_threads_may_share_a_tier(url, tmp_path):
    store = tiers(tmp_path / "disk", url)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        threads = [
            threading.Thread(
                target=lambda i=i: [
                    (store.put(f"{i} {k}", bytes([i]), {}), store.get(f"{i} {k}"))
                    for k in range(10)
                ]
            )
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.shared.flush()
    fresh = tiers(tmp_path / "fresh", url)
    assert all(fresh.get(f"{i} {k}") == Entry({}, bytes([i])) for i in range(4) for k in range(10))
