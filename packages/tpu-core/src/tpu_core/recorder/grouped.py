"""Geometry of grouped products.

PyTorch's meta function is CUDA's: it refuses all dtypes but bfloat16, and rows that do not begin at
multiples of 16 bytes. Its CPU takes three dtypes; the device asks nothing of the strides.
"""

from __future__ import annotations

import torch

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | int | None = None,
) -> torch.Tensor:
    """Meta function of ``aten::_grouped_mm``.

    Args:
        a, b, offs, bias, out_dtype: As of `torch.nn.functional.grouped_mm`, on ``meta`` or fake.

    Raises:
        RuntimeError: In the words of PyTorch's CPU kernel (aten/src/ATen/native/GroupedMMUtils.h).
    """
    for name, x in (("mat_a", a), ("mat_b", b)):
        torch._check(
            x.dtype in _DTYPES,
            lambda name=name, x=x: (
                f"Expected {name} to be Float32, BFloat16 or Float16 matrix, got {x.dtype}"
            ),
        )
    for name, x in (("mat_a", a), ("mat_b", b)):
        torch._check(x.dim() in (2, 3), lambda name=name: f"{name} has to be 2 or 3d")
    ranks = a.dim(), b.dim()
    if ranks != (2, 2):  # else it is in groups, and what is past the last is not read
        torch._check(
            a.size(-1) == b.size(-2), lambda: "contraction dimension of mat_a and mat_b must match"
        )
    torch._check(
        (offs is not None) == (2 in ranks),
        lambda: (
            "Have to provide offsets if there is a 2d matrix, or no offset if both matrices are 3d"
        ),
    )
    if offs is not None:
        torch._check(offs.dim() == 1, lambda: "offs has to be 1D")
        torch._check(offs.dtype == torch.int32, lambda: "Offsets have to be int32")
    torch._check(bias is None, lambda: "Bias not supported yet")
    # The recorder has a dtype as its number, which the op takes as well.
    dtype = torch.ops.aten.new_empty.default(a, [0], dtype=out_dtype).dtype
    torch._check(dtype == a.dtype, lambda: "Grouped gemm output dtype must match `mat_a` dtype")
    torch._check(
        a.dtype == b.dtype,
        lambda: f"expected m1 and m2 to have the same dtype, but got: {a.dtype} != {b.dtype}",
    )
    groups: list[int] = []
    if offs is None:
        torch._check(a.size(0) == b.size(0), lambda: "batched dimension has to match")
        groups = [a.size(0)]
    elif ranks == (2, 2):
        groups = [offs.size(0)]
    else:
        batch = (a if a.dim() == 3 else b).size(0)
        torch._check(offs.size(0) == batch, lambda: "matrix batch sizes have to match")
    return a.new_empty([*groups, a.size(-2), b.size(-1)])
