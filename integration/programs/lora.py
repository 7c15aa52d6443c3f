"""LoRA: frozen linear layers with trained products of low rank beside them, then merged."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, DIM, LENGTH = 200, 96, 32


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4, alpha: float = 8.0) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / rank
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.02)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b) * self.scale

    def merged(self) -> torch.Tensor:
        return self.base.weight + self.scale * self.b @ self.a


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        layer = nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, 0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        return self.head(self.body(self.embed(ids), mask=mask, is_causal=True))


def adapt(model: Model) -> list[LoRA]:
    """Freeze a model and put adapters beside its feed-forward layers."""
    model.requires_grad_(False)
    adapters = []
    for layer in model.body.layers:
        layer.linear1, layer.linear2 = LoRA(layer.linear1), LoRA(layer.linear2)
        adapters += [layer.linear1, layer.linear2]
    return adapters


def run(device: str) -> Iterator[torch.Tensor]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = Model()
    adapters = adapt(model)
    model.to(device).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    step = 0
    while True:
        ids = torch.randint(VOCAB // 4, (8, LENGTH + 1), generator=g).to(device)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 5 == 0:  # what would be saved
            with torch.no_grad():
                loss = loss + sum(adapter.merged().norm() for adapter in adapters)
        yield loss.detach()
