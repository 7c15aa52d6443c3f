"""Products of 8-bit integers and floats on the device: values and mistakes as on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType, SwizzleType

E4, E5, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
TENSOR, ROW, BLOCK = ScalingType.TensorWise, ScalingType.RowWise, ScalingType.BlockWise1x128


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bytes_of(*shape: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    low = torch.iinfo(dtype).min
    generator = torch.Generator().manual_seed(0)
    return torch.randint(low, low + 256, shape, dtype=dtype, generator=generator)


A, B, COLUMNS = randn(16, 32), randn(48, 32, seed=1), randn(48, seed=2)
ONE, OTHER = torch.tensor(0.5), torch.tensor([3.0])
ROWS = randn(16, 1, seed=3).abs() + 0.5, randn(1, 48, seed=4).abs() + 0.5
LONG = randn(8, 256).to(E4)

# torch 2.11 has fewer products of these on the CPU.
IS_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
# With tiles (AMX) oneDNN has products of its own: it takes a scale of float64, and sums in tiles.
HAS_TILES = torch.cpu._is_amx_tile_supported()
WITHOUT_KERNEL = ("rows", "recipes", "recipes of rows") if IS_OLD else ()

Case = tuple[Callable[..., torch.Tensor], tuple[Any, ...], dict[str, Any]]


def scaled(
    a: torch.dtype, b: torch.dtype, scales: tuple[torch.Tensor, ...], **options: Any
) -> Case:
    return torch._scaled_mm, (A.to(a), B.to(b).t(), *scales), options


def recipes(first: Any, second: Any, scales: tuple[Any, ...], **options: Any) -> Case:
    return F.scaled_mm, (A.to(E4), B.to(E5).t(), scales[0], first, scales[1], second), options


VALUES: dict[str, Case] = {
    "int8": (torch._int_mm, (bytes_of(33, 64), bytes_of(64, 5)), {}),
    "int8 transposed": (torch._int_mm, (bytes_of(16, 64), bytes_of(24, 64).t()), {}),
    "uint8": (torch._int_mm, (bytes_of(16, 64, dtype=torch.uint8), bytes_of(64, 8)), {}),
    **{
        f"weight of int8, {dtype}": (
            torch._weight_int8pack_mm,
            (randn(4, 64).to(dtype), bytes_of(24, 64), randn(24).abs().to(dtype)),
            {},
        )
        for dtype in (torch.float32, BF16, torch.float16)
    },
    **{
        f"{a} by {b} to {out}": scaled(a, b, (ONE, OTHER), out_dtype=out)
        for a, b in ((E4, E4), (E5, E4), (E5, E5))
        for out in (BF16, torch.float32, None)
    },
    "rows": scaled(E4, E4, ROWS, out_dtype=BF16),
    "bias": scaled(E4, E5, (ONE, OTHER), bias=COLUMNS.to(BF16), out_dtype=BF16),
    "scale of the result": scaled(E4, E4, (ONE, OTHER), scale_result=OTHER, out_dtype=E5),
    "any layout and size": (
        torch._scaled_mm,
        (A[:, :7].to(E4), B.t()[:7].contiguous().to(E4), ONE, OTHER),
        {"out_dtype": BF16},
    ),
    "recipes": recipes(TENSOR, TENSOR, (ONE, OTHER), bias=COLUMNS),
    "recipes of rows": recipes(ROW, ROW, ROWS),
}
MISTAKES: dict[str, Case] = {
    "int8, sizes": (torch._int_mm, (bytes_of(16, 64), bytes_of(16, 64)), {}),
    "int8, dtype": (torch._int_mm, (bytes_of(16, 64).int(), bytes_of(64, 8).int()), {}),
    "int8, dims": (torch._int_mm, (bytes_of(1, 16, 64), bytes_of(64, 8)), {}),
    "weight, sizes": (torch._weight_int8pack_mm, (A, bytes_of(24, 64), randn(24)), {}),
    "weight, scales": (torch._weight_int8pack_mm, (A, bytes_of(24, 32), randn(23)), {}),
    "weight, dtype": (torch._weight_int8pack_mm, (A, bytes_of(24, 32).int(), randn(24)), {}),
    "float32": scaled(torch.float32, torch.float32, (ONE, OTHER), out_dtype=BF16),
    "sizes": (torch._scaled_mm, (A.to(E4), B.to(E4), ONE, OTHER), {"out_dtype": BF16}),
    "number of scales": scaled(E4, E4, (torch.ones(3), OTHER), out_dtype=BF16),
    "float64 scale": scaled(E4, E4, (ONE.double(), OTHER), out_dtype=BF16),
    "scales of blocks": (
        torch._scaled_mm,
        (LONG, LONG.t(), torch.ones(8, 2), torch.ones(2, 8)),
        {"out_dtype": BF16},
    ),
    "size of the bias": scaled(E4, E4, (ONE, OTHER), bias=COLUMNS[1:], out_dtype=BF16),
    "scales of the result": scaled(E4, E4, (ONE, OTHER), scale_result=ROWS[0], out_dtype=E4),
    "two recipes": recipes(TENSOR, ROW, (ONE, ROWS[1])),
    "recipe of blocks": (
        F.scaled_mm,
        (LONG, LONG.t(), torch.ones(8, 2), BLOCK, torch.ones(2, 8), BLOCK),
        {},
    ),
    "rows of another matrix": recipes(ROW, ROW, (ROWS[0][:5], ROWS[1])),
    "swizzled scales": recipes(
        *(TENSOR, TENSOR, (ONE, OTHER)),
        swizzle_a=SwizzleType.SWIZZLE_32_4_4,
        swizzle_b=SwizzleType.SWIZZLE_32_4_4,
    ),
    "dtype of the bias": recipes(TENSOR, TENSOR, (ONE, OTHER), bias=COLUMNS.int()),
}
if IS_OLD:
    MISTAKES["uint8"] = VALUES.pop("uint8")


def without_kernel(case: Case) -> torch.Tensor:
    """What a product is, of plain ones."""
    function, (a, b, *rest), options = case
    scales = rest[:2] if function is torch._scaled_mm else rest[::2]
    product = (a.float() * scales[0]) @ (b.float() * scales[1])
    return (product + options.get("bias", 0)).bfloat16()


def on(device: str, case: Case) -> torch.Tensor:
    function, args, options = case

    def move(x: Any) -> Any:
        return x.to(device) if isinstance(x, torch.Tensor) else x

    return function(*map(move, args), **{k: move(v) for k, v in options.items()})


@pytest.mark.parametrize("name", VALUES)
def test_values(name: str) -> None:
    fallbacks = torch.tpu.metrics()["fallbacks"]
    got = on("tpu", VALUES[name])
    want = (without_kernel if name in WITHOUT_KERNEL else partial(on, "cpu"))(VALUES[name])
    assert torch.tpu.metrics()["fallbacks"] == fallbacks
    out = want.dtype
    if out.itemsize == 1:
        assert got.dtype == out
        got, want = got.float(), want.float()
    # A sum of float32 is rounded in another order, and is as inexact as its largest partial sum.
    bound = {"rtol": 2e-6, "atol": 1e-3} if want.dtype == torch.float32 else {}
    if out.itemsize == 1 and (HAS_TILES or os.environ.get("TPU_PLATFORM", "cpu") != "cpu"):
        # Such a sum may lie between two numbers of three bits.
        bound = {"rtol": torch.finfo(out).eps, "atol": 0.0}
    torch.testing.assert_close(got.cpu(), want, **bound)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_the_cpus(name: str) -> None:
    if name == "float64 scale" and (IS_OLD or HAS_TILES):  # which the CPU takes there
        assert torch.equal(on("tpu", MISTAKES[name]).cpu(), on("cpu", MISTAKES[name]))
        return
    if MISTAKES[name][0] is F.scaled_mm and IS_OLD:  # the CPU has no such product there
        with pytest.raises(RuntimeError, match="of a scaled product"):
            on("tpu", MISTAKES[name])
        return
    with pytest.raises((RuntimeError, ValueError)) as expected:
        on("cpu", MISTAKES[name])
    with pytest.raises(type(expected.value)) as raised:
        on("tpu", MISTAKES[name])
    assert str(raised.value) == str(expected.value)
