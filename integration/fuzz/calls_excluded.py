"""Ops that `calls` leaves out, and errors that it does not ask of the device, with reasons."""

from __future__ import annotations

import re

import torch

# Names of ATen ops (without `aten::` and overload), by the reason that they are not called.
REASONS: dict[str, str] = {
    "results are random": """
        bernoulli bernoulli_ cauchy cauchy_ exponential exponential_ geometric geometric_
        log_normal log_normal_ multinomial normal normal_ uniform uniform_ rand rand_like randn
        randn_like randint randint_like randperm random random_ dropout dropout_ alpha_dropout
        alpha_dropout_ feature_dropout feature_dropout_ feature_alpha_dropout
        feature_alpha_dropout_ native_dropout rrelu rrelu_ rrelu_with_noise rrelu_with_noise_
        binomial poisson fractional_max_pool2d fractional_max_pool3d
        rrelu_with_noise_functional""",
    "results are memory that nothing has written": """
        empty empty_like empty_permuted empty_strided new_empty new_empty_strided empty_quantized
        resize resize_ resize_as resize_as_ resize_as_sparse resize_as_sparse_ set set_
        new_empty_strided""",
    "results are unique only up to a factor or an order": """
        linalg_eig linalg_eigh linalg_svd svd linalg_eigvals geqrf linalg_qr qr ormqr
        linalg_householder_product lobpcg orgqr linalg_ldl_factor linalg_ldl_factor_ex""",
    "of singular matrices: the order of operations decides between infinities and NaN": """
        linalg_solve_triangular triangular_solve""",
    "results are other kinds of tensors: sparse, quantized, nested, MKL-DNN's": """
        to_sparse to_sparse_csr to_sparse_csc to_sparse_bsr to_sparse_bsc to_dense to_mkldnn
        quantize_per_tensor quantize_per_channel quantize_per_tensor_dynamic dequantize
        sparse_coo_tensor sparse_resize sparse_resize_ sparse_mask coalesce indices values
        crow_indices col_indices ccol_indices row_indices sspaddmm smm hspmm copy_sparse_to_sparse
        copy_sparse_to_sparse_ sparse_sampled_addmm q_scale q_zero_point int_repr
        fake_quantize_per_tensor_affine_cachemask_backward to_padded_tensor
        sparse_compressed_tensor sparse_csr_tensor sparse_csc_tensor sparse_bsr_tensor
        sparse_bsc_tensor is_coalesced dense_dim sparse_dim""",
    "about names of dims, storages, devices or autograd, not numbers": """
        align_to align_as align_tensors refine_names rename rename_ names set_data data is_leaf
        output_nr requires_grad requires_grad_ retain_grad retains_grad backward record_stream
        pin_memory is_pinned to cpu cuda xpu ipu tpu _version get_device is_vulkan_available
        lift lift_fresh lift_fresh_copy from_file can_cast result_type promote_types
        is_distributed is_inference storage_offset stride size numel dim detach detach_
        sym_numel sym_size sym_stride sym_storage_offset sym_constrain_range
        sym_constrain_range_for_size is_same_size copy  fbgemm_pack_gemm_matrix_fp16
        segment_reduce data_ptr  is_set_to
        device is_cuda is_cpu is_mps is_meta is_xla is_ipu is_hpu is_vulkan is_maia is_mtia""",
    "belong to another backend": """
        cudnn_affine_grid_generator cudnn_batch_norm cudnn_convolution cudnn_convolution_relu
        cudnn_convolution_add_relu cudnn_convolution_transpose cudnn_grid_sampler
        cudnn_is_acceptable miopen_batch_norm miopen_convolution miopen_convolution_add_relu
        miopen_convolution_relu miopen_convolution_transpose miopen_depthwise_convolution
        miopen_rnn miopen_ctc_loss mkldnn_adaptive_avg_pool2d mkldnn_convolution mkldnn_linear
        mkldnn_linear_backward mkldnn_linear_backward_input mkldnn_linear_backward_weights
        mkldnn_max_pool2d mkldnn_max_pool3d mkldnn_reorder_conv2d_weight
        mkldnn_reorder_conv3d_weight mkldnn_rnn_layer mps_linear mkl_linear xnnpack_conv""",
    "read memory beyond the elements of their input": """
        as_strided as_strided_ as_strided_copy as_strided_scatter _reshape_alias""",
    "called through OpInfo, whose arguments fit together": """
        lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell quantized_lstm
        quantized_gru quantized_lstm_cell quantized_gru_cell batch_norm native_batch_norm
        native_batch_norm_backward ctc_loss embedding_bag slow_conv3d slow_conv_transpose2d
        slow_conv_transpose3d slow_conv_dilated2d slow_conv_dilated3d slow_conv3d_forward
        thnn_conv2d conv_depthwise3d grid_sampler grid_sampler_2d grid_sampler_3d
        batch_norm_elemt batch_norm_gather_stats batch_norm_stats batch_norm_update_stats
        batch_norm_gather_stats_with_counts stft istft histogramdd histogramdd""",
    "large or slow by their nature": "cartesian_prod combinations vander",
    "of TorchScript, or return Python values of one element": """
        Bool Complex ComplexImplicit Float FloatImplicit Int IntImplicit ScalarImplicit len
        as_tensor tensor sorted count remove grad element_size __getitem__
        sym_is_contiguous q_per_channel_axis q_per_channel_scales q_per_channel_zero_points
        choose_qparams_optimized fused_moving_avg_obs_fake_quant chalf hash_tensor
        row_indices_copy values_copy crow_indices_copy col_indices_copy ccol_indices_copy
        indices_copy convolution_overrideable is_contiguous
        is_strides_like_format is_non_overlapping_and_dense""",
}
EXCLUDED = {name: reason for reason, names in REASONS.items() for name in names.split()}
# Part of a name: quantized and sparse ops, backward formulas (met through autograd, with the
# arguments that autograd gives), and what is internal to PyTorch.
PARTS = ("quantize", "sparse", "_backward", "mkldnn", "fbgemm", "nested", "_jagged", "qscheme")
# Ops with one underscore in front that users meet through a public name.
INTERNAL = re.compile(
    r"_foreach_(?!.*norm\.).*|_softmax|_log_softmax|_unsafe_view|_stack|_cumcummax"
)

# A leaf named by an index among equal values may be any of them.
INDEX_OF_TIES = frozenset(
    "topk kthvalue median nanmedian mode msort sort argsort max min argmax argmin aminmax".split()
)

# Strides are those that MKL or LAPACK give: PyTorch's meta functions say others.
LAYOUT_OF_A_LIBRARY = re.compile(r"fft|linalg|lstsq|cholesky|inverse|lu_|triangular|pinverse|solve")

# The CPU raises for a value that the device would have to wait for:
# docs/explanation/differences.md.
BY_VALUE = re.compile(
    "|".join(
        (
            r"out of (range|bounds)",  # of an index
            r"index \d+ is out of",
            r"ZeroDivisionError",
            r"[Dd]ivision by zero",
            r"Integers to negative integer powers",
            r"Class values must be",
            r"all elements of (input|target) should be between",
            r"(singular|not (positive-definite|invertible)|not converge|ill-conditioned)",
            r"value cannot be converted to type",
            r"indices? .* is out",
            r"invalid (multinomial|repeat)",
            r"repeats can not be negative",
            r"boundaries tensor should be",
            r"q values must be in the range",  # as on CUDA
            r"INDICES",
            r"Negative numbers",
            r"Expected.*target.*size.*class",
            r"probability tensor contains",
            r"Pivots given to lu_solve",
            r"pivots passed to lu_unpack must be between",
            r"invalid max index",
            r"must be (greater than|in the range|non-?negative).*element",
        )
    )
)


# Differences that are meant: kind, key and text of the failure, and why.
MEANT: tuple[tuple[str, str, str, str], ...] = (
    (
        "dtype",
        r"^native_batch_norm$",
        r"result\[[12]\] cpu torch\.b?float16, device torch\.float32",
        "statistics of narrow floats are in float32, as on CUDA",
    ),
    (
        "shape",
        r"^aten\._stack\.out$",
        "",
        "PyTorch's kernel for all devices but the CPU takes tensors of the result's rank",
    ),
    (
        "no error",
        r"^aten\._stack\.out$",
        "expects each tensor to be equal size",
        "as above; torch.stack with an out= raises",
    ),
    (
        "value",
        r"logcumsumexp",
        r"complex",
        "a logarithm's imaginary part is one of many, 2 pi apart: the CPU adds up, a scan may not",
    ),
    (
        "value",
        r"atanh",
        r"complex\d+\[.*cpu \(?-?0?[-+]1\.57\d*j\)?, device \(?-?0?[-+]1\.57\d*j\)?;",
        "on the branch cut the sign of a zero decides, which rounding may make",
    ),
    (
        "value",
        r"upsample|interpolate",
        r"nan",
        "next to infinities: a weight of 0 times an infinity, docs/explanation/differences.md",
    ),
    (
        "no error",
        r"logsumexp",
        r"doesn't match the broadcast shape",
        "without dims the CPU's kernel reduces all and squeezes none: it refuses what it documents",
    ),
)


def meant(kind: str, key: str, text: str) -> bool:
    """Whether a failure is in the list."""
    return any(
        kind == k and re.search(names, key) and re.search(texts, text)
        for k, names, texts, _ in MEANT
    )


def reason(name: str, overload: str) -> str | None:
    """Why an ATen op is not called; None if it is."""
    if name in EXCLUDED:
        return EXCLUDED[name]
    if any(part in name for part in PARTS):
        return "quantized, sparse, nested, or a backward formula"
    if name.startswith("_") and not INTERNAL.fullmatch(name):
        return "internal"
    packet = getattr(torch.ops.aten, name, None)
    op = getattr(packet, overload or "default", None)
    if op is None:
        return "of TorchScript only"
    if torch.Tag.nondeterministic_seeded in op.tags:
        return "results are random"
    if torch.Tag.generated in op.tags:
        return "made by PyTorch's code generator; torch's functions do not call it"
    return None
