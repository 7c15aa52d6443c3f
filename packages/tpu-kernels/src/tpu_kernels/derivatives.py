"""The gradient and the tangents of a function of JAX values, on the arguments of a schema."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpu_core.errors import JaxFunctionError
from tpu_kernels.arguments import Argument, flat_results, flatten, unflatten
from tpu_kernels.tracing import line_in_function


class Derivatives:
    """Derivatives of an op's function.

    Args:
        arguments: Of the op's schema.
        returns: ``"Tensor"`` or ``"Tensor[]"`` for each result.
        fn: Called with the arguments, JAX arrays in place of tensors; gives one value a return.
        backward: ``backward(grads, *arguments)`` in place of `jax.vjp`: takes a gradient, or None,
            for each result, and gives one, or None, for each tensor of the arguments, lists
            flattened.
    """

    def __init__(
        self,
        arguments: Sequence[Argument],
        returns: Sequence[str],
        fn: Callable[..., Sequence[Any]],
        backward: Callable[..., Sequence[Any]] | None,
    ) -> None:
        self._arguments, self._returns, self._fn = arguments, returns, fn
        self._backward = backward

    def gradients(self, grads: Sequence[Any], *rest: Any) -> tuple[list[Any]]:
        """The gradients of the flat tensor arguments at the positions ``rest[-1]``."""
        *values, wanted = rest
        flat = flatten(self._arguments, values)
        if self._backward is not None:
            found = self._backward(grads, *values)
            return ([_or_zeros(found[i], flat[i]) for i in wanted],)
        results, given = self._results_of(values, wanted)
        out = jax.eval_shape(results, *given)
        smooth = [i for i, o in enumerate(out) if jnp.issubdtype(o.dtype, jnp.inexact)]
        _, pull_back = jax.vjp(lambda *c: [results(*c)[i] for i in smooth], *given)
        cotangents = [
            jnp.zeros(out[i].shape, out[i].dtype)
            if grads[i] is None
            else _conjugate(jnp.asarray(grads[i]).astype(out[i].dtype))
            for i in smooth
        ]
        return ([_conjugate(g) for g in pull_back(cotangents)],)

    def tangents(self, tangents: Sequence[Any], *values: Any) -> tuple[list[Any]]:
        """The tangents of the results of floating-point or complex dtype, lists flattened.

        Args:
            tangents: Of each tensor argument, None for one that does not change.
            values: The op's arguments.
        """
        moving = [i for i, t in enumerate(tangents) if t is not None]
        results, given = self._results_of(values, moving)
        if self._backward is not None:
            return (self._transposed_backward(results, given, tangents, values),)
        out, pushed = jax.jvp(results, given, [tangents[i] for i in moving])
        smooth = [jnp.issubdtype(o.dtype, jnp.inexact) for o in out]
        return ([t for t, s in zip(pushed, smooth) if s],)

    def _transposed_backward(
        self,
        results: Callable[..., list[jax.Array]],
        given: Sequence[Any],
        tangents: Sequence[Any],
        values: Sequence[Any],
    ) -> list[jax.Array]:
        """The tangents by a backward pass that was given, which is linear in the gradients."""
        backward = self._backward
        assert backward is not None
        out = jax.eval_shape(results, *given)
        smooth = [i for i, o in enumerate(out) if jnp.issubdtype(o.dtype, jnp.inexact)]
        flat = flatten(self._arguments, values)

        def gradients(*chosen: Any) -> list[jax.Array]:
            grads: list[Any] = [None] * len(out)
            for i, g in zip(smooth, chosen):
                grads[i] = g
            found = backward(grads, *values)
            return [_or_zeros(g, x) for g, x, t in zip(found, flat, tangents) if t is not None]

        zeros = [jnp.zeros(out[i].shape, out[i].dtype) for i in smooth]
        found = jax.eval_shape(gradients, *zeros)
        moving = [t for t in tangents if t is not None]
        given = [_conjugate(t.astype(g.dtype)) for t, g in zip(moving, found)]
        try:
            pushed = jax.vjp(gradients, *zeros)[1](given)
        except Exception as error:
            raise JaxFunctionError(
                "Tangents of an op with a backward of its own are the derivative of that function, "
                f"which JAX does not have: {type(error).__name__}: {error}",
                line=line_in_function(error),
                remedy="Use reverse mode alone (torch.autograd.grad, torch.func.vjp, jacrev), or "
                "write the backward with functions that JAX differentiates.",
            ) from error
        return [_conjugate(t) for t in pushed]

    def _results_of(
        self, values: Sequence[Any], positions: Sequence[int]
    ) -> tuple[Callable[..., list[jax.Array]], list[Any]]:
        """The flat results as a function of some of the flat arguments alone, and these."""
        flat = flatten(self._arguments, values)

        def results(*chosen: Any) -> list[jax.Array]:
            filled = list(flat)
            for i, x in zip(positions, chosen):
                filled[i] = x
            found = self._fn(*unflatten(self._arguments, values, filled))
            return [jnp.asarray(r) for r in flat_results(self._returns, found)]

        return results, [flat[i] for i in positions]


def gradient_leaves(op: str, argument: str, gradient: Any, like: Any) -> list[Any]:
    """Gradients of the arrays of an argument, in the order of its leaves.

    Args:
        op: Name of the op, for messages.
        argument: Name of the argument, for messages.
        gradient: By a backward that was given; None for none, also in place of an array.
        like: The argument: an array, or a pytree of arrays.

    Raises:
        JaxFunctionError: The gradient's structure is not the argument's, or a shape of it is none
            that autograd sums to the argument's.
    """
    tree: Any
    arrays, tree = jax.tree_util.tree_flatten(like)
    if gradient is None:
        return [None] * len(arrays)
    try:
        found = tree.flatten_up_to(gradient)
    except (ValueError, TypeError) as error:
        raise JaxFunctionError(
            f"The backward of {op} returns another pytree for '{argument}' than the argument is.",
            values={
                "gradient": jax.tree_util.tree_structure(gradient),
                f"argument '{argument}'": tree,
            },
            remedy="Return a gradient for each array of the argument, None for none.",
        ) from error
    return [_summed_to(op, argument, g, x) for g, x in zip(found, arrays)]


def _summed_to(op: str, argument: str, gradient: Any, like: Any) -> Any:
    """A gradient in the shape of its array: broadcast dimensions are summed, as autograd does."""
    if gradient is None:
        return None
    is_array = hasattr(gradient, "shape") or isinstance(gradient, (bool, int, float, complex))
    shape, wanted = getattr(gradient, "shape", ()), like.shape
    if is_array and shape == wanted:
        return gradient
    lead = len(shape) - len(wanted)
    kept = shape[lead:]
    if not is_array or lead < 0 or any(w not in (1, n) for w, n in zip(wanted, kept)):
        text = f"the shape {shape}" if is_array else f"{type(gradient).__name__}"
        raise JaxFunctionError(
            f"The backward of {op} returns {text} as a gradient of '{argument}', whose shape is "
            f"{wanted}.",
            remedy="Return a gradient of the argument's shape, or None.",
        )
    dims = [*range(lead), *(lead + i for i, n in enumerate(kept) if wanted[i] != n)]
    return jnp.sum(gradient, dims).reshape(wanted)


def _conjugate(x: Any) -> Any:
    """JAX's gradient of a complex value is the conjugate of PyTorch's."""
    return jnp.conj(x) if jnp.iscomplexobj(x) else x


def _or_zeros(gradient: Any, like: Any) -> Any:
    return jnp.zeros(like.shape, like.dtype) if gradient is None else gradient
