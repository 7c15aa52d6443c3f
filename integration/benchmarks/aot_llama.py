"""The collectives of a Llama's training step over pods, against those intended.

Layers of 4,096 as in Llama 3 8B, under FSDP2, and under tensor parallelism within FSDP2 as
torchtitan applies them (`parallelize_module`, then `fully_shard` over the other axis of the mesh),
for 128 to 512 devices. Layers are compiled as one loop and keep their inputs alone. The model is on
``meta``; no TPU is needed, and no process group runs.

    python integration/benchmarks/aot_llama.py --only fsdp2 --topology v5e:16x16 --layers 8,32
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from aot import usage
from aot_distributed import TOPOLOGIES, found_in, show

PROGRAMS = ("fsdp2", "fsdp2+tp")
_DIM, _VOCAB, _LENGTH = 4096, 32000, 2048
_ROWS = 1  # sequences a data-parallel device


def model_of(layers: int) -> Any:
    """The model, on ``meta``, in bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=_VOCAB,
        hidden_size=_DIM,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=_LENGTH,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16).train()


def tensor_parallel(model: Any, mesh: Any) -> None:
    """Megatron's plan for each layer."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {f"self_attn.{name}_proj": columns for name in "qkv"}
    plan |= {"mlp.gate_proj": columns, "mlp.up_proj": columns}
    plan |= {"self_attn.o_proj": rows, "mlp.down_proj": rows}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)


def planned(program: str, topology: str, layers: int, model_axis: int) -> dict[str, Any]:
    """The plan's collectives, and those intended; see `aot_distributed.planned`."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import tpu_compile
    from tpu_compile.aot.chips import parse_topology

    devices = parse_topology(topology).devices
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
    tensor = model_axis if program == "fsdp2+tp" else 1
    data = devices // tensor
    axes = {"data": data, "model": tensor} if tensor > 1 else {"data": data}
    mesh = init_device_mesh("tpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    model = model_of(layers)
    if tensor > 1:
        tensor_parallel(model, mesh["model"])
    wanted = intended(model, layers, data, tensor)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    ids = torch.empty(_ROWS * data, _LENGTH, dtype=torch.int64)
    plan = tpu_compile.aot(
        model,
        {"input_ids": ids, "labels": ids},
        topology=topology,
        optimizer=torch.optim.AdamW(model.parameters()),
        remat=True,
    )
    result = {
        "mesh": dict(plan.mesh),
        "fits": plan.fits,
        "HBM GiB a device": plan.memory.total / 2**30,
        "intended": wanted,
        "collectives": found_in(plan, axes),
        "notes": list(plan.notes),
        "stages": dict(plan.seconds),
    }
    dist.destroy_process_group()
    return result


def intended(model: Any, layers: int, data: int, tensor: int) -> list[dict[str, Any]]:
    """Kind, axis, bytes. ``model`` is not yet divided by `fully_shard`."""
    from torch.distributed.tensor import DTensor, Shard

    parameters = in_layers = 0
    for name, p in model.named_parameters():
        divided = isinstance(p, DTensor) and isinstance(p.placements[0], Shard)
        size = p.numel() * p.element_size() // (tensor if divided else 1)
        parameters += size
        in_layers += size if ".layers." in name else 0
    each = layers * _ROWS * _LENGTH * _DIM * 2
    # Layers that keep their inputs alone are gathered again for the backward pass.
    wanted = [("all-gather", "data", parameters + in_layers)]
    wanted.append(("reduce-scatter", "data", parameters // data))
    if tensor > 1:
        # Two in the forward pass, which is run again but for the last; backward one each of what
        # the five layers divided by columns take.
        wanted.append(("all-reduce", "model", (2 + 1 + 5) * each))
    return [{"kind": kind, "axis": axis, "bytes": size} for kind, axis, size in wanted]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PROGRAMS), help=f"of {', '.join(PROGRAMS)}")
    parser.add_argument("--topology", default=",".join(TOPOLOGIES), help="with commas")
    parser.add_argument("--layers", default="8", help="numbers of layers, with commas")
    parser.add_argument("--model-axis", type=int, default=8, help="devices of tensor parallelism")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        program, topology, layers = chosen.one
        began = time.perf_counter()
        result = planned(program, topology, int(layers), chosen.model_axis)
        print(json.dumps({**result, "seconds": time.perf_counter() - began, **usage()}))
        return
    results = {}
    for topology in chosen.topology.split(","):
        for program in chosen.only.split(","):
            for layers in chosen.layers.split(","):
                # Each in a process of its own: it has a process group of another size.
                command = [sys.executable, __file__, "--one", program, topology, layers]
                command += ["--model-axis", str(chosen.model_axis)]
                run = subprocess.run(command, text=True, stdout=subprocess.PIPE, check=True)
                result = json.loads(run.stdout.splitlines()[-1])
                results[f"{program} {topology}, {layers} layers"] = result
                print(
                    f"{program} {topology} {layers}: {result['HBM GiB a device']:.1f} GiB of HBM, "
                    f"{result['seconds']:.0f} s, {result['host GB']:.1f} GB of the host"
                )
    show(results)
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
