"""Python code for one structure of pytrees: what takes the leaves of one, and what makes one.

jax takes as long to flatten one argument and to unflatten one result as an op to be recorded. Code
that knows the structure takes a quarter of that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from tpu_kernels.values import exact

# Where there are more nodes, jax is as fast, and Python's compiler takes long.
_MOST_NODES = 100


class MismatchError(Exception):
    """A call is not one that a function was written for."""


class Code:
    """Lines of functions for some structures, and the objects that they name.

    Example:
        >>> code = Code()
        >>> tree = jax.tree.structure({"a": 0, "b": [0]})
        >>> lines = code.taking("p", tree, ["x", "y"])
        >>> swap = code.function("swap(p)", [*lines, f"return {code.made(tree, ['y', 'x'])}"])
        >>> swap({"a": 1, "b": [2]})
        {'a': 2, 'b': [1]}
    """

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {"MismatchError": MismatchError}
        self._numbers = itertools.count()

    def name(self, value: Any) -> str:
        """A name for an object."""
        name = self._new_name()
        self._objects[name] = value
        return name

    def function(self, signature: str, lines: Sequence[str]) -> Callable[..., Any]:
        """Compile a function, such as ``call(*args)``, of these lines."""
        text = "\n    ".join([f"def {signature}:", *lines])
        # Under this file's name, so that messages do not take its lines for the user's.
        exec(compile(text, __file__, "exec"), self._objects)
        function: Callable[..., Any] = self._objects[signature.partition("(")[0]]
        return function

    def taking(
        self, value: str, tree: Any, leaves: Sequence[str], *, is_own: bool = False
    ) -> list[str]:
        """Lines that give names to the leaves of a value.

        They raise MismatchError, KeyError or ValueError where its structure is another one, unless
        it differs in a leaf alone, which may be anything.

        Args:
            value: The value's name.
            tree: Its structure.
            leaves: A name for each leaf.
            is_own: Whether the value is the function's ``args`` or ``kwargs``, whose type is known.
        """
        return list(self._taking(value, tree, iter(leaves), is_own))

    def _taking(
        self, value: str, tree: Any, leaves: Iterator[str], is_own: bool = False
    ) -> Iterator[str]:
        if tree.node_data() is None:
            yield f"{next(leaves)} = {value}"
        elif not _is_plain(tree):
            found = self._new_name()
            own = ", ".join(itertools.islice(leaves, tree.num_leaves))
            yield f"[{own}], {found} = {self.name(jax.tree_util.default_registry.flatten)}({value})"
            yield mismatch_if(f"{found} != {self.name(tree)}")
        elif tree.node_data()[0] is type(None):
            yield mismatch_if(f"{value} is not None")
        else:
            kind, keys = tree.node_data()
            children = tree.children()
            if not is_own:
                yield mismatch_if(f"type({value}) is not {kind.__name__}")
            yield mismatch_if(f"len({value}) != {len(children)}" if children else value)
            for child, key in zip(children, range(len(children)) if keys is None else keys):
                part = f"{value}[{self._key(key)}]"
                if child.node_data() is None:
                    yield f"{next(leaves)} = {part}"
                else:
                    name = self._new_name()
                    yield f"{name} = {part}"
                    yield from self._taking(name, child, leaves)

    def made(self, tree: Any, leaves: Sequence[str]) -> str:
        """An expression for the value of a structure with leaves of these names."""
        return self._made(tree, iter(leaves))

    def _made(self, tree: Any, leaves: Iterator[str]) -> str:
        if tree.node_data() is None:
            return next(leaves)
        if not _is_plain(tree):
            own = ", ".join(itertools.islice(leaves, tree.num_leaves))
            return f"{self.name(tree.unflatten)}([{own}])"
        kind, keys = tree.node_data()
        parts = [self._made(c, leaves) for c in tree.children()]
        if kind is dict:
            return f"{{{', '.join(f'{self._key(k)}: {p}' for k, p in zip(keys, parts))}}}"
        if kind is list:
            return f"[{', '.join(parts)}]"
        return f"({''.join(f'{p}, ' for p in parts)})" if kind is tuple else "None"

    def differs(self, name: str, value: Any) -> str:
        """A condition: not exactly a value, of the same type and sign."""
        other = f"type({name}) is not {self.name(type(value))}"
        if type(value) is float:
            return f"{other} or repr({name}) != {repr(value)!r}"
        if type(value) in (bool, int, str):
            return f"{other} or {name} != {self.name(value)}"
        key = self.name(exact(value))
        return f"{name} is not {self.name(value)} and {self.name(exact)}({name}) != {key}"

    def _key(self, key: Any) -> str:
        return repr(key) if type(key) in (str, int) else self.name(key)

    def _new_name(self) -> str:
        return f"_{next(self._numbers)}"


def _is_plain(tree: Any) -> bool:
    kind, _ = tree.node_data()
    return kind in (dict, list, tuple, type(None)) and tree.num_nodes <= _MOST_NODES


def mismatch_if(condition: str) -> str:
    """A line that raises MismatchError where a condition holds."""
    return f"if {condition}: raise MismatchError"
