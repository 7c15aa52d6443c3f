"""Rows G: random numbers."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from .process import run_python


def draw(generator: torch.Generator | None = None) -> torch.Tensor:
    return torch.rand(8, device="tpu", generator=generator).cpu()


def parts(state: torch.Tensor) -> tuple[int, int]:
    """Seed and offset of a state."""
    raw = bytes(state.tolist())
    return int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little")


def check_seeding() -> None:
    code = """
        import torch
        torch.manual_seed(3)
        assert not torch.tpu.is_initialized()
        first = torch.rand(8, device="tpu").cpu()
        torch.manual_seed(3)
        assert torch.equal(first, torch.rand(8, device="tpu").cpu())
    """
    run_python(code)
    quiet = "import torch; torch.manual_seed(3); torch.tpu.manual_seed_all(4)"
    assert run_python(quiet, "-W", "error") == ""
    assert torch.tpu._is_in_bad_fork() is False
    torch.tpu.manual_seed_all(5)
    a = draw()
    torch.manual_seed(5)
    assert torch.equal(a, draw())
    assert not torch.equal(a, draw())


def check_rng_state() -> None:
    torch.manual_seed(11)
    for device in ((), (0,), ("tpu",), ("tpu:0",), (torch.device("tpu"),)):
        state = torch.tpu.get_rng_state(*device)
        first = draw()
        torch.tpu.set_rng_state(state, *device)
        assert torch.equal(first, draw())
    forks: list[dict[str, Any]] = [{"devices": [0], "device_type": "tpu"}]
    # torch 2.11 takes CUDA where no kind of device is named.
    if inspect.signature(torch.random.fork_rng).parameters["device_type"].default is None:
        forks += [{}, {"devices": [0]}]
    for options in forks:
        state = torch.tpu.get_rng_state()
        with torch.random.fork_rng(**options):
            inside = draw()
        assert torch.equal(torch.tpu.get_rng_state(), state)
        assert torch.equal(inside, draw())


def check_rng_layout() -> None:
    torch.manual_seed(1234)
    state = torch.tpu.get_rng_state()
    assert (state.dtype, state.shape, state.device.type) == (torch.uint8, (16,), "cpu")
    assert parts(state) == (1234, 0)
    first = draw()
    seed, offset = parts(torch.tpu.get_rng_state())
    assert seed == 1234
    assert offset > 0
    second = draw()
    # DTensor writes a seed and an offset of its own into the state.
    made = torch.tensor(list((1234).to_bytes(8, "little") + offset.to_bytes(8, "little")))
    torch.tpu.set_rng_state(made.to(torch.uint8))
    assert torch.equal(second, draw())
    torch.tpu.set_rng_state(state.to("tpu").to("cpu"))
    assert torch.equal(first, draw())
    with pytest.raises((RuntimeError, TypeError, ValueError), match="16"):
        torch.tpu.set_rng_state(torch.zeros(5, dtype=torch.uint8))


def check_rng_functions() -> None:
    torch.tpu.manual_seed(7)
    assert torch.tpu.initial_seed() == 7
    torch.tpu.seed()
    first = torch.tpu.initial_seed()
    torch.tpu.seed_all()
    assert torch.tpu.initial_seed() != first
    states = torch.tpu.get_rng_state_all()
    assert len(states) == torch.tpu.device_count()
    a = draw()
    torch.tpu.set_rng_state_all(states)
    assert torch.equal(a, draw())
    torch.tpu.manual_seed(8)
    assert torch.tpu.default_generators[0].initial_seed() == 8
    assert torch.tpu.default_generators[0].device == torch.device("tpu", 0)


def check_generators() -> None:
    generator = torch.Generator(device="tpu")
    assert generator.device == torch.device("tpu", 0)
    assert generator.manual_seed(5) is generator
    assert generator.initial_seed() == 5
    default = torch.tpu.get_rng_state()
    first, second = draw(generator), draw(generator)
    assert not torch.equal(first, second)
    assert torch.equal(torch.tpu.get_rng_state(), default)
    generator.manual_seed(5)
    state = generator.get_state()
    assert torch.equal(first, draw(generator))
    generator.set_state(state)
    assert torch.equal(first, draw(generator))
    torch.manual_seed(5)
    assert torch.equal(first, draw())

    options = {"generator": generator, "device": "tpu"}
    assert torch.randn(4, **options).is_tpu
    assert sorted(torch.randperm(6, **options).tolist()) == list(range(6))
    assert set(torch.randint(3, (8,), **options).tolist()) <= {0, 1, 2}
    x = torch.full((8,), 0.5, device="tpu")
    assert set(torch.bernoulli(x, generator=generator).tolist()) <= {0.0, 1.0}
    assert torch.multinomial(x, 3, generator=generator).shape == (3,)
    assert 0 <= x.uniform_(generator=generator).min().item() <= 1
    x.normal_(generator=generator)
    x.exponential_(generator=generator)
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(2, device="tpu", generator=torch.Generator())


def check_graphsafe_generators() -> None:
    generator = torch.Generator(device="tpu").manual_seed(9)
    draw(generator)
    clone = generator.clone_state()
    assert torch.equal(clone.get_state(), generator.get_state())
    assert torch.equal(draw(generator), draw(clone))
    draw(clone)
    assert not torch.equal(clone.get_state(), generator.get_state())
    shared = generator.graphsafe_get_state()
    other = torch.Generator(device="tpu").manual_seed(1)
    other.graphsafe_set_state(shared)
    # From here on both generators advance one state.
    before = generator.get_state()
    draw(other)
    assert not torch.equal(generator.get_state(), before)
    default = torch.tpu._get_generator(torch.device("tpu", 0))
    assert isinstance(default, torch.Generator)
    torch.tpu.manual_seed(21)
    assert default.initial_seed() == 21
