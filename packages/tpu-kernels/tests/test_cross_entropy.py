"""The loss without logits against float64 with them."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from tpu_kernels import linear_cross_entropy
from tpu_kernels.ops.cross_entropy import loops


def inputs(tokens: int, features: int, vocabulary: int) -> tuple[torch.Tensor, ...]:
    hidden, weight = torch.randn(tokens, features), torch.randn(vocabulary, features) * 0.3
    return hidden, weight, torch.randint(vocabulary, (tokens,)), torch.randn(vocabulary)


def losses_and_gradients(
    device: str, dtype: torch.dtype, given: tuple[torch.Tensor, ...], **options: Any
) -> list[torch.Tensor]:
    hidden, weight, target, bias = given
    h, w, b = (t.to(dtype).to(device).requires_grad_() for t in (hidden, weight, bias))
    loss = linear_cross_entropy(h, w, target.to(device), b, **options)
    loss.sum().backward()
    return [t.detach().cpu().double() for t in (loss, h.grad, w.grad, b.grad) if t is not None]


@pytest.mark.parametrize(
    "tokens, features, vocabulary, options",
    [
        (7, 5, 11, {"chunk": 4}),
        (1, 3, 13, {"chunk": 13, "reduction": "sum"}),
        (6, 8, 17, {"chunk": 5, "label_smoothing": 0.1}),
        (6, 8, 16, {"chunk": 8, "softcap": 2.0, "reduction": "none"}),
        (5, 4, 7, {"ignore_index": 2, "label_smoothing": 0.2}),
    ],
)
def test_against_float64(
    tokens: int, features: int, vocabulary: int, options: dict[str, Any]
) -> None:
    given = inputs(tokens, features, vocabulary)
    got = losses_and_gradients("tpu", torch.float32, given, **options)
    want = losses_and_gradients("cpu", torch.float64, given, **options)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


def test_bfloat16() -> None:
    given = inputs(16, 32, 100)
    rounded = tuple(t.bfloat16().float() if t.is_floating_point() else t for t in given)
    got = losses_and_gradients("tpu", torch.bfloat16, given, chunk=32)
    want = losses_and_gradients("cpu", torch.float64, rounded)
    # A result has 8 bits; the sums behind it are in float32.
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=2e-2, atol=2e-3)


def test_targets_that_are_all_ignored() -> None:
    hidden, weight, target, bias = inputs(3, 4, 5)
    ignored = torch.full_like(target, -100)
    for reduction in ("sum", "none", "mean"):
        options = {"reduction": reduction}
        got = losses_and_gradients("tpu", torch.float32, (hidden, weight, ignored, bias), **options)
        want = losses_and_gradients(
            "cpu", torch.float64, (hidden, weight, ignored, bias), **options
        )
        torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    "bias",
    [
        [-math.inf, 0, 1, 2, 3],
        [-math.inf, -math.inf, -math.inf, 2, 3],  # more than the first chunk
        [0, 1, 2, -math.inf, -math.inf],
        [0, math.inf, 2, 3, 4],
        [0, 1, math.nan, 3, 4],
        [-math.inf] * 5,
    ],
)
def test_logits_that_are_not_finite(bias: list[float], smoothing: float) -> None:
    hidden, weight, _, _ = inputs(3, 4, 5)
    target = torch.tensor([3, 4, 3])
    given = hidden, weight, target, torch.tensor(bias)
    options = {"chunk": 2, "label_smoothing": smoothing, "reduction": "none"}
    got = losses_and_gradients("tpu", torch.float32, given, **options)
    want = losses_and_gradients("cpu", torch.float64, given, **options)
    torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-4, atol=1e-5)


def test_a_small_loss_beside_large_logits() -> None:
    hidden, weight = torch.ones(1, 1), torch.tensor([[1000.0], [990.0]])
    given = hidden, weight, torch.tensor([0]), torch.zeros(2)
    got = losses_and_gradients("tpu", torch.float32, given)[0]
    want = losses_and_gradients("cpu", torch.float64, given)[0]
    torch.testing.assert_close(got, want, rtol=1e-2, atol=0)


@pytest.mark.parametrize("label", [5, -1, -7, 2**32 + 1])
def test_labels_that_are_no_classes_raise_at_the_next_read(label: int) -> None:
    hidden, weight, _, _ = (x.to("tpu") for x in inputs(3, 4, 5))
    target = torch.tensor([0, label, 1]).to("tpu")

    def batched(w: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(hidden, w, target)

    for compute in (
        lambda: batched(weight),
        lambda: torch.compile(batched)(weight),
        lambda: torch.vmap(batched, in_dims=1)(weight[:, None].expand(5, 2, 4)),
    ):
        loss = compute()
        with pytest.raises(IndexError, match=rf"^Target {label} is out of bounds\."):
            loss.cpu()


def test_autocast_leaves_float64() -> None:
    hidden, weight, target, _ = (x.to("tpu") for x in inputs(3, 4, 5))
    with torch.autocast("tpu", torch.bfloat16):
        got = linear_cross_entropy(hidden.double(), weight.double(), target)
    want = linear_cross_entropy(hidden.double().cpu(), weight.double().cpu(), target.cpu())
    torch.testing.assert_close(got.cpu(), want)


def test_the_plain_path_and_sequences() -> None:
    hidden, weight = torch.randn(2, 3, 4).to("tpu"), torch.randn(9, 4).to("tpu")
    target = torch.randint(9, (2, 3)).to("tpu")
    for reduction in ("mean", "none"):
        chunked = linear_cross_entropy(hidden, weight, target, chunk=4, reduction=reduction)
        plain = linear_cross_entropy(hidden, weight, target, plain=True, reduction=reduction)
        assert chunked.shape == plain.shape
        torch.testing.assert_close(chunked.cpu(), plain.cpu())


def test_memory_is_a_fraction_of_that_of_the_logits() -> None:
    tokens, features, vocabulary, chunk = 1024, 64, 16384, 512

    def temporaries(size: int) -> int:
        def gradients(h: jax.Array, w: jax.Array, t: jax.Array) -> Any:
            options = (h, w, t, None, 0.0, 0.0, size)
            losses, sums, of_hidden = loops.forward(*options, True)
            return losses.sum(), of_hidden, loops.backward(losses, sums, *options)[0]

        avals = [
            jax.ShapeDtypeStruct((tokens, features), jnp.float32),
            jax.ShapeDtypeStruct((vocabulary, features), jnp.float32),
            jax.ShapeDtypeStruct((tokens,), jnp.int32),
        ]
        analysis = jax.jit(gradients).lower(*avals).compile().memory_analysis()
        return int(analysis.temp_size_in_bytes)

    logits = tokens * vocabulary * 4
    assert temporaries(chunk) < 0.2 * logits < logits <= temporaries(vocabulary)


@pytest.mark.parametrize(
    "change, text",
    [
        ({"weight": torch.ones(5, 3)}, "features"),
        ({"target": torch.zeros(2, dtype=torch.long)}, "target has the shape"),
        ({"bias": torch.ones(4)}, "bias has the shape"),
        ({"reduction": "max"}, "mean, sum or none"),
    ],
)
def test_arguments_that_do_not_fit(change: dict[str, Any], text: str) -> None:
    hidden, weight, target, bias = inputs(3, 4, 5)
    given = {"hidden": hidden, "weight": weight, "target": target, "bias": bias, **change}
    with pytest.raises(ValueError, match=text):
        linear_cross_entropy(**given)


def test_a_compiled_loss_is_one_graph() -> None:
    hidden, weight, target, _ = inputs(7, 5, 11)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True)
    got = compiled(hidden.to("tpu"), weight.to("tpu"), target.to("tpu"))
    torch.testing.assert_close(got.cpu(), linear_cross_entropy(hidden, weight, target))


@pytest.mark.usefixtures("fusion_emitters")
def test_gradgradcheck() -> None:
    hidden, weight, target, _ = inputs(2, 2, 3)
    given = [x.double().to("tpu").requires_grad_() for x in (hidden, weight)]
    assert torch.autograd.gradgradcheck(
        lambda h, w: linear_cross_entropy(h, w, target.to("tpu"), softcap=2.0),
        given,
        fast_mode=True,
    )


def test_gradients_of_gradients() -> None:
    """Up to the third derivative, by hidden states, weight and bias."""
    options: dict[str, Any] = {"label_smoothing": 0.1, "softcap": 2.0, "ignore_index": 3}
    given = [x.double() for x in inputs(3, 2, 5)]

    def orders(device: str) -> list[torch.Tensor]:
        hidden, weight, target, bias = (x.to(device) for x in given)
        leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
        loss = linear_cross_entropy(hidden, weight, target.long(), bias, **options)
        found: list[torch.Tensor] = []
        total = loss.square().sum()
        for last in (False, False, True):
            grads = torch.autograd.grad(total, leaves, create_graph=not last)
            found += [g.detach().cpu() for g in grads]
            total = torch.stack([(g**2).sum() for g in grads]).sum()
        return found

    torch.testing.assert_close(orders("tpu"), orders("cpu"), rtol=1e-9, atol=1e-9)


def test_a_penalty_on_the_gradient() -> None:
    """As of PyTorch, with gradients of hidden states alone, and in float32."""
    hidden, weight, target, _ = inputs(3, 4, 5)
    found = []
    for device in ("tpu", "cpu"):
        h, w = (x.to(device).requires_grad_() for x in (hidden, weight))
        loss = linear_cross_entropy(h, w, target.to(device)) ** 2
        (grad,) = torch.autograd.grad(loss, h, create_graph=True)
        (loss + grad.square().sum()).backward()
        assert h.grad is not None and w.grad is not None
        found.append([h.grad.cpu(), w.grad.cpu()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_transforms_of_functions() -> None:
    hidden, weight, target, _ = inputs(3, 4, 5)

    def sums(device: str) -> torch.Tensor:
        def loss(h: torch.Tensor) -> torch.Tensor:
            return linear_cross_entropy(h, weight.to(device), target.to(device), reduction="sum")

        return torch.func.grad(lambda h: torch.func.grad(loss)(h).square().sum())(hidden.to(device))

    torch.testing.assert_close(sums("tpu").cpu(), sums("cpu"), rtol=1e-4, atol=1e-5)
