"""`scan_layers`: the results of calling the layers one by one, in programs that do not grow."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tpu_compile import scan_layers
from tpu_compile.layers import LAYERS
from tpu_core import _C
from tpu_core.pjrt import client as pjrt

Tensor = torch.Tensor
Run = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def fused() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.tpu.set_eager_mode("fused"):
        yield


class Block(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, scale: Tensor | None = None, twice: bool = False) -> Tensor:
        y = self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))
        return x + (y if scale is None else y * scale) * (2 if twice else 1)


def stack(count: int, **options: Any) -> nn.ModuleList:
    return nn.ModuleList(Block(**options) for _ in range(count))


def one_by_one(layers: nn.ModuleList, x: Tensor, *args: Any, **_: Any) -> Tensor:
    for layer in layers:
        x = layer(x, *args)
    return x


def compiled(layers: nn.ModuleList, x: Tensor, *args: Any, **options: Any) -> Tensor:
    def f(x: Tensor) -> Tensor:
        return scan_layers(layers, x.sin(), *args, **options).cos()

    result: Tensor = torch.compile(f, fullgraph=True)(x)
    return result


def around(run: Run) -> Run:
    """What `compiled` computes, with the layers called another way."""
    return lambda layers, x, *args, **options: run(layers, x.sin(), *args, **options).cos()


def step(
    run: Run, layers: nn.ModuleList, inputs: list[Tensor], device: str, **options: Any
) -> list[Tensor]:
    """Result, gradients and buffers."""
    own = copy.deepcopy(layers).to(device)
    xs = [x.detach().clone().to(device).requires_grad_() for x in inputs]
    result = run(own, *xs, **options)
    result.square().sum().backward()
    found = [result, *(x.grad for x in xs), *(p.grad for p in own.parameters()), *own.buffers()]
    return [t.detach().cpu() for t in found if t is not None]


def assert_close(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("remat", [False, True])
def test_values_and_gradients(remat: bool) -> None:
    layers, inputs = stack(3), [torch.randn(4, 8), torch.randn(8)]
    want = step(around(one_by_one), layers, inputs, "cpu")
    assert_close(step(around(scan_layers), layers, inputs, "tpu", remat=remat), want)
    assert_close(step(compiled, layers, inputs, "tpu", remat=remat), want)


@pytest.mark.parametrize("remat", [False, True])
def test_gradients_may_be_written(remat: bool) -> None:
    """They share memory; writing one leaves the others alone, and they accumulate and clip."""
    layers, x = stack(3), torch.randn(4, 8)
    found = []
    for run, device in ((one_by_one, "cpu"), (scan_layers, "tpu")):
        own = copy.deepcopy(layers).to(device)
        for _ in range(2):
            run(own, x.to(device), remat=remat).square().sum().backward()
        nn.utils.clip_grad_norm_(own.parameters(), 1.0)
        first = own[1].get_parameter("up.weight").grad
        assert first is not None
        first[0].zero_()
        first.add_(1)
        torch.optim.AdamW(own.parameters(), lr=0.1).step()
        tensors = [t for p in own.parameters() for t in (p, p.grad) if t is not None]
        found.append([t.detach().cpu() for t in tensors])
    assert_close(found[1], found[0])


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_what_backward_does_not_read_may_be_written_before_it(name: str) -> None:
    for run, device in ((one_by_one, "cpu"), (scan_layers, "tpu")):
        layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)).to(device)
        result = run(layers, torch.ones(3, 4, device=device)).sum()
        with torch.no_grad():
            layers[1].get_parameter(name).zero_()
        if name == "bias":
            result.backward()
            assert layers[0].get_parameter(name).grad is not None
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                result.backward()


def test_no_copies_of_parameters_are_kept() -> None:
    LAYERS.clear()
    step(scan_layers, stack(3), [torch.randn(5, 8)], "tpu")
    (layer,) = LAYERS.values()
    assert all(m.shape[0] == 5 for m in layer.made())  # of the batch, not of a weight


def test_gradients_of_a_number() -> None:
    class Scaled(nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.tensor(by))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.by

    layers, x = nn.ModuleList(map(Scaled, (0.5, 2.0, -3.0))), [torch.randn(4)]
    assert_close(step(scan_layers, layers, x, "tpu"), step(one_by_one, layers, x, "cpu"))


def transformer() -> nn.ModuleList:
    return nn.ModuleList(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
    )


def test_compiled_with_sizes_that_vary() -> None:
    layers = transformer()
    own = copy.deepcopy(layers).to("tpu")
    run = torch.compile(lambda x: scan_layers(own, x), fullgraph=True, dynamic=True)
    for batch in (2, 3):
        x = torch.randn(batch, 5, 8)
        torch.testing.assert_close(
            run(x.to("tpu")).cpu(), one_by_one(layers, x), rtol=1e-4, atol=1e-5
        )


def test_compiled_with_arguments_that_are_none() -> None:
    layers, x = transformer(), torch.randn(2, 5, 8)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[:, 3:] = True
    own = copy.deepcopy(layers).to("tpu")
    run = torch.compile(
        lambda x, *args: scan_layers(own, x, *args, may_differ={"index"}), fullgraph=True
    )
    got = run(x.to("tpu"), None, mask.to("tpu"), False)
    want = one_by_one(layers, x, None, mask, False)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)


def test_on_the_cpu_the_layers_are_called() -> None:
    layers, inputs = stack(2), [torch.randn(4, 8)]
    assert_close(step(scan_layers, layers, inputs, "cpu"), step(one_by_one, layers, inputs, "cpu"))


def test_constants_and_no_gradients() -> None:
    layers, x = stack(3), torch.randn(4, 8)
    on_device = copy.deepcopy(layers).to("tpu")
    with torch.no_grad():
        for twice in (False, True, False):
            want = one_by_one(layers, x, None, twice)
            got = scan_layers(on_device, x.to("tpu"), None, twice)
            torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)


def test_frozen_parameters_have_no_gradient() -> None:
    layers = stack(3)
    for layer in layers:
        layer.up.requires_grad_(False)  # type: ignore[union-attr, operator]  # a Linear
    x = [torch.randn(4, 8)]
    assert_close(step(scan_layers, layers, x, "tpu"), step(one_by_one, layers, x, "cpu"))


@pytest.mark.parametrize("remat", [False, True])
def test_buffers_are_written(remat: bool) -> None:
    layers = nn.ModuleList(
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(3)
    )
    x = [torch.randn(16, 8)]
    want = step(one_by_one, layers, x, "cpu")
    assert_close(step(scan_layers, layers, x, "tpu", remat=remat), want)
    layers.eval()
    want = step(one_by_one, layers, x, "cpu")
    assert_close(step(scan_layers, layers, x, "tpu", remat=remat), want)


@pytest.mark.parametrize("run", [scan_layers, compiled])
@pytest.mark.parametrize("remat", [False, True])
def test_dropout(run: Run, remat: bool) -> None:
    """Each layer has a mask of its own, which its gradient knows."""
    layers = nn.ModuleList(nn.Dropout(0.25) for _ in range(2)).to("tpu")
    x = torch.full((1000,), 0.5, device="tpu", requires_grad=True)
    result = scan_layers(layers, x, remat=remat) if run is scan_layers else None
    if result is None:
        result = torch.compile(lambda x: scan_layers(layers, x, remat=remat), fullgraph=True)(x)
    result.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad * x.detach(), result.detach())
    kept = (result != 0).float().mean().item()
    assert abs(kept - 0.75**2) < 0.06  # one mask for both would keep 0.75


def test_attributes_that_change_are_seen() -> None:
    layers = stack(2, dropout=0.5).to("tpu")
    x = torch.ones(4, 8, device="tpu")
    assert not torch.equal(scan_layers(layers, x), scan_layers(layers, x))
    layers.eval()
    assert torch.equal(scan_layers(layers, x), scan_layers(layers, x))


def test_autocast() -> None:
    layers, x = stack(2), torch.randn(4, 8)
    on_device = copy.deepcopy(layers).to("tpu")
    with torch.autocast("tpu", dtype=torch.bfloat16), torch.no_grad():
        got = scan_layers(on_device, x.to("tpu"))
        want = one_by_one(on_device, x.to("tpu"))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    assert not torch.equal(got.cpu(), one_by_one(layers, x))


def programs(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> tuple[int, int]:
    """Kernels, and temporary bytes, of what something compiles."""
    sizes, kernels = [0], [0]
    load = pjrt.load

    def measured(executable: Any, *rest: Any) -> object:
        sizes.append(executable.get_compiled_memory_stats().temp_size_in_bytes)
        kernels[0] += pjrt.optimized_text(executable).count(" fusion(")
        return load(executable, *rest)

    torch.tpu.synchronize()
    _C.clear_programs()
    with monkeypatch.context() as patched:
        patched.setattr(pjrt, "load", measured)
        work()
        torch.tpu.synchronize()
    return kernels[0], max(sizes)


def test_programs_do_not_grow_with_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a gradient of each layer's own make a kernel for each."""
    x = [torch.randn(5, 8)]
    few, many = (
        programs(monkeypatch, lambda n=n: step(scan_layers, stack(n), x, "tpu"))[0]  # type: ignore[misc]
        for n in (3, 7)
    )
    assert few == many > 0


def test_rematerialization_saves_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, x = stack(8, width=16), [torch.randn(512, 16)]
    kept, saved = (
        programs(monkeypatch, lambda r=r: step(scan_layers, layers, x, "tpu", remat=r))[1]  # type: ignore[misc]
        for r in (False, True)
    )
    assert saved < 0.7 * kept, (saved, kept)


def test_keys_are_those_of_other_processes() -> None:
    def keys() -> set[str]:
        LAYERS.clear()
        step(scan_layers, stack(2, dropout=0.5), [torch.randn(3, 8)], "tpu")
        return set(LAYERS)

    torch.tpu.synchronize()  # what is recorded still needs its layers
    first = keys()
    assert len(first) == 1
    assert keys() == first


def test_export() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = stack(3)

        def forward(self, x: Tensor) -> Tensor:
            return scan_layers(self.layers, x)

    model = Model()
    x = torch.randn(4, 8)
    want = model(x)
    exported = torch.export.export(model.to("tpu"), (x.to("tpu"),))
    loops = [n for n in exported.graph.nodes if n.target is torch.ops.higher_order.scan]
    assert len(loops) == 1
    torch.testing.assert_close(exported.module()(x.to("tpu")).cpu(), want, rtol=1e-4, atol=1e-5)


def differing() -> Iterator[tuple[str, nn.ModuleList]]:
    layers = stack(3)
    layers[2].dropout = nn.Dropout(0.5)
    yield r"layer 0: dropout.p: 0.0\n  layer 2: dropout.p: 0.5", layers
    layers = stack(3)
    layers[1] = Block(width=8)
    layers[1].up = nn.Linear(8, 16, bias=False)
    yield r"layer 0: up.bias: float32\[16\] parameter on tpu\n  layer 1: up.bias: None", layers
    layers = stack(2)
    layers[1].norm = nn.RMSNorm(8)
    yield "layer 0: type of norm: LayerNorm\n  layer 1: type of norm: RMSNorm", layers
    layers = stack(2)
    layers[1].eval()
    yield "layer 0: training: True\n  layer 1: training: False", layers


@pytest.mark.parametrize(("message", "layers"), list(differing()))
def test_layers_that_differ(message: str, layers: nn.ModuleList) -> None:
    with pytest.raises(ValueError, match=message):
        scan_layers(layers.to("tpu"), torch.ones(2, 8, device="tpu"))


def test_attributes_may_differ_where_it_is_said() -> None:
    layers = stack(2).to("tpu")
    for i, layer in enumerate(layers):
        layer.index = i
    x = torch.ones(2, 8, device="tpu")
    with pytest.raises(ValueError, match="index: 0\n  layer 1: index: 1"):
        scan_layers(layers, x)
    torch.testing.assert_close(scan_layers(layers, x, may_differ={"index"}), one_by_one(layers, x))


def test_a_layer_that_changes_the_shape() -> None:
    layers = nn.ModuleList(nn.Linear(8, 4) for _ in range(2)).to("tpu")
    with pytest.raises(ValueError, match=r"input: float32\[2, 8\]\n  result: float32\[2, 4\]"):
        scan_layers(layers, torch.ones(2, 8, device="tpu"))


def test_hooks_are_refused() -> None:
    layers = stack(2).to("tpu")
    layers[1].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="forward hooks"):
        scan_layers(layers, torch.ones(2, 8, device="tpu"))


class Told(nn.Module):
    """Depends on what kind of number it is given or has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.steps: tuple[Any, ...] = (1,)
        self.act: Callable[[Tensor], Tensor] = torch.sin

    def forward(self, x: Tensor, n: Any) -> Tensor:
        kinds = [bool, int, float, str]
        number = 1 + kinds.index(type(n)) + 10 * (1 + kinds.index(type(self.steps[0])))
        sign = math.copysign(1, n) * math.copysign(1, self.steps[0])
        return self.act(x * self.weight) + sign * number


def test_constants_that_are_equal_and_not_the_same() -> None:
    x = torch.linspace(0, 1, 4)
    ours, theirs = ([Told().to(device) for _ in range(2)] for device in ("tpu", "cpu"))
    for steps in ((1,), (1.0,), (True,), (0.0,), (-0.0,)):
        for act in (torch.sin, torch.relu):
            for n in (1, 1.0, True, 0.0, -0.0):
                expected = x
                for layer in theirs:
                    layer.steps, layer.act = steps, act
                    expected = layer(expected, n)
                for layer in ours:
                    layer.steps, layer.act = steps, act
                torch.testing.assert_close(scan_layers(ours, x.to("tpu"), n).cpu(), expected)
