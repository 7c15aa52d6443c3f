"""The models as pure JAX functions of a dict of parameters, named as PyTorch names them.

``flat`` chooses the form where there are two: matrix products of ``[batch * time, channels]``, as
PyTorch's `mm` has them, or ``x @ W.T`` on ``[batch, time, channels]``, as JAX is mostly written.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

Params = dict[str, Array]
Cache = list[tuple[Array, Array]]


def cross_entropy(logits: Array, labels: Array) -> Array:
    logits = logits.reshape(-1, logits.shape[-1])
    labels = labels.reshape(-1, 1)
    picked = jnp.take_along_axis(logits, labels, axis=-1)[:, 0]
    return (jax.nn.logsumexp(logits, axis=-1) - picked).mean()


def chain(x: Array) -> Array:
    for _ in range(40):
        x = x * 1.01
        x = x + 0.1
        x = jnp.abs(x)
        x = jnp.minimum(x, 3.0)
        x = x - 0.05
    return x[7]


def mlp(p: Params, x: Array) -> Array:
    for i in (0, 2):
        x = jax.nn.relu(x @ p[f"layers.{i}.weight"].T + p[f"layers.{i}.bias"])
    return x @ p["layers.4.weight"].T + p["layers.4.bias"]


# --- GPT


def _product(x: Array, weight: Array, flat: bool) -> Array:
    if not flat or x.ndim == 2:
        return x @ weight.T
    return (x.reshape(-1, x.shape[-1]) @ weight.T).reshape(*x.shape[:-1], -1)


def _linear(p: Params, name: str, x: Array, flat: bool) -> Array:
    return _product(x, p[f"{name}.weight"], flat) + p[f"{name}.bias"]


def _layer_norm(p: Params, name: str, x: Array) -> Array:
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    x = (x - mean) * lax.rsqrt(variance + 1e-5)
    return x * p[f"{name}.weight"] + p[f"{name}.bias"]


def _attend(q: Array, k: Array, v: Array, mask: Array) -> Array:
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bhkd->bhqd", weights, v)


def _block(
    p: Params,
    name: str,
    x: Array,
    heads: int,
    flat: bool,
    cache: tuple[Array, Array] | None,
    at: Array | int,
    grow: bool,
) -> tuple[Array, tuple[Array, Array]]:
    batch, time, dim = x.shape
    normed = _layer_norm(p, f"{name}.norm1", x)
    q, k, v = (
        t.reshape(batch, time, heads, -1).transpose(0, 2, 1, 3)
        for t in jnp.split(_linear(p, f"{name}.attention.qkv", normed, flat), 3, axis=-1)
    )
    if cache is not None:
        if grow:
            k, v = (jnp.concatenate(pair, axis=2) for pair in zip(cache, (k, v)))
        else:
            k, v = (
                lax.dynamic_update_slice_in_dim(old, new, at, axis=2)
                for old, new in zip(cache, (k, v))
            )
    mask = jnp.arange(k.shape[2]) <= at + jnp.arange(time)[:, None]
    y = _attend(q, k, v, mask).transpose(0, 2, 1, 3).reshape(batch, time, dim)
    x = x + _linear(p, f"{name}.attention.proj", y, flat)
    up = _linear(p, f"{name}.up", _layer_norm(p, f"{name}.norm2", x), flat)
    return x + _linear(p, f"{name}.down", jax.nn.gelu(up, approximate=False), flat), (k, v)


def gpt(
    p: Params,
    ids: Array,
    *,
    layers: int,
    heads: int,
    flat: bool = True,
    caches: Cache | None = None,
    at: Array | int = 0,
    grow: bool = False,
) -> tuple[Array, Cache]:
    """Logits, and the keys and values of each layer.

    Args:
        p: Parameters.
        ids: Tokens ``[batch, time]``.
        layers, heads: Size of the model.
        flat: Which form the matrix products have.
        caches: Keys and values so far, one pair a layer.
        at: Position of the first token.
        grow: Append to the caches, else write into them.
    """
    x = p["tokens.weight"][ids] + p["positions.weight"][at + jnp.arange(ids.shape[1])]
    kept = []
    for i in range(layers):
        cache = caches[i] if caches else None
        x, pair = _block(p, f"blocks.{i}", x, heads, flat, cache, at, grow)
        kept.append(pair)
    return _product(_layer_norm(p, "norm", x), p["tokens.weight"], flat), kept


# --- ResNet


def _batch_norm(p: Params, stats: Params, new: Params, name: str, x: Array, axis: int) -> Array:
    """Normalise with the batch's statistics and keep running ones in ``new``."""
    axes = tuple(a for a in range(4) if a != axis)
    mean, variance = x.mean(axes), x.var(axes)
    count = x.size // x.shape[axis]
    new[f"{name}.running_mean"] = 0.9 * stats[f"{name}.running_mean"] + 0.1 * mean
    unbiased = variance * count / (count - 1)
    new[f"{name}.running_var"] = 0.9 * stats[f"{name}.running_var"] + 0.1 * unbiased
    shape = [1] * 4
    shape[axis] = -1
    scale = lax.rsqrt(variance + 1e-5) * p[f"{name}.weight"]
    return (x - mean.reshape(shape)) * scale.reshape(shape) + p[f"{name}.bias"].reshape(shape)


def resnet(p: Params, stats: Params, x: Array, *, layout: str) -> tuple[Array, Params]:
    """Logits and the new running statistics; ``layout`` is NCHW, or NHWC with HWIO kernels."""
    axis = layout.index("C")
    dims = (layout, "OIHW" if axis == 1 else "HWIO", layout)
    new: Params = {}

    def conv(x: Array, name: str, stride: int, padding: int) -> Array:
        pads = [(padding, padding)] * 2
        return lax.conv_general_dilated(
            x, p[f"{name}.weight"], (stride, stride), pads, dimension_numbers=dims
        )

    def norm(x: Array, name: str) -> Array:
        return _batch_norm(p, stats, new, name, x, axis)

    x = jax.nn.relu(norm(conv(x, "stem", 1, 1), "norm"))
    for i in range(8):
        block, stride = f"blocks.{i}", 2 if i in (2, 4, 6) else 1
        y = jax.nn.relu(norm(conv(x, f"{block}.conv1", stride, 1), f"{block}.norm1"))
        y = norm(conv(y, f"{block}.conv2", 1, 1), f"{block}.norm2")
        if stride == 2:
            x = norm(conv(x, f"{block}.skip.0", 2, 0), f"{block}.skip.1")
        x = jax.nn.relu(x + y)
    x = x.mean([a for a, d in enumerate(layout) if d in "HW"])
    return x @ p["head.weight"].T + p["head.bias"], new
