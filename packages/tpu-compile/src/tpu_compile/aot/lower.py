"""A traced program as StableHLO with Shardy annotations."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tpu_compile.aot.annotations import in_halves, scope
from tpu_compile.aot.capture import Captured
from tpu_compile.aot.plan import KernelUse
from tpu_compile.aot.sharding import Spec
from tpu_compile.fx_utils import lowering_of
from tpu_compile.sharding_constraints import over
from tpu_core.errors import KernelCompilationError
from tpu_core.extend import (
    AbstractChip,
    GraphEvaluator,
    KernelSelection,
    LibtpuTopology,
    OperandSharding,
    Target,
    to_numpy_dtype,
)


def lower(
    captured: Captured, mesh: Mapping[str, int], kind: str
) -> tuple[bytes, tuple[KernelUse, ...]]:
    """StableHLO bytecode of a program, and its kernels; its last input is the random seed.

    Args:
        captured: The program.
        mesh: Size of each axis.
        kind: Generation of the chips, ``"TPU v5e"``.
    """
    # Kernels ask jax which chip they are for.
    abstract = AbstractChip(kind).mesh(mesh)

    def sharding(spec: Spec) -> NamedSharding:
        return NamedSharding(abstract, PartitionSpec(*spec))

    avals = [
        jax.ShapeDtypeStruct(leaf.shape, to_numpy_dtype(leaf.dtype), sharding=sharding(leaf.spec))
        for leaf in captured.inputs
    ]
    avals.append(jax.ShapeDtypeStruct((2,), np.uint32, sharding=sharding(())))
    results: list[Any] = [None] * len(captured.outputs)
    for place, result in captured.aliases.items():
        results[result] = sharding(captured.inputs[place].spec)

    def main(*arrays: jax.Array) -> list[jax.Array]:
        given = [in_halves(a, leaf.spec) for a, leaf in zip(arrays, captured.inputs)]
        return GraphEvaluator.run(
            captured.graph, given, arrays[-1], entry_of=lowering_of, scope=scope
        )

    def lowered() -> tuple[Any, list[KernelSelection]]:
        function = jax.jit(functools.partial(main), keep_unused=True, out_shardings=results)
        with KernelSelection.recording() as uses:
            return function.trace(*avals).lower(lowering_platforms=("tpu",)), uses

    division = OperandSharding(abstract) if abstract.size > 1 else None
    here = Target("tpu", abstract.size, kind, division).applied()
    with over(abstract), here, jax.enable_x64(True), KernelCompilationError.raising():
        made, uses = lowered()
        if division is not None and division.is_needed:
            division.learn(made)
            made, uses = lowered()
    counted = Counter(uses)
    kernels = (KernelUse(u.kernel, u.implementation, n, u.why) for u, n in counted.items())
    return LibtpuTopology.module_bytes(made, captured.aliases), tuple(kernels)
