"""References of tensors in calls of kernels that take arguments without boxing."""

from __future__ import annotations

import pytest
import torch

CALLS = {
    "Tensor -> Tensor": (1, lambda x: x.neg()),
    "Tensor, Tensor -> Tensor": (2, torch.maximum),
    "Tensor, Tensor, Tensor -> Tensor": (3, lambda c, x, y: torch.ops.aten.lerp.Tensor(c, x, y)),
    "Tensor, Tensor, Scalar -> Tensor": (2, lambda x, y: torch.add(x, y, alpha=2)),
    "Tensor, Scalar -> Tensor": (1, lambda x: x > 1),
    "Tensor, Scalar? -> Tensor": (1, lambda x: torch.ops.aten.clamp_min(x, 0.5)),
    "Tensor, Scalar?, Scalar? -> Tensor": (1, lambda x: torch.clamp(x, 0, 1)),
    "Tensor, Tensor, Tensor, Scalar, Scalar -> Tensor": (3, torch.addmm),
    "Tensor, int, bool -> Tensor": (1, lambda x: torch.softmax(x, 0)),
    "Tensor! -> Tensor!": (1, lambda x: x.neg_()),
    "Tensor!, Tensor -> Tensor!": (2, lambda x, y: x.mul_(y)),
    "Tensor!, Scalar -> Tensor!": (1, lambda x: x.fill_(3)),
    "Tensor!, Tensor, Scalar -> Tensor!": (2, lambda x, y: x.add_(y, alpha=2)),
    "boxed": (1, lambda x: x.sum(dim=0)),
    "resolved conjugate": (1, lambda x: torch.view_as_complex(x.view(2, 2, 2)).conj() * 2),
}


@pytest.mark.parametrize("form", CALLS)
def test_references(form):
    count, call = CALLS[form]
    arguments = [torch.ones(2, 4, device="tpu") for _ in range(count)]
    if form.startswith("Tensor, Tensor, Tensor, Scalar"):
        arguments = [torch.ones(4, 4, device="tpu") for _ in range(count)]
    for _ in range(2):  # the first call of a form asks Python
        call(*arguments)
    torch.tpu.synchronize()
    before = [x._use_count() for x in arguments]
    for _ in range(10):
        call(*arguments)
    torch.tpu.synchronize()
    assert [x._use_count() for x in arguments] == before


@pytest.mark.parametrize("form", CALLS)
def test_memory(form):
    count, call = CALLS[form]
    size = (4, 4) if form.startswith("Tensor, Tensor, Tensor, Scalar") else (2, 4)

    def run() -> int:
        call(*(torch.ones(size, device="tpu") for _ in range(count)))
        torch.tpu.synchronize()
        return torch.tpu.memory_allocated()

    run()
    before = run()
    assert run() == before
