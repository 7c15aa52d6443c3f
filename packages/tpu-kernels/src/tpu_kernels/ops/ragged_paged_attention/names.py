"""The overload of ragged paged attention."""

OVERLOAD = "tpu_kernels.ragged_paged_attention.default"
