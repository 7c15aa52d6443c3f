"""Jagged tensors to padded ones and back, against the CPU."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_map

from tpu_core.metrics import METRICS

aten = torch.ops.aten
OFFSETS = torch.tensor([0, 2, 2, 6])
VALUES = torch.arange(12.0).view(6, 2)
PADDED = torch.arange(24.0).view(3, 4, 2)

TO_PADDED = {
    "longest": (VALUES, [OFFSETS], [4], 9.0),
    "cut": (VALUES, [OFFSETS], [3], 9.0),
    "longer": (VALUES, [OFFSETS], [6], -1.0),
    "no columns": (VALUES[:, 0], [OFFSETS], [4], 9.0),
    "more dims": (VALUES.view(6, 2, 1), [OFFSETS], [4]),
    "int64": (VALUES.long(), [OFFSETS], [4], 0.5),
    "bool": (VALUES.bool(), [OFFSETS], [4], 0.5),
    "bfloat16": (VALUES.bfloat16(), [OFFSETS], [4], 0.3),
    "int32 offsets": (VALUES.double(), [OFFSETS.int()], [4], 0.1),
    "gaps": (VALUES, [torch.tensor([1, 2, 3])], [4], 9.0),
    "no rows": (VALUES[:0], [torch.tensor([0, 0])], [2], 1.0),
    "no length": (VALUES, [OFFSETS], [0], 1.0),
    "complex": (VALUES.cfloat(), [OFFSETS], [4], 1.0),
    "two levels": (VALUES, [OFFSETS, OFFSETS], [4, 4], 1.0),
}
TO_JAGGED = {
    "rows": (PADDED, [OFFSETS], 6),
    "counted": (PADDED, [OFFSETS]),
    "bool": (PADDED.bool(), [OFFSETS], 6),
    "no columns": (PADDED[..., 0], [OFFSETS], 6),
    "more dims": (PADDED[..., None], [OFFSETS], 6),
    "complex": (PADDED.cfloat(), [OFFSETS.int()], 6),
    "too few": (PADDED, [OFFSETS], 5),
    "too many": (PADDED, [OFFSETS], 8),
    "too long": (PADDED[:, :3], [OFFSETS], 6),
}


def outcome(op, args, device):
    """The result, or the error's class and text."""
    moved = tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, args)
    try:
        return op(*moved).cpu()
    except (RuntimeError, NotImplementedError) as error:
        # The device's errors are notes of the line; a kernel names its device.
        text = str(error).splitlines()[0].replace("_tpu", "_cpu")
        return type(error).__name__, text.split(" INTERNAL")[0]


CALLS = [
    *((aten._jagged_to_padded_dense_forward, name, args) for name, args in TO_PADDED.items()),
    *((aten._padded_dense_to_jagged_forward, name, args) for name, args in TO_JAGGED.items()),
]


@pytest.mark.parametrize(
    ("op", "args"), [c[::2] for c in CALLS], ids=[f"{op}-{n}" for op, n, _ in CALLS]
)
def test_equals_the_cpu(op, args):
    want, got = (outcome(op, args, device) for device in ("cpu", "tpu"))
    if isinstance(want, tuple):
        assert got == want
    else:
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_other_sizes_in_one_process():
    for lengths in ((2, 3), (1, 4, 2), (5,), (0, 7)):
        rows = [torch.randn(n, 3) for n in lengths]
        for fill in (0.0, -1.0):
            want, got = (
                torch.nested.nested_tensor(rows, layout=torch.jagged, device=device)
                .to_padded_tensor(fill)
                .cpu()
                for device in ("cpu", "tpu")
            )
            torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_padding_runs_in_programs():
    before = METRICS.snapshot()["fallbacks"]
    x = torch.nested.nested_tensor([VALUES, VALUES[:2]], layout=torch.jagged, device="tpu")
    assert x.to_padded_tensor(0.0).sum().item() == VALUES.sum() + VALUES[:2].sum()
    assert METRICS.snapshot()["fallbacks"] == before
