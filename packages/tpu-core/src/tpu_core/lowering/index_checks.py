"""Checks of indices: out of range where PyTorch's CPU kernels say so, in their words."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_core.dtypes import cast
from tpu_core.lowering.checks import Finding, check, fixed, has_indices, out_of_range
from tpu_core.lowering.gather_scatter import axis

_SELF = fixed(IndexError, "index out of range in self")


def _of_dim(
    kind: Callable[[str], Exception], dim: int, size: int, prefix: str = ""
) -> Callable[[int], Exception]:
    return functools.partial(_dim_error, kind, dim, size, prefix)


def _dim_error(
    kind: Callable[[str], Exception], dim: int, size: int, prefix: str, value: int
) -> Exception:
    return kind(f"{prefix}index {value} is out of bounds for dimension {dim} with size {size}")


def _size(x: jax.Array, dim: int) -> int:
    return x.shape[dim] if x.ndim else 1


@check("aten.index.Tensor", "aten.index_put.default", "aten._index_put_impl.default")
def index(
    x: jax.Array, indices: Sequence[jax.Array | None], *_: Any, **__: Any
) -> Iterator[Finding]:
    dim = place = 0
    for i in indices:
        if i is None:
            dim += 1
        elif i.dtype in (np.bool_, np.uint8):  # a mask
            dim += i.ndim
            place += i.ndim
        else:
            size = x.shape[dim]
            # PyTorch counts the dims that have an index.
            yield from out_of_range(i, 0, size, _of_dim(IndexError, place, size), wraps=True)
            dim += 1
            place += 1


@check("aten.embedding.default")
def embedding(weight: jax.Array, indices: jax.Array, *_: Any, **__: Any) -> Iterator[Finding]:
    yield from out_of_range(indices, 0, weight.shape[0], _SELF)


@check("aten.embedding_renorm.default")
def embedding_renorm(x: jax.Array, indices: jax.Array, *_: Any, **__: Any) -> Iterator[Finding]:
    yield from out_of_range(
        indices, 0, x.shape[0], functools.partial(_select_error, tuple(x.shape))
    )


def _select_error(shape: tuple[int, ...], value: int) -> Exception:
    return IndexError(
        f"select(): index {value} out of range for tensor of size {list(shape)} at dimension 0"
    )


@check("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default")
def embedding_bag(
    weight: jax.Array, indices: jax.Array, offsets: jax.Array, *_: Any, **__: Any
) -> Iterator[Finding]:
    if offsets.size:
        kind = "Long" if offsets.dtype == np.int64 else "Int"
        error = functools.partial(_first_offset_error, kind)
        yield from out_of_range(offsets[:1], 0, 1, error)
        length = indices.shape[0]
        error = functools.partial(_last_offset_error, length)
        yield from out_of_range(offsets[-1:], 0, length + 1, error)
    yield from out_of_range(indices, 0, weight.shape[0], _bag_error)


def _first_offset_error(kind: str, value: int) -> Exception:
    return RuntimeError(
        "offsets[0] has to be 0, i.e., the first sequence in the mini-batch has to start from "
        f"position 0. However, got {value}\n[ torch.{kind}Tensor{{}} ]"
    )


def _last_offset_error(length: int, value: int) -> Exception:
    return RuntimeError(
        f"offsets[-1] can not be greater than input's length {length} but got offsets[-1] of "
        f"{value}"
    )


def _bag_error(value: int) -> Exception:
    return RuntimeError(
        f"embedding_bag: Expected idx >= 0 && idx < num_embeddings but found idx to be {value}"
    )


@check(
    "aten.gather.default",
    "aten.scatter.src",
    "aten.scatter.value",
    "aten.scatter.reduce",
    "aten.scatter.value_reduce",
    "aten.scatter_add.default",
    "aten.scatter_reduce.two",
)
def elements(x: jax.Array, dim: int, index: jax.Array, *_: Any, **__: Any) -> Iterator[Finding]:
    dim = axis(dim, x.ndim)
    size = _size(x, dim)
    yield from out_of_range(index, 0, size, _of_dim(RuntimeError, dim, size))


@check("aten.index_add.default")
def index_add(x: jax.Array, dim: int, index: jax.Array, *_: Any, **__: Any) -> Iterator[Finding]:
    dim = axis(dim, x.ndim)
    size = _size(x, dim)
    # With 64-bit indices the CPU takes its kernel of scatter_add.
    scatters = x.ndim > 1 and index.dtype == np.int64
    error = _of_dim(RuntimeError, dim, size) if scatters else _SELF
    yield from out_of_range(index, 0, size, error)


@check("aten.index_copy.default")
def index_copy(x: jax.Array, dim: int, index: jax.Array, *_: Any, **__: Any) -> Iterator[Finding]:
    dim = axis(dim, x.ndim)
    size = _size(x, dim)
    yield from out_of_range(index, 0, size, _of_dim(IndexError, dim, size, "index_copy_(): "))


@check("aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor")
def index_fill(x: jax.Array, dim: int, index: jax.Array, *_: Any, **__: Any) -> Iterator[Finding]:
    dim = axis(dim, x.ndim)
    size = _size(x, dim)
    yield from out_of_range(index, 0, size, _of_dim(IndexError, dim, size), wraps=True)


@check("aten.index_reduce.default")
def index_reduce(x: jax.Array, dim: int, index: jax.Array, *_: Any, **__: Any) -> Iterator[Finding]:
    yield from out_of_range(index, 0, _size(x, axis(dim, x.ndim)), _SELF)


@check("aten.index_select.default")
def index_select(x: jax.Array, dim: int, index: jax.Array) -> Iterator[Finding]:
    dim = axis(dim, x.ndim)
    size = _size(x, dim)
    error = functools.partial(_data_error, size) if dim == 1 else _SELF
    yield from out_of_range(index, 0, size, error)


def _data_error(size: int, value: int) -> Exception:
    return RuntimeError(f"INDICES element is out of DATA bounds, id={value} axis_dim={size}")


@check("aten.take.default", "aten.put.default")
def take(x: jax.Array, index: jax.Array, *_: Any, **__: Any) -> Iterator[Finding]:
    error = functools.partial(_take_error, x.size)
    yield from out_of_range(index, 0, x.size, error, wraps=True)


def _take_error(size: int, value: int) -> Exception:
    return IndexError(
        f"out of range: tried to access index {value} on a tensor of {size} elements."
    )


@check("aten.max_unpool2d.default", "aten.max_unpool3d.default")
def max_unpool(
    x: jax.Array, indices: jax.Array, output_size: Sequence[int], *_: Any, **__: Any
) -> Iterator[Finding]:
    size = math.prod(output_size)
    yield from out_of_range(
        indices, 0, size, functools.partial(_unpool_error, "x".join(map(str, output_size)))
    )


def _unpool_error(volume: str, value: int) -> Exception:
    return RuntimeError(
        f"Found an invalid max index: {value} (output volumes are of size {volume})"
    )


@check("aten.masked_scatter.default", applies=lambda plan: 0 not in plan.reads[0].sizes)
def masked_scatter(x: jax.Array, mask: jax.Array, source: jax.Array) -> Iterator[Finding]:
    shape = np.broadcast_shapes(x.shape, mask.shape)
    wanted = jnp.sum(jnp.broadcast_to(mask.astype(np.bool_), shape), dtype=np.int64)
    text = "Number of elements of source < number of ones in mask"
    yield Finding(wanted > cast(source.size, np.int64), 0, fixed(RuntimeError, text))


def _has_sorter(plan: Any) -> bool:
    return plan.argument("sorter") is not None and has_indices(plan)


@check("aten.searchsorted.Tensor", "aten.searchsorted.Scalar", applies=_has_sorter)
def searchsorted(
    boundaries: jax.Array, values: Any, *, sorter: jax.Array | None = None, **_: Any
) -> Iterator[Finding]:
    if sorter is not None:
        text = "torch.searchsorted(): sorter index out of range"
        error = fixed(RuntimeError, text)
        yield from out_of_range(sorter, 0, boundaries.shape[-1], error)


@check("aten.linalg_lu_solve.default")
def lu_solve(packed: jax.Array, pivots: jax.Array, *_: Any, **__: Any) -> Iterator[Finding]:
    if 0 in packed.shape or 0 in pivots.shape:
        return
    yield from out_of_range(pivots, 1, packed.shape[-2] + 1, _pivot_error)


def _pivot_error(pivot: int) -> Exception:
    bound = "greater or equal to 1" if pivot < 1 else "smaller or equal to LU.size(-2)"
    return RuntimeError(
        f"Pivots given to lu_solve must all be {bound}. Did you properly pass the result of "
        "lu_factor?"
    )
