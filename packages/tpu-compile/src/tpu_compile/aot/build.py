"""From a traced program and what libtpu made of it to a `Plan`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from tpu_compile.aot import costs, hlo
from tpu_compile.aot.advice import advise
from tpu_compile.aot.capture import AotJob, Captured
from tpu_compile.aot.chips import Topology
from tpu_compile.aot.plan import Input, KernelUse, Memory, Plan, Temporary
from tpu_compile.aot.process import Outcome
from tpu_compile.aot.sharding import shard_shape
from tpu_compile.aot.state import Leaf, Run
from tpu_compile.fx_utils import outputs
from tpu_compile.layer_ops import loops_of
from tpu_core.errors import TopologyCompilationError

_NEEDED = re.compile(
    r"\((\d+(?:\.\d+)?)([KMGT])\) exceeds available HBM|Used (\d+(?:\.\d+)?)([KMGT])"
)
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# What aliases an operand, or is counted among arguments and outputs.
_NO_TEMPORARY = {
    *("parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "constant"),
    *("call", "copy-start", "slice-start", "async-start", "optimization-barrier"),
}


def build(
    job: AotJob,
    captured: Captured,
    topology: Topology,
    outcome: Outcome,
    stablehlo: bytes,
    kernels: Sequence[KernelUse],
    runs: Sequence[Run],
    notes: Sequence[str],
    seconds: Mapping[str, float],
) -> Plan:
    """The plan of a program that libtpu has compiled, or found too large.

    Raises:
        TopologyCompilationError: libtpu ran out of memory and did not say how much it needs.
    """
    chip = topology.chip.per_device()
    module = hlo.parse(outcome.text) if outcome.text else None
    inputs = [*_inputs(captured.inputs, job.mesh, module)]
    loops = loops_of(captured.graph)
    layers = [(graph, times) for layer, times in loops for graph in layer.flop_graphs()]
    model_flops = _model_flops(captured.graph) + sum(
        times * _model_flops(graph) for graph, times in layers
    )
    cost = costs.analyse(module, outcome.cost or {}) if module else None
    line = costs.roofline(cost, chip) if cost else None
    taken = set(captured.aliases.values())
    made = [n.meta["val"] for n in outputs(captured.graph)]
    fresh = [
        (name, tuple(value.shape), _dtype(value.dtype))
        for i, (name, value) in enumerate(zip(captured.outputs, made))
        if i not in taken
    ]
    memory = _memory(outcome, module, int(chip.hbm))
    mfu = None
    if line is not None and line.step:
        mfu = model_flops / (line.step * chip.flops * topology.devices)
    return Plan(
        program=job.title,
        model=type(job.model).__name__,
        topology=topology.name,
        mesh=dict(job.mesh),
        devices=topology.devices,
        inputs=tuple(inputs),
        outputs=tuple(captured.outputs),
        memory=memory,
        cost=cost,
        roofline=line,
        model_flops=model_flops,
        mfu=mfu,
        kernels=tuple(kernels),
        scanned=tuple((run.label, len(run.names)) for run in runs),
        notes=tuple(notes),
        advice=tuple(
            advise(
                [captured.graph, *(graph for graph, _ in layers)],
                inputs,
                fresh,
                cost,
                int(chip.hbm),
            )
        ),
        seconds=dict(seconds),
        platform_version=outcome.platform_version,
        executable=outcome.executable,
        stablehlo=stablehlo,
        hlo=outcome.text,
    )


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _inputs(
    leaves: Sequence[Leaf], mesh: Mapping[str, int], module: hlo.Module | None
) -> list[Input]:
    padded: dict[int, int] = {}
    for instruction in module.entry_instructions if module else ():
        if instruction.opcode == "parameter":
            place = int(instruction.rest.split(")")[0])
            padded[place] = sum(s.padded_bytes for s in instruction.shapes)
    made = []
    for place, leaf in enumerate(leaves):
        part = shard_shape(leaf.shape, leaf.spec, mesh)
        size = torch.Size(part).numel() * leaf.dtype.itemsize
        made.append(
            Input(
                leaf.name,
                leaf.kind,
                leaf.shape,
                _dtype(leaf.dtype),
                leaf.spec,
                size,
                padded.get(place, size),
            )
        )
    return made


def _memory(outcome: Outcome, module: hlo.Module | None, capacity: int) -> Memory:
    stats = outcome.memory
    if stats is None:
        needed = _NEEDED.search(outcome.out_of_memory)
        if needed is None:
            raise TopologyCompilationError(
                f"libtpu ran out of memory: {outcome.out_of_memory}",
                remedy="Divide the model over more devices, or make the batch smaller.",
            )
        number, unit = (needed[1], needed[2]) if needed[1] else (needed[3], needed[4])
        # libtpu keeps some of the memory to itself: what it refuses does not fit, even if close.
        return Memory(capacity, max(int(float(number) * _UNITS[unit]), capacity + 1))
    total = stats["argument"] + stats["output"] - stats["alias"] + stats["temp"]
    return Memory(
        capacity,
        total + stats["generated_code"],
        stats["argument"],
        stats["output"],
        stats["alias"],
        stats["temp"],
        stats["generated_code"],
        _largest(module) if module else (),
    )


def _largest(module: hlo.Module, most: int = 8) -> tuple[Temporary, ...]:
    found: dict[tuple[str, str], int] = {}
    for instruction, _ in module.running():
        if instruction.opcode in _NO_TEMPORARY or instruction.opcode.endswith("-start"):
            continue
        for shape in instruction.shapes:
            if shape.space == 0:
                key = _named(shape), instruction.module
                found[key] = max(found.get(key, 0), shape.padded_bytes)
    ranked = sorted(found.items(), key=lambda item: -item[1])[:most]
    return tuple(Temporary(shape, size, where) for (shape, where), size in ranked)


def _model_flops(graph: GraphModule) -> float:
    """Operations of a graph's products, by PyTorch's formulas."""
    total = 0.0
    for node in graph.graph.nodes:
        packet = getattr(node.target, "overloadpacket", None)
        formula = flop_registry.get(packet)
        if formula is not None:
            args, kwargs = tree_map(
                lambda x: x.meta["val"] if isinstance(x, Node) else x, (node.args, node.kwargs)
            )
            total += formula(*args, **kwargs, out_val=node.meta["val"])
    return total


# HLO's names of dtypes that PyTorch has, as PyTorch has them.
_DTYPES = {
    **{"pred": "bool", "bf16": "bfloat16", "c64": "complex64", "c128": "complex128"},
    **{f"f{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"s{bits}": f"int{bits}" for bits in (4, 8, 16, 32, 64)},
    **{f"u{bits}": f"uint{bits}" for bits in (4, 8, 16, 32, 64)},
    **{"f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2"},
}


def _named(shape: hlo.Shape) -> str:
    """Dtype and sizes, written as those of the inputs are."""
    return f"{_DTYPES.get(shape.dtype, shape.dtype)}{list(shape.dims)}"
