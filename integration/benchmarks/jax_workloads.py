"""The workloads in pure JAX, jitted, with the weights and the data of the PyTorch ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax_inference
import jax_models as models
import jobs
import numpy as np
from jax import Array, lax
from jax_models import Params
from jax_optimizers import Optimizer, adam, clip, sgd
from jobs import Job

FORMS = ("jax", "jax3d", "jax_nhwc")


def build(name: str, form: str, file: Path) -> Job:
    """The workload in one of `FORMS`.

    Args:
        name: Of the workload.
        form: ``"jax"`` has the layouts of PyTorch's ops; ``"jax3d"`` and ``"jax_nhwc"`` are as
            users of JAX write transformers and convolutional networks.
        file: From `workloads.export`.
    """
    arrays = {k: _array(v) for k, v in np.load(file).items()}
    p = {k[2:]: v for k, v in arrays.items() if k.startswith("w.")}
    x, y = arrays["x"], arrays.get("y")
    stats = {k[2:]: v for k, v in arrays.items() if k.startswith("b.")}
    flat = form != "jax3d"
    if name in jobs.INFERENCE:
        return _inference(*jax_inference.build(name, form, p | stats, arrays, jobs.BERT))
    if name == "small_ops":
        chain = jax.jit(models.chain)
        return Job(lambda i: chain(x), lambda: _peak(chain, x))
    if name == "rnn_dynamic":
        return _sweep(p, np.asarray(x), flat)
    if name.startswith("decode"):
        return _decode(p, x, flat, grow=name == "decode_growing")
    if name == "accum":
        return _accumulating(p, np.asarray(x), np.asarray(y), flat)
    if name == "mlp":

        def loss(p: Params, stats: Params, x: Array, y: Array) -> tuple[Array, Params]:
            return models.cross_entropy(models.mlp(p, x), y), stats

        return _training(loss, p, {}, adam(), jobs.ADAM_RATE, x, y)
    if name == "gpt":
        forward = functools.partial(models.gpt, **_size(jobs.GPT), flat=flat)

        def loss(p: Params, stats: Params, x: Array, y: Array) -> tuple[Array, Params]:
            return models.cross_entropy(forward(p, x)[0], y), stats

        return _training(loss, p, {}, adam(jobs.WEIGHT_DECAY), jobs.ADAMW_RATE, x, y)
    layout = "NHWC" if form == "jax_nhwc" else "NCHW"
    if layout == "NHWC":
        p = {k: jnp.transpose(v, (2, 3, 1, 0)) if v.ndim == 4 else v for k, v in p.items()}
        x = jnp.transpose(x, (0, 2, 3, 1))

    def loss(p: Params, stats: Params, x: Array, y: Array) -> tuple[Array, Params]:
        logits, stats = models.resnet(p, stats, x, layout=layout)
        return models.cross_entropy(logits, y), stats

    return _training(loss, p, stats, sgd(jobs.MOMENTUM), jobs.SGD_RATE, x, y)


def _array(value: np.ndarray[Any, Any]) -> Array:
    return jnp.asarray(value.astype(np.int32) if value.dtype == np.int64 else value)


def _size(gpt: dict[str, int]) -> dict[str, int]:
    return {"layers": gpt["layers"], "heads": gpt["heads"]}


def _peak(function: Any, *args: Any) -> int | None:
    """Device memory of a jitted function: arguments, results and temporaries."""
    used = function.lower(*args).compile().memory_analysis()
    if used is None:
        return None
    held = used.argument_size_in_bytes + used.output_size_in_bytes - used.alias_size_in_bytes
    return int(held + used.temp_size_in_bytes)


def _training(
    loss: Callable[[Params, Params, Array, Array], tuple[Array, Params]],
    p: Params,
    stats: Params,
    optimizer: Optimizer,
    rate: float,
    x: Array,
    y: Array,
) -> Job:
    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def update(p: Params, stats: Params, state: Any, x: Array, y: Array) -> Any:
        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(p, stats, x, y)
        p, state = optimizer.update(p, grads, state, rate)
        return value, (p, stats, state)

    held = [p, stats, optimizer.init(p)]

    def step(i: int) -> Array:
        value, held[:] = update(*held, x, y)
        return value

    return Job(step, lambda: _peak(update, *held, x, y))


def _accumulating(p: Params, x: Any, y: Any, flat: bool) -> Job:
    forward = functools.partial(models.gpt, **_size(jobs.SMALL_GPT), flat=flat)
    optimizer = adam(jobs.WEIGHT_DECAY)

    def loss(p: Params, x: Array, y: Array) -> Array:
        return models.cross_entropy(forward(p, x)[0], y) / jobs.MICRO_BATCHES

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(p: Params, state: Any, x: Array, y: Array, rate: Array) -> Any:
        value, total = jax.value_and_grad(loss)(p, x[0], y[0])
        for i in range(1, jobs.MICRO_BATCHES):
            value, grads = jax.value_and_grad(loss)(p, x[i], y[i])
            total = jax.tree.map(jnp.add, total, grads)
        p, state = optimizer.update(p, clip(total, jobs.LARGEST_NORM), state, rate)
        return value, (p, state)

    held = [p, optimizer.init(p)]

    def step(i: int) -> Any:
        batch = x[i % jobs.BATCHES], y[i % jobs.BATCHES]
        value, held[:] = update(*held, *batch, jobs.cosine_rate(i))
        return float(value) if i % jobs.LOG_EVERY == 0 else value

    return Job(step, lambda: _peak(update, *held, x[0], y[0], 0.0))


def _inference(model: Callable[..., Any], args: tuple[Any, ...]) -> Job:
    def step(i: int) -> float:
        read = np.asarray(jax.tree.leaves(model(*args))[-1])
        return float(np.abs(read).mean())

    return Job(step, lambda: _peak(model, *args))


def _sweep(p: Params, ids: Any, flat: bool) -> Job:
    @jax.jit
    def forward(p: Params, ids: Array) -> Array:
        return models.gpt(p, ids, **_size(jobs.GPT), flat=flat)[0]

    def step(i: int) -> float:
        outputs = (np.asarray(forward(p, ids[:, :n])) for n in jobs.LENGTHS)
        return float(sum(np.abs(out).mean(dtype=np.float64) for out in outputs))

    return Job(step, lambda: _peak(forward, p, ids[:, : max(jobs.LENGTHS)]))


def _decode(p: Params, prompt: Array, flat: bool, grow: bool) -> Job:
    size = _size(jobs.DECODER)

    @functools.partial(jax.jit, donate_argnums=(1,))
    def forward(p: Params, caches: models.Cache, ids: Array, at: Any) -> tuple[Array, models.Cache]:
        logits, caches = models.gpt(p, ids, **size, flat=flat, caches=caches, at=at, grow=grow)
        return jnp.argmax(logits[:, -1:], axis=-1).astype(jnp.int32), caches

    heads, dim = jobs.DECODER["heads"], jobs.DECODER["dim"]
    shape = (1, heads, 0 if grow else jobs.DECODER["length"], dim // heads)

    def empty() -> models.Cache:
        zeros = (lax.full(shape, 0.0, jnp.float32) for _ in range(2 * size["layers"]))
        return list(zip(zeros, zeros))

    def step(i: int) -> int:
        caches, ids, at, total = empty(), prompt, 0, 0
        for _ in range(jobs.TOKENS):
            new, caches = forward(p, caches, ids, at)
            total += int(new[0, 0])
            ids, at = new, at + ids.shape[1]
        return total

    last = jobs.PROMPT + jobs.TOKENS
    return Job(step, lambda: None if grow else _peak(forward, p, empty(), prompt[:, :1], last))
