"""An op called again with another static argument, on tensors whose sizes agree with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tpu_core import modes


@pytest.fixture(autouse=True)
def fused():
    with modes.using("fused"):
        yield


# A function of a tensor and an argument, and the arguments of consecutive calls. The sizes are 4,
# and 2 and 3 are dims: what is inferred from two calls would be a size.
CALLS: dict[str, tuple[Callable[[torch.Tensor, Any], Any], list[Any]]] = {
    "sum": (lambda x, d: x.sum(d), [2, 3, 1, 0]),
    "prod": (lambda x, d: x.prod(d), [2, 3]),
    "amax": (lambda x, d: x.amax(d), [2, 3]),
    "max": (lambda x, d: x.max(d), [2, 3]),
    "argmin": (lambda x, d: x.argmin(d), [2, 3]),
    "norm": (lambda x, d: torch.linalg.vector_norm(x, 2, d), [2, 3]),
    "exponent of a norm": (lambda x, p: torch.linalg.vector_norm(x, p, 2), [2, 3, 4]),
    "cumsum": (lambda x, d: x.cumsum(d), [2, 3]),
    "cummax": (lambda x, d: x.cummax(d), [2, 3]),
    "logcumsumexp": (lambda x, d: x.logcumsumexp(d), [2, 3]),
    "sort": (lambda x, d: x.sort(d), [2, 3]),
    "topk": (lambda x, d: x.topk(2, d), [2, 3]),
    "flip": (lambda x, d: x.flip(d), [2, 3]),
    "roll": (lambda x, n: x.roll(n, 2), [2, 3, 5]),
    "gather": (lambda x, d: x.gather(d, x.argsort(d)), [2, 3]),
    "index_add": (
        lambda x, d: x.index_add(d, torch.tensor([3, 1, 0, 0], device=x.device), x),
        [2, 3],
    ),
    "softmax": (lambda x, d: x.softmax(d), [2, 3]),
    "pow": (lambda x, n: x**n, [1, 3, 2, 4]),
    "pow_": (lambda x, n: x.clone().pow_(n), [3, 2, 4]),
    "foreach_pow": (lambda x, n: torch._foreach_pow([x, x + 1], n), [3, 2, 4]),
    "tril": (lambda x, n: x.tril(n), [1, 2, -1]),
    "diagonal": (lambda x, n: x.diagonal(n, 2, 3) * 2, [0, 1, 2]),
    "unfold": (lambda x, n: x.unfold(3, 2, n) * 2, [1, 2]),
    "one_hot": (lambda x, n: F.one_hot((x > 0).long(), n), [2, 3, 4]),
    "groups of a convolution": (
        lambda x, n: F.conv2d(x, x.reshape(-1)[: 16 // n].reshape(4, 4 // n, 1, 1), groups=n),
        [1, 2, 4],
    ),
    "kernel of a pool": (lambda x, n: F.max_pool2d(x, n, 1), [2, 3]),
    "decimals": (lambda x, n: x.round(decimals=n), [1, 2, 3]),
    "sign of zero": (lambda x, v: torch.full_like(x, v).copysign(torch.tensor(v)), [0.0, -0.0]),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_call_has_its_own_arguments(name):
    function, arguments = CALLS[name]
    x = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    device = x.to("tpu")
    for argument in arguments:
        want, have = function(x, argument), function(device, argument)
        have = torch.utils._pytree.tree_map(lambda t: t.cpu(), have)
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-6)


def test_sizes_and_dims_that_change_together():
    """The dim of each call is a size less one, as a loop over ranks has it."""
    for n in (3, 4, 5):
        x = torch.arange(float(n**3)).reshape(n, n, n)
        for d in range(3):
            have = x.to("tpu").cumsum(d).flip(d).sum(d)
            assert torch.equal(have.cpu(), x.cumsum(d).flip(d).sum(d))
