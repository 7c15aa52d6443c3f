"""Run any PyTorch code on the CPU and check each ATen overload it calls against its lowering.

`CompareLowerings` is a dispatch mode below autograd, so one call of a model's forward and backward
checks every overload they reach. `check_opinfo` drives it by OpInfo's samples.
"""

from __future__ import annotations

from typing import Any

import jax
import torch
from jax.extend.core import jaxprs_in_params
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tpu_core.dtypes import to_numpy_dtype
from tpu_core.lowering.evaluate import call_lowering, drop_arguments, to_jax, to_torch, weak
from tpu_core.lowering.registry import REGISTRY
from tpu_core.pjrt import known_faults

OPTIONS = dict(known_faults.compile_options("cpu"))


class CompareLowerings(TorchDispatchMode):
    """Compare each functional overload that has a lowering with what the CPU computes.

    Args:
        lift: Pass number arguments as run-time inputs, as the recorder does.
        check_width: Also fail where 64-bit arithmetic enters a program of narrower operands.
        tolerance: ``{dtype: (rtol, atol)}`` where `torch.testing`'s defaults are too tight.

    Attributes:
        seen: Overloads compared.
        missing: Overloads called that have no lowering.
        failures: Text of each mismatch.
    """

    def __init__(
        self,
        lift: bool = True,
        tolerance: dict[Any, tuple[float, float]] | None = None,
        check_width: bool = False,
    ):
        super().__init__()
        self.lift = lift
        self.check_width = check_width
        self.tolerance = tolerance or {}
        self.seen: set[str] = set()
        self.missing: set[str] = set()
        self.failures: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        entry = REGISTRY.get(str(func))
        if entry is None:
            self.missing.add(str(func))
            return func(*args, **kwargs)
        frozen_args, frozen_kwargs = tree_map(_clone, (args, kwargs))
        contiguous = tuple(a.is_contiguous() for a in args if isinstance(a, torch.Tensor))
        expected = func(*args, **kwargs)
        if not entry.random and "empty" not in str(func):  # unwritten memory holds anything
            self.seen.add(str(func))
            try:
                self._compare(entry, func, frozen_args, frozen_kwargs, expected, contiguous)
            except Exception as error:  # reported with the op's name by the test
                shapes = tree_map(_describe, (frozen_args, frozen_kwargs))
                self.failures.append(f"{func}{shapes}: {type(error).__name__}: {error}")
        return expected

    def _compare(self, entry, func, args, kwargs, expected, contiguous):
        results = expected if isinstance(expected, tuple) else (expected,)
        results = results if func._schema.returns else ()
        out = tuple(tree_map(_aval, list(results)))
        args, kwargs = drop_arguments(func, args, kwargs)
        names = [a.name for a in func._schema.arguments]
        with jax.enable_x64(True):
            args = tuple(self._operand(entry, n, a, func) for n, a in zip(names, args))
            kwargs = {n: self._operand(entry, n, a, func) for n, a in kwargs.items()}
            program, arrays = _traced(entry, args, kwargs, out, contiguous)
            actual = program.lower().compile(OPTIONS)(*arrays)
            if self.check_width:
                _check_width(program.jaxpr.jaxpr, args, kwargs, out)
        for got, want in zip(actual, results):
            for g, w in zip(_flat(got), _flat(want)):
                if w is None:
                    continue
                rtol, atol = self.tolerance.get(w.dtype, (None, None))
                if w._is_zerotensor():
                    w = w.clone()  # it has no memory, reading it is a segmentation fault
                w = w.detach().resolve_conj().resolve_neg().contiguous()
                torch.testing.assert_close(to_torch(g), w, rtol=rtol, atol=atol, equal_nan=True)

    def _operand(self, entry, name, value, func):
        if isinstance(value, torch.Tensor):
            return to_jax(value)
        if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
            return [to_jax(v) if isinstance(v, torch.Tensor) else v for v in value]
        if not self.lift or name in entry.static:
            return value
        schema = {a.name: a for a in func._schema.arguments}[name]
        # The schema's own type, as the recorder sees it: int stays static, Scalar is lifted. A
        # number in a Tensor's place is a wrapped number (x + 1), lifted as well.
        kind = str(schema.real_type if hasattr(schema, "real_type") else schema.type)
        if kind in LIFTED_LISTS and isinstance(value, (list, tuple)):
            return [_lifted(v) for v in value]
        return _lifted(value) if kind in LIFTED else value


LIFTED = {
    "number", "float", "Optional[number]", "Optional[float]", "Scalar", "Scalar?", "float?",
    "Tensor", "Optional[Tensor]", "Tensor?",
}  # fmt: skip
LIFTED_LISTS = {"List[number]", "Scalar[]"}


def _lifted(x: Any) -> Any:
    number = isinstance(x, (int, float, complex)) and not isinstance(x, bool)
    return weak(x) if number else x


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array)


def _traced(entry: Any, args: Any, kwargs: Any, out: Any, contiguous: Any) -> tuple[Any, list[Any]]:
    """The lowering as one program, as the recorder compiles it, and its run-time inputs."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    at = [i for i, x in enumerate(leaves) if _is_array(x)]

    def call(*values: Any) -> Any:
        filled = list(leaves)
        for i, v in zip(at, values):
            filled[i] = v
        a, k = jax.tree.unflatten(tree, filled)
        return call_lowering(entry, a, k, out, contiguous=contiguous)

    arrays = [leaves[i] for i in at]
    return jax.jit(call).trace(*arrays), arrays


def _check_width(program: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Raise where a program over narrow operands computes on 64-bit floats (numbers apart)."""
    wide = {"float64", "complex128"}
    typed = [x for x in jax.tree.leaves((args, kwargs)) if _is_array(x) and not x.weak_type]
    results = [x for x in jax.tree.leaves(out) if isinstance(x, jax.ShapeDtypeStruct)]
    if any(str(x.dtype) in wide for x in (*typed, *results)):
        return

    def walk(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            for v in (*equation.invars, *equation.outvars):
                if str(getattr(v.aval, "dtype", "")) in wide and v.aval.shape != ():
                    raise AssertionError(f"{v.aval} in {equation}")
            for sub in jaxprs_in_params(equation.params):
                walk(sub)

    walk(program)


def _clone(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else x


def _describe(x: Any) -> Any:
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, torch.Tensor) else x


def _aval(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return jax.ShapeDtypeStruct(tuple(x.shape), to_numpy_dtype(x.dtype))
    return x


def _flat(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (list, tuple)) else [x]


def check_opinfo(
    name: str, dtypes=(torch.float32,), samples: int = 6, grad: bool = True, **options
):
    """Drive `CompareLowerings` with OpInfo's samples of one op; returns the mode.

    Args:
        name: OpInfo's name, ``"nn.functional.gelu"``.
        dtypes: Dtypes to sample, those the op does not support on the CPU left out.
        samples: Samples a dtype.
        grad: Also run the backward pass where the dtype has one.
    """
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo import core

    # Walks the stack for a unittest.TestCase, to note its samples there: 0.2 s each time.
    common_utils.extract_test_fn = core.extract_test_fn = lambda: None
    mode = CompareLowerings(**options)
    for op in (o for o in op_db if o.name == name):
        for dtype in dtypes:
            if dtype not in op.supported_dtypes("cpu"):
                continue
            grads = grad and op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
            inputs = op.sample_inputs("cpu", dtype, requires_grad=grads)
            for _, sample in zip(range(samples), inputs):
                with mode:
                    result = op(sample.input, *sample.args, **sample.kwargs)
                    if grads:
                        outs = [
                            o
                            for o in torch.utils._pytree.tree_leaves(result)
                            if isinstance(o, torch.Tensor) and o.requires_grad and o.numel()
                        ]
                        if outs:
                            torch.autograd.backward(
                                outs, [torch.randn_like(o) for o in outs], retain_graph=False
                            )
    return mode
