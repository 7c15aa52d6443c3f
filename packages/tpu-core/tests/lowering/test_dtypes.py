"""Type promotion and casts agree with PyTorch."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_core.dtypes import TO_NUMPY, cast, op_math, result_type, to_numpy_dtype
from tpu_core.lowering.evaluate import to_jax, to_torch, weak
from tpu_core.torch_compat import HALF_COMPLEX

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
NUMBERS = [True, 3, 0.5, 1.5j]
TENSORS = [torch.ones(shape, dtype=d) for d, shape in itertools.product(DTYPES, [(), (2,)])]
OPERANDS = st.sampled_from(range(len(TENSORS) + len(NUMBERS)))


@pytest.mark.parametrize("lift", [False, True])
@given(indices=st.lists(OPERANDS, min_size=1, max_size=2))
@settings(max_examples=400, deadline=None)
def test_result_type_is_torchs(lift: bool, indices: list[int]) -> None:
    operands = [(TENSORS + NUMBERS)[i] for i in indices]
    if len(operands) == 1:
        if not isinstance(operands[0], torch.Tensor):
            return
        operands = operands * 2
    want = torch.result_type(*operands)
    if want in HALF_COMPLEX:
        want = torch.complex64
    with jax.enable_x64(True):
        values = [
            to_jax(x)
            if isinstance(x, torch.Tensor)
            else (weak(x) if lift and not isinstance(x, bool) else x)
            for x in operands
        ]
        assert result_type(*values) == to_numpy_dtype(want)


@pytest.mark.parametrize("default", [torch.float64, torch.float16])
def test_numbers_take_the_default_dtype(default: torch.dtype) -> None:
    torch.set_default_dtype(default)
    try:
        with jax.enable_x64(True):
            ints = to_jax(torch.ones(2, dtype=torch.int32))
            assert result_type(ints, 0.5) == to_numpy_dtype(default)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", [torch.float32, torch.int64, torch.bool, torch.complex64])
@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_cast_is_torchs(source: torch.dtype, target: torch.dtype) -> None:
    # Values in range, except that a negative float does have a uint8 in PyTorch.
    values = [0.0, 1.0, 2.75, 100.0] + ([-1.0] if source.is_signed else [])
    tensor = torch.tensor(values).to(source)
    with jax.enable_x64(True):
        actual = cast(to_jax(tensor), to_numpy_dtype(target))
        torch.testing.assert_close(to_torch(actual), tensor.to(target), rtol=0, atol=0)


@pytest.mark.parametrize("number", [True, 3, -1, 0.5, 1.5 + 2j])
@pytest.mark.parametrize("lift", [False, True])
def test_cast_of_a_number_is_not_weak_and_brings_no_float64(number, lift: bool) -> None:
    with jax.enable_x64(True):
        for dtype in (np.float32, np.uint8, np.bool_, np.complex64):
            value = cast(weak(number) if lift else number, dtype)
            assert value.dtype == dtype
            assert not value.weak_type
        if not lift and not isinstance(number, complex):
            program = str(jax.make_jaxpr(lambda x: x + cast(number, np.float32))(np.float32(1)))
            assert "f64" not in program


def test_op_math_is_float32_for_short_floats() -> None:
    for dtype, numpy in TO_NUMPY.items():
        short = dtype.is_floating_point and dtype.itemsize < 4
        assert op_math(numpy) == (np.dtype(np.float32) if short else numpy)
