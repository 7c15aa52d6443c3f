"""The overloads that attention is on the device."""

FORWARD = "aten._scaled_dot_product_fused_attention_overrideable.default"
BACKWARD = "aten._scaled_dot_product_fused_attention_overrideable_backward.default"
