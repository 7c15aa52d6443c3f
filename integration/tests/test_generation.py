"""A GPT generates the same tokens on the device as on the CPU, with each kind of cache."""

from __future__ import annotations

import functools

import pytest
import torch
from training import every_mode

from models.gpt import GPT

TOKENS = 8


@functools.cache
def model_and_prompt() -> tuple[GPT, torch.Tensor]:
    torch.manual_seed(0)
    model = GPT(dim=32)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(8)  # far from uniform, so that the likeliest token is clear
    return model, torch.randint(64, (2, 5), generator=torch.Generator().manual_seed(0))


@functools.cache
def expected() -> list[list[int]]:
    model, prompt = model_and_prompt()
    return list(model.cpu().generate(prompt, TOKENS, None))


def generate(cache: str, mode: str) -> tuple[list[list[int]], list[float]]:
    """Tokens, and the number of programs made for each of them."""
    wanted = expected()
    model, prompt = model_and_prompt()
    model.to("tpu")
    tokens, programs = [], []
    with torch.tpu.set_eager_mode(mode):
        before = torch.tpu.metrics()
        for token in model.generate(prompt.to("tpu"), len(wanted), cache):
            after = torch.tpu.metrics()
            made = ("compiles", "cache_hits_disk")
            programs.append(sum(after[k] - before[k] for k in made))
            assert after["fallbacks"] == before["fallbacks"]
            tokens.append(token)
            before = after
    return tokens, programs


@every_mode
@pytest.mark.parametrize("cache", ["slice", "index"])
def test_cache_written_in_place(cache: str, mode: str) -> None:
    tokens, programs = generate(cache, mode)
    assert tokens == expected()
    # The prompt, then a step whose position moves.
    assert programs[3:] == [0] * (TOKENS - 3)


@every_mode
def test_cache_grown_by_concatenation(mode: str) -> None:
    tokens, _ = generate("cat", mode)
    assert tokens == expected()
    # The lengths are known by now.
    _, programs = generate("cat", mode)
    assert programs == [0] * TOKENS
