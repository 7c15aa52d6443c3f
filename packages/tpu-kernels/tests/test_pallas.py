"""Pallas kernels as ops: by the interpreter here, by Mosaic for TPU topologies."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import tpu_compile
import tpu_kernels
from tpu_kernels import interpret, jax_op, pallas_call


def scaled_add(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...] + 2.0 * y_ref[...]


@jax_op("test_pallas::scaled_add", backward=lambda grad, x, y: (grad, 2 * grad))
def op(x: jax.Array, y: jax.Array) -> jax.Array:
    block = pl.BlockSpec((8, 128), lambda i: (i, 0))
    return pallas_call(
        scaled_add,
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // 8,),
        in_specs=[block, block],
        out_specs=block,
    )(x, y)


def test_a_kernel_by_the_interpreter() -> None:
    assert interpret()
    x, y = torch.randn(16, 128), torch.randn(16, 128)
    device_x, device_y = (t.to("tpu").requires_grad_() for t in (x, y))
    out = op(device_x, device_y)
    torch.testing.assert_close(out.detach().cpu(), x + 2 * y)
    out.sum().backward()
    assert device_y.grad is not None and set(device_y.grad.unique().tolist()) == {2.0}
    compiled = torch.compile(lambda x, y: op(x, y) * 2, fullgraph=True)
    torch.testing.assert_close(compiled(device_x, device_y).detach().cpu(), 2 * (x + 2 * y))


COMPILE = """
import jax, jax.numpy as jnp
from jax.experimental import topologies
from test_pallas import op

device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
there = jax.sharding.SingleDeviceSharding(device)
aval = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=there)
traced = jax.jit(op.as_jax(aval, aval)).trace(aval, aval)
print("tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).compile().as_text())
"""


def test_a_kernel_compiles_for_a_tpu() -> None:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    result = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["True"]


def test_names_of_other_programs() -> None:
    pallas = torch.tpu.pallas
    x = torch.ones(2, device="tpu")
    doubled = pallas.custom_jax_kernel(
        lambda x, n: x * n, "doubled", static_argnums=1, donate_argnums=(0,)
    )
    assert doubled(x, 3).tolist() == [3, 3]
    named = pallas.jax_op("test_pallas::named", lambda x: x + 1, donate_argnums=0)
    assert named(x).tolist() == [2, 2]
    with pytest.raises(NotImplementedError, match="a process drives one device"):
        pallas.jax_op("test_pallas::meshed", lambda x: x, mesh=object())


def test_torch_does_not_import_the_package() -> None:
    code = "import sys, torch; torch.tpu; print('tpu_kernels' in sys.modules, 'jax' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split() == ["False", "False"], result.stderr
    assert tpu_kernels.__version__


def doubled(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...] * 2


def sorted_rows(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = jnp.sort(x_ref[...], -1)


def turned(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...].reshape(512, 16).T.reshape(16, 512)


@pytest.mark.parametrize(
    "kernel, block, shape, text",
    [
        (doubled, (16, 100), (64, 512), r"block shape[\s\S]*multiples of 8 and 128"),
        (doubled, (2048, 4096), (8192, 4096), r"VMEM[\s\S]*limit: 16.00M[\s\S]*blocks smaller"),
        (sorted_rows, (16, 512), (64, 512), r"Unimplemented primitive in .*: sort\."),
        (turned, (16, 512), (64, 512), r"unsupported shape cast\n  at .*test_pallas\.py:\d+"),
    ],
)
def test_rules_of_mosaic_that_a_kernel_breaks(
    kernel: Callable[..., None], block: tuple[int, int], shape: tuple[int, int], text: str
) -> None:
    def f(x: jax.Array) -> jax.Array:
        spec = pl.BlockSpec(block, lambda i: (i, 0))
        grid = (shape[0] // block[0],)
        return pallas_call(kernel, x, grid=grid, in_specs=[spec], out_specs=spec)(x)

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return broken(x)

    broken = jax_op(f"test_pallas::{kernel.__name__}_{block[1]}", f)
    with pytest.raises(tpu_kernels.KernelCompilationError, match=text):
        tpu_compile.aot(Model(), (torch.empty(shape, device="meta"),), topology="v5e:1x1")


def test_a_kernel_that_asks_for_the_chip() -> None:
    """It is told the one that is compiled for, at shapes that it has seen for another chip, too."""
    asked = []

    def piped(x_ref: Any, out_ref: Any) -> None:
        asked.append(str(pltpu.get_tpu_info().chip_version))
        block = pl.BlockSpec((8, 128), lambda i: (i, 0))
        pltpu.emit_pipeline(doubled, grid=(8,), in_specs=[block], out_specs=[block])(x_ref, out_ref)

    def f(x: jax.Array) -> jax.Array:
        anywhere = pl.BlockSpec(memory_space=pl.ANY)
        return pallas_call(piped, x, in_specs=[anywhere], out_specs=anywhere)(x)

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return op(x)

    op = jax_op("test_pallas::piped", f, differentiable=False)
    for chip in ("v5e", "v6e"):
        asked.clear()
        x = torch.empty(64, 128, device="meta")
        plan = tpu_compile.aot(Model(), (x,), topology=f"{chip}:1x1")
        assert set(asked) == {chip} and 'custom_call_target="tpu_custom_call"' in plan.hlo
