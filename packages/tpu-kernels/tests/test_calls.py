"""JAX libraries and models on tensors, and PyTorch modules in JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

from tpu_kernels import call_jax, from_flax, to_jax_function


class Dense:
    """As a Flax module: parameters apart from the module."""

    def __init__(self, features: int) -> None:
        self.features = features

    def init(self, key: Any, x: Any) -> dict[str, Any]:
        kernel = jax.random.normal(key, (x.shape[-1], self.features))
        dense = {"kernel": kernel, "bias": jnp.ones(self.features)}
        return {"params": {"Dense_0": dense}, "state": {"count": jnp.array(3)}}

    def apply(self, variables: dict[str, Any], x: Any, *, scale: float = 1.0) -> Any:
        p = variables["params"]["Dense_0"]
        return jnp.tanh(x @ p["kernel"] + p["bias"]) * scale


def test_a_function_of_a_jax_library() -> None:
    x = torch.randn(3, 4)
    device_x = x.to("tpu").requires_grad_()
    y = call_jax(jax.scipy.special.logsumexp, device_x, axis=-1)
    y.sum().backward()
    torch.testing.assert_close(y.detach().cpu(), torch.logsumexp(x, -1))
    torch.testing.assert_close(device_x.grad.cpu(), torch.softmax(x, -1))


def test_pytrees_arrays_and_static_arguments() -> None:
    x = torch.ones(2, device="tpu")
    out = call_jax(lambda p, n: {"a": p["x"] * n, "b": p["y"]}, {"x": x, "y": jnp.zeros(3)}, 4)
    assert out["a"].tolist() == [4, 4] and out["b"].tolist() == [0, 0, 0]


def test_a_function_without_a_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="no tensor among the arguments"):
        call_jax(jnp.ones, 3)


def test_lambdas_of_one_code_are_one_function() -> None:
    x = torch.ones(7, device="tpu")
    call_jax(lambda x: x * 5, x).cpu()

    def scaled(factor: int) -> float:
        return call_jax(lambda x: x * factor, x)[0].item()

    def run(factors: list[int]) -> list[float]:
        return [scaled(factor) for factor in factors]

    assert run([2, 3]) == [2, 3]
    before = torch.tpu.metrics()
    assert run([3, 2, 3]) == [3, 2, 3]
    after = torch.tpu.metrics()
    assert after["compiles"] == before["compiles"]
    assert after["signatures"] == before["signatures"]


def test_a_flax_module_trains() -> None:
    flax_model = Dense(2)
    variables = flax_model.init(jax.random.key(0), jnp.ones((1, 3)))
    model = from_flax(flax_model, variables)
    assert [n for n, _ in model.named_parameters()] == [
        "params.Dense_0.bias",
        "params.Dense_0.kernel",
    ]
    assert dict(model.named_buffers())["state.count"].item() == 3
    x = torch.randn(5, 3)
    want = flax_model.apply(variables, jnp.asarray(x.numpy()), scale=2.0)
    out = model(x.to("tpu"), scale=2.0)
    torch.testing.assert_close(out.detach().cpu(), torch.tensor(want.tolist()))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x.to("tpu")).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    # The JAX arrays are the user's.
    assert variables["params"]["Dense_0"]["bias"].tolist() == [1, 1]


def test_a_state_dict_of_a_flax_module() -> None:
    def made(seed: int) -> nn.Module:
        return from_flax(Dense(2), Dense(2).init(jax.random.key(seed), jnp.ones((1, 3))))

    first, second = made(0), made(1)
    second.load_state_dict(first.state_dict())
    x = torch.ones(1, 3, device="tpu")
    assert torch.equal(first(x).cpu(), second(x).cpu())


def test_what_is_no_flax_module() -> None:
    with pytest.raises(TypeError, match=r"with .apply\(params"):
        from_flax(object(), {})


def test_calls_around_a_compiled_function() -> None:
    f = torch.compile(lambda x: call_jax(jnp.tanh, x * 2) + 1)
    x = torch.randn(3)
    torch.testing.assert_close(f(x.to("tpu")).cpu(), torch.tanh(x * 2) + 1)


def test_a_module_as_a_jax_function() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.GELU(), nn.Flatten(), nn.Linear(32, 3)
    ).eval()
    fn, params = to_jax_function(module)
    x = torch.randn(2, 1, 4, 4)
    array = jnp.asarray(x.numpy())
    want = module(x)
    got = jax.jit(fn)(params, array)
    torch.testing.assert_close(torch.tensor(got.tolist()), want, rtol=1e-4, atol=1e-5)

    grads = jax.grad(lambda p: fn(p, array).sum(), allow_int=True)(params)
    want.sum().backward()
    for name, p in module.named_parameters():
        torch.testing.assert_close(torch.tensor(grads[name].tolist()), p.grad, rtol=1e-3, atol=1e-4)


def test_a_module_with_pytrees_and_random_numbers() -> None:
    class Model(nn.Module):
        def forward(self, batch: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
            dropped = torch.nn.functional.dropout(batch["x"], 0.5, self.training)
            return {"y": dropped * scale}

    fn, params = to_jax_function(Model())
    x = {"x": jnp.ones(64)}
    with pytest.raises(ValueError, match="draws random numbers"):
        fn(params, x, 3.0)
    y = fn(params, x, 3.0, key=jax.random.key(0))["y"]
    assert set(y.tolist()) == {0.0, 6.0}
    assert y.tolist() != fn(params, x, 3.0, key=jax.random.key(1))["y"].tolist()
