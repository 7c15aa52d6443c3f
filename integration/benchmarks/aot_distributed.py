"""The collectives in training steps that PyTorch's parallelisms divide, against those intended.

A GPT under DDP, FSDP2, FSDP2 over a quarter of the chips (HSDP), tensor parallelism with and
without sequence parallelism, and FSDP2 with tensor parallelism, each applied by PyTorch's own
functions to a model on ``meta``, for 64 to 512 chips. What FSDP2 gathers for the forward pass is
kept for the backward pass (``reshard_after_forward=False``). No TPU is needed, and no process
group runs.

    python integration/benchmarks/aot_distributed.py --only fsdp2,tp --topology v5e:16x16

Bytes are those of the results on one device in a step. What is intended follows from the sizes of
parameters and activations.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # models
TOPOLOGIES = ("v5e:16x16", "v5p:8x8x8", "tpu7x:4x4x4")
PROGRAMS = ("ddp", "fsdp2", "hsdp", "tp", "sp", "fsdp2+tp")
_ROWS = 2  # sequences a data-parallel device


@dataclass(frozen=True)
class Size:
    """The model's."""

    layers: int = 1
    dim: int = 1024
    heads: int = 8
    vocab: int = 1024
    length: int = 128


def tensor_parallel(model: Any, mesh: Any, sequence: bool) -> None:
    """Apply Megatron's plan to each block; with ``sequence``, norms work on parts of sequences."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan: dict[str, Any] = {f"attention.{name}": columns for name in "qkv"}
    plan |= {"attention.proj": rows, "up": columns, "down": rows}
    if sequence:
        part, whole = Shard(1), Replicate()
        scattered = RowwiseParallel(output_layouts=part)
        plan |= {
            **{"norm1": SequenceParallel(), "norm2": SequenceParallel()},
            "attention": PrepareModuleInput(  # beside its input a cache and a position
                input_layouts=(part, None, None), desired_input_layouts=(whole, None, None)
            ),
            **{"attention.proj": scattered, "down": scattered},
            "up": ColwiseParallel(input_layouts=part),
        }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    if sequence:
        last = PrepareModuleInput(input_layouts=part, desired_input_layouts=whole)
        parallelize_module(model, mesh, {"norm": last})


def model_of(size: Size) -> Any:
    """The GPT, its queries, keys and values of three layers that can be divided by heads."""
    import torch
    import torch.nn as nn
    import torch.nn.functional as F

    from models.gpt import GPT

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.proj = (nn.Linear(size.dim, size.dim) for _ in range(4))

        def forward(self, x: torch.Tensor, cache: Any = None, position: int = 0) -> torch.Tensor:
            each = size.dim // size.heads
            q, k, v = (
                f(x).unflatten(2, (-1, each)).transpose(1, 2) for f in (self.q, self.k, self.v)
            )
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            projected: torch.Tensor = self.proj(y.transpose(1, 2).flatten(2))
            return projected

    with torch.device("meta"):
        model = GPT(size.vocab, size.length, size.layers, size.dim, size.heads)
        for block in model.blocks:
            block.register_module("attention", Attention())  # in place of what is there
    return model.to(torch.bfloat16)


def planned(program: str, topology: str, size: Size, model_axis: int) -> dict[str, Any]:
    """The plan's collectives, and those intended.

    Args:
        program: One of `PROGRAMS`.
        topology: For what.
        size: Of the model.
        model_axis: Devices that tensor parallelism divides a layer over.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import tpu_compile
    from tpu_compile.aot.chips import parse_topology

    devices = parse_topology(topology).devices
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
    tensor = model_axis if program in ("tp", "sp", "fsdp2+tp") else 1
    data = devices // tensor
    axes = {"data": data, "model": tensor} if tensor > 1 else {"data": data}
    if program == "hsdp":
        axes = {"replicate": 4, "shard": data // 4}
    mesh = init_device_mesh("tpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    model = model_of(size)
    ids = torch.empty(_ROWS * data, size.length, dtype=torch.int64)
    if tensor > 1:
        tensor_parallel(model, mesh["model"], program == "sp")
    if "fsdp" in program or program == "hsdp":
        over = mesh if program == "hsdp" else mesh["data"]
        for block in model.blocks:
            fully_shard(block, mesh=over, reshard_after_forward=False)
        fully_shard(model, mesh=over, reshard_after_forward=False)
    plan = tpu_compile.aot(
        model,
        (ids, ids),
        topology=topology,
        mesh={"data": data} if program == "ddp" else None,
        loss="loss",
        optimizer=torch.optim.AdamW(model.parameters()),
        scan=False,
    )
    result = {
        "mesh": dict(plan.mesh),
        "fits": plan.fits,
        "intended": intended(program, model, size, data, tensor),
        "collectives": found_in(plan, axes),
        "communication seconds": plan.roofline.communication if plan.roofline else None,
    }
    dist.destroy_process_group()
    return result


def found_in(plan: Any, axes: dict[str, int]) -> list[dict[str, Any]]:
    """A plan's collectives: kind, axis, count, bytes."""
    assert plan.cost is not None
    groups = {plan.devices: "all", **{size: name for name, size in axes.items()}}
    return [
        {
            "kind": c.kind,
            "axis": groups.get(c.group, str(c.group)),
            "count": c.count,
            "bytes": c.bytes,
        }
        for c in plan.cost.collectives
        if c.group > 1
    ]


def intended(program: str, model: Any, size: Size, data: int, tensor: int) -> list[dict[str, Any]]:
    """Collectives as the parallelisms' papers have them: kind, axis, bytes."""
    from torch.distributed.tensor import DTensor, Replicate

    def local(p: Any) -> int:
        """Bytes on a device, not counting the division by `fully_shard`."""
        divided = isinstance(p, DTensor) and "model" in (p.device_mesh.mesh_dim_names or ())
        whole = not divided or isinstance(p.placements[-1], Replicate)
        return p.numel() * p.element_size() // (1 if whole else tensor)

    parameters = sum(map(local, model.parameters()))
    activation = _ROWS * size.length * size.dim * 2
    wanted: list[tuple[str, str, int]] = []
    if program == "hsdp":
        part = parameters // (data // 4)
        wanted += [("all-gather", "shard", parameters), ("reduce-scatter", "shard", part)]
        wanted.append(("all-reduce", "replicate", part))
    elif program.startswith("fsdp2"):
        wanted += [
            ("all-gather", "data", parameters),
            ("reduce-scatter", "data", parameters // data),
        ]
    else:
        wanted.append(("all-reduce", "data", parameters))
    each = size.layers * activation
    if program in ("tp", "fsdp2+tp"):
        # Forward two; backward one of the MLP and, by PyTorch's hooks, one each of q, k and v.
        wanted.append(("all-reduce", "model", (2 + 1 + 3) * each))
    elif program == "sp":
        # The residual stream is gathered once more behind the last block, forward and backward.
        wanted.append(("all-gather", "model", 4 * each + 2 * activation))
        wanted.append(("reduce-scatter", "model", (2 + 1 + 3) * each // tensor))
    return [{"kind": kind, "axis": axis, "bytes": size} for kind, axis, size in wanted]


def compared(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each collective intended or found: bytes, and one over the other."""
    rows = {(i["kind"], i["axis"]): {**i, "intended": i["bytes"]} for i in result["intended"]}
    for row in rows.values():
        row.update(bytes=0, count=0)
    for found in result["collectives"]:
        row = rows.setdefault(
            (found["kind"], found["axis"]), {**found, "intended": 0, "bytes": 0, "count": 0}
        )
        row["bytes"] += found["bytes"]
        row["count"] += found["count"]
    for row in rows.values():
        row["ratio"] = row["bytes"] / row["intended"] if row["intended"] else None
    return list(rows.values())


def show(results: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("step", "collective", "axis", "count", "MB", "intended MB", "ratio")
    for name, result in results.items():
        for row in compared(result):
            ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
            shown = f"{row['bytes'] / 1e6:.3f}", f"{row['intended'] / 1e6:.3f}"
            table.add_row(name, row["kind"], row["axis"], str(row["count"]), *shown, ratio)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PROGRAMS), help=f"of {', '.join(PROGRAMS)}")
    parser.add_argument("--topology", default=",".join(TOPOLOGIES), help="with commas")
    parser.add_argument("--model-axis", type=int, default=8, help="devices of tensor parallelism")
    parser.add_argument(
        "--dim", type=int, default=Size.dim, help="of the model, and its vocabulary"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        began = time.process_time()
        size = Size(dim=chosen.dim, vocab=chosen.dim)
        result = planned(*chosen.one, size, chosen.model_axis)
        print(json.dumps({**result, "cpu seconds of tracing": time.process_time() - began}))
        return
    results = {}
    for topology in chosen.topology.split(","):
        for program in chosen.only.split(","):
            # Each in a process of its own: it has a process group of another size.
            command = [sys.executable, __file__, "--one", program, topology]
            command += ["--model-axis", str(chosen.model_axis), "--dim", str(chosen.dim)]
            run = subprocess.run(command, text=True, stdout=subprocess.PIPE, check=True)
            results[f"{program} {topology}"] = json.loads(run.stdout.splitlines()[-1])
    show(results)
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
