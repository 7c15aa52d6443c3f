"""The overloads that products with weights of 4 bits are on the device."""

PACKED = "tpu_kernels.int4_mm.default"
OF_CUDA = "aten._weight_int4pack_mm.default"
