"""The kernels of attention by the interpreter: values and gradients, against PyTorch in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tpu_core.lowering.attention import attention
from tpu_core.lowering.implementations import Target
from tpu_kernels.ops.attention.flash import backward, forward


@dataclass(frozen=True)
class Case:
    """A call: sizes, and options of `F.scaled_dot_product_attention`."""

    rows: int
    columns: int
    size: int = 32
    value_size: int | None = None
    batch: int = 1
    heads: int = 2
    key_heads: int = 2
    dtype: torch.dtype = torch.float32
    is_causal: bool = False
    scale: float | None = None
    mask: Callable[[], torch.Tensor] | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Query, key, value, and a gradient of the result."""
        value_size = self.value_size or self.size
        shapes = [
            (self.batch, self.heads, self.rows, self.size),
            (self.batch, self.key_heads, self.columns, self.size),
            (self.batch, self.key_heads, self.columns, value_size),
            (self.batch, self.heads, self.rows, value_size),
        ]
        return [torch.randn(shape, dtype=self.dtype) for shape in shapes]

    def expected(
        self, tensors: list[torch.Tensor], mask: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """Output and gradients of PyTorch on the CPU in float64."""
        *leaves, grad = (x.detach().double().requires_grad_() for x in tensors)
        wide = mask.double() if mask is not None and mask.is_floating_point() else mask
        out = F.scaled_dot_product_attention(
            *leaves,
            attn_mask=wide,
            is_causal=self.is_causal,
            scale=self.scale,
            enable_gqa=self.heads != self.key_heads,
        )
        return [x.detach() for x in (out, *torch.autograd.grad(out, leaves, grad))]

    def computed(
        self,
        tensors: list[torch.Tensor],
        mask: torch.Tensor | None,
        forward: Callable[..., Any] = forward,
    ) -> list[torch.Tensor]:
        """Output, of the kernel or of another function, and gradients of the kernels."""

        def both(q: Any, k: Any, v: Any, grad: Any, bias: Any) -> Any:
            out = forward(q, k, v, bias, 0.0, self.is_causal, scale=self.scale)
            mask = [True, True, True, False]
            args = (grad, q, k, v, bias, mask, out[0], out[1], None, None, 0, 0, 0.0)
            seeds = (out[6], out[7])
            grads = backward(*args, self.is_causal, *seeds, scale=self.scale)
            return out[0], *grads[:3]

        arrays = [None if x is None else array(x) for x in (*tensors, mask)]
        with Target("cpu").applied(), jax.enable_x64(True):
            compiled = jax.jit(both).lower(*arrays).compile({"xla_backend_optimization_level": 0})
            return [torch.from_numpy(np.asarray(x, np.float64)) for x in compiled(*arrays)]


def array(x: torch.Tensor) -> jax.Array:
    wide = x.float() if x.is_floating_point() else x
    return jnp.asarray(wide.numpy()).astype(str(x.dtype).removeprefix("torch."))


def window(rows: int, columns: int) -> torch.Tensor:
    """Each query meets the 50 keys up to its place."""
    distance = torch.arange(rows)[:, None] - torch.arange(columns)
    return (distance >= 0) & (distance < 50)


def segments(*lengths: int) -> torch.Tensor:
    """Sequences side by side: a token meets those of its own."""
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return ids[:, None] == ids


CASES = {
    "causal, several blocks": Case(384, 384, 64, is_causal=True),
    "blocks of 512": Case(640, 600, heads=1, key_heads=1, is_causal=True),
    "more keys, grouped queries": Case(128, 384, 128, heads=4, scale=0.2),
    "causal, more keys than queries": Case(128, 384, 64, is_causal=True),
    "causal, more queries than keys": Case(300, 130, is_causal=True),
    "bfloat16, one key head": Case(
        256, 256, 128, heads=4, key_heads=1, is_causal=True, dtype=torch.bfloat16
    ),
    "one query": Case(1, 300, batch=3, heads=4),
    "one key": Case(5, 1),
    "one of each, causal": Case(1, 1, 1, is_causal=True),
    "prime numbers": Case(131, 257, 37, value_size=11, heads=3, key_heads=3, is_causal=True),
    "a head of 192, values of 128": Case(64, 64, 192, value_size=128),
    "Llama: four queries' heads a key": Case(
        160, 160, 128, heads=8, key_heads=2, is_causal=True, dtype=torch.bfloat16
    ),
    "Mixtral: a window": Case(
        130, 130, 128, heads=4, key_heads=1, mask=lambda: window(130, 130), dtype=torch.bfloat16
    ),
    "Gemma: a head of 256, scaled otherwise": Case(
        140, 140, 256, key_heads=1, is_causal=True, scale=224**-0.5
    ),
    "DeepSeek: a head of 192, values of 128, causal": Case(
        140, 140, 192, value_size=128, is_causal=True, dtype=torch.bfloat16
    ),
    "ViT: 197 tokens": Case(197, 197, 64, heads=3, key_heads=3),
    "segments, one of them empty": Case(149, 149, mask=lambda: segments(64, 0, 1, 84)),
    "no score counts": Case(17, 131, mask=lambda: torch.zeros(17, 131, dtype=torch.bool)),
    "no key of a batch counts": Case(
        9,
        130,
        batch=2,
        mask=lambda: torch.tensor([True, False])[:, None, None, None].expand(2, 1, 1, 130),
    ),
    "padding of keys": Case(
        40,
        200,
        batch=2,
        heads=4,
        mask=lambda: torch.arange(200) < torch.tensor([77, 200])[:, None, None, None],
    ),
    "booleans for each query, shared by heads": Case(
        150, 150, heads=4, key_heads=1, mask=lambda: window(150, 150)
    ),
    "booleans for each head": Case(33, 140, batch=2, mask=lambda: torch.rand(2, 2, 33, 140) < 0.5),
    "booleans for whole queries": Case(20, 140, mask=lambda: torch.arange(20)[:, None] != 7),
    "a bias for each head, with infinities": Case(
        140,
        130,
        batch=2,
        mask=lambda: torch.where(window(140, 130), torch.randn(2, 140, 130), -torch.inf),
    ),
    "a bias of the keys in bfloat16": Case(
        70, 130, dtype=torch.bfloat16, mask=lambda: torch.randn(1, 130, dtype=torch.bfloat16)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_float64(name: str) -> None:
    case = CASES[name]
    tensors, mask = case.tensors(), case.mask and case.mask()
    got, expected = case.computed(tensors, mask), case.expected(tensors, mask)
    # Probabilities are rounded to bfloat16 before they meet the values, as in all such kernels.
    bound = 2e-5 if case.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(got, expected, atol=bound, rtol=bound)


def test_the_backward_pass_may_follow_on_the_plain_forward_pass() -> None:
    case = CASES["booleans for whole queries"]
    tensors, mask = case.tensors(), case.mask and case.mask()
    got, expected = case.computed(tensors, mask, attention), case.expected(tensors, mask)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)
