"""Lowerings of the connectionist temporal classification loss and of its backward op.

The recursions are those of LossCTC.cpp over the labels with blanks between them, all sequences
at once. Lengths are arrays, so that one program serves them all (`tpu_core.recorder.ctc`); in a
graph, where they are lists, they are compiled in.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tpu_core.array_types import Bool, Float, Int, Int32
from tpu_core.dtypes import cast, op_math
from tpu_core.lowering.registry import lowering


def label_places(lengths: Sequence[int], rows: int) -> Int[np.ndarray, "batch labels"]:
    """Places of the labels of each target among ``rows`` labels one after the other.

    Example:
        >>> label_places([2, 1], 3)
        array([[0, 1], [2, 2]])
    """
    first = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    return np.minimum(first[:, None] + np.arange(max(lengths))[None], rows - 1)


def _padded(targets: Int[Array, " ..."], lengths: Sequence[int]) -> Int[Array, "batch labels"]:
    """Labels of targets that are padded or one after the other."""
    count = max(lengths, default=0)
    if targets.ndim != 1:
        return targets[:, :count]
    if not targets.size:
        return jnp.zeros((len(lengths), count), targets.dtype)
    return targets[label_places(lengths, targets.shape[0]).astype(np.int32)]


def _extended(
    targets: Int[Array, "batch labels"], lengths: Int[Array, " batch"], blank: int
) -> Int32[Array, "batch 2*labels+1"]:
    """Labels with blanks at even places and beyond the lengths."""
    batch, count = targets.shape
    used = lax.broadcasted_iota(np.int32, (batch, count), 1) < lengths[:, None]
    labels = jnp.where(used, targets.astype(np.int32), np.int32(blank))
    blanks = jnp.full((batch, count, 1), np.int32(blank))
    pairs = lax.concatenate([blanks, lax.expand_dims(labels, (2,))], 2)
    pairs = lax.reshape(pairs, (batch, 2 * count))
    return lax.concatenate([pairs, jnp.full((batch, 1), np.int32(blank))], 1)


def _shift(x: Float[Array, "batch places"], by: int) -> Float[Array, "batch places"]:
    """``x[:, s - by]`` with -inf from outside."""
    return lax.pad(x, np.asarray(-np.inf, x.dtype), [(0, 0, 0), (by, -by, 0)])


def _logaddexp(*terms: Array) -> Array:
    top = terms[0]
    for term in terms[1:]:
        top = jnp.maximum(top, term)
    top = jnp.where(jnp.isneginf(top), jnp.zeros((), top.dtype), top)
    return lax.log(sum(lax.exp(term - top) for term in terms)) + top


def _emissions(
    log_probs: Float[Array, "steps batch classes"], labels: Int[Array, "batch places"]
) -> Float[Array, "steps batch places"]:
    """``log_probs[t, n, labels[n, s]]``."""
    index = jnp.broadcast_to(labels[None], (log_probs.shape[0], *labels.shape))
    return jnp.take_along_axis(log_probs, index, axis=2, mode="clip")


def _skippable(labels: Int[Array, "batch places"]) -> Bool[Array, "batch places"]:
    """Mask of places that may skip a blank: a label other than the one before it."""
    place = lax.broadcasted_iota(np.int32, labels.shape, 1)
    previous = lax.pad(labels, np.int32(0), [(0, 0, 0), (2, -2, 0)])
    return (place % 2 == 1) & (place >= 3) & (labels != previous)


def _forward(
    emissions: Float[Array, "steps batch places"],
    labels: Int[Array, "batch places"],
    start: Bool[Array, "batch places"],
) -> Float[Array, "steps batch places"]:
    """Log alpha: probabilities of the prefixes."""
    skip = _skippable(labels)
    off = jnp.full((), -np.inf, emissions.dtype)

    def step(alpha: Array, emission: Array) -> tuple[Array, Array]:
        jump = jnp.where(skip, _shift(alpha, 2), off)
        alpha = _logaddexp(alpha, _shift(alpha, 1), jump) + emission
        return alpha, alpha

    first = jnp.where(start, emissions[0], off)
    rest = lax.scan(step, first, emissions[1:])[1]
    return lax.concatenate([first[None], rest], 0)


def _ends(
    lengths: Int[Array, " batch"], places: int
) -> tuple[Bool[Array, "batch {places}"], Bool[Array, "batch {places}"]]:
    """Masks of the two places that a path may end at, and of the places in use."""
    last = 2 * lengths[:, None]
    place = lax.broadcasted_iota(np.int32, (lengths.shape[0], places), 1)
    return (place == last) | (place == last - 1), place <= last


@lowering("tpu.ctc_loss.default")
def ctc_loss(
    log_probs: Float[Array, "steps batch classes"],
    targets: Int[Array, "batch labels"],
    lengths: Int[Array, "2 batch"],
    blank: int,
) -> tuple[Float[Array, " batch"], Float[Array, "batch steps 2*labels+1"]]:
    """Negative log-likelihood and log alpha.

    Args:
        log_probs: Logarithms of the probabilities.
        targets: Labels, padded.
        lengths: Of the inputs and of the targets.
        blank: The label between labels.
    """
    x = cast(log_probs, op_math(log_probs.dtype))
    input_lengths, target_lengths = lengths.astype(np.int32)
    labels = _extended(targets, target_lengths, blank)
    places = labels.shape[1]
    end, used = _ends(target_lengths, places)
    place = lax.broadcasted_iota(np.int32, (x.shape[1], places), 1)
    start = used & (place < 2)
    alpha = _forward(_emissions(x, labels), labels, start)
    time = jnp.maximum(input_lengths - 1, 0)
    index = jnp.broadcast_to(time[:, None], (x.shape[1], places))[None]
    final = jnp.take_along_axis(alpha, index, axis=0, mode="clip")[0]
    off = np.asarray(-np.inf, x.dtype)
    likelihood = _logaddexp(
        *(jnp.max(jnp.where(end & (place % 2 == odd), final, off), 1) for odd in (0, 1))
    )
    # No time steps: certain of an empty target, impossible otherwise.
    zero = jnp.zeros((), x.dtype)
    empty = jnp.where(target_lengths == 0, zero, jnp.full((), np.inf, x.dtype))
    loss = jnp.where(input_lengths == 0, empty, -likelihood)
    active = lax.iota(np.int32, x.shape[0])[:, None] < input_lengths[None]
    alpha = jnp.where(active[:, :, None] & used[None], alpha, off)
    return loss, lax.transpose(alpha, (1, 0, 2))


@lowering("tpu.ctc_loss_backward.default")
def ctc_loss_backward(
    grad: Float[Array, " batch"],
    log_probs: Float[Array, "steps batch classes"],
    targets: Int[Array, "batch labels"],
    lengths: Int[Array, "2 batch"],
    neg_log_likelihood: Float[Array, " batch"],
    log_alpha: Float[Array, "batch steps 2*labels+1"],
    blank: int,
    zero_infinity: bool,
) -> Float[Array, "steps batch classes"]:
    """``exp(log_probs)`` less the posterior of each class at each step; arguments of `ctc_loss`."""
    dtype = op_math(log_probs.dtype)
    x, loss = cast(log_probs, dtype), cast(neg_log_likelihood, dtype)
    steps, _, classes = x.shape
    places = log_alpha.shape[2]
    input_lengths, target_lengths = lengths.astype(np.int32)
    labels = _extended(targets, target_lengths, blank)
    emissions = _emissions(x, labels)
    end, used = _ends(target_lengths, places)
    last = input_lengths[:, None]
    off = jnp.full((), -np.inf, dtype)
    skip = lax.pad(_skippable(labels), np.False_, [(0, 0, 0), (-2, 2, 0)])

    def step(beta: Array, this: tuple[Array, Array]) -> tuple[Array, Array]:
        emission, time = this
        jump = jnp.where(skip, _shift(beta, -2), off)
        inner = _logaddexp(beta, _shift(beta, -1), jump) + emission
        first = jnp.where(end, emission, off)
        beta = jnp.where(time == last - 1, first, jnp.where(time < last, inner, off))
        return beta, beta

    times = lax.iota(np.int32, steps)
    start = jnp.full(emissions.shape[1:], -np.inf, dtype)
    beta = lax.scan(step, start, (emissions, times), reverse=True)[1]
    alpha = lax.transpose(cast(log_alpha, dtype), (1, 0, 2))
    # Both count the emission of the place itself.
    posterior = jnp.exp(alpha + beta - emissions + loss[None, :, None])
    active = times[:, None] < input_lengths[None]
    posterior = jnp.where(used[None] & active[:, :, None], posterior, jnp.zeros((), dtype))
    hot = lax.broadcasted_iota(np.int32, (*labels.shape, classes), 2) == labels[..., None]
    expected = lax.dot_general(
        posterior,
        hot.astype(dtype),
        (((2,), (1,)), ((1,), (0,))),
        precision=lax.Precision.HIGHEST,
    )
    result = (jnp.exp(x) - lax.transpose(expected, (1, 0, 2))) * cast(grad, dtype)[None, :, None]
    if zero_infinity:
        active = active & (loss != np.inf)[None]
    return jnp.where(active[:, :, None], result, jnp.zeros((), dtype))


def _both(input_lengths: Sequence[int], target_lengths: Sequence[int]) -> Int32[Array, "2 batch"]:
    return jnp.asarray(np.array([input_lengths, target_lengths], np.int32))


@lowering("aten._ctc_loss.default")
def ctc_loss_of_lists(
    log_probs: Float[Array, "steps batch classes"],
    targets: Int[Array, " ..."],
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Float[Array, " batch"], Float[Array, "batch steps places"]]:
    lengths = _both(input_lengths, target_lengths)
    return ctc_loss(log_probs, _padded(targets, target_lengths), lengths, blank)


@lowering("aten._ctc_loss_backward.default")
def ctc_loss_backward_of_lists(
    grad: Float[Array, " batch"],
    log_probs: Float[Array, "steps batch classes"],
    targets: Int[Array, " ..."],
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    neg_log_likelihood: Float[Array, " batch"],
    log_alpha: Float[Array, "batch steps places"],
    blank: int,
    zero_infinity: bool = False,
) -> Float[Array, "steps batch classes"]:
    lengths = _both(input_lengths, target_lengths)
    labels = _padded(targets, target_lengths)
    kept = neg_log_likelihood, log_alpha
    return ctc_loss_backward(grad, log_probs, labels, lengths, *kept, blank, zero_infinity)
