"""Products with weights of 4 bits in compiled graphs."""

from __future__ import annotations

import torch

ROWS, COLUMNS, GROUP = 32, 256, 64


def test_a_product_with_packed_weights() -> None:
    numbers = torch.randint(0, 16, (ROWS, COLUMNS), dtype=torch.int32)
    scales, zeros = torch.rand(COLUMNS // GROUP, ROWS) / 8, torch.randn(COLUMNS // GROUP, ROWS)
    x = torch.randn(3, COLUMNS)
    spread = [part.T.repeat_interleave(GROUP, 1) for part in (scales, zeros)]
    weight = (numbers - 8) * spread[0] + spread[1]
    halves = (numbers[:, ::2] << 4 | numbers[:, 1::2]).to(torch.uint8)
    packed = torch._convert_weight_to_int4pack(halves.to("tpu"), 8)
    given = torch.stack([scales, zeros], -1).to("tpu")

    @torch.compile(fullgraph=True)
    def product(x: torch.Tensor) -> torch.Tensor:
        return torch._weight_int4pack_mm(x, packed, GROUP, given).relu()

    got = product(x.to("tpu")).cpu()
    torch.testing.assert_close(got, (x @ weight.T).relu(), atol=1e-4, rtol=1e-4)
