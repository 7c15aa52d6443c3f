"""A JAX function as an op: in eager, with gradients, batched, compiled and exported."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
import torch
from jax import lax
from jaxtyping import Float

from tpu_kernels import JaxOp, jax_op
from tpu_kernels.signature import signature_of

_numbers = itertools.count()


def new_name() -> str:
    return f"test_jax_op::op{next(_numbers)}"


def make(fn: Callable[..., Any], **options: Any) -> JaxOp:
    return jax_op(new_name(), fn, **options)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def softcap(x: jax.Array, cap: float = 30.0) -> jax.Array:
    return cap * jnp.tanh(x / cap)


def reference(x: torch.Tensor, cap: float = 30.0) -> torch.Tensor:
    return cap * torch.tanh(x / cap)


SOFTCAP = make(softcap)


def test_values_and_gradients() -> None:
    grads = []
    for device, f in (("cpu", reference), ("tpu", SOFTCAP)):
        x = torch.linspace(-50, 50, 7).to(device).requires_grad_()
        y = f(x, cap=10.0)
        y.square().sum().backward()
        grads.append((y.detach().cpu(), x.grad.cpu()))
    torch.testing.assert_close(grads[1], grads[0])


def scan_cumsum(x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, a: (c + a, jnp.sin(c + a)), jnp.zeros_like(x[0]), x)[1]


def while_loop(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 3, lambda i, a: a * jnp.cos(a) + i, x)


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    return x * 3


clipped.defvjp(lambda x: (x * 3, None), lambda _, g: (g * 3,))


@pytest.mark.parametrize(
    "fn, shapes",
    [
        (lambda x: jnp.sin(x) * jnp.exp(-x), [(3, 2)]),
        (lambda a, b: a @ b, [(2, 3), (3, 2)]),
        (lambda x: jax.nn.softmax(x, -1), [(2, 3)]),
        (lambda x: jax.scipy.special.logsumexp(x, 0), [(3, 2)]),
        (lambda a: jnp.linalg.inv(a + 3 * jnp.eye(3)), [(3, 3)]),
        (
            lambda x, w: lax.conv(x[None, None], w[None, None], (1, 1), "SAME")[0, 0],
            [(4, 3), (2, 2)],
        ),
        (scan_cumsum, [(3, 2)]),
        (while_loop, [(3,)]),
        (lambda x, y: jnp.where(x > y, x * y, y / (1 + x * x)), [(4,), (4,)]),
        (lambda x: jnp.einsum("ij,kj->ik", x, x)[jnp.array([1, 0])], [(2, 3)]),
        (clipped, [(3,)]),
        (lambda x: jnp.abs(jnp.fft.fft(x)) ** 2, [(5,)]),
        (lambda x: jnp.fft.rfft(x), [(4,)]),
        (lambda a, b: jnp.linalg.solve(a + 3 * jnp.eye(3), b), [(3, 3), (3, 2)]),
        (lambda a: jnp.linalg.cholesky(a @ a.T + 3 * jnp.eye(3)), [(3, 3)]),
        (lambda x: jax.ops.segment_sum(x, jnp.array([0, 2, 0, 1]), 3), [(4, 2)]),
        (lambda x: jnp.sort(x)[::-1] * jnp.arange(4.0), [(4,)]),
        (lambda x, y: lax.cond(x[0] > 0, lambda: jnp.sin(x) * y, lambda: x * y**2), [(3,), (3,)]),
    ],
)
def test_gradcheck(fn: Callable[..., Any], shapes: list[tuple[int, ...]]) -> None:
    inputs = [torch.randn(s, dtype=torch.float64).to("tpu").requires_grad_() for s in shapes]
    assert torch.autograd.gradcheck(make(fn), inputs, fast_mode=True)


def test_gradgradcheck() -> None:
    x = torch.randn(3, dtype=torch.float64).to("tpu").requires_grad_()
    assert torch.autograd.gradgradcheck(make(lambda x: jnp.sin(x) * x[::-1]), (x,), fast_mode=True)


def test_gradients_of_complex_values() -> None:
    x = torch.randn(3, dtype=torch.complex128).to("tpu").requires_grad_()
    assert torch.autograd.gradcheck(
        make(lambda x: x * x * jnp.conj(x[::-1]) + jnp.abs(x)), (x,), fast_mode=True
    )


def test_the_gradient_of_an_argument_that_needs_none_is_not_computed() -> None:
    op = make(lambda x, y: x * y)
    x = torch.ones(3, device="tpu", requires_grad=True)
    y = torch.full((3,), 2.0, device="tpu")
    op(x, y).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2, 2, 2]
    assert y.grad is None


def test_several_results_some_of_them_integers() -> None:
    @jax_op(new_name())
    def top(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
        return tuple(lax.top_k(x, k))

    x = torch.tensor([3.0, 1.0, 2.0], device="tpu", requires_grad=True)
    values, indices = top(x, 2)
    assert values.tolist() == [3, 2] and indices.tolist() == [0, 2]
    assert not indices.requires_grad
    values.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1, 0, 1]


def test_a_backward_that_was_given() -> None:
    def backward(grad: jax.Array, x: jax.Array, factor: int) -> tuple[Any, None]:
        return grad * factor * 100, None

    @jax_op(new_name(), backward=backward)
    def scaled(x: jax.Array, factor: int) -> jax.Array:
        return x * factor

    x = torch.ones(2, device="tpu", requires_grad=True)
    scaled(x, 2).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [200, 200]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_backward_may_leave_broadcast_dimensions_to_be_summed(compiled: bool) -> None:
    def add(x: jax.Array, bias: jax.Array, scale: jax.Array) -> jax.Array:
        return (x + bias) * scale

    def backward(grad: jax.Array, x: Any, bias: Any, scale: Any) -> tuple[Any, ...]:
        return grad * scale, grad * scale, grad * (x + bias)

    op = make(add, backward=backward)
    for rows in (2, 5):
        given = [torch.randn(rows, 3), torch.randn(3), torch.randn(rows, 1)]
        ours, theirs = ([t.to(device).requires_grad_() for t in given] for device in ("tpu", "cpu"))
        f = (
            torch.compile(lambda *a: op(*a) * 2, dynamic=True)
            if compiled
            else lambda *a: op(*a) * 2
        )
        f(*ours).sum().backward()
        x, bias, scale = theirs
        ((x + bias) * scale * 2).sum().backward()
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a.grad.cpu(), b.grad)


def test_a_backward_of_a_pytree_with_none() -> None:
    def total(p: dict[str, jax.Array], extra: jax.Array | None = None) -> jax.Array:
        return p["a"].sum() + p["b"].sum()

    op = make(total, backward=lambda g, p, extra: ({"a": None, "b": g * p["b"]}, None))
    a, b = (torch.full((3,), n, device="tpu", requires_grad=True) for n in (2.0, 3.0))
    op({"a": a, "b": b}).backward()
    assert b.grad is not None and b.grad.tolist() == [3, 3, 3]
    assert a.grad is not None and a.grad.tolist() == [0, 0, 0]


def test_an_op_that_is_not_differentiable() -> None:
    op = make(lambda x: x * 2, differentiable=False)
    assert not op(torch.ones(2, device="tpu", requires_grad=True)).requires_grad


def test_pytrees_in_and_out() -> None:
    class Pair(NamedTuple):
        left: jax.Array
        right: jax.Array

    @jax_op(new_name())
    def f(params: dict[str, Any], *rest: jax.Array, flip: bool = False) -> Pair:
        total = sum(rest) + params["layers"][0]
        return Pair(total, params["b"]) if not flip else Pair(params["b"], total)

    x = torch.ones(2, device="tpu", requires_grad=True)
    params = {"layers": [x], "b": x * 3}
    out = f(params, x, x)
    assert isinstance(out, Pair)
    assert out.left.tolist() == [3, 3]
    (out.left + out.right).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [6, 6]
    assert f(params, x, flip=True).right.tolist() == [2, 2]


def test_an_optional_argument() -> None:
    @jax_op(new_name())
    def f(x: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        return x if bias is None else x + bias

    x = torch.ones(2, device="tpu", requires_grad=True)
    assert f(x).tolist() == [1, 1]
    y = f(x, x)
    assert y.tolist() == [2, 2]
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2, 2]


@pytest.mark.parametrize("array", [Annotated[jax.Array, "rows"], Float[jax.Array, "rows"]])
def test_annotations_with_a_shape(array: Any) -> None:
    def both(x: Any, bias: Any = None) -> Any:
        return x, x if bias is None else x + bias

    both.__annotations__ = {"x": array, "bias": array | None, "return": tuple[array, array]}
    found = signature_of("both", both, ())
    assert [p.type for p in found.parameters] == ["Tensor", "Tensor?"]
    assert (found.returns, found.is_tuple) == (2, True)


def test_static_arguments_that_are_any_values() -> None:
    @jax_op(new_name(), static=("axes",))
    def f(x: jax.Array, act: Callable[..., Any], axes: Any = (0,)) -> jax.Array:
        return act(x).sum(axes)

    x = torch.ones(2, 3, device="tpu")
    assert f(x, jnp.negative).tolist() == [-2, -2, -2]
    assert f(x, jnp.exp2, (0, 1)).item() == 12
    assert f(x, jnp.exp2, axes=(1,)).tolist() == [6, 6]


def test_values_of_static_arguments_that_are_equal_but_of_other_types() -> None:
    @jax_op(new_name(), static=("n",))
    def f(x: jax.Array, n: Any) -> jax.Array:
        return x * (10 if n is True else n)

    x = torch.ones(1, device="tpu")
    assert [f(x, n).item() for n in (1, True, 1.0)] == [1, 10, 1]


def test_arguments_that_are_written() -> None:
    @jax_op(new_name(), mutates="cache")
    def update(cache: jax.Array, new: jax.Array, position: int) -> tuple[jax.Array, jax.Array]:
        return new.sum(), lax.dynamic_update_slice(cache, new, (position,))

    cache = torch.zeros(5, device="tpu")
    view = cache[1:3]
    version = cache._version
    total = update(cache, torch.ones(2, device="tpu"), 1)
    assert total.item() == 2
    assert cache.tolist() == [0, 1, 1, 0, 0] and view.tolist() == [1, 1]
    assert cache._version > version
    assert "Tensor(a!) cache" in str(update.overload._schema)
    update(cache[3:], torch.full((1,), 7.0, device="tpu"), 0)
    assert cache.tolist() == [0, 1, 1, 7, 0]


def test_a_written_argument_passes_gradients_on() -> None:
    add = make(lambda x, y: x + 2 * y, mutates="x")
    y = torch.ones(2, device="tpu", requires_grad=True)
    x = y * 1
    assert add(x, y) is None
    x.sum().backward()
    assert y.grad is not None and y.grad.tolist() == [3, 3]


def test_written_arguments_under_compile() -> None:
    update = make(lambda cache, new: cache.at[1:3].set(new), mutates="cache")
    f = torch.compile(lambda c, n: (update(c, n), c * 2)[1], fullgraph=True)
    cache = torch.zeros(4, device="tpu")
    assert f(cache, torch.ones(2, device="tpu")).tolist() == [0, 2, 2, 0]
    assert cache.tolist() == [0, 1, 1, 0]


def test_vmap() -> None:
    op = make(lambda x, w: jnp.tanh(x @ w).sum())
    x, w = torch.randn(5, 3), torch.randn(3, 3, 4)
    want = torch.func.vmap(lambda x, w: torch.tanh(x @ w).sum(), in_dims=(0, None))
    batched = torch.func.vmap(op, in_dims=(0, None))
    torch.testing.assert_close(batched(x.to("tpu"), w[0].to("tpu")).cpu(), want(x, w[0]))
    twice = torch.func.vmap(batched, in_dims=(None, 0))(x.to("tpu"), w.to("tpu"))
    torch.testing.assert_close(twice.cpu(), torch.func.vmap(want, in_dims=(None, 0))(x, w))


def test_vmap_over_part_of_a_pytree() -> None:
    @jax_op(new_name())
    def f(p: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        return {"y": p["a"] * x + p["b"]}

    p = {"a": torch.arange(3.0).to("tpu"), "b": torch.ones(2, device="tpu")}
    x = torch.ones(2, device="tpu")
    for _ in range(2):
        y = torch.func.vmap(f, in_dims=({"a": 0, "b": None}, None))(p, x)["y"]
        assert y.tolist() == [[1, 1], [2, 2], [3, 3]]


def test_gradients_of_single_examples() -> None:
    x = torch.randn(4)
    gradient = torch.func.vmap(torch.func.grad(lambda x: SOFTCAP(x, 2.0)))
    want = torch.func.vmap(torch.func.grad(lambda x: reference(x, 2.0)))
    torch.testing.assert_close(gradient(x.to("tpu")).cpu(), want(x))
    jacobian = torch.func.jacrev(lambda x: SOFTCAP(x, 2.0))(x.to("tpu"))
    torch.testing.assert_close(jacobian.cpu(), torch.func.jacrev(lambda x: reference(x, 2.0))(x))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    def run(op: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        return (op(x * 2, 10.0) @ op(x, 1.0).t()).sum(0)

    compiled = torch.compile(lambda x: run(SOFTCAP, x), fullgraph=True, dynamic=dynamic)
    for n in (3, 5, 6):
        x = torch.randn(n, 4)
        device_x = x.to("tpu").requires_grad_()
        x.requires_grad_()
        want, got = run(reference, x), compiled(device_x)
        want.square().sum().backward()
        got.square().sum().backward()
        torch.testing.assert_close(got.cpu(), want)
        torch.testing.assert_close(device_x.grad.cpu(), x.grad)


def test_pytrees_under_compile() -> None:
    @jax_op(new_name())
    def f(p: dict[str, jax.Array], n: int) -> dict[str, jax.Array]:
        return {"sum": p["a"] + n * p["b"], "first": p["a"]}

    def run(p: dict[str, torch.Tensor]) -> torch.Tensor:
        out = f({"b": p["b"], "a": p["a"] * 2}, 3)
        return out["sum"] * out["first"]

    p = {name: torch.full((2,), n, device="tpu") for name, n in (("a", 1.0), ("b", 2.0))}
    assert torch.compile(run, fullgraph=True)(p).tolist() == run(p).tolist() == [16, 16]


def test_sizes_that_vary_are_not_asked_for_again() -> None:
    def doubled(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x, x.reshape(-1, 1)[:, 0]])

    f = torch.compile(make(doubled), fullgraph=True, dynamic=True)
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for n in (3, 5, 9):
        assert f(torch.ones(n, device="tpu")).shape == (2 * n,)
    assert graphs["unique_graphs"] - before == 1


def test_a_function_that_must_know_a_size_is_compiled_for_each() -> None:
    op = make(lambda x: x[: x.shape[0] // 2] if x.shape[0] % 2 == 0 else x)
    f = torch.compile(lambda x: op(x) + 1, fullgraph=True, dynamic=True)
    assert [f(torch.ones(n, device="tpu")).shape[0] for n in (3, 4, 8)] == [3, 2, 4]


def test_exported() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return SOFTCAP(x, 2.0) + 1

    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(
        Model(), (torch.randn(3, 2, device="tpu"),), dynamic_shapes=({0: batch},)
    )
    targets = [n.target for n in program.graph.nodes if n.op == "call_function"]
    assert SOFTCAP.overload in targets
    x = torch.randn(5, 2)
    torch.testing.assert_close(program.module()(x.to("tpu")).cpu(), reference(x, 2.0) + 1)


def test_calls_are_fused_with_the_ops_around_them() -> None:
    x = torch.ones(8, device="tpu", requires_grad=True)

    def step() -> torch.Tensor:
        (g,) = torch.autograd.grad((SOFTCAP(x * 2, 3.0) + 1).sum(), x)
        return g

    with torch.tpu.set_eager_mode("fused"):
        step().cpu()
        before = torch.tpu.metrics()
        step().cpu()
        after = torch.tpu.metrics()
    assert after["executions"] - before["executions"] == 1
    assert after["compiles"] == before["compiles"]


def test_constants_that_the_function_closes_over() -> None:
    table = jnp.arange(6.0).reshape(2, 3)
    other = table + 1
    x = torch.ones(3, device="tpu")
    assert make(lambda x: table @ x)(x).tolist() == [3, 12]
    assert make(lambda x: other @ x)(x).tolist() == [6, 15]


def test_autocast() -> None:
    op = make(lambda x, y: x * y, cast_inputs=torch.bfloat16)
    x = torch.ones(2, device="tpu", requires_grad=True)
    assert op(x, x).dtype == torch.float32
    with torch.autocast("tpu"):
        y = op(x, x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32 and x.grad.tolist() == [2, 2]


def test_a_reference_for_the_cpu() -> None:
    op = make(softcap, cpu=reference)
    x = torch.randn(3, requires_grad=True)
    op(x, 2.0).sum().backward()
    want = torch.autograd.grad(reference(x, 2.0).sum(), x)[0]
    torch.testing.assert_close(x.grad, want)


def test_dtypes_inside_the_function_are_those_of_jax() -> None:
    op = make(lambda x, i: x * jnp.ones(2) + i)
    x, i = torch.ones(2, device="tpu"), torch.tensor([1, 2], device="tpu")
    assert op(x, i).dtype == torch.float32
    assert op(x.double(), i).dtype == torch.float64
    assert make(lambda i: i * 2)(i).dtype == torch.int32


def test_views_and_low_precision() -> None:
    x = torch.randn(4, 6).to(torch.bfloat16)
    op = make(lambda x: x * 2)
    assert torch.equal(op(x.to("tpu").t()[1:3]).cpu(), x.t()[1:3] * 2)


def test_random_numbers_from_a_key() -> None:
    def draw(seed: jax.Array, n: int) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), (n,))

    got = make(draw)(torch.tensor(7, dtype=torch.int32, device="tpu"), 4)
    torch.testing.assert_close(
        got.cpu(), torch.tensor(jax.random.normal(jax.random.key(7), (4,)).tolist())
    )


def test_gradients_where_an_argument_or_a_gradient_is_missing() -> None:
    @jax_op(new_name())
    def f(x: jax.Array, bias: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        y = x**3 if bias is None else x**3 + bias
        return y, x * 2

    x = torch.full((2,), 2.0, device="tpu", requires_grad=True)
    (first,) = torch.autograd.grad(f(x)[0].sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert first.tolist() == [12, 12] and second.tolist() == [12, 12]


def test_checkpointing_and_inference_mode() -> None:
    x = torch.linspace(-1, 1, 4).to("tpu").requires_grad_()
    y = torch.utils.checkpoint.checkpoint(lambda x: SOFTCAP(x * 2, 3.0), x, use_reentrant=False)
    (g,) = torch.autograd.grad(y.sum(), x)
    (want,) = torch.autograd.grad(SOFTCAP(x * 2, 3.0).sum(), x)
    assert torch.equal(g.cpu(), want.cpu())
    with torch.inference_mode():
        assert torch.equal(SOFTCAP(x * 2, 3.0).cpu(), y.detach().cpu())


def test_a_graph_is_walked_once() -> None:
    x = torch.ones(2, device="tpu", requires_grad=True)
    y = SOFTCAP(x, 2.0).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


def test_a_saved_argument_that_was_written() -> None:
    x = torch.ones(2, device="tpu", requires_grad=True)
    h = x * 1
    y = SOFTCAP(h, 2.0).sum()
    h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
