"""ResNet-50, MobileNetV2 and BERT as pure JAX functions, evaluated.

Parameters and running statistics are one dict, named as PyTorch names them. ``layout`` is that of
images: NCHW with OIHW kernels, or NHWC with HWIO kernels, as users of JAX write them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

Params = dict[str, Array]


def _convolution(
    p: Params, name: str, x: Array, layout: str, stride: int = 1, groups: int = 1
) -> Array:
    kernel = p[f"{name}.weight"]
    form = "OIHW" if layout == "NCHW" else "HWIO"
    reach = kernel.shape[form.index("H")] // 2
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        [(reach, reach)] * 2,
        dimension_numbers=(layout, form, layout),
        feature_group_count=groups,
    )


def _norm(p: Params, name: str, x: Array, layout: str) -> Array:
    scale = p[f"{name}.weight"] * lax.rsqrt(p[f"{name}.running_var"] + 1e-5)
    shift = p[f"{name}.bias"] - p[f"{name}.running_mean"] * scale
    shape = (-1, 1, 1) if layout == "NCHW" else (-1,)
    return x * scale.reshape(shape) + shift.reshape(shape)


def _head(p: Params, x: Array, layout: str) -> Array:
    x = x.mean((2, 3) if layout == "NCHW" else (1, 2))
    return x @ p["head.weight"].T + p["head.bias"]


def resnet50(p: Params, x: Array, *, layout: str) -> Array:
    """Logits of images."""

    def layer(name: str, norm: str, x: Array, stride: int = 1) -> Array:
        return _norm(p, norm, _convolution(p, name, x, layout, stride), layout)

    x = jax.nn.relu(layer("stem", "norm", x, 2))
    window = [3 if d in "HW" else 1 for d in layout]
    strides = [2 if d in "HW" else 1 for d in layout]
    pads = [(1, 1) if d in "HW" else (0, 0) for d in layout]
    x = lax.reduce_window(x, -jnp.inf, lax.max, window, strides, pads)
    firsts = {0: 1, 3: 2, 7: 2, 13: 2}  # blocks that change the size, with their strides
    for i in range(16):
        block, stride = f"blocks.{i}", firsts.get(i, 1)
        y = jax.nn.relu(layer(f"{block}.conv1", f"{block}.norm1", x))
        y = jax.nn.relu(layer(f"{block}.conv2", f"{block}.norm2", y, stride))
        y = layer(f"{block}.conv3", f"{block}.norm3", y)
        if i in firsts:
            x = layer(f"{block}.skip.0", f"{block}.skip.1", x, stride)
        x = jax.nn.relu(x + y)
    return _head(p, x, layout)


def mobilenet_v2(p: Params, x: Array, *, layout: str) -> Array:
    """Logits of images."""

    def layer(name: str, x: Array, stride: int = 1, groups: int = 1) -> Array:
        y = _convolution(p, f"{name}.0", x, layout, stride, groups)
        return jnp.clip(_norm(p, f"{name}.1", y, layout), 0.0, 6.0)

    x = layer("layers.0", x, 2)
    block = 0
    # Widens, number of blocks and stride of the first one, of each stage.
    for widens, depth, first in (
        *((False, 1, 1), (True, 2, 2), (True, 3, 2), (True, 4, 2)),
        *((True, 3, 1), (True, 3, 2), (True, 1, 1)),
    ):
        for i in range(depth):
            block += 1
            name, stride = f"layers.{block}.layers", 1 if i else first
            y = layer(f"{name}.0", x) if widens else x
            at = int(widens)
            y = layer(f"{name}.{at}", y, stride, groups=y.shape[layout.index("C")])
            y = _convolution(p, f"{name}.{at + 1}", y, layout)
            y = _norm(p, f"{name}.{at + 2}", y, layout)
            x = x + y if i else y
    return _head(p, layer(f"layers.{block + 1}", x), layout)


def _dense(p: Params, name: str, x: Array, flat: bool) -> Array:
    weight, bias = p[f"{name}.weight"], p[f"{name}.bias"]
    if not flat:
        return x @ weight.T + bias
    return (x.reshape(-1, x.shape[-1]) @ weight.T + bias).reshape(*x.shape[:-1], -1)


def _layer_norm(p: Params, name: str, x: Array) -> Array:
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    x = (x - mean) * lax.rsqrt(variance + 1e-12)
    return x * p[f"{name}.weight"] + p[f"{name}.bias"]


def bert(
    p: Params, ids: Array, mask: Array, *, layers: int, heads: int, flat: bool
) -> tuple[Array, Array]:
    """Vectors ``[batch, time, dim]`` of the tokens, and ``[batch, dim]`` of the texts.

    Args:
        p: Parameters.
        ids, mask: Tokens ``[batch, time]`` and 1 where there is one, else 0.
        layers, heads: Size of the model.
        flat: Whether matrix products are of ``[batch * time, dim]``.
    """
    batch, time = ids.shape
    dense = functools.partial(_dense, p, flat=flat)
    x = p["embeddings.word_embeddings.weight"][ids]
    x = x + p["embeddings.position_embeddings.weight"][:time]
    x = x + p["embeddings.token_type_embeddings.weight"][0]
    x = _layer_norm(p, "embeddings.LayerNorm", x)
    bias = jnp.where(mask[:, None, None, :] > 0, 0.0, -jnp.inf)
    for i in range(layers):
        layer = f"encoder.layer.{i}"
        own = f"{layer}.attention.self"
        q, k, v = (
            dense(f"{own}.{part}", x).reshape(batch, time, heads, -1).transpose(0, 2, 1, 3)
            for part in ("query", "key", "value")
        )
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5 + bias
        y = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, axis=-1), v)
        y = y.transpose(0, 2, 1, 3).reshape(batch, time, -1)
        y = dense(f"{layer}.attention.output.dense", y)
        x = _layer_norm(p, f"{layer}.attention.output.LayerNorm", x + y)
        y = jax.nn.gelu(dense(f"{layer}.intermediate.dense", x), approximate=False)
        y = dense(f"{layer}.output.dense", y)
        x = _layer_norm(p, f"{layer}.output.LayerNorm", x + y)
    return x, jnp.tanh(x[:, 0] @ p["pooler.dense.weight"].T + p["pooler.dense.bias"])


def build(
    name: str, form: str, p: Params, data: dict[str, Array], size: dict[str, int]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A jitted model whose last or only result is read, and its arguments.

    Args:
        name: Of the workload.
        form: Of `jax_workloads.FORMS`.
        p: Parameters and running statistics as PyTorch has them.
        data: What the workload exported.
        size: Layers and heads of `bert`.
    """
    if name == "bert":
        size = {"layers": size["layers"], "heads": size["heads"]}
        model = jax.jit(functools.partial(bert, **size, flat=form != "jax3d"))
        return model, (p, data["x"], data["mask"])
    layout, x = "NCHW", data["x"]
    if form == "jax_nhwc":
        layout, x = "NHWC", jnp.transpose(x, (0, 2, 3, 1))
        p = {k: jnp.transpose(v, (2, 3, 1, 0)) if v.ndim == 4 else v for k, v in p.items()}
    model = {"resnet50": resnet50, "mobilenet_v2": mobilenet_v2}[name]
    return jax.jit(functools.partial(model, layout=layout)), (p, x)
