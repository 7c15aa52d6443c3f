"""Foreach ops against the CPU."""

from __future__ import annotations

import pytest
import torch

from tpu_core import lowering
from tpu_core.lowering import foreach
from tpu_core.lowering.registry import REGISTRY

from .harness import CompareLowerings

lowering.load()

OPS = {str(op): op for op in foreach._functional_overloads()}


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # In (0, 1), where every function is defined.
    shapes = [(3, 3), (3, 3), (0, 3)]
    return [(torch.rand(s, generator=generator) * 0.8 + 0.1).to(dtype) for s in shapes]


def argument(schema: torch.Argument, position: int, dtype: torch.dtype):
    kind = str(schema.type)
    if kind == "List[Tensor]":
        return tensors(position, dtype)
    if kind == "List[number]":
        return [2.0, 0.5, 3.0]
    if kind == "Tensor":
        return torch.tensor([2.0, 0.5, 3.0]) if schema.name == "scalars" else torch.tensor(2.0)
    return 0.7 if kind == "number" else None


def compare(name: str, *args, **kwargs) -> None:
    # The CPU rounds numbers to bfloat16 before it adds them, CUDA and the lowerings do not.
    mode = CompareLowerings(check_width=True, tolerance={torch.bfloat16: (1.6e-2, 1e-2)})
    with mode:
        OPS[name](*args, **kwargs)
    assert not mode.failures
    assert name in mode.seen


@pytest.mark.parametrize("name", sorted(OPS))
def test_every_overload(name: str) -> None:
    assert name in REGISTRY
    for dtype in (torch.float32, torch.bfloat16):
        args, kwargs = [], {}
        for position, schema in enumerate(OPS[name]._schema.arguments):
            value = argument(schema, position, dtype)
            if value is None:
                continue
            if schema.kwarg_only:
                kwargs[schema.name] = value
            else:
                args.append(value)
        if name in ("aten._foreach_max.default", "aten._foreach_mm.default"):
            args = [a[:2] for a in args]  # the empty tensor has no maximum, and no product
        compare(name, *args, **kwargs)


def test_numbers_of_every_kind() -> None:
    integers = [torch.arange(4), torch.tensor(3)]
    compare("aten._foreach_add.Scalar", integers, 2)
    compare("aten._foreach_add.Scalar", integers, 0.5)
    compare("aten._foreach_mul.ScalarList", integers, [2, 0.5])
    compare("aten._foreach_div.Scalar", integers, 2)
    compare("aten._foreach_pow.Scalar", integers, 2)
    compare("aten._foreach_pow.ScalarList", tensors(0), [2, 0.5, -1])
    compare("aten._foreach_norm.Scalar", tensors(0)[:2], 1, dtype=torch.float64)


def test_copies_cast() -> None:
    compare("aten._foreach_copy.default", tensors(0, torch.bfloat16), tensors(1))
    compare("aten._foreach_zero.default", tensors(0))


@pytest.mark.parametrize("name", ["aten._foreach_norm.Scalar", "aten._foreach_powsum.Scalar"])
@pytest.mark.parametrize("order", [0, 1, 2, 3, 0.5, float("inf")])
def test_norms_of_complex_lists(name: str, order: float) -> None:
    items = [torch.tensor([1.5 + 2j, 0, -3 - 1j]), torch.tensor(2j)]
    compare(name, items, order)
    compare(name, items, order, dtype=torch.complex128)


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_power_sums_to_real_dtypes(order: float) -> None:
    """The dtype is that of the sum, and no conversion of the numbers, as on the CPU."""
    items = [torch.tensor([1.5 + 2j, 0, -3 - 1j]), torch.tensor([[2j, 1]])]
    for dtype in (torch.float32, torch.float64):
        compare("aten._foreach_powsum.Scalar", items, order, dtype=dtype)
