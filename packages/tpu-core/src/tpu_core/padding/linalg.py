"""Rules of matrix factorizations and triangular solves: padding is the identity, or zeros.

A factorization of ``[[A, 0], [0, I]]`` is that of ``A`` beside the identity, with pivots as well:
zeros are not chosen before elements that count. Eigenvectors and singular vectors have a rule for
batches of matrices of one size alone: where values coincide, those of padding in a matrix mix with
the others.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from tpu_core.padding.interpret import PaddingContext, bind, rule
from tpu_core.padding.layout import Padded, is_static, replaced
from tpu_core.padding.sizes import NotPaddableError


def _prefixes(context: PaddingContext, x: Padded) -> Padded:
    """A batch of matrices with the padding of rows and columns at their ends."""
    rank = len(x.dims)
    return context.space.as_prefix(context.space.as_prefix(x, rank - 2), rank - 1)


def _with_zeros(context: PaddingContext, x: Padded) -> Padded:
    """Matrices whose padding is zero."""
    x = _prefixes(context, x)
    rank = len(x.dims)
    return Padded(context.space.mask(x, (rank - 2, rank - 1), 0), x.dims)


def _with_identity(context: PaddingContext, x: Padded) -> Padded:
    """Square matrices beside the identity.

    Raises:
        NotPaddableError: They are not square at each size.
    """
    x = _with_zeros(context, x)
    rows, columns = x.dims[-2:]
    if rows != columns:
        raise NotPaddableError("a factorization of matrices that are not square")
    if is_static(rows):
        return x
    padding = ~context.space.valid(rows)
    one = jnp.diag(padding.astype(x.array.dtype))
    return Padded(x.array + one, x.dims)


@rule("cholesky")
def cholesky(context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]) -> list[Padded]:
    x = _with_identity(context, operands[0])
    return [Padded(r, x.dims) for r in bind(eqns[0], [x.array])]


@rule("lu")
def lu(context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]) -> list[Padded]:
    x = _with_identity(context, operands[0])
    packed, pivots, permutation = bind(eqns[0], [x.array])
    vector = x.dims[:-1]
    return [Padded(packed, x.dims), Padded(pivots, vector), Padded(permutation, vector)]


@rule("lu_pivots_to_permutation", handles=("permutation_size",))
def lu_pivots_to_permutation(
    context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]
) -> list[Padded]:
    x, sizes = operands[0], context.out(eqns)
    x = context.space.as_prefix(x, len(x.dims) - 1)
    if x.dims[-1] != (sizes[-1],):
        raise NotPaddableError("pivots of matrices that are not square")
    # Padding is exchanged with itself.
    own = lax.broadcasted_iota(x.array.dtype, x.array.shape, x.array.ndim - 1)
    valid = jnp.broadcast_to(context.space.valid(x.dims[-1]), x.array.shape)
    pivots = jnp.where(valid, x.array, own)
    length = context.space.padded(sizes[-1])
    return [Padded(r, x.dims) for r in bind(eqns[0], [pivots], permutation_size=length)]


@rule("triangular_solve")
def triangular_solve(
    context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]
) -> list[Padded]:
    a, b = operands
    rank = len(a.dims)
    for axis in range(rank - 2):  # batches
        dim = max(a.dims[axis], b.dims[axis], key=len)
        a = context.space.relayout(a, replaced(a.dims, axis, dim))
        b = context.space.relayout(b, replaced(b.dims, axis, dim))
    a, b = _with_identity(context, a), _prefixes(context, b)
    solved = rank - 2 if eqns[0].params["left_side"] else rank - 1
    right_side = context.space.mask(b, [solved], 0)
    return [Padded(r, b.dims) for r in bind(eqns[0], [a.array, right_side])]


@rule("qr")
def qr(context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]) -> list[Padded]:
    """Columns of zeros need no reflection, and those of the others have zeros in the padding."""
    if eqns[0].params["full_matrices"] or eqns[0].params["pivoting"]:
        raise NotPaddableError("a QR decomposition with all columns, or with pivots")
    x = _with_zeros(context, operands[0])
    results = []
    for i, array in enumerate(bind(eqns[0], [x.array])):
        sizes = context.out(eqns, i)
        shape = (*array.shape[:-2], *(context.space.padded(s) for s in sizes[-2:]))
        dims = (*x.dims[:-2], *((s,) for s in sizes[-2:]))
        results.append(Padded(context.space.resized(array, shape), dims))
    return results


def _of_batch(context: PaddingContext, eqns: list[JaxprEqn], x: Padded, why: str) -> list[Padded]:
    """A function of matrices whose size does not vary."""
    lead = len(x.dims) - 2
    if not all(map(is_static, x.dims[lead:])):
        raise NotPaddableError(why)
    x = Padded(context.space.mask(x, range(lead), 0), x.dims)
    results = bind(eqns[0], [x.array])
    own = [tuple((s,) for s in context.out(eqns, i)[lead:]) for i in range(len(results))]
    return [Padded(r, (*x.dims[:lead], *dims)) for r, dims in zip(results, own)]


@rule("eigh")
def eigh(context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]) -> list[Padded]:
    why = "eigenvectors of matrices whose size varies"
    return _of_batch(context, eqns, operands[0], why)


@rule("svd")
def svd(context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]) -> list[Padded]:
    """Of matrices whose size varies values alone: zeros come last, as those of the padding are."""
    params = eqns[0].params
    if params["compute_uv"] or params["subset_by_index"]:
        why = "singular vectors of matrices whose size varies"
        return _of_batch(context, eqns, operands[0], why)
    x = _with_zeros(context, operands[0])
    (values,) = bind(eqns[0], [x.array])
    size = context.out(eqns)[-1]
    shape = (*values.shape[:-1], context.space.padded(size))
    return [Padded(context.space.resized(values, shape), (*x.dims[:-2], (size,)))]
