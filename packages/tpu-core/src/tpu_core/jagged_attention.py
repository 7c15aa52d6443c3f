"""Attention of nested tensors in the layout `torch.jagged`, on padded sequences.

PyTorch computes it on CUDA by kernels for packed sequences, and on the CPU by nested tensors in the
strided layout, which the device has not. Here queries, keys and values are padded to the longest
sequence, padded keys are masked, and padded rows of the result are left out.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpu_core import import_hooks

_NAME = "jagged_scaled_dot_product_attention"


def install() -> None:
    """Have `F.scaled_dot_product_attention` of jagged tensors on the device come here."""
    import_hooks.when_imported({"torch.nested._internal.ops": _replace})


def _replace(ops: ModuleType) -> None:
    original = getattr(ops, _NAME)

    @functools.wraps(original)
    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if attn_mask is None and _serves(query, key, value):
            options = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
            return _attention(query, key, value, is_causal, options)
        return original(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    setattr(ops, _NAME, attention)


def _serves(query: Any, key: Any, value: Any) -> bool:
    """Return whether these are (batch, heads, length, size), of which the length is jagged.

    All others, wrong ones among them, are PyTorch's to serve or to refuse.
    """
    return all(
        t.is_nested
        and t.layout == torch.jagged
        and t.device.type == "tpu"
        and (t.dim(), t._ragged_idx) == (4, 2)
        and t.lengths() is None
        and t.dtype == query.dtype
        and t.shape[0] == query.shape[0]
        for t in (query, key, value)
    )


def _attention(query: Any, key: Any, value: Any, is_causal: bool, options: Any) -> Any:
    from torch.nested._internal.nested_tensor import nested_view_from_values_offsets_lengths

    q, k, v = (_padded(t.transpose(1, 2)).transpose(1, 2) for t in (query, key, value))
    lengths = key.offsets().diff()
    seen = torch.arange(k.shape[2], device=k.device) < lengths[:, None, None, None]
    if is_causal:
        seen = seen & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    padded = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, **options)
    rows = _rows(padded.transpose(1, 2), query.offsets(), query.transpose(1, 2).values().shape[0])
    result = nested_view_from_values_offsets_lengths(
        rows,
        query.offsets(),
        None,
        min_seqlen=query._maybe_min_seqlen,
        max_seqlen=query._maybe_max_seqlen,
    )
    return result.transpose(1, 2)


def _padded(x: Any) -> Tensor:
    """(batch, longest length, ...), zeros beyond each sequence: a NaN of another must not count."""
    # Of gathers, which have derivatives; the op below `to_padded_tensor` has none.
    values, offsets = x.values(), x.offsets()
    place = offsets[:-1, None] + torch.arange(x._max_seqlen, device=values.device)
    if values.shape[0] == 0:
        return values.new_zeros(*place.shape, *values.shape[1:])
    is_inside = place < offsets[1:, None]
    rows = values[place.clamp(max=values.shape[0] - 1)]
    return torch.where(is_inside[..., *[None] * (values.dim() - 1)], rows, 0.0)


def _rows(padded: Tensor, offsets: Tensor, count: int) -> Tensor:
    """The ``count`` rows of (batch, length, ...) that are no padding, one after another."""
    row = torch.arange(count, device=padded.device)
    sequence = torch.searchsorted(offsets[1:], row, right=True)
    return padded[sequence, row - offsets[sequence]]
