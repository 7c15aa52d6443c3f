"""Speculative decoding: a small model drafts, a large one accepts as many tokens as agree."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

VOCAB, DRAFTED, TOKENS = 32, 4, 16


class Model(nn.Module):
    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.places = nn.Embedding(64, dim)
        layer = nn.TransformerEncoderLayer(dim, 2, 2 * dim, 0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        t = ids.shape[1]
        x = self.embed(ids) + self.places.weight[:t]
        mask = torch.ones(t, t, dtype=torch.bool, device=ids.device).triu(1)
        # A preference for one token after another, so that the two models agree now and then.
        likely = nn.functional.one_hot((3 * ids + 1) % VOCAB, VOCAB).float()
        return self.head(self.body(x, mask)) + 1.5 * likely


@torch.no_grad()
def decode(large: Model, small: Model, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Append tokens; how many of those drafted were accepted."""
    accepted, end = 0, ids.shape[1] + TOKENS
    while ids.shape[1] < end:
        n = ids.shape[1]
        draft = ids
        for _ in range(DRAFTED):
            draft = torch.cat([draft, small(draft)[:, -1].argmax(-1, keepdim=True)], dim=1)
        wanted = large(draft)[:, n - 1 :].argmax(-1)
        agreed = (wanted[:, :-1] == draft[:, n:]).long().cumprod(1).sum().item()
        ids = torch.cat([draft[:, : n + agreed], wanted[:, agreed : agreed + 1]], dim=1)
        accepted += agreed
    return ids[:, :end], accepted


def run(device: str) -> Iterator[float]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    large, small = Model(96, 3).to(device).eval(), Model(32, 1).to(device).eval()
    while True:
        length = int(torch.randint(4, 12, (), generator=g))
        ids, accepted = decode(
            large, small, torch.randint(VOCAB, (1, length), generator=g).to(device)
        )
        yield accepted + ids.float().mean().item()
