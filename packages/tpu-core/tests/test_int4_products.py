"""Weights of 4 bits: packed as CUDA packs them, and multiplied as the CPU multiplies its own."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

N, K, GROUP = 32, 256, 64


def numbers() -> torch.Tensor:
    return torch.randint(0, 16, (N, K), dtype=torch.int32)


def bytes_of(values: torch.Tensor) -> torch.Tensor:
    return (values[:, ::2] << 4 | values[:, 1::2]).to(torch.uint8)


def scales(dtype: torch.dtype) -> torch.Tensor:
    return torch.stack([torch.rand(K // GROUP, N) / 8, torch.randn(K // GROUP, N)], -1).to(dtype)


@pytest.mark.parametrize("inner", [2, 4, 8])
def test_packing_is_that_of_tensor_cores(inner: int) -> None:
    values = numbers()
    packed = torch._convert_weight_to_int4pack(bytes_of(values).to("tpu"), inner).cpu()
    assert packed.shape == (N // 8, K // (inner * 16), 32, inner // 2)
    # Of lane t, row t / 4; columns of a pair of tiles, from the lowest bits of an int32.
    for tile, outer, lane, j in ((0, 0, 0, 0), (3, 1, 31, inner // 2 - 1), (1, 0, 14, 0)):
        first = (outer * inner + 2 * j) * 16 + lane % 4 * 2
        columns = [first + 8 * i + half for half in (0, 1) for i in range(4)]
        word = int(packed[tile, outer, lane, j]) & 0xFFFFFFFF
        got = [word >> 4 * i & 15 for i in range(8)]
        assert got == values[tile * 8 + lane // 4, columns].tolist()


@pytest.mark.parametrize(
    ("dtype", "inner"), [(torch.float32, 2), (torch.bfloat16, 8), (torch.float16, 4)]
)
def test_products_are_those_of_the_cpu(dtype: torch.dtype, inner: int) -> None:
    values, given, x = numbers(), scales(dtype), torch.randn(5, K).to(dtype)
    own = torch._convert_weight_to_int4pack_for_cpu(values, 1)
    want = torch._weight_int4pack_mm_for_cpu(x, own, GROUP, given)
    fallbacks = torch.tpu.metrics()["fallbacks"]
    packed = torch._convert_weight_to_int4pack(bytes_of(values).to("tpu"), inner)
    got = torch._weight_int4pack_mm(x.to("tpu"), packed, GROUP, given.to("tpu"))
    assert torch.tpu.metrics()["fallbacks"] == fallbacks
    assert got.dtype == dtype
    # Weights are rounded to 16 bits before they are multiplied, as on CUDA; the CPU's are not.
    bound = 1e-4 if dtype == torch.float32 else 0.25 if dtype == torch.bfloat16 else 0.05
    torch.testing.assert_close(got.cpu(), want, atol=bound, rtol=2e-2)


PACKED = torch.zeros(N // 8, K // 128, 32, 4, dtype=torch.int32)
MISTAKES: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "weights of another dtype": (
        torch._convert_weight_to_int4pack,
        (torch.zeros(N, K, dtype=torch.int32), 8),
        "expected a 2-D weight of dtype uint8",
    ),
    "tiles": (
        torch._convert_weight_to_int4pack,
        (torch.zeros(N, K // 2, dtype=torch.uint8), 3),
        "innerKTiles is 2, 4 or 8, not 3",
    ),
    "rows": (
        torch._convert_weight_to_int4pack,
        (torch.zeros(N + 1, K // 2, dtype=torch.uint8), 8),
        "8 divides the rows and 128 the columns of a weight; got 33 and 256",
    ),
    "weights that are not packed": (
        torch._weight_int4pack_mm,
        (torch.zeros(2, K), torch.zeros(N, K, dtype=torch.int32), GROUP, torch.zeros(4, N, 2)),
        "expected a weight that _convert_weight_to_int4pack packed",
    ),
    "columns": (
        torch._weight_int4pack_mm,
        (torch.zeros(2, 128), PACKED, GROUP, torch.zeros(4, N, 2)),
        "the rows have 128 columns, the weight has 256",
    ),
    "groups": (
        torch._weight_int4pack_mm,
        (torch.zeros(2, K), PACKED, 96, torch.zeros(4, N, 2)),
        "groups of 96 do not divide 256 columns",
    ),
    "scales": (
        torch._weight_int4pack_mm,
        (torch.zeros(2, K), PACKED, GROUP, torch.zeros(N, 2)),
        "scales and zeros are [4, 32, 2] for groups of 64; got [32, 2]",
    ),
    "integers": (
        torch._weight_int4pack_mm,
        (torch.zeros(2, K, dtype=torch.int32), PACKED, GROUP, torch.zeros(4, N, 2)),
        "expected 2-D rows of a floating-point dtype",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    function, args, message = MISTAKES[name]
    moved = [x.to("tpu") if isinstance(x, torch.Tensor) else x for x in args]
    with pytest.raises(RuntimeError, match=re.escape(message)):
        function(*moved)
