"""Matrix factorisation: embeddings with sparse gradients, bags of tags, ranking at the end."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

USERS, ITEMS, TAGS, DIM = 500, 300, 40, 16


class Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, DIM), nn.Embedding(ITEMS, DIM)
        self.user_bias, self.item_bias = nn.Embedding(USERS, 1), nn.Embedding(ITEMS, 1)
        self.tags = nn.EmbeddingBag(TAGS, DIM, mode="mean")
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, u: torch.Tensor, i: torch.Tensor, tags: torch.Tensor, starts: torch.Tensor):
        item = self.items(i) + self.tags(tags, starts)
        bias = self.user_bias(u) + self.item_bias(i)
        return (self.users(u) * item).sum(-1) + bias.squeeze(-1)


def run(device: str) -> Iterator[float]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    true = torch.randn(USERS, 4, generator=g) @ torch.randn(4, ITEMS, generator=g)
    tags_of = [torch.randint(TAGS, (n,), generator=g) for n in torch.arange(ITEMS) % 5 + 1]
    model = Factors().to(device)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    step = 0
    while True:
        u = torch.randint(USERS, (256,), generator=g)
        i = torch.randint(ITEMS, (256,), generator=g)
        bags = [tags_of[k] for k in i.tolist()]
        starts = torch.tensor([0, *(len(b) for b in bags[:-1])]).cumsum(0)
        inputs = (t.to(device) for t in (u, i, torch.cat(bags), starts))
        loss = F.mse_loss(model(*inputs), true[u, i].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        rank = 0.0
        if step % 5 == 0:
            with torch.no_grad():
                scores = model.users.weight[:50] @ model.items.weight.T
                order = scores.argsort(dim=1, descending=True, stable=True)[:, :10]
                best = true[:50].argmax(1).to(device)
                rank = (order == best[:, None]).any(1).float().mean().item()
        yield loss.item() + rank
