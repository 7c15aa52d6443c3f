"""A wrong call raises PyTorch's own error, at its own line, in every mode."""

from __future__ import annotations

import traceback

import pytest
import torch

from mistakes import MISTAKES, RIGHT, complaint
from tpu_core import modes


@pytest.fixture(params=modes.names())
def mode(request):
    with torch.tpu.set_eager_mode(request.param):
        yield request.param


@pytest.mark.parametrize("name", MISTAKES)
def test_same_complaint_as_on_the_cpu(name, mode):
    kind, text = complaint(MISTAKES[name], "cpu")
    assert kind is not None, "the CPU takes this call"
    # `"bitwise_and_cpu" not implemented for 'Float'` names the device.
    assert complaint(MISTAKES[name], "tpu") == (kind, text.replace('_cpu"', '_tpu"'))


@pytest.mark.filterwarnings("ignore::tpu_core.errors.FallbackWarning", "ignore:torch.cholesky")
@pytest.mark.parametrize("name", RIGHT)
def test_no_complaint_about_values_that_no_tensor_has(name):
    torch.testing.assert_close(RIGHT[name]("tpu").cpu(), RIGHT[name]("cpu"))


@pytest.mark.filterwarnings("ignore::tpu_core.errors.FallbackWarning", "ignore:torch.cholesky")
@pytest.mark.skipif(
    not hasattr(torch.ops.aten, "cholesky"), reason="torch 2.15 has no aten::cholesky"
)
def test_values_decide_where_the_cpu_refuses_all_placeholders():
    """Such a call runs on the CPU with its real values, which raises its error or has a result."""
    cholesky = torch.ops.aten.cholesky.out
    a, out = torch.eye(2) * 2, torch.zeros(2, 2, dtype=torch.complex64)
    got = cholesky(a.to("tpu"), out=out.to("tpu"))
    torch.testing.assert_close(got.cpu(), cholesky(a, out=out))
    with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):
        cholesky(-a.to("tpu"), out=out.to("tpu"))


def test_a_trial_on_the_cpu_draws_nothing():
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    torch.ones(3, 2, device="tpu").multinomial(1)
    with pytest.raises(RuntimeError):
        torch.native_dropout(torch.ones(3, device="tpu"), 2.0, True)
    torch.testing.assert_close(torch.rand(2), expected)


def test_a_mistake_is_raised_at_its_own_line(mode):
    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        x = x @ torch.ones(5, 5, device="tpu")  # the mistake
        return x + 1

    with pytest.raises(RuntimeError) as caught:
        forward(torch.ones(2, 3, device="tpu"))
    own = [f for f in traceback.extract_tb(caught.value.__traceback__) if f.filename == __file__]
    assert own[-1].line.endswith("# the mistake")


def test_what_was_recorded_before_a_mistake_is_kept(mode):
    x = torch.ones(3, device="tpu") * 2
    y = x + 1
    with pytest.raises(RuntimeError):
        y.add_(torch.ones(4, device="tpu"))
    with pytest.raises(RuntimeError):
        y.view(2)
    assert y.tolist() == [3.0] * 3


def test_a_mistake_in_large_tensors_costs_no_memory():
    x = torch.empty(1 << 16, 1 << 14, device="tpu", dtype=torch.bfloat16)  # 2 GiB, never made
    with pytest.raises(RuntimeError, match="reduction dim|cannot be multiplied"):
        x @ x
    with pytest.raises(RuntimeError, match="must match the size|broadcast"):
        x + x[:, 1:]


@pytest.mark.parametrize("tier", ["compiled"], indirect=True)
@pytest.mark.usefixtures("tier")
def test_a_dtype_that_xla_lacks_is_named_where_an_operator_meets_it():
    """Python's operators turn a TypeError into "unsupported operand types", without the dtype."""
    x, y = torch.ones(3, device="tpu").half(), torch.ones(3, dtype=torch.complex32)
    with pytest.raises(NotImplementedError, match="complex32"):
        x + y.to("tpu")
