"""``torch.tpu.compare``: layers on the device beside the CPU in float64."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from tpu_core.comparison import Comparison
from tpu_core.comparison.products import TpuProducts, tpu_products


class Block(nn.Module):
    """Attention and an MLP; ``change`` is applied in between."""

    def __init__(self, width: int, change=lambda x: x) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = self.change(x)
        return x + self.mlp(x)


def blocks(**changes) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(16, changes.get(f"at_{i}", lambda x: x)) for i in range(4)))


def whats(comparison: Comparison, layer: str) -> list[str]:
    return [r.what for r in comparison.rows if r.layer == layer]


def test_a_right_module_is_within_a_few_roundings() -> None:
    model = blocks()
    before = copy.deepcopy(model.state_dict())
    result = torch.tpu.compare(model, torch.randn(2, 5, 16))
    assert result.first is None and not result.outside
    assert all(r.units is not None and r.units < 8 for r in result.rows)
    assert all(r.accumulated < 1e-5 and r.absolute < 1e-3 for r in result.rows)
    assert whats(result, "2.mlp.0") == [
        *("output", "gradient of input", "gradient of weight", "gradient of bias")
    ]
    assert "All within 64 units." in str(result)
    # The user's module is left as it is.
    assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_forward_runs_before_backward_and_parts_before_the_whole() -> None:
    rows = torch.tpu.compare(blocks()[:2], torch.randn(1, 3, 16, requires_grad=True)).rows
    forward = [r.layer for r in rows if r.what == "output"]
    inner = ("norm", "attention", "mlp.0", "mlp.1", "mlp.2", "mlp")
    assert forward == [*(f"{i}{p}" for i in (0, 1) for p in (*(f".{n}" for n in inner), "")), ""]
    backward = list(dict.fromkeys(r.layer for r in rows if r.what != "output"))
    assert backward == ["1.mlp.2", *backward[1:-2], "0", ""]


def test_a_bfloat16_overflow_is_found() -> None:
    def overflows(x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.bfloat16) * 3e38).float() / 3e38

    result = torch.tpu.compare(blocks(at_2=overflows), torch.randn(2, 5, 16) * 3)
    assert result.first is not None
    assert (result.first.layer, result.first.what) == ("2", "output")
    assert math.isinf(result.first.units or 0)
    assert "First outside of the tolerance of 64 units: the output of 2 (Block)" in str(result)
    assert "<--" in str(result)


def test_a_cancellation_is_found_where_it_is() -> None:
    result = torch.tpu.compare(blocks(at_1=lambda x: (x + 3e5) - 3e5), torch.randn(2, 5, 16))
    assert result.first is not None and result.first.layer == "1"
    later = [r for r in result.rows if r.layer.startswith(("2.", "3.")) and r.what == "output"]
    # They have the error in what they are given, and none of their own.
    assert all(r.accumulated > 1e-4 and r.units < 8 for r in later)


def test_a_wrong_gradient_is_found() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g * (1.001 if g.device.type == "tpu" else 1.0)

    result = torch.tpu.compare(blocks(at_2=Wrong.apply), torch.randn(2, 5, 16))
    assert result.first is not None
    assert (result.first.layer, result.first.what) == ("2", "gradient of input")


def test_autocast_and_precision_are_those_in_force() -> None:
    model, x = blocks(), torch.randn(2, 5, 16)
    with torch.autocast("tpu"):
        result = torch.tpu.compare(model, x)
    assert {r.dtype for r in result.rows} == {torch.float32, torch.bfloat16}
    assert result.first is None
    assert 1e-4 < max(r.accumulated for r in result.rows) < 0.1
    halves = torch.tpu.compare(copy.deepcopy(model).to(torch.bfloat16), x.to(torch.bfloat16))
    assert halves.first is None and {r.dtype for r in halves.rows} == {torch.bfloat16}


def parts(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A float32 tensor as two of bfloat16, in float64."""
    high = t.to(torch.bfloat16).float()
    return high.double(), (t - high).to(torch.bfloat16).double()


def test_emulated_products_are_of_bfloat16_operands() -> None:
    torch.manual_seed(0)
    a, b, c = torch.randn(5, 7), torch.randn(7, 3), torch.randn(3)
    (a_high, a_low), (b_high, b_low) = parts(a), parts(b)
    medium = a_high @ b_high
    high = medium + a_high @ b_low + a_low @ b_high
    for precision, expected in (("medium", medium), ("high", high)):
        with TpuProducts(precision) as products:
            found = [
                a @ b,
                torch.addmm(c, a, b, beta=2, alpha=3),
                (a[None] @ b[None])[0],
                a @ b[:, 0],
            ]
            found.append(nn.functional.linear(a, b.mT, c))
        assert products.count == 5
        wanted = [expected, 2 * c + 3 * expected, expected, expected[:, 0], expected + c]
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y.float(), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(medium.float(), a @ b, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(high.float(), a @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("precision", ["medium", "high"])
def test_emulated_convolutions_and_their_gradients(precision: str) -> None:
    torch.manual_seed(0)
    x, w, g = torch.randn(2, 4, 8, 8), torch.randn(6, 2, 3, 3), torch.randn(2, 6, 4, 4)
    options = {"stride": 2, "padding": 1, "groups": 2}
    bias = torch.randn(6, requires_grad=True)
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    with tpu_products(precision):
        y = nn.functional.conv2d(*leaves, bias, **options)
        y.backward(g)

    def rounded(*tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        high, low = zip(*map(parts, tensors))
        return [high] if precision == "medium" else [high, (high[0], low[1]), (low[0], high[1])]

    conv = nn.functional.conv2d
    wanted = sum(conv(a, b, **options) for a, b in rounded(x, w)) + bias.double().view(-1, 1, 1)
    torch.testing.assert_close(y, wanted.float(), rtol=1e-5, atol=1e-5)
    of_x = sum(nn.grad.conv2d_input(x.shape, b, a, **options) for a, b in rounded(g, w))
    of_w = sum(nn.grad.conv2d_weight(b, w.shape, a, **options) for a, b in rounded(g, x))
    torch.testing.assert_close(leaves[0].grad, of_x.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(leaves[1].grad, of_w.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(bias.grad, g.sum((0, 2, 3)))


def test_products_of_a_tpu_are_compared() -> None:
    model, x = blocks(), torch.randn(2, 5, 16)
    exact, high, medium = (
        torch.tpu.compare(model, x, emulate=precision) for precision in (None, "high", "medium")
    )
    errors = [r.rows[-1].accumulated for r in (exact, high, medium)]
    assert errors[0] < errors[1] < errors[2] / 50 and 1e-4 < errors[2] < 0.1
    # In roundings of a product's operands the layers are right, and a layer without products is
    # judged as exactly as before.
    assert medium.first is None and high.first is None
    assert all(r.units < 8 for r in medium.rows)
    norm = next(r for r in medium.rows if r.layer == "0.norm" and r.what == "output")
    assert norm.own < 1e-6


def test_a_layer_that_needs_more_than_bfloat16_products_is_found() -> None:
    class Distance(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # Of points far from the origin: large products cancel.
            squares = (x * x).sum(-1)
            return squares[:, None] + squares - 2 * (x @ x.mT)

    model = nn.Sequential(nn.LayerNorm(8), Distance())
    x = torch.randn(6, 8)
    model[0].bias.data.fill_(1000.0)
    usual = torch.tpu.compare(model, x, backward=False)
    emulated = torch.tpu.compare(model, x, backward=False, emulate="medium")
    assert usual.rows[1].accumulated < 0.1 < emulated.rows[1].accumulated


def test_what_cannot_be_emulated_is_refused() -> None:
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    with pytest.raises(ValueError, match="emulate is 'low', and may be 'medium', 'high' or None"):
        torch.tpu.compare(model, x, emulate="low")
    with torch.autocast("tpu"), pytest.raises(ValueError, match="autocast is in force"):
        torch.tpu.compare(model, x, emulate="medium")
    with pytest.raises(ValueError, match="draws random numbers"):
        torch.tpu.compare(nn.Sequential(model, nn.Dropout(0.5)), x, emulate="medium")
    with TpuProducts("medium"), pytest.raises(ValueError, match="addbmm.* cannot be emulated"):
        torch.addbmm(torch.randn(2, 2), torch.randn(3, 2, 4), torch.randn(3, 4, 2))


def test_recurrent_layers_and_attention_are_emulated() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(8, 8, batch_first=True, bidirectional=True)
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.gru(x)[0])

    torch.manual_seed(0)
    model, x = Tagger(), torch.randn(2, 6, 8)
    for module in (model, model.eval()):
        for backward in (True, False):
            result = torch.tpu.compare(module, x, emulate="medium", backward=backward)
            assert result.first is None
            assert all(1e-5 < r.accumulated < 0.2 for r in result.rows if r.layer == "gru")


def test_images_packed_states_and_gradients_that_are_zero() -> None:
    # Of a bias before a batch norm the gradient is zero, up to rounding.
    images = nn.Sequential(
        *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(4 * 9, 3)),
    )
    for module, x in (
        (images, torch.randn(4, 3, 8, 8)),
        (nn.LSTM(3, 5, bidirectional=True), torch.randn(4, 2, 3)),
        (nn.Embedding(7, 4), torch.tensor([[1, 6], [0, 1]])),
    ):
        for training in (True, False):
            result = torch.tpu.compare(module.train(training), x)
            assert result.rows and result.first is None, str(result)


def test_a_loss_and_no_gradients() -> None:
    model = nn.Linear(4, 3)
    squares = torch.tpu.compare(model, torch.randn(2, 4), loss=lambda y: y.square().sum())
    assert whats(squares, "") == ["output", "gradient of weight", "gradient of bias"]
    assert whats(torch.tpu.compare(model, torch.randn(2, 4), backward=False), "") == ["output"]


def test_dtypes_that_a_module_names_are_float64_in_the_reference() -> None:
    class Norm(nn.Module):
        def forward(self, x):
            y = x.to(torch.float32)
            return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    result = torch.tpu.compare(nn.Sequential(nn.Linear(8, 8), Norm()), torch.randn(3, 8))
    assert result.first is None and all(r.units < 8 for r in result.rows)
    assert torch.get_default_dtype() is torch.float32


def test_random_numbers_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    with pytest.raises(ValueError, match="draws random numbers"):
        torch.tpu.compare(model, torch.randn(2, 3))
    assert torch.tpu.compare(model.eval(), torch.randn(2, 3)).first is None


def test_other_calls_in_float64_are_an_error() -> None:
    class Depends(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            return self.a(x) if x.device.type == "tpu" else self.b(x)

    with pytest.raises(ValueError, match="control flow"):
        torch.tpu.compare(Depends(), torch.randn(2, 2))


def run(folder: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(textwrap.dedent(code))
    command = [sys.executable, "-m", "tpu_core", "compare", *options, str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


PRODUCT = """
    import torch
    torch.manual_seed(0)
    torch.nn.Linear(64, 64).to("tpu")(torch.randn(4, 64).to("tpu"))
"""
SCRIPT = """
    import torch
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1)).to("tpu")
    print("begins")
    for step in range(2):
        with torch.autocast("tpu"):
            model(input=torch.randn(4, 8, device="tpu"))
    print("ends")
"""


def test_the_command(tmp_path: Path) -> None:
    done = run(tmp_path, SCRIPT, "--eval", "--call", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("begins\nLayers beside the CPU in float64\n")
    assert "bfloat16[4, 16]" in done.stdout and "All within 64 units." in done.stdout
    drawn = run(tmp_path, SCRIPT)
    assert drawn.returncode == 2 and "(--eval)" in drawn.stderr
    emulated = run(tmp_path, PRODUCT, "--emulate", "medium")
    assert emulated.returncode == 0 and "e-03" in emulated.stdout, emulated.stderr


@pytest.mark.slow
def test_the_command_where_it_ends_otherwise(tmp_path: Path) -> None:
    none = run(tmp_path, "import torch\ntorch.nn.Linear(2, 2)(torch.ones(2))")
    assert none.returncode == 2 and "called modules on the device 0 times" in none.stderr
    outside = run(tmp_path, SCRIPT, "--eval", "--tolerance", "0.001")
    assert outside.returncode == 1
    wrong = run(tmp_path, SCRIPT, "--emulate", "low")
    assert wrong.returncode == 2 and "'low'" in wrong.stderr
