"""A GPT: pre-norm decoder-only transformer with learned positions and tied embeddings.

Generation comes with three key-value caches: one grown by concatenation, and fixed ones written in
place by slice or by index.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn as nn
import torch.nn.functional as F


class GrowingCache:
    """Keys and values of one layer, grown by ``torch.cat``."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, position: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``[batch, heads, new, dim]``; returns everything cached so far."""
        if self.keys is None or self.values is None:
            self.keys, self.values = keys, values
        else:
            self.keys = torch.cat((self.keys, keys), dim=2)
            self.values = torch.cat((self.values, values), dim=2)
        return self.keys, self.values


class FixedCache:
    """Keys and values of one layer in buffers of full length.

    Args:
        batch, heads, length, dim: Shape of the buffers.
        device, dtype: Where and of what they are.
        by_index: Write with ``index_copy_`` at a tensor of positions, else into a slice.
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        length: int,
        dim: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        by_index: bool = False,
    ) -> None:
        self.keys = torch.zeros(batch, heads, length, dim, device=device, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self.by_index = by_index

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, position: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[batch, heads, new, dim]`` from ``position`` on; returns the whole buffers."""
        new = keys.shape[2]
        if self.by_index:
            where = torch.arange(position, position + new, device=keys.device)
            self.keys.index_copy_(2, where, keys)
            self.values.index_copy_(2, where, values)
        else:
            self.keys[:, :, position : position + new] = keys
            self.values[:, :, position : position + new] = values
        return self.keys, self.values


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(
        self,
        x: torch.Tensor,
        cache: GrowingCache | FixedCache | None = None,
        position: int = 0,
    ) -> torch.Tensor:
        batch, length, dim = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, dim // self.heads).transpose(1, 2)
            for t in self.qkv(x).split(dim, dim=2)
        )
        if cache is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            k, v = cache.update(k, v, position)
            queries = torch.arange(position, position + length, device=x.device)
            mask = torch.arange(k.shape[2], device=x.device) <= queries[:, None]
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(y.transpose(1, 2).reshape(batch, length, dim))


class Block(nn.Module):
    """Attention, then a GELU MLP, each on a normalised copy of the residual stream."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(
        self,
        x: torch.Tensor,
        cache: GrowingCache | FixedCache | None = None,
        position: int = 0,
    ) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), cache, position)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Decoder-only transformer.

    Args:
        vocab: Number of tokens.
        length: Longest sequence.
        layers, dim, heads: Size of the model.
    """

    def __init__(
        self, vocab: int = 64, length: int = 32, layers: int = 2, dim: int = 64, heads: int = 2
    ) -> None:
        super().__init__()
        self.length, self.heads = length, heads
        self.tokens, self.positions = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        for block in self.blocks:
            # What is added to the residual stream is scaled by its depth, as in GPT-2.
            for linear in (block.attention.proj, block.down):
                nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * layers))

    def forward(
        self,
        ids: torch.Tensor,
        caches: list[GrowingCache] | list[FixedCache] | None = None,
        position: int = 0,
    ) -> torch.Tensor:
        where = torch.arange(position, position + ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(where)
        for i, block in enumerate(self.blocks):
            x = block(x, caches[i] if caches else None, position)
        return self.head(self.norm(x))

    def loss(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())

    def caches(self, kind: str, batch: int) -> list[GrowingCache] | list[FixedCache]:
        """Empty caches, one a layer, of kind ``"cat"``, ``"slice"`` or ``"index"``."""
        if kind == "cat":
            return [GrowingCache() for _ in self.blocks]
        weight = self.head.weight
        shape = (batch, self.heads, self.length, weight.shape[1] // self.heads)
        return [
            FixedCache(*shape, weight.device, weight.dtype, by_index=kind == "index")
            for _ in self.blocks
        ]

    @torch.no_grad()
    def generate(self, prompt: torch.Tensor, tokens: int, cache: str | None) -> Iterator[list[int]]:
        """Greedy continuation of ``prompt``, each token read by the host as it comes.

        Args:
            prompt: Token ids ``[batch, length]``.
            tokens: How many to add.
            cache: Kind of key-value cache, None to read the whole sequence again at each token.

        Yields:
            The next token of each row.
        """
        caches = self.caches(cache, len(prompt)) if cache else None
        position, ids = 0, prompt
        for _ in range(tokens):
            new = self(ids, caches, position)[:, -1:].argmax(-1)
            yield new.squeeze(1).tolist()
            if caches:
                position, ids = position + ids.shape[1], new
            else:
                ids = torch.cat((ids, new), dim=1)


def random_batch(
    generator: torch.Generator, size: int = 4, length: int = 32, vocab: int = 64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and the ids that follow them, ``[size, length]`` each."""
    ids = torch.randint(vocab, (size, length + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]
