"""Which layers are scanned, and why others are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn

from tpu_compile.aot.capture import AotJob
from tpu_compile.aot.layers import capture_scanned
from tpu_compile.aot.repeats import find
from tpu_core import lowering, runtime
from tpu_core.errors import DataDependentError, MeshError


@pytest.fixture(autouse=True, scope="module")
def started() -> None:
    runtime.runtime()
    lowering.load()


class Layer(nn.Module):
    def __init__(self, dim: int = 4, number: int = 0) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(dim, dim), number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Signs(torch.optim.Optimizer):
    """By the sign of each parameter's mean gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad.mean().sign())


class Model(nn.Module):
    """Layers in a list, called as a test wants it."""

    def __init__(self, kind: str = "plain", layers: int = 4) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(Layer(number=i) for i in range(layers))

    def forward(self, x: torch.Tensor) -> Any:
        kept = []
        if self.kind == "by number":
            for i in range(4):
                x = self.layers[i](x)
            return x
        for layer in self.layers:
            if self.kind == "twice":
                x = layer(x)
            x = layer(x)
            if self.kind == "kept":
                kept.append(x)
            if self.kind == "head":
                kept = [x.sum() + sum(kept)]
            if self.kind == "between":
                x = x * 2
        return (x, kept) if kept else x


def job(model: nn.Module, **options: Any) -> AotJob:
    return AotJob(model, (torch.empty(8, 4),), {}, {}, **options)


def notes_of(model: nn.Module, least: int = 2) -> list[str]:
    runs, notes = find(job(model), least)
    assert not runs
    return notes


def test_layers_of_a_list_and_of_a_sequential_are_found() -> None:
    (run,), notes = find(job(Model()), 2)
    assert run.prefixes == tuple(f"layers.{i}" for i in range(4))
    assert run.label == "layers.*" and not notes
    (run,), _ = find(job(nn.Sequential(*(Layer() for _ in range(3)))), 2)
    assert run.names == ("0", "1", "2") and run.label == "*"


def test_equal_layers_between_others_are_found() -> None:
    model = nn.Sequential(nn.Linear(4, 4), *(Layer() for _ in range(3)), nn.Linear(4, 2))
    (run,), _ = find(job(model), 3)
    assert run.names == ("1", "2", "3")


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("twice", "a layer is called more than once"),
        ("kept", "what a layer returns is used elsewhere"),
        ("head", "what a layer returns is used elsewhere"),
        ("between", "what a layer returns is used elsewhere"),
    ],
)
def test_layers_that_are_used_otherwise_are_left_with_a_note(kind: str, told: str) -> None:
    (note,) = notes_of(Model(kind))
    assert told in note and note.startswith("The layers of layers are compiled one by one")


def test_layers_that_do_different_things_are_left() -> None:
    model = Model()
    model.layers[2].forward = lambda x: torch.relu(x)  # type: ignore[method-assign]  # on purpose
    assert not find(job(model), 3)[0]
    model = Model()
    model.layers[1].linear.bias = None
    assert "they differ" in notes_of(model, 3)[0]


def test_layers_that_write_to_buffers_are_left() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.BatchNorm1d(4)) for _ in range(3)))
    assert "a layer writes to its buffers" in notes_of(model)[0]
    assert find(job(model.eval()), 2)[0]


def test_few_layers_are_not_scanned_unless_asked() -> None:
    assert not capture_scanned(job(Model()), "auto", False)[1]
    assert not capture_scanned(job(Model(layers=8)), False, False)[1]
    _, (run,), (note,) = capture_scanned(job(Model(layers=8)), "auto", False)
    assert len(run.names) == 8 and "The 8 layers layers.* are compiled as one loop" in note


def test_layers_that_are_called_by_number_are_compiled_one_by_one() -> None:
    captured, runs, notes = capture_scanned(job(Model("by number")), True, False)
    assert not runs and captured.outputs == ["output.0"]
    assert "compiled layer by layer: with one of them in their place the model raises" in notes[0]


def test_layers_that_ask_for_checkpointing_keep_their_inputs() -> None:
    model = Model()
    for layer in model.layers:
        layer.gradient_checkpointing = True  # type: ignore[assignment]  # as transformers has it
    (run,), _ = find(job(model), 2)
    assert run.remat


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (Signs, "Signs may update a stack of parameters"),
        (
            lambda ps: torch.optim.SGD([{"params": [p]} for p in ps], lr=0.1),
            "in several groups of the optimizer",
        ),
    ],
)
def test_optimizers_that_see_more_than_elements_keep_layers_apart(make: Any, told: str) -> None:
    _, runs, notes = capture_scanned(
        job(Model(), loss=lambda m, x: m(x).sum(), optimizer=make), True, False
    )
    assert not runs and told in notes[0]


def test_parameters_that_no_gradient_reaches_have_none() -> None:
    model = nn.Sequential(*(Layer() for _ in range(3)))
    for layer in model:
        layer.unused = nn.Parameter(torch.ones(4))
    captured, (run,), _ = capture_scanned(job(model, loss=lambda m, x: m(x).sum()), True, False)
    assert run.label == "*"
    assert set(captured.outputs) == {
        *("loss", "gradient of *.linear.weight", "gradient of *.linear.bias")
    }


def test_layers_that_are_divided_differently_cannot_be_stacked() -> None:
    rules = {"layers.1.linear.weight": ("data",)}
    own = AotJob(Model(), (torch.empty(8, 4),), {}, {"data": 2}, shardings=rules)
    with pytest.raises(MeshError, match="'layers.0.linear.weight' and 'layers.1.linear.weight'"):
        capture_scanned(own, True, False)


def test_an_optimizer_that_reads_values_is_an_error() -> None:
    own = job(Model(), loss=lambda m, x: m(x).sum(), optimizer=torch.optim.Adafactor)
    with pytest.raises(DataDependentError):
        capture_scanned(own, False, False)
