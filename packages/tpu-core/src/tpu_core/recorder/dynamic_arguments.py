"""Arguments of ops that are sizes, and may vary with the sizes of tensors.

What may vary in a program is declared here and never inferred from two recordings that differ: an
integer that is not declared (a dim, an exponent, a number of groups) is part of the program's key.
"""

from __future__ import annotations

import functools
import re

import torch

# Arguments that ops type SymInt and that are lengths or positions. Others that they type so are no
# sizes: strides, paddings, dilations and groups of convolutions, `ignore_index`, `padding_idx`.
# Shifts of `roll`, places of gradients of windows and the diagonal of `tril` are run-time numbers
# (`op_schema`).
_SIZES = frozenset(
    """
    C HxW N bias_sizes end high index input_size input_sizes k last_dim_size length m max_k max_q n
    normalized_shape num_weights output_size pad repeats s self_sizes shape size sizes split_size
    split_sizes start
    """.split()
)

# Of ops that type a size otherwise.
_DECLARED: dict[str, frozenset[str]] = {
    "aten::_fused_rms_norm": frozenset({"normalized_shape"}),
    "aten::_fused_rms_norm_backward": frozenset({"normalized_shape"}),
    "aten::adaptive_max_pool2d": frozenset({"output_size"}),
    "aten::adaptive_max_pool3d": frozenset({"output_size"}),
    **{
        f"aten::{mode}_pad{dims}d{direction}": frozenset({"padding"})
        for mode in ("reflection", "replication")
        for dims in (1, 2, 3)
        for direction in ("", "_backward")
    },
    "aten::diagonal_backward": frozenset({"input_sizes", "offset"}),
    "aten::unfold_backward": frozenset({"input_sizes", "size"}),
    "aten::linspace": frozenset({"steps"}),
    "aten::logspace": frozenset({"steps"}),
    "aten::tril_indices": frozenset({"col", "row"}),
    "aten::triu_indices": frozenset({"col", "row"}),
    "tpu_compile::graph": frozenset({"sizes", "inner_sizes"}),
}

# Of these the sizes of tensors that an op makes for itself. Others follow from sizes of tensors.
OF_TENSORS = frozenset({"inner_sizes"})

# In a schema's text: `real_type` says int for SymInt.
_SYMINT = re.compile(r"SymInt(?:\[\d*\])?\??(?:\[\])?\s+(\w+)")


@functools.cache
def sizes_of(op: torch._ops.OpOverload) -> frozenset[str]:
    """Names of the arguments of an overload that may vary with the sizes of tensors.

    Example:
        >>> sizes_of(torch.ops.aten.topk.default), sizes_of(torch.ops.aten.sum.dim_IntList)
        (frozenset({'k'}), frozenset())
    """
    declared = _DECLARED.get(op._schema.name, frozenset())
    return declared | (_SIZES & set(_SYMINT.findall(str(op._schema))))
