"""Evaluation of a classifier over batches: confusion matrix, top-k, masks, calibration, AUC."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

CLASSES, BINS = 10, 15


class Metrics:
    def __init__(self, device: str) -> None:
        self.confusion = torch.zeros(CLASSES, CLASSES, dtype=torch.long, device=device)
        self.right_of_5 = torch.zeros((), dtype=torch.long, device=device)
        self.bins = torch.zeros(3, BINS, device=device)
        self.scores: list[torch.Tensor] = []
        self.labels: list[torch.Tensor] = []
        self.count = 0

    def update(self, logits: torch.Tensor, y: torch.Tensor) -> None:
        known = y >= 0  # the others have no label
        logits, y = logits[known], y[known]
        p = logits.softmax(-1)
        confidence, guess = p.max(-1)
        self.confusion += torch.bincount(y * CLASSES + guess, minlength=CLASSES**2).view(
            CLASSES, CLASSES
        )
        self.right_of_5 += (logits.topk(5).indices == y[:, None]).any(1).sum()
        bucket = (confidence * BINS).long().clamp(max=BINS - 1)
        ones = torch.ones_like(confidence)
        self.bins[0].index_add_(0, bucket, ones)
        self.bins[1].index_add_(0, bucket, confidence)
        self.bins[2].index_add_(0, bucket, (guess == y).float())
        self.scores.append(p[:, 0])
        self.labels.append(y == 0)
        self.count += int(known.sum())

    def compute(self) -> dict[str, float]:
        hits = self.confusion.diag().float()
        precision = hits / self.confusion.sum(0).clamp(min=1)
        recall = hits / self.confusion.sum(1).clamp(min=1)
        f1 = 2 * precision * recall / (precision + recall).clamp(min=1e-9)
        n, confidence, right = self.bins
        full = n > 0
        gap = (confidence[full] - right[full]).abs().sum() / n.sum()
        labels = torch.cat(self.labels)[torch.argsort(torch.cat(self.scores), stable=True)]
        ranks = torch.arange(1, len(labels) + 1, device=labels.device)
        positive = labels.sum()
        area = ranks[labels].sum() - positive * (positive + 1) / 2
        return {
            "accuracy": hits.sum().item() / self.count,
            "top 5": self.right_of_5.item() / self.count,
            "F1": f1.mean().item(),
            "calibration": gap.item(),
            "AUC": (area / (positive * (len(labels) - positive))).item(),
        }


@torch.no_grad()
def run(device: str) -> Iterator[float]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, CLASSES)).to(device).eval()
    while True:
        metrics = Metrics(device)
        for size in (256, 256, 100):
            x = torch.randn(size, 32, generator=g).to(device)
            y = torch.randint(-1, CLASSES, (size,), generator=g).to(device)
            metrics.update(model(x), y)
        yield sum(metrics.compute().values())
