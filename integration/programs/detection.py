"""Detection as in DETR: queries matched with boxes by a solver on the host."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import nn

QUERIES, CLASSES, DIM = 20, 5, 64
Target = dict[str, torch.Tensor]


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 32, 4, 4), nn.ReLU(), nn.Conv2d(32, DIM, 2, 2), nn.Flatten(2)
        )
        self.places = nn.Parameter(torch.randn(64, DIM) * 0.1)
        self.queries = nn.Parameter(torch.randn(QUERIES, DIM))
        layer = nn.TransformerDecoderLayer(DIM, 4, 128, 0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.classes, self.boxes = nn.Linear(DIM, CLASSES + 1), nn.Linear(DIM, 4)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        memory = self.backbone(images).transpose(1, 2) + self.places
        states = self.decoder(self.queries.expand(len(images), -1, -1), memory)
        return self.classes(states), self.boxes(states).sigmoid()


@torch.no_grad()
def match(logits: torch.Tensor, boxes: torch.Tensor, targets: list[Target]) -> list:
    p = logits.flatten(0, 1).softmax(-1)
    ids = torch.cat([t["labels"] for t in targets])
    wanted = torch.cat([t["boxes"] for t in targets])
    cost = 5 * torch.cdist(boxes.flatten(0, 1), wanted, p=1) - p[:, ids]
    cost = cost.view(len(targets), QUERIES, -1).cpu()
    sizes = [len(t["labels"]) for t in targets]
    parts = enumerate(cost.split(sizes, -1))
    solved = [linear_sum_assignment(c[i]) for i, c in parts]
    return [(torch.as_tensor(a), torch.as_tensor(b)) for a, b in solved]


def criterion(logits: torch.Tensor, boxes: torch.Tensor, targets: list[Target]) -> torch.Tensor:
    pairs = match(logits, boxes, targets)
    batch = torch.cat([torch.full_like(a, i) for i, (a, _) in enumerate(pairs)])
    query = torch.cat([a for a, _ in pairs])
    wanted = torch.full(logits.shape[:2], CLASSES, device=logits.device)
    wanted[batch, query] = torch.cat([t["labels"][b] for t, (_, b) in zip(targets, pairs)])
    weight = torch.ones(CLASSES + 1, device=logits.device)
    weight[-1] = 0.1
    of_boxes = torch.cat([t["boxes"][b] for t, (_, b) in zip(targets, pairs)])
    distance = F.l1_loss(boxes[batch, query], of_boxes, reduction="sum") / len(of_boxes)
    return F.cross_entropy(logits.transpose(1, 2), wanted, weight) + 5 * distance


def run(device: str) -> Iterator[float]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = Detector().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    while True:
        targets = []
        for n in torch.randint(1, 6, (4,), generator=g).tolist():
            labels = torch.randint(CLASSES, (n,), generator=g).to(device)
            targets.append({"labels": labels, "boxes": torch.rand(n, 4, generator=g).to(device)})
        loss = criterion(*model(torch.randn(4, 3, 64, 64, generator=g).to(device)), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        yield loss.item()
