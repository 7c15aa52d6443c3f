"""Several tasks with a head each, drawn at random in each step; uncertainties weigh the losses."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 96
TASKS = {"digits": 10, "sign": 1, "angle": 2, "order": 4}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(40, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU()
        )
        self.heads = nn.ModuleDict({k: nn.Linear(WIDTH, n) for k, n in TASKS.items()})
        self.log_variance = nn.ParameterDict({k: nn.Parameter(torch.zeros(())) for k in TASKS})

    def loss(self, task: str, x: torch.Tensor) -> torch.Tensor:
        out = self.heads[task](self.body(x))
        match task:
            case "digits":
                loss = F.cross_entropy(out, x[:, :10].argmax(1))
            case "sign":
                loss = F.binary_cross_entropy_with_logits(out[:, 0], (x.sum(1) > 0).float())
            case "angle":
                wanted = F.normalize(x[:, :2], dim=1)
                loss = (1 - F.cosine_similarity(out, wanted)).mean()
            case _:
                loss = F.smooth_l1_loss(out, x[:, :4].sort(1).values)
        weight = self.log_variance[task]
        return loss * (-weight).exp() + weight


def run(device: str) -> Iterator[float]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = Model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    names = list(TASKS)
    while True:
        chosen = [names[i] for i in torch.randperm(len(names), generator=g)[:2].tolist()]
        size = int(torch.randint(2, 5, (), generator=g)) * 16
        loss = torch.zeros((), device=device)
        for task in chosen:
            loss = loss + model.loss(task, torch.randn(size, 40, generator=g).to(device))
        optimizer.zero_grad()  # heads that were not drawn have no gradient
        loss.backward()
        optimizer.step()
        yield loss.item()
