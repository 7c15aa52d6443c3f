"""Graphs with ops that had no lowering, and graphs that are split around ops that have none."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from tpu_core.errors import GraphSplitWarning
from tpu_core.metrics import METRICS

Tensor = torch.Tensor
Function = Callable[..., Any]
IS_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
# There `torch.compile(backend="aot_eager")` of `torch.linalg.inv` on the CPU gives infinities too.
KEEPS_CHECKS = pytest.mark.skipif(
    IS_OLD, reason="AOTAutograd of torch 2.11 leaves checks without a result out, on every device"
)


@pytest.fixture(autouse=True)
def reset_metrics() -> Iterator[None]:
    METRICS.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def definite(x: Tensor) -> Tensor:
    return x @ x.mT + torch.eye(x.shape[-2], device=x.device)


def two(x: Tensor) -> Tensor:
    return torch.stack([definite(x), definite(x * 2)])


def per_channel(x: Tensor, zero: torch.dtype) -> Tensor:
    rows = torch.arange(x.shape[0], device=x.device)
    scale = (rows + 1) * 0.05
    return torch.fake_quantize_per_channel_affine(x, scale, rows.to(zero), 0, 0, 20)


def per_tensor(x: Tensor) -> Tensor:
    scale, zero = torch.tensor([0.1]), torch.tensor([3], dtype=torch.int32)
    return torch.fake_quantize_per_tensor_affine(x, scale.to(x.device), zero.to(x.device), -5, 20)


WHOLE: dict[str, Function] = {
    "one_hot": lambda x: F.one_hot(x.long().abs() % 5, 5).float().sum(0) * x.sum(),
    "cholesky": lambda x: torch.linalg.cholesky(definite(x)),
    "cholesky of a batch": lambda x: torch.linalg.cholesky(two(x)),
    "solve": lambda x: torch.linalg.solve(definite(x), x),
    "inv": lambda x: torch.linalg.inv(two(x)),
    "lu_factor": lambda x: torch.linalg.lu_factor(definite(x))[0],
    "det": lambda x: torch.linalg.det(definite(x)),
    "slogdet": lambda x: torch.linalg.slogdet(definite(x)),
    "pinv": lambda x: torch.linalg.pinv(x),
    "pinv with tolerances": lambda x: torch.linalg.pinv(definite(x), atol=0.1, hermitian=True),
    "circular": lambda x: F.pad(x[None], (1, 1), mode="circular"),
    "quantile": lambda x: x.quantile(0.25, 0),
    "fake quantization": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, 0, 20),
    "fake quantization, tensors": per_tensor,
    "bilinear": lambda x: F.bilinear(x, x + 1, torch.ones(2, 6, 6, device=x.device) / 7),
    "diag_embed": lambda x: torch.diag_embed(x),
    "all true": lambda x: torch._is_all_true(x > -9) & torch._is_any_true(x > 9),
    "a list as index": lambda x: x[[0, 2]] * 2,
    "a range of the CPU as index": lambda x: x[torch.arange(3)] * 2,
    "a constant": lambda x: x * torch.tensor([1.0, 2, 3, 4, 5, 6]).to(x.device),
    "a resize": lambda x: F.interpolate(
        x[None, None], size=(7, 9), mode="bilinear", align_corners=True
    ),
    "a window": lambda x: x * torch.hamming_window(6, device=x.device),
    "sizes": lambda x: x / torch.tensor([x.shape[0], 2, 3, 4, 5, 6]).to(x.device),
}

PARTS: dict[str, tuple[Function, str]] = {
    "eigvals": (lambda x: torch.linalg.eigvals(definite(x)).real.sum() * 2, "aten.linalg_eig"),
    "segments": (
        lambda x: torch.segment_reduce(
            x.exp(), "sum", lengths=torch.tensor([1, x.shape[0] - 1], device=x.device)
        ).log(),
        "aten.segment_reduce",
    ),
    "of the CPU": (lambda x: (x.relu().cpu() + 1).to(x.device) * 2, "aten._to_copy"),
    "to the CPU": (lambda x: (x.exp().sum(), x.exp().cpu()), "aten._to_copy"),
    "written": (lambda x: (x * 3).cpu().mul_(2).to(x.device) + x, "aten._to_copy"),
}


def compare(f: Function, dynamic: bool) -> None:
    """Compare results and gradients with the CPU's, in and out of autograd."""
    compiled = torch.compile(f, fullgraph=True, dynamic=dynamic or None)
    for rows in (4, 5, 6) if dynamic else (4, 4):
        x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))
        for function, device in ((f, "cpu"), (compiled, "tpu")):
            given = x.detach().to(device).requires_grad_()
            with torch.no_grad():
                found = tree_leaves(function(given))
            results = tree_leaves(function(given))
            differentiable = [r for r in results if r.requires_grad]
            if differentiable:
                torch.stack([r.cpu().sum() for r in differentiable]).sum().backward()
            found += [*results, given.grad]
            found = tree_map_only(Tensor, lambda t: t.detach().cpu(), found)
            if device == "cpu":
                wanted = found
        torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", WHOLE)
def test_graphs_are_compiled_whole(name: str, dynamic: bool) -> None:
    if name == "quantile" and dynamic and IS_OLD:
        # Dynamo of torch 2.11 refuses it on every device: "Cannot call numel() on tensor with
        # symbolic sizes".
        with pytest.raises(torch._dynamo.exc.TorchRuntimeError):
            compare(WHOLE[name], dynamic)
        return
    compare(WHOLE[name], dynamic)
    assert METRICS.graph_splits() == {}
    assert METRICS.snapshot()["fallbacks"] == 0


@pytest.mark.parametrize("zero", [torch.int32, torch.float32])
def test_fake_quantization_of_channels(zero: torch.dtype) -> None:
    compare(lambda x: per_channel(x, zero), dynamic=False)
    assert METRICS.graph_splits() == {}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30, 0.25, 0.35])
def test_fake_quantization_of_odd_values(value: float) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.fake_quantize_per_tensor_affine(x, 0.1, 3, 0, 20), per_channel(x, torch.int32)

    given = torch.tensor([value, -value, 1.0])
    got = torch.compile(f)(given.to("tpu"))
    torch.testing.assert_close([g.cpu() for g in got], [*f(given)])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PARTS)
def test_graphs_are_split_around_ops_without_a_lowering(name: str, dynamic: bool) -> None:
    f, op = PARTS[name]
    compare(f, dynamic)
    assert op in {split.op.removesuffix(".default") for split in METRICS.graph_splits()}
    assert METRICS.snapshot()["graph_splits"] > 0


def test_what_lies_around_such_an_op_is_compiled() -> None:
    @torch.compile(fullgraph=True)
    def f(x: Tensor) -> Tensor:
        y = (x * 2 + 1).relu().exp()
        return (torch.linalg.eigvals(y).abs() * 3 + 1).log().sum()

    x = torch.rand(4, 4)
    got = f(x.to("tpu")).item()
    y = (x * 2 + 1).relu().exp()
    assert got == pytest.approx(
        (torch.linalg.eigvals(y).abs() * 3 + 1).log().sum().item(), rel=1e-4
    )
    assert {e.contents[0][1] for e in METRICS.compile_events()} == {"tpu_compile.graph"}
    (split,) = METRICS.graph_splits()
    assert split.op == "aten.linalg_eig.default"
    assert split.why == "it has no lowering"
    assert split.line is not None
    assert "test_graph_splits.py" in split.line
    report = str(torch.tpu.compile_report())
    assert "Ops outside of compiled graphs" in report
    assert "aten.linalg_eig.default" in report
    assert "aten.linalg_eig.default" in torch.tpu.compile_report().to_html()


def test_a_split_is_told_once_an_op() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.linalg.eigvals(x + 1).abs() * 2

    x = torch.rand(3, 3).to("tpu")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.compile(f, fullgraph=True)(x)
        torch._dynamo.reset()
        torch.compile(f, fullgraph=True)(x)
    (warning,) = [w for w in told if issubclass(w.category, GraphSplitWarning)]
    assert "aten.linalg_eig.default" in str(warning.message)
    assert warning.filename == __file__
    assert [*METRICS.graph_splits().values()] == [2]


SINGULAR = torch.tensor([[1.0, 2], [2, 4]])
ERRORS: dict[str, tuple[Function, Tensor]] = {
    "inv": (lambda x: torch.linalg.inv(x) + 1, SINGULAR),
    "inv of a batch": (lambda x: torch.linalg.inv(x) + 1, torch.stack([torch.eye(2), SINGULAR])),
    "solve": (lambda x: torch.linalg.solve(x, x) + 1, SINGULAR),
    "cholesky": (lambda x: torch.linalg.cholesky(x) + 1, -torch.eye(3)),
    "cholesky of a batch": (
        lambda x: torch.linalg.cholesky(x) + 1,
        torch.stack([torch.eye(2), -torch.eye(2)]),
    ),
    "lu_factor": (lambda x: torch.linalg.lu_factor(x)[0] + 1, SINGULAR),
}


@KEEPS_CHECKS
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ERRORS)
def test_matrices_without_an_inverse_raise_as_on_the_cpu(name: str, dynamic: bool) -> None:
    f, x = ERRORS[name]
    with pytest.raises(RuntimeError) as wanted:
        f(x)
    compiled = torch.compile(f, fullgraph=True, dynamic=dynamic)
    with pytest.raises(type(wanted.value)) as found:
        compiled(x.to("tpu")).cpu()
    assert str(found.value) == str(wanted.value)
    good = torch.eye(x.shape[-1]).expand(x.shape).clone()
    torch.testing.assert_close(compiled(good.to("tpu")).cpu(), f(good))


@KEEPS_CHECKS
@pytest.mark.parametrize(("label", "text"), [(5, "smaller than num_classes"), (-1, "non-negative")])
def test_labels_that_are_no_class_raise(label: int, text: str) -> None:
    f = torch.compile(lambda t: F.one_hot(t, 5) + 1, fullgraph=True)
    with pytest.raises(RuntimeError, match=f"one_hot: Class values must be {text}"):
        f(torch.tensor([1, label]).to("tpu")).cpu()
    assert f(torch.tensor([1, 4]).to("tpu")).cpu()[1].tolist() == [1, 1, 1, 1, 2]
    assert METRICS.graph_splits() == {}


def test_numbers_of_the_cpu_are_inputs() -> None:
    f = torch.compile(lambda x, rate, at: (x * rate)[at] + rate, fullgraph=True)
    x, at = torch.randn(4, 6), torch.tensor([2, 0])
    for rate in (0.5, 3.0):
        number = torch.tensor(rate)
        got = f(x.to("tpu"), number, at).cpu()
        torch.testing.assert_close(got, (x * number)[at] + number)
    assert METRICS.graph_splits() == {}


@torch.library.custom_op("tpu_test_splits::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("tpu_test_splits::add_one", mutates_args=("x",))
def add_one(x: Tensor) -> None:
    x.add_(1)


def test_ops_of_a_library_run_between_the_parts() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = twice(x.exp()) + 1
        z = y.relu()
        add_one(z)
        return z * 2, torch.dropout(y, 0.5, True)

    x = torch.randn(4, 6)
    got = torch.compile(f, fullgraph=True)(x.to("tpu"))
    torch.testing.assert_close(got[0].cpu(), f(x)[0])
    names = {split.op for split in METRICS.graph_splits()}
    assert names == {"tpu_test_splits.twice.default", "tpu_test_splits.add_one.default"}


def test_random_ops_draw_in_the_order_of_eager() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        first = torch.rand_like(x)
        second = torch.rand_like(twice(first) + x)
        third = torch.rand_like(x)
        return first, second, third

    x = torch.zeros(3, device="tpu")
    torch.manual_seed(1)
    wanted = f(x)
    torch.manual_seed(1)
    got = torch.compile(f, fullgraph=True)(x)
    torch.testing.assert_close([g.cpu() for g in got], [w.cpu() for w in wanted])


def test_prints_keep_their_order(capfd: pytest.CaptureFixture[str]) -> None:
    def f(x: Tensor) -> Tensor:
        torch.ops.aten._print("first")
        y = torch.linalg.inv(x * 2)
        torch.ops.aten._print("second")
        return y + 1

    x = torch.eye(2)
    got = torch.compile(f, fullgraph=True)(x.to("tpu"))
    torch.testing.assert_close(got.cpu(), x / 2 + 1)
    assert capfd.readouterr().out.split() == ["first", "second"]


def test_checks_of_known_sizes_leave_a_graph_whole() -> None:
    def f(x: Tensor) -> Tensor:
        n = int(x.abs().sum().item())
        torch._check(n <= 16)
        return torch.ones(n, device=x.device) * x.mean()

    compiled = torch.compile(f)
    for x in (torch.ones(5), torch.ones(7), -torch.ones(5)):
        torch.testing.assert_close(compiled(x.to("tpu")).cpu(), f(x))
    assert METRICS.graph_splits() == {}


@pytest.mark.parametrize("dynamic", [False, True])
def test_memory_out_of_order_is_read_op_by_op(dynamic: bool) -> None:
    def f(x: Tensor) -> Tensor:
        return torch.linalg.eigvals((x * 2)[1:].as_strided((2, 2), (1, 3), 1)).abs() + 1

    x = torch.randn(4, 6)
    got = torch.compile(f, fullgraph=True, dynamic=dynamic)(x.to("tpu")).cpu()
    torch.testing.assert_close(got.sort().values, f(x).sort().values)
