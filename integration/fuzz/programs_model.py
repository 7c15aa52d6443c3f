"""Models, batches and optimizers of the fuzzer ``programs``, from plain data; torch alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import programs_images, programs_sequences

Spec = dict[str, Any]
Step = dict[str, Any]
CLASSES = 5
TOKENS = 11
_seeded = threading.Lock()


class Model(nn.Module):
    """A stem, blocks, a head; gives the loss of a batch."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        width = spec["width"]
        self.spec = spec
        self.images = spec["family"] == "images"
        self.table = nn.Embedding(TOKENS, width)
        self.stem = nn.Conv2d(3, width, 1) if self.images else nn.Linear(3, width)
        blocks = programs_images if self.images else programs_sequences
        self.blocks = nn.ModuleList(
            getattr(blocks, b["kind"])(width, **{k: v for k, v in b.items() if k != "kind"})
            for b in spec["blocks"]
        )
        self.head = nn.Linear(width, CLASSES)
        self.read: Callable[[Tensor], None] | None = None  # of an activation, while it is made

    def forward(self, data: dict[str, Tensor]) -> Tensor:
        x: Tensor = self.stem(data["features"])
        if not self.images:
            x = x + self.table(data["tokens"])
        for i, block in enumerate(self.blocks):
            x = block(x, data)
            if self.read is not None and i == len(self.blocks) // 2:
                self.read(x)
        loss = self.spec["loss"]
        if self.images:
            x = x.mean((2, 3))
        elif loss != "each":
            x = x.mean(1)
        # Autocast computes losses in float32 on the device, as on CUDA, and on the CPU does not.
        y = self.head(x).float()
        if loss == "each" and not self.images:
            n = y.shape[1]
            valid = torch.arange(n, device=y.device) < data["lengths"][:, None]
            labels = (data["tokens"] % CLASSES).masked_fill(~valid, -100)
            return F.cross_entropy(y.flatten(0, 1), labels.flatten())
        if loss == "mse":
            return F.mse_loss(y, F.one_hot(data["labels"], CLASSES).to(y.dtype))
        return F.cross_entropy(y, data["labels"], label_smoothing=0.1 if loss == "smooth" else 0.0)


def build(spec: Spec) -> Model:
    with _seeded, torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec["seed"])
        return Model(spec)


def batch(spec: Spec, step: Step) -> dict[str, Tensor]:
    """A step's batch on the CPU."""
    g = torch.Generator().manual_seed(step["seed"])
    b, n = step["batch"], step["size"]
    shape = (b, 3, *n) if spec["family"] == "images" else (b, n[0], 3)
    data = {
        "features": torch.randn(shape, generator=g),
        "labels": torch.randint(CLASSES, (b,), generator=g),
    }
    if spec["family"] != "images":
        data["tokens"] = torch.randint(TOKENS, (b, n[0]), generator=g)
        data["lengths"] = torch.randint(1, n[0] + 1, (b,), generator=g)
        data["keys"] = torch.stack([torch.randperm(n[0], generator=g) for _ in range(b)])
    return data


def optimizer(spec: Spec, model: nn.Module) -> torch.optim.Optimizer:
    options = dict(spec["optimizer"])
    made: torch.optim.Optimizer = getattr(torch.optim, options.pop("name"))(
        model.parameters(), **options
    )
    return made


def loss_of(model: Callable[..., Tensor], spec: Spec, data: dict[str, Tensor]) -> Tensor:
    if not spec["autocast"]:
        return model(data)
    with torch.autocast(data["features"].device.type, torch.bfloat16):
        return model(data)


def backward_and_update(
    loss: Tensor, model: nn.Module, optim: torch.optim.Optimizer, spec: Spec, step: Step
) -> None:
    loss.backward()
    if spec["clip"]:
        nn.utils.clip_grad_norm_(model.parameters(), spec["clip"])
    if step["updates"]:
        optim.step()
        for group in optim.param_groups:
            group["lr"] *= spec["decay"]
