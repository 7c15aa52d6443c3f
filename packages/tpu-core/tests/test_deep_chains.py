"""Long chains of dependent ops compile, and in time that is in proportion to their length."""

from __future__ import annotations

import torch

from interpreter import clean
from tpu_core import modes

WHOLE = modes.Mode("whole", max_ops=0)


def test_a_chain_of_transposes_does_not_end_the_process() -> None:
    out = clean(
        """
        import torch
        from tpu_core import modes

        with modes.using(modes.Mode("whole", max_ops=0)):
            x = torch.arange(16.0, device="tpu")
            for _ in range(500):
                x = x.view(2, 8).t().reshape(16)
            print(x.tolist() == torch.arange(16.0).tolist())  # 500 is a multiple of the period, 4
    """,
        TPU_CACHE="off",
    )
    assert out == "True\n"


def test_sums_in_a_chain_are_not_computed_again_and_again() -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(400):
            x = x - x.mean()
        return x

    x = torch.randn(16)
    with modes.using(WHOLE):
        # Where XLA may fuse all of it, compiling takes longer than a test may.
        torch.testing.assert_close(chain(x.to("tpu")).cpu(), chain(x), rtol=1e-4, atol=1e-5)


def test_several_results_behind_one_barrier() -> None:
    def chain(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(40):
            values, indices = x.abs().max(0)
            x = x * 0.9 + values * (indices % 2)
        return x, indices

    x = torch.randn(7, 3)
    with modes.using(WHOLE):
        ours = [t.cpu() for t in chain(x.to("tpu"))]
    for a, b in zip(ours, chain(x), strict=True):
        torch.testing.assert_close(a, b)
