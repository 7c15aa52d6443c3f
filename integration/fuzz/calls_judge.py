"""Differences of what a call of ``calls`` gave on the device from what it gave on the CPU."""

from __future__ import annotations

import re

import torch
from torch.utils._pytree import tree_leaves

from . import calls_excluded
from .calls_worlds import Call, Outcome, name_of
from .cases import Failure
from .compare import difference, tolerance


def errors_differ(call: Call, want: Outcome, got: Outcome) -> Failure | None:
    key = name_of(call)
    w, g = want.error, got.error
    if w is None and g is None:
        return None
    if w is None:
        assert g is not None
        if excused_on_device(g):
            want.error = g  # its results are not compared
            return None
        return Failure("error", key, f"the device raises {type(g).__name__}: {g}")
    if g is None:
        if excused_on_cpu(w):
            return None
        return Failure("no error", key, f"the CPU raises {type(w).__name__}: {w}")
    if not isinstance(g, type(w)) and not excused_on_cpu(w) and not excused_on_device(g):
        text = f"cpu {type(w).__name__}: {w}\ndevice {type(g).__name__}: {g}"
        return Failure("error type", key, text)
    return None


def excused_on_cpu(error: Exception) -> bool:
    """Whether an error of the CPU's is not asked of the device."""
    text = f"{type(error).__name__}: {error}"
    if calls_excluded.BY_VALUE.search(text):
        return True
    # Dtypes that the CPU has no kernel for, and options (LU without pivots). What a function
    # "only supports" are its arguments', and asked of the device.
    missing = r"not implemented (for|on the CPU)|not supported|[Uu]nsupported|only supports?.* CPU"
    return bool(re.search(rf"{missing}|Could not run", text))


def excused_on_device(error: Exception) -> bool:
    """Whether an error of the device is documented."""
    return bool(re.search(r"TPU1005|complex32", str(error)))


def results_differ(call: Call, want: Outcome, got: Outcome) -> Failure | None:
    if want.error is not None or _has_no_shape(want.result):
        return None
    key = name_of(call)
    least = tolerance(*(d for d in want.dtypes if d.is_floating_point or d.is_complex))
    pairs = (
        ("result", want.result, got.result),
        ("written", want.written, got.written),
        ("gradients", want.gradients, got.gradients),
    )
    for path, w, g in pairs:
        try:
            strides = path == "result" and not calls_excluded.LAYOUT_OF_A_LIBRARY.search(key)
            found = difference(w, g, least=least, strides=strides, path=path)
        except Exception as error:
            text = f"{path}: {type(error).__name__}: {error}"
            return Failure("late error", key, text)
        if found:
            kind, text = found
            return Failure(kind if path != "gradients" else f"gradient {kind}", key, text)
    return None


def _has_no_shape(result: object) -> bool:
    """Whether a size is below 0, as of the CPU's `replication_pad3d` into an ``out=`` tensor."""
    tensors = (t for t in tree_leaves(result) if isinstance(t, torch.Tensor))
    return any(n < 0 for t in tensors for n in t.shape)


def error_of_the_read(call: Call, want: Outcome, got: Outcome) -> Failure | None:
    """A call that the CPU refuses by its values: on the device the next read raises, of that type.

    It is read at once, so that no later call meets it.
    """
    if want.error is None or got.error is not None:
        return None
    try:
        torch.tpu.synchronize()
    except Exception as error:
        got.error = error
        if not isinstance(error, type(want.error)) and not excused_on_device(error):
            w, g = (f"{type(e).__name__}: {e}" for e in (want.error, error))
            return Failure("error type", name_of(call), f"cpu {w}\ndevice, at the read, {g}")
    return None


def left_over(key: str) -> Failure | None:
    """An error of a call whose results were not read: it must not meet the next case."""
    try:
        torch.tpu.synchronize()
    except Exception as error:
        if excused_on_device(error):
            return None
        return Failure("late error", key, f"{type(error).__name__}: {error}")
    return None
