"""Models train on the device as they do on the CPU, in every eager mode."""

from __future__ import annotations

import copy
from types import ModuleType

import pytest
import torch
from training import JOBS, MODES, STEPS, every_mode, train, train_on_cpu

from models import encoder, vit

# float64 stands beside float32 in the mode whose programs round in an order of their own.
DETERMINISTIC = [
    (name, mode)
    for name in JOBS
    if name != "encoder-dropout"
    for mode in (["fused"] if name.endswith("float64") else MODES)
]
FIRST = 5


@pytest.mark.parametrize("name, mode", DETERMINISTIC)
def test_losses_and_parameters_agree_with_the_cpu(name: str, mode: str) -> None:
    tpu = train(name, mode)
    cpu = train_on_cpu(name, len(tpu.losses))
    of_losses, of_parameters, of_buffers = JOBS[name].tolerance
    torch.testing.assert_close(tpu.losses, cpu.losses, rtol=0, atol=of_losses)
    if not JOBS[name].autocast:
        torch.testing.assert_close(tpu.losses[:FIRST], cpu.losses[:FIRST], rtol=0, atol=1e-5)
    assert cpu.losses[-4:].mean() < cpu.losses[:4].mean()  # there was something to learn
    change = torch.cat([(p - cpu.initial[k]).flatten() for k, p in cpu.parameters.items()])
    distance = torch.cat([(tpu.parameters[k] - p).flatten() for k, p in cpu.parameters.items()])
    assert distance.norm() < of_parameters * change.norm()
    assert tpu.buffers.keys() == cpu.buffers.keys()
    for key, buffer in cpu.buffers.items():
        torch.testing.assert_close(tpu.buffers[key], buffer, rtol=1e-3, atol=of_buffers)


@every_mode
def test_losses_read_between_steps_are_those_of_the_steps(mode: str) -> None:
    run = train("mlp", mode)
    assert run.printed == {step: run.losses[step].item() for step in range(0, len(run.losses), 10)}


def losses_with_dropout(device: str, draws: int = 64) -> torch.Tensor:
    torch.manual_seed(0)
    model = encoder.Encoder(layers=1, dropout=0.3).to(device)
    batch = [x.to(device) for x in encoder.random_batch(torch.Generator().manual_seed(1))]
    torch.manual_seed(2)
    with torch.no_grad():
        return torch.tensor([model.loss(*batch).item() for _ in range(draws)])


def test_dropout_has_the_statistics_of_the_cpu() -> None:
    cpu = losses_with_dropout("cpu")
    losses = {}
    for mode in MODES:
        with torch.tpu.set_eager_mode(mode):
            losses[mode] = losses_with_dropout("tpu")
    tpu = losses["fused"]
    error = ((cpu.var() + tpu.var()) / len(cpu)).sqrt()
    assert abs(tpu.mean() - cpu.mean()) < 4 * error
    assert 0.6 < tpu.std() / cpu.std() < 1.6
    # One seed draws the same numbers in every mode.
    torch.testing.assert_close(losses["strict"], tpu, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(losses["debug"], tpu, rtol=1e-5, atol=1e-5)


@every_mode
def test_training_with_dropout_learns_as_on_the_cpu(mode: str) -> None:
    tpu = train("encoder-dropout", mode)
    cpu = train_on_cpu("encoder-dropout", STEPS[mode])
    assert tpu.losses[-4:].mean() < 0.8 * tpu.losses[:4].mean()
    # Two runs on the CPU with other seeds are as far apart.
    torch.testing.assert_close(tpu.losses, cpu.losses, rtol=0, atol=0.2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mode", ["strict", "fused"])
@pytest.mark.parametrize("module", [encoder, vit])
def test_evaluation_agrees_with_the_cpu(module: ModuleType, mode: str) -> None:
    """Without gradients torch.nn's attention takes paths of its own."""
    torch.manual_seed(0)
    model = encoder.Encoder(layers=1) if module is encoder else vit.ViT(layers=1)
    inputs = module.random_batch(torch.Generator().manual_seed(1))[0]
    device_model = copy.deepcopy(model).to("tpu").eval()
    with torch.no_grad():
        expected = model.eval()(inputs)
        before = torch.tpu.metrics()
        with torch.tpu.set_eager_mode(mode):
            actual = device_model(inputs.to("tpu")).cpu()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert torch.tpu.metrics()["fallbacks"] == before["fallbacks"]
