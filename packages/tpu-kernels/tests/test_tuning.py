"""Blocks by measured cost: counting a schedule, the table, and what is chosen by it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tpu_core import config
from tpu_core.errors import CacheWarning, KernelCompilationError, LibtpuMissingError
from tpu_core.lowering import implementations
from tpu_kernels.ops.attention import choice
from tpu_kernels.ops.attention.blocks import BlockGrid
from tpu_kernels.ops.attention.overloads import KERNEL_FORWARD, KERNEL_OF_KEYS
from tpu_kernels.ops.attention.tuning import CANDIDATES, KERNELS
from tpu_kernels.tuning import cli, table, tuner
from tpu_kernels.tuning.bundles import Bundles, count
from tpu_kernels.tuning.chips import CHIPS

V5E = "TPU v5e"
BF16 = "bfloat16"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own."""
    settings = replace(config.config(), cache_dir=tmp_path)
    monkeypatch.setattr(implementations, "config", lambda: settings)
    forget()
    yield tmp_path / "tuned" / "costs.json"
    forget()


def forget() -> None:
    """What the process has read of tables."""
    table._read.cache_clear()
    choice.blocks.cache_clear()
    implementations.sources.cache_clear()


def schedule(*sizes: int) -> list[str]:
    """A kernel's, as libtpu writes it: regions of a loop of these sizes, with a bundle between."""
    lines = ["LB: loop body", "     0   :  { %s1 = inlined_call_operand.hbm [shape: f32[8]] }"]
    body = "  0x{:x} LB: > {{ %1 = sadd.s32 }}"
    lines.append("   0x1   :  { %2 = smov 0 } /* Start region 9 */")
    for number, size in enumerate(sizes):
        lines.append(f"  0x2   : > {{ %3 = sbr.rel }} /* Start region {number} */")
        lines += [body.format(n) for n in range(size - 1)]
        lines.append(f"  0x3 PF: > {{ %4 = nop }} /* End region {number} */")
    lines.append("   0x4   :  { %5 = sbr.rel } /* End region 9 :: Start region 77 */")
    return lines


def test_the_parts_of_a_schedule() -> None:
    made = count(schedule(3, 40, 200, 60, 5))
    # A step takes the two small regions, the branches and the end of the loop.
    assert (made.block, made.once) == (200, 100)
    assert 8 <= made.step <= 16


@pytest.mark.parametrize("sizes", [(), (200,), (40, 200), (200, 40)])
def test_a_schedule_without_these_parts(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="The schedule has no"):
        count(schedule(*sizes)[:-1] if not sizes else schedule(*sizes))


def test_cycles_are_those_of_what_is_computed() -> None:
    causal = BlockGrid(1024, 1024, 256, 512, is_causal=True)
    cost = Bundles(block=100, step=10, once=1)
    # Of 4 x 2 blocks, 6 have scores up to the diagonal.
    assert choice.estimate(KERNEL_FORWARD, causal, cost, 0.0) == 6 * 100 + 8 * 10 + 4
    assert choice.estimate(KERNEL_OF_KEYS, causal, cost, 0.0) == 6 * 100 + 8 * 10 + 2
    # Where memory takes longer than a block, it waits for the keys, or for the queries.
    assert choice.estimate(KERNEL_FORWARD, causal, cost, 1.0) == 6 * 512 + 8 * 10 + 4
    assert choice.estimate(KERNEL_OF_KEYS, causal, cost, 1.0) == 6 * 256 + 8 * 10 + 2


def chosen(kind: str | None = V5E, sizes: tuple[int, int] = (96, 96), **changes: Any) -> Any:
    lengths = changes.pop("lengths", (4096, 4096))
    made = choice.blocks(KERNEL_FORWARD, kind, BF16, lengths, sizes, False, **changes)
    return made.block_rows, made.block_columns


def test_a_table_of_the_users_own_goes_first() -> None:
    before = implementations.sources()
    costs = {KERNEL_FORWARD: {(128, 512): Bundles(1, 1, 1), (512, 512): Bundles(9000, 90, 90)}}
    table.write(table.user_file(), {("attention", "v5e", "bfloat16/96/96"): costs})
    forget()
    assert chosen() == (128, 512)
    assert implementations.sources() != before  # of which programs' keys are made
    # Not for others, and not where nothing was measured.
    assert chosen("TPU v9") == chosen(None) == chosen(has_bias=True) == (512, 512)
    assert chosen(has_dropout=True) == (256, 256)
    assert chosen(lengths=(16, 4096)) == (16, 512)
    assert chosen(sizes=(300, 300)) == (256, 256)


def test_heads_between_those_measured_take_the_next_larger() -> None:
    costs = {KERNEL_FORWARD: {(128, 128): Bundles(1, 1, 1)}}
    table.write(table.user_file(), {("attention", "v5e", "bfloat16/128/128"): costs})
    assert chosen() == (128, 128)


def test_writing_keeps_other_entries(own_folder: Path) -> None:
    costs = {KERNEL_FORWARD: {(128, 128): Bundles(1, 2, 3)}}
    for name in ("a", "b"):
        table.write(own_folder, {("attention", "v5e", name): costs})
    assert table.find("attention", V5E, "a") == table.find("attention", V5E, "b") == costs
    assert json.loads(own_folder.read_text())["attention"]["v5e"].keys() == {"a", "b"}


@pytest.mark.parametrize(
    "text", ["", "[]", '{"attention": 1}', '{"attention": {"v5e": {"x": {"k": {"8x8": [1]}}}}}']
)
def test_a_damaged_table_is_said_and_left_out(own_folder: Path, text: str) -> None:
    own_folder.parent.mkdir()
    own_folder.write_text(text)
    with pytest.warns(CacheWarning, match="is no table of `tpu tune`"):
        assert chosen() is not None


@pytest.mark.parametrize("chip", CHIPS)
def test_what_is_shipped_has_all_chips_and_common_heads(chip: str) -> None:
    for sizes in ((64, 64), (128, 128)):
        costs = table.find("attention", f"TPU {chip}", choice.shape(BF16, *sizes))
        assert set(costs) == set(KERNELS)
        for kernel, of_block in costs.items():
            assert set(of_block) <= set(CANDIDATES)
            assert {(256, 256), (512, 512)} <= set(of_block), kernel


def test_names_of_a_generation() -> None:
    names = ("TPU v5e", "TPU7x", "TPU 7x", "tpu7x", "v6e")
    assert [table.chip_name(n) for n in names] == ["v5e", "tpu7x", "tpu7x", "tpu7x", "v6e"]


def test_the_command_writes_the_cache_folder(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def measured(*args: Any) -> Any:
        asked.append(args)
        return {KERNEL_FORWARD: {(256, 128): Bundles(10, 1, 1)}}

    monkeypatch.setattr(tuner, "tune", measured)
    result = CliRunner().invoke(cli.app, ["--chip", "v5e,TPU7x", "--heads", "96,192x128"])
    assert result.exit_code == 0, result.output
    assert asked == [(c, BF16, s) for c in ("v5e", "tpu7x") for s in ((96, 96), (192, 128))]
    assert "256x128" in result.output
    assert chosen() == (256, 128)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chip", "v1"], "'v1' is none of v4, v5e"),
        (["--chip", "v5e", "--heads", "big"], "'big' is no head size"),
        (["--chip", "v5e", "--dtype", "int8"], "'int8' is neither"),
    ],
)
def test_mistakes_are_said(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_what_ends_the_worker_costs_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(*_: Any, input: str, **__: Any) -> Any:
        blocks = json.loads(input)["blocks"]
        asked.append(len(blocks))
        parts = {"block": 1, "step": 1, "once": 1}
        ends_early = len(asked) == 1
        lines = [
            json.dumps({"block": block, "costs": {KERNEL_FORWARD: parts}})
            for block in blocks[: 2 if ends_early else len(blocks)]
        ]
        output = "\n".join(["a line of libtpu's", *lines])
        return subprocess.CompletedProcess([], -6 if ends_early else 0, output, "")

    monkeypatch.setattr(tuner.subprocess, "run", run)
    costs = tuner.tune("v5e", BF16, (128, 128))
    assert asked == [len(CANDIDATES), len(CANDIDATES) - 3]
    assert set(costs[KERNEL_FORWARD]) == set(CANDIDATES) - {CANDIDATES[2]}


@pytest.mark.parametrize("ends", [False, True])
def test_where_no_size_compiles_no_table_is_written(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    def run(*_: Any, input: str, **__: Any) -> Any:
        blocks = json.loads(input)["blocks"]
        lines = [json.dumps({"block": b, "error": "RESOURCE_EXHAUSTED"}) for b in blocks]
        output = "" if ends else "\n".join(lines)
        return subprocess.CompletedProcess([], 1 if ends else 0, output, "first\nImportError: x\n")

    monkeypatch.setattr(tuner.subprocess, "run", run)
    before = chosen(sizes=(128, 128))
    result = CliRunner().invoke(cli.app, ["--chip", "v5e"])
    assert isinstance(result.exception, KernelCompilationError)
    message = str(result.exception)
    assert f"None of the {len(CANDIDATES)} sizes of blocks compiled for v5e" in message
    assert ("status 1, and said: ImportError: x" if ends else "RESOURCE_EXHAUSTED") in message
    assert not own_folder.exists()
    assert chosen(sizes=(128, 128)) == before


def test_without_libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(tuner.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LibtpuMissingError):
        tuner.tune("v5e", BF16, (128, 128))


def test_blocks_are_measured_without_a_chip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "CANDIDATES", ((256, 256),))
    output = tmp_path / "costs.json"
    made = CliRunner().invoke(cli.app, ["--chip", "v5e", "--output", str(output)])
    assert made.exit_code == 0, made.output
    costs = json.loads(output.read_text())["attention"]["v5e"]["bfloat16/128/128"]
    shipped = table.find("attention", "TPU v5e", "bfloat16/128/128")
    for kernel in ("attention", "attention_gradient_of_query"):
        block, step, once = costs[kernel]["256x256"]
        known = shipped[kernel][256, 256]
        # What is shipped was counted with the libtpu that jax pins; another schedules otherwise.
        assert block == pytest.approx(known.block, rel=0.3)
        assert 0 < step < block and 0 < once < 4 * block
