"""The disk cache under a running device: damage and refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from interpreter import clean, run

PROGRAM = """
import torch
x = torch.arange(6.0, device="tpu").reshape(2, 3)
total = (x * 2 + 1).sum().item()
m = torch.tpu.metrics()
print(total, m["compiles"] > 0, m["cache_hits_disk"] > 0)
"""
COMPILED, LOADED = "36.0 True False\n", "36.0 False True\n"


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("??/*.tpux"))


def test_a_damaged_entry_is_dropped_and_compiled_again(tmp_path):
    folder = {"TPU_CACHE_DIR": str(tmp_path / "cache")}
    assert clean(PROGRAM, **folder) == COMPILED
    files = entries(tmp_path / "cache")
    for i, file in enumerate(files):
        content = file.read_bytes()
        damaged = content[:-1] + bytes([content[-1] ^ 255]) if i else content[: len(content) // 2]
        file.write_bytes(damaged)
    result = run(PROGRAM, **folder)
    assert (result.returncode, result.stdout) == (0, COMPILED)
    assert result.stderr.count("CacheWarning: [TPU1013] The cache entry") == 1
    assert "it was dropped and is compiled again." in result.stderr
    assert entries(tmp_path / "cache") == files
    assert clean(PROGRAM, **folder) == LOADED


def test_an_entry_of_other_code_is_compiled_again(tmp_path):
    folder = {"TPU_CACHE_DIR": str(tmp_path / "cache")}
    out = clean(
        """
        import torch
        from tpu_core.cache import ExecutableStore
        from tpu_core.config import config

        # Intact, and no executable.
        get = ExecutableStore.get
        def garbage(store, key):
            store.put(key, b"not machine code", {})
            return get(store, key)
        ExecutableStore.get = garbage
        import warnings
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            print((torch.arange(3.0, device="tpu") * 2).sum().item())
        print("could not be loaded" in str(seen[0].message))
        """,
        **folder,
    )
    assert out == "6.0\nTrue\n"


@pytest.mark.parametrize("what", ["cannot be created", "cannot be written"])
def test_a_folder_that_cannot_be_used_costs_one_warning(what, tmp_path):
    folder, prelude = tmp_path / "cache", ""
    if what == "cannot be created":
        folder = Path("/proc/none/cache")
    else:  # as on a full disk, and for root, too
        prelude = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096,) * 2)"
    result = run(prelude + PROGRAM, TPU_CACHE_DIR=str(folder))
    assert (result.returncode, result.stdout) == (0, COMPILED)
    assert result.stderr.count("CacheWarning") == 1
    assert what in result.stderr and "kept in memory only" in result.stderr


def test_programs_are_dumped_and_compiles_logged(tmp_path):
    result = run(PROGRAM, TPU_CACHE="off", TPU_DUMP=str(tmp_path / "dump"), TPU_LOG="info")
    assert (result.returncode, result.stdout) == (0, COMPILED)
    dumped = list((tmp_path / "dump").glob("*.stablehlo.mlir"))
    assert dumped and all("stablehlo." in file.read_text() for file in dumped)
    lines = [line for line in result.stderr.splitlines() if line.startswith("tpu_core: compiled ")]
    assert len(lines) == len(dumped)
    assert "at <string>:" in lines[0]
