"""Reads and writes of a value through a view's geometry, against `torch.as_strided`; no device."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tpu_core.dtypes import to_numpy_dtype
from tpu_core.lowering import views
from tpu_core.lowering.evaluate import to_jax, to_torch
from tpu_core.lowering.views import GENERAL, SLICE, WHOLE, Access

# One compile serves all cases of an example, so a few examples are many cases.
CASES = 6
PROPERTY = settings(
    max_examples=16,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
DTYPES = [
    torch.float32, torch.int32, torch.uint8, torch.bool, torch.int64, torch.complex64,
    torch.bfloat16, torch.float64, torch.int16, torch.complex128, torch.int8,
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A value and a view of it.

    Attributes:
        base: The storage as the tensor whose shape the value has.
        view: The view, on the same storage.
        access: What the recorder makes of the view.
        starts: For a window, its starts.
        distinct: No element of the storage is seen twice.
    """

    base: torch.Tensor = field(repr=False)
    view: torch.Tensor = field(repr=False)
    access: Access
    starts: tuple[int, ...] = ()

    @property
    def distinct(self) -> bool:
        t = self.view
        index = torch.arange(t.untyped_storage().nbytes() // t.element_size())
        view = index.as_strided(t.shape, t.stride(), t.storage_offset())
        return view.unique().numel() == t.numel()


def dense_strides(sizes: tuple[int, ...], order: list[int]) -> tuple[int, ...]:
    """Strides of a tensor without gaps whose dims lie in memory in ``order``, outermost first."""
    strides, step = [1] * len(sizes), 1
    for d in reversed(order):
        strides[d] = step
        step *= max(sizes[d], 1)
    return tuple(strides)


def access(base: torch.Tensor, view: torch.Tensor, form: int, dims: tuple[int, ...] = ()) -> Access:
    return Access(
        form,
        to_numpy_dtype(base.dtype),
        tuple(base.shape),
        base.stride(),
        to_numpy_dtype(view.dtype),
        tuple(view.shape),
        view.stride(),
        view.storage_offset(),
        dims,
        form == WHOLE,
    )


def memory(nbytes: int, seed: int, flags: bool) -> torch.Tensor:
    """Random bytes; 0 and 1 alone where some view of them is boolean.

    None makes a NaN in any dtype: XLA does not keep the payload of a bfloat16 one.
    """
    generator = torch.Generator().manual_seed(seed)
    random = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return random & (0x01 if flags else 0xBF)


@st.composite
def bases(draw: Any, dtype: torch.dtype, flags: bool = False, least: int = 0) -> torch.Tensor:
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=least, max_size=4)))
    order = draw(st.permutations(range(len(sizes))))
    item = torch.empty(0, dtype=dtype).element_size()
    flags = flags or dtype == torch.bool
    contents = memory(math.prod(sizes) * item, draw(st.integers(0, 99)), flags)
    return contents.view(dtype).as_strided(sizes, dense_strides(sizes, order))


@st.composite
def windows(draw: Any) -> Case:
    """A rectangular window of the value, its dims in any order, some of them selected or
    repeated."""
    base = draw(bases(draw(st.sampled_from(DTYPES)), least=1))
    kept, starts = [], {}
    offset = 0
    for j, (n, stride) in enumerate(zip(base.shape, base.stride())):
        extent = draw(st.integers(1, n))
        start = draw(st.integers(0, n - extent))
        offset += start * stride
        if extent < n:
            starts[j] = start
        if extent > 1 or draw(st.booleans()):
            kept.append((j, extent, stride))
    kept = draw(st.permutations(kept))
    sizes, strides, dims = [], [], [-1] * base.dim()
    for j, extent, stride in kept:
        if draw(st.integers(0, 4)) == 0:
            sizes.append(draw(st.integers(1, 3)))
            strides.append(0)
        if extent > 1:
            dims[j] = len(sizes)
        sizes.append(extent)
        strides.append(stride)
    view = base.as_strided(sizes, strides, offset)
    found = access(base, view, SLICE, tuple(dims))
    return Case(base, view, found, tuple(starts[j] for j in found.starts()))


@st.composite
def layouts(draw: Any) -> Case:
    """Any sizes, strides and offset within the storage, overlapping ones included."""
    dtype = draw(st.sampled_from(DTYPES))
    base = draw(bases(dtype))
    last = base.numel() - 1
    offset = draw(st.integers(0, last))
    sizes, strides = [], []
    room = last - offset
    for _ in range(draw(st.integers(0, 4))):
        stride = draw(st.integers(0, room + 1))
        size = draw(st.integers(0 if draw(st.integers(0, 9)) == 0 else 1, 4))
        if stride and size > 1:
            size = min(size, room // stride + 1)
            room -= (size - 1) * stride
        sizes.append(size)
        strides.append(stride)
    view = base.as_strided(sizes, strides, offset)
    return Case(base, view, access(base, view, GENERAL))


def _step(draw: Any, x: torch.Tensor) -> torch.Tensor:
    dims = range(x.dim())
    name = draw(
        st.sampled_from(("slice", "permute", "split", "merge", "diagonal", "unfold", "select"))
    )
    if not x.dim():
        return x
    d = draw(st.sampled_from(dims))
    if name == "slice":
        start = draw(st.integers(0, x.shape[d] - 1))
        return x[(slice(None),) * d + (slice(start, None, draw(st.integers(1, 3))),)]
    if name == "permute":
        return x.permute(draw(st.permutations(dims)))
    if name == "split":
        factors = [k for k in (2, 3) if x.shape[d] % k == 0]
        return x.unflatten(d, (-1, draw(st.sampled_from(factors)))) if factors else x
    if name == "merge":
        same = d + 1 < x.dim() and x.stride(d) == x.stride(d + 1) * x.shape[d + 1]
        return x.flatten(d, d + 1) if same else x
    if name == "diagonal":
        other = draw(st.sampled_from(dims))
        return x if other == d else x.diagonal(0, d, other)
    if name == "unfold":
        size = draw(st.integers(1, x.shape[d]))
        return x.unfold(d, size, draw(st.integers(1, 2)))
    return x.select(d, draw(st.integers(0, x.shape[d] - 1)))


@st.composite
def chains(draw: Any) -> Case:
    """What a chain of view ops ends in: steps, splits, merges, diagonals, windows."""
    base = draw(bases(draw(st.sampled_from(DTYPES)), least=2))
    view = base
    for _ in range(draw(st.integers(1, 4))):
        view = _step(draw, view)
    return Case(base, view, access(base, view, GENERAL))


@st.composite
def bitcasts(draw: Any) -> Case:
    """A view of other dtype than the value."""
    source, target = (draw(st.sampled_from(DTYPES)) for _ in range(2))
    base = draw(bases(source, torch.bool in (source, target)))
    view = flat(base).view(torch.uint8)
    item = torch.empty(0, dtype=target).element_size()
    start = draw(st.integers(0, len(view) // item)) * item
    view = view[start : start + (len(view) - start) // item * item].view(target)
    view = view[:: draw(st.integers(1, 2))]
    if view.numel() % 2 == 0 and draw(st.booleans()):
        view = view.view(2, -1).t()
    return Case(base, view, access(base, view, GENERAL))


def flat(t: torch.Tensor) -> torch.Tensor:
    """A tensor's whole storage in its dtype."""
    return torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())


def bits(t: torch.Tensor) -> list[int]:
    packed = t.clone(memory_format=torch.contiguous_format).view(-1)
    return packed.view(torch.uint8).tolist()


def assert_same(actual: Any, expected: torch.Tensor) -> None:
    actual = to_torch(actual)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    assert bits(actual) == bits(expected)


def new_contents(case: Case) -> torch.Tensor:
    flags = torch.bool in (case.base.dtype, case.view.dtype)
    nbytes = case.view.numel() * case.view.element_size()
    return memory(nbytes, 7, flags).view(case.view.dtype).view(case.view.shape)


def check(cases: list[Case], dynamic: bool = False) -> None:
    """Read and write every case in one program and compare with what torch does."""

    def run(arrays: list[Any], values: list[Any], starts: list[Any]) -> list[Any]:
        results = []
        for c, base, value, start in zip(cases, arrays, values, starts):
            start = start if dynamic else c.starts
            results.append(views.read(base, c.access, start))
            if c.distinct:
                results.append(views.write(base, c.access, value, start))
        return results

    with jax.enable_x64(True):
        values = [new_contents(c) for c in cases]
        starts = [[jnp.int32(s) for s in c.starts] for c in cases]
        results = iter(
            jax.jit(run)([to_jax(c.base) for c in cases], [to_jax(v) for v in values], starts)
        )
    for c, value in zip(cases, values):
        assert_same(next(results), c.view)
        if c.distinct:
            storage = flat(c.base).clone()
            view = torch.empty(0, dtype=value.dtype).set_(
                storage.untyped_storage(), c.view.storage_offset(), c.view.shape, c.view.stride()
            )
            view.copy_(value)
            assert_same(next(results), storage.as_strided(c.base.shape, c.base.stride()))


@pytest.mark.parametrize("dynamic", (False, True), ids=("constant starts", "run-time starts"))
@PROPERTY
@given(cases=st.lists(windows(), min_size=CASES, max_size=CASES))
def test_windows_with_their_dims_in_any_order(cases: list[Case], dynamic: bool) -> None:
    check(cases, dynamic)


@PROPERTY
@given(cases=st.lists(layouts(), min_size=CASES, max_size=CASES))
def test_any_sizes_strides_and_offset(cases: list[Case]) -> None:
    check(cases)


@PROPERTY
@given(cases=st.lists(chains(), min_size=CASES, max_size=CASES))
def test_chains_of_view_ops(cases: list[Case]) -> None:
    check(cases)


@PROPERTY
@given(cases=st.lists(bitcasts(), min_size=CASES, max_size=CASES))
def test_views_of_another_dtype(cases: list[Case]) -> None:
    check(cases)


@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_every_dtype_as_every_other(source: torch.dtype) -> None:
    cases = []
    for target in DTYPES:
        base = memory(32, 3, torch.bool in (source, target)).view(source)
        view = flat(base).view(target)
        cases.append(Case(base, view, access(base, view, GENERAL)))
    check(cases)


def test_boolean_view_of_bytes_leaves_the_other_bytes_alone() -> None:
    base = torch.tensor([5, 0, 7], dtype=torch.uint8)
    view = base.view(torch.bool)[:1]
    written = views.write(to_jax(base), access(base, view, GENERAL), jnp.array([True]))
    assert_same(written, torch.tensor([1, 0, 7], dtype=torch.uint8))


def test_whole_value_is_read_and_replaced_without_an_op() -> None:
    base = torch.arange(6.0).view(2, 3)
    whole = access(base, base, WHOLE)
    array, value = jnp.zeros((2, 3)), jnp.ones((2, 3))
    assert views.read(array, whole) is array
    assert views.write(array, whole, value) is value


def test_empty_view_reads_nothing_and_writes_nothing() -> None:
    base = torch.arange(6.0).view(2, 3)
    for view in (base[:0], base[:, 3:], base.as_strided((0, 4), (7, 1), 5)):
        check([Case(base, view, access(base, view, GENERAL))])


def test_bytes_left_over_after_the_last_whole_element_are_kept() -> None:
    base = memory(10, 1, False)
    view = base[:8].view(torch.float32)
    check([Case(base, view, access(base, view, GENERAL))])


def test_write_through_a_repeated_dim_of_equal_elements() -> None:
    base = torch.zeros(4)
    view = base[:2].unsqueeze(1).expand(2, 3)
    written = views.write(
        to_jax(base), access(base, view, GENERAL), jnp.full((2, 3), 5, np.float32)
    )
    assert_same(written, torch.tensor([5.0, 5, 0, 0]))


def primitives(case: Case, write: bool = False) -> set[str]:
    """Names of the JAX primitives that a read or a write consists of."""

    def run(base: Any, value: Any) -> Any:
        return views.write(base, case.access, value) if write else views.read(base, case.access)

    with jax.enable_x64(True):
        return {
            str(e.primitive)
            for e in jax.make_jaxpr(run)(to_jax(case.base), to_jax(new_contents(case))).jaxpr.eqns
        }


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[1::2],
        lambda x: x[:, 1:5:3],
        lambda x: x.view(24),
        lambda x: x.view(2, 2, 6).transpose(0, 2),
        lambda x: x.view(24)[6:18],
        lambda x: x.unflatten(1, (2, 3))[:, 1],
        lambda x: x.unsqueeze(1).expand(4, 5, 6),
    ],
)
def test_regular_views_are_read_without_a_gather(view: Any) -> None:
    base = torch.arange(24.0).view(4, 6)
    v = view(base)
    assert "gather" not in primitives(Case(base, v, access(base, v, GENERAL)))


def test_window_of_a_flattened_value_is_written_without_a_scatter() -> None:
    base = torch.arange(24.0).view(4, 6)
    view = base.view(24)[6:18].view(2, 6)
    assert "scatter" not in primitives(Case(base, view, access(base, view, GENERAL)), write=True)


def test_indices_beyond_32_bits_are_not_wrapped() -> None:
    with jax.enable_x64(True):
        indices = views._flat_indices((2, 2), (2**31, 1), 5)
    assert indices.tolist() == [[5, 6], [5 + 2**31, 6 + 2**31]]
