"""Inference fast paths of ``torch.nn``, computed by the ordinary path.

In evaluation mode ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` call one op in
place of their layers. Here these ops record what the layers would.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tpu_core.recorder.functional_variants import overload_name

# What a mask masks, in PyTorch's numbering.
_ATTENTION, _PADDING, _BOTH = range(3)


def _multi_head_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    # The projection is one product where the three are one tensor.
    q = query.transpose(0, 1)
    k = q if key is query else key.transpose(0, 1)
    v = k if value is key else value.transpose(0, 1)
    attention_mask = padding_mask = None
    if mask_type == _PADDING:
        padding_mask = mask
    elif mask is not None:
        attention_mask = mask.flatten(0, 1) if mask_type == _BOTH else mask
    result, weights = F.multi_head_attention_forward(
        q,
        k,
        v,
        embed_dim,
        heads,
        qkv_weight,
        qkv_bias,
        None,
        None,
        False,
        0.0,
        proj_weight,
        proj_bias,
        training=False,
        key_padding_mask=padding_mask,
        need_weights=need_weights,
        attn_mask=attention_mask,
        average_attn_weights=average_weights,
    )
    return result.transpose(0, 1), weights


def _encoder_layer(
    src: torch.Tensor,
    embed_dim: int,
    heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm1_weight: torch.Tensor,
    norm1_bias: torch.Tensor,
    norm2_weight: torch.Tensor,
    norm2_bias: torch.Tensor,
    linear1_weight: torch.Tensor,
    linear1_bias: torch.Tensor,
    linear2_weight: torch.Tensor,
    linear2_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    mask_type: int | None = None,
) -> torch.Tensor:
    def attend(x: torch.Tensor) -> torch.Tensor:
        projections = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return _multi_head_attention(
            x, x, x, embed_dim, heads, *projections, mask, False, True, mask_type
        )[0]

    def feed_forward(x: torch.Tensor) -> torch.Tensor:
        hidden = F.linear(x, linear1_weight, linear1_bias)
        return F.linear(
            F.gelu(hidden) if use_gelu else F.relu(hidden), linear2_weight, linear2_bias
        )

    def norm1(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (embed_dim,), norm1_weight, norm1_bias, eps)

    def norm2(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (embed_dim,), norm2_weight, norm2_bias, eps)

    if norm_first:
        x = src + attend(norm1(src))
        return x + feed_forward(norm2(x))
    x = norm1(src + attend(src))
    return norm2(x + feed_forward(x))


def _never(*_: Any) -> bool:
    """The encoder may not pack sequences into a nested tensor: the device has none."""
    return False


_FUNCTIONS: dict[str, Any] = {
    "aten._native_multi_head_attention.default": _multi_head_attention,
    "aten._transformer_encoder_layer_fwd.default": _encoder_layer,
    "aten._nested_tensor_from_mask_left_aligned.default": _never,
}


def handler_of(op: torch._ops.OpOverload) -> Any:
    """A handler that composes the op of others, or None."""
    function = _FUNCTIONS.get(overload_name(op))
    return None if function is None else lambda _, args: function(*args)
