"""Typical mistakes in shapes, dtypes and dims, as functions of a device.

Each raises on PyTorch's CPU device at its own line; the device must raise the same, in every mode.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Mistake = Callable[[str], object]


def _f(device: str, *size: int) -> torch.Tensor:
    return torch.ones(*size, device=device)


def _bytes(device: str, *size: int) -> torch.Tensor:
    return torch.zeros(*size, device=device, dtype=torch.uint8)


def _i(device: str, *size: int) -> torch.Tensor:
    return torch.zeros(*size, device=device, dtype=torch.int64)


def _scaled(x: torch.Tensor, *factors: float) -> torch.Tensor:
    for factor in factors:
        torch.ops.aten.mul_.Scalar(x, factor)
    return x


MISTAKES: dict[str, Mistake] = {
    "mm shapes": lambda d: _f(d, 2, 3) @ _f(d, 4, 5),
    "mm dims": lambda d: torch.mm(_f(d, 2, 3, 4), _f(d, 4, 5)),
    "mm dtypes": lambda d: torch.mm(_f(d, 2, 3), _f(d, 3, 2).double()),
    "matmul batch": lambda d: torch.matmul(_f(d, 2, 3, 4), _f(d, 3, 4, 5)),
    "matmul vector": lambda d: torch.matmul(_f(d, 2, 3), _f(d, 4)),
    "bmm dims": lambda d: torch.bmm(_f(d, 2, 3), _f(d, 3, 2)),
    "bmm shapes": lambda d: torch.bmm(_f(d, 2, 3, 4), _f(d, 2, 5, 6)),
    "bmm batch": lambda d: torch.bmm(_f(d, 2, 3, 4), _f(d, 3, 4, 5)),
    "imaginary alpha": lambda d: torch.addmm(_f(d, 2, 2), _f(d, 2, 2), _f(d, 2, 2), alpha=1j),
    "imaginary beta": lambda d: torch.addmv(_f(d, 2), _f(d, 2, 2), _f(d, 2), beta=1 - 0.5j),
    "imaginary value": lambda d: torch.addcmul(_f(d, 2), _f(d, 2), _f(d, 2), value=1j),
    "imaginary weight": lambda d: torch.lerp(_f(d, 2), _f(d, 2), 1j),
    "imaginary bound": lambda d: _f(d, 2).clamp(1j),
    "imaginary slope": lambda d: F.elu(_f(d, 2), 1j),
    "addmm": lambda d: torch.addmm(_f(d, 7), _f(d, 2, 3), _f(d, 3, 4)),
    "dot": lambda d: torch.dot(_f(d, 3), _f(d, 4)),
    "linear features": lambda d: F.linear(_f(d, 2, 3), _f(d, 5, 4)),
    "linear bias": lambda d: F.linear(_f(d, 2, 3), _f(d, 5, 3), _f(d, 4)),
    "add broadcast": lambda d: _f(d, 2, 3) + _f(d, 4),
    "mul broadcast in place": lambda d: _f(d, 3).mul_(_f(d, 2, 3)),
    "bool alpha": lambda d: torch.ops.aten.add.Scalar(_f(d, 3), 1, True),
    "bool alpha in place": lambda d: torch.ops.aten.sub_.Scalar(_f(d, 3), 1, True),
    "glu_jvp shapes": lambda d: torch.ops.aten.glu_jvp(_f(d, 1), _f(d, 1), _f(d, 1), 0),
    "in-place cast": lambda d: _i(d, 3).add_(1.5),
    "in-place cast after a whole number": lambda d: (_i(d, 4).mul_(2), _scaled(_i(d, 4), 2, 1.5)),
    "subtract a bool after a number": lambda d: (_i(d, 4) - 2, _i(d, 4) - True),
    "subtract a bool from floats": lambda d: torch.sub(_f(d, 4), True, out=_f(d, 4)),
    "in-place division": lambda d: _i(d, 3).div_(2),
    "bitwise float": lambda d: _f(d, 3) & _f(d, 3),
    "bitwise shift float": lambda d: _f(d, 3) << 1,
    "bool subtract": lambda d: (_f(d, 3) > 0) - (_f(d, 3) > 0),
    "bool negate": lambda d: -(_f(d, 3) > 0),
    "sorter dtype": lambda d: torch.searchsorted(_f(d, 3), _f(d, 2), sorter=_f(d, 3)),
    "sorter half": lambda d: torch.searchsorted(
        _f(d, 1).half(), _f(d, 1).half(), sorter=_f(d, 1).half()
    ),
    "norm of a bool order": lambda d: torch._foreach_norm([_f(d, 3)], True),
    "sign of a complex list": lambda d: torch._foreach_sign([_f(d, 3).cfloat()]),
    "norm of a list": lambda d: torch._foreach_norm([_f(d, 3)], -2, torch.complex64),
    "norm of a list to integers": lambda d: torch._foreach_norm([_f(d, 3)], 3, torch.int32),
    "power sum of integers": lambda d: torch._foreach_powsum([_i(d, 3)], 2),
    "power sum to integers": lambda d: torch.ops.aten.linalg__powsum(
        _f(d, 3), 3, dtype=torch.int32
    ),
    "power sum of complex to integers": lambda d: torch._foreach_powsum(
        [_f(d, 3).cfloat()], 2, torch.int64
    ),
    "logits of another shape": lambda d: torch.ops.aten.binary_cross_entropy_with_logits(
        _f(d, 2, 3), _f(d, 3)
    ),
    "weights of the positive of another shape": lambda d: F.binary_cross_entropy_with_logits(
        _f(d, 3), _f(d, 3), pos_weight=_f(d, 2, 3)
    ),
    "unbind into a parameter": lambda d: torch.unbind_copy(
        _f(d, 2, 3), out=[_f(d, 3).requires_grad_() for _ in range(2)]
    ),
    "unbind into too few": lambda d: torch.unbind_copy(_f(d, 2, 3), out=[_f(d, 3)]),
    "split into too few": lambda d: torch.split_copy(_f(d, 2, 3), 1, out=[_f(d, 1, 3)]),
    "split into other shapes": lambda d: torch.split_copy(_f(d, 2, 3), 1, out=[_f(d, 0), _f(d, 0)]),
    "cat shapes": lambda d: torch.cat([_f(d, 2, 3), _f(d, 2, 4)], 0),
    "cat dims": lambda d: torch.cat([_f(d, 2, 3), _f(d, 2, 3, 4)], 0),
    "cat nothing": lambda d: torch.cat([]),
    "stack shapes": lambda d: torch.stack([_f(d, 2), _f(d, 3)]),
    "select out of range": lambda d: _f(d, 2, 3)[5],
    "too many indices": lambda d: _f(d, 2, 3)[0, 0, 0],
    "dim out of range": lambda d: _f(d, 2, 3).sum(2),
    "softmax dim": lambda d: torch.softmax(_f(d, 2, 3), 5),
    "transpose dim": lambda d: _f(d, 2, 3).transpose(0, 2),
    "permute dims": lambda d: _f(d, 2, 3).permute(0, 0),
    "squeeze dim": lambda d: _f(d, 2, 3).squeeze(4),
    "view size": lambda d: _f(d, 2, 3).view(4),
    "view strides": lambda d: _f(d, 2, 3).t().view(6),
    "reshape size": lambda d: _f(d, 2, 3).reshape(4, 2),
    "expand": lambda d: _f(d, 2, 3).expand(4, 3),
    "narrow": lambda d: _f(d, 4).narrow(0, 2, 5),
    "split sizes": lambda d: _f(d, 4).split([1, 2]),
    "chunk zero": lambda d: _f(d, 4).chunk(0),
    "index dtype": lambda d: _f(d, 4)[_f(d, 2)],
    "mask shape": lambda d: _f(d, 4)[torch.ones(3, dtype=torch.bool, device=d)],
    "index broadcast": lambda d: _f(d, 4, 4)[_i(d, 2), _i(d, 3)],
    "index_select dtype": lambda d: torch.index_select(_f(d, 3, 3), 0, _f(d, 2)),
    "embedding dtype": lambda d: F.embedding(_f(d, 2), _f(d, 5, 3)),
    "gather dtype": lambda d: _f(d, 3, 3).gather(0, _f(d, 1, 3)),
    "gather dims": lambda d: _f(d, 3, 3).gather(0, _i(d, 3)),
    "gather size": lambda d: _f(d, 3, 3).gather(0, _i(d, 2, 5)),
    "scatter dtype": lambda d: _f(d, 3, 3).scatter(0, _f(d, 1, 3), _f(d, 1, 3)),
    "scatter dims": lambda d: _f(d, 3, 3).scatter(0, _i(d, 3), _f(d, 3, 3)),
    "scatter source dtype": lambda d: _f(d, 3, 3).scatter_(0, _i(d, 1, 3), _i(d, 1, 3)),
    "index_add sizes": lambda d: _f(d, 3, 3).index_add(0, _i(d, 2), _f(d, 3, 3)),
    "index_copy sizes": lambda d: _f(d, 3, 3).index_copy(0, _i(d, 2), _f(d, 3, 3)),
    "where condition": lambda d: torch.where(_f(d, 3), _f(d, 3), _f(d, 3)),
    "where shapes": lambda d: torch.where(_f(d, 2) > 0, _f(d, 3), _f(d, 3)),
    "masked_fill mask": lambda d: _f(d, 3).masked_fill(_f(d, 3), 0.0),
    "masked_fill shape": lambda d: _f(d, 3).masked_fill(_f(d, 4) > 0, 0.0),
    "conv channels": lambda d: F.conv2d(_f(d, 1, 3, 8, 8), _f(d, 4, 5, 3, 3)),
    "conv kernel too large": lambda d: F.conv2d(_f(d, 1, 3, 2, 2), _f(d, 4, 3, 3, 3)),
    "conv dims": lambda d: F.conv2d(_f(d, 3, 8), _f(d, 4, 3, 3, 3)),
    "conv bias": lambda d: F.conv2d(_f(d, 1, 3, 8, 8), _f(d, 4, 3, 3, 3), _f(d, 3)),
    "conv dtype": lambda d: F.conv2d(_i(d, 1, 3, 8, 8), _f(d, 4, 3, 3, 3)),
    "conv groups": lambda d: F.conv2d(_f(d, 1, 4, 8, 8), _f(d, 3, 2, 3, 3), groups=2),
    "transposed conv output padding": lambda d: F.conv_transpose2d(
        _f(d, 1, 2, 3, 3), _f(d, 2, 2, 2, 2), stride=(1, 2), output_padding=(0, 2)
    ),
    "transposed conv1d output padding": lambda d: F.conv_transpose1d(
        _f(d, 1, 1, 3), _f(d, 1, 1, 2), output_padding=1
    ),
    "transposed conv groups": lambda d: F.conv_transpose1d(
        _f(d, 1, 2, 2), _f(d, 2, 2, 2), groups=4
    ),
    "no conv groups": lambda d: F.conv_transpose1d(_f(d, 1, 2, 2), _f(d, 2, 2, 2), groups=0),
    "max_pool kernel": lambda d: F.max_pool2d(_f(d, 1, 1, 2, 2), 5),
    "avg_pool padding": lambda d: F.avg_pool2d(_f(d, 1, 1, 8, 8), 2, padding=3),
    "layer_norm shape": lambda d: F.layer_norm(_f(d, 2, 3), (4,)),
    "layer_norm weight": lambda d: F.layer_norm(_f(d, 2, 3), (3,), _f(d, 2)),
    "batch_norm statistics": lambda d: F.batch_norm(_f(d, 2, 3), _f(d, 2), _f(d, 2)),
    "group_norm groups": lambda d: F.group_norm(_f(d, 2, 5), 2),
    "cross_entropy batch": lambda d: F.cross_entropy(_f(d, 2, 3), _i(d, 4)),
    "cross_entropy target dtype": lambda d: F.cross_entropy(_f(d, 2, 3), _f(d, 2)),
    "cross_entropy target dims": lambda d: F.cross_entropy(_f(d, 2, 3, 4), _i(d, 2)),
    "nll_loss target": lambda d: F.nll_loss(_f(d, 2, 3), _f(d, 2)),
    "mse_loss shapes": lambda d: F.mse_loss(_f(d, 2, 3), _f(d, 2, 4)),
    "bce target": lambda d: F.binary_cross_entropy(_f(d, 2), _f(d, 3)),
    "attention heads": lambda d: F.scaled_dot_product_attention(
        _f(d, 1, 2, 3, 4), _f(d, 1, 2, 3, 5), _f(d, 1, 2, 3, 4)
    ),
    "backward of a vector": lambda d: _f(d, 3).requires_grad_().mul(2).backward(),
    "in-place on a leaf": lambda d: _f(d, 3).requires_grad_().add_(1),
    "gradient of integers": lambda d: _i(d, 3).requires_grad_(),
    "item of many": lambda d: _f(d, 3).item(),
    "truth of many": lambda d: bool(_f(d, 3) > 0),
    "mean of integers": lambda d: _i(d, 3).mean(),
    "topk": lambda d: _f(d, 3).topk(5),
    "sort dim": lambda d: _f(d, 3).sort(2),
    "max of nothing": lambda d: _f(d, 0).max(),
    "out dtype": lambda d: torch.add(_f(d, 3), _f(d, 3), out=_i(d, 3)),
    "negative size": lambda d: torch.empty(-1, device=d),
    "randint range": lambda d: torch.randint(5, 5, (2,), device=d),
    "arange step": lambda d: torch.arange(0, 5, 0, device=d),
    "multinomial": lambda d: torch.multinomial(_f(d, 3), 5),
    "copy sizes": lambda d: _f(d, 3).copy_(_f(d, 4)),
    "set item sizes": lambda d: _f(d, 3, 3).__setitem__(0, _f(d, 2)),
    "tril dims": lambda d: _f(d, 3).tril(),
    "cumsum dim": lambda d: _f(d, 3).cumsum(1),
    "flip dim": lambda d: _f(d, 3).flip(2),
    "roll": lambda d: _f(d, 3).roll((1, 2), (0,)),
    "pad": lambda d: F.pad(_f(d, 2, 2), (1, 1, 1, 1, 1, 1)),
    "reflect pad": lambda d: F.pad(_f(d, 1, 1, 2, 2), (3, 3, 3, 3), mode="reflect"),
    "clamp without bounds": lambda d: _f(d, 3).clamp(),
    "lerp": lambda d: torch.lerp(_f(d, 3), _f(d, 3).double(), 0.5),
    "cholesky square": lambda d: torch.linalg.cholesky(_f(d, 2, 3)),
    "outer": lambda d: torch.outer(_f(d, 2, 2), _f(d, 2)),
    "one_hot dtype": lambda d: F.one_hot(_f(d, 3)),
    "unfold size": lambda d: _f(d, 3).unfold(0, 5, 1),
    "as_strided out of bounds": lambda d: _f(d, 3).as_strided((4,), (1,)),
    "set items by index": lambda d: _f(d, 5).__setitem__(_i(d, 2), _f(d, 7)),
    "set items by mask": lambda d: _f(d, 5).__setitem__(_f(d, 5) > 0, _f(d, 2)),
    "set items dtype": lambda d: _f(d, 5).__setitem__(_i(d, 2), _i(d, 2)),
    "set item imaginary": lambda d: _f(d, 2).__setitem__(0, 1j),
    "number minus mask": lambda d: 1 - (_f(d, 3) > 0),
    "softmax of integers": lambda d: _i(d, 3).softmax(0),
    "deviation of a mask": lambda d: (_f(d, 3) > 0).std(),
    "absolute value of a mask": lambda d: (_f(d, 3) > 0).abs(),
    "bits of complex": lambda d: _f(d, 3).cfloat() & 1,
    "remainder of complex": lambda d: _f(d, 3).cfloat() % 2,
    "order of complex": lambda d: _f(d, 3).cfloat() < 1,
    "relu of complex": lambda d: torch.relu(_f(d, 3).cfloat()),
    "error function of complex": lambda d: torch.erf(_f(d, 3).cfloat()),
    "random range": lambda d: _i(d, 3).random_(0),
    "deviation of integers": lambda d: torch.std(_i(d, 3)),
    "variance of integers": lambda d: torch.var_mean(_i(d, 2, 3), 1),
    "sum without NaN of complex": lambda d: torch.nansum(_f(d, 3).cfloat()),
    "degrees of complex": lambda d: torch.rad2deg(_f(d, 3).cfloat()),
    "relu of masks": lambda d: torch.relu(_f(d, 3).bool()),
    "sort of complex": lambda d: _f(d, 3).cfloat().sort(),
    "membership of complex": lambda d: torch.isin(_f(d, 3).cfloat(), _f(d, 2).cfloat()),
    "histogram of integers": lambda d: torch.histogram(_i(d, 3), 2),
    "segments of integers": lambda d: torch.segment_reduce(_i(d, 3), "sum", lengths=_i(d, 1) + 3),
    "view dtype": lambda d: _f(d, 3).view(torch.float64),
    "gelu form": lambda d: F.gelu(_f(d, 3), approximate="Tanh"),
    "uniform range": lambda d: _f(d, 3).uniform_(3, -1),
    "bernoulli chance": lambda d: _f(d, 3).bernoulli_(2),
    "normal deviation after a good one": lambda d: _f(d, 3).normal_(0, 1).normal_(0, -1),
    "geometric chance after a good one": lambda d: _f(d, 3).geometric_(0.5).geometric_(1.5),
    "celu after a good one": lambda d: [F.celu(_f(d, 3), a) for a in (1.0, 0.0)],
    "softshrink after a good one": lambda d: [F.softshrink(_f(d, 3), n) for n in (0.5, -1)],
    "smooth loss after a good one": lambda d: [
        F.smooth_l1_loss(_f(d, 3), _f(d, 3), beta=b) for b in (1.0, -1.0)
    ],
    "huber loss after a good one": lambda d: [
        F.huber_loss(_f(d, 3), _f(d, 3), delta=b) for b in (1.0, 0.0)
    ],
    "renorm after a good one": lambda d: [_f(d, 2, 3).renorm(1, 0, n) for n in (1.0, -1.0)],
    "histc after a good one": lambda d: [_f(d, 3).histc(3, n, 3) for n in (1.0, 5.0)],
    "histc of no range": lambda d: _f(d, 3).histc(3, 0, float("inf")),
    "backward of elu_ with a negative slope": lambda d: [
        F.elu_(_f(d, 3).requires_grad_() * 1, n).sum().backward() for n in (1.0, -1.0)
    ],
    "backward of leaky_relu_ with a negative slope": lambda d: [
        F.leaky_relu_(_f(d, 3).requires_grad_() * 1, n).sum().backward() for n in (1.0, -1.0)
    ],
    "uniform of integers": lambda d: _i(d, 3).uniform_(),
    "normal of integers": lambda d: _i(d, 3).normal_(),
    "random beyond the dtype": lambda d: _bytes(d, 3).random_(0, 1000),
    "arange step out": lambda d: torch.arange(0, 3, 0, out=_i(d, 3)),
    "aminmax out": lambda d: torch.aminmax(_f(d, 3), out=(_i(d, 1)[0], _i(d, 1)[0])),
    "too many dims": lambda d: torch.aminmax(_f(d, *[1] * 65), dim=0),
    "neg out": lambda d: torch.neg(_f(d, 3), out=_i(d, 3)),
    "triu out": lambda d: torch.triu(_f(d, 3, 3), out=_f(d, 3, 3).double()),
    "amax out": lambda d: torch.amax(_f(d, 3, 3), 0, out=_f(d, 3).double()),
    "clamp out": lambda d: torch.clamp(_f(d, 3), 0, out=_i(d, 3)),
    "any out": lambda d: torch.any(_f(d, 3, 3), 0, out=_i(d, 3)),
    "all out": lambda d: torch.all(_f(d, 3, 3), 0, out=_f(d, 3)),
    "take out": lambda d: torch.take(_f(d, 3), _i(d, 1), out=_i(d, 1)),
    "cross out": lambda d: torch.linalg.cross(_f(d, 3), _f(d, 3), out=_i(d, 3)),
    "cummax out": lambda d: torch.cummax(_f(d, 3), 0, out=(_f(d, 3).double(), _i(d, 3))),
    "negative stride": lambda d: _f(d, 0).set_(_f(d, 3).untyped_storage(), 0, (2,), (-1,)),
    "full beyond the dtype": lambda d: torch.full((3,), 300, dtype=torch.uint8, device=d),
    "full of NaN": lambda d: torch.full((3,), float("nan"), dtype=torch.int64, device=d),
    "fill after a good one": lambda d: _bytes(d, 3).fill_(200).fill_(300),
    "fill beyond a half": lambda d: _f(d, 3).half().fill_(1e6),
    "where beyond the dtype": lambda d: torch.where(_f(d, 3) > 0, _bytes(d, 3), 300),
    "masked_fill beyond the dtype": lambda d: _bytes(d, 3).masked_fill(_f(d, 3) > 0, 300),
    "set item beyond the dtype": lambda d: _bytes(d, 3).__setitem__(0, 300),
    "alpha beyond the dtype": lambda d: torch.add(_bytes(d, 3), _bytes(d, 3), alpha=300),
    "fill with 2**63": lambda d: _i(d, 3).fill_(2**63),
    "cumsum to a mask": lambda d: _f(d, 3).cumsum(0, dtype=torch.bool),
    "median of nothing": lambda d: _f(d, 3, 0).median(-1),
    "mode of nothing": lambda d: _f(d, 3, 0).mode(-1),
    "bits of bfloat16": lambda d: _f(d, 3).bfloat16().bitwise_not(),
    "product of masks": lambda d: (_f(d, 3, 3) > 0) @ (_f(d, 3, 3) > 0),
    "product of other masks": lambda d: (_f(d, 4, 4) > 0) @ (_f(d, 4, 4) > 0),
    "cholesky of bfloat16": lambda d: torch.linalg.cholesky(_f(d, 3, 3).bfloat16()),
    "cholesky of integers": lambda d: torch.cholesky(_i(d, 3, 3)),
    "floor division by zero": lambda d: _i(d, 3) // 0,
    "floor division by zero after a good one": lambda d: [_i(d, 3) // n for n in (2, 0)],
    "in-place division by zero": lambda d: [_i(d, 3).floor_divide_(n) for n in (2, 0)],
    "remainder by zero after a good one": lambda d: [_i(d, 3) % n for n in (2, 0)],
    "remainder by a zero tensor": lambda d: [_i(d, 3) % torch.tensor(n) for n in (2, 0)],
    "fmod by zero after a good one": lambda d: [torch.fmod(_i(d, 3), n) for n in (2, 0)],
    "truncating division by zero": lambda d: [
        _i(d, 3).div(n, rounding_mode="trunc") for n in (2, 0)
    ],
    "division by what is zero in bytes": lambda d: [_bytes(d, 3) // n for n in (257, 256)],
    "geqrf out": lambda d: torch.geqrf(_f(d, 3, 3), out=(_i(d, 3, 3), _i(d, 3))),
    "multinomial out": lambda d: torch.multinomial(_f(d, 3), 2, out=_f(d, 2)),
    "sort out": lambda d: torch.sort(_f(d, 2), out=(_f(d, 2), _f(d, 2))),
    "searchsorted out": lambda d: torch.searchsorted(_f(d, 2), _f(d, 2), out=_f(d, 2)),
    "isin out": lambda d: torch.isin(_f(d, 2), _f(d, 2), out=_f(d, 2)),
    "kthvalue out": lambda d: torch.kthvalue(_f(d, 2), 1, out=(_f(d, 1)[0], _f(d, 1)[0])),
    "cat out twice": lambda d: torch.cat([_f(d, 2), _f(d, 3)], out=_f(d, 1).expand(5)),
    "hardtanh backward of integers": lambda d: torch.ops.aten.hardtanh_backward(
        _i(d, 3), _i(d, 3), 0, 1
    ),
    "stft of halves": lambda d: torch.stft(_f(d, 8).half(), 4, return_complex=True),
    "stft of bfloat16": lambda d: torch.stft(_f(d, 8).bfloat16(), 4, return_complex=True),
    "conv without outputs": lambda d: F.conv1d(_f(d, 2, 3, 5), _f(d, 0, 3, 2)),
}


def _pairs(device: str) -> torch.Tensor:
    return torch.tensor([[2, 7], [3, 9]], device=device)


def _divided(device: str, name: str) -> torch.Tensor:
    x = _pairs(device)
    getattr(x[:, 1], name)(x[:, 0])
    return x


def _complex(device: str) -> torch.Tensor:
    return (torch.eye(3, device=device) * 2 + 1).cfloat()


# Calls that are right, whatever the CPU's op says of tensors of zeros.
RIGHT: dict[str, Callable[[str], torch.Tensor]] = {
    **{
        f"{name} of views": lambda d, name=name: _divided(d, name)
        for name in ("floor_divide_", "remainder_", "fmod_")
    },
    "remainder by itself": lambda d: (lambda x: x.remainder_(x))(_pairs(d)),
    "number by a mask": lambda d: 2 % (_f(d, 2) > 0),
    "cholesky_inverse of complex": lambda d: torch.cholesky_inverse(_complex(d)),
    "cholesky of complex": lambda d: torch.linalg.cholesky(_complex(d) @ _complex(d)),
    "lu_solve of complex": lambda d: torch.linalg.lu_solve(
        *torch.linalg.lu_factor(_complex(d)), _f(d, 3, 1).cfloat()
    ),
    "masked_select of a number": lambda d: _f(d, 1)[0].masked_select(_f(d, 1)[0] > 0),
    "sum to a mask": lambda d: _f(d, 2, 3).sum(1, dtype=torch.bool),
    "prod to a mask": lambda d: _f(d, 3).prod(dtype=torch.bool),
    "conv without channels": lambda d: F.conv1d(_f(d, 2, 0, 5), _f(d, 3, 0, 2)),
    "index_select of a number": lambda d: _f(d, 1)[0].index_select(0, _i(d, 1)),
    "fill with a negative number": lambda d: _bytes(d, 3).fill_(-1),
    "add beyond the dtype": lambda d: _bytes(d, 3) + 300,
    "compare beyond the dtype": lambda d: _bytes(d, 3) < 300,
    "add 2**63": lambda d: _i(d, 3) + 2**63,
    "multiply by 2**63": lambda d: _f(d, 3) * 2**63,
    "full of 2**63": lambda d: torch.full((2,), 2**63, dtype=torch.uint64, device=d),
    "arange out": lambda d: torch.arange(0.7, 5, 1.5, out=_i(d, 5)),
    "arange of a step under one": lambda d: torch.arange(0, 3, 0.2, dtype=torch.int16, device=d),
}


def complaint(mistake: Mistake, device: str) -> tuple[type[BaseException] | None, str]:
    """What the mistake raises on a device: the class and the text."""
    try:
        mistake(device)
    except Exception as error:
        return type(error), str(error)
    return None, ""
