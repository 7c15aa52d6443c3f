"""Registration of lowerings: what is refused, and the entries of this package."""

from __future__ import annotations

import re

import pytest
import torch

from tpu_core import lowering
from tpu_core.lowering.registry import REGISTRY, register


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    lowering.load()


def scaled(x, alpha):
    return x * alpha


def test_a_second_lowering_is_refused_with_both_places():
    first = REGISTRY.get("aten.mm.default")
    with pytest.raises(ValueError, match="aten.mm.default has two lowerings") as raised:
        register("aten.mm.default", lambda a, b: a @ b)
    assert first.location in str(raised.value)
    assert __file__ in str(raised.value)
    assert REGISTRY.get("aten.mm.default") is first


@pytest.mark.parametrize("name", ["add", "aten.add", "aten::add.Tensor", "a.b.c.d"])
def test_a_name_without_namespace_or_overload_is_refused(name):
    with pytest.raises(ValueError, match="is not a full overload name such as"):
        register(name, scaled)


def test_a_static_name_that_is_no_argument_is_refused():
    library = torch.library.Library("test_registry", "DEF")
    library.define("scaled(Tensor x, float factor) -> Tensor")
    op = "test_registry.scaled.default"
    place = re.escape(f"({__file__}:{scaled.__code__.co_firstlineno})")
    # The names are those of the schema, not of the function.
    with pytest.raises(ValueError, match=rf"static=\['alpha'\] names no argument of {op} {place}"):
        register(op, scaled, static=("factor", "alpha"))
    assert op not in REGISTRY


def test_a_random_name_that_is_no_parameter_is_refused():
    op = "test_registry.dropped.default"
    with pytest.raises(ValueError, match=f"random='p' names no parameter of the lowering of {op}"):
        register(op, scaled, random="p")
    assert op not in REGISTRY
