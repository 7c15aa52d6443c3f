"""The cost of a program: operations, bytes, collectives, and the least time they can take.

XLA's own analysis counts the body of a loop once. So products and bytes are counted from the HLO
text as well, with and without the number of rounds, and XLA's figures are scaled by the quotient.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tpu_compile.aot.chips import Chip
from tpu_compile.aot.hlo import Instruction, Module, Shape
from tpu_core.extend import KernelCost

# What takes no memory traffic of its own.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional"),
    *("call", "call-start", "after-all", "partition-id", "replica-id", "opt-barrier", "iota"),
    *("async-start", "async-update", "async-done", "copy-done", "slice-done"),
}
_COLLECTIVES = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"),
    *("ragged-all-to-all", "collective-broadcast"),
)
_KERNEL = 'custom_call_target="tpu_custom_call"'
_CHAIN = re.compile(r'(\bchannel_id=\d+).*(\bchain_id="[^"]*")')
# Passes of the matrix unit that a float32 product takes, by precision.
_PASSES = {"highest": 6, "high": 3}


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind over groups of one size.

    Attributes:
        kind: ``"all-reduce"``.
        group: Devices that take part in each.
        count: Number of them in a step.
        bytes: Of their results on one device, in a step.
        moved: Bytes that one device sends in a ring in a step.
        module: The module that most of the bytes come from.
    """

    kind: str
    group: int
    count: int
    bytes: int
    moved: float
    module: str


@dataclass(frozen=True)
class Cost:
    """Of one step, on one device.

    Attributes:
        flops: XLA's count of floating point operations.
        product_flops: Of matrix products and convolutions.
        mxu_flops: The same, a float32 product counted as often as it passes the matrix unit.
        float32_share: Of ``product_flops``, that on float32 operands.
        bytes_accessed: XLA's count, on-chip memory included.
        hbm_bytes: Read and written in HBM.
        collectives: By kind.
        idle: Share of libtpu's estimated cycles that has no product, by module, largest first.
    """

    flops: float
    product_flops: float
    mxu_flops: float
    float32_share: float
    bytes_accessed: float
    hbm_bytes: float
    collectives: tuple[Collective, ...]
    idle: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Roofline:
    """The least time of a step, seconds, by what limits it; they overlap at best."""

    compute: float
    memory: float
    communication: float

    @property
    def step(self) -> float:
        return max(self.compute, self.memory, self.communication)

    @property
    def bound(self) -> str:
        """Name of the largest part."""
        parts = {
            "compute": self.compute,
            "memory": self.memory,
            "communication": self.communication,
        }
        return max(parts, key=lambda name: parts[name])


def roofline(cost: Cost, chip: Chip) -> Roofline:
    """Time at the chip's peaks. ``chip`` is the share of one device."""
    moved = sum(c.moved for c in cost.collectives)
    return Roofline(cost.mxu_flops / chip.flops, cost.hbm_bytes / chip.bandwidth, moved / chip.ici)


def analyse(module: Module, xla: Mapping[str, float]) -> Cost:
    """The cost of a program.

    Args:
        module: Its HLO.
        xla: Figures of XLA's cost analysis.
    """
    products = list(_products(module))
    looped = sum(flops * times for flops, times, _, _ in products)
    once = sum(flops for flops, _, _, _ in products)
    traffic = [(*_traffic(module, i), times) for i, times in module.running()]
    bytes_looped = sum(all_ * times for all_, _, times in traffic)
    bytes_once = sum(all_ for all_, _, _ in traffic)
    wide = sum(flops * times for flops, times, is_float32, _ in products if is_float32)
    return Cost(
        flops=xla.get("flops", 0.0) * (looped / once if once else 1.0),
        product_flops=looped,
        mxu_flops=sum(flops * times * passes for flops, times, _, passes in products),
        float32_share=wide / looped if looped else 0.0,
        bytes_accessed=xla.get("bytes accessed", 0.0)
        * (bytes_looped / bytes_once if bytes_once else 1.0),
        hbm_bytes=sum(hbm * times for _, hbm, times in traffic),
        collectives=tuple(_collectives(module)),
        idle=tuple(_idle(module)),
    )


# --- products


def _products(module: Module) -> Iterator[tuple[float, int, bool, int]]:
    """Of each product: operations, how often it runs, if of float32, passes."""
    for name, times in _with_fusions(module).items():
        table = {i.name: i for i in module.computations.get(name, ())}
        for instruction in table.values():
            if (kernel := _kernel(instruction)) is not None:
                flops, passes = kernel
                read = table[instruction.operands[0]].shapes if instruction.operands else ()
                yield flops, times, any(s.dtype == "f32" for s in read), passes
            if instruction.opcode not in ("convolution", "dot"):
                continue
            operands = [table[o].shapes[0] for o in instruction.operands if o in table]
            if len(operands) < 2:
                continue
            count = _dot if instruction.opcode == "dot" else _convolution
            is_float32 = operands[0].dtype == operands[1].dtype == "f32"
            precision = re.search(r"operand_precision=\{(\w+)", instruction.rest)
            passes = _PASSES.get(precision[1], 1) if precision and is_float32 else 1
            yield count(instruction, operands[0], operands[1]), times, is_float32, passes


def _kernel(instruction: Instruction) -> tuple[float, int] | None:
    """Operations of a kernel's products and their passes, where it tells them."""
    if instruction.opcode != "custom-call" or _KERNEL not in instruction.rest:
        return None  # such as the promise that a gather's indices are in range
    found = KernelCost.find(instruction.rest)
    return (float(found.products), found.passes) if found else None


def _with_fusions(module: Module) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int, module.counts)

    def visit(name: str, times: int) -> None:
        for instruction in module.computations.get(name, ()):
            callee = instruction.computation("calls")
            if instruction.opcode == "fusion" and callee:
                counts[callee] += times
                visit(callee, times)

    for name, times in module.counts.items():
        visit(name, times)
    return counts


def _dot(instruction: Instruction, left: Shape, right: Shape) -> float:
    found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
    dims = [int(d) for d in found[1].split(",") if d] if found else []
    return 2.0 * instruction.shapes[0].elements * math.prod(left.dims[d] for d in dims)


def _convolution(instruction: Instruction, left: Shape, right: Shape) -> float:
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.rest)
    if labels is None:
        return 0.0
    out = instruction.shapes[0]
    window = _window(instruction.rest)
    positions = 1.0
    for place, label in enumerate(sorted(c for c in labels[3] if c.isdigit())):
        options = {k: v[place] for k, v in window.items() if place < len(v)}
        positions *= _valid(
            left.dims[labels[1].index(label)],
            right.dims[labels[2].index(label)],
            out.dims[labels[3].index(label)],
            options,
        )
    features = out.dims[labels[3].index("b")] * out.dims[labels[3].index("f")]
    groups = re.search(r"batch_group_count=(\d+)", instruction.rest)
    share = int(groups[1]) if groups else 1
    return 2.0 * features * right.dims[labels[2].index("i")] * positions / share


def _window(rest: str) -> dict[str, list[str]]:
    found = re.search(r"window=\{([^}]*)\}", rest)
    pairs = (part.split("=") for part in found[1].split()) if found else ()
    return {key: value.split("x") for key, value in pairs}


def _valid(size: int, kernel: int, out: int, options: Mapping[str, str]) -> float:
    """Pairs of output and kernel positions that meet an element rather than padding."""
    stride, dilation = int(options.get("stride", 1)), int(options.get("rhs_dilate", 1))
    base, low = int(options.get("lhs_dilate", 1)), int(options.get("pad", "0_0").split("_")[0])
    starts = np.arange(out, dtype=np.int64) * stride - low
    at = starts[:, None] + np.arange(kernel, dtype=np.int64)[None, :] * dilation
    inside = (at >= 0) & (at < (size - 1) * base + 1) & (at % base == 0)
    return float(inside.sum())


# --- bytes


def _traffic(module: Module, instruction: Instruction) -> tuple[float, float]:
    """Bytes that an instruction reads and writes: all, and those in HBM."""
    if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
        return 0.0, 0.0
    table = module.tables[module.home[instruction.name]]
    operands = [table[o].shapes for o in instruction.operands if o in table]
    if instruction.opcode == "slice-start":
        source, part = instruction.shapes[:2]
        return _both([_in_space(part, source.space), part])
    if instruction.opcode.endswith("-start"):
        # The result repeats the operand.
        return _both([s for s in instruction.shapes if s.dtype != "u32" or s.dims])
    read = [shape for shapes in operands for shape in shapes]
    written = list(instruction.shapes)
    callee = instruction.computation("calls") if instruction.opcode == "fusion" else None
    if callee:
        read, written = _fused(module, callee, operands, written)
    elif instruction.opcode in ("dynamic-slice", "slice", "gather"):
        read = written
    elif instruction.opcode == "dynamic-update-slice":
        read = written = [s for shapes in operands[1:2] for s in shapes]
    return _both([*read, *written])


def _fused(
    module: Module, callee: str, operands: list[tuple[Shape, ...]], written: list[Shape]
) -> tuple[list[Shape], list[Shape]]:
    """Bytes that a fusion reads and writes where it takes or replaces only a slice of an array."""
    table = module.tables[callee]
    read: list[Shape] = []
    for instruction in table.values():
        if instruction.opcode == "parameter":
            place = int(instruction.rest.split(")")[0])
            shapes = operands[place] if place < len(operands) else ()
            parts = _parts_read(module, callee, instruction.name)
            if parts is None:
                read += shapes
            else:
                read += [_in_space(part, shapes[0].space if shapes else 0) for part in parts]
    root = next((i for i in table.values() if i.is_root), None)
    if root is not None and root.opcode == "dynamic-update-slice" and len(root.operands) > 1:
        update = table.get(root.operands[1])
        if update is not None and written:
            written = [_in_space(update.shapes[0], written[0].space)]
    return read, written


def _parts_read(module: Module, callee: str, name: str) -> list[Shape] | None:
    """Slices of a value that a fused computation reads, None where it reads the whole."""
    parts: list[Shape] = []
    for user in module.users(callee).get(name, ()):
        inner: list[Shape] | None
        if user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
            inner = [user.shapes[0]]
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
            inner = []  # written in place
        elif user.opcode == "bitcast":
            inner = _parts_read(module, callee, user.name)
        elif user.opcode == "fusion" and (nested := user.computation("calls")):
            place = user.operands.index(name)
            names = (
                i.name
                for i in module.computations.get(nested, ())
                if i.opcode == "parameter" and int(i.rest.split(")")[0]) == place
            )
            inner = _parts_read(module, nested, next(names, ""))
        else:
            inner = None
        if inner is None:
            return None
        parts += inner
    # A value that nothing uses is the result itself.
    return parts if module.users(callee).get(name) else None


def _in_space(shape: Shape, space: int) -> Shape:
    return Shape(shape.dtype, shape.dims, shape.minor_to_major, shape.tile, space)


def _both(shapes: list[Shape]) -> tuple[float, float]:
    return (
        float(sum(s.bytes for s in shapes)),
        float(sum(s.padded_bytes for s in shapes if s.space == 0)),
    )


# --- collectives


def _collectives(module: Module) -> Iterator[Collective]:
    found: dict[tuple[str, int], list[tuple[int, float, str]]] = defaultdict(list)
    counts: dict[tuple[str, int], int] = defaultdict(int)
    chains: set[tuple[str, ...]] = set()
    for name, times in _with_fusions(module).items():
        for instruction in module.computations.get(name, ()):
            kind = instruction.opcode.removesuffix("-start")
            if kind not in _COLLECTIVES:
                continue
            if chain := _CHAIN.search(instruction.rest):
                # One that runs beside others is in each fusion of its chain: start, step and end.
                if chain.groups() in chains:
                    continue
                chains.add(chain.groups())
            shapes = list(instruction.shapes)
            if instruction.opcode == "all-gather-start" or kind == "collective-permute":
                shapes = shapes[len(shapes) // 2 :] if len(shapes) > 1 else shapes
                shapes = [s for s in shapes if s.dtype != "u32" or s.dims] or shapes
            size = sum(s.bytes for s in shapes)
            group = _group(instruction.rest)
            if kind == "all-reduce" and _is_scattered(module, name):
                kind, size = "reduce-scatter", size // max(group, 1)
            counts[kind, group] += times
            found[kind, group].append(
                (size * times, _moved(kind, size, group) * times, instruction.module)
            )
    for (kind, group), entries in sorted(found.items(), key=lambda x: -sum(e[0] for e in x[1])):
        by_module: dict[str, float] = defaultdict(float)
        for size, _, where in entries:
            by_module[where] += size
        yield Collective(
            kind,
            group,
            counts[kind, group],
            sum(e[0] for e in entries),
            sum(e[1] for e in entries),
            max(by_module, key=lambda m: by_module[m]),
        )


def _is_scattered(module: Module, name: str) -> bool:
    """Return whether a computation is libtpu's fusion of an all-reduce with the slice taken of
    it.
    """
    return name.startswith("all-reduce-scatter") or (
        name not in module.counts
        and any(i.opcode == "dynamic-slice" for i in module.computations[name])
    )


def _group(rest: str) -> int:
    """Number of devices in each group of a collective."""
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        return math.prod(int(sizes[a]) for a in re.findall(r"'(\w+)'", found[2]) if a in sizes)
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=", rest):
        return int(found[1].split(",")[-1])
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return len(found[1].split(","))
    return 2 if "source_target_pairs" in rest else 1


def _moved(kind: str, size: int, group: int) -> float:
    """Bytes that each device sends in a ring; ``size`` is that of the result on one device."""
    others = (group - 1) / group if group else 0.0
    if kind == "all-reduce":
        return 2 * size * others
    if kind == "reduce-scatter":
        return size * (group - 1)
    return size if kind == "collective-permute" else size * others


# --- cycles


def _idle(module: Module) -> Iterator[tuple[str, float]]:
    cycles: dict[str, float] = defaultdict(float)
    total = 0.0
    for instruction, times in module.running():
        found = re.search(r'"estimated_cycles":"(\d+)"', instruction.rest)
        if found is None:
            continue
        total += int(found[1]) * times
        callee = instruction.computation("calls")
        inside = module.computations.get(callee, []) if callee else [instruction]
        if not any(i.opcode in ("convolution", "dot") or _kernel(i) for i in inside):
            cycles[instruction.module or instruction.opcode] += int(found[1]) * times
    for name in sorted(cycles, key=lambda n: -cycles[n])[:8]:
        yield name, cycles[name] / total
