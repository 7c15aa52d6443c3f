"""Which parts of the scores each process computes in a ring."""

from __future__ import annotations

import pytest
import torch

from tpu_distributed.ring_attention import steps
from tpu_distributed.stablehlo import ProgramWriter

LENGTH = 4  # rows of each process


def places(rank: int, size: int, balanced: bool) -> list[int]:
    """Of a process's rows in the sequence."""
    if not balanced:
        return list(range(rank * LENGTH, (rank + 1) * LENGTH))
    half, last = LENGTH // 2, 2 * size - 1 - rank
    return [*range(rank * half, (rank + 1) * half), *range(last * half, (last + 1) * half)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("is_causal", "balanced"), [(False, True), (False, False), (True, True), (True, False)]
)
def test_each_score_is_computed_once(size: int, is_causal: bool, balanced: bool) -> None:
    computed = torch.zeros(size * LENGTH, size * LENGTH, dtype=torch.int32)
    for rank in range(size):
        for i, step in enumerate(steps(rank, size, LENGTH, LENGTH, is_causal, balanced)):
            if step is None:
                continue
            rows = places(rank, size, balanced)[step.first :]
            columns = places((rank - i) % size, size, balanced)[: step.end]
            for y, row in enumerate(rows):
                seen = columns[: y + 1] if step.is_causal else columns
                computed[row, seen] += 1
    wanted = torch.ones_like(computed)
    assert torch.equal(computed, wanted.tril() if is_causal else wanted)


def test_other_lengths_have_no_causal_mask() -> None:
    assert len(steps(0, 2, 4, 6, is_causal=False, balanced=True)) == 2
    with pytest.raises(NotImplementedError, match="as many keys as queries, not 6 for 4"):
        steps(0, 2, 4, 6, is_causal=True, balanced=True)


def test_a_permutation_in_groups() -> None:
    p = ProgramWriter(2, [[0, 1], [2, 3]])
    text = p.text([p.permute(p.parameter((3,), "f32"), [1, 0])])
    pairs = "source_target_pairs = dense<[[0, 1], [1, 0], [2, 3], [3, 2]]> : tensor<4x2xi64>"
    assert f'"stablehlo.collective_permute"(%arg0) {{{pairs}}}' in text
