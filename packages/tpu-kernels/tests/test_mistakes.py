"""What is said where a function cannot be an op, or is called as it cannot be."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from tpu_core.config import override
from tpu_core.errors import JaxFunctionError, NonFiniteError, UnsupportedOpError
from tpu_kernels import JaxOp, jax_op, pallas_call

_numbers = itertools.count()
KEPT: list[Any] = []


def test_decorator_without_a_name() -> None:
    message = r"Name the op: @jax_op\(\"my::prints\"\) above the function"
    with pytest.raises(TypeError, match=message):
        jax_op(prints)  # type: ignore[call-overload]  # the mistake


def make(fn: Callable[..., Any], **options: Any) -> JaxOp:
    return jax_op(f"test_mistakes::op{next(_numbers)}", fn, **options)


def keeps_in_a_global(x: jax.Array) -> jax.Array:
    KEPT.append(x * 2)
    return x


def keeps_in_a_closure() -> Callable[..., Any]:
    held: dict[str, Any] = {}

    def f(x: jax.Array) -> jax.Array:
        held["x"] = x
        return x

    return f


class Counter:
    def count(self, x: jax.Array) -> jax.Array:
        self.last = x.sum()
        return x


def uses_what_was_kept() -> Callable[..., Any]:
    class Holder:
        x: Any = None

    def f(x: jax.Array) -> jax.Array:
        previous, Holder.x = Holder.x, x
        return x if previous is None else x + previous[:1]

    return f


def prints(x: jax.Array) -> jax.Array:
    jax.debug.print("{}", x)
    return x


def calls_back(x: jax.Array) -> jax.Array:
    return jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def branches(x: jax.Array) -> jax.Array:
    return x if x.sum() > 0 else -x


def returns_two(x: jax.Array) -> jax.Array:
    return x, x  # type: ignore[return-value]  # the mistake


def returns_one(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x  # type: ignore[return-value]  # the mistake


def returns_none(x: jax.Array) -> jax.Array:
    return None  # type: ignore[return-value]  # the mistake


def returns_text(x: jax.Array) -> dict[str, Any]:
    return {"x": x, "name": "y"}


def returns_a_key(x: jax.Array) -> jax.Array:
    return jax.random.key(0)


@pytest.mark.parametrize(
    "fn, text",
    [
        (keeps_in_a_global, "leaks a traced value: global 'KEPT' holds one after the call"),
        (keeps_in_a_closure(), "leaks a traced value: 'held' holds one"),
        (Counter().count, "leaks a traced value: Counter holds one"),
        (prints, "has side effects: debug_"),
        (calls_back, "has side effects: pure_callback"),
        (branches, "needs the value of an array while it is traced"),
        (returns_two, "returns a tuple of 2; its annotation says one array"),
        (returns_one, "its annotation says a tuple of 2 arrays"),
        (returns_none, "returns None; its annotation says one array"),
        (returns_text, r"returns a str \('y'\) among its arrays"),
        (returns_a_key, "which PyTorch does not have"),
        (lambda x: x @ jnp.ones((7, 2)), "raised TypeError: dot_general requires"),
        (lambda x: 1 / 0, "raised ZeroDivisionError: division by zero"),
    ],
)
def test_functions_that_cannot_be_ops(fn: Callable[..., Any], text: str) -> None:
    with pytest.raises(JaxFunctionError, match=text) as raised:
        make(fn)(torch.ones(3, device="tpu"))
    KEPT.clear()
    assert "test_mistakes::op" in str(raised.value)
    assert "What to do:" in str(raised.value)


def test_a_traced_value_that_is_used_later() -> None:
    op = make(uses_what_was_kept())
    op(torch.ones(2, device="tpu")).cpu()
    with pytest.raises(JaxFunctionError, match="that an earlier trace has left behind"):
        op(torch.ones(3, device="tpu"))


def test_the_error_names_shapes_and_dtypes() -> None:
    op = make(lambda a, b: a @ b)
    with pytest.raises(JaxFunctionError, match=r"arguments: float32\[2, 3\], int32\[4, 2\]"):
        op(torch.ones(2, 3, device="tpu"), torch.ones(4, 2, dtype=torch.int32, device="tpu"))


def test_an_error_leaves_the_device_usable() -> None:
    op = make(lambda x: x if x.shape[0] > 2 else x @ x.T @ x.reshape(9))
    x = torch.ones(2, device="tpu") * 3
    with pytest.raises(JaxFunctionError):
        op(x)
    assert (x + 1).tolist() == [4, 4]
    assert op(torch.ones(3, device="tpu")).tolist() == [1, 1, 1]


def test_tensors_on_the_cpu() -> None:
    with pytest.raises(UnsupportedOpError, match="its tensors are on the CPU"):
        make(lambda x: x)(torch.ones(2))
    with pytest.raises(RuntimeError, match="same device"):
        make(lambda x, y: x + y)(torch.ones(2, device="tpu"), torch.ones(2))


def test_arguments_that_do_not_fit_the_schema() -> None:
    op = make(lambda x, y: x + y)
    x = torch.ones(2, device="tpu")
    with pytest.raises(RuntimeError, match="missing value for argument 'y'"):
        op(x)
    with pytest.raises(RuntimeError, match="Expected a value of type 'Tensor' for argument 'y'"):
        op(x, {"y": x})

    def tree(p: dict[str, jax.Array], n: list[int]) -> dict[str, jax.Array]:
        return p

    with pytest.raises(TypeError, match="missing a required argument: 'n'"):
        make(tree)({"x": x})
    with pytest.raises(TypeError, match="the pytree 'p' holds float"):
        make(tree)({"x": 1.5}, [1])
    with pytest.raises(TypeError, match="must be hashable, and list is not"):
        make(tree)({"x": x}, [1])


@pytest.mark.parametrize("name", ["f", "my::", "a::b::c", "my::a b"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ValueError, match="is no name of an op"):
        jax_op(name, lambda x: x)


def test_names_that_are_taken() -> None:
    op = make(lambda x: x)
    with pytest.raises(ValueError, match="There is an op .* already"):
        jax_op(op.name, lambda x: x)
    with pytest.raises(ValueError, match="namespace 'aten' is not for ops of your own"):
        jax_op("aten::mine", lambda x: x)


def test_signatures_without_a_schema() -> None:
    with pytest.raises(TypeError, match=r"static names \['n'\], but the function has .*\['x'\]"):
        make(lambda x: x, static=("n",))
    with pytest.raises(TypeError, match=r"\*\*options has no counterpart"):
        make(lambda x, **options: x)
    with pytest.raises(TypeError, match="'y' is no parameter that takes one array"):
        make(lambda x: x, mutates="y")
    with pytest.raises(TypeError, match="must return a tuple of arrays that ends with"):
        make(lambda x, y: x, mutates=("x", "y"))


def test_a_new_value_that_does_not_fit() -> None:
    op = make(lambda x: x[:1], mutates="x")
    with pytest.raises(JaxFunctionError, match="as the new value of 'x', which is torch.float32"):
        op(torch.ones(2, device="tpu"))


def test_a_gradient_with_a_wrong_number_of_values() -> None:
    op = make(lambda x, y: x * y, backward=lambda g, x, y: (g, g, g))
    x = torch.ones(2, device="tpu", requires_grad=True)
    with pytest.raises(JaxFunctionError, match="returns 3 values for the arguments"):
        op(x, x).sum().backward()


def test_a_backward_of_an_op_that_is_not_differentiable() -> None:
    with pytest.raises(ValueError, match="differentiable=False has no use for it"):
        make(lambda x: x, backward=lambda g, x: (g,), differentiable=False)


def total(p: dict[str, jax.Array]) -> jax.Array:
    return p["a"].sum() + p["b"].sum()


@pytest.mark.parametrize(
    "gradient",
    [
        lambda p: {"a": p["a"]},
        lambda p: {"a": p["a"], "c": p["b"]},
        lambda p: {"_": p["a"], "a": p["a"], "b": p["b"]},
        lambda p: [p["a"], p["b"]],
    ],
    ids=["too few", "another key", "too many", "a list"],
)
def test_a_gradient_of_another_pytree(gradient: Callable[..., Any]) -> None:
    op = make(total, backward=lambda g, p: (gradient(p),))
    x = torch.ones(3, device="tpu", requires_grad=True)
    with pytest.raises(JaxFunctionError, match="returns another pytree for 'p' than the argument"):
        op({"a": x, "b": x * 2}).backward()
    assert x.grad is None


@pytest.mark.parametrize(
    ("gradient", "text"),
    [
        (lambda g: g[:2], r"returns the shape \(2,\) as a gradient of 'x', whose shape is \(3,\)"),
        (lambda g: g.sum(), r"returns the shape \(\) as a gradient of 'x'"),
        (lambda g: 0.0, r"returns the shape \(\) as a gradient of 'x'"),
        (lambda g: (g, g), "returns tuple as a gradient of 'x'"),
    ],
)
def test_a_gradient_of_another_shape(gradient: Callable[..., Any], text: str) -> None:
    op = make(lambda x: x * 2, backward=lambda g, x: (gradient(g),))
    x = torch.ones(3, device="tpu", requires_grad=True)
    with pytest.raises(JaxFunctionError, match=text):
        op(x).sum().backward()


def test_forward_mode_where_reverse_mode_alone_is_known() -> None:
    x = torch.ones(2, device="tpu")

    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] * 2

    def double(x: jax.Array) -> jax.Array:
        return pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    op = make(double, backward=lambda grad, x: double(grad))
    with pytest.raises(JaxFunctionError, match="Tangents of an op with a backward of its own"):
        torch.func.jvp(op, (x,), (x,))

    @jax.custom_vjp
    def f(x: jax.Array) -> jax.Array:
        return x

    f.defvjp(lambda x: (x, None), lambda _, grad: (grad,))
    with pytest.raises(JaxFunctionError, match=r"has a jax\.custom_vjp in it"):
        torch.func.jvp(make(f), (x,), (x,))


def test_a_loop_that_has_no_gradient() -> None:
    op = make(lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x * 2, x))
    x = torch.ones(2, device="tpu", requires_grad=True)
    y = op(x)
    assert y.tolist() == [8, 8]
    with pytest.raises(JaxFunctionError, match=r"Write the loop as lax\.scan") as raised:
        y.sum().backward()
    assert "Reverse-mode differentiation does not work" in str(raised.value)


@pytest.mark.filterwarnings("ignore:Error detected in")
def test_nan_in_a_gradient_is_found_by_detect_anomaly() -> None:
    x = torch.zeros(2, device="tpu", requires_grad=True)
    op = make(jnp.sqrt)
    with (
        pytest.raises(RuntimeError, match=r"Function 'op\d+_backward' returned nan values"),
        pytest.warns(UserWarning, match="Anomaly Detection"),
        torch.autograd.detect_anomaly(),
    ):
        (op(x) * 0).sum().backward()


def fails_inside(x: jax.Array) -> jax.Array:
    return x @ jnp.ones((7, 2))


def test_the_error_names_the_line_inside_of_the_function() -> None:
    with pytest.raises(JaxFunctionError) as raised:
        make(lambda x: jax.vmap(fails_inside)(x))(torch.ones(2, 3, device="tpu"))
    line = fails_inside.__code__.co_firstlineno + 1
    assert f"  at {__file__}:{line}\n" in str(raised.value)
    assert raised.value.line == f"{__file__}:{line}"


def test_nan_in_a_gradient_under_debug_mode() -> None:
    op = make(jnp.sqrt)
    x = torch.zeros(2, device="tpu", requires_grad=True)
    torch.autograd.grad(op(x).sum(), x)
    torch.tpu.synchronize()  # autograd's thread may hold the result: its op would be checked below
    backward = getattr(torch.ops.test_mistakes, f"{op.name.split('::')[1]}_backward")
    # Settings of a test do not reach autograd's thread.
    with (
        override(debug_nans=True),
        torch.tpu.set_eager_mode("debug"),
        pytest.raises(NonFiniteError, match=r"op\d+_backward.default produced 2 NaN of 2 values"),
    ):
        backward([torch.zeros_like(x)], x.detach(), [0])


ROOT = """
import jax.numpy as jnp
import torch

from tpu_kernels import jax_op

root = jax_op("test_mistakes::root", lambda x: jnp.sqrt(x))
x = torch.zeros(2, device="tpu", requires_grad=True)
y = root(x).sum() * 0
y.backward()
"""


def test_nan_in_a_gradient_in_a_process_under_debug_mode() -> None:
    environment = {**os.environ, "TPU_EAGER_MODE": "debug", "TPU_DEBUG_NANS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", ROOT], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 1
    assert "test_mistakes.root_backward.default produced 2 NaN of 2 values" in result.stderr
    assert "at <string>:9 in <module>" in result.stderr
