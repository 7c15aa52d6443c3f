"""Ops without a lowering: they run on the CPU, are counted and said once; or they raise."""

from __future__ import annotations

import uuid
import warnings

import pytest
import torch

from tpu_core.config import override
from tpu_core.errors import FallbackError, FallbackWarning, UnsupportedOpError


@pytest.fixture
def op():
    """An op of its own for each test, as the warning comes once an op: y = 3 x on the CPU."""
    name = f"robustness::triple_{uuid.uuid4().hex}"
    library = torch.library.Library("robustness", "FRAGMENT")
    library.define(f"{name.split('::')[1]}(Tensor x, Tensor? bias=None) -> Tensor")
    library.impl(
        name.split("::")[1],
        lambda x, bias=None: x * 3 + (0 if bias is None else bias),
        "CPU",
    )
    torch.library.register_autograd(
        name, lambda ctx, grad: (grad * 3, None), setup_context=lambda ctx, inputs, output: None
    )
    yield getattr(torch.ops.robustness, name.split("::")[1])
    library._destroy()


def test_one_warning_with_the_line_and_counts(op):
    x = torch.ones(3, device="tpu")
    before = torch.tpu.metrics()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            y = op(x, x)  # the call
    assert y.tolist() == [4.0] * 3 and y.device.type == "tpu"
    assert [w.category for w in seen] == [FallbackWarning]
    assert seen[0].filename == __file__
    number = seen[0].lineno
    with open(__file__) as file:
        assert file.readlines()[number - 1].rstrip().endswith("# the call")
    text = str(seen[0].message)
    assert "has no lowering for device 'tpu' and runs on the CPU" in text
    assert f"at {__file__}:{number} in test_one_warning_with_the_line_and_counts" in text
    after = torch.tpu.metrics()
    name = f"fallback.{op.default}"
    assert after[name] - before.get(name, 0) == 3
    assert after["fallbacks"] - before["fallbacks"] == 3
    assert after["fallback_seconds"] > before["fallback_seconds"]
    assert str(op.default) in str(torch.tpu.compile_report())


def test_error(op):
    x = torch.ones(3, device="tpu")
    with override(fallback="error"), pytest.raises(FallbackError) as caught:
        op(x)
    assert caught.value.line.startswith(__file__) and caught.value.line.endswith("in test_error")
    assert "has no lowering and TPU_FALLBACK=error" in str(caught.value)


def test_allow(op):
    with override(fallback="allow"), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert op(torch.ones(3, device="tpu")).tolist() == [3.0] * 3


def test_gradients(op):
    x = torch.arange(3.0, device="tpu", requires_grad=True)
    with override(fallback="allow"):
        (op(x * 2) ** 2).sum().backward()
    assert x.grad.tolist() == [0.0, 72.0, 144.0]


@pytest.mark.filterwarnings("ignore::tpu_core.errors.FallbackWarning")
def test_an_op_of_pytorch_with_its_gradient():
    def loss(device: str) -> torch.Tensor:
        x = torch.tensor([[2.0, 1.0], [0.5, 3.0]], device=device, requires_grad=True)
        torch.linalg.eigvals(x).real.square().sum().backward()
        return x.grad.cpu()

    assert "aten._linalg_eigvals.default" not in torch.tpu.metrics()
    torch.testing.assert_close(loss("tpu"), loss("cpu"))


def test_an_error_of_the_cpu_arrives(op):
    with override(fallback="allow"), pytest.raises(RuntimeError, match="size of tensor a"):
        op(torch.ones(3, device="tpu"), torch.ones(4, device="tpu"))


def test_no_route_at_all():
    library = torch.library.Library("robustness", "FRAGMENT")
    name = f"nowhere_{uuid.uuid4().hex}"
    library.define(f"{name}(Tensor x) -> Tensor")
    with pytest.raises(UnsupportedOpError) as caught:
        getattr(torch.ops.robustness, name)(torch.ones(3, device="tpu"))
    assert isinstance(caught.value, NotImplementedError)
    assert "has no lowering, no decomposition and no CPU kernel" in str(caught.value)
    assert caught.value.line.endswith("in test_no_route_at_all")
    library._destroy()


def test_mutation_through_the_fallback():
    library = torch.library.Library("robustness", "FRAGMENT")
    name = f"double_{uuid.uuid4().hex}"
    library.define(f"{name}(Tensor(a!) x) -> ()")

    def double(x: torch.Tensor) -> None:
        x.mul_(2)

    library.impl(name, double, "CPU")
    x = torch.arange(4.0, device="tpu").reshape(2, 2)
    with override(fallback="allow"):
        getattr(torch.ops.robustness, name)(x.t()[0])
    assert x.tolist() == [[0.0, 1.0], [4.0, 3.0]]
    library._destroy()


def test_a_generator_draws_new_numbers_at_each_call_and_the_same_after_its_seed():
    name = f"robustness::draw_{uuid.uuid4().hex}"
    library = torch.library.Library("robustness", "FRAGMENT")
    library.define(f"{name.split('::')[1]}(Tensor x, *, Generator? generator=None) -> Tensor")
    library.impl(
        name.split("::")[1],
        lambda x, generator=None: torch.rand(x.shape, generator=generator),
        "CPU",
    )
    draw = getattr(torch.ops.robustness, name.split("::")[1])
    x, generator = torch.ones(8, device="tpu"), torch.Generator("tpu")
    with override(fallback="allow"):
        generator.manual_seed(5)
        first, second = draw(x, generator=generator).cpu(), draw(x, generator=generator).cpu()
        generator.manual_seed(5)
        again = draw(x, generator=generator).cpu()
    library._destroy()
    assert torch.equal(first, again) and not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
def test_number_that_pytorch_passes_as_a_tensor(dtype):
    x = torch.arange(4).to(dtype)

    def results(device):
        on = x.to(device)
        out = torch.empty(4, dtype=torch.float64 if dtype == torch.float64 else None, device=device)
        return [
            torch.special.hermite_polynomial_he(on, 2, out=out.clone()),
            torch.special.hermite_polynomial_he(on, 2.3, out=out.clone()),
            torch.special.chebyshev_polynomial_t(0.3, on, out=out.clone()),
        ]

    with override(fallback="allow"):
        for got, want in zip(results("tpu"), results("cpu")):
            torch.testing.assert_close(got.cpu(), want)
