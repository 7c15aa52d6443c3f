"""`tpu_core.extend`: each name resolves, is documented, is used, and costs nothing before."""

from __future__ import annotations

import ast
import inspect
import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from interpreter import clean
from tpu_core import extend, modes
from tpu_core.errors import ConfigurationError
from tpu_core.extend._page import documentation, extend_page, methods

PACKAGES = Path(__file__).parents[2]
THIRD_PARTY = Path(__file__).with_name("third_party")


@pytest.fixture(scope="module")
def page() -> str:
    return extend_page()


@pytest.mark.parametrize("name", extend.__all__)
def test_each_name_has_a_docstring_with_an_example(name: str, page: str) -> None:
    text = documentation(name)
    assert text and "Example:\n" in text
    assert f'<a id="{name}"></a>' in page


@pytest.mark.parametrize("name", extend.__all__)
def test_each_method_of_a_class_is_on_the_page(name: str, page: str) -> None:
    value = getattr(extend, name)
    if isinstance(value, type):
        for method, function in methods(value).items():
            assert inspect.getdoc(function), method
            assert f"\n#### {name}.{method}\n" in page


def test_the_interface_is_small() -> None:
    assert len(extend.__all__) <= 60


@pytest.mark.parametrize("name", extend.__all__)
def test_the_example_of_a_function_has_its_name_here(name: str) -> None:
    if inspect.isfunction(getattr(extend, name)):
        example = documentation(name).partition("Example:\n")[2]
        assert re.search(rf"\b{name}\b", example)


def test_the_page_has_the_calling_convention_of_lowerings(page: str) -> None:
    assert "### Calling convention of a lowering\n\n* It is called with" in page


def test_record_op_refuses_an_op_that_is_not_defined() -> None:
    with pytest.raises(RuntimeError, match="No library has defined the op 'acme::missing'"):
        extend.record_op("acme::missing")


def test_an_entry_point_of_a_mode_that_names_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = EntryPoint("wrong", "collections:OrderedDict", "tpu_core.modes")
    monkeypatch.setattr(modes, "_installed", lambda: {"wrong": point})
    with pytest.raises(ConfigurationError, match="'wrong' = 'collections:OrderedDict' names no"):
        modes.find("wrong")


def test_type_checkers_see_the_same_names() -> None:
    assert extend.__file__ is not None
    tree = ast.parse(Path(extend.__file__).read_text())
    (block,) = (n for n in tree.body if isinstance(n, ast.If))
    seen = {
        alias.asname: f"{node.module}.{alias.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    places = {n: extend.origin(n) for n in extend.__all__}
    assert seen == {n: f"{module.__name__}.{name}" for n, (module, name) in places.items()}


def test_each_name_is_used_by_another_package() -> None:
    folders = [*PACKAGES.glob("tpu-[!c]*/src"), PACKAGES / "tpu-compile" / "src", THIRD_PARTY]
    trees = (ast.parse(f.read_text()) for folder in folders for f in folder.rglob("*.py"))
    used = {
        alias.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "tpu_core.extend"
        for alias in node.names
    }
    assert used - set(extend.__all__) == set()
    # A protocol, which a kernel need not name.
    assert set(extend.__all__) - used == {"Kernel"}


def test_importing_it_imports_what_is_asked_for_alone() -> None:
    code = """
    import sys, torch
    before = set(sys.modules)
    from tpu_core import extend
    new = {"jax"} & set(sys.modules) | {m for m in set(sys.modules) - before}
    from tpu_core.extend import Platform
    print(sorted(new - {"tpu_core.extend"}), "jax" in sys.modules)
    try:
        extend.nothing
    except AttributeError as error:
        print(error)
    """
    assert clean(code).splitlines() == [
        "[] False",
        "module 'tpu_core.extend' has no attribute 'nothing'",
    ]
