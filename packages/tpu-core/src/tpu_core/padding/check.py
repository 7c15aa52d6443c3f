"""The first run of a padded program, beside the program that it stands for."""

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
    segment = recording.segment
    inputs = _inputs(segment, arrays)
    copies = [[pjrt.put(x, device) for x in inputs] for _ in range(2)]
    program = recording.program
    exact_numbers = _packs(segment, device)
    expected = program.execute([*copies[0], *exact_numbers])
    expected = expected.consume_with_handlers(program.handlers)
    outputs = [segment.slots[i].shape for i in segment.live]
    got = run([*copies[1], *_numbers(family, segment, device)], values, outputs)
    return _first_difference(segment, expected, got, _close)


def _leaks(
    family: BucketedProgram, buckets: tuple[int, ...], run: Run, arrays: list[Any], device: Any
) -> str | None:
    """Result that depends on the content of the padding, or None.

    A family of declared sizes has no exact program to compare with.
    """
    assert family.fit is not None
    found = zip(family.recordings, family.fit.values)
    fitting = [(r, v) for r, v in found if all(n <= b for n, b in zip(v, buckets))]
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
    return _first_difference(segment, results[0], results[1], _same)


def _poison(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Value to fill padding with in a check: NaN, or a number far from any other."""
    if jnp.issubdtype(dtype, np.inexact):
        return np.full(shape, np.nan, dtype)
    return np.full(shape, True if dtype == np.bool_ else 101, dtype)


def _first_difference(
    segment: Segment,
    expected: Sequence[Any],
    got: Sequence[Any],
    agree: Callable[[np.ndarray[Any, Any], np.ndarray[Any, Any]], bool],
) -> str | None:
    for slot, want, have in zip(segment.live, expected, got):
        if not agree(np.asarray(on_host(want)), np.asarray(on_host(have))):
            node = next(n for n in segment.nodes if slot in n.outputs)
            return f"{node.label} came out otherwise on padded arrays"
    return None


def _inputs(segment: Segment, arrays: list[Any]) -> list[np.ndarray[Any, Any]]:
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


def _repeated(x: np.ndarray[Any, Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
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


def _same(want: np.ndarray[Any, Any], have: np.ndarray[Any, Any]) -> bool:
    return want.tobytes() == have.tobytes()


def _close(want: np.ndarray[Any, Any], have: np.ndarray[Any, Any]) -> bool:
    if not jnp.issubdtype(want.dtype, np.inexact):
        return bool(np.array_equal(want, have))
    # Sums over padding are taken in another order; errors of one op are those of the next.
    tolerance = float(jnp.finfo(want.dtype).eps) ** 0.5 * 4
    wide = np.complex128 if want.dtype.kind == "c" else np.float64
    want, have = want.astype(wide), have.astype(wide)
    finite = np.isfinite(want)
    scale = float(np.abs(want[finite]).max(initial=0))
    return bool(
        np.array_equal(finite, np.isfinite(have))
        and np.allclose(want, have, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    )
