"""Programs judged by their ops: rounding passes, and what is wrong raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tpu_core import _C, modes
from tpu_core.compiler import host_windows as windows
from tpu_core.config import override
from tpu_core.errors import VerificationError
from tpu_core.lowering import views
from tpu_core.lowering.registry import REGISTRY
from tpu_core.metrics import METRICS
from tpu_core.recorder import compute


@pytest.fixture(autouse=True)
def segments(first_runs_judged: None) -> Iterator[None]:
    with modes.using("segments"):
        yield


def judged(work: Callable[[], None]) -> int:
    before = METRICS.snapshot()
    work()
    torch.tpu.synchronize()
    return int(METRICS.delta(before)["verifications"])


def test_training_with_dropout_and_other_batches_passes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(96, 5),
    ).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train() -> None:
        for n in (6, 6, 5, 4, 3, 6):
            x, y = torch.randn(n, 3, 8, 8).to("tpu"), torch.randint(5, (n,)).to("tpu")
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    assert judged(train) >= 2


def test_attention_recurrent_layers_and_writes_pass() -> None:
    def work() -> None:
        q = torch.randn(2, 4, 16, 8, device="tpu", requires_grad=True)
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        nn.LSTM(5, 6, 2).to("tpu")(torch.randn(4, 2, 5).to("tpu"))[0].sum().item()
        z = torch.zeros(10, 10, device="tpu")
        z[2:5, ::2] = 3
        z.t()[1] += 1
        z.view(torch.int32)[0, 0] = 1 << 30
        assert z.sort(0)[0].sum().item() == 57.0
        torch.fft.fft(torch.randn(8).to("tpu")).abs().sum().item()
        x = torch.randn(16, 16).to("tpu").bfloat16()
        (x @ x).softmax(-1).sum().item()

    assert judged(work) >= 4


def test_what_is_kept_for_a_gradient_passes() -> None:
    """Of ops whose CPU kernels leave some of it unset, or make it in another size elsewhere."""
    torch.manual_seed(3)

    def work() -> None:
        x = torch.randn(9, 3, 6).to("tpu").requires_grad_()
        labels = torch.randint(1, 5, (3, 4)).to("tpu")
        lengths = torch.tensor([9, 4, 6]), torch.tensor([4, 1, 0])
        loss = F.ctc_loss(x.log_softmax(2), labels, *lengths)
        assert loss.item() > 0
        loss.backward()
        for mode in ("sum", "mean", "max"):
            bags = nn.EmbeddingBag(10, 3, mode=mode).to("tpu")
            y = bags(labels.flatten(), torch.tensor([0, 4, 4]).to("tpu"))
            assert y.sum().item()
            y.square().sum().backward()
            bags.weight.grad.tolist()
        x.grad.tolist()

    assert judged(work) >= 7


def test_gradients_that_are_zero_but_for_rounding_pass() -> None:
    """Those of a bias before a norm, and their squares in the optimizer."""
    torch.manual_seed(7)

    def work() -> None:
        conv, head = nn.Conv2d(3, 8, 1).to("tpu"), nn.Linear(8, 5).to("tpu")
        optimizer = torch.optim.AdamW([*conv.parameters(), *head.parameters()], betas=(0.5, 0.99))
        for step in range(12):
            x = torch.randn(3 + step % 2, 3, 11, 11).to("tpu")
            y = F.instance_norm(conv(x))
            y = y + 0.5 * y.roll(2, -1)
            optimizer.zero_grad()
            F.mse_loss(head(y.mean((2, 3))), torch.ones(len(x), 5).to("tpu")).backward()
            optimizer.step()

    with override(verify="sample:1"):
        assert judged(work) >= 12


def test_a_wrong_program_raises_with_op_line_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.linspace(0, 1, 7).to("tpu")
    entry = REGISTRY.get("aten.sin.default")
    assert entry is not None
    cosine = REGISTRY.get("aten.cos.default")
    assert cosine is not None
    actual = compute.call_lowering

    def call(e, *args, **kwargs):
        return actual(cosine if e is entry else e, *args, **kwargs)

    monkeypatch.setattr(compute, "call_lowering", call)
    y = x * 2 + x.sin()
    with pytest.raises(VerificationError, match="of 3 ops") as raised:
        y.cpu()
    values = raised.value.values
    assert values["element"] == "[0]"
    assert (float(values["of the program"]), float(values["op by op"])) == (1.0, 0.0)
    assert "test_verification.py" in str(raised.value.line)
    monkeypatch.undo()
    torch.testing.assert_close(
        (x * 2 + x.sin()).cpu(), torch.linspace(0, 1, 7).mul(2) + x.cpu().sin()
    )


def test_one_run_in_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        x = torch.ones(3, device="tpu")
        for _ in range(9):
            x = x * 1.5 + 1
            x.tolist()

    with override(verify="sample:4"):
        assert judged(work) == 3
    with override(verify="off"):
        _C.clear_programs()
        assert judged(work) == 0


def test_a_program_that_takes_the_memory_of_its_input() -> None:
    x = torch.arange(5.0, device="tpu")
    x.sum().item()

    def work() -> None:
        x.mul_(3).add_(1)
        assert x.tolist() == [1.0, 4.0, 7.0, 10.0, 13.0]

    assert judged(work) == 1


def test_windows_are_those_of_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads and writes through views, with the geometry that the recorder finds."""
    seen = []
    for name in ("read", "write"):
        actual = getattr(windows, name)

        def noted(base, access, *args, actual=actual):
            seen.append(access.form)
            return actual(base, access, *args)

        monkeypatch.setattr(windows, name, noted)

    def work() -> None:
        x = torch.arange(24.0, device="tpu").view(2, 3, 4)
        x[:, 1:3].mul_(10)
        x.transpose(0, 2)[1, ::2] = -1
        x.diagonal(dim1=0, dim2=1).add_(100)
        x[1].expand(2, 3, 4).sum(0)
        x.view(-1)[3:21:5].zero_()
        x[:, 0].copy_(torch.tensor(2.0, device="tpu"))
        twin = torch.arange(24.0).view(2, 3, 4)
        twin[:, 1:3].mul_(10)
        twin.transpose(0, 2)[1, ::2] = -1
        twin.diagonal(dim1=0, dim2=1).add_(100)
        twin.view(-1)[3:21:5].zero_()
        twin[:, 0].copy_(torch.tensor(2.0))
        assert torch.equal(x.cpu(), twin)

    assert judged(work) >= 1
    assert {views.SLICE, views.GENERAL} <= set(seen)
