"""Losses as models spell them, compiled: without logits, with the values of PyTorch's own."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import tpu_compile
import tpu_kernels

TOKENS, FEATURES, VOCABULARY = 6, 16, 40
Loss = Callable[[torch.Tensor, nn.Linear, torch.Tensor], torch.Tensor]


def flattened(x: torch.Tensor, head: nn.Linear, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head(x).view(-1, VOCABULARY), y.view(-1))


def upcast(x: torch.Tensor, head: nn.Linear, y: torch.Tensor) -> torch.Tensor:
    logits = F.linear(x, head.weight)
    return F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction="sum")


def shifted(x: torch.Tensor, head: nn.Linear, y: torch.Tensor) -> torch.Tensor:
    logits = head(x)[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, logits.size(-1)), y[..., 1:].reshape(-1))


def smoothed(x: torch.Tensor, head: nn.Linear, y: torch.Tensor) -> torch.Tensor:
    loss = nn.CrossEntropyLoss(label_smoothing=0.1, reduction="none", ignore_index=3)
    return loss(head(x).reshape(-1, VOCABULARY), y.clamp(0).reshape(-1)).mean()


def capped(x: torch.Tensor, head: nn.Linear, y: torch.Tensor) -> torch.Tensor:
    logits = torch.tanh(head(x) / 2.0) * 2.0
    return F.cross_entropy(logits[:, 1:].flatten(0, 1), y[:, 1:].flatten())


def of_transformers(x: torch.Tensor, head: nn.Linear, y: torch.Tensor) -> torch.Tensor:
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss(head(x), y, VOCABULARY, num_items_in_batch=torch.tensor(7.0))


def under_autocast(x: torch.Tensor, head: nn.Linear, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        logits = head(x)
    return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())


def with_a_second_reader(x: torch.Tensor, head: nn.Linear, y: torch.Tensor) -> torch.Tensor:
    logits = head(x).flatten(0, 1)
    return F.cross_entropy(logits, y.flatten()) + 1e-3 * logits.logsumexp(-1).square().mean()


def of_sliced_columns(x: torch.Tensor, head: nn.Linear, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head(x)[..., : VOCABULARY - 1].flatten(0, 1), y.flatten() % 30)


def with_class_weights(x: torch.Tensor, head: nn.Linear, y: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(1, 2, VOCABULARY, device=x.device)
    return F.cross_entropy(head(x).flatten(0, 1), y.flatten(), weights)


def of_a_part(x: torch.Tensor, head: nn.Linear, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((head(x) / 4.0).flatten(0, 1), y.flatten())


def without_gradients(x: torch.Tensor, head: nn.Linear, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits = head(x).flatten(0, 1)
    return F.cross_entropy(logits, y.flatten()) + head.weight.square().sum() + x.sum()


def rounded(x: torch.Tensor, head: nn.Linear, y: torch.Tensor) -> torch.Tensor:
    logits = torch.div(head(x), 2.0, rounding_mode="floor").tanh() * 2.0
    return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + x.sum() + head.weight.sum()


def in_float64(x: torch.Tensor, head: nn.Linear, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head(x).double().flatten(0, 1), y.flatten())


def broadcast(x: torch.Tensor, head: nn.Linear, y: torch.Tensor) -> torch.Tensor:
    logits = F.linear(x, head.weight, x.sum().reshape(1))
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def written_hidden(x: torch.Tensor, head: nn.Linear, y: torch.Tensor) -> torch.Tensor:
    x = x.detach().clone()
    with torch.no_grad():
        logits = head(x).flatten(0, 1)
        x[:, 1:].zero_()
        loss = F.cross_entropy(logits, y.flatten())
    return loss + x.sum() + head.weight.sum()


def written_weight(x: torch.Tensor, head: nn.Linear, y: torch.Tensor) -> torch.Tensor:
    weight = head.weight.detach().clone()
    with torch.no_grad():
        logits = F.linear(x, weight).flatten(0, 1)
        torch.mul(weight, 2, out=weight)
        loss = F.cross_entropy(logits, y.flatten())
    return loss + x.sum() + head.weight.sum()


def written_target(x: torch.Tensor, head: nn.Linear, y: torch.Tensor) -> torch.Tensor:
    logits = head(x).flatten(0, 1)
    y = y.flatten().clone()
    y[y == 3] = -100
    return F.cross_entropy(logits, y)


def gradients(
    device: str, loss: Loss, bias: bool, compiled: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(0)
    head = nn.Linear(FEATURES, VOCABULARY, bias=bias)
    x, y = torch.randn(2, TOKENS, FEATURES), torch.randint(VOCABULARY, (2, TOKENS))
    y[0, 2] = -100
    head, x, y = head.to(device), x.to(device).requires_grad_(), y.to(device)
    torch.compiler.reset()  # what was compiled with another choice stays
    function = torch.compile(loss, fullgraph=True) if compiled else loss
    value = function(x, head, y)
    value.backward()
    found = [x.grad, *(p.grad for p in head.parameters())]
    return value.detach().cpu(), [g.cpu() for g in found if g is not None]


def check(loss: Loss, bias: bool, bound: float = 1e-5) -> None:
    value, grads = gradients("tpu", loss, bias, compiled=True)
    expected, of_cpu = gradients("cpu", loss, bias, compiled=False)
    assert value.dtype == expected.dtype
    torch.testing.assert_close([value, *grads], [expected, *of_cpu], rtol=bound, atol=bound)


@pytest.mark.parametrize(
    ("loss", "bias", "bound"),
    [
        (flattened, True, 1e-5),
        (upcast, False, 1e-5),
        (shifted, False, 1e-5),
        (smoothed, True, 1e-5),
        (capped, False, 1e-5),
        (of_transformers, False, 1e-5),
        (written_target, True, 1e-5),
        (under_autocast, False, 2e-2),  # products of bfloat16; the CPU rounds the logits, too
    ],
)
def test_compiled_losses_need_no_logits(
    loss: Loss, bias: bool, bound: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tpu_compile")
    with tpu_kernels.using(cross_entropy="chunked"):
        check(loss, bias, bound)
    assert "are not built" in caplog.text


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (with_a_second_reader, "something else reads them"),
        (of_a_part, "divided by a number"),
        (of_sliced_columns, ""),
        (with_class_weights, ""),
        (without_gradients, ""),
        (rounded, ""),
        (in_float64, ""),
        (broadcast, ""),
        (written_hidden, "may be written"),
        (written_weight, "may be written"),
    ],
)
def test_logits_that_are_needed_are_built(
    loss: Loss, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tpu_compile")
    with tpu_kernels.using(cross_entropy="chunked"):
        check(loss, bias=False)
    assert "are not built" not in caplog.text and reason in caplog.text


@pytest.mark.parametrize("dynamic", [None, True])
def test_batches_and_lengths_that_vary(
    dynamic: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tpu_compile")
    torch.compiler.reset()
    head = nn.Linear(FEATURES, VOCABULARY)
    on_device = copy.deepcopy(head).to("tpu")

    def loss(x: torch.Tensor, y: torch.Tensor, head: nn.Linear) -> torch.Tensor:
        return F.cross_entropy(head(x).view(-1, VOCABULARY), y.view(-1))

    with tpu_kernels.using(cross_entropy="chunked"):
        compiled = torch.compile(lambda x, y: loss(x, y, on_device), dynamic=dynamic)
        for batch, length in ((2, 5), (3, 7), (4, 1), (5, 6)):
            x, y = torch.randn(batch, length, FEATURES), torch.randint(VOCABULARY, (batch, length))
            x_on_device = x.to("tpu").requires_grad_()
            value, expected = compiled(x_on_device, y.to("tpu")), loss(x.requires_grad_(), y, head)
            value.backward()
            expected.backward()
            assert x.grad is not None and x_on_device.grad is not None
            found = [value.detach().cpu(), x_on_device.grad.cpu()]
            torch.testing.assert_close(found, [expected.detach(), x.grad], rtol=1e-5, atol=1e-5)
    assert "are not built" in caplog.text


@pytest.mark.parametrize("label", [VOCABULARY, -7])
def test_labels_that_are_no_classes_raise_at_the_next_read(label: int) -> None:
    torch.compiler.reset()
    head, x = nn.Linear(FEATURES, VOCABULARY).to("tpu"), torch.randn(2, 3, FEATURES, device="tpu")
    y = torch.full((2, 3), label, device="tpu")
    with tpu_kernels.using(cross_entropy="chunked"):
        value = torch.compile(flattened)(x, head, y)
    with pytest.raises(IndexError, match=rf"^Target {label} is out of bounds\."):
        value.item()


def test_forward_derivatives_need_logits(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tpu_compile")
    torch.compiler.reset()
    x, w, y = torch.randn(6, 4), torch.randn(9, 4), torch.randint(9, (6,))

    def tangent(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def loss(x: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(F.linear(x, w), y)

        found: torch.Tensor = torch.func.jvp(loss, (x,), (x * 2,))[1]
        return found

    with tpu_kernels.using(cross_entropy="chunked"):
        got = torch.compile(tangent)(x.to("tpu"), w.to("tpu"), y.to("tpu"))
    torch.testing.assert_close(got.cpu(), tangent(x, w, y), rtol=1e-5, atol=1e-5)
    assert "are not built" not in caplog.text


def test_classes_without_a_chance() -> None:
    """A bias of -inf, as for the padding of a vocabulary."""

    def loss(x: torch.Tensor, head: nn.Linear, y: torch.Tensor) -> torch.Tensor:
        bias = torch.where(torch.arange(VOCABULARY, device=x.device) < 3, -float("inf"), 0.0)
        return F.cross_entropy(F.linear(x, head.weight, bias).flatten(0, 1), y.flatten().clamp(3))

    with tpu_kernels.using(cross_entropy="chunked"):
        check(loss, bias=False)


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [({}, "fewer than"), ({"cross_entropy": "plain"}, "'plain' of cross_entropy is named")],
)
def test_small_logits_are_built(
    chosen: dict[str, str], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tpu_compile")
    with tpu_kernels.using(**chosen):
        check(flattened, bias=True)
    assert reason in caplog.text


class Head(nn.Module):
    """The end of a language model of a realistic size."""

    def __init__(self, features: int, vocabulary: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(features))
        self.head = nn.Linear(features, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x * self.scale)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).float(), y)


def step_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    logits = model(x)
    loss = F.cross_entropy(logits.float(), y)
    loss.backward()
    return loss, logits


def loss_of_written(model: Head, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    bias = torch.zeros_like(model.head.weight[:, 0])
    logits = F.linear(x * model.scale, model.head.weight, bias)
    bias.add_(1)
    return F.cross_entropy(logits.float(), y)


def loss_of_unseen_writes(model: Head, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    hidden = x * model.scale
    logits = model.head(hidden)
    hidden.data.zero_()
    return F.cross_entropy(logits.float(), y)


def loss_without_gradients(model: Head, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits = model(x)
    return F.cross_entropy(logits.float(), y) + model.scale.sum()


def plan_of(tokens: int, features: int, vocabulary: int, **options: Any) -> tpu_compile.aot.Plan:
    with torch.device("meta"):
        model = Head(features, vocabulary).bfloat16()
        x = torch.empty(tokens, features, dtype=torch.bfloat16)
        y = torch.empty(tokens, dtype=torch.int64)
    return tpu_compile.aot(model, (x, y), topology="v5e:1x1", **options)


def test_a_program_for_a_tpu_never_has_the_logits() -> None:
    tokens, features, vocabulary = 16384, 512, 32000
    with tpu_kernels.using(cross_entropy="plain"):
        plain = plan_of(tokens, features, vocabulary, loss=loss_of)
    kernels = plan_of(tokens, features, vocabulary, loss=loss_of)
    assert kernels.memory.temporaries is not None and plain.memory.temporaries is not None
    assert plain.memory.temporaries >= tokens * vocabulary * 2
    assert kernels.memory.temporaries <= 0.2 * plain.memory.temporaries
    assert kernels.cost is not None and plain.cost is not None
    assert kernels.cost.hbm_bytes <= 0.2 * plain.cost.hbm_bytes
    # Forward, the gradient of hidden states with it, and weights' with the logits once more.
    product = 2 * tokens * features * vocabulary
    assert plain.cost.product_flops == 3 * product and kernels.cost.product_flops == 4 * product
    assert kernels.model_flops == plain.model_flops
    assert any("are not built" in note for note in kernels.notes)
    assert any("'plain' of cross_entropy is named" in note for note in plain.notes)


def test_logits_that_a_step_returns_are_built() -> None:
    with tpu_kernels.using(cross_entropy="chunked"):
        plan = plan_of(256, 128, 1024, step=step_of)
    assert "The logits of a loss are built: something else reads them." in plan.notes


@pytest.mark.parametrize("loss", [loss_of_written, loss_of_unseen_writes, loss_without_gradients])
def test_plans_build_logits_of_what_is_not_there_any_more(loss: Any) -> None:
    with tpu_kernels.using(cross_entropy="chunked"):
        plan = plan_of(256, 128, 1024, loss=loss)
    assert not any("are not built" in note for note in plan.notes)
    assert not any(kernel.op == "cross_entropy" for kernel in plan.kernels)


@pytest.mark.parametrize(
    ("loss", "choice", "why"),
    [
        (flattened, "without logits", ""),
        (with_a_second_reader, "with logits", "something else reads them"),
        (with_class_weights, "with logits", "it has class weights, or options that are no numbers"),
        (without_gradients, "with logits", "they are no linear layer's"),
    ],
)
def test_the_report_says_what_was_chosen(loss: Loss, choice: str, why: str) -> None:
    torch.tpu.reset_metrics()
    with tpu_kernels.using(cross_entropy="chunked"):
        gradients("tpu", loss, bias=False, compiled=True)
    report = torch.tpu.compile_report()
    (table,) = [t for t in report.tables if t.title == "Kernels"]
    (row,) = [r for r in table.rows if r[1].endswith("logits")]
    assert row[0] == "cross_entropy" and row[1] == choice and row[4].startswith(why)
    assert bool(row[4]) == bool(why)
    # The line of the call, in the loss.
    assert row[3].startswith(f"{__name__}.py:") and row[3].endswith(f" in {loss.__name__}")
    # Where the logits are not built, what computes the loss is named, with its line.
    chunked = [r for r in table.rows if r[1] == "chunked"]
    assert bool(chunked) == (choice == "without logits")
    assert all(r[0] == "cross_entropy" and r[4] == "it is named" for r in chunked)
    assert choice in report.to_html()
