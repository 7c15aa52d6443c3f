"""Every optimizer of ``torch.optim`` moves a model as it does on the CPU, in each of its forms."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

STEPS = 4
CASES: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "Adadelta": (optim.Adadelta, {"lr": 1.0}),
    "Adafactor": (optim.Adafactor, {"lr": 1e-2}),
    "Adagrad": (optim.Adagrad, {"lr": 1e-2, "lr_decay": 1e-2}),
    "Adam": (optim.Adam, {"lr": 1e-2}),
    "Adam-amsgrad": (optim.Adam, {"lr": 1e-2, "amsgrad": True, "weight_decay": 1e-2}),
    "Adam-maximize": (optim.Adam, {"lr": 1e-2, "maximize": True}),
    "AdamW": (optim.AdamW, {"lr": 1e-2}),
    "Adamax": (optim.Adamax, {"lr": 1e-2}),
    "ASGD": (optim.ASGD, {"lr": 1e-2}),
    "LBFGS": (optim.LBFGS, {"lr": 0.1, "max_iter": 3}),
    "Muon": (optim.Muon, {"lr": 1e-2}),
    "NAdam": (optim.NAdam, {"lr": 1e-2}),
    "RAdam": (optim.RAdam, {"lr": 1e-2}),
    "RMSprop": (optim.RMSprop, {"lr": 1e-3, "momentum": 0.9, "centered": True, "eps": 1e-5}),
    "Rprop": (optim.Rprop, {"lr": 1e-2}),
    "SGD": (optim.SGD, {"lr": 0.1}),
    "SGD-nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD-weight-decay": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2}),
}
FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
}


def cases(*forms: str) -> list[Any]:
    return [
        pytest.param(name, form, id=f"{name}-{form}")
        for name, (optimizer, _) in CASES.items()
        for form in forms
        if FORMS[form].keys() <= inspect.signature(optimizer).parameters.keys()
    ]


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def random_batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)


def train(name: str, form: str, device: str, steps: int = STEPS) -> dict[str, torch.Tensor]:
    cls, options = CASES[name]
    if device == "tpu" or form == "fused":
        options = {**options, **FORMS[form]}
    model = small_model().to(device)
    # Muon is for matrices.
    parameters = [p for p in model.parameters() if cls is not optim.Muon or p.dim() == 2]
    optimizer = cls(parameters, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, target = (t.to(device) for t in random_batch(generator))

        def closure(x: torch.Tensor = x, target: torch.Tensor = target) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), target)
            loss.backward()
            return loss

        if cls is optim.LBFGS:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return {k: v.cpu() for k, v in model.state_dict().items()}


def check(name: str, form: str, mode: str) -> None:
    expected = train(name, form, "cpu")
    before = torch.tpu.metrics()
    with torch.tpu.set_eager_mode(mode):
        actual = train(name, form, "tpu")
    assert torch.tpu.metrics()["fallbacks"] == before["fallbacks"]
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name, form", cases(*FORMS))
def test_strict(name: str, form: str) -> None:
    check(name, form, "strict")


@pytest.mark.parametrize("name, form", cases("default", "fused"))
def test_fused_mode(name: str, form: str) -> None:
    check(name, form, "fused")


def test_learning_rate_in_a_tensor_compiles_once() -> None:
    """A schedule changes the value of the tensor, not the program."""
    model = small_model().to("tpu")
    rate = torch.tensor(1e-2)
    optimizer = optim.Adam(model.parameters(), lr=rate, fused=True)
    x, target = (t.to("tpu") for t in random_batch(torch.Generator().manual_seed(1)))
    programs = []
    for _ in range(6):
        before = torch.tpu.metrics()
        optimizer.zero_grad()
        F.mse_loss(model(x), target).backward()
        optimizer.step()
        rate.mul_(0.9)
        after = torch.tpu.metrics()
        programs.append(sum(after[k] - before[k] for k in ("compiles", "cache_hits_disk")))
    assert programs[3:] == [0, 0, 0]
