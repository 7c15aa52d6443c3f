"""The overloads that attention is on the device, and its kernels as profiles show them."""

FORWARD = "aten._scaled_dot_product_fused_attention_overrideable.default"
BACKWARD = "aten._scaled_dot_product_fused_attention_overrideable_backward.default"

KERNEL_FORWARD = "attention"
KERNEL_OF_QUERY = "attention_gradient_of_query"
KERNEL_OF_KEYS = "attention_gradients_of_key_and_value"
KERNEL_OF_BIAS = "attention_gradient_of_bias"
