"""Stances, modes, options and resets of `torch.compile`."""

from __future__ import annotations

import pytest
import torch

from tpu_compile.graph_op import GRAPHS


def function(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 2


def test_stances() -> None:
    f = torch.compile(function, dynamic=False)
    x = torch.ones(3, device="tpu")
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(f(x), function(x))
    assert not GRAPHS
    f(x)
    assert len(GRAPHS) == 1
    with torch.compiler.set_stance("fail_on_recompile"):
        f(x)
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            f(torch.ones(4, device="tpu"))


@pytest.mark.parametrize(
    "mode", ["default", "lite", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
)
def test_modes_of_other_devices_are_accepted(mode: str) -> None:
    x = torch.ones(3, device="tpu")
    assert torch.equal(torch.compile(function, mode=mode)(x), function(x))


def test_the_modes_are_those_of_inductor() -> None:
    from torch._inductor import list_mode_options

    from tpu_compile.backend import MODES

    assert set(MODES) == set(list_mode_options())


def test_a_mode_that_does_not_exist() -> None:
    f = torch.compile(function, mode="fastest")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no mode 'fastest'") as info:
        f(torch.ones(3, device="tpu"))
    assert "max-autotune" in str(info.value)


def test_options_of_inductor_are_ignored() -> None:
    x = torch.ones(3, device="tpu")
    f = torch.compile(function, options={"max_autotune": True})
    assert torch.equal(f(x), function(x))


def test_a_reset_between_two_functions() -> None:
    """What has run before is compared with what runs later, but for graphs that are gone."""
    for f in (lambda x, n: x.clamp(max=n) * 2, lambda x, n: x.clamp(max=n) + 5):
        torch.compiler.reset()
        compiled = torch.compile(f, dynamic=True)
        for rows, most in ((4, 3), (5, 2), (6, 7)):
            x = torch.randn(rows, 3)
            torch.testing.assert_close(compiled(x.to("tpu"), most).cpu(), f(x, most))


def test_a_reset_lets_go_of_the_graphs() -> None:
    x = torch.ones(3, device="tpu", requires_grad=True)
    out = torch.compile(function)(x).sum()
    GRAPHS.clear()
    recorded = torch.compile(lambda x: torch.cos(x) + 1)(x.detach())
    assert GRAPHS
    torch.compiler.reset()
    assert not GRAPHS
    # What is left of before still runs.
    torch.testing.assert_close(recorded.cpu(), torch.ones(3).cos() + 1)
    out.backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.cpu(), 2 * torch.ones(3).cos())
