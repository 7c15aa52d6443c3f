"""Training runs whose losses, parameters and counters the tests compare."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from models import autoencoder, encoder, gpt, mlp, resnet, rnn, vit

MODES = ("strict", "debug", "fused")
# Debug, which waits for every op, runs the programs of Strict; a few steps of it are enough.
STEPS = {"strict": 100, "debug": 20, "fused": 100}


@dataclass(frozen=True)
class Job:
    """A model and how it is trained.

    Attributes:
        model: Makes the model.
        batch: Makes a batch on the CPU from a generator.
        optimizer: Makes the optimizer of a list of parameters.
        clip: Largest norm of the gradients, None to leave them.
        autocast: Whether the forward runs in bfloat16 where PyTorch's lists say so.
        tolerance: How far from the CPU's a loss may be, absolute; what training changed in the
            parameters, as a share of the norm of that change; and a buffer, absolute.
        dtype: Of the model and of the batch's floating-point tensors.
        most_steps: Bound on the mode's number of steps.
    """

    model: Callable[[], torch.nn.Module]
    batch: Callable[[torch.Generator], tuple[torch.Tensor, ...]]
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
    clip: float | None = None
    autocast: bool = False
    tolerance: tuple[float, float, float] = (1e-4, 1e-3, 1e-4)
    dtype: torch.dtype = torch.float32
    most_steps: int = 100


# bfloat16 keeps 8 bits, and the lists of what autocast runs in it differ between devices: on the
# CPU itself, training with and without autocast ends 0.07 apart.
BFLOAT16 = (0.05, 0.15, 1e-4)
# Rounding switches ReLUs whose input is close to zero, and batch norm over a few values amplifies
# that: on the CPU itself, weights that differ by 3e-7 end 0.006 apart in the loss, by 1e-6 0.02.
# The first steps agree closely, and in float64 all of them.
BATCH_NORM = (0.03, 0.3, 0.1)


def adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    # With a smaller eps Adam would amplify gradients that are zero but for rounding.
    return torch.optim.Adam(parameters, lr=3e-3, eps=1e-6)


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.95), eps=1e-6)


def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


JOBS = {
    "mlp": Job(mlp.MLP, mlp.random_batch, adam),
    "gpt": Job(gpt.GPT, gpt.random_batch, adamw, 1.0),
    "gpt-bf16": Job(gpt.GPT, gpt.random_batch, adamw, 1.0, True, BFLOAT16),
    "resnet18": Job(resnet.ResNet18, resnet.random_batch, sgd, tolerance=BATCH_NORM),
    "resnet18-float64": Job(
        resnet.ResNet18,
        resnet.random_batch,
        sgd,
        tolerance=(1e-6, 1e-6, 1e-6),
        dtype=torch.float64,
        most_steps=30,
    ),
    "lstm": Job(functools.partial(rnn.RecurrentLM, "lstm"), rnn.random_batch, adam),
    "gru": Job(functools.partial(rnn.RecurrentLM, "gru"), rnn.random_batch, adam),
    "encoder": Job(
        functools.partial(encoder.Encoder, layers=1, dropout=0.0), encoder.random_batch, adam
    ),
    "encoder-dropout": Job(
        functools.partial(encoder.Encoder, layers=1), encoder.random_batch, adam
    ),
    "vit": Job(functools.partial(vit.ViT, layers=1), vit.random_batch, adam),
    "autoencoder": Job(autoencoder.Autoencoder, autoencoder.random_batch, adam),
}
FLOAT32_JOBS = [name for name, job in JOBS.items() if job.dtype is torch.float32]


@dataclass
class Run:
    """What a training run left behind.

    Attributes:
        losses: Loss of each step.
        initial: The model's parameters before training, on the CPU.
        parameters, buffers: The trained model's, on the CPU.
        counted: What `torch.tpu.metrics` counted in each step; empty on the CPU.
        printed: Losses read by ``.item()`` between steps, by step.
    """

    losses: torch.Tensor
    initial: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    counted: list[dict[str, float]]
    printed: dict[int, float]


@functools.cache
def train(name: str, mode: str) -> Run:
    """Train a job's model on ``tpu`` in an eager mode.

    Each step moves a batch to the device, one of four in turn, so that the model learns them; the
    learning rate follows a cosine. Every tenth loss is read back between two steps, from the first
    on.
    """
    with torch.tpu.set_eager_mode(mode):
        return _train(JOBS[name], torch.device("tpu"), min(STEPS[mode], JOBS[name].most_steps))


@functools.cache
def train_on_cpu(name: str, steps: int) -> Run:
    """The same run on the CPU."""
    return _train(JOBS[name], torch.device("cpu"), steps)


def _train(job: Job, device: torch.device, steps: int) -> Run:
    torch.manual_seed(0)
    model = job.model().to(job.dtype)
    initial = {k: v.detach().clone() for k, v in model.named_parameters()}
    model.to(device)
    parameters = list(model.parameters())
    optimizer = job.optimizer(parameters)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    generator = torch.Generator().manual_seed(1)
    batches = [
        [x.to(job.dtype) if x.is_floating_point() else x for x in job.batch(generator)]
        for _ in range(4)
    ]
    losses, counted, printed = [], [], {}
    for step in range(steps):
        before = torch.tpu.metrics() if device.type == "tpu" else {}
        batch = [x.to(device) for x in batches[step % len(batches)]]
        with torch.autocast(device.type, torch.bfloat16, enabled=job.autocast):
            loss = model.loss(*batch)
        optimizer.zero_grad()
        loss.backward()
        if job.clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, job.clip)
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
        if device.type == "tpu":
            after = torch.tpu.metrics()
            counted.append({k: v - before.get(k, 0) for k, v in after.items()})
        if step % 10 == 0:
            printed[step] = loss.item()
    return Run(
        torch.stack(losses).cpu(),
        initial,
        {k: v.detach().cpu() for k, v in model.named_parameters()},
        {k: v.cpu() for k, v in model.named_buffers()},
        counted,
        printed,
    )


every_mode = pytest.mark.parametrize("mode", MODES)
