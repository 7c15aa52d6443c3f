"""Ahead-of-time compilation for TPUs: three programs, what they cost and how long they take.

``gpt``: the GPT step for v5e against the same in JAX: operations and bytes, by XLA's own count.
``pod``: a sharded step for the 8,192 devices of tpu7x:16x16x16.
``llama``: the training step of a Llama of 70 billion parameters for 1,024 v5p chips, from ``meta``.

    python integration/benchmarks/aot.py --only gpt --json out.json

Times are CPU seconds of this process and libtpu's, which hold on a busy machine, and wall seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # models
# Of a target: what is compared, the bound.
TARGETS = {
    "gpt": {"flops against JAX": 1.02, "bytes against JAX": 1.02},
    "pod": {"seconds": 60},
    "llama": {"seconds": 600, "host GB": 8},
}
_BATCH, _TOKENS = 8, 256


def usage() -> dict[str, float]:
    """CPU seconds, and the most memory of this process and of one child, GB."""
    own, children = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return {
        "cpu seconds": sum(u.ru_utime + u.ru_stime for u in (own, children)),
        "host GB": (own.ru_maxrss + children.ru_maxrss) / 1e6,
    }


def described(plan: Any) -> dict[str, Any]:
    memory, cost = plan.memory, plan.cost
    return {
        "topology": plan.topology,
        "HBM GiB a device": memory.total / 2**30,
        "fits": plan.fits,
        "flops": cost.flops if cost else None,
        "bytes": cost.bytes_accessed if cost else None,
        "least step seconds": plan.roofline.step if plan.roofline else None,
        "MFU bound": plan.mfu,
        "stages": dict(plan.seconds),
    }


def gpt() -> dict[str, Any]:
    import torch

    import tpu_compile
    from models.gpt import GPT

    with torch.device("meta"):
        model = GPT(**jobs.GPT)
        ids = torch.empty(_BATCH, _TOKENS, dtype=torch.int64)

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=jobs.ADAMW_RATE, weight_decay=jobs.WEIGHT_DECAY)

    plan = tpu_compile.aot(
        model,
        (ids, ids),
        topology="v5e:2x2",
        batch=None,
        loss="loss",
        optimizer=adamw,
        scan=False,
    )
    shapes = {name: list(p.shape) for name, p in model.named_parameters()}
    twin = subprocess.run(
        [sys.executable, __file__, "--twin"],
        input=json.dumps(shapes),
        text=True,
        stdout=subprocess.PIPE,
        check=True,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_SKIP_MDS_QUERY": "1",
        },
    )
    jax_cost = json.loads(twin.stdout.splitlines()[-1])
    made = described(plan)
    return {
        **made,
        "JAX's flops": jax_cost["flops"],
        "JAX's bytes": jax_cost["bytes accessed"],
        "flops against JAX": made["flops"] / jax_cost["flops"],
        "bytes against JAX": made["bytes"] / jax_cost["bytes accessed"],
    }


def twin() -> None:
    """Print the cost of the GPT step in JAX; parameters' shapes come on the input."""
    import functools

    import jax
    import jax.numpy as jnp
    import jax_models
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
    from jax_optimizers import adam

    shapes = json.load(sys.stdin)
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def like(shape: Any, dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=everywhere)

    forward = functools.partial(jax_models.gpt, layers=jobs.GPT["layers"], heads=jobs.GPT["heads"])
    optimizer = adam(jobs.WEIGHT_DECAY)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(p: Any, state: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: jax_models.cross_entropy(forward(p, x)[0], y))(
            p
        )
        p, state = optimizer.update(p, grads, state, jobs.ADAMW_RATE)
        return value, p, state

    p = {name: like(shape, jnp.float32) for name, shape in shapes.items()}
    state = (like((), jnp.float32), dict(p), dict(p))
    ids = like((_BATCH, _TOKENS), jnp.int32)
    # PyTorch's default; JAX's own would round float32 operands to bfloat16.
    with jax.default_matmul_precision("highest"):
        cost = step.lower(p, state, ids, ids).compile().cost_analysis()
    print(json.dumps({k: cost[k] for k in ("flops", "bytes accessed")}))


def pod() -> dict[str, Any]:
    import torch

    import tpu_compile
    from models.gpt import GPT

    with torch.device("meta"):
        model = GPT(vocab=8192, length=_TOKENS, layers=8, dim=1024, heads=16).to(torch.bfloat16)
        ids = torch.empty(1024, _TOKENS, dtype=torch.int64)
    rules = {"*.up.weight": ("model", None), "*.down.weight": (None, "model")}
    plan = tpu_compile.aot(
        model,
        (ids, ids),
        topology="tpu7x:16x16x16",
        mesh={"data": 512, "model": 16},
        shardings=tpu_compile.aot.fsdp("data", rules),
        loss="loss",
        optimizer=torch.optim.AdamW,
    )
    return described(plan)


def llama() -> dict[str, Any]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import tpu_compile

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
        ids = torch.empty(128, 8192, dtype=torch.int64)
    columns, rows = ("model", None), (None, "model")
    rules = {
        "*.[qkv]_proj.weight": columns,
        "*.gate_proj.weight": columns,
        "*.up_proj.weight": columns,
        "*.o_proj.weight": rows,
        "*.down_proj.weight": rows,
        "*embed_tokens.weight": columns,
        "lm_head.weight": columns,
    }
    plan = tpu_compile.aot(
        model,
        {"input_ids": ids, "labels": ids},
        topology="v5p:8x8x16",
        mesh={"data": 128, "model": 8},
        shardings=tpu_compile.aot.fsdp("data", rules),
        optimizer=torch.optim.AdamW,
        remat=True,
    )
    parameters = sum(p.numel() for p in model.parameters())
    return {"parameters": parameters, **described(plan)}


RUNS: dict[str, Callable[[], dict[str, Any]]] = {"gpt": gpt, "pod": pod, "llama": llama}


def show(results: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("program", "what", "value", "target")
    for name, result in results.items():
        for key, value in result.items():
            bound = TARGETS[name].get(key)
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            table.add_row(name, key, shown, f"<= {bound}" if bound else "")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(RUNS), help=f"programs, of {', '.join(RUNS)}")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--twin", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.twin:
        twin()
        return
    if chosen.one:
        began = time.perf_counter()
        result = RUNS[chosen.one]()
        print(json.dumps({**result, "seconds": time.perf_counter() - began, **usage()}))
        return
    results = {}
    for name in chosen.only.split(","):
        # Each in a process of its own, so that memory and CPU time are its own.
        run = subprocess.run(
            [sys.executable, __file__, "--one", name], text=True, stdout=subprocess.PIPE, check=True
        )
        results[name] = json.loads(run.stdout.splitlines()[-1])
    show(results)
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
