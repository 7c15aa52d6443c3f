"""Grouped products by the megablox kernel: values by the interpreter, and when it is chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F

import tpu_kernels
from tpu_core.lowering import load
from tpu_core.lowering.evaluate import call_lowering
from tpu_core.lowering.implementations import Target
from tpu_core.lowering.registry import REGISTRY
from tpu_kernels import KernelRuleError
from tpu_kernels.ops.grouped_mm.api import KERNEL
from tpu_kernels.ops.grouped_mm.arguments import GROUPED_MM, GroupedArguments
from tpu_kernels.ops.grouped_mm.tiles import tiles

TPU = Target("tpu")


@pytest.mark.parametrize(
    ("rows", "ends", "k", "n", "dtype"),
    [
        (150, [31, 31, 150], 24, 40, torch.float32),
        (40, [0, 7, 30], 130, 16, torch.float32),
        (7, [0, 0, 0], 8, 8, torch.float32),
        (300, [128, 256, 299], 64, 136, torch.bfloat16),
    ],
)
def test_values_are_those_of_float64(
    rows: int, ends: list[int], k: int, n: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(rows, k).to(dtype), torch.randn(rows, n).to(dtype)
    offs = torch.tensor(ends, dtype=torch.int32)
    spans = zip([0, *ends], ends)
    expected = torch.stack([a[i:j].double().mT @ b[i:j].double() for i, j in spans])
    with tpu_kernels.using(grouped_mm="pallas"):
        got = F.grouped_mm(a.to("tpu").mT, b.to("tpu"), offs=offs.to("tpu")).cpu()
    bound = 1e-5 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(got.double(), expected, rtol=bound, atol=10 * bound)


def arguments(**changes: Any) -> GroupedArguments:
    return replace(GroupedArguments((512, 4096), (4096, 1024), 8, "bfloat16"), **changes)


def test_a_tpu_takes_the_kernel_by_itself() -> None:
    assert KERNEL.select(arguments(), TPU, None).name == "pallas"
    assert KERNEL.select(arguments(dtype="float32"), TPU, None).name == "pallas"
    assert KERNEL.select(arguments(), TPU, "plain").name == "plain"
    assert KERNEL.select(arguments(), Target("cpu"), None).name == "plain"


@pytest.mark.parametrize(
    ("changes", "target", "rule"),
    [
        ({"dtype": "float16"}, TPU, "The dtype is bfloat16 or float32"),
        ({"left": (512, 1024), "right": (8, 1024, 64)}, TPU, "Both operands have two dimensions"),
        ({"left": (512, 0)}, TPU, "No size is 0."),
        ({"groups": 0}, TPU, "No size is 0."),
        ({}, Target("tpu", 4), "The program is for one device"),
        ({}, Target("tpu", kind="TPU v3"), "none of TPU v2 and v3"),
    ],
)
def test_what_breaks_a_rule_is_computed_plainly(
    changes: dict[str, Any], target: Target, rule: str
) -> None:
    given = arguments(**changes)
    assert KERNEL.select(given, target, None).name == "plain"
    with pytest.raises(KernelRuleError) as raised:
        KERNEL.select(given, target, "pallas")
    assert rule in str(raised.value)
    assert str(list(given.left)) in str(raised.value)


def test_programs_for_tpus_have_a_kernel_for_the_gradient_of_weights() -> None:
    load()
    entry = REGISTRY.get(GROUPED_MM)
    assert entry is not None

    def lowered(*shapes: tuple[int, ...], out: tuple[int, ...]) -> str:
        def product(a: jax.Array, b: jax.Array, offs: jax.Array) -> Any:
            aval = jax.ShapeDtypeStruct(out, a.dtype)
            return call_lowering(entry, (a, b, offs), {}, (aval,), contiguous=(True,) * 3)[0]

        avals = [jax.ShapeDtypeStruct(s, "bfloat16") for s in shapes]
        with jax.enable_x64(True), TPU.applied():
            traced = jax.jit(product).trace(*avals, jax.ShapeDtypeStruct((4,), "int32"))
            text: str = traced.lower(lowering_platforms=("tpu",)).as_text()
        return text

    assert lowered((128, 512), (512, 256), out=(4, 128, 256)).count("@tpu_custom_call") == 1
    assert "@tpu_custom_call" not in lowered((512, 128), (4, 128, 256), out=(512, 256))


def test_tiles_fit_and_are_as_large_as_groups_allow() -> None:
    assert tiles(4096, 1024, 2048, 8, 2) == (512, 1024, 1024)
    assert tiles(4096, 1024, 2048, 8, 4) == (512, 512, 512)  # three parts of each operand
    assert tiles(4096, 1024, 2048, 64, 2)[0] == 128  # groups of 64 rows
    assert tiles(24, 64, 72, 3, 2) == (32, 64, 72)  # all of a small matrix
    for rows, k, n in ((1, 1, 1), (4099, 1000, 3000), (32768, 4096, 14336), (513, 100000, 7)):
        for groups in (1, 7, 256):
            tile, tk, tn = tiles(rows, k, n, groups, 4)
            assert tile % 16 == 0 and (tk == k or tk % 128 == 0) and (tn == n or tn % 128 == 0)
