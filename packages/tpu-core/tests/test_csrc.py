"""The C++ sources: names that would meet in a translation unit, and the direction of includes."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from tpu_core.cpp_extension import CORE, HEADERS

if not CORE.csrc.exists():
    pytest.skip("an installed wheel has no sources", allow_module_level=True)

# The lowest first.
LAYERS = ("runtime", "values", "recorder", "execution", "custom_ops", "bindings")
NO_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', re.DOTALL)
DECLARED = re.compile(
    r"\b(?:struct|class|enum class|enum)\s+(\w+)|\busing\s+(\w+)\s*="  # types
    r"|\b(\w+)\s*\([^;{}]*\)[^;{}()]*(?:\{|$)"  # functions
    r"|[\w>*&\]]\s+[*&]?(\w+)\s*(?:\[\w*\])?\s*(?:=|\{|;)"  # variables
)


def internal_names(source: str) -> set[str]:
    """Names that a source declares at the top of its anonymous namespaces."""
    text = re.sub(r"^\s*#(?:[^\n]*\\\n)*[^\n]*", "", NO_CODE.sub('""', source), flags=re.MULTILINE)
    names: set[str] = set()
    for found in re.finditer(r"\bnamespace\s*\{", text):
        depth, statement = 0, ""
        for c in text[found.end() :]:
            if c == "}" and depth == 0:
                break
            depth += (c == "{") - (c == "}")
            if depth == 0 or (depth == 1 and c == "{"):
                statement += c
            if depth == 0 and c in ";}":
                # The parameters of templates, and what a function's type or a class's bases name.
                statement = re.sub(r"^\s*template\s*<[^{;]*?>\s*(?=\w)", "", statement.lstrip("}"))
                statement = re.sub(r"\busing [^=;]*;|\bTORCH_LIBRARY\w*", "", statement)
                if match := DECLARED.search(statement):
                    names.add(next(name for name in match.groups() if name))
                statement = ""
    return names


def test_names_are_found():
    source = """
    namespace { constexpr int kOne = 1; // not_this(
    template <typename T> T argument(T&& x) { call(x); return x; }
    struct Cut : Base { int field; };
    std::mutex g_lock;  auto& g_all = *new std::vector<int>{1};
    using Slots = int; }
    namespace tpu { void outside() {} }
    """
    assert internal_names(source) == {"kOne", "argument", "Cut", "g_lock", "g_all", "Slots"}


def test_internal_names_are_of_one_source():
    """Sources of a layer share a translation unit, and so their anonymous namespaces: a function of
    one would be an overload of another's, and might be called in its place.
    """
    places = defaultdict(set)
    for path in sorted(CORE.csrc.rglob("*.cpp")):
        for name in internal_names(path.read_text()):
            places[name].add(str(path.relative_to(CORE.csrc)))
    shared = {name: sorted(found) for name, found in places.items() if len(found) > 1}
    assert not shared


def test_headers_include_lower_layers_alone():
    wrong = []
    for path in sorted(CORE.csrc.rglob("*/*.h")):
        own = LAYERS.index(path.parent.name)
        for included in re.findall(r'#include "(\w+)/', path.read_text()):
            if LAYERS.index(included) > own:
                wrong.append(f"{path.relative_to(CORE.csrc)} includes a header of {included}")
    assert not wrong


def test_headers_for_other_extensions_include_none_of_the_layers():
    headers = sorted(HEADERS.rglob("*.h"))
    assert headers
    for path in headers:
        assert not re.findall(r'#include "', path.read_text()), path


def test_numbers_of_lowerings():
    """Lowerings run in processes without the extension, so their numbers are their own."""
    from tpu_core import _C
    from tpu_core.lowering import checks, views
    from tpu_core.pjrt import client

    names = ("WHOLE", "SLICE", "GENERAL")
    assert _C.ENUMS["Access"] == {name: getattr(views, name) for name in names}
    bits = {"F32": "float32", "F64": "float64", "I32": "int32", "I64": "int64"}
    assert {name: client.PACK_DTYPES[k].name for name, k in _C.ENUMS["Pack"].items()} == bits
    assert _C.ENUMS["Word"]["NODE_SHIFT"] == checks._NODE_SHIFT
