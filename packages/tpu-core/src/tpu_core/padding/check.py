"""The first run of a padded program, beside the program that it stands for.

Sums over padding are taken in another order. Where a result is what rounding leaves of a sum that
is zero, as the gradient of a bias before a batch norm, no relative tolerance fits: the exact
program runs again with its inputs off by a few units in the last place, and what it spreads over is
allowed (as in `tpu_core.verification.judge`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from tpu_core.compiler.segment import RuntimeScalar, Segment
from tpu_core.padding.bucketed_program import BucketedProgram
from tpu_core.pjrt import client as pjrt
from tpu_core.pjrt.padded_array import PaddedArray, on_host

_OFF = 8  # units in the last place that an input is off by, at most
_ALLOWED = 16  # times the spread
_RUNS = 2

Array = np.ndarray[Any, Any]
Run = Callable[[list[Any], Sequence[int], Sequence[tuple[int, ...]]], list[Any]]


def differences(
    family: BucketedProgram, buckets: tuple[int, ...], run: Run, arrays: list[Any], device: Any
) -> str | None:
    """Difference between a padded and an exact program on the same input, or None.

    The input is the caller's, cut off or repeated to the sizes of the recording whose exact program
    is there. Where there is none, the program itself runs twice, with the padding filled otherwise:
    what comes out must not depend on it. Programs of buckets too small for any recording are like
    the family's others.

    Args:
        family: The program's family.
        buckets: The program's.
        run: The padded program.
        arrays: The caller's inputs.
        device: The device.
    """
    assert family.fit is not None
    checkable = [
        (r, v)
        for r, v in zip(family.recordings, family.fit.values)
        if r.program and all(a <= b for a, b in zip(family.buckets(v), buckets))
    ]
    if not checkable:
        return _leaks(family, buckets, run, arrays, device)
    recording, values = checkable[0]
    segment, program = recording.segment, recording.program
    inputs = _inputs(segment, arrays)

    def exact(inputs: list[Array]) -> list[Array]:
        copies = [pjrt.put(x, device) for x in inputs]
        results = program.execute([*copies, *_packs(segment, device)])
        return _on_host(results.consume_with_handlers(program.handlers))

    expected = exact(inputs)
    outputs = [segment.slots[i].shape for i in segment.live]
    copies = [pjrt.put(x, device) for x in inputs]
    got = _on_host(run([*copies, *_numbers(family, segment, device)], values, outputs))
    if _first_difference(segment, expected, got, _close) is None:
        return None
    generator = np.random.default_rng(0)
    near = [exact([_off(x, generator) for x in inputs]) for _ in range(_RUNS)]
    spreads = iter([_spread(want, *others) for want, *others in zip(expected, *near, strict=True)])

    def within_spread(want: Array, have: Array) -> bool:
        return _close(want, have, next(spreads))

    return _first_difference(segment, expected, got, within_spread)


def _leaks(
    family: BucketedProgram, buckets: tuple[int, ...], run: Run, arrays: list[Any], device: Any
) -> str | None:
    """Result that depends on the content of the padding, or None.

    A family of declared sizes has no exact program to compare with.
    """
    assert family.fit is not None
    found = zip(family.recordings, family.fit.values)
    fitting = [(r, v) for r, v in found if _fits(family, r.segment, v, buckets)]
    if not fitting:
        return None
    recording, values = max(fitting, key=lambda found: math.prod(found[1]))
    segment = recording.segment
    bounds = [family.bound(i, buckets) for i in segment.inputs()]
    outputs = [segment.slots[i].shape for i in segment.live]
    results = []
    for filling in (np.zeros, _poison):
        filled = []
        for x, bound in zip(_inputs(segment, arrays), bounds):
            padded = filling(bound, x.dtype)
            padded[tuple(slice(0, n) for n in x.shape)] = x
            filled.append(PaddedArray(pjrt.put(padded, device), x.shape))
        results.append(run([*filled, *_numbers(family, segment, device)], values, outputs))
    return _first_difference(segment, _on_host(results[0]), _on_host(results[1]), _same)


def _fits(
    family: BucketedProgram, segment: Segment, values: Sequence[int], buckets: tuple[int, ...]
) -> bool:
    """Return whether values between programs fit their arrays; sizes with an offset may not."""
    between = (*segment.inputs(), *segment.live)
    pairs = [zip(segment.slots[i].shape, family.bound(i, buckets)) for i in between]
    return all(n <= room for pair in (zip(values, buckets), *pairs) for n, room in pair)


def _poison(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Value to fill padding with in a check: NaN, or a number far from any other."""
    if jnp.issubdtype(dtype, np.inexact):
        return np.full(shape, np.nan, dtype)
    return np.full(shape, True if dtype == np.bool_ else 101, dtype)


def _on_host(results: Sequence[Any]) -> list[Array]:
    return [np.asarray(on_host(result)) for result in results]


def _first_difference(
    segment: Segment,
    expected: Sequence[Array],
    got: Sequence[Array],
    agree: Callable[[Array, Array], bool],
) -> str | None:
    for slot, want, have in zip(segment.live, expected, got):
        if not agree(want, have):
            node = next(n for n in segment.nodes if slot in n.outputs)
            return f"{node.label} came out otherwise on padded arrays"
    return None


def _inputs(segment: Segment, arrays: list[Any]) -> list[Array]:
    """The caller's inputs, cut off or repeated to the sizes of a recording."""
    shapes = [segment.slots[i].shape for i in segment.inputs()]
    return [_repeated(np.asarray(on_host(a)), shape) for a, shape in zip(arrays, shapes)]


def _numbers(family: BucketedProgram, segment: Segment, device: Any) -> list[Any]:
    """The packed numbers of a recording, as the padded program takes them."""
    template = family.segment()
    numbers = [
        RuntimeScalar(n.pack, t.compiled_in, n.value)
        for n, t in zip(segment.numbers, template.numbers)
    ]
    return _packs(segment.with_numbers(numbers), device)


def _repeated(x: Array, shape: tuple[int, ...]) -> Array:
    """The array cut off or repeated along each dim."""
    for axis, n in enumerate(shape):
        if x.shape[axis] != n:
            x = np.take(x, np.arange(n) % max(x.shape[axis], 1), axis=axis)
    return np.array(x)


def _packs(segment: Segment, device: Any) -> list[Any]:
    packs = []
    for k, _n in segment.packs():
        values = [n.value for n in segment.numbers if n.pack == k and not n.compiled_in]
        # Words of a seed are unsigned and travel as signed integers of 32 bits.
        packs.append(pjrt.put(np.asarray(values).astype(pjrt.PACK_DTYPES[k]), device))
    return packs


def _off(x: Array, generator: np.random.Generator) -> Array:
    """An input off by some units in the last place; integers stay, as a mask of 0 and 1 does."""
    if not jnp.issubdtype(x.dtype, np.inexact):
        return x
    noise = 1 + _OFF * float(jnp.finfo(x.dtype).eps) * generator.uniform(-1, 1, x.shape)
    wide = x.astype(_wide(x.dtype))
    return np.where(wide == np.round(wide), wide, wide * noise).astype(x.dtype)


def _spread(want: Array, *others: Array) -> float:
    """Largest distance of a result's elements between runs; none where a run is not finite."""
    if not jnp.issubdtype(want.dtype, np.inexact):
        return 0.0
    exact, *near = (x.astype(_wide(x.dtype)) for x in (want, *others))
    finite = np.isfinite(exact)
    distances = [np.abs(np.where(finite, x - exact, 0)).max(initial=0) for x in near]
    return float(np.nan_to_num(np.max(distances), nan=0.0, posinf=0.0))


def _wide(dtype: np.dtype[Any]) -> type[np.inexact[Any]]:
    return np.complex128 if dtype.kind == "c" else np.float64


def _same(want: Array, have: Array) -> bool:
    return want.tobytes() == have.tobytes()


def _close(want: Array, have: Array, spread: float = 0.0) -> bool:
    if not jnp.issubdtype(want.dtype, np.inexact):
        return bool(np.array_equal(want, have))
    # Errors of one op are those of the next.
    tolerance = float(jnp.finfo(want.dtype).eps) ** 0.5 * 4
    want, have = want.astype(_wide(want.dtype)), have.astype(_wide(want.dtype))
    finite = np.isfinite(want)
    scale = float(np.abs(want[finite]).max(initial=0))
    allowed = tolerance * scale + _ALLOWED * spread
    return bool(
        np.array_equal(finite, np.isfinite(have))
        and np.allclose(want, have, rtol=tolerance, atol=allowed, equal_nan=True)
    )
