"""Rule of Fourier transforms: each length is another sum, whose factors are computed at run time.

A length that does not vary is transformed as it is. One that varies is a product with the matrix
of ``exp(-2 pi i j k / n)``, of the bucket's size, with the run-time ``n``: the padding of the input
is zero, and the rows beyond ``n`` are padding of the result. It takes a bucket's square of
multiplications where the transform takes ``n log n``, so that the bucket is bounded.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.lax import FftType

from tpu_core.padding.interpret import PaddingContext, rule
from tpu_core.padding.layout import Padded, is_static, replaced
from tpu_core.padding.sizes import NotPaddableError, Size

# Largest bucket of a length that varies.
_MOST = 2048
# Of the transforms along several dims, those of the dims before the last one.
_COMPLEX = {
    FftType.FFT: FftType.FFT,
    FftType.RFFT: FftType.FFT,
    FftType.IFFT: FftType.IFFT,
    FftType.IRFFT: FftType.IFFT,
}


@rule("fft", handles=("fft_lengths",))
def fft(context: PaddingContext, eqns: list[JaxprEqn], operands: list[Padded]) -> list[Padded]:
    """One dim after the other: the halved one first where it is halved, last where it was."""
    x, kind = operands[0], FftType(eqns[0].params["fft_type"])
    sizes, lengths = context.out(eqns), context.sizes([e.params["fft_lengths"] for e in eqns])
    lead = len(x.dims) - len(lengths)
    # What an FFT makes of padding that is no number is another error on each platform.
    x = Padded(context.space.mask(x, range(lead), 0), x.dims)
    if all(n.is_static for n in lengths) and all(map(is_static, x.dims[lead:])):
        array = lax.fft(x.array, kind, tuple(n.offset for n in lengths))
        return [Padded(array, (*x.dims[:lead], *((s,) for s in sizes[lead:])))]
    last = len(x.dims) - 1
    steps = [(axis, _COMPLEX[kind]) for axis in range(lead, last)]
    steps.insert(len(steps) if kind == FftType.IRFFT else 0, (last, kind))
    for axis, step in steps:
        x = _along(context, x, axis, step, lengths[axis - lead], sizes[axis])
    return [x]


def _along(
    context: PaddingContext, x: Padded, axis: int, kind: FftType, length: Size, size: Size
) -> Padded:
    """The transform along one dim, whose result has ``size`` elements."""
    space = context.space
    x = space.as_prefix(x, axis)
    dims = replaced(x.dims, axis, (size,))
    array = jnp.moveaxis(space.mask(x, [axis], 0), axis, -1)
    if length.is_static and is_static(x.dims[axis]):
        array = lax.fft(array, kind, (length.offset,))
    else:
        padded = space.padded(size)
        if max(padded, array.shape[-1]) > _MOST:
            raise NotPaddableError(f"a Fourier transform over sizes of more than {_MOST}")
        n = jnp.maximum(jnp.asarray(space.actual(length), np.int32), 1)
        array = _product(array, kind, n, padded)
    return Padded(jnp.moveaxis(array, -1, axis), dims)


def _product(x: jax.Array, kind: FftType, n: jax.Array, padded: int) -> jax.Array:
    """The transform of length ``n`` along the last dim, as a product with a matrix."""
    real = np.zeros((), x.dtype).real.dtype
    j = lax.broadcasted_iota(np.int32, (x.shape[-1], padded), 0)
    k = lax.broadcasted_iota(np.int32, (x.shape[-1], padded), 1)
    cos, sin = _circle(lax.rem(j * k, lax.broadcast(n, j.shape)), n, real)
    if kind == FftType.RFFT:
        return lax.complex(_dot(x, cos), -_dot(x, sin))
    scale = 1 / n.astype(real)
    if kind == FftType.FFT:
        return _dot(x, lax.complex(cos, -sin))
    if kind == FftType.IFFT:
        return _dot(x, lax.complex(cos, sin)) * scale.astype(x.dtype)
    # The other half are conjugates: all but the first and, of an even length, the last count twice.
    twice = (j > 0) & (2 * j < n)
    count = jnp.where(twice, jnp.asarray(2, real), jnp.asarray(1, real))
    return (_dot(x.real, cos * count) - _dot(x.imag, sin * count)) * scale


def _circle(m: jax.Array, n: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of ``2 pi m / n``, exact at each quarter, by an angle within an eighth."""
    quarter = (8 * m + n) // (2 * n)
    angle = (4 * m - quarter * n).astype(dtype) * (np.pi / 2 / n.astype(dtype))
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    is_odd = quarter % 2 == 1
    sign_cos = jnp.where((quarter == 1) | (quarter == 2), -1, 1).astype(dtype)
    sign_sin = jnp.where((quarter == 2) | (quarter == 3), -1, 1).astype(dtype)
    return jnp.where(is_odd, sin, cos) * sign_cos, jnp.where(is_odd, cos, sin) * sign_sin


def _dot(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Product over the last dim of ``x``."""
    return jnp.matmul(x, matrix, precision=lax.Precision.HIGHEST)
