"""The docs page of `tpu_core.extend`, made from its names' docstrings."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any, cast

from tpu_core import extend
from tpu_core.lowering import registry

_HEAD = """\
# Extending the device

`tpu_core.extend` is the interface of tpu-core for packages that add ops, lowerings, kernels, eager
modes, commands or collectives. tpu-eager, tpu-compile, tpu-kernels and tpu-distributed use it,
`tpu_core.errors` and `tpu_core.config`, and nothing else of `tpu_core`: the project's import
contracts hold them to it. Any other package can do the same. What is not among these {count} names
may change in any release.

`tpu_core.array_types` has annotations of arrays with dtype and shape, such as
`Float[Array, "rows columns"]`.

A package with C++ of its own builds it by `tpu_core.cpp_build` and loads it by
`tpu_core.cpp_extension`: see
[extensions of other packages](../explanation/cpp-extension.md#extensions-of-other-packages).

A package plugs in by entry points:

| Group | Name | Object |
|---|---|---|
| `tpu_core.kernels` | an overload, `aten.silu.default` | a `Kernel` |
| `tpu_core.modes` | an eager mode: `torch.tpu.eager_mode = "by_fours"` | a `Mode` |
| `tpu_core.cli` | a subcommand of `tpu` | a `typer.Typer` |
| `tpu_core.device_modules` | an attribute of `torch.tpu` | a module |

In `pyproject.toml`:

```toml
[project.entry-points."tpu_core.modes"]
by_fours = "acme_tpu:BY_FOURS"

[project.entry-points."tpu_core.cli"]
acme = "acme_tpu.cli:app"
```

`packages/tpu-core/tests/third_party/acme_tpu` is a complete package with an op and its gradient, a
kernel, a mode and a command. Importing it registers the op; what an entry point names is imported
at its first use.

Programs on disk are known by the sources of the packages that shape them: see
[program keys](../explanation/program-keys.md#digests-of-sources).

This page is generated from `tpu_core.extend`.
"""
_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples):$")


def extend_page() -> str:
    """Markdown of ``docs/reference/extend.md``, generated from the docstrings."""
    out = [_HEAD.format(count=len(extend.__all__))]
    for group, names in extend.GROUPS.items():
        links = ", ".join(f"[`{name}`](#{name})" for name in names)
        out += [f"**{group}**: {links}\n"]
    for group, names in extend.GROUPS.items():
        out.append(f"## {group}\n")
        if "register" in names:
            out.append(_convention())
        for name in names:
            out += [f'<a id="{name}"></a>', f"### {name}\n", *_entry(name, getattr(extend, name))]
    return "\n".join(out).rstrip() + "\n"


def _convention() -> str:
    """The calling convention of a lowering, from the docstring of the registry's module."""
    title = "Calling convention of a lowering"
    text = textwrap.dedent((registry.__doc__ or "").partition(f"{title}\n")[2]).strip()
    return f"### {title}\n\n{_markdown(text)}\n"


def _markdown(text: str) -> str:
    """A docstring's text with Markdown's marks of code."""
    return re.sub(r"(?<!`)``([^`]+)``(?!`)", r"`\1`", text)


def documentation(name: str) -> str:
    """Docstring of a name: its own, or for a constant the string below it in its module."""
    value = getattr(extend, name)
    if isinstance(value, type) or callable(value):
        return inspect.getdoc(value) or ""
    module, original = extend.origin(name)
    source = inspect.getsource(module)
    found = re.search(rf'^{original}\b.*?^"""(.*?)"""', source, re.M | re.S)
    return inspect.cleandoc(found[1]) if found else ""


def methods(cls: type) -> dict[str, Any]:
    """Public methods and properties of a class of this project, by name."""
    found: dict[str, Any] = {}
    for owner in cls.__mro__:
        if not owner.__module__.startswith("tpu_"):
            continue
        for name, value in vars(owner).items():
            if isinstance(value, (staticmethod, classmethod)):
                value = getattr(cls, name)
            is_member = inspect.isroutine(value) or isinstance(value, property)
            if is_member and not name.startswith("_"):
                found.setdefault(name, value)
    return found


def _entry(name: str, value: Any) -> list[str]:
    out = []
    if callable(value):
        out += ["```python", _signature(name, value), "```\n"]
    out += _described(documentation(name))
    if isinstance(value, type):
        for member, function in methods(value).items():
            if isinstance(function, property):
                returned = str(inspect.signature(cast(Any, function.fget)).return_annotation)
                line = f"{name}.{member}: {_plain(returned)}"
            else:
                line = _signature(f"{name}.{member}", function)
            out += [f"#### {name}.{member}\n", "```python", line, "```\n"]
            out += _described(inspect.getdoc(function) or "")
    return out


def _described(text: str) -> list[str]:
    """Markdown of a docstring."""
    out: list[str] = []
    section = ""
    block: list[str] = []
    for line in [*text.splitlines(), "Example:"]:
        match = _SECTION.match(line)
        if not match:
            block.append(line)
            continue
        out += _block(section, block)
        section, block = match[1], []
    return out


def _plain(signature: str) -> str:
    """A signature with annotations unquoted, and without texts of objects that are no code."""
    defaults = re.sub(r"(?<== )'([^']*)'", r'"\1"', signature)
    return re.sub(r"<factory>|<[^>]*>", "...", defaults.replace("'", ""))


def _signature(name: str, value: Any) -> str:
    try:
        text = str(inspect.signature(value))
    except (TypeError, ValueError):
        return name
    text = _plain(text).replace("(self, ", "(", 1).replace("(self)", "()", 1)
    if len(name + text) > 90:
        body = re.sub(r", (?=\w+(: | = |=)|\*)", ",\n    ", text[1:].rpartition(")")[0])
        text = f"(\n    {body},\n){text.rpartition(')')[2]}"
    return name + text


def _block(section: str, lines: list[str]) -> list[str]:
    text = textwrap.dedent("\n".join(lines)).strip("\n")
    if not text:
        return []
    text = _markdown(text)
    if section.startswith("Example"):
        return ["```python", text, "```\n"]
    if not section:
        return [text, ""]
    items = re.sub(r"^(?=[\w*][^\n]*?: )", "* ", text, flags=re.M)
    if section in ("Returns", "Yields"):
        return [f"**{section}** {text}\n"]
    items = re.sub(r"^\* ([^:\n]+): ", r"* `\1`: ", items, flags=re.M)
    return [f"**{section}**\n", items, ""]
