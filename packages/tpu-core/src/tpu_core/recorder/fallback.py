"""The CPU fallback: an op without a lowering runs on the host, counted and said once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from tpu_core import _C
from tpu_core.config import config
from tpu_core.errors import FallbackError, FallbackWarning, UnsupportedOpError
from tpu_core.logs import warn_at
from tpu_core.metrics import METRICS
from tpu_core.recorder.error_parity import Copies, lacks_kernel, of_device
from tpu_core.recorder.functional_variants import overload_name, written_arguments


def run_on_cpu(
    op: torch._ops.OpOverload, args: tuple[Any, ...], target: torch._ops.OpOverload | None = None
) -> Any:
    """Run ``op`` on CPU copies of its arguments.

    Args:
        op: The overload that was called.
        args: Its arguments.
        target: The overload that the CPU has in its place; a call that it refuses raises its error
            even where fallbacks are errors.

    Raises:
        FallbackError: ``TPU_FALLBACK=error``.
        UnsupportedOpError: The CPU does not have the op either.
    """
    name = overload_name(op)
    policy = config().fallback
    line = _C.user_line() or None
    lacking = FallbackError(f"{name} has no lowering and TPU_FALLBACK=error.", line=line)
    if policy == "error" and target is None:
        raise lacking
    started = time.perf_counter()
    try:
        result = compute_on_host(op, args, reason="fallback", target=target)
    except NotImplementedError as error:
        if target is not None:
            raise
        if not lacks_kernel(error):
            raise of_device(error) from None
        own = "Register a lowering (tpu_core.extend.register), or a CPU kernel (torch.library)."
        raise UnsupportedOpError(
            f"{name} has no lowering, no decomposition and no CPU kernel.",
            line=line,
            remedy=None if name.startswith("aten.") else own,
        ) from error
    if policy == "error":
        raise lacking
    seconds = time.perf_counter() - started
    reason = "has no lowering for device 'tpu' and" if target is None else "of this kind"
    count(name, reason, line, seconds)
    return result


def count(name: str, reason: str, line: str | None, seconds: float) -> None:
    """Count a fallback, and warn at the first of an op.

    Args:
        name: The overload.
        reason: Stands between its name and "runs on the CPU".
        line: The user's.
        seconds: That it took, copies included.
    """
    if METRICS.fallback(name, line, seconds) and config().fallback == "warn":
        warning = FallbackWarning(
            f"{name} {reason} runs on the CPU ({seconds * 1e3:.1f} ms this time, copies included).",
            line=line,
        )
        warn_at(line, warning)


def compute_on_host(
    op: torch._ops.OpOverload,
    args: tuple[Any, ...],
    reason: str,
    target: torch._ops.OpOverload | None = None,
) -> Any:
    """Copy tensor arguments to the CPU, call ``op`` there, copy results and mutations back.

    Args:
        op: The overload that was called.
        args: Its arguments.
        reason: Counted with the host syncs.
        target: The overload that the CPU has in its place.
    """
    schema = op._schema.arguments
    device = next(
        (x.device for x in torch.utils._pytree.tree_leaves(args) if _ours(x)),
        torch.device("tpu", _C.current_device()),
    )

    # Copies have the geometry of the originals and share memory as they do: PyTorch checks both.
    twin = Copies(lambda x: _C.read_tensor(x, reason))

    def to_host(x: Any) -> Any:
        if _ours(x):
            return twin(x)
        if isinstance(x, torch.device):
            return torch.device("cpu")
        return x

    copies = [tree_map(to_host, a) for a in args]
    for i, a in enumerate(schema):
        copies[i] = _host_argument(str(a.type), args[i], copies[i], copies)
    positional = [v for a, v in zip(schema, copies) if not a.kwarg_only]
    keywords = {a.name: v for a, v in zip(schema, copies) if a.kwarg_only}
    if "device" in keywords:
        keywords["device"] = torch.device("cpu")
    result = (target or op)(*positional, **keywords)
    originals = _write_back(op, args, copies)

    def to_device(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return originals[id(x)] if id(x) in originals else x.to(device)
        return x

    return tree_map(to_device, result)


def _host_argument(kind: str, given: Any, copy: Any, copies: list[Any]) -> Any:
    """A copied argument as the CPU's op takes it: a generator, or a number for a tensor."""
    if "Generator" in kind and copy is not None:
        return _host_generator(given)
    if kind == "Tensor" and isinstance(copy, (bool, int, float, complex)):
        fits = not isinstance(copy, int) or copy >> 63 in (0, -1)
        return _number_as_tensor(copy, copies) if fits else copy
    return copy


def _write_back(
    op: torch._ops.OpOverload, args: Sequence[Any], copies: Sequence[Any]
) -> dict[int, torch.Tensor]:
    """Copy what the CPU's op wrote into the arguments; returns them by the id of their copies."""
    originals: dict[int, torch.Tensor] = {}
    written = set(written_arguments(op))
    for a, original, copy in zip(op._schema.arguments, args, copies):
        if a.name not in written or original is None:
            continue
        pairs = zip(original, copy) if isinstance(original, (list, tuple)) else [(original, copy)]
        for o, c in pairs:
            if o.shape != c.shape:
                o.resize_(c.shape)
            o.copy_(c)
            originals[id(c)] = o
    return originals


def _number_as_tensor(number: complex, operands: list[Any]) -> torch.Tensor:
    """A number that PyTorch had wrapped in a tensor, as the CPU wraps it for these operands."""
    double = any(isinstance(x, torch.Tensor) and x.dtype == torch.float64 for x in operands)
    with_fraction = isinstance(number, float) and double
    return torch.tensor(number, dtype=torch.float64 if with_fraction else None, device="cpu")


def _host_generator(generator: torch.Generator) -> torch.Generator:
    """A CPU generator for one call, seeded from the device's, which moves on."""
    seed, offset = _C.next_seed(generator)
    # The odd constant spreads neighbouring offsets over all bits (Steele et al., SplitMix, 2014).
    return torch.Generator().manual_seed((seed ^ offset * 0x9E3779B97F4A7C15) & (2**63 - 1))


def _ours(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "tpu"
