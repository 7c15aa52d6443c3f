"""Calls with pytrees: those that are like the last one go through code that was written for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from torch.autograd import forward_ad

from tpu_core.extend import op_caller
from tpu_kernels.arguments import TENSORS
from tpu_kernels.binding import Binding
from tpu_kernels.pytree_code import Code, MismatchError, mismatch_if
from tpu_kernels.values import exact

_flatten = jax.tree_util.default_registry.flatten


class StructuredCalls:
    """An op's calls with the function's own arguments, pytrees and static values among them.

    Calls of one kind have one structure and the same static leaves. The first of a kind is bound to
    the schema by `Binding`, the next by code that takes the arguments apart where they are known to
    be.

    Args:
        binding: Between the function and the op's schema.
        name: Of the op.
        overload: The op, called with the schema's values.
        is_recorded: Whether a call without derivatives is recorded and does nothing else: no cast
            of its arguments, no writing to them.
        use: Called with what calls should go to from now on.
    """

    def __init__(
        self,
        binding: Binding,
        name: str,
        overload: Callable[..., Any],
        is_recorded: bool,
        use: Callable[[Callable[..., Any]], None],
    ) -> None:
        self._binding, self._name, self._is_recorded = binding, name, is_recorded
        self._overload, self._use = overload, use
        self._op = op_caller(name, self._checked)
        self._forms: dict[Any, Form] = {}  # by structure
        use(lambda *args, **kwargs: self._call(None, args, kwargs))

    def _call(self, tried: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call the op with any arguments but those that the code ``tried`` takes."""
        leaves, tree = _flatten((args, kwargs))
        form = self._forms.get(tree)
        if form is None:
            form = self._forms[tree] = Form(self._binding, tree)
        key = form.key(leaves)
        try:
            written = form.written.get(key)
        except TypeError:  # a static value that is not hashable, of which the binding complains
            written = None
        if written is not None and written is not tried:
            self._use(written)
            return written(*args, **kwargs)
        values = self._binding.bind(args, kwargs)
        result = self._binding.structured(values, self._overload(*values))
        if written is None and not any(_may_change(leaves[i]) for i in form.static):
            written = form.written[key] = self._write(form, tree, leaves, values)
            self._use(written)
        return result

    def _write(
        self, form: Form, tree: Any, leaves: Sequence[Any], values: Sequence[Any]
    ) -> Callable[..., Any]:
        """Code for calls with the same static leaves as one that was made.

        Args:
            form: Of the call.
            tree: Its structure.
            leaves: Its leaves.
            values: The schema's values of it.
        """
        code = Code()
        names = [f"x{i}" for i in range(tree.num_leaves)]
        args, kwargs = tree.children()
        matching = [
            *code.taking("args", args, names[: args.num_leaves], is_own=True),
            *code.taking("kwargs", kwargs, names[args.num_leaves :], is_own=True),
            *(mismatch_if(f"{names[i]} is None") for i in form.optional),
            *(mismatch_if(code.differs(names[i], leaves[i])) for i in form.static),
        ]
        given = [
            names[place]
            if isinstance(place, int)
            else f"[{', '.join(names[place])}]"
            if isinstance(place, slice)
            else code.name(value)
            for place, value in zip(form.values, values)
        ]
        if self._is_list(form):
            # Recorded without PyTorch's dispatcher, which knows of forward mode.
            matching.append(mismatch_if(f"{code.name(forward_ad)}._current_level >= 0"))
            result = self._binding.result_tree(values)
            found = [f"y{i}" for i in range(result.num_leaves)]
            calling = [
                f"[{', '.join(found)}] = {code.name(self._list_op(values))}({given[0]})",
                f"return {code.made(result, found)}",
            ]
        else:
            made = code.name(self._binding.structure(values))
            calling = [f"return {made}({code.name(self._op)}({', '.join(given)}))"]
        # Where the arguments are others, or mistakes, `_call` binds them, and complains if need be.
        return code.function(
            "call(*args, **kwargs)",
            [
                "try:",
                *(f"    {line}" for line in matching),
                "except (MismatchError, KeyError, TypeError, ValueError): pass",
                "else:",
                "    try:",
                *(f"        {line}" for line in calling),
                "    except MismatchError: pass",
                f"return {code.name(self._call)}(call, args, kwargs)",
            ],
        )

    def _is_list(self, form: Form) -> bool:
        """Return whether the first of the schema's values is a list and all others are
        constants.
        """
        return self._is_recorded and all(
            isinstance(place, slice) if i == 0 else place is None or argument.type not in TENSORS
            for i, (argument, place) in enumerate(zip(self._binding.arguments, form.values))
        )

    def _list_op(self, values: Sequence[Any]) -> Callable[[list[torch.Tensor]], Sequence[Any]]:
        """The op as a function of its first value, a list; gives its results in a sequence."""
        others = tuple(values[1:])

        def general(tensors: list[torch.Tensor]) -> Sequence[Any]:
            results = self._op(tensors, *others)
            return [results] if isinstance(results, torch.Tensor) else results

        return op_caller(self._name, general, others)

    def _checked(self, *values: Any) -> Any:
        """Call the op with what is not plain tensors: subclasses of them, or a mistake."""
        for argument, value in zip(self._binding.arguments, values):
            if argument.type == "Tensor[]" and not all(isinstance(v, torch.Tensor) for v in value):
                raise MismatchError
        return self._overload(*values)


class Form:
    """The calls of one structure, and where a schema's values are among their leaves.

    Args:
        binding: Between the function and the schema.
        tree: Structure of ``(args, kwargs)``.

    Attributes:
        values: For each value its leaf, its leaves, or None for one that is not there: a default.
        static: Leaves that are no tensors.
        optional: Leaves where None may be instead, which is no leaf.
        key: Of the leaves that are static; it is not hashable where one of them is not.
        written: Code by these keys.
    """

    def __init__(self, binding: Binding, tree: Any) -> None:
        args, kwargs = jax.tree_util.tree_unflatten(tree, map(_Leaf, range(tree.num_leaves)))
        given = binding.named(args, kwargs)
        self.values: list[int | slice | None] = []
        self.static: list[int] = []
        self.optional: list[int] = []
        for p in binding.parameters:
            marks = jax.tree_util.tree_leaves(given[p.name])
            leaves = [x.position for x in marks if isinstance(x, _Leaf)]
            if p.kind in ("object", "static"):
                self.static += leaves
            if p.kind == "tree":
                self.values.append(slice(leaves[0], leaves[-1] + 1) if leaves else None)
            elif p.kind != "object":
                self.values.append(leaves[0] if leaves else None)
                self.optional += leaves if p.kind == "optional" else ()
        # What objects and structures are told by.
        self.values += [None] * (len(binding.arguments) - len(self.values))
        # 1 and True are equal, and so are 0.0 and -0.0.
        code = Code()
        of_leaves = (f"{code.name(exact)}(x[{i}]), " for i in self.static)
        self.key = code.function("key(x)", [f"return ({''.join(of_leaves)})"])
        self.written: dict[Any, Callable[..., Any]] = {}


@dataclass(frozen=True, slots=True)
class _Leaf:
    position: int


def _may_change(value: Any) -> bool:
    """Return whether a static value may become another one: an array that was taken for a
    number.
    """
    return isinstance(value, (torch.Tensor, jax.Array, np.ndarray))
