"""The overload of paged attention."""

OVERLOAD = "tpu_kernels.paged_attention.default"
