"""Values shared with JAX: who may write them, and when their memory may be reused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tpu_core
from storage_tools import EVERY_MODE, WHOLE, arange, programs, saved
from tpu_core import modes


@EVERY_MODE
@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(1),
        lambda x: x.zero_(),
        lambda x: x[0].fill_(5),
        lambda x: x.t().mul_(2),
        lambda x: x.view(torch.int32).add_(1),
        lambda x: x.copy_(torch.ones(2, 3)),
        lambda x: torch._foreach_mul_([x[0], x[1]], 3),
        lambda x: x.untyped_storage().resize_(0),
    ],
)
def test_an_array_from_to_jax_never_changes(write: Callable[[torch.Tensor], Any], mode: modes.Mode):
    with modes.using(mode):
        x = arange(2, 3) + 0
        array = tpu_core.to_jax(x)
        write(x)
        write(x) if x.untyped_storage().nbytes() else None
        torch.tpu.synchronize()
        assert np.asarray(array).tolist() == [[0, 1, 2], [3, 4, 5]]


@EVERY_MODE
def test_a_clone_of_a_shared_value_is_not_donated_either(mode: modes.Mode):
    with modes.using(mode):
        array = jnp.arange(4.0)
        x = tpu_core.from_jax(array)
        y = x.clone()
        del x
        y.add_(1)
        assert y.tolist() == [1, 2, 3, 4]
        assert np.asarray(array).tolist() == [0, 1, 2, 3]


@EVERY_MODE
def test_an_array_given_to_from_jax_stays_valid(mode: modes.Mode):
    with modes.using(mode):
        array = jnp.arange(6.0).reshape(2, 3)
        x = tpu_core.from_jax(array)
        x[:, 1] = -1
        x.t().add_(1)
        assert x.tolist() == [[1, 0, 3], [4, 0, 6]]
        del x
        torch.tpu.synchronize()
        assert np.asarray(array).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.view(3, 4),
        lambda x: x.t(),
        lambda x: x[1],
        lambda x: x[:, 1::2],
        lambda x: x.unsqueeze(0).expand(2, 2, 6),
        lambda x: x.view(torch.int32),
        lambda x: torch.view_as_complex(x.view(2, 3, 2)),
        lambda x: torch.view_as_complex(x.view(2, 3, 2)).conj(),
        lambda x: x[:0],
        lambda x: x[1, 1],
        lambda x: x.bool(),
        lambda x: x.bfloat16(),
    ],
)
def test_to_jax_gives_the_view_and_not_its_storage(view: Callable[[torch.Tensor], torch.Tensor]):
    host, device = view(torch.arange(12.0).view(2, 6)), view(arange(2, 6))
    array = tpu_core.to_jax(device)
    assert array.shape == tuple(host.shape)
    assert np.asarray(array).tolist() == host.tolist()


def test_a_view_whose_elements_do_not_fill_the_storage():
    def run(device: str) -> list[torch.Tensor]:
        x = torch.arange(3.0, dtype=torch.float64).to(device)
        y = torch.view_as_complex(x[:2])
        before = y.cpu().clone()
        y.mul_(2j)
        z = torch.arange(7, dtype=torch.uint8).to(device)[:4].view(torch.int32)
        return [before, (y + 1).cpu(), x.cpu(), z.cpu(), (z + 1).cpu()]

    for host, device in zip(run("cpu"), run("tpu")):
        torch.testing.assert_close(device, host, rtol=0, atol=0)


def test_to_jax_of_bytes_that_have_no_type_yet():
    x = torch.load(saved(torch.arange(6.0).view(2, 3)), map_location="tpu")
    array = tpu_core.to_jax(x)
    assert (array.shape, array.dtype) == ((2, 3), np.float32)
    assert np.asarray(array).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_to_jax_of_uninitialised_memory_has_its_shape():
    assert tpu_core.to_jax(torch.empty(2, 3, device="tpu")).shape == (2, 3)


def test_sharing_copies_nothing():
    x = arange(4) + 1
    array = tpu_core.to_jax(x)
    y = tpu_core.from_jax(array)
    assert tpu_core.to_jax(y).unsafe_buffer_pointer() == array.unsafe_buffer_pointer()
    assert jax.numpy.sum(array).item() == 10


def test_a_clone_has_its_own_shape_where_its_source_is_a_view() -> None:
    """As a bias' momentum: cloned from ``sum(0, keepdim=True).view(n)`` at first, then written."""

    def step(x: torch.Tensor, momentum: torch.Tensor | None) -> torch.Tensor:
        gradient = x.sum(0, keepdim=True).view(5)
        return gradient.clone() if momentum is None else momentum.mul_(0.5).add_(gradient)

    x = torch.randn(3, 5)
    ours, theirs, made_at = None, None, []
    device = x.to("tpu")
    with modes.using(WHOLE), programs() as made:
        for _ in range(4):
            ours, theirs = step(device, ours), step(x, theirs)
            torch.tpu.synchronize()
            made_at.append(made())
    assert made_at == [1, 2, 2, 2]
    torch.testing.assert_close(ours.cpu(), theirs)
