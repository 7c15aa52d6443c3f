"""Calls made from PyTorch's OpInfo samples, with other sizes and other static arguments."""

from __future__ import annotations

import functools
import itertools
import random
import warnings
import zlib
from typing import Any

import torch

from . import calls_excluded
from .values import LAYOUTS, Unencodable, encoded, is_tensor, mapped, resized, tensors

SAMPLES = 24
WANTED = (
    *(torch.float32,) * 8, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32,
    torch.uint8, torch.bool, torch.complex64,
)  # fmt: skip


@functools.cache
def entries() -> list[Any]:
    """OpInfo entries whose function has a public path, and whose results are determined."""
    from opinfo import op_db

    found = []
    for op in op_db:
        last = op.name.split(".")[-1]
        if path_of(op.name) is None or op.name.startswith(("_", "jiterator", "ops.")):
            continue
        if op.name.startswith(("sparse", "masked.")) or "empty" in last or "like" in last:
            continue
        names = {last, op.name.replace(".", "_"), op.aten_name or last}
        why = {calls_excluded.EXCLUDED.get(name) for name in names} - {None}
        if why and why != {"called through OpInfo, whose arguments fit together"}:
            continue
        if last in RANDOM or op.name in RANDOM:
            continue
        found.append(op)
    return found


# Not named by the op of ATen that is random, or unique up to a factor; `tensor_split` wants its
# indices on the CPU, whatever the device.
RANDOM = frozenset(
    """dropout2d dropout3d multi_head_attention_forward svd_lowrank pca_lowrank
    scaled_dot_product_attention gumbel_softmax feature_alpha_dropout as_strided
    to_sparse chalf cauchy lu ldl_factor ldl_factor_ex eigh eig svd qr geqrf eigvals
    fractional_max_pool2d fractional_max_pool3d item rrelu tensor_split""".split()
)


def path_of(name: str) -> str | None:
    """The public path of an entry's function: of torch, else of the tensor's method."""
    for path in (f"torch.{name}", f"torch.Tensor.{name}"):
        found: Any = torch
        for part in path.split(".")[1:]:
            found = getattr(found, part, None)
        if callable(found):
            return path
    return None


@functools.cache
def samples(index: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Encoded calls of an entry's first samples."""
    op = entries()[index]
    torch.manual_seed(zlib.crc32(f"{op.name}/{dtype}".encode()))
    calls = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in itertools.islice(op.sample_inputs("cpu", dtype), SAMPLES):
            try:
                args = [encoded(a) for a in (sample.input, *sample.args)]
                kwargs = {k: encoded(v) for k, v in sample.kwargs.items()}
            except Unencodable:
                continue
            calls.append({"fn": path_of(op.name), "args": args, "kwargs": kwargs})
    return calls


def drawn(rng: random.Random) -> dict[str, Any] | None:
    """A sample's call, as it is or with another layout; None if the entry has none."""
    index = rng.randrange(len(entries()))
    op = entries()[index]
    dtypes = [d for d in WANTED if d in op.supported_dtypes("cpu")]
    if not dtypes:
        return None
    try:
        calls = samples(index, rng.choice(dtypes))
    except Exception:
        return None  # the generator wants something that is not installed
    if not calls:
        return None
    call = rng.choice(calls)
    if rng.random() < 0.25:
        layout = rng.choice(LAYOUTS[:4])
        call = _changed(call, lambda v: {**v, "layout": layout} if is_tensor(v) else v)
    return call


def _changed(call: dict[str, Any], change: Any) -> dict[str, Any]:
    return {
        **call,
        "args": [mapped(a, change) for a in call["args"]],
        "kwargs": {k: mapped(v, change) for k, v in call["kwargs"].items()},
    }


def with_other_static(rng: random.Random, call: dict[str, Any]) -> dict[str, Any]:
    """The call with one or two of its numbers, flags or dtypes changed."""
    leaves: list[Any] = []
    _changed(call, lambda v: leaves.append(v) or v)
    static = [i for i, v in enumerate(leaves) if not is_tensor(v) and v is not None]
    if not static:
        return call
    chosen = set(rng.sample(static, min(len(static), rng.choice((1, 1, 2)))))
    counter = itertools.count()

    def change(value: Any) -> Any:
        return _other(rng, value) if next(counter) in chosen else value

    return _changed(call, change)


def _other(rng: random.Random, value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, -value, 0, 1, 2, value))
    if isinstance(value, float):
        return rng.choice((value * 2, value + 0.5, -value, 1.0, 0.0, 2.0))
    return value  # strings name functions and dtypes too: those of other samples are drawn


def with_other_sizes(rng: random.Random, call: dict[str, Any]) -> dict[str, Any]:
    """The call with one or two sizes replaced wherever they occur in its tensors."""
    sizes = sorted(
        {n for v in tensors([call["args"], call["kwargs"]]) for n in v["t"] if 1 < n < 30}
    )
    if not sizes:
        return call
    chosen = rng.sample(sizes, min(len(sizes), rng.choice((1, 1, 2))))
    new = {n: max(1, n + rng.choice((-1, 1, 2, 3, -2))) for n in chosen}
    return _changed(call, lambda v: resized(v, new) if is_tensor(v) else v)
