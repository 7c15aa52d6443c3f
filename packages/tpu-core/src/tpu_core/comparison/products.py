"""Float32 products as a TPU computes them: of operands in bfloat16, summed in float32.

The matrix unit of a TPU multiplies bfloat16 numbers. At the precision ``"medium"`` an operand is
rounded to one of them; at ``"high"`` it is split into two, and three of the four products are
summed (`jax.lax.Precision.DEFAULT` and ``HIGH``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
Tensor = torch.Tensor

# Rounding of a product's operands: 8 bits of a mantissa, or twice as many.
EPSILONS = {"medium": 2.0**-8, "high": 2.0**-16}

_BILINEAR = {aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default}
_WITH_SUMMAND = {
    aten.addmm.default: aten.mm.default,
    aten.baddbmm.default: aten.bmm.default,
    aten.addmv.default: aten.mv.default,
}
# Parts of names of ops that compute products, and more, in one kernel.
_FUSED = ("attention", "_rnn", "lstm", "gru", "encoder_layer", "addbmm", "._trilinear")


class TpuProducts(TorchDispatchMode):
    """CPU ops on float32 tensors whose products are those of a TPU.

    Args:
        precision: ``"medium"`` or ``"high"``.

    Attributes:
        epsilon: The rounding of an operand.
        count: Number of products so far.

    Raises:
        ValueError: An op computes products within a kernel that does more.
    """

    def __init__(self, precision: str) -> None:
        super().__init__()
        self.epsilon = EPSILONS[precision]
        self.count = 0
        self._splits = precision == "high"

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(x, Tensor) and x.dtype is torch.float32 for x in args):
            return func(*args, **kwargs)
        if func in _BILINEAR:
            return self._bilinear(func, *args)
        if func in _WITH_SUMMAND:
            summand, a, b = args
            product = self._bilinear(_WITH_SUMMAND[func], a, b)
            return summand * kwargs.get("beta", 1) + product * kwargs.get("alpha", 1)
        if func is aten.convolution.default:
            x, weight, bias, *rest = args
            made = self._bilinear(lambda a, b: func(a, b, None, *rest), x, weight)
            return made if bias is None else made + bias.reshape(-1, *[1] * (weight.dim() - 2))
        if func is aten.convolution_backward.default:
            return self._convolution_backward(*args)
        # In inference mode composite ops arrive whole.
        with self:
            made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
        if any(part in str(func) for part in _FUSED):
            raise ValueError(
                f"torch.tpu.compare: products within {func} cannot be emulated. Compare without "
                "emulate=, or replace the layer by one of plain products."
            )
        return func(*args, **kwargs)

    def _parts(self, t: Tensor) -> tuple[Tensor, Tensor | None]:
        high = t.bfloat16().float()
        # An infinity has no rest.
        low = (t - high).nan_to_num(0, 0, 0).bfloat16().float() if self._splits else None
        return high, low

    def _bilinear(self, product: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Any:
        self.count += 1
        (a, a_low), (b, b_low) = self._parts(a), self._parts(b)
        made = product(a, b)
        if a_low is not None and b_low is not None:
            made = made + (product(a, b_low) + product(a_low, b))
        return made

    def _convolution_backward(
        self, gradient: Tensor, x: Tensor, weight: Tensor, sizes: Any, *rest: Any
    ) -> tuple[Tensor | None, ...]:
        *options, wanted = rest
        products = [wanted[0], wanted[1], False]

        def backward(g: Tensor, x: Tensor, w: Tensor) -> Any:
            return aten.convolution_backward(g, x, w, None, *options, products)

        self.count += 1
        (g, g_low), (x, x_low) = self._parts(gradient), self._parts(x)
        w, w_low = self._parts(weight)
        made = backward(g, x, w)
        if g_low is not None and x_low is not None and w_low is not None:
            small = zip(backward(g, x_low, w_low), backward(g_low, x, w))
            made = [m if m is None else m + (s + t) for m, (s, t) in zip(made, small)]
        others = [d for d in range(gradient.dim()) if d != 1]
        return made[0], made[1], gradient.sum(others) if wanted[2] else None


@contextmanager
def tpu_products(precision: str) -> Iterator[TpuProducts]:
    """Have float32 products on the CPU computed as a TPU does, one op for each.

    Args:
        precision: ``"medium"`` or ``"high"``.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    mkldnn = torch._C._get_mkldnn_enabled()  # `torch.backends.mkldnn.flags` warns of TF32
    torch.backends.mha.set_fastpath_enabled(False)
    torch._C._set_mkldnn_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), TpuProducts(precision) as products:
            yield products
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        torch._C._set_mkldnn_enabled(mkldnn)
