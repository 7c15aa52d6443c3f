"""Operands on different devices raise PyTorch's error; the few mixtures that PyTorch allows
work."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from interpreter import clean
from tpu_core import modes

MIXTURES = {
    "t @ c": lambda t, c: t @ c,
    "c @ t": lambda t, c: c @ t,
    "t + c": lambda t, c: t + c,
    "c + t": lambda t, c: c + t,
    "t.add_(c)": lambda t, c: t.add_(c),
    "c.add_(t)": lambda t, c: c.add_(t),
    "t == c": lambda t, c: t == c,
    "addmm": lambda t, c: torch.addmm(c, t, t),
    "bmm": lambda t, c: torch.bmm(t[None], c[None]),
    "dot": lambda t, c: torch.dot(t[0], c[0]),
    "einsum": lambda t, c: torch.einsum("ij,jk", t, c),
    "cat": lambda t, c: torch.cat([t, c]),
    "stack": lambda t, c: torch.stack([c, t]),
    "linear": lambda t, c: F.linear(t, c),
    "linear bias": lambda t, c: F.linear(t, t, c[0]),
    "conv": lambda t, c: F.conv1d(t[None], c[None]),
    "embedding of indices": lambda t, c: F.embedding(torch.tensor([0, 1]), t),
    "embedding of weights": lambda t, c: F.embedding(torch.tensor([0, 1], device="tpu"), c),
    "gather": lambda t, c: t.gather(0, torch.zeros(1, 1, dtype=torch.int64)),
    "scatter": lambda t, c: t.scatter(0, torch.zeros(1, 1, dtype=torch.int64), t),
    "where": lambda t, c: torch.where(c > 0, t, t),
    "masked_fill": lambda t, c: t.masked_fill(c > 0, 1.0),
    "layer_norm": lambda t, c: F.layer_norm(t, (3,), c[0]),
    "batch_norm": lambda t, c: F.batch_norm(t, c[0], c[1], training=True),
    "cross_entropy": lambda t, c: F.cross_entropy(t, torch.tensor([0, 1, 2])),
    "mse_loss": lambda t, c: F.mse_loss(t, c),
    "lerp": lambda t, c: torch.lerp(t, c, 0.5),
    "addcmul": lambda t, c: torch.addcmul(t, t, c),
    "equal": lambda t, c: torch.equal(t, c),
    "allclose": lambda t, c: torch.allclose(t, c),
    "out": lambda t, c: torch.add(t, t, out=c),
    "out of c": lambda t, c: torch.add(c, c, out=t),
    "foreach": lambda t, c: torch._foreach_add([t], [c]),
    "0-d in a product": lambda t, c: torch.mm(t, torch.tensor(2.0)),
    "index_put values": lambda t, c: t.index_put((torch.tensor([0]),), c[0]),
}


@pytest.mark.parametrize("mode", modes.names())
def test_mixtures_raise(mode):
    t, c = torch.ones(3, 3, device="tpu"), torch.ones(3, 3)
    wrong = {}
    with torch.tpu.set_eager_mode(mode):
        for name, mixture in MIXTURES.items():
            try:
                mixture(t, c)
                wrong[name] = "nothing raised"
            except RuntimeError as error:
                if not str(error).startswith("Expected all tensors to be on the same device"):
                    wrong[name] = str(error)
        assert wrong == {}
        assert t.tolist() == c.tolist()


def test_an_index_on_the_device_of_a_cpu_tensor():
    c, index = torch.ones(3, 3), torch.tensor([0, 1], device="tpu")
    text = r"indices should be either on cpu or on the same device as the indexed tensor \(cpu\)"
    with pytest.raises(RuntimeError, match=text):
        c[index]
    with pytest.raises(RuntimeError, match=text):
        c[index] = 1.0


@pytest.mark.parametrize("mode", modes.names())
def test_mixtures_that_pytorch_allows(mode):
    t, c = torch.ones(3, 3, device="tpu"), torch.ones(3, 3)
    with torch.tpu.set_eager_mode(mode):
        assert (t + torch.tensor(2.0)).sum().item() == 27
        assert (torch.tensor(2.0) * t).device.type == "tpu"
        assert t[torch.tensor([0, 1])].shape == (2, 3)
        assert torch.where(t > 0, t, torch.tensor(0.0)).device.type == "tpu"
        t[0] = c[0] * 5
        c[0] = t[0] + 1
        t.index_put_((torch.tensor([1]),), torch.tensor(2.0))
        assert t.sum(1).tolist() == [15.0, 6.0, 3.0]
        assert c.sum(1).tolist() == [18.0, 3.0, 3.0]


def test_several_devices_of_one_platform():
    out = clean(
        """
        import torch
        a, b = torch.ones(2, 2, device="tpu:0"), torch.ones(2, 2, device="tpu:1")
        for use in (lambda: a @ b, lambda: a.add_(b), lambda: torch.cat([a, b])):
            try:
                use()
            except RuntimeError as error:
                print(error)
        print((a + b.to("tpu:0")).sum().item())
        """,
        TPU_NUM_DEVICES="2",
    )
    text = "Expected all tensors to be on the same device, but found at least two devices"
    assert out == f"{text}, tpu:0 and tpu:1!\n" * 3 + "8.0\n"
