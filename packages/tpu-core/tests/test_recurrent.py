"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` as one op a layer and direction, against the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from tpu_core import modes
from tpu_core.metrics import METRICS

KINDS: dict[str, dict[str, Any]] = {
    "LSTM": {},
    "GRU": {},
    "RNN": {"nonlinearity": "tanh"},
    "RNN relu": {"nonlinearity": "relu"},
}


def pair(kind: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    module = getattr(nn, kind.split()[0])(3, 4, **KINDS[kind], **options)
    return module, copy.deepcopy(module).to("tpu")


def flat(results: Any) -> list[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        return [results]
    return [t for r in results for t in flat(r)]


def states(module: nn.Module, batch: int) -> Any:
    count = module.num_layers * (2 if module.bidirectional else 1)
    hx = torch.randn(count, batch, 4, requires_grad=True)
    return (hx, torch.randn_like(hx, requires_grad=True)) if module.mode == "LSTM" else hx


def on_device(tensors: Any) -> Any:
    if isinstance(tensors, tuple):
        return tuple(map(on_device, tensors))
    return tensors.detach().to("tpu").requires_grad_()


def check(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> None:
    for want, have in zip(expected, actual, strict=True):
        torch.testing.assert_close(have.cpu(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"num_layers": 2, "bidirectional": True},
        {"num_layers": 2, "batch_first": True},
        {"num_layers": 2, "dropout": 1.0},
    ],
    ids=lambda o: ", ".join(o),
)
def test_values_and_gradients(kind: str, options: dict[str, Any]) -> None:
    cpu, tpu = pair(kind, **options)
    x = torch.randn((2, 6, 3) if cpu.batch_first else (6, 2, 3), requires_grad=True)
    hx = states(cpu, 2)
    copies = on_device(x), on_device(hx)
    expected, actual = flat(cpu(x, hx)), flat(tpu(*copies))
    check(expected, actual)
    seeds = [torch.randn_like(r) for r in expected]
    torch.autograd.backward(expected, seeds)
    torch.autograd.backward(actual, [s.to("tpu") for s in seeds])
    leaves = [x, *flat(hx), *cpu.parameters()]
    others = [copies[0], *flat(copies[1]), *tpu.parameters()]
    check([t.grad for t in leaves], [t.grad for t in others])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", [0, 1])
def test_gradient_of_one_result(kind: str, which: int) -> None:
    gradients = []
    for module, device in zip(pair(kind), ("cpu", "tpu")):
        torch.manual_seed(1)
        x = torch.randn(5, 3, 3).to(device).requires_grad_()
        result = flat(module(x)[which])[-1]
        (result**2).sum().backward()
        gradients.append([x.grad, *(p.grad for p in module.parameters())])
    check(*gradients)


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivative(kind: str) -> None:
    results = []
    for module, device in zip(pair(kind, bidirectional=True), ("cpu", "tpu")):
        torch.manual_seed(1)
        x = torch.randn(4, 2, 3).to(device).requires_grad_()
        hx = states(module, 2)
        hx = hx if device == "cpu" else on_device(hx)
        ys = sum((y**2).sum() for y in flat(module(x, hx)))
        leaves = [x, *flat(hx), *module.parameters()]
        first = torch.autograd.grad(ys, leaves, create_graph=True)
        sum((g**2).sum() for g in first).backward()
        results.append([t.grad for t in leaves])
    for want, have in zip(*results, strict=True):
        torch.testing.assert_close(have.cpu(), want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_without_gradient(kind: str) -> None:
    cpu, tpu = pair(kind, num_layers=2)
    x = torch.randn(5, 2, 3)
    expected = flat(cpu(x))
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            actual = flat(tpu(x.to("tpu")))
            assert not any(t.requires_grad for t in actual)
            check([t.detach() for t in expected], actual)


def test_what_a_layer_is_not_made_for() -> None:
    """Projections, packed sequences, one sequence without a batch: as the CPU computes them."""
    for options, x in (
        ({"proj_size": 2}, torch.randn(5, 2, 3)),
        ({"proj_size": 2, "bias": False}, torch.randn(5, 2, 3)),
        ({"bias": False}, torch.randn(5, 3)),
        ({"bias": False}, torch.randn(5, 0, 3)),
        ({}, torch.randn(5, 3)),
        ({}, torch.randn(5, 0, 3)),
    ):
        cpu, tpu = pair("LSTM", **options)
        check([t.detach() for t in flat(cpu(x))], flat(tpu(x.to("tpu"))))
    packed = nn.utils.rnn.pack_sequence([torch.randn(5, 3), torch.randn(2, 3)])
    for kind, options in (("GRU", {}), ("LSTM", {"bias": False})):
        cpu, tpu = pair(kind, **options)
        check([cpu(packed)[0].data.detach()], [tpu(packed.to("tpu"))[0].data])


# The last has more padding than one loop is worth, and runs time step by time step.
LENGTHS = {"rising": [2, 5, 3], "equal": [4, 4], "one": [6], "one long": [8, 1, 1, 1, 1, 1, 1, 1]}
BOTH_WAYS = {"bidirectional": True, "num_layers": 2}
PACKED = [
    *((kind, lengths, {}) for kind in KINDS for lengths in LENGTHS),
    *((kind, "rising", options) for kind in KINDS for options in (BOTH_WAYS, {"bias": False})),
    ("LSTM", "one long", BOTH_WAYS),
]


@pytest.mark.parametrize("kind, lengths, options", PACKED, ids=str)
def test_packed_sequences(
    every_tier: None, kind: str, lengths: str, options: dict[str, Any]
) -> None:
    cpu, tpu = pair(kind, **options)
    sizes = torch.tensor(LENGTHS[lengths])
    x = torch.randn(len(sizes), int(sizes.max()), 3, requires_grad=True)
    hx = states(cpu, len(sizes))
    found = []
    for module, rows, start in ((cpu, x, hx), (tpu, on_device(x), on_device(hx))):
        packed = nn.utils.rnn.pack_padded_sequence(
            rows, sizes, batch_first=True, enforce_sorted=False
        )
        y, last = module(packed, start)
        assert torch.equal(y.batch_sizes, packed.batch_sizes)
        results = [y.data, *flat(last)]
        sum(r.sin().sum() for r in results).backward()
        grads = [t.grad for t in (rows, *flat(start), *module.parameters())]
        found.append([*(r.detach() for r in results), *grads])
    check(*found)


def test_an_end_of_one_sequence_is_not_seen_by_another() -> None:
    cpu, tpu = pair("LSTM", bidirectional=True)
    x = torch.randn(2, 5, 3)
    x[0, 4] = float("nan")  # of the longer one alone
    results = []
    for module, rows in ((cpu, x), (tpu, x.to("tpu"))):
        rows = rows.detach().requires_grad_()
        packed = nn.utils.rnn.pack_padded_sequence(rows, torch.tensor([5, 2]), batch_first=True)
        y, _ = nn.utils.rnn.pad_packed_sequence(module(packed)[0], batch_first=True)
        y[1].sum().backward()
        results.append([y.detach(), rows.grad[1]])
    for want, have in zip(*results, strict=True):
        torch.testing.assert_close(have.cpu(), want, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_gradients_of_relu_stop_where_it_does(every_tier: None, value: float) -> None:
    cpu, tpu = pair("RNN relu")
    x = -torch.ones(3, 2, 3)
    grads = []
    for module, rows in ((cpu, x), (tpu, x.to("tpu"))):
        with torch.no_grad():
            for p in module.parameters():
                p.fill_(0.5)
        rows = rows.detach().requires_grad_()
        y, _ = module(rows)
        y.backward(torch.full_like(y, value))
        grads.append(rows.grad)
    torch.testing.assert_close(grads[1].cpu(), grads[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_without_biases(cell: type[nn.Module]) -> None:
    module = cell(3, 4, bias=False)
    other = copy.deepcopy(module).to("tpu")
    for x in (torch.randn(2, 3), torch.randn(0, 3), torch.randn(3)):
        expected, actual = flat(module(x)), flat(other(x.to("tpu")))
        check([t.detach() for t in expected], actual)
        sum(t.sum() for t in expected).backward()
        sum(t.sum() for t in actual).backward()
        check([p.grad for p in module.parameters()], [p.grad for p in other.parameters()])


def test_errors_are_those_of_pytorch() -> None:
    messages = []
    for module, device in zip(pair("LSTM"), ("cpu", "tpu")):
        x, hx, weights = torch.randn(5, 2, 3), torch.randn(1, 2, 4), list(module.parameters())
        options = (True, 1, 0.0, False, False, False)
        with pytest.raises(RuntimeError) as caught:
            torch.lstm(x.to(device), [hx.to(device)], weights, *options)
        messages.append(str(caught.value).splitlines()[0])
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            # oneDNN, on the CPU, reads beyond the input.
            with torch.backends.mkldnn.flags(enabled=False):
                torch.lstm(x[..., :2].to(device), [hx.to(device)] * 2, weights, *options)
    assert messages[0] == messages[1]


def test_half_precision() -> None:
    cpu, tpu = pair("LSTM")
    x = torch.randn(6, 2, 3)
    expected = cpu(x)[0]
    with torch.autocast("tpu", dtype=torch.bfloat16):
        actual = tpu(x.to("tpu"))[0]
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float().cpu(), expected, rtol=3e-2, atol=3e-2)
    actual = tpu.bfloat16()(x.to("tpu").bfloat16())[0]
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float().cpu(), expected, rtol=3e-2, atol=3e-2)


def test_function_transforms() -> None:
    cpu, tpu = pair("GRU")
    x = torch.randn(5, 2, 3)
    expected = torch.func.grad(lambda v: cpu(v)[0].sum())(x)
    actual = torch.func.grad(lambda v: tpu(v)[0].sum())(x.to("tpu"))
    check([expected.detach()], [actual])


@pytest.mark.parametrize("way", ["dual numbers", "dual numbers, frozen", "jvp", "hessian product"])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_derivatives(kind: str, way: str) -> None:
    modules = pair(kind, bidirectional=True)
    x, tangent = torch.randn(3, 2, 3), torch.randn(3, 2, 3)
    found = []
    for module, device in zip(modules, ("cpu", "tpu")):
        module.requires_grad_("frozen" not in way)
        v, t = x.to(device), tangent.to(device)

        def call(v: torch.Tensor, module: nn.Module = module) -> torch.Tensor:
            # On the CPU the library's LSTM has no forward derivative.
            with torch.backends.mkldnn.flags(enabled=False):
                return module(v)[0]

        if "dual" in way:
            with forward_ad.dual_level():
                dual = call(forward_ad.make_dual(v, t))
                found.append([y.detach() for y in forward_ad.unpack_dual(dual)])
        elif way == "jvp":
            found.append([y.detach() for y in torch.func.jvp(call, (v,), (t,))])
        else:
            gradient = torch.func.grad(lambda v: call(v).square().sum())
            found.append([y.detach() for y in torch.func.jvp(gradient, (v,), (t,))])
    check(*found)


def test_size_of_a_program_does_not_follow_the_length() -> None:
    counts = []
    for length in (3, 50):
        _, tpu = pair("LSTM", num_layers=2)
        before = METRICS.snapshot()
        with modes.using("segments"):
            tpu(torch.randn(length, 2, 3).to("tpu"))[0].sum().backward()
            torch.tpu.synchronize()
        counts.append(METRICS.delta(before)["ops"])
    assert counts[0] == counts[1]


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("hidden", [5, 600])  # loops of the extension, and ops for larger states
@pytest.mark.parametrize("bias", [True, False])
def test_small_and_large_states(kind: str, hidden: int, bias: bool) -> None:
    torch.manual_seed(0)
    layer = getattr(nn, kind)(3, hidden, num_layers=2, bidirectional=True, bias=bias)
    twin = copy.deepcopy(layer).to("tpu")
    x = torch.randn(4, 8, 3, requires_grad=True)
    first = torch.randn(4, 8, 2 * hidden)[..., ::2].requires_grad_()  # not contiguous
    states = (first, first * 0.5) if kind == "LSTM" else first
    y, last = layer(x, states)
    leaves = [x, first, *layer.parameters()]
    loss = y.square().sum() + sum(t.sin().sum() for t in last)
    expected = torch.autograd.grad(loss, leaves)

    z, start = x.detach().to("tpu").requires_grad_(), first.detach().to("tpu").requires_grad_()
    got, ends = twin(z, (start, start * 0.5) if kind == "LSTM" else start)
    loss = got.square().sum() + sum(t.sin().sum() for t in ends)
    grads = torch.autograd.grad(loss, [z, start, *twin.parameters()])
    torch.testing.assert_close(got.cpu(), y, rtol=1e-5, atol=1e-6)
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-4)
