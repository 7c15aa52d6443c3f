"""Loops for pointwise ops of small tensors: ATen's results on the CPU, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.usefixtures("host")

SPECIAL = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-42, 3e38, -1.5])
SIZES = [(), (1,), (7,), (8,), (65,), (3, 17), (2, 0), (129, 127), (3, 4, 5)]
NUMBERS = [2.0, -0.75, 3, 0.0, 0.5, 1e-46, torch.inf, torch.nan]
Function = Callable[..., Any]


def made(size: tuple[int, ...], seed: int, transposed: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator) * 4
    places = torch.randint(0, 40, size, generator=generator)
    x = torch.where(places < len(SPECIAL), SPECIAL[places.clamp(max=len(SPECIAL) - 1)], x)
    return x.mT.contiguous().mT if transposed and x.dim() > 1 else x


def bits(x: Tensor) -> Tensor:
    x = torch.where(x.isnan(), torch.nan, x.cpu())
    return x.reshape(-1).view(torch.int32)


def assert_same_bits(f: Function, *args: Any) -> None:
    """Compare results and what the call leaves in its arguments."""

    def run(device: str) -> list[Tensor]:
        def to(x: Any) -> Any:
            if isinstance(x, list):
                return [to(item) for item in x]
            return x.clone().to(device) if isinstance(x, Tensor) else x

        given = [to(x) for x in args]
        result = f(*given)
        tensors = [result] if isinstance(result, Tensor) else list(result or ())
        for x in given:
            tensors += x if isinstance(x, list) else [x] if isinstance(x, Tensor) else []
        return tensors

    for expected, found in zip(run("cpu"), run("tpu"), strict=True):
        assert found.stride() == expected.stride()
        assert bits(found.cpu()).equal(bits(expected)), (expected, found)


POINTWISE: dict[str, Function] = {
    "add": lambda a, b, c, s: a + b,
    "add alpha": lambda a, b, c, s: torch.add(a, b, alpha=s),
    "add number": lambda a, b, c, s: a + s,
    "add_": lambda a, b, c, s: a.add_(b, alpha=s),
    "sub": lambda a, b, c, s: a - b,
    "sub number": lambda a, b, c, s: a - s,
    "sub_": lambda a, b, c, s: a.sub_(b, alpha=s),
    "mul": lambda a, b, c, s: a * b,
    "mul number": lambda a, b, c, s: a * s,
    "mul_": lambda a, b, c, s: a.mul_(a),
    "div": lambda a, b, c, s: a / b,
    "div number": lambda a, b, c, s: a / s,
    "lerp": lambda a, b, c, s: torch.lerp(a, b, s),
    "addcmul": lambda a, b, c, s: torch.addcmul(a, b, c, value=s),
    "addcdiv_": lambda a, b, c, s: a.addcdiv_(b, c, value=s),
    "square": lambda a, b, c, s: a**2,
    "power": lambda a, b, c, s: a**3,
    "neg": lambda a, b, c, s: -a,
    "reciprocal": lambda a, b, c, s: a.reciprocal(),
    "relu_": lambda a, b, c, s: a.relu_(),
    "threshold_backward": lambda a, b, c, s: torch.ops.aten.threshold_backward(a, b, s),
    "sigmoid_backward": lambda a, b, c, s: torch.ops.aten.sigmoid_backward(a, b),
    "tanh_backward": lambda a, b, c, s: torch.ops.aten.tanh_backward(a, b),
}
LISTS: dict[str, Function] = {
    "mul_ number": lambda a, b, c, s: torch._foreach_mul_(a, s),
    "div_ numbers": lambda a, b, c, s: torch._foreach_div_(a, [s + i for i in range(len(a))]),
    "add_ number": lambda a, b, c, s: torch._foreach_add_(a, s),
    "add": lambda a, b, c, s: torch._foreach_add(a, b, alpha=s),
    "sub_": lambda a, b, c, s: torch._foreach_sub_(a, b, alpha=s),
    "mul": lambda a, b, c, s: torch._foreach_mul(a, b),
    "lerp_": lambda a, b, c, s: torch._foreach_lerp_(a, b, s),
    "addcmul_": lambda a, b, c, s: torch._foreach_addcmul_(a, b, b, s),
    "addcdiv_": lambda a, b, c, s: torch._foreach_addcdiv_(a, b, c, [s] * len(a)),
    "neg": lambda a, b, c, s: torch._foreach_neg(a),
    "the same twice": lambda a, b, c, s: torch._foreach_mul_([*a, *a], s),
}


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise(name: str) -> None:
    for i, size in enumerate(SIZES):
        for transposed in {False, len(size) > 1}:
            operands = [made(size, 3 * i + k, transposed) for k in range(3)]
            assert_same_bits(POINTWISE[name], *operands, NUMBERS[i % len(NUMBERS)])


@pytest.mark.parametrize("name", LISTS)
def test_lists(name: str) -> None:
    for i, number in enumerate(NUMBERS):
        lists = [[made(size, 3 * i + k) for size in SIZES] for k in range(3)]
        assert_same_bits(LISTS[name], *lists, number)


def test_operands_of_other_shapes_dtypes_and_layouts() -> None:
    x, row, wide = made((4, 6), 1), made((6,), 2), made((4, 6), 3).double()
    for f in (torch.add, torch.mul, torch.div):
        assert_same_bits(f, x, row)
        assert_same_bits(f, x, made((6, 4), 4).mT)
        assert_same_bits(f, x, torch.tensor(1.5))
        assert torch.equal(f(x.to("tpu"), wide.to("tpu")).cpu().isnan(), f(x, wide).isnan())
    assert_same_bits(torch._foreach_mul_, [x, row], torch.tensor(0.3))
    assert_same_bits(lambda a: a[:, ::2].mul_(3), x)
    image = made((2, 3, 4, 5), 5).contiguous(memory_format=torch.channels_last)
    for narrow in (x[:1, :2:2].mT, image, image[:, :1], image[:1, :, :1], x[None, :1, :, None]):
        shape, strides, offset = narrow.shape, narrow.stride(), narrow.storage_offset()
        view = torch.as_strided(image.to("tpu"), shape, strides, offset)
        expected = torch.as_strided(image, shape, strides, offset)
        for f in (torch.neg, lambda a: a + a, lambda a: a * 2):
            assert f(view).stride() == f(expected).stride()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x[:-1].add_(x[1:]),
        lambda x: torch._foreach_sub_([x], True),
        lambda x: torch.add(x, x, alpha=True),
        lambda x: x.mul_(1j),
        lambda x: x.add_(x.double()[None]),
        lambda x: torch._foreach_mul_([x, x], [1.0]),
        lambda x: x.expand(3, 5).mul_(2),
    ],
)
def test_wrong_calls_raise_the_errors_of_the_cpu(call: Function) -> None:
    with pytest.raises(RuntimeError) as expected:
        call(torch.ones(5))
    x = torch.ones(5, device="tpu")
    with pytest.raises(RuntimeError) as found:
        call(x)
    assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]
    assert x.tolist() == [1.0] * 5
