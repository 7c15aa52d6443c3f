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


def _i(device: str, *size: int) -> torch.Tensor:
    return torch.zeros(*size, device=device, dtype=torch.int64)


MISTAKES: dict[str, Mistake] = {
    "mm shapes": lambda d: _f(d, 2, 3) @ _f(d, 4, 5),
    "mm dims": lambda d: torch.mm(_f(d, 2, 3, 4), _f(d, 4, 5)),
    "mm dtypes": lambda d: torch.mm(_f(d, 2, 3), _f(d, 3, 2).double()),
    "matmul batch": lambda d: torch.matmul(_f(d, 2, 3, 4), _f(d, 3, 4, 5)),
    "matmul vector": lambda d: torch.matmul(_f(d, 2, 3), _f(d, 4)),
    "bmm dims": lambda d: torch.bmm(_f(d, 2, 3), _f(d, 3, 2)),
    "bmm shapes": lambda d: torch.bmm(_f(d, 2, 3, 4), _f(d, 2, 5, 6)),
    "bmm batch": lambda d: torch.bmm(_f(d, 2, 3, 4), _f(d, 3, 4, 5)),
    "addmm": lambda d: torch.addmm(_f(d, 7), _f(d, 2, 3), _f(d, 3, 4)),
    "dot": lambda d: torch.dot(_f(d, 3), _f(d, 4)),
    "linear features": lambda d: F.linear(_f(d, 2, 3), _f(d, 5, 4)),
    "linear bias": lambda d: F.linear(_f(d, 2, 3), _f(d, 5, 3), _f(d, 4)),
    "add broadcast": lambda d: _f(d, 2, 3) + _f(d, 4),
    "mul broadcast in place": lambda d: _f(d, 3).mul_(_f(d, 2, 3)),
    "in-place cast": lambda d: _i(d, 3).add_(1.5),
    "in-place division": lambda d: _i(d, 3).div_(2),
    "bitwise float": lambda d: _f(d, 3) & _f(d, 3),
    "bitwise shift float": lambda d: _f(d, 3) << 1,
    "bool subtract": lambda d: (_f(d, 3) > 0) - (_f(d, 3) > 0),
    "bool negate": lambda d: -(_f(d, 3) > 0),
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
    "view dtype": lambda d: _f(d, 3).view(torch.float64),
}


def complaint(mistake: Mistake, device: str) -> tuple[type[BaseException] | None, str]:
    """What the mistake raises on a device: the class and the text."""
    try:
        mistake(device)
    except Exception as error:
        return type(error), str(error)
    return None, ""
