"""Between a function's own arguments and results and those of its op's schema."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.compiler import is_dynamo_compiling

from tpu_core.errors import JaxFunctionError
from tpu_kernels import values as static_values
from tpu_kernels.arguments import Argument
from tpu_kernels.derivatives import gradient_leaves
from tpu_kernels.outlines import constant, filled, outline_of, outline_of_tree, tree_of
from tpu_kernels.signature import Parameter, signature_of

_NONE = inspect.Parameter.empty
# The schema's argument for structures of pytrees and for values that have no type there.
_SPEC = Argument("spec", "str")
_STATIC = ("int", "float", "bool", "str")


class Binding:
    """Binding of a function's arguments to the values of a schema.

    Args:
        name: Of the op.
        fn: The JAX function.
        static: Names of static parameters.

    Attributes:
        parameters: Of the function.
        arguments: Of the schema.
        returns: Types of the schema's results.
        is_direct: Whether the schema's arguments and results are the function's own.
    """

    def __init__(self, name: str, fn: Callable[..., Any], static: Sequence[str]) -> None:
        self.name, self.fn = name, fn
        self._signature = signature_of(name, fn, static)
        self.parameters = self._signature.parameters
        self._has_spec = any(p.kind in ("tree", "object") for p in self.parameters)
        given = [p for p in self.parameters if p.kind != "object"]
        defaults = [_default(p) for p in given]
        # A schema has its defaults at the end, as functions have but for keyword-only parameters.
        required = [i for i, d in enumerate(defaults) if not d]
        in_order = not required or not any(defaults[: required[-1]])
        self.arguments = [
            Argument(p.name, p.type, d if in_order and not self._has_spec else "")
            for p, d in zip(given, defaults)
        ] + ([_SPEC] if self._has_spec else [])
        count = self._signature.returns
        self.returns = ["Tensor[]"] if count is None else ["Tensor"] * count
        self.is_direct = (
            in_order
            and not self._has_spec
            and count is not None
            and not (count == 1 and self._signature.is_tuple)
        )
        self._python = inspect.signature(fn)
        _bindings[name] = self
        self._trees: dict[Any, Any] = {}  # of results that are pytrees

    def named(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Mapping[str, Any]:
        """The arguments of a call by the function's parameters, defaults included."""
        try:
            bound = self._python.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}(): {error}") from None
        bound.apply_defaults()
        return bound.arguments

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """The schema's values for a call of the function."""
        arguments = self.named(args, kwargs)
        if is_dynamo_compiling():
            return self._bind_outlines(arguments)
        found: list[Any] = []
        spec: list[Any] = []
        for p in self.parameters:
            value = arguments[p.name]
            if p.kind == "tree":
                leaves, tree = jax.tree_util.tree_flatten(value)
                self._check_leaves(p.name, leaves)
                found.append(leaves)
                spec.append(tree)
            elif p.kind == "object":
                spec.append(value)
            else:
                found.append(value)
        return [*found, static_values.token_of(tuple(spec))] if self._has_spec else found

    def _bind_outlines(self, arguments: Mapping[str, Any]) -> list[Any]:
        found: list[Any] = []
        spec: list[Any] = []
        for p in self.parameters:
            value = arguments[p.name]
            if p.kind == "tree":
                leaves: list[torch.Tensor] = []
                spec.append(outline_of(value, leaves))
                found.append(leaves)
            elif p.kind == "object":
                spec.append(value)
            else:
                found.append(value)
        return [*found, _spec_of_outlines(self.name, *spec)] if self._has_spec else found

    def _check_leaves(self, name: str, leaves: Sequence[Any]) -> None:
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, jax.ShapeDtypeStruct)):
                raise TypeError(
                    f"{self.name}(): the pytree '{name}' holds {type(leaf).__name__} ({leaf!r}) "
                    "among its tensors. Make it a tensor, or a static argument of its own."
                )

    def structured(self, values: Sequence[Any], results: Any) -> Any:
        """The function's result for that of the op."""
        if self._signature.returns is None and is_dynamo_compiling():
            given = [
                None if v is None else v if a.type in _STATIC else ""
                for a, v in zip(self.arguments, values)
            ]
            return filled(_result_outline(self.name, *given), iter(results))
        return self.structure(values)(results)

    def structure(self, values: Sequence[Any]) -> Callable[[Any], Any]:
        """Structure that builds the function's result from the op's, for a traced call."""
        if self._signature.returns is None:
            made: Callable[[Any], Any] = self.result_tree(values).unflatten
            return made
        single = self._signature.returns == 1 and self._signature.is_tuple
        return lambda results: (results,) if single else results

    def result_tree(self, values: Sequence[Any]) -> Any:
        """Structure of the result of a call that was traced with these static values."""
        count = self._signature.returns
        if count is None:
            return self._trees[self._tree_key(values)]
        return jax.tree_util.tree_structure((0,) * count if self._signature.is_tuple else 0)

    def _tree_key(self, values: Sequence[Any]) -> Any:
        return tuple(
            static_values.exact(v) if a.type in _STATIC else v is None
            for a, v in zip(self.arguments, values)
        )

    # --- called while an op is traced ------------------------------------------------------------

    def call(self, *values: Any) -> Sequence[Any]:
        """The function of the schema's values: one value, or list of values, a return."""
        args, kwargs = self._own(values)
        return self._flat(values, self.fn(*args, **kwargs))

    def reference(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A PyTorch function with the function's parameters, as one of the schema's values."""

        def run(*values: Any, **keywords: Any) -> Any:
            filled = [*values, *(keywords[a.name] for a in self.arguments[len(values) :])]
            args, kwargs = self._own(filled)
            results = self._flat(filled, fn(*args, **kwargs))
            return results[0] if len(results) == 1 else tuple(results)

        return run

    def gradients_of(self, backward: Callable[..., Any]) -> Callable[..., list[Any]]:
        """The user's gradient as a function of flat gradients and the schema's values.

        It gives one gradient, or None, for each tensor of the arguments, lists flattened.
        """

        def run(grads: Sequence[Any], *values: Any) -> list[Any]:
            args, kwargs = self._own(values)
            like = jax.eval_shape(lambda: self.fn(*args, **kwargs))
            leaves, tree = jax.tree_util.tree_flatten(like)
            filled = [
                jnp.zeros(o.shape, o.dtype) if g is None else g for g, o in zip(grads, leaves)
            ]
            found = backward(jax.tree_util.tree_unflatten(tree, filled), *args, **kwargs)
            found = found if isinstance(found, (tuple, list)) else (found,)
            return self._flat_gradients(values, found)

        return run

    def _flat_gradients(self, values: Sequence[Any], found: Sequence[Any]) -> list[Any]:
        arrays = [p for p in self.parameters if p.kind in ("array", "optional", "tree")]
        if len(found) == len(self.parameters):
            found = [g for p, g in zip(self.parameters, found) if p in arrays]
        if len(found) != len(arrays):
            raise JaxFunctionError(
                f"The gradient of {self.name} returns {len(found)} values for the arguments "
                f"{[p.name for p in arrays]}.",
                remedy="Return a tuple with a gradient for each of them, None for none.",
            )
        given = self._by_parameter(values)
        flat: list[Any] = []
        for p, gradient in zip(arrays, found):
            if p.kind == "optional" and given[p.name] is None:
                flat.append(None)
            else:
                flat.extend(gradient_leaves(self.name, p.name, gradient, given[p.name]))
        return flat

    def _own(self, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for p, value in zip(self.parameters, self._by_parameter(values).values()):
            if p.how is inspect.Parameter.VAR_POSITIONAL:
                args.extend(value)
            elif p.how is inspect.Parameter.KEYWORD_ONLY:
                kwargs[p.name] = value
            else:
                args.append(value)
        return args, kwargs

    def _by_parameter(self, values: Sequence[Any]) -> dict[str, Any]:
        """The function's arguments in its order, pytrees put together."""
        spec = iter(static_values.value_of(values[-1]) if self._has_spec else ())
        given = iter(values)
        found: dict[str, Any] = {}
        for p in self.parameters:
            if p.kind == "object":
                found[p.name] = next(spec)
            elif p.kind == "tree":
                found[p.name] = jax.tree_util.tree_unflatten(next(spec), next(given))
            else:
                found[p.name] = next(given)
        return found

    def _flat(self, values: Sequence[Any], result: Any) -> Sequence[Any]:
        count = self._signature.returns
        if count is None:
            leaves, tree = jax.tree_util.tree_flatten(result)
            if self._trees.setdefault(self._tree_key(values), tree) != tree:
                raise self._wrong(
                    f"a pytree {tree} for these shapes, and another one for others",
                    "The structure of a result may depend on static arguments alone.",
                )
        else:
            leaves = list(result) if self._signature.is_tuple and _is_tuple(result) else [result]
            expected = "one array" if count == 1 else f"a tuple of {count} arrays"
            if len(leaves) != count or any(not _is_value(x) for x in leaves):
                raise self._wrong(
                    f"{_described(result)}; its annotation says {expected}",
                    "Annotate what it returns: '-> tuple[jax.Array, jax.Array]', or '-> Any' for a "
                    "pytree.",
                )
        for leaf in leaves:
            if not _is_value(leaf):
                raise self._wrong(
                    f"a {type(leaf).__name__} ({leaf!r}) among its arrays", "Return arrays alone."
                )
        return [leaves] if count is None else leaves

    def _wrong(self, what: str, remedy: str) -> JaxFunctionError:
        return JaxFunctionError(f"The JAX function of {self.name} returns {what}.", remedy=remedy)


_bindings: dict[str, Binding] = {}  # by op, for what Dynamo calls with constants alone


@constant
def _spec_of_outlines(name: str, *spec: Any) -> str:
    kept = [p for p in _bindings[name].parameters if p.kind in ("tree", "object")]
    values = (tree_of(v) if p.kind == "tree" else v for p, v in zip(kept, spec))
    return static_values.token_of(tuple(values))


@constant
def _result_outline(name: str, *values: Any) -> Any:
    return outline_of_tree(_bindings[name].result_tree(values))


def _default(p: Parameter) -> str:
    """The parameter's default as a schema has it, or ""."""
    if p.default is _NONE or p.how is inspect.Parameter.VAR_POSITIONAL:
        return ""
    if p.kind == "optional":
        return "None"
    if p.kind != "static":
        return ""
    return f'"{p.default}"' if isinstance(p.default, str) else repr(p.default)


def _is_tuple(result: Any) -> bool:
    return isinstance(result, (tuple, list))


def _is_value(x: Any) -> bool:
    return isinstance(
        x, (jax.Array, np.ndarray, np.generic, bool, int, float, complex, torch.Tensor)
    )


def _described(result: Any) -> str:
    if _is_tuple(result):
        return f"a {type(result).__name__} of {len(result)}"
    return "None" if result is None else f"a {type(result).__name__}"
