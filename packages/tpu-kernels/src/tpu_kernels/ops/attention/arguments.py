"""The arguments of attention, as far as rules ask about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tpu_kernels.ops.rules import common_dtype


@dataclass(frozen=True, slots=True)
class AttentionArguments:
    """A call of attention.

    Attributes:
        query, key, value: Shapes, ``(batch, heads, length, head size)``.
        dtype: Of all three; ``"mixed"`` where they differ.
        bias: Shape of the mask or bias; None without one.
        dropout: Probability.
        is_causal: As PyTorch has it: aligned at the first query and key.
        scale: Of the scores; None for the default. An array where it is not known.
        bias_gradient: Whether the gradient of the bias is asked for.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: str
    bias: tuple[int, ...] | None
    dropout: float
    is_causal: bool
    scale: Any
    bias_gradient: bool = False

    def describe(self) -> dict[str, object]:
        """See `tpu_kernels.ops.registry.Arguments`."""
        return {
            "query": f"{self.dtype}{list(self.query)}",
            "key": list(self.key),
            "value": list(self.value),
            "mask": "none" if self.bias is None else list(self.bias),
            "dropout_p": self.dropout,
            "is_causal": self.is_causal,
        }


def _arguments(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    dropout: float,
    is_causal: bool,
    scale: Any,
    bias_gradient: bool = False,
) -> AttentionArguments:
    return AttentionArguments(
        tuple(query.shape),
        tuple(key.shape),
        tuple(value.shape),
        common_dtype(query, key, value),
        None if bias is None else tuple(bias.shape),
        dropout,
        is_causal,
        scale,
        bias_gradient,
    )


def of_forward(
    query: Any,
    key_: Any,
    value: Any,
    attn_bias: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: Any = None,
) -> AttentionArguments:
    """From those of ``_scaled_dot_product_fused_attention_overrideable``."""
    return _arguments(query, key_, value, attn_bias, dropout_p, is_causal, scale)


def of_backward(
    grad_out: Any,
    query: Any,
    key_: Any,
    value: Any,
    attn_bias: Any,
    grad_input_mask: Any,
    output: Any,
    logsumexp: Any,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: Any,
    max_k: Any,
    dropout_p: float,
    is_causal: bool,
    *seeds: Any,
    scale: Any = None,
) -> AttentionArguments:
    """From those of ``_scaled_dot_product_fused_attention_overrideable_backward``."""
    wanted = attn_bias is not None and bool(grad_input_mask[3])
    return _arguments(query, key_, value, attn_bias, dropout_p, is_causal, scale, wanted)
