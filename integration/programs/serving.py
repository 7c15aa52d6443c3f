"""A server: requests of other batches and lengths, a key-value cache that grows by cat."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, DIM, HEADS, LAYERS = 256, 128, 4, 2
RANGES = ((1, 5), (4, 40), (4, 16))  # of batches, prompts and answers
Cache = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: torch.Tensor, cache: Cache | None) -> tuple[torch.Tensor, Cache]:
        b, t, _ = x.shape
        qkv = self.qkv(self.norms[0](x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv
        if cache is not None:
            k, v = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, DIM))
        return x + self.mlp(self.norms[1](x)), (k, v)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        self.positions = nn.Embedding(128, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(
        self, ids: torch.Tensor, start: int, caches: list[Cache | None]
    ) -> tuple[torch.Tensor, list[Cache | None]]:
        places = torch.arange(start, start + ids.shape[1], device=ids.device)
        x, grown = self.tokens(ids) + self.positions(places), []
        for block, cache in zip(self.blocks, caches):
            x, cache = block(x, cache)
            grown.append(cache)
        return self.head(x[:, -1]), grown


@torch.inference_mode()
def generate(model: Decoder, prompt: torch.Tensor, tokens: int) -> torch.Tensor:
    logits, caches = model(prompt, 0, [None] * LAYERS)
    made = [logits.argmax(-1, keepdim=True)]
    for i in range(tokens - 1):
        logits, caches = model(made[-1], prompt.shape[1] + i, caches)
        made.append(logits.argmax(-1, keepdim=True))
    return torch.cat(made, dim=1)


def run(device: str) -> Iterator[float]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    model = Decoder().to(device).eval()
    while True:
        size, length, tokens = (int(torch.randint(*r, (), generator=g)) for r in RANGES)
        prompt = torch.randint(VOCAB, (size, length), generator=g).to(device)
        texts = generate(model, prompt, tokens).tolist()
        yield float(sum(i * t for text in texts for i, t in enumerate(text)))
