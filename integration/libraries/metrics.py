"""torchmetrics: collections over batches of any size."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def classification(device: str) -> Iterator[tuple[str, Tensor]]:
    import torchmetrics

    names = ("Accuracy", "F1Score", "AUROC", "ConfusionMatrix", "CohenKappa", "AveragePrecision")
    names += ("CalibrationError", "MatthewsCorrCoef", "Specificity")
    metrics = [getattr(torchmetrics, name)("multiclass", num_classes=5) for name in names]
    collection = torchmetrics.MetricCollection(metrics).to(device)
    generator = torch.Generator().manual_seed(0)
    for rows in (10, 13, 16, 19):
        scores = torch.randn(rows, 5, generator=generator).softmax(-1)
        labels = torch.randint(5, (rows,), generator=generator)
        collection.update(scores.to(device), labels.to(device))
    yield from collection.compute().items()


def regression(device: str) -> Iterator[tuple[str, Tensor]]:
    import torchmetrics

    names = ("R2Score", "PearsonCorrCoef", "SpearmanCorrCoef", "KendallRankCorrCoef")
    names += ("ExplainedVariance", "ConcordanceCorrCoef", "MeanAbsolutePercentageError")
    metrics = [getattr(torchmetrics, name)() for name in names]
    collection = torchmetrics.MetricCollection(metrics).to(device)
    generator = torch.Generator().manual_seed(0)
    for rows in (20, 21, 24):
        truth, noise = (torch.randn(rows, generator=generator) for _ in range(2))
        collection.update((truth + 0.3 * noise).to(device), truth.to(device))
    yield from collection.compute().items()


def images(device: str) -> Iterator[tuple[str, Tensor]]:
    import torchmetrics.functional.image as functional

    generator = torch.Generator().manual_seed(0)
    first, second = (torch.rand(2, 3, 32, 32, generator=generator).to(device) for _ in range(2))
    for name in ("structural_similarity_index_measure", "universal_image_quality_index"):
        yield name, getattr(functional, name)(first, second)
