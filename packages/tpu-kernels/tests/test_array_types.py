"""Shapes and dtypes in signatures: checked in these tests, at no cost elsewhere."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped

import tpu_kernels
from array_type_checks import OPS
from tpu_kernels.ops.int4_mm import pallas
from tpu_kernels.ops.paged_attention.reference import paged_attention

PAGED = {
    "query": jax.ShapeDtypeStruct((2, 4, 8), np.float32),
    "key_pages": jax.ShapeDtypeStruct((2, 6, 4, 8), np.float32),
    "value_pages": jax.ShapeDtypeStruct((2, 6, 4, 8), np.float32),
    "lengths": jax.ShapeDtypeStruct((2,), np.int32),
    "page_indices": jax.ShapeDtypeStruct((2, 3), np.int32),
}


def traced(**changed: jax.ShapeDtypeStruct) -> Any:
    def call(arrays: dict[str, jax.Array]) -> jax.Array:
        return paged_attention(**arrays, scale=1.0, softcap=0.0)

    return jax.eval_shape(call, PAGED | changed)


def test_arguments_that_agree() -> None:
    assert traced().shape == (2, 4, 8)


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "found"),
    [
        ("query", (1, 2, 4, 8), np.float32, "query"),
        ("query", (2, 4, 16), np.float32, "key_pages"),
        ("value_pages", (2, 6, 8, 8), np.float32, "value_pages"),
        ("lengths", (3,), np.int32, "lengths"),
        ("lengths", (2,), np.float32, "lengths"),
    ],
    ids=["rank", "head size", "page size", "sequences", "dtype"],
)
def test_an_argument_that_disagrees(
    name: str, shape: tuple[int, ...], dtype: Any, found: str
) -> None:
    with pytest.raises(TypeCheckError, match=f"typechecking parameter '{found}'"):
        traced(**{name: jax.ShapeDtypeStruct(shape, dtype)})


def test_a_result_that_disagrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pallas.kernel, "int4_mm", lambda x, *_: x)
    packed, scales = jnp.zeros((16, 4), np.int32), jnp.zeros((1, 4, 2), jnp.bfloat16)
    with pytest.raises(TypeCheckError, match="the return value of .*int4_mm"):
        pallas.int4_mm(jnp.zeros((3, 128), jnp.bfloat16), packed, 128, scales)


def functions() -> Iterator[Callable[..., Any]]:
    for op in OPS:
        package = importlib.import_module(f"tpu_kernels.ops.{op}")
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(found.name)
            yield from (
                f
                for f in vars(module).values()
                if inspect.isfunction(f) and f.__module__ == module.__name__
            )


def test_annotations_can_be_evaluated() -> None:
    """Others would pass as `typing.Any`."""
    for function in functions():
        typing.get_type_hints(inspect.unwrap(function), include_extras=True)


def pages() -> tuple[torch.Tensor, ...]:
    return torch.tensor([5, 9]), torch.tensor([[0, 2, 1], [3, 4, 5]])


CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "paged_attention": lambda: (
        torch.randn(2, 4, 8),
        *torch.randn(2, 2, 6, 4, 8).unbind(),
        *pages(),
    ),
    "ragged_paged_attention": lambda: (
        torch.randn(7, 4, 8),
        torch.randn(6, 4, 4, 8),
        *pages(),
        torch.tensor([0, 3, 7]),
    ),
    "int4_pack": lambda: (torch.zeros(4, 128, dtype=torch.uint8),),
    "int4_repack": lambda: (torch.zeros(2, 3, 32, 4, dtype=torch.int32),),
    "int4_mm": lambda: (
        torch.randn(2, 3, 256),
        torch.zeros(32, 5, dtype=torch.int32),
        64,
        torch.randn(4, 5, 2),
    ),
    "linear_cross_entropy": lambda: (
        torch.randn(2, 3, 8),
        torch.randn(16, 8),
        torch.zeros(2, 3, dtype=torch.int64),
        torch.randn(16),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_signatures_of_public_functions(name: str) -> None:
    """These check their own arguments, and are not checked by the hook."""
    arguments = [x.to("tpu") if isinstance(x, torch.Tensor) else x for x in CALLS[name]()]
    jaxtyped(getattr(tpu_kernels, name), typechecker=beartype)(*arguments)


PROGRAM = """
import torch, tpu_kernels

q, k, v = (torch.ones(2, 4, 8, 16, device="tpu", requires_grad=True) for _ in range(3))
with tpu_kernels.using(attention="pallas"):
    torch.nn.functional.scaled_dot_product_attention(q, k, v).sum().backward()
hidden, weight = (torch.ones(n, 8, device="tpu", requires_grad=True) for n in (4, 16))
loss = tpu_kernels.linear_cross_entropy(hidden, weight, torch.arange(4, device="tpu"))
loss.backward()
print(q.grad.sum().item(), loss.item(), int(torch.tpu.metrics()["compiles"]))
"""
HOOK = "import array_type_checks; array_type_checks.install()"
WITHOUT = """
import sys, typing
from tpu_kernels.ops.paged_attention.reference import paged_attention
assert "jaxtyping" not in sys.modules
print(typing.get_type_hints(paged_attention)["query"].__module__)
"""


def printed(*lines: str, **environment: str) -> list[str]:
    path = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_jaxtyping_is_not_needed() -> None:
    assert printed(WITHOUT)[0].startswith("jax")


def test_programs_are_those_of_processes_without_checks(tmp_path: Path) -> None:
    *values, compiles = printed(PROGRAM, TPU_CACHE_DIR=str(tmp_path))
    assert int(compiles) > 0
    assert printed(HOOK, PROGRAM, TPU_CACHE_DIR=str(tmp_path)) == [*values, "0"]
