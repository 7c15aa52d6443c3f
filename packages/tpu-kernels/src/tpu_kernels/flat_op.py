"""A PyTorch op over JAX values, and the ops of its gradient and of its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
import torch

from tpu_core.errors import JaxFunctionError, UnsupportedOpError
from tpu_core.extend import (
    JaxSettings,
    hide_lines_of,
    record_op,
    register,
    to_numpy_dtype,
    to_torch_dtype,
)
from tpu_kernels import first_vmap, symbolic_shapes
from tpu_kernels.arguments import TENSORS, Argument, flat_results, flatten, unflatten
from tpu_kernels.derivatives import Derivatives
from tpu_kernels.tracing import Traced, absent_chip, is_wide, trace
from tpu_kernels.values import exact


class FlatOp:
    """An op ``ns::name`` whose arguments are tensors, lists of tensors, numbers and texts.

    Args:
        name: ``"namespace::name"``.
        arguments: Of the schema, in order.
        returns: ``"Tensor"`` or ``"Tensor[]"`` for each result.
        fn: Called with the arguments, JAX arrays in place of tensors; gives one value a return.
        differentiable: Whether gradients flow; if not, results require none.
        backward: See `tpu_kernels.derivatives`; `jax.vjp` unless given.
        origin: The user's function, for messages.
        like: Gives those tensors of the arguments that its one list of results is like, where that
            is known without tracing.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[Argument],
        returns: Sequence[str],
        fn: Callable[..., Sequence[Any]],
        *,
        differentiable: bool = True,
        backward: Callable[..., Sequence[Any]] | None = None,
        origin: Callable[..., Any] | None = None,
        like: Callable[[Sequence[Any]], list[torch.Tensor]] | None = None,
    ) -> None:
        self.name, self.arguments, self.returns, self.fn = name, arguments, returns, fn
        self.origin, self._like = origin, like
        self._settings = JaxSettings()  # of JAX, when the op was last called
        self._traced: dict[Any, tuple[Traced, list[int]]] = {}
        self._derivatives = Derivatives(arguments, returns, fn, backward)
        self.namespace, self.short = name.split("::")
        self.library = torch.library.Library(self.namespace, "FRAGMENT")
        self.library.define(self.schema())
        packet = getattr(getattr(torch.ops, self.namespace), self.short)
        self.overload: torch._ops.OpOverload = packet.default
        torch.library.register_fake(name, self._meta, lib=self.library)
        self.library.impl(self.short, self._batched, "FuncTorchBatched", with_keyset=True)
        self.library.impl(self.short, self._batched_gradients, "Batched")
        static = tuple(a.name for a in arguments if a.type not in TENSORS)
        register(
            f"{self.namespace}.{self.short}.default",
            self._lower,
            static=static,
            location=_location(origin or fn),
            identity=self._identity,
        )
        derivatives = (self._define_backward, self._define_forward) if differentiable else None
        record_op(name, is_differentiable=differentiable, derivatives=derivatives)

    def schema(
        self,
        name: str | None = None,
        arguments: Sequence[Argument] | None = None,
        returns: Sequence[str] | None = None,
    ) -> str:
        """``"name(Tensor x, int n) -> Tensor"``: its own, or that of others in their place."""
        arguments = self.arguments if arguments is None else arguments
        returns = self.returns if returns is None else returns
        parts = (f"{a.type} {a.name}" + (f"={a.default}" if a.default else "") for a in arguments)
        results = returns[0] if len(returns) == 1 else f"({', '.join(returns)})"
        return f"{name or self.short}({', '.join(parts)}) -> {results}"

    # --- tracing ---------------------------------------------------------------------------------

    def traced(self, values: Sequence[Any]) -> tuple[Traced, list[int]]:
        """The traced function for arguments of these shapes, and lengths of its list results.

        Args:
            values: The schema's arguments, with anything that has shape and dtype for tensors.
        """
        flat = flatten(self.arguments, values)
        given = [x for x in flat if x is not None]
        avals = [jax.ShapeDtypeStruct(tuple(x.shape), np.dtype(x.dtype)) for x in given]
        # What is recorded is lowered later.
        settings = JaxSettings.recorded() or self._settings
        wide = is_wide(avals, settings.enable_x64)
        rest = unflatten(self.arguments, values, (None if x is None else "" for x in flat))
        chip = absent_chip()
        key = (tuple((a.shape, a.dtype) for a in avals), _frozen(rest), settings, chip)
        found = self._traced.get(key)
        if found is None:
            lengths: list[int] = []

            def flat_fn(*arrays: Any) -> list[Any]:
                lengths.clear()
                return flat_results(self.returns, self._call(values, flat, arrays), lengths)

            traced = trace(self.name, flat_fn, avals, wide, self.origin, chip, settings)
            found = self._traced[key] = traced, lengths
        return found

    def _call(self, values: Sequence[Any], flat: Sequence[Any], arrays: Sequence[Any]) -> Any:
        stream = iter(arrays)
        filled = [None if x is None else next(stream) for x in flat]
        return self.fn(*unflatten(self.arguments, values, filled))

    def _structured(self, flat: Iterable[Any], lengths: Sequence[int]) -> Any:
        stream, sizes_ = iter(flat), iter(lengths)
        found = tuple(
            [next(stream) for _ in range(next(sizes_))] if kind == "Tensor[]" else next(stream)
            for kind in self.returns
        )
        return found[0] if len(found) == 1 else found

    # --- what the registry and the dispatcher call -----------------------------------------------

    def _lower(self, *values: Any, **keywords: Any) -> Any:
        values = self.positional(values, keywords)
        traced, lengths = self.traced(values)
        arrays = [x for x in flatten(self.arguments, values) if x is not None]
        results = self._structured(traced.call(*arrays), lengths)
        return (results,) if isinstance(results, list) else results

    def _identity(self, *values: Any, **keywords: Any) -> str:
        traced = self.traced(self.positional(values, keywords))[0]
        settings = JaxSettings.recorded() or self._settings
        # A jaxpr does not say what a key's random numbers are.
        return f"{traced.digest} {settings.text()}"

    def positional(self, values: Sequence[Any], keywords: dict[str, Any]) -> tuple[Any, ...]:
        """All arguments in the schema's order, defaults included."""
        rest = self.overload._schema.arguments[len(values) :]
        return (*values, *(keywords.get(a.name, a.default_value) for a in rest))

    def _meta(self, *values: Any, **keywords: Any) -> Any:
        self._settings = JaxSettings.in_force()
        values = self.positional(values, keywords)
        tensors = [t for t in flatten(self.arguments, values) if t is not None]
        device = tensors[0].device
        for t in tensors:
            to_numpy_dtype(t.dtype)
        if any(isinstance(n, torch.SymInt) for t in tensors for n in t.shape):
            if self._like is not None:
                return [torch.empty_like(t) for t in self._like(values)]
            out, lengths = self._symbolic(values, tensors)
        else:
            twins = (_aval(t) for t in flatten(self.arguments, values))
            traced, lengths = self.traced(unflatten(self.arguments, values, twins))
            out = [(o.shape, o.dtype) for o in traced.out]
        made = [torch.empty(shape, dtype=_torch_dtype(self, d), device=device) for shape, d in out]
        return self._structured(made, lengths)

    def _symbolic(
        self, values: Sequence[Any], tensors: Sequence[torch.Tensor]
    ) -> tuple[list[Any], list[int]]:
        """Shapes of the results for symbolic sizes; numbers where the function asks for them."""
        lengths: list[int] = []
        scope = symbolic_shapes.Scope(tensors)
        flat = flatten(self.arguments, values)
        wide = is_wide([_Typed(t) for t in tensors], self._settings.enable_x64)

        def flat_fn(*arrays: Any) -> list[Any]:
            lengths.clear()
            return flat_results(self.returns, self._call(values, flat, arrays), lengths)

        avals = [
            jax.ShapeDtypeStruct(shape, to_numpy_dtype(t.dtype))
            for shape, t in zip(scope.shapes, tensors)
        ]
        found = symbolic_shapes.evaluate(self.name, flat_fn, avals, wide)
        if found is None or not scope.holds(flat_fn, avals, found, wide):
            twins = (_aval(t, int) for t in flat)
            traced, lengths = self.traced(unflatten(self.arguments, values, twins))
            return [(o.shape, o.dtype) for o in traced.out], lengths
        return [(scope.torch_shape(o.shape), o.dtype) for o in found], lengths

    def on_cpu(self, reference: Callable[..., Any] | None) -> None:
        """Have CPU tensors computed by a PyTorch function of the schema's arguments, or refused."""
        if reference is None:
            self.library.impl(self.short, self._refuse_cpu, "CPU")
        else:
            for key in ("CPU", "AutogradCPU"):
                self.library.impl(self.short, reference, key)

    def _refuse_cpu(self, *_: Any, **__: Any) -> Any:
        raise UnsupportedOpError(
            f"{self.name} computes by JAX on device 'tpu', and its tensors are on the CPU.",
            remedy='Move them (x.to("tpu")), or give jax_op a PyTorch function for the CPU: cpu=f.',
        )

    def autocast(self, dtype: torch.dtype) -> None:
        """Cast floating-point tensors to ``dtype`` where autocast is on."""

        def cast(keys: Any, *values: Any, **keywords: Any) -> Any:
            filled = self.positional(values, keywords)
            flat = (_lower_precision(t, dtype) for t in flatten(self.arguments, filled))
            with torch.autocast("tpu", enabled=False):
                return self.overload(*unflatten(self.arguments, filled, flat))

        self.library.impl(self.short, cast, "AutocastPrivateUse1", with_keyset=True)

    # --- the ops of its gradient and of its batches ----------------------------------------------

    def companion(
        self,
        suffix: str,
        arguments: Sequence[Argument],
        returns: Sequence[str],
        fn: Callable[..., Sequence[Any]],
        like: Callable[[Sequence[Any]], list[torch.Tensor]] | None = None,
    ) -> FlatOp:
        """Define the op ``name_suffix``, which belongs to this one and computes ``fn``."""
        plain = [Argument(a.name, a.type) for a in arguments]
        op = FlatOp(f"{self.name}_{suffix}", plain, returns, fn, origin=self.origin, like=like)
        op.on_cpu(None)
        return op

    def _define_backward(self) -> None:
        arguments = (Argument("grads", "Tensor?[]"), *self.arguments, Argument("wanted", "int[]"))

        def like(values: Sequence[Any]) -> list[torch.Tensor]:
            flat = flatten(self.arguments, values[1:-1])
            return [flat[i] for i in values[-1]]

        self.companion("backward", arguments, ["Tensor[]"], self._derivatives.gradients, like)

    def _define_forward(self) -> None:
        arguments = (Argument("tangents", "Tensor?[]"), *self.arguments)
        self.companion("jvp", arguments, ["Tensor[]"], self._derivatives.tangents)

    def _batched(self, keys: Any, *values: Any, **keywords: Any) -> Any:
        from torch._functorch.autograd_function import custom_function_call_vmap_helper
        from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

        def rule(info: Any, in_dims: Any, *values: Any) -> Any:
            dims = flatten(self.arguments, _dims_like(self.arguments, values, in_dims))
            flat = [-1 if d is None else d for d in dims]
            results = self._vmap_op()(*values, flat, int(info.batch_size))
            return results, jax.tree.map(lambda _: 0, results)

        interpreter: Any = retrieve_current_functorch_interpreter()
        return custom_function_call_vmap_helper(
            interpreter,
            rule,
            self.overload,
            *self.positional(values, keywords),
        )

    def _batched_gradients(self, *values: Any, **keywords: Any) -> Any:
        """The op in ``is_grads_batched=True`` and in vectorized Jacobians: see `first_vmap`."""
        values = self.positional(values, keywords)
        flat = flatten(self.arguments, values)
        level = first_vmap.innermost_level(flat)
        dims = [-1] * len(flat)
        size = 0
        for i, t in enumerate(flat):
            if t is not None:
                flat[i], is_batched = first_vmap.unbatched(t, level)
                if is_batched:
                    dims[i], size = 0, flat[i].shape[0]
        results = self._vmap_op()(*unflatten(self.arguments, values, flat), dims, size)
        return jax.tree.map(lambda r: first_vmap.batched(r, level), results)

    def _vmap_op(self) -> torch._ops.OpOverload:
        if getattr(self, "_vmapped", None) is None:
            arguments = (
                *self.arguments,
                Argument("batch_dims", "int[]"),
                Argument("batch_size", "int"),
            )
            op = self.companion("vmap", arguments, self.returns, self._batch)
            self._vmapped: torch._ops.OpOverload | None = op.overload
        assert self._vmapped is not None
        return self._vmapped

    def _batch(self, *rest: Any) -> Any:
        *values, dims, size = rest
        flat = flatten(self.arguments, values)
        present = [i for i, x in enumerate(flat) if x is not None]

        def one(*arrays: Any) -> Any:
            filled = dict(zip(present, arrays))
            flat_one = [filled.get(i) for i in range(len(flat))]
            return tuple(self.fn(*unflatten(self.arguments, values, flat_one)))

        axes = tuple(None if dims[i] < 0 else dims[i] for i in present)
        return jax.vmap(one, in_axes=axes, axis_size=size)(*(flat[i] for i in present))


class _Typed:
    """The dtype of a tensor under numpy's name."""

    def __init__(self, t: torch.Tensor) -> None:
        self.dtype = to_numpy_dtype(t.dtype)


def _aval(t: torch.Tensor | None, size: Callable[[Any], int] = int) -> Any:
    if t is None:
        return None
    return jax.ShapeDtypeStruct(tuple(map(size, t.shape)), to_numpy_dtype(t.dtype))


def _torch_dtype(op: FlatOp, dtype: Any) -> torch.dtype:
    found = to_torch_dtype(dtype) if isinstance(dtype, np.dtype) else None
    if found is None:
        raise JaxFunctionError(
            f"The JAX function of {op.name} returns an array of dtype {dtype}, which PyTorch does "
            "not have.",
            remedy="Convert it in the function; of a random key return jax.random.key_data(key).",
        )
    return found


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else exact(value)


def _lower_precision(t: Any, dtype: torch.dtype) -> Any:
    castable = t is not None and t.is_floating_point() and t.dtype != torch.float64
    return t.to(dtype) if castable else t


def _dims_like(
    arguments: Sequence[Argument], values: Sequence[Any], in_dims: Sequence[Any]
) -> list[Any]:
    """Batch dims of each argument, with a list for each list of tensors."""

    def spread(argument: Argument, value: Any, dims: Any) -> Any:
        is_list = argument.type.endswith("[]") and argument.type in TENSORS
        return [None] * len(value) if is_list and dims is None else dims

    return [spread(*item) for item in zip(arguments, values, in_dims)]


def _location(fn: Callable[..., Any]) -> str:
    code = getattr(getattr(fn, "__wrapped__", fn), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else type(fn).__name__


hide_lines_of(__file__)
