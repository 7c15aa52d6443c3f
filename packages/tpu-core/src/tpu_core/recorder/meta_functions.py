"""Meta functions in place of PyTorch's: of overloads that have none, and where the CPU's results
have another geometry.
"""

from __future__ import annotations

from typing import Any

import torch

from tpu_core import torch_compat
from tpu_core.recorder import int4, memory_formats
from tpu_core.recorder.grouped import grouped_mm
from tpu_core.recorder.scaled import scaled_mm, scaled_mm_v2


def _convolution(x: Any, weight: Any, bias: Any, *parameters: Any) -> Any:
    result = torch.ops.aten.convolution.default(x, weight, bias, *parameters)
    return memory_formats.empty(result, memory_formats.of_convolution(x, weight, *parameters))


def _convolution_backward(grad: Any, x: Any, weight: Any, *rest: Any) -> Any:
    *parameters, mask = rest
    # Before these six stand the sizes of the bias, in one overload.
    layout = memory_formats.of_convolution(x, weight, *parameters[-6:])
    gradients = [memory_formats.empty(t, layout) for t in (x, weight)]
    bias = grad.new_empty(grad.size(1))
    return tuple(t if wanted else None for t, wanted in zip((*gradients, bias), mask))


def _lstm_cell(gates: Any, hidden: Any, cx: Any, *biases: Any) -> Any:
    """That of PyTorch fails without biases; with them it checks their sizes."""
    if None not in biases:
        return torch.ops.aten._thnn_fused_lstm_cell.default(gates, hidden, cx, *biases)
    return cx.new_empty(cx.shape), cx.new_empty(cx.shape), gates.new_empty(gates.shape)


def _gru_cell(input_gates: Any, hidden_gates: Any, hx: Any, *_: Any) -> Any:
    return torch.empty_like(hx), hx.new_empty(hx.size(0), hx.size(1) * 5)


def _gru_cell_backward(grad: Any, workspace: Any, has_bias: bool) -> Any:
    batch, hidden = workspace.size(0), workspace.size(1) // 5
    gates = [workspace.new_empty(batch, hidden * 3) for _ in range(2)]
    biases = [workspace.new_empty(hidden * 3) if has_bias else None for _ in range(2)]
    return gates[0], gates[1], torch.empty_like(grad), *biases


def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *_: Any
) -> Any:
    n = x.size(1) if training else 0
    dtype = weight.dtype if weight is not None else x.dtype
    if x.dtype in (torch.float16, torch.bfloat16):
        dtype = torch.float32
    saved = [torch.empty(n, dtype=dtype, device="meta") for _ in range(2)]
    return memory_formats.suggested(x), *saved


def _batch_norm_functional(x: Any, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any) -> Any:
    results = _batch_norm(x, weight, bias, mean, var, *rest)
    return *results, torch.empty_like(mean), torch.empty_like(var)


def _batch_norm_evaluated(x: Any, weight: Any, bias: Any, mean: Any, var: Any, *_: Any) -> Any:
    return _batch_norm(x, weight, bias, mean, var, False)


def _batch_norm_no_update(x: Any, weight: Any, bias: Any, mean: Any, var: Any, *_: Any) -> Any:
    results = _batch_norm(x, weight, bias, mean, var, mean is None or var is None)
    return *results, x.new_empty(0, dtype=torch.uint8)


def _batch_norm_statistics(x: Any, *_: Any) -> Any:
    """A value a channel for mean and (reciprocal) deviation, in the dtype computed in."""
    return tuple(_per_channel(x) for _ in range(2))


def _layer_norm(x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    """That of PyTorch is a reference in Python too, for whose errors it is called."""
    lead = x.dim() - len(shape)
    given = [t for t in (weight, bias) if t is not None]
    if (
        not x.is_floating_point()
        or not shape
        or lead < 0
        or any(list(s) != list(shape) for s in (x.shape[lead:], *(t.shape for t in given)))
    ):
        return torch.ops.aten.native_layer_norm.default(x, shape, weight, bias, eps)
    half = x.dtype in (torch.float16, torch.bfloat16)
    dtype = torch.float32 if half else x.dtype
    statistics = (*x.shape[:lead], *[1] * len(shape))
    return x.new_empty(x.shape), *(x.new_empty(statistics, dtype=dtype) for _ in range(2))


def _layer_norm_backward(
    grad: Any, x: Any, shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, mask: Any
) -> Any:
    """That of PyTorch computes on meta tensors."""
    results = [t.new_empty(t.shape) if t is not None else None for t in (x, weight, bias)]
    return tuple(t if wanted else None for t, wanted in zip(results, mask))


def _relu(x: Any) -> Any:
    """That of PyTorch is a reference in Python too, for whose errors it is called."""
    return torch.empty_like(x) if x.is_floating_point() else torch.ops.aten.relu.default(x)


def _per_channel(x: Any) -> Any:
    half = x.dtype in (torch.float16, torch.bfloat16)
    return x.new_empty(x.size(1), dtype=torch.float32 if half else x.dtype)


def _batch_norm_backward(op: torch._ops.OpOverload) -> Any:
    """That of PyTorch gives a gradient of the input that is not asked for, which the CPU leaves
    out.
    """

    def gradients(*args: Any) -> tuple[Any, ...]:
        return tuple(t if wanted else None for t, wanted in zip(op(*args), args[9]))

    return gradients


def _loss_backward(op: torch._ops.OpOverload) -> Any:
    """That of PyTorch divides by the number of elements, of which there may be none."""

    def gradient(grad: Any, x: Any, target: Any, *rest: Any) -> Any:
        if x.numel() and target.numel():
            return op(grad, x, target, *rest)
        return x.new_empty(torch.broadcast_shapes(x.shape, target.shape))

    return gradient


def _batch_norm_gather(x: Any, mean: Any, *_: Any) -> Any:
    half = mean.dtype in (torch.float16, torch.bfloat16)
    dtype = torch.float32 if half else mean.dtype
    return tuple(mean.new_empty(mean.size(1), dtype=dtype) for _ in range(2))


def _batch_norm_backward_reduce(
    grad: Any, x: Any, mean: Any, rstd: Any, weight: Any, *wanted: bool
) -> Any:
    input_g, weight_g, bias_g = wanted
    dtype = weight.dtype if weight is not None else _per_channel(x).dtype
    sums = [_per_channel(x) if input_g else None for _ in range(2)]
    gradients = [x.new_empty(x.size(1), dtype=dtype) if g else None for g in (weight_g, bias_g)]
    return *sums, *gradients


def _weight_norm_backward(grad: Any, v: Any, g: Any, *_: Any) -> Any:
    return torch.empty_like(v), torch.empty_like(g)


def _qr(x: Any) -> Any:
    a = torch.empty_like(x.mT, memory_format=torch.contiguous_format).mT
    return a, x.new_empty(*x.shape[:-2], min(x.shape[-2:]))


def _nonzero_static(x: Any, size: int, fill: int) -> Any:
    """That of PyTorch has the strides of `nonzero` on a GPU."""
    found = torch.ops.aten.nonzero_static.default(x, size=size, fill_value=fill)
    return found.new_empty(found.shape)


def _nansum(x: Any, dim: Any, keepdim: bool, dtype: Any) -> Any:
    """That of PyTorch takes no dims for none, where the CPU sums over all."""
    return torch.ops.aten.nansum.default(x, dim or None, keepdim, dtype=dtype)


def _jagged_rows(padded: Any, offsets: Any, count: int) -> Any:
    """PyTorch has one for fake tensors alone."""
    return padded.new_empty(count, *padded.shape[2:])


_FAST_SUM = (torch.float32, torch.float16, torch.bfloat16)


def _embedding_bag(op: torch._ops.OpOverload) -> Any:
    """That of PyTorch has a GPU's geometry of what is kept for the gradient."""
    names = [a.name for a in op._schema.arguments]
    defaults = [a.default_value for a in op._schema.arguments]
    is_forward_only = "forward_only" in op.name()

    def bags(*args: Any) -> Any:
        given = dict(zip(names, (*args, *defaults[len(args) :])))
        result, bag_of_index, _, largest = op(*args)
        weight, offsets, mode = given["weight"], given["offsets"], given["mode"]
        scale = given["per_sample_weights"]
        is_fast = weight.dtype in _FAST_SUM and weight.stride(1) == 1 and given["padding_idx"] < 0
        if mode == 0 and is_fast and (scale is None or scale.stride(0) == 1):
            bag_of_index = bag_of_index.new_empty(0)
        count = offsets if is_forward_only and mode == 0 else result
        sizes = offsets.new_empty(count.size(0))
        return result, bag_of_index, sizes, largest if mode == 2 else torch.empty_like(sizes)

    return bags


def _like(index: int) -> Any:
    """The result has the geometry and dtype of the argument at ``index``."""
    return lambda *args: torch.empty_like(args[index])


META_FUNCTIONS = {
    **{f"aten.convolution{op}.default": _convolution for op in ("", "_overrideable")},
    **{
        f"aten.convolution_backward{op}.default": _convolution_backward
        for op in ("", "_overrideable")
    },
    "aten._thnn_fused_lstm_cell.default": _lstm_cell,
    "aten._thnn_fused_gru_cell.default": _gru_cell,
    "aten._thnn_fused_gru_cell_backward.default": _gru_cell_backward,
    "aten.native_batch_norm.default": _batch_norm,
    "aten._native_batch_norm_legit.default": _batch_norm,
    "aten._native_batch_norm_legit_functional.default": _batch_norm_functional,
    "aten._native_batch_norm_legit_no_training.default": _batch_norm_evaluated,
    "aten._batch_norm_no_update.default": _batch_norm_no_update,
    **{
        f"aten.{op}.default": _batch_norm_backward(getattr(torch.ops.aten, op).default)
        for op in ("native_batch_norm_backward", "batch_norm_backward")
    },
    **{
        f"aten.{op}.default": _loss_backward(getattr(torch.ops.aten, op).default)
        for op in ("huber_loss_backward", "mse_loss_backward", "smooth_l1_loss_backward")
    },
    "aten.batch_norm_stats.default": _batch_norm_statistics,
    "aten.batch_norm_update_stats.default": _batch_norm_statistics,
    "aten.batch_norm_gather_stats_with_counts.default": _batch_norm_gather,
    "aten.batch_norm_elemt.default": _like(0),
    "aten.batch_norm_backward_reduce.default": _batch_norm_backward_reduce,
    "aten.batch_norm_backward_elemt.default": _like(1),
    **{
        f"aten.{op}.default": _embedding_bag(getattr(torch.ops.aten, op).default)
        for op in ("_embedding_bag", "_embedding_bag_forward_only")
    },
    "aten.multi_margin_loss_backward.default": _like(1),
    "aten.multilabel_margin_loss_backward.default": _like(1),
    "aten.fractional_max_pool3d_backward.default": _like(1),
    "aten._ctc_loss_backward.default": _like(1),
    "aten._masked_softmax.default": _like(0),
    "aten._masked_softmax_backward.default": _like(0),
    "aten._logcumsumexp.default": _like(0),
    "aten.native_layer_norm.default": _layer_norm,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten.relu.default": _relu,
    "aten.glu_jvp.default": _like(0),
    "aten.glu_backward_jvp.default": _like(0),
    "aten._sample_dirichlet.default": _like(0),
    "aten._standard_gamma.default": _like(0),  # torch 2.11 has none
    "aten._standard_gamma_grad.default": _like(0),
    "aten.binomial.default": _like(0),
    "aten.geqrf.default": _qr,
    "aten.nansum.default": _nansum,
    "aten.nonzero_static.default": _nonzero_static,
    "aten._padded_dense_to_jagged_forward.default": _jagged_rows,
    "aten._grouped_mm.default": grouped_mm,
    "aten._scaled_mm.default": scaled_mm,
    "aten._scaled_mm_v2.default": scaled_mm_v2,
    "aten._convert_weight_to_int4pack.default": int4.convert_weight,
    "aten._weight_int4pack_mm.default": int4.weight_mm,
    "aten._weight_norm_interface_backward.default": _weight_norm_backward,
    "tpu.arange_.default": lambda self, start, step: self,
    "tpu.recompute.default": _like(0),
    **torch_compat.stricter_meta_functions(),
}
