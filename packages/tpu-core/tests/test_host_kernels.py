"""Ops that PyTorch's CPU kernels run at once, on the device's memory."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from aliasing.programs import Program
from tpu_core import _C, interop, modes, tiers
from tpu_core.metrics import METRICS


def both(f: Callable[[str], Any]) -> tuple[Any, Any]:
    return f("tpu"), f("cpu")


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("mode", ["segments", "strict"])
def test_random_programs_of_views_and_writes(mode: str) -> None:
    before = METRICS.snapshot()
    for seed in range(150):
        with modes.using(mode):
            Program.of_seed(seed).run()
    made = METRICS.delta(before)
    assert made["host_ops"] > 300
    assert made["executions"] == made["compiles"] == 0


@pytest.mark.usefixtures("host")
def test_training_is_the_cpus_bit_for_bit() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(54, 5),
    )
    twin = copy.deepcopy(model).to("tpu")
    losses: dict[str, list[float]] = {"cpu": [], "tpu": []}
    for device, m in (("cpu", model), ("tpu", twin)):
        generator = torch.Generator().manual_seed(2)
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
        for step in range(6):
            x = torch.randn(3 + step, 3, 8, 8, generator=generator).to(device)
            y = torch.randint(5, (3 + step,), generator=generator).to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(m(x), y)
            loss.backward()
            optimizer.step()
            losses[device].append(loss.item())
    assert losses["tpu"] == losses["cpu"]
    for (name, a), b in zip(model.state_dict().items(), twin.state_dict().values()):
        assert torch.equal(a, b.cpu()), name


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(6, 8, 2, bidirectional=True),
    "GRU": lambda: nn.GRU(6, 8, 2, bias=False),
    "RNN": lambda: nn.RNN(6, 8, nonlinearity="relu", bidirectional=True),
    "LSTM with projections": lambda: nn.LSTM(6, 8, proj_size=3),
}


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers(kind: str) -> None:
    module = RECURRENT[kind]()
    x = torch.randn(5, 7, 6)

    def run(device: str) -> list[torch.Tensor]:
        m, given = copy.deepcopy(module).to(device), x.to(device).requires_grad_()
        out, state = m(given)
        last = state if isinstance(state, tuple) else (state,)
        sum((t * t).sum() for t in (out, *last)).backward()
        return [
            t.detach().cpu() for t in (out, *last, given.grad, *(p.grad for p in m.parameters()))
        ]

    # Sums over time steps are made in another order than by autograd's nodes.
    assert_close(*both(run), rtol=1e-4, atol=1e-5)


MASKS: dict[str, Callable[[], torch.Tensor | None]] = {
    "none": lambda: None,
    "boolean": lambda: torch.rand(7, 9) > 0.3,
    "bias": lambda: torch.randn(2, 1, 7, 9),
    "bias with a gradient": lambda: torch.randn(7, 9).requires_grad_(),
}


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("width", [8, 5])
def test_attention(mask: str, width: int) -> None:
    q, k, v = torch.randn(2, 4, 7, 8), torch.randn(2, 4, 9, 8), torch.randn(2, 4, 9, width)
    bias = MASKS[mask]()

    def run(device: str) -> list[torch.Tensor]:
        given = [t.detach().to(device).requires_grad_() for t in (q, k, v)]
        held = None if bias is None else bias.detach().to(device)
        if bias is not None and bias.requires_grad:
            held.requires_grad_()
            given.append(held)
        out = F.scaled_dot_product_attention(*given[:3], attn_mask=held)
        out.square().sum().backward()
        return [out.detach().cpu(), *(t.grad.cpu() for t in given)]

    assert_close(*both(run))


@pytest.mark.usefixtures("host")
def test_an_out_tensor_that_is_made_smaller_keeps_what_lies_behind() -> None:
    def run(device: str) -> torch.Tensor:
        base = torch.arange(6.0).to(device)
        other = base.clone()
        torch.arange(3, out=base)
        base.resize_(6)
        return torch.stack([base, other]).cpu()

    assert torch.equal(*both(run))


@pytest.mark.usefixtures("host")
def test_a_result_that_is_an_operand_is_known_as_one() -> None:
    def run(device: str) -> str:
        a = torch.ones(0, 1, 3).to(device)
        with pytest.raises(RuntimeError) as raised:
            torch.add(a, torch.ones(0, 0, 3).to(device), out=a)
        return str(raised.value).splitlines()[0]

    assert len(set(both(run))) == 1


@pytest.mark.usefixtures("host")
def test_memory_that_others_hold_is_not_written() -> None:
    x = torch.arange(4.0).to("tpu")
    array = interop.to_jax(x)
    copied, read = x.clone(), x.cpu()
    x += 1
    assert array.tolist() == copied.tolist() == read.tolist() == [0, 1, 2, 3]
    assert x.tolist() == [1, 2, 3, 4]


@pytest.mark.usefixtures("host")
def test_values_go_to_programs_and_back() -> None:
    x = torch.arange(6.0).reshape(2, 3).to("tpu", memory_format=torch.contiguous_format)
    (x := x.t()).mul_(2)
    compiled = torch.compile(lambda t: t + 1, backend="eager")
    with modes.using(modes.STRICT):
        _C.set_tiers(0)
        y = x * 3  # by a program
        _C.flush()
        _C.set_tiers(2)
    y += x
    assert compiled(y).tolist() == [[1.0, 25.0], [9.0, 33.0], [17.0, 41.0]]


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(
    "call",
    [
        lambda d: torch.ones(2, 3, device=d) @ torch.ones(2, 3, device=d),
        lambda d: torch.ones(3, device=d).view(2, 2),
        lambda d: torch.zeros(3, dtype=torch.int64, device=d).div_(2),
        lambda d: F.gelu(torch.ones(3, device=d), approximate="Tanh"),
        lambda d: torch.ones(3, device=d)[torch.tensor([5]).to(d)],
        lambda d: torch.zeros(2, dtype=torch.int64, device=d) // 0,
        lambda d: torch.linalg.inv(torch.zeros(2, 2, device=d)),
        lambda d: F.nll_loss(torch.zeros(2, 3, device=d), torch.tensor([0, 7]).to(d)),
    ],
)
def test_errors_are_the_cpus(call: Callable[[str], torch.Tensor]) -> None:
    def message(device: str) -> tuple[type, str]:
        with pytest.raises(Exception) as raised:
            call(device).cpu()
        return raised.type, str(raised.value).splitlines()[0]

    on_device, on_cpu = both(message)
    assert on_device == on_cpu


@pytest.mark.usefixtures("host")
def test_operands_of_two_devices_are_refused() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device="tpu") + torch.ones(3)


@pytest.mark.usefixtures("host")
def test_sizes_that_depend_on_values_compile_nothing() -> None:
    before = METRICS.snapshot()
    for n in range(3, 9):
        x = torch.arange(float(n)).to("tpu")
        kept = x[x > 1]
        assert kept.nonzero().shape == (n - 2, 1)
        assert torch.unique(kept % 2).numel() == min(2, n - 2)
    made = METRICS.delta(before)
    assert made["compiles"] == made["executions"] == made["signatures"] == 0


ERRORS: dict[str, Callable[[str], Any]] = {
    "index": lambda d: torch.ones(3, device=d)[torch.tensor([5], device=d)],
    "label": lambda d: F.cross_entropy(torch.ones(2, 3, device=d), torch.tensor([1, 7], device=d)),
    "scatter": lambda d: torch.zeros(3, device=d).index_add_(
        0, torch.tensor([4], device=d), torch.ones(1, device=d)
    ),
    "divisor": lambda d: torch.tensor([1, 2], device=d) // torch.tensor([0, 1], device=d),
    "singular": lambda d: torch.linalg.inv(torch.zeros(2, 2, device=d)),
    "weight": lambda d: torch.multinomial(torch.tensor([-1.0, 2.0], device=d), 1),
    "weights": lambda d: torch.multinomial(torch.zeros(2, 2, device=d), 1),
    "probability": lambda d: torch.bernoulli(torch.tensor([0.5, 2.0], device=d)),
    "target": lambda d: F.binary_cross_entropy(
        torch.tensor([2.0], device=d), torch.ones(1, device=d)
    ),
}


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("call", ERRORS.values(), ids=ERRORS)
def test_errors_that_depend_on_values(call: Callable[[str], Any]) -> None:
    raised = []
    for device in ("tpu", "cpu"):
        with pytest.raises(Exception) as error:
            call(device)
        raised.append((error.type, str(error.value).partition("\n")[0]))
    assert raised[0] == raised[1]


@pytest.mark.usefixtures("host")
def test_an_empty_range_into_an_out_tensor() -> None:
    for device in ("tpu", "cpu"):
        assert torch.arange(0, 0, 1, out=torch.empty(0, device=device)).tolist() == []
        assert torch.fft.fftfreq(1, out=torch.empty(2, device=device)[:0]).tolist() == [0.0]


@pytest.mark.usefixtures("host")
def test_a_chosen_implementation_is_that_of_programs() -> None:
    x = torch.ones(3, device="tpu")
    before = METRICS.snapshot()
    _C.set_implementations(1)  # as `tpu_kernels.using` does
    try:
        y = x * 3 + 1
    finally:
        _C.set_implementations(0)
    assert y.tolist() == [4.0] * 3
    made = METRICS.delta(before)
    assert made["host_ops"] == 0
    assert made["executions"] == 1


@pytest.mark.of_cpu(reason="other platforms have no kernels of the host")
def test_objects_of_the_start_are_collected_again() -> None:
    code = """
        import gc, torch
        from tpu_core.gc_control import OF_PYTHON
        x = torch.ones(2, device="tpu")
        print(gc.get_freeze_count() > OF_PYTHON)
        for _ in range(1100):
            x = x * 1.0
        print(gc.get_freeze_count() > OF_PYTHON, torch.tpu.metrics()["compiles"])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "TPU_TIERS": "host"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["True", "False 0"]


@pytest.mark.usefixtures("host")
def test_a_dtype_that_lowerings_have_and_the_cpu_has_not() -> None:
    """As on CUDA; transformers counts the tokens of experts so."""
    x = torch.tensor([1, 2, 2, 3], dtype=torch.int32, device="tpu")
    assert torch.histc(x, 4, 0, 3).tolist() == [0, 1, 2, 1]
    with pytest.raises(NotImplementedError, match='"bitwise_and_tpu" not implemented'):
        torch.ones(2, device="tpu") & torch.ones(2, device="tpu")


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("size", [(4, 1), (9, 1), (4, 2)])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_antialiased_images_of_width_1(mode: str, size: tuple[int, int]) -> None:
    """The CPU's kernel gives each row the first one's result, unless channels come last."""
    x = torch.randn(2, 3, 8, 5)
    last = x.contiguous(memory_format=torch.channels_last)
    expected = F.interpolate(last, size, mode=mode, antialias=True)
    assert_close(F.interpolate(x.to("tpu"), size, mode=mode, antialias=True).cpu(), expected)


def test_a_program_gives_an_element_that_is_there_once() -> None:
    """As the gradient of a sum is, in a compiled graph."""
    base = torch.arange(3.0).reshape(3, 1)
    _C.set_tiers(tiers.NUMBERS["compiled"])
    x = base.to("tpu").expand(3, 4).detach()
    y = torch.empty_strided((3, 4), (1, 0), device="tpu")
    torch.tpu.synchronize()
    _C.set_tiers(tiers.NUMBERS["host"])
    try:
        assert torch.equal((x * 1).cpu(), base.expand(3, 4))
        assert (y * 0).cpu().nan_to_num().sum() == 0
        assert torch.equal(x.clone().cpu(), base.expand(3, 4))
    finally:
        _C.set_tiers(tiers.NUMBERS["compiled"])


RANGES: dict[str, Callable[[str], torch.Tensor]] = {
    "of no floats": lambda d: torch.arange(0.0, device=d),
    "of a frequency": lambda d: torch.fft.fftfreq(1, device=d),
    "a half beside the start is lost": lambda d: torch.arange(1e17, 1e17 + 160, 16.0, device=d),
    "to the last integer": lambda d: torch.arange(2**63 - 3, 2**63 - 1, 5, device=d),
    "to the first integer": lambda d: torch.arange(3 - 2**63, -(2**63), -5, device=d),
    "a step that is cut to 0": lambda d: torch.arange(0, 3, 0.7, dtype=torch.int32, device=d),
    "into a transposed tensor": lambda d: torch.arange(6.0, out=torch.empty(3, 2, device=d).t()),
}


@pytest.mark.parametrize("tier", ["host", "compiled"])
@pytest.mark.parametrize("kind", RANGES)
def test_ranges(kind: str, tier: str, request: pytest.FixtureRequest) -> None:
    if tier == "host":
        request.getfixturevalue("host")
    ours, theirs = both(RANGES[kind])
    assert ours.stride() == theirs.stride()
    assert torch.equal(ours.cpu(), theirs)


@pytest.mark.usefixtures("host")
def test_strides_of_random_results() -> None:
    p = torch.rand(2, 3, 4, 5)
    for given in (p.mT, p.to(memory_format=torch.channels_last)):
        assert torch.bernoulli(given.to("tpu")).stride() == torch.bernoulli(given).stride()


@pytest.mark.parametrize("tier", ["host", "restless", "compiled"])
def test_threads_write_parts_of_one_tensor(tier: str, request: pytest.FixtureRequest) -> None:
    if tier != "compiled":
        request.getfixturevalue(tier)
    rounds = 60
    for size in (3, 3000):
        x = torch.zeros(4, size, device="tpu")

        def write(row: torch.Tensor) -> None:
            for _ in range(rounds):
                row.add_(1)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, x))
        assert torch.equal(x.cpu(), torch.full((4, size), float(rounds)))


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_rms_norm(dims: int, dtype: torch.dtype) -> None:
    x, grad = torch.randn(2, 3, 4, 8, 1).to(dtype)[..., 0], torch.randn(2, 3, 4, 8).to(dtype)
    norm = nn.RMSNorm(x.shape[-dims:]).to(dtype)
    nn.init.normal_(norm.weight)
    before = METRICS.snapshot()
    found = []
    for device in ("cpu", "tpu"):
        own, given = copy.deepcopy(norm).to(device), x.clone().to(device).requires_grad_()
        own(given).backward(grad.to(device))
        frozen = x.clone().to(device).requires_grad_()
        F.rms_norm(frozen, norm.normalized_shape, None, 1e-3).backward(grad.to(device))
        found.append([g.cpu() for g in (given.grad, own.weight.grad, frozen.grad)])
    made = METRICS.delta(before)
    assert made["executions"] == made["compiles"] == 0
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert_close(found[1], found[0], rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("name", ["silu", "mish"])
def test_gradients_that_are_composites_elsewhere(name: str) -> None:
    """One op, which has no derivative; the activation itself has them all."""

    def gradients(device: str) -> tuple[list[torch.Tensor], str]:
        x = torch.linspace(-3, 3, 7).to(device).requires_grad_()
        y = getattr(F, name)(x).sum()
        (once,) = torch.autograd.grad(y, x, create_graph=True)
        (twice,) = torch.autograd.grad(once.sum(), x)
        backward = getattr(torch.ops.aten, f"{name}_backward")(x.detach() * 2, x)
        with pytest.raises(RuntimeError) as refused:
            backward.sum().backward()
        return [once.detach().cpu(), twice.cpu(), backward.detach().cpu()], str(refused.value)

    (found, message), (expected, text) = both(gradients)
    assert_close(found, expected)
    assert message == text
    x = torch.ones(3, device="tpu", requires_grad=True)
    y = getattr(F, name)(x)
    before = METRICS.snapshot()
    y.backward(torch.ones_like(x))
    assert METRICS.delta(before)["host_ops"] <= 3  # of the ones too
