"""Shapes and dtypes in signatures of lowerings: checked in these tests, the same registry."""

from __future__ import annotations

import importlib
import inspect
import os
import typing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from interpreter import clean
from lowering_type_checks import CHECKED
from tpu_core.lowering import convolution_forms, lu, matmul, rnn


def of(*shape: int, dtype: Any = np.float32) -> jax.Array:
    return jnp.ones(shape, dtype)


GEOMETRY = {"stride": (1,), "padding": ((0, 0),), "dilation": (1,), "groups": 2}


@pytest.mark.parametrize(
    ("function", "arguments", "named"),
    [
        (matmul.mm, (of(2, 3), of(4, 5)), {}),
        (matmul.bmm, (of(2, 3), of(3, 5)), {}),
        (rnn.lstm_cell_backward, (None, of(2, 8), of(2, 8), of(2, 8), of(2, 24), False), {}),
        (lu.factor, (of(3),), {}),
        (lu.solve_triangular, (of(2, 3, 4), of(2, 3, 1)), {"lower": True}),
        (lu.factor, (of(3, 3, dtype=np.int32),), {}),
    ],
    ids=["sizes", "rank", "gates", "no matrix", "not square", "dtype"],
)
def test_arguments_that_disagree(function: Any, arguments: Any, named: Any) -> None:
    with pytest.raises(TypeCheckError, match=f"parameters of .*{function.__name__}"):
        function(*arguments, **named)


def test_a_result_that_disagrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_forms, "conv", lambda x, w, **_: x)
    with pytest.raises(TypeCheckError, match="the return value of .*forward_convolution"):
        convolution_forms.forward_convolution(of(1, 4, 8), of(6, 2, 3), **GEOMETRY)


@pytest.mark.parametrize("name", CHECKED)
def test_annotations_can_be_evaluated(name: str) -> None:
    """Others would pass as `typing.Any`."""
    module = importlib.import_module(f"tpu_core.lowering.{name}")
    for function in vars(module).values():
        if inspect.isfunction(function) and function.__module__ == module.__name__:
            typing.get_type_hints(inspect.unwrap(function), include_extras=True)


REGISTRY = """
import sys
from tpu_core.lowering import load
from tpu_core.lowering.registry import REGISTRY

load()
assert ("beartype" in sys.modules) is {checked}
for e in REGISTRY:
    print(e.op, e.family, e.location, sorted(e.static), e.chance, e.random, e.wants_out)
    print(e.wants_contiguous, e.source(), e.key_part() if e.identity is None else "")
"""


def test_the_registry_is_that_of_a_process_without_checks() -> None:
    """Keys of programs and binding of arguments follow from it."""
    tests = str(Path(__file__).parents[1])
    path = os.pathsep.join((tests, os.environ.get("PYTHONPATH", "")))
    install = "import lowering_type_checks; lowering_type_checks.install()"
    checked = clean(install + REGISTRY.format(checked=True), PYTHONPATH=path)
    assert checked == clean(REGISTRY.format(checked=False))
