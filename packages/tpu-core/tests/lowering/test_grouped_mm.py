"""Grouped products against float64, one group at a time."""

from __future__ import annotations

import jax
import pytest
import torch

from tpu_core import lowering
from tpu_core.lowering import grouped_mm as lowerings
from tpu_core.lowering.evaluate import call_lowering, to_jax, to_torch
from tpu_core.lowering.implementations import Target
from tpu_core.lowering.registry import REGISTRY

lowering.load()

# Ends of the groups: empty ones, prime lengths, and fewer than the rows.
ENDS = [[2, 5, 8], [0, 7, 8], [3, 3, 6], [0, 0, 0]]
OP = "aten._grouped_mm.default"


def operands(ranks: tuple[int, int], groups: int, rows: int, k: int, n: int) -> list[torch.Tensor]:
    """Of ``[rows, k] @ [groups, k, n]``, of its gradient's two matrices, or of the transpose."""
    torch.manual_seed(0)
    a, b = {
        (2, 3): ((rows, k), (groups, k, n)),
        (2, 2): ((k, rows), (rows, n)),
        (3, 2): ((groups, n, k), (k, rows)),
    }[ranks]
    return [torch.randn(a), torch.randn(b)]


def expected(a: torch.Tensor, b: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """What is past the last end is zero."""
    a, b = a.double(), b.double()
    spans = list(zip([0, *ends], ends))
    if a.dim() == b.dim() == 2:
        return torch.stack([a[:, i:j] @ b[i:j] for i, j in spans])
    if a.dim() == 2:
        out = a.new_zeros(a.size(0), b.size(2))
        for g, (i, j) in enumerate(spans):
            out[i:j] = a[i:j] @ b[g]
        return out
    out = a.new_zeros(a.size(1), b.size(1))
    for g, (i, j) in enumerate(spans):
        out[:, i:j] = a[g] @ b[:, i:j]
    return out


def call(a: torch.Tensor, b: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """The lowering, as one program; a transposed operand is one there too."""
    entry = REGISTRY.get(OP)
    assert entry is not None
    transposed = [not x.is_contiguous() for x in (a, b)]
    offs = torch.tensor(ends, dtype=torch.int32)
    out = expected(a, b, ends)

    def run(x: jax.Array, y: jax.Array, offs: jax.Array) -> jax.Array:
        x, y = (v.swapaxes(-2, -1) if t else v for v, t in zip((x, y), transposed))
        aval = jax.ShapeDtypeStruct(tuple(out.shape), x.dtype)
        contiguous = (not transposed[0], not transposed[1], True)
        return call_lowering(entry, (x, y, offs), {}, (aval,), contiguous=contiguous)[0]

    with jax.enable_x64(True):
        arrays = [to_jax(x.mT if t else x) for x, t in zip((a, b), transposed)]
        return to_torch(jax.jit(run)(*arrays, to_jax(offs)))


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("ranks", [(2, 3), (2, 2), (3, 2)])
def test_values(
    ranks: tuple[int, int], ends: list[int], large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:  # by a loop over blocks, two of which are a group's
        monkeypatch.setattr(lowerings, "_LARGE", 0)
        monkeypatch.setattr(lowerings, "_BLOCK", 4)
    a, b = operands(ranks, 3, 8, 16, 12)
    want = expected(a, b, ends).float()
    torch.testing.assert_close(call(a, b, ends), want, rtol=1e-5, atol=1e-5)
    a, b = a.mT.contiguous().mT, b.mT.contiguous().mT
    torch.testing.assert_close(call(a, b, ends), want, rtol=1e-5, atol=1e-5)


def test_what_no_group_holds_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for large in (1 << 60, 0):
        monkeypatch.setattr(lowerings, "_LARGE", large)
        for ranks in ((2, 3), (2, 2)):
            a, b = operands(ranks, 3, 8, 4, 4)
            want = expected(a, b, [1, 4, 6]).float()
            (a if ranks == (2, 3) else a.mT)[6:] = torch.nan
            if ranks == (2, 2):
                b[6:] = torch.inf
            torch.testing.assert_close(call(a, b, [1, 4, 6]), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_in_float32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for large in (1 << 60, 0):
        monkeypatch.setattr(lowerings, "_LARGE", large)
        for ranks in ((2, 3), (2, 2)):
            a, b = (x.to(dtype) for x in operands(ranks, 2, 300, 20, 8))
            want = expected(a, b, [130, 299]).to(dtype)
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(call(a, b, [130, 299]), want, rtol=eps, atol=eps)


def program(dtype: str, rows: int) -> str:
    """StableHLO for a TPU."""
    avals = [
        jax.ShapeDtypeStruct(shape, kind)
        for shape, kind in (((rows, 256), dtype), ((4, 256, 128), dtype), ((4,), "int32"))
    ]
    with jax.enable_x64(True), Target("tpu").applied():
        traced = jax.jit(lowerings.grouped_mm).trace(*avals)
        text: str = traced.lower(lowering_platforms=("tpu",)).as_text(debug_info=True)
    return text


def test_programs_for_tpus_are_in_the_form_of_their_kernel() -> None:
    text = program("bfloat16", 30)
    assert "chlo.ragged_dot" in text and "while" not in text
    # Of 8 rows each, and not summed up in what the result is rounded to.
    assert "tensor<32x256xbf16>" in text
    assert f"kernel(products={2 * 30 * 256 * 128},passes=1)" in text
    assert "passes=6" in program("float32", 32)
    assert "tensor<4x256x128xf32>" in program("float16", 32)
