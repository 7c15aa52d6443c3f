"""`tpu_core.extend`: each name resolves, is documented, is used, and costs nothing before."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from interpreter import clean
from tpu_core import extend
from tpu_core.extend._page import documentation, extend_page

PACKAGES = Path(__file__).parents[2]
THIRD_PARTY = Path(__file__).with_name("third_party")


@pytest.mark.parametrize("name", extend.__all__)
def test_each_name_has_a_docstring_with_an_example(name: str) -> None:
    text = documentation(name)
    assert text and "Example:\n" in text
    assert f'<a id="{name}"></a>' in extend_page()


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
    from tpu_core.extend import find_chips
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
