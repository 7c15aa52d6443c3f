"""Forward-mode derivatives, and tensors of zeros without memory that PyTorch makes for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jvp, vjp, vmap
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

Call = Callable[[torch.Tensor], Any]


pytestmark = pytest.mark.usefixtures("every_tier")


def _tangent(f: Call) -> Call:
    return lambda x: jvp(f, (x,), (x.flip(0),))


def _dual(x: torch.Tensor) -> list[torch.Tensor | None]:
    with forward_ad.dual_level():
        y = forward_ad.make_dual(x, torch.ones_like(x)).sin() * 2.0 + x
        return list(forward_ad.unpack_dual(y))


CALLS: dict[str, Call] = {
    "a number": _tangent(lambda x: x.sin() * 2.0),
    "a number on the left": _tangent(lambda x: 1.0 - 2.0 / (x + 3.0)),
    "a tensor on the host": _tangent(lambda x: x * torch.tensor(0.5)),
    "a constant": _tangent(lambda x: x * torch.ones_like(x) + 1),
    "a power": _tangent(lambda x: x**3 + 2.0**x),
    "products": _tangent(lambda x: torch.outer(x, x) @ x),
    "parts": _tangent(lambda x: torch.cat([x[1:], x[:1] * 3]).cumsum(0)),
    "a selection": _tangent(lambda x: torch.where(x > 0, x, 0.1 * x)),
    "of a gradient": _tangent(grad(lambda x: (x.sin() * x.cumsum(0)).sum())),
    "of the gradient of a sum": _tangent(grad(torch.sum)),
    "a hessian": hessian(lambda x: (x.sin() * x.cumsum(0)).sum()),
    "a jacobian": jacfwd(lambda x: torch.softmax(x, 0) * x.norm()),
    "in batches": lambda x: vmap(lambda t: jvp(lambda v: v.exp() * 2, (x,), (t,))[1])(
        torch.eye(4, device=x.device)
    ),
    "dual numbers": _dual,
    "beside infinity": _tangent(lambda x: x * torch.full_like(x, torch.inf) * 0.0),
    "a constant times infinity": _tangent(lambda x: (x * torch.inf) * torch.ones_like(x)),
}


@pytest.mark.parametrize("name", CALLS)
def test_derivatives_of_the_cpu(name: str) -> None:
    call = CALLS[name]
    x = torch.tensor([0.3, -1.2, 0.7, 2.0])
    expected = call(x)
    for _ in range(3):  # at first, by a program, and by one that is there
        assert_close(_on_host(call(x.to("tpu"))), _on_host(expected), equal_nan=True)


TRANSFORMS: dict[str, Callable[[Call, torch.Tensor], Any]] = {
    "grad": lambda f, x: grad(f)(x),
    "jvp": lambda f, x: jvp(f, (x,), (x,))[1],
    "vjp": lambda f, x: vjp(f, x)[1](torch.ones((), device=x.device))[0],
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_checkpointed_functions(name: str) -> None:
    """`torch.utils.checkpoint` keeps the state of the device's generator; PyTorch refuses some."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh())
    x = torch.tensor([0.3, -1.2, 0.7, 2.0])

    def outcome(device: str) -> Any:
        inner = module.to(device)

        def call(x: torch.Tensor) -> torch.Tensor:
            return checkpoint(inner, x, use_reentrant=False).square().sum()

        try:
            return TRANSFORMS[name](call, x.to(device)).detach().cpu()
        except RuntimeError as error:
            return str(error)

    expected = outcome("cpu")
    actual = outcome("tpu")
    if isinstance(expected, torch.Tensor):
        assert_close(actual, expected)
    else:
        assert actual == expected


def test_zeros_without_memory() -> None:
    x = torch.tensor([0.3, -1.2, 0.7])
    for device in ("cpu", "tpu"):
        zeros = torch._efficientzerotensor((3,), device=device)
        number = torch._efficientzerotensor((), device="cpu")
        on_device = x.to(device)
        found = [zeros, on_device * zeros, zeros + on_device, zeros.sin(), zeros * 2.0]
        found += [on_device * number, on_device + number, zeros.clone(), zeros.expand(2, 3)]
        values = [t.cpu().clone() for t in found]
        if device == "cpu":
            expected = values
        assert (
            zeros._is_zerotensor()
            and found[1]._is_zerotensor()
            and not zeros.clone()._is_zerotensor()
        )
    assert_close(values, expected)


@pytest.mark.parametrize("value", [torch.inf, torch.nan, -0.0])
def test_zeros_are_left_out_beside_what_they_would_change(value: float) -> None:
    found = {}
    for device in ("cpu", "tpu"):
        zeros = torch._efficientzerotensor((2,), device=device)
        x = torch.full((2,), value, device=device)
        results = [
            zeros * x,
            zeros + x,
            x - zeros,
            zeros[:1] * x,
            zeros.expand(3, 2) * x,
            zeros / x,
        ]
        found[device] = [t.cpu() for t in results]
    assert_close(found["tpu"], found["cpu"], equal_nan=True)


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_zeros_are_not_written(device: str) -> None:
    zeros = torch._efficientzerotensor((3,), device=device)
    for write in (zeros.add_, zeros.copy_, zeros.mul_):
        with pytest.raises(RuntimeError, match="ZeroTensors are immutable"):
            write(torch.ones(3, device=device))


def test_written_zeros_are_memory_of_their_own() -> None:
    zeros = torch._efficientzerotensor((3,), device="tpu")
    copy = zeros.clone()
    copy.add_(1)
    assert copy.tolist() == [1, 1, 1] and zeros.tolist() == [0, 0, 0]


def _on_host(tree: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.cpu(), tree)
