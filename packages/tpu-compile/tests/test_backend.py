"""`torch.compile` on the device gives what eager gives on the CPU."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F


def counts(run: Callable[[], object]) -> tuple[int, int]:
    """(compiles, executions) of a call and what it left to be run."""
    torch.tpu.synchronize()
    before = torch.tpu.metrics()
    run()
    torch.tpu.synchronize()
    after = torch.tpu.metrics()
    return int(after["compiles"] - before["compiles"]), int(
        after["executions"] - before["executions"]
    )


def check(f: Callable[..., Any], *inputs: torch.Tensor, calls: int = 2, **options: Any) -> None:
    """Compare results, inputs and gradients of eager on the CPU and compiled on the device."""
    seen: list[list[torch.Tensor]] = []
    for device in ("cpu", "tpu"):
        own = copy.deepcopy(f).to(device) if isinstance(f, nn.Module) else f
        xs = [x.detach().clone().to(device).requires_grad_(x.requires_grad) for x in inputs]
        run = torch.compile(own, fullgraph=True, **options) if device == "tpu" else own
        for _ in range(calls):
            out = run(*xs)
        results = [out] if isinstance(out, torch.Tensor) else list(out)
        total = sum(r.float().sum() for r in results if r.is_floating_point())
        if isinstance(total, torch.Tensor) and total.requires_grad:
            total.backward()
        found = [*results, *xs, *(x.grad for x in xs)]
        if isinstance(own, nn.Module):
            found += [*own.buffers(), *(p.grad for p in own.parameters())]
        seen.append([t.detach().cpu() for t in found if t is not None])
    for host, device_result in zip(*seen, strict=True):
        torch.testing.assert_close(device_result, host, rtol=1e-4, atol=1e-5)


def test_values_and_gradients() -> None:
    w = torch.randn(4, 4, requires_grad=True)
    check(lambda x, w: (torch.tanh(x @ w) * 2).sum(), torch.randn(4, 4), w)


def test_inputs_that_are_written() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        y[1:].mul_(x[1:])
        return x * y

    check(f, torch.randn(3, 4), torch.randn(3, 4))


def test_buffers_of_batch_norm() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    check(model, torch.randn(2, 3, 6, 6))


def test_saved_factors_of_a_transposed_matrix() -> None:
    """They depend on how the matrix lies in memory, which the gradient's formula asks again."""
    a = torch.tensor([[2.0, 1.0, 0.5], [0.25, 3.0, 1.5], [4.0, 0.75, 1.0]], requires_grad=True)
    check(lambda a: torch.linalg.det(a.mT), a)
    check(torch.linalg.det, a)


def test_a_transformer_layer() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    check(layer, torch.randn(2, 5, 16, requires_grad=True), calls=1)


def test_views_of_inputs_share_their_memory() -> None:
    f = torch.compile(lambda x: (x.t(), x.view(-1), x), fullgraph=True)
    x = torch.randn(3, 4).to("tpu")
    transposed, flat, same = f(x)
    assert same is x
    x.fill_(2)
    assert transposed.tolist() == [[2] * 3] * 4
    flat[0] = 7
    assert x[0, 0].item() == 7
    assert transposed.data_ptr() == x.data_ptr()


def test_random_numbers_are_those_of_eager() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5) + torch.rand_like(x) + torch.randn(20, device=x.device)

    x = torch.ones(20, device="tpu")
    drawn = []
    for run in (f, torch.compile(f, fullgraph=True)):
        torch.manual_seed(7)
        drawn.append([run(x).cpu() for _ in range(3)])
        drawn[-1].append(torch.tpu.get_rng_state())
    for eager, compiled in zip(*drawn, strict=True):
        assert torch.equal(eager, compiled)


def test_sizes_that_vary_share_a_few_programs() -> None:
    f = torch.compile(
        lambda x, w: torch.softmax(x @ w, -1).sum(0) * x.shape[0], dynamic=True, fullgraph=True
    )
    w = torch.randn(4, 6)
    device_w = w.to("tpu")
    sizes = (3, 5, 6, 7, 9, 11, 12, 15)
    inputs = [torch.randn(n, 4) for n in sizes]

    def run() -> None:
        for x in inputs:
            got = f(x.to("tpu"), device_w).cpu()
            want = torch.softmax(x @ w, -1).sum(0) * x.shape[0]
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)

    assert counts(run)[0] <= 4
    assert counts(run)[0] == 0


def test_a_graph_break_falls_into_eager() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x)
        if y.sum() > 0:
            return y * 2
        return y - 1

    compiled = torch.compile(f)
    for x in (torch.ones(3), -torch.ones(3)):
        torch.testing.assert_close(compiled(x.to("tpu")).cpu(), f(x))


def test_dynamo_does_not_look_into_what_an_op_compiles() -> None:
    """jax's tracing runs where a graph broke: its frames are none of the user's."""

    def f(x: torch.Tensor) -> float:
        y = torch.sin(x)
        torch._dynamo.graph_break()
        return (y * 2).sum().item()

    x = torch.ones(3, 7)
    assert torch.compile(f)(x.to("tpu")) == pytest.approx(f(x), rel=1e-5)
    assert torch._dynamo.utils.counters["frames"]["total"] == 2  # up to the break, and the rest


def test_a_training_step_ends_as_one_program() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1)).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(4, 8).to("tpu")

    def step() -> None:
        optimizer.zero_grad()
        compiled(x).square().mean().backward()
        optimizer.step()

    with torch.tpu.set_eager_mode("fused"):
        for _ in range(3):
            step()
        assert counts(step) == (0, 1)


def test_inference_mode() -> None:
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    device_model = torch.compile(copy.deepcopy(model).to("tpu"), fullgraph=True)
    with torch.inference_mode():
        torch.testing.assert_close(device_model(x.to("tpu")).cpu(), model(x))


def test_a_tensor_made_in_the_graph() -> None:
    f = torch.compile(lambda: torch.arange(4, device="tpu") * 2, fullgraph=True)
    assert f().tolist() == [0, 2, 4, 6]


def test_a_tensor_on_the_cpu_among_the_inputs() -> None:
    def f(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * scale + 1

    x, scale = torch.randn(3), torch.tensor(2.0)
    compiled = torch.compile(f)
    torch.testing.assert_close(compiled(x.to("tpu"), scale).cpu(), f(x, scale))


def test_a_graph_that_is_traced_again_has_the_same_key() -> None:
    from tpu_compile.graph_op import GRAPHS

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) + 1

    keys = []
    for _ in range(2):
        torch._dynamo.reset()
        GRAPHS.clear()
        torch.compile(f)(torch.ones(3, device="tpu"))
        keys.append(list(GRAPHS))
    assert keys[0] == keys[1]
    assert len(keys[0]) == 1


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.t() @ x,
        lambda x: x.view(2, 2, 6)[1].expand(3, 2, 6) + 1,
        lambda x: x.split(2, 1)[1][:2] * x.chunk(2, 0)[0][:, 2:4],
        lambda x: x.unfold(1, 2, 2).select(2, 0).permute(1, 0).squeeze().contiguous(),
        lambda x: torch.diagonal(x, 1) + x.unsqueeze(0).transpose(1, 2)[0, 0, :4],
        lambda x: torch.as_strided(x * 2, (2, 3), (1, 6), 1),
    ],
)
def test_views_are_part_of_the_graph(f: Callable[[torch.Tensor], torch.Tensor]) -> None:
    from tpu_compile.graph_op import GRAPHS

    torch.tpu.synchronize()  # what is recorded still needs its graphs
    GRAPHS.clear()
    check(f, torch.randn(4, 6, requires_grad=True), calls=1)
    assert len(GRAPHS) == 2  # forward and backward


def test_a_compile_names_the_users_line() -> None:
    from tpu_core.metrics import METRICS

    torch.compile(lambda x: torch.sin(x) * 3, fullgraph=True)(torch.ones(37, device="tpu")).cpu()
    assert "test_backend.py" in str(METRICS.compile_events()[-1].line)


def test_random_numbers_compile_once_whatever_the_seed() -> None:
    f = torch.compile(lambda x: torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x))
    x = torch.ones(7).to("tpu")
    torch.manual_seed(0)
    f(x).cpu()
    with torch.tpu.no_recompile():
        f(x).cpu()
        torch.manual_seed(1)
        f(x).cpu()


def test_the_first_compiles_of_several_threads() -> None:
    code = """
        import importlib.metadata, threading, time, torch

        load = importlib.metadata.EntryPoint.load

        def slow(self):
            time.sleep(1)
            return load(self)

        importlib.metadata.EntryPoint.load = slow
        import torch._dynamo

        def work():
            compiled.append(torch.compile(torch.neg))

        compiled = []
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print([f(torch.ones(2, device="tpu")).tolist() for f in compiled])
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.stdout, done.stderr) == ("[[-1.0, -1.0], [-1.0, -1.0]]\n", "")
