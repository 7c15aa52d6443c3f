"""`scaled_dot_product_attention` on the device: when it is one op, and that it is PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tpu_core import modes
from tpu_core.metrics import METRICS

SHAPE = (2, 4, 5, 8)
# torch 2.14 makes one op of tensors of three dims too.
TAKES_THREE_DIMS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal, more keys": {"is_causal": True, "keys": (2, 4, 9, 8)},
    "scale": {"scale": 0.3},
    "mask of bools": {"mask": torch.rand(2, 1, 5, 5) > 0.3},
    "mask of bools over rows": {"mask": torch.tensor([[True, False, True, True, False]])},
    "mask with a gradient": {"mask": torch.randn(2, 1, 5, 5)},
    "mask, broadcast, with a gradient": {"mask": torch.randn(5, 5)},
    "nothing to attend to": {"mask": torch.zeros(5, 5, dtype=torch.bool)},
    "grouped queries": {"enable_gqa": True, "keys": (2, 2, 5, 8)},
    "one query": {"shape": (2, 4, 1, 8), "keys": (2, 4, 7, 8)},
    "no query": {"shape": (2, 4, 0, 8), "keys": (2, 4, 7, 8)},
    "wide": {"dtype": torch.float64},
    "short": {"dtype": torch.bfloat16},
    "three dims": {"shape": (4, 5, 8), "several": not TAKES_THREE_DIMS},
    "five dims": {"shape": (2, 2, 4, 5, 8), "several": True},
    "one batch of keys for all": {"keys": (1, 4, 5, 8), "several": True},
}


def run(device: str, **options: Any) -> list[torch.Tensor]:
    """Output and gradients on a device."""
    torch.manual_seed(0)
    options = dict(options)
    shape = options.pop("shape", SHAPE)
    keys, dtype = options.pop("keys", shape), options.pop("dtype", torch.float32)
    inputs = [torch.randn(s, dtype=dtype).to(device).requires_grad_() for s in (shape, keys, keys)]
    mask = options.pop("mask", None)
    if mask is not None:
        mask = mask.to(device)
        options["attn_mask"] = mask.requires_grad_(mask.is_floating_point())
        inputs += [mask] * mask.requires_grad
    out = F.scaled_dot_product_attention(*inputs[:3], **options)
    weight = torch.randn(out.shape, dtype=dtype).to(device)
    grads = torch.autograd.grad(out, inputs, weight)
    return [x.detach().cpu() for x in (out, *grads)]


@pytest.mark.parametrize("name", CASES)
def test_one_op_that_gives_what_the_cpu_gives(name: str) -> None:
    options = dict(CASES[name])
    several = options.pop("several", False)
    with modes.using("segments"):
        before = METRICS.snapshot()
        actual = run("tpu", **options)
        ops = METRICS.delta(before)["ops"]
    expected = run("cpu", **options)
    # bfloat16 rounds probabilities to eight bits.
    close = {"rtol": 2e-2, "atol": 2e-2} if options.get("dtype") == torch.bfloat16 else {}
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, **close)
    # Beside it, only what makes numbers of a mask of bools, and of a fused mask's gradient.
    assert (ops > 10) == several


def test_other_layouts() -> None:
    x = torch.randn(2, 5, 4, 8)
    heads = x.transpose(1, 2)
    actual = F.scaled_dot_product_attention(*[x.to("tpu").transpose(1, 2)] * 3)
    torch.testing.assert_close(actual.cpu(), F.scaled_dot_product_attention(heads, heads, heads))


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"attn_mask": torch.zeros(3, 3)}, SHAPE),
        ({}, (2, 2, 5, 8)),
        ({}, (2, 4, 5, 9)),
    ],
    ids=["mask", "heads", "width"],
)
def test_bad_input_raises_what_the_cpu_raises(options: dict[str, Any], keys: Any) -> None:
    messages = []
    for device in ("cpu", "tpu"):
        inputs = [torch.zeros(s, device=device) for s in (SHAPE, keys, keys)]
        moved = {k: v.to(device) for k, v in options.items()}
        with pytest.raises(RuntimeError) as caught:
            F.scaled_dot_product_attention(*inputs, **moved)
        messages.append(str(caught.value).splitlines()[0])
    assert messages[0] == messages[1]


@pytest.mark.parametrize("kind", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_the_kind_can_be_chosen(kind: SDPBackend) -> None:
    with sdpa_kernel(kind):
        before = METRICS.snapshot()
        actual = run("tpu")
        ops = METRICS.delta(before)["ops"]
    assert (ops > 10) == (kind == SDPBackend.MATH)
    for got, want in zip(actual, run("cpu"), strict=True):
        torch.testing.assert_close(got, want)


def test_a_kind_that_cannot_be_is_an_error() -> None:
    x = torch.zeros(2, 2, 4, 5, 8, device="tpu")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="No viable"):
        F.scaled_dot_product_attention(x, x, x)


def test_dropout_draws_and_its_absence_does_not() -> None:
    q, k = (torch.randn(2, 2, 32, 8, device="tpu") for _ in range(2))
    v = torch.eye(32, device="tpu").expand(2, 2, 32, 32)

    def after(p: float) -> tuple[torch.Tensor, torch.Tensor]:
        torch.tpu.manual_seed(5)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=p).cpu()
        return out, torch.rand(3, device="tpu").cpu()

    (kept, drawn), (again, _), (whole, first) = after(0.25), after(0.25), after(0.0)
    torch.tpu.manual_seed(5)
    assert torch.equal(first, torch.rand(3, device="tpu").cpu())
    assert not torch.equal(drawn, first)
    assert torch.equal(kept, again)
    torch.testing.assert_close(kept[kept != 0], whole[kept != 0] / 0.75)
    assert 0.2 < (kept == 0).float().mean() < 0.3


def test_transforms_see_plain_ops() -> None:
    def f(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q).square().sum()

    q = torch.randn(3, 1, 2, 3, 4)
    each = torch.func.vmap(torch.func.grad(f))
    torch.testing.assert_close(each(q.to("tpu")).cpu(), each(q))
    # PyTorch has no forward gradient of its own fused attention: its plain ops are the reference.
    with sdpa_kernel(SDPBackend.MATH):
        _, expected = torch.func.jvp(f, (q[0],), (q[1],))
    _, tangent = torch.func.jvp(f, (q[0].to("tpu"),), (q[1].to("tpu"),))
    torch.testing.assert_close(tangent.cpu(), expected)


def test_a_bias_alone_may_have_a_gradient() -> None:
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    bias = torch.randn(2, 3, 5)

    def gradient(device: str) -> torch.Tensor:
        leaf = bias.to(device).requires_grad_()
        out = F.scaled_dot_product_attention(q.to(device), k.to(device), k.to(device), leaf)
        return torch.autograd.grad(out.square().sum(), leaf)[0].cpu()

    torch.testing.assert_close(gradient("tpu"), gradient("cpu"))
