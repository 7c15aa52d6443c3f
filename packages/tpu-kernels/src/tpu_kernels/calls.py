"""JAX functions and Flax modules called on tensors, with gradients through both."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

from tpu_core.errors import JaxFunctionError
from tpu_core.extend import from_jax
from tpu_kernels import values
from tpu_kernels.arguments import Argument
from tpu_kernels.flat_op import FlatOp

_NAME = "tpu_kernels::call"


def call_jax(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call any JAX function on ``tpu`` tensors, as one op with gradients.

    Args:
        fn: A pure function. It is traced once for each set of shapes, and so are two functions of
            the same code that close over the same values: a lambda in a loop costs nothing.
        args, kwargs: Pytrees. Tensors and arrays become JAX arrays; all else is static and must be
            hashable.

    Returns:
        The function's result, tensors in place of arrays.

    Raises:
        JaxFunctionError: The function is not pure, or raises.
        ValueError: There is no tensor among the arguments.

    Example:
        >>> tpu_kernels.call_jax(jax.scipy.special.logsumexp, x, axis=-1)
    """
    leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
    tensors, static = [], []
    for leaf in leaves:
        if isinstance(leaf, (jax.Array, np.ndarray)):
            leaf = from_jax(jax.numpy.asarray(leaf))
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            static.append(_TENSOR)
        else:
            static.append(leaf)
    if not tensors:
        raise ValueError(f"call_jax({_name(fn)}): there is no tensor among the arguments.")
    spec = values.token_of((_Function(fn), tree, tuple(static)))
    results = _op().overload(tensors, spec)
    return jax.tree_util.tree_unflatten(_trees[spec], results)


# For Dynamo, which cannot look into JAX: `torch.compiler.disable` without its slow import.
vars(call_jax)["_torchdynamo_disable"] = True


class _Tensor:
    """The place of a tensor among the static leaves."""

    def __repr__(self) -> str:
        return "tensor"


_TENSOR = _Tensor()
_trees: dict[str, Any] = {}  # of results, by spec


class _Function:
    """A function that is equal to others of the same code, defaults and closure."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self._key = _key(fn)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Function) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return _name(self.fn)


def _name(fn: Callable[..., Any]) -> str:
    target = fn.func if isinstance(fn, functools.partial) else fn
    return (
        f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', type(fn).__name__)}"
    )


def _key(fn: Any) -> Any:
    if inspect.ismethod(fn):
        return _key(fn.__func__), _held(fn.__self__)
    if isinstance(fn, functools.partial):
        keywords = tuple((k, _held(v)) for k, v in sorted(fn.keywords.items()))
        return _key(fn.func), tuple(map(_held, fn.args)), keywords
    if not inspect.isfunction(fn) or hasattr(fn, "__wrapped__"):
        return _held(fn)
    cells = tuple(_held(c.cell_contents) for c in fn.__closure__ or ())
    defaults = tuple(map(_held, fn.__defaults__ or ()))
    named = tuple((k, _held(v)) for k, v in (fn.__kwdefaults__ or {}).items())
    return fn.__code__, id(fn.__globals__), cells, defaults, named


# An array that a function closes over is known by its contents up to this size, in bytes.
_LARGE = 1 << 16


def _held(value: Any) -> Any:
    """A key of a value: its contents, its own equality where it has one, else its identity."""
    if inspect.isfunction(value) or inspect.ismethod(value):
        return _key(value)
    if type(value) in (tuple, list):
        return type(value), tuple(map(_held, value))
    if type(value) is dict:
        return dict, tuple((_held(k), _held(v)) for k, v in value.items())
    if isinstance(value, np.ndarray) and value.dtype != object and value.nbytes <= _LARGE:
        return np.ndarray, str(value.dtype), value.shape, value.tobytes()
    try:
        key = values.exact(value)
        hash(key)
    except TypeError:
        return _Same(value)
    return key


class _Same:
    """The key of an object that has no other: it is equal to itself alone.

    It holds the object, whose address another one would get.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


@functools.cache
def _op() -> FlatOp:
    arguments = [Argument("tensors", "Tensor[]"), Argument("spec", "str")]
    op = FlatOp(_NAME, arguments, ["Tensor[]"], _run)
    op.on_cpu(None)
    return op


def _run(arrays: Sequence[Any], spec: str) -> tuple[list[Any]]:
    function, tree, static = values.value_of(spec)
    stream = iter(arrays)
    leaves = [next(stream) if leaf is _TENSOR else leaf for leaf in static]
    args, kwargs = jax.tree_util.tree_unflatten(tree, leaves)
    results, out = jax.tree_util.tree_flatten(function.fn(*args, **kwargs))
    if _trees.setdefault(spec, out) != out:
        raise JaxFunctionError(
            f"{function!r} returns a pytree {out} for these shapes, and another one for others.",
            remedy="The structure of a result may depend on static arguments alone.",
        )
    return (results,)


def from_flax(module: Any, params: Any) -> FlaxModule:
    """A Flax module, or anything with ``apply(params, *args)``, as a module of PyTorch.

    Args:
        module: The JAX module; `call_jax` says what its ``apply`` may do.
        params: Its pytree of arrays. Those of floating-point dtype become parameters, others
            buffers; names follow the pytree (``params.Dense_0.kernel``).

    Returns:
        A module on device ``tpu``, to be called with what ``apply`` takes after ``params``.

    Example:
        >>> model = tpu_kernels.from_flax(flax_model, variables)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model(x).square().mean().backward()
    """
    return FlaxModule(module, params)


class FlaxModule(nn.Module):
    """See `from_flax`."""

    def __init__(self, module: Any, params: Any) -> None:
        super().__init__()
        if not callable(getattr(module, "apply", None)):
            raise TypeError(f"from_flax takes a module with .apply(params, ...), not {module!r}.")
        self._module = module
        leaves, self._tree = jax.tree_util.tree_flatten_with_path(params)
        self._names: list[str] = []
        for path, leaf in leaves:
            self._names.append(_put(self, [_part(p) for p in path] or ["value"], leaf))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """``apply`` with the module's parameters."""
        own = dict((*self.named_parameters(), *self.named_buffers()))
        params = jax.tree_util.tree_unflatten(self._tree, [own[n] for n in self._names])
        return call_jax(self._module.apply, params, *args, **kwargs)

    def extra_repr(self) -> str:
        """The JAX module."""
        return repr(self._module)


def _part(entry: Any) -> str:
    found = getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", entry)))
    return str(found).replace(".", "_")


def _put(root: nn.Module, path: Sequence[str], leaf: Any) -> str:
    """Register a leaf under a path of submodules, and give its full name."""
    owner = root
    for part in path[:-1]:
        if not hasattr(owner, part):
            owner.add_module(part, nn.Module())
        owner = getattr(owner, part)
    tensor = leaf.to("tpu") if isinstance(leaf, torch.Tensor) else from_jax(jax.numpy.asarray(leaf))
    tensor = tensor.detach().clone()
    if tensor.is_floating_point() or tensor.is_complex():
        owner.register_parameter(path[-1], nn.Parameter(tensor))
    else:
        owner.register_buffer(path[-1], tensor)
    return ".".join(path)
