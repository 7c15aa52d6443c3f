"""The executable cache on disk: round trips, damage, refusals and eviction."""

from __future__ import annotations

import errno
import json
import os
import pickle
import struct
import time
import warnings

import pytest

import tpu_core.cache.entry
import tpu_core.cache.store
from tpu_core.cache import Entry, ExecutableStore
from tpu_core.errors import CacheWarning

LIMIT = 1 << 20


@pytest.fixture
def store(tmp_path):
    return ExecutableStore(tmp_path / "cache", LIMIT)


def age(store, key, seconds):
    """Make an entry look as if it was last used some time ago."""
    then = time.time() - seconds
    os.utime(store.path(key), (then, then))


def test_an_entry_comes_back_also_in_another_store(store):
    assert store.get("key") is None
    assert store.put("key", b"\x00payload", {"ops": 57, "line": "train.py:31"})
    expected = Entry({"ops": 57, "line": "train.py:31"}, b"\x00payload")
    assert store.get("key") == expected
    assert ExecutableStore(store.directory, LIMIT).get("key") == expected
    assert (store.counts.hits, store.counts.misses, store.counts.puts) == (1, 1, 1)


def test_a_second_put_replaces_the_entry(store):
    store.put("key", b"one", {})
    store.put("key", b"two", {"n": 2})
    assert store.get("key") == Entry({"n": 2}, b"two")
    assert len(store.ls()) == 1


def test_keys_of_any_text_and_an_empty_payload(store):
    for key in ("a/../../b", "x" * 5000, "", "ключ", "nul\0"):
        assert store.put(key, b"", {})
        assert store.get(key) == Entry({}, b"")
        path = store.path(key)
        assert path.parent.parent == store.directory
        assert len(path.parent.name) == 2


def test_the_folder_and_its_files_are_the_users_alone(store):
    store.put("key", b"payload", {})
    assert store.directory.stat().st_mode & 0o777 == 0o700
    assert store.path("key").stat().st_mode & 0o777 == 0o600
    assert store.path("key").parent.stat().st_mode & 0o077 == 0


def test_nothing_is_created_before_the_first_put(store):
    assert store.get("key") is None
    assert store.ls() == []
    assert store.verify() == []
    assert not store.directory.exists()


DAMAGE = {
    "empty": lambda data: b"",
    "truncated in the prefix": lambda data: data[:10],
    "truncated in the header": lambda data: data[:30],
    "truncated in the payload": lambda data: data[:-1],
    "longer": lambda data: data + b"x",
    "a payload bit": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "the magic": lambda data: b"NOTCACHE" + data[8:],
    "the version": lambda data: data[:8] + struct.pack("<I", 99) + data[12:],
    "a huge header length": lambda data: data[:12] + struct.pack("<I", 0xFFFFFFFF) + data[16:],
    "not JSON": lambda data: data[:16] + b"}" + data[17:],
    "JSON of another kind": lambda data: data[:12] + struct.pack("<I", 2) + b"[]" + data[16:],
    "a pickle": lambda data: pickle.dumps({"key": "value"}),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_entry_is_dropped_with_one_warning_and_stored_again(store, damage):
    store.put("key", b"payload", {"ops": 1})
    path = store.path("key")
    path.write_bytes(damage(path.read_bytes()))
    assert [p.path for p in store.verify()] == [path]
    with pytest.warns(CacheWarning) as caught:
        assert store.get("key") is None
    assert len(caught) == 1
    assert str(path) in str(caught[0].message)
    assert "it was dropped and is compiled again" in str(caught[0].message)
    assert not path.exists()
    assert store.counts.dropped == 1
    store.put("key", b"payload", {"ops": 1})
    assert store.get("key") == Entry({"ops": 1}, b"payload")


def test_only_the_first_damaged_entry_warns(store):
    for key in ("a", "b"):
        store.put(key, b"payload", {})
        store.path(key).write_bytes(b"junk")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert store.get("a") is None
        assert store.get("b") is None
    assert len(caught) == 1
    assert store.counts.dropped == 2


def test_an_entry_under_another_keys_name_is_dropped(store):
    store.put("a", b"payload of a", {})
    target = store.path("b")
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(store.path("a").read_bytes())
    assert [str(p) for p in store.verify()] == [f"{target} belongs to another key"]
    with pytest.warns(CacheWarning, match="belongs to another key"):
        assert store.get("b") is None
    assert store.get("a") is not None


def test_a_link_or_a_folder_in_place_of_an_entry_is_not_read(store, tmp_path):
    store.put("key", b"payload", {})
    path = store.path("key")
    elsewhere = tmp_path / "elsewhere"
    os.replace(path, elsewhere)
    path.symlink_to(elsewhere)
    with pytest.warns(CacheWarning, match="cannot be opened"):
        assert store.get("key") is None
    assert elsewhere.exists()
    path.mkdir()
    assert store.get("key") is None


def test_an_entry_of_another_user_is_not_read(store, monkeypatch):
    store.put("key", b"payload", {})
    monkeypatch.setattr(tpu_core.cache.entry, "owned", lambda status: False)
    with pytest.warns(CacheWarning, match="is not a file of this user"):
        assert store.get("key") is None


def refused(store, pattern):
    """The store keeps nothing and says so once."""
    with pytest.warns(CacheWarning, match=pattern) as caught:
        assert store.put("key", b"payload", {}) is False
        assert store.get("key") is None
        assert store.put("key", b"payload", {}) is False
    assert len(caught) == 1
    message = str(caught[0].message)
    assert str(store.directory) in message
    assert "programs are kept in memory only" in message
    assert "TPU_CACHE_DIR" in message
    return message


def test_a_file_in_place_of_the_folder_is_refused(store):
    store.directory.write_text("in the way")
    refused(store, "is not a folder")
    assert store.directory.read_text() == "in the way"


def test_a_folder_that_cannot_be_created_is_refused(tmp_path):
    (tmp_path / "file").touch()
    refused(ExecutableStore(tmp_path / "file" / "cache", LIMIT), "Not a directory")


def test_a_folder_that_others_can_write_is_refused(store):
    store.directory.mkdir()
    store.directory.chmod(0o777)
    message = refused(store, "can be written by other users")
    assert f"chmod 700 {store.directory}" in message
    assert [str(p) for p in store.verify()] == [f"{store.directory} can be written by other users"]
    assert list(store.directory.iterdir()) == []


def test_a_folder_of_another_user_is_refused(store, monkeypatch):
    store.put("key", b"payload", {})
    monkeypatch.setattr(tpu_core.cache.store, "owned", lambda status: False)
    other = ExecutableStore(store.directory, LIMIT)
    refused(other, "belongs to another user")
    assert other.prune(all=True) == (0, 0)


class FullFile:
    """A file on a disk without space: the first byte goes in, the rest does not."""

    def __init__(self, file):
        self.file = file

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.file.close()

    def write(self, data):
        self.file.write(data[:1])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def failing(code):
    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    return fail


REFUSALS = {
    "a full disk": ("os.fdopen", lambda *args: FullFile(open(*args)), "No space left on device"),
    "no more files": ("tempfile.mkstemp", failing(errno.EDQUOT), "quota exceeded"),
    "mounted read-only": ("tempfile.mkstemp", failing(errno.EROFS), "Read-only file system"),
    "no permission": ("os.replace", failing(errno.EACCES), "Permission denied"),
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS.keys())
def test_a_folder_that_cannot_be_written_still_serves_what_it_has(store, monkeypatch, refusal):
    name, function, words = refusal
    store.put("old", b"payload", {})
    with monkeypatch.context() as patched:
        patched.setattr(f"tpu_core.cache.store.{name}", function)
        with pytest.warns(CacheWarning, match=words) as caught:
            assert store.put("new", b"payload", {}) is False
            assert store.put("newer", b"payload", {}) is False
    assert len(caught) == 1
    assert str(store.directory) in str(caught[0].message)
    assert store.get("old") is not None
    assert store.get("new") is None
    assert [p.name for p in store.directory.rglob(".tmp-*")] == []


def test_a_folder_removed_while_running_is_made_again(store):
    import shutil

    store.put("key", b"payload", {})
    shutil.rmtree(store.directory)
    assert store.get("key") is None
    assert store.put("key", b"payload", {})
    assert store.directory.stat().st_mode & 0o777 == 0o700


def test_a_folder_removed_in_the_middle_of_a_write_is_made_again(store, monkeypatch):
    import shutil

    replace, removed = os.replace, []

    def remove_first(*args):
        if not removed:
            removed.append(shutil.rmtree(store.directory))
        replace(*args)

    monkeypatch.setattr(tpu_core.cache.store.os, "replace", remove_first)
    assert store.put("key", b"payload", {})
    assert removed
    assert store.get("key") == Entry({}, b"payload")


def test_a_failed_write_leaves_no_temporary_file(store, monkeypatch):
    store.put("key", b"payload", {})

    def fail(*args):
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(tpu_core.cache.store.os, "replace", fail)
    with pytest.warns(CacheWarning, match="broken disk"):
        store.put("other", b"payload", {})
    assert [p.name for p in store.directory.rglob(".tmp-*")] == []


def test_a_manifest_that_is_not_json_is_an_error(store):
    with pytest.raises(TypeError, match="not JSON serializable"):
        store.put("key", b"payload", {"bad": object()})


def test_the_least_recently_used_entries_are_evicted(tmp_path):
    store = ExecutableStore(tmp_path / "cache", 10_000)
    for i in range(9):
        store.put(f"key {i}", bytes(900), {})
        age(store, f"key {i}", 1000 - i)
    assert store.get("key 0") is not None  # a hit makes it the most recently used
    store.put("key 9", bytes(900), {})
    keys = {info.key for info in store.ls()}
    assert store.size() <= 9_000
    assert {"key 0", "key 9"} <= keys
    assert "key 1" not in keys
    assert store.counts.evicted == 10 - len(keys)


def test_the_limit_holds_against_what_other_processes_wrote(tmp_path):
    mine = ExecutableStore(tmp_path / "cache", 50_000)
    other = ExecutableStore(tmp_path / "cache", 1 << 30)
    mine.put("first", bytes(100), {})
    for i in range(100):
        other.put(f"other {i}", bytes(900), {})
    for i in range(10):
        mine.put(f"mine {i}", bytes(900), {})
    assert mine.size() <= 50_000


def test_an_entry_larger_than_the_limit_is_not_stored_with_one_warning(tmp_path):
    store = ExecutableStore(tmp_path / "cache", 1000)
    assert store.put("small", bytes(10), {})
    with pytest.warns(CacheWarning, match=r"of 2\.\d\d KiB is larger .* limit of 1000 B") as caught:
        assert store.put("large", bytes(2000), {}) is False
        assert store.put("larger", bytes(3000), {}) is False
    assert len(caught) == 1
    assert "TPU_CACHE_SIZE" in str(caught[0].message)
    assert store.get("small") is not None
    assert store.get("large") is None


def test_a_limit_of_zero_stores_nothing_in_silence(tmp_path):
    store = ExecutableStore(tmp_path / "cache", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.put("key", b"payload", {}) is False
    assert not store.directory.exists()


def test_ls_is_sorted_by_last_use_and_skips_damage(store):
    for i, key in enumerate(("new", "old", "bad")):
        store.put(key, bytes(i), {"n": i})
    age(store, "old", 100)
    store.path("bad").write_bytes(b"junk")
    infos = store.ls()
    assert [(info.key, info.manifest) for info in infos] == [("new", {"n": 0}), ("old", {"n": 1})]
    assert infos[0].size == store.path("new").stat().st_size
    assert infos[0].last_used > infos[1].last_used


def test_prune_by_age_size_and_all(store):
    for i in range(5):
        store.put(f"key {i}", bytes(1000), {})
        age(store, f"key {i}", 1000 * (5 - i))
    one = store.ls()[0].size
    assert store.prune(age=4500) == (1, one)
    assert store.prune(size=2 * one) == (2, 2 * one)
    assert {info.key for info in store.ls()} == {"key 3", "key 4"}
    assert store.prune(all=True) == (2, 2 * one)
    assert store.ls() == []
    assert store.prune() == (0, 0)


def test_prune_removes_what_dead_writers_left_behind(store):
    store.put("key", b"payload", {})
    old, new = (store.path("key").with_name(f".tmp-{n}") for n in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    store.prune(age=1e9)
    assert not old.exists()
    assert new.exists()
    assert store.get("key") is not None


def test_foreign_files_in_the_folder_are_left_alone(store):
    store.put("key", b"payload", {})
    mine = store.directory / "README"
    mine.write_text("mine")
    other = store.path("key").with_name("notes.txt")
    other.write_text("mine too")
    store.prune(all=True)
    assert mine.exists()
    assert other.exists()
    assert store.verify() == []


def test_the_header_is_plain_json(store):
    store.put("key", b"payload", {"ops": 57})
    data = store.path("key").read_bytes()
    (length,) = struct.unpack("<I", data[12:16])
    header = json.loads(data[16 : 16 + length])
    assert header["key"] == "key"
    assert header["manifest"] == {"ops": 57}
    assert data[16 + length :] == b"payload"
