"""`jax_op`: a JAX function as an op of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import jax
import torch

from tpu_core.errors import JaxFunctionError
from tpu_core.extend import call_through, op_caller
from tpu_kernels.arguments import Argument
from tpu_kernels.binding import Binding
from tpu_kernels.flat_op import FlatOp
from tpu_kernels.structures import StructuredCalls


class JaxOp:
    """A JAX function that is an op of PyTorch; made by `jax_op`.

    Attributes:
        name: ``"namespace::name"``.
        fn: The JAX function.
        overload: The op as ``torch.ops`` has it.
    """

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        *,
        static: Sequence[str] = (),
        mutates: Sequence[str] = (),
        differentiable: bool = True,
        backward: Callable[..., Any] | None = None,
        cast_inputs: torch.dtype | None = None,
        cpu: Callable[..., Any] | None = None,
    ) -> None:
        _check_name(name)
        if backward is not None and not differentiable:
            raise ValueError(
                f"{name}: a backward is given, and differentiable=False has no use for it. Leave "
                "one of them out."
            )
        self.name, self.fn = name, fn
        self.__name__ = name.split("::")[1]
        self.__doc__ = getattr(fn, "__doc__", None)
        self.__wrapped__ = fn
        self._binding = binding = Binding(name, fn, static)
        self._op = FlatOp(
            f"{name}_functional" if mutates else name,
            binding.arguments,
            binding.returns,
            binding.call,
            differentiable=differentiable,
            backward=binding.gradients_of(backward) if backward else None,
            origin=fn,
        )
        self._op.on_cpu(binding.reference(cpu) if cpu else None)
        if cast_inputs is not None:
            self._op.autocast(cast_inputs)
        self.overload = _define_mutating(name, self._op, mutates) if mutates else self._op.overload
        # `__call__` is for Dynamo. A call in Python goes to `_call`: see `call_through` below.
        self._call: Callable[..., Any]
        if binding.is_direct:
            self._traceable: Callable[..., Any] = self.overload
            self._call = op_caller(name, self.overload)
        else:
            self._traceable = self._bound
            is_recorded = not mutates and cast_inputs is None
            StructuredCalls(binding, name, self.overload, is_recorded, self._use)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the op, with tensors in place of the function's arrays."""
        return self._traceable(*args, **kwargs)

    def as_jax(self, *args: Any, **kwargs: Any) -> Callable[..., Sequence[jax.Array]]:
        """Traced function of the op for arguments of these shapes.

        Args:
            args, kwargs: As of a call, `jax.ShapeDtypeStruct` in place of tensors.

        Returns:
            A function of the flat arrays, which gives flat arrays. `jax.jit` lowers and compiles it
            for any platform.
        """
        values = self._binding.bind(args, kwargs)
        return self._op.traced(values)[0].call

    def _bound(self, *args: Any, **kwargs: Any) -> Any:
        values = self._binding.bind(args, kwargs)
        return self._binding.structured(values, self.overload(*values))

    def _use(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __repr__(self) -> str:
        return f"JaxOp({self.overload._schema})"


# A frame of Python's own takes 0.2 us of the 1.3 us that recording an op takes.
call_through(JaxOp)


def _check_name(name: str) -> None:
    namespace, _, short = name.partition("::")
    if not (namespace.isidentifier() and short.isidentifier()):
        raise ValueError(f"'{name}' is no name of an op. Use 'namespace::name', as 'my::gelu'.")
    if namespace in ("aten", "prim", "prims", "tpu", "tpu_compile"):
        raise ValueError(
            f"The namespace '{namespace}' is not for ops of your own. Use another one."
        )
    if hasattr(getattr(torch.ops, namespace), short):
        raise ValueError(
            f"There is an op '{name}' already. Ops are defined once in a process: use another "
            "name, or restart the process where you changed the function."
        )


def _define_mutating(name: str, functional: FlatOp, mutates: Sequence[str]) -> Any:
    """The op that writes what the functional one returns last into its arguments."""
    names = [a.name for a in functional.arguments]
    for m in mutates:
        if m not in names or functional.arguments[names.index(m)].type != "Tensor":
            raise TypeError(
                f"{name}: mutates={list(mutates)}, but '{m}' is no parameter that takes one array. "
                f"Its parameters: {names}."
            )
    kept = len(functional.returns) - len(mutates)
    if kept < 0 or "Tensor[]" in functional.returns:
        raise TypeError(
            f"{name}: the function must return a tuple of arrays that ends with the new values of "
            f"{list(mutates)}, and say so: '-> tuple[jax.Array, ...]' with one item each."
        )
    written = {n: chr(ord("a") + i) for i, n in enumerate(mutates)}
    arguments = [
        Argument(a.name, f"Tensor({written[a.name]}!)" if a.name in written else a.type, a.default)
        for a in functional.arguments
    ]
    short = name.split("::")[1]
    functional.library.define(functional.schema(short, arguments, functional.returns[:kept]))
    positions = [names.index(m) for m in mutates]

    def run(*values: Any, **keywords: Any) -> Any:
        filled = functional.positional(values, keywords)
        given = list(filled)
        if torch.is_grad_enabled() and any(_requires_grad(v) for v in filled):
            # The gradient is computed from the old values.
            for i in positions:
                given[i] = given[i].clone()
        results = functional.overload(*given)
        results = results if isinstance(results, tuple) else (results,)
        for i, new in zip(positions, results[kept:]):
            _check_like(name, names[i], filled[i], new)
            filled[i].copy_(new)
        return None if not kept else results[0] if kept == 1 else results[:kept]

    # In pieces for everyone: autograd, functionalization and the recorder know `copy_`.
    functional.library.impl(short, run, "CompositeImplicitAutograd")
    return getattr(getattr(torch.ops, functional.namespace), short).default


def _requires_grad(value: Any) -> bool:
    values = value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)


def _check_like(name: str, argument: str, old: torch.Tensor, new: torch.Tensor) -> None:
    if old.shape != new.shape or old.dtype != new.dtype:
        raise JaxFunctionError(
            f"The JAX function of {name} returns {new.dtype}{list(new.shape)} as the new value of "
            f"'{argument}', which is {old.dtype}{list(old.shape)}.",
            remedy="Return it with the shape and dtype of the argument (x.astype(old.dtype)).",
        )


@overload
def jax_op(
    name: str,
    fn: Callable[..., Any],
    *,
    static: Sequence[str] = (),
    mutates: Sequence[str] = (),
    differentiable: bool = True,
    backward: Callable[..., Any] | None = None,
    cast_inputs: torch.dtype | None = None,
    cpu: Callable[..., Any] | None = None,
) -> JaxOp: ...


@overload
def jax_op(
    name: str,
    fn: None = None,
    *,
    static: Sequence[str] = (),
    mutates: Sequence[str] = (),
    differentiable: bool = True,
    backward: Callable[..., Any] | None = None,
    cast_inputs: torch.dtype | None = None,
    cpu: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], JaxOp]: ...


def jax_op(
    name: str,
    fn: Callable[..., Any] | None = None,
    *,
    static: Sequence[str] = (),
    mutates: Sequence[str] = (),
    differentiable: bool = True,
    backward: Callable[..., Any] | None = None,
    cast_inputs: torch.dtype | None = None,
    cpu: Callable[..., Any] | None = None,
) -> Any:
    """Make a JAX function an op of PyTorch, for tensors on device ``tpu``.

    The op is recorded, fused, compiled and cached as any other: in eager, under ``torch.compile``
    and in ``torch.export``. Shapes come from `jax.eval_shape`, gradients of every order from
    `jax.vjp`, ``torch.func.vmap`` from `jax.vmap`.

    The annotations are the schema. A parameter without one, or of type `jax.Array`, takes a tensor;
    ``jax.Array | None`` also None; ``dict``, ``list``, ``tuple``, ``Any`` and classes that are
    pytrees take pytrees of tensors; ``int``, ``float``, ``bool``, ``str`` and whatever else is
    hashable are static: each value is a program of its own. The result is one array, a
    ``tuple[jax.Array, jax.Array]``, or, for any other annotation, a pytree.

    The function is run once for each set of argument shapes, not at each call: it must be pure.
    Integers have 32 bits inside, as in JAX, unless x64 is on or an argument is float64.

    Args:
        name: ``"namespace::name"``, found later as ``torch.ops.namespace.name``.
        fn: The function; without it, `jax_op` is a decorator.
        static: Names of further static parameters.
        mutates: Parameters that are written: the function's last results are their new values.
        differentiable: False where results shall not require gradients.
        backward: A JAX function ``backward(grads, *args)`` in place of `jax.vjp`: ``grads`` is
            shaped like the result, and it returns a tuple with the gradient of each argument, of
            the argument's shape or pytree, None for none. It must be differentiable itself where
            higher orders or forward mode are needed.
        cast_inputs: Floating-point arguments are cast to this dtype where autocast is on.
        cpu: A PyTorch function of the same arguments for tensors on the CPU, which are refused
            without it.

    Returns:
        A `JaxOp`, to be called like the function.

    Raises:
        JaxFunctionError: In a call, the function raises, leaks tracers, has side effects
            or returns what the annotations do not say.
        TypeError: ``name`` is no string, or the function's signature has no schema.
        ValueError: The name is not that of a new op, or ``backward`` is given for an op that is
            not differentiable.

    Example:
        >>> @tpu_kernels.jax_op("my::softcap")
        ... def softcap(x: jax.Array, cap: float = 30.0) -> jax.Array:
        ...     return cap * jnp.tanh(x / cap)
        >>> softcap(torch.tensor([0.0, 100.0], device="tpu"), cap=10.0)
        tensor([ 0., 10.], device='tpu:0')
    """
    if not isinstance(name, str):
        shown = getattr(name, "__name__", "f")
        raise TypeError(
            f"jax_op got {name!r} where the op's name belongs. Name the op: "
            f'@jax_op("my::{shown}") above the function, or jax_op("my::{shown}", {shown}).'
        )
    options: dict[str, Any] = {
        "static": (static,) if isinstance(static, str) else static,
        "mutates": (mutates,) if isinstance(mutates, str) else mutates,
        "differentiable": differentiable,
        "backward": backward,
        "cast_inputs": cast_inputs,
        "cpu": cpu,
    }

    def decorate(f: Callable[..., Any]) -> JaxOp:
        return JaxOp(name, f, **options)

    return decorate if fn is None else decorate(fn)
