"""Rows M: mixed precision."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F


def check_amp_dtypes() -> None:
    assert torch.bfloat16 in torch.tpu.get_amp_supported_dtype()


def check_autocast_default() -> None:
    a = torch.ones(4, 4, device="tpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.autocast("tpu"):
            assert torch.is_autocast_enabled("tpu")
            assert torch.get_autocast_dtype("tpu") == torch.bfloat16
            assert (a @ a).dtype == torch.bfloat16
            with torch.autocast("tpu", enabled=False):
                assert (a @ a).dtype == torch.float32
        assert torch.amp.is_autocast_available("tpu")
    assert not torch.is_autocast_enabled("tpu")
    assert (a @ a).dtype == torch.float32


def check_autocast_rules() -> None:
    a = torch.rand(4, 4, device="tpu")
    low = a.to(torch.bfloat16)
    image, kernel = torch.rand(1, 2, 8, 8, device="tpu"), torch.rand(3, 2, 3, 3, device="tpu")
    heads = torch.rand(1, 2, 4, 8, device="tpu")
    with torch.autocast("tpu"):
        lower = {
            "mm": torch.mm(a, a),
            "matmul": torch.matmul(a, a),
            "bmm": torch.bmm(a[None], a[None]),
            "addmm": torch.addmm(a, a, a),
            "linear": F.linear(a, a, a[0]),
            "conv2d": F.conv2d(image, kernel),
            "attention": F.scaled_dot_product_attention(heads, heads, heads),
            "einsum": torch.einsum("ij,jk->ik", a, a),
            "prelu": F.prelu(a, a[0, :1]),
        }
        float32 = {
            "softmax": torch.softmax(low, 0),
            "log_softmax": F.log_softmax(low, 0),
            "layer_norm": F.layer_norm(low, (4,)),
            "group_norm": F.group_norm(low, 2),
            "exp": low.exp(),
            "log": low.log(),
            "pow": low.pow(2.0),
            "rsqrt": low.rsqrt(),
            "sum": low.sum(),
            "cumsum": low.cumsum(0),
            "prod": low.prod(),
            "norm": low.norm(),
            "mse_loss": F.mse_loss(low, low),
            "nll_loss": F.nll_loss(low, torch.tensor([0, 1, 2, 3], device="tpu")),
            "cosine_similarity": F.cosine_similarity(low, low),
        }
        promoted = {
            "cat": torch.cat([a, low]),
            "stack": torch.stack([low, a]),
            "addcmul": torch.addcmul(a, low, low),
            "atan2": torch.atan2(low, a),
        }
        unchanged = {"add": low + low, "relu": low.relu()}
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(low.sigmoid(), low.sigmoid())
    for values, dtype in (
        (lower, torch.bfloat16),
        (float32, torch.float32),
        (promoted, torch.float32),
        (unchanged, torch.bfloat16),
    ):
        wrong = {name: value.dtype for name, value in values.items() if value.dtype != dtype}
        assert not wrong, (dtype, wrong)

    model = torch.nn.Linear(4, 4).to("tpu")
    with torch.autocast("tpu"):
        loss = F.mse_loss(model(a), a)
    loss.backward()
    assert model.weight.grad.dtype == torch.float32
    reference = torch.nn.Linear(4, 4)
    reference.load_state_dict({k: v.cpu() for k, v in model.state_dict().items()})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        F.mse_loss(reference(a.cpu()), a.cpu()).backward()
    torch.testing.assert_close(  # both round to bfloat16, at different places
        model.weight.grad.cpu(), reference.weight.grad, rtol=2e-2, atol=2e-2
    )


def check_grad_scaler() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, 1.0], device="tpu"))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = torch.amp.GradScaler("tpu", init_scale=4.0, growth_interval=1)
    assert scaler.is_enabled()
    scaler.scale((2 * weight).sum()).backward()
    assert weight.grad.tolist() == [8.0, 8.0]
    scaler.unscale_(optimizer)
    assert weight.grad.tolist() == [2.0, 2.0]
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.0, 0.0]
    assert scaler.get_scale() == 8.0

    weight.grad = torch.tensor([float("inf"), 1.0], device="tpu")
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.0, 0.0]
    assert scaler.get_scale() == 4.0
    state = scaler.state_dict()
    again = torch.amp.GradScaler("tpu")
    again.load_state_dict(state)
    assert again.state_dict() == state
