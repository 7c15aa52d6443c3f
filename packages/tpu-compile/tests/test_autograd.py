"""Autograd, hooks, autocast and modes around and inside compiled functions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwad
import torch.nn as nn
import torch.nn.functional as F

from tpu_core.errors import UnsupportedOpError

Tensor = torch.Tensor


def gradients(f: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> None:
    """Compare gradients of a scalar function, compiled on the device, with the CPU's."""
    found = []
    for device in ("cpu", "tpu"):
        xs = [x.detach().clone().to(device).requires_grad_() for x in inputs]
        g = torch.compile(f, **options) if device == "tpu" else f
        g(*xs).backward()
        found.append([x.grad.cpu() for x in xs if x.grad is not None])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


class Cubed(torch.autograd.Function):
    """Its gradient is not that of its forward, to see which one is used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 7 * x


def with_a_hook(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(lambda grad: grad * 3)
    return y.sin().sum()


def checkpointed(x: Tensor) -> Tensor:
    run = torch.utils.checkpoint.checkpoint(lambda a: a.sin().exp(), x, use_reentrant=False)
    assert isinstance(run, Tensor)
    return run.sum()


def partly_without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x * 3
    return (x * y * x.detach()).sum()


@pytest.mark.parametrize(
    "f", [lambda x: Cubed.apply(x).sum(), with_a_hook, checkpointed, partly_without_grad]
)
def test_what_changes_the_gradient(f: Callable[[Tensor], Tensor]) -> None:
    gradients(f, torch.randn(4))


def test_a_hook_on_an_input() -> None:
    x = torch.ones(3, device="tpu", requires_grad=True)
    x.register_hook(lambda grad: grad * 5)
    torch.compile(lambda x: (x * 2).sum(), fullgraph=True)(x).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [10, 10, 10]


def test_hooks_on_saved_tensors() -> None:
    packed: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(t)
        return t.cpu()

    x = torch.ones(3, device="tpu", requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.to("tpu")):
        out = torch.compile(lambda x: (x.sin() * x.exp()).sum(), fullgraph=True)(x)
    out.backward()
    assert packed
    want = torch.ones(3, requires_grad=True)
    (want.sin() * want.exp()).sum().backward()
    assert x.grad is not None and want.grad is not None
    torch.testing.assert_close(x.grad.cpu(), want.grad)


def test_backward_twice() -> None:
    x = torch.ones(3, device="tpu", requires_grad=True)
    out = torch.compile(lambda x: x.sin().sum(), fullgraph=True)(x)
    out.backward(retain_graph=True)
    out.backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.cpu(), 2 * torch.ones(3).cos())


def test_gradients_of_gradients_are_refused_as_by_every_backend() -> None:
    x = torch.ones(3, device="tpu", requires_grad=True)
    out = torch.compile(lambda x: (x**3).sum(), fullgraph=True)(x)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        torch.autograd.grad(torch.autograd.grad(out, x, create_graph=True)[0].sum(), x)


@pytest.mark.parametrize("inside", [False, True])
def test_autocast(inside: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to("tpu")
    x = torch.randn(2, 4).to("tpu")

    def cast(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            with torch.autocast("tpu", torch.bfloat16):
                return f(x)

        return run

    compiled = (
        torch.compile(cast(model), fullgraph=True)
        if inside
        else cast(torch.compile(model, fullgraph=True))
    )
    found = []
    for f in (compiled, cast(model)):
        model.zero_grad()
        out = f(x)
        assert out.dtype is torch.bfloat16
        out.float().sum().backward()
        found.append([out.detach().cpu(), *(p.grad.cpu() for p in model.parameters())])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_random_numbers_in_training_are_those_of_eager() -> None:
    def f(x: Tensor) -> Tensor:
        return (F.dropout(x, 0.3) * torch.rand_like(x) + torch.bernoulli(x.detach() / 2)).sum()

    drawn = []
    for g in (f, torch.compile(f, fullgraph=True)):
        torch.manual_seed(3)
        x = torch.ones(50, device="tpu", requires_grad=True)
        g(x).backward()
        assert x.grad is not None
        drawn.append(x.grad.cpu())
    assert torch.equal(*drawn)


def test_inference_mode_and_training_with_one_function() -> None:
    compiled = torch.compile(nn.Linear(3, 2).to("tpu"), fullgraph=True)
    x = torch.ones(1, 3, device="tpu")
    with torch.inference_mode():
        out = compiled(x)
        assert out.is_inference()
        out.add_(1)
    with torch.no_grad():
        assert not compiled(x).requires_grad
    compiled(x).sum().backward()
    assert compiled.weight.grad.tolist() == [[1, 1, 1]] * 2


def test_buffers_that_count() -> None:
    host_model = nn.BatchNorm1d(4)
    model = copy.deepcopy(host_model).to("tpu")
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(compiled(x.to("tpu")).cpu(), host_model(x))
    assert model.num_batches_tracked.item() == 2
    torch.testing.assert_close(model.running_var.cpu(), host_model.running_var)


def test_compiled_autograd() -> None:
    host_model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    model = copy.deepcopy(host_model).to("tpu")
    x = torch.randn(3, 4)
    host_model(x).sum().backward()
    with torch._dynamo.compiled_autograd._enable(torch.compile(fullgraph=True)):
        model(x.to("tpu")).sum().backward()
    assert torch._dynamo.utils.counters["compiled_autograd"]["captures"] == 1
    for p, q in zip(host_model.parameters(), model.parameters()):
        assert p.grad is not None and q.grad is not None
        torch.testing.assert_close(q.grad.cpu(), p.grad)


def test_compiled_autograd_of_a_compiled_model() -> None:
    model = nn.Linear(4, 1).to("tpu")
    compiled = torch.compile(model)

    def step(x: Tensor) -> None:
        compiled(x).sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step)(torch.ones(3, 4, device="tpu"))
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[3, 3, 3, 3]]


OPTIMIZERS: list[Callable[..., torch.optim.Optimizer]] = [
    lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    lambda p, lr: torch.optim.AdamW(p, lr=lr),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_optimizer_steps_with_a_schedule(make: Callable[..., torch.optim.Optimizer]) -> None:
    """With the learning rate in a tensor, a schedule compiles nothing anew."""
    trained = []
    for device in ("cpu", "tpu"):
        torch.manual_seed(0)
        model = nn.Linear(4, 4).to(device)
        optimizer = make(model.parameters(), torch.tensor(0.01))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        step = torch.compile(optimizer.step) if device == "tpu" else optimizer.step
        for i in range(4):
            optimizer.zero_grad()
            model(torch.full((2, 4), float(i), device=device)).square().sum().backward()
            if i == 3 and device == "tpu":
                with torch.compiler.set_stance("fail_on_recompile"):
                    step()
            else:
                step()
            scheduler.step()
        trained.append([p.detach().cpu() for p in model.parameters()])
    for want, got in zip(*trained, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_batches_of_gradients() -> None:
    def f(x: Tensor) -> Tensor:
        return x.tanh() @ x[0] * x.shape[0]

    compiled = torch.compile(f, dynamic=True)
    for n in (3, 4):
        x = torch.randn(n, n)
        want = torch.autograd.functional.jacobian(f, x, vectorize=True)
        got = torch.autograd.functional.jacobian(compiled, x.to("tpu"), vectorize=True)
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)


def test_batches_of_gradients_of_what_a_graph_draws() -> None:
    @torch.compile
    def f(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(
            lambda x: F.dropout(x.sin(), 0.5), x, use_reentrant=False
        )

    x = torch.ones(8, device="tpu", requires_grad=True)
    basis = torch.eye(8, device="tpu")
    with pytest.raises(UnsupportedOpError, match="draws random numbers"):
        torch.autograd.grad(f(x), x, basis, is_grads_batched=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_dual_numbers_keep_their_tangents(dynamic: bool) -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.softmax(x.sin() * w, -1)
        return y.sum(-1), (y @ y.mT).relu()

    compiled = torch.compile(f, dynamic=dynamic)
    for n in (4, 6):
        x, w, t = torch.randn(n, 3), torch.randn(3), torch.randn(n, 3)
        with fwad.dual_level():
            wanted = [fwad.unpack_dual(y) for y in f(fwad.make_dual(x, t), w)]
            dual = fwad.make_dual(x.to("tpu"), t.to("tpu"))
            found = [fwad.unpack_dual(y) for y in compiled(dual, w.to("tpu"))]
            # No tangent: the program runs.
            plain = [fwad.unpack_dual(y) for y in compiled(x.to("tpu"), w.to("tpu"))]
        for want, got, without in zip(wanted, found, plain, strict=True):
            torch.testing.assert_close(got.primal.cpu(), want.primal)
            torch.testing.assert_close(got.tangent.cpu(), want.tangent)
            torch.testing.assert_close(without.primal.cpu(), want.primal)
            assert without.tangent is None
