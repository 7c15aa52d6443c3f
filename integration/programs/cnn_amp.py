"""A CNN with autocast and a gradient scaler, a short last batch, and a resume in each epoch."""

from __future__ import annotations

import io
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 32, 3)
        self.norm = nn.BatchNorm2d(32)
        self.head = nn.Sequential(nn.Linear(32 * 25, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.norm(self.conv2(x))), 2)
        return self.head(x.flatten(1))


def prepare(device: str) -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, torch.amp.GradScaler(device, init_scale=1024.0)


def run(device: str) -> Iterator[float]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    images = torch.randn(100, 1, 28, 28, generator=g)
    labels = (images.mean((1, 2, 3)) * 280).long().clamp(-5, 4) + 5
    loader = DataLoader(TensorDataset(images, labels), 32, shuffle=True, generator=g)
    model, optimizer, scaler = prepare(device)
    while True:
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
            yield loss.item()
        file = io.BytesIO()
        parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
        torch.save({k: part.state_dict() for k, part in parts.items()}, file)
        file.seek(0)
        saved = torch.load(file, map_location=device)
        model, optimizer, scaler = prepare(device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scaler.load_state_dict(saved["scaler"])
