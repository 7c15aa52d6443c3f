"""Programs of collectives as text, and what ranks compare of them."""

from __future__ import annotations

import pytest
import torch

from tpu_distributed.reductions import Reduction
from tpu_distributed.rendezvous import CollectiveCall
from tpu_distributed.stablehlo import ProgramWriter, element_of


def test_text_of_a_program() -> None:
    p = ProgramWriter(2)
    x = p.parameter((4,), "f32")
    assert p.text([p.all_reduce(x, "add")]) == (
        "module @collective {\n"
        "  func.func public @main(%arg0: tensor<4xf32>) -> (tensor<4xf32>) {\n"
        '    %0 = "stablehlo.all_reduce"(%arg0) ({ ^bb0(%a: tensor<f32>, %b: tensor<f32>): '
        '%c = "stablehlo.add"(%a, %b) : (tensor<f32>, tensor<f32>) -> tensor<f32> '
        '"stablehlo.return"(%c) : (tensor<f32>) -> () }) '
        "{replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>\n"
        "    return %0 : tensor<4xf32>\n"
        "  }\n}\n"
    )


def test_a_reduce_scatter_without_an_op_of_its_own() -> None:
    p = ProgramWriter(2, scatters=False)
    result = Reduction("AVG").reduce_scatter(p, p.parameter((2, 3), "f32"))
    text = p.text([result])
    assert result.shape == (3,)
    assert "all_to_all" in text and "stablehlo.add" in text and "divide" in text
    assert "reduce_scatter" not in text


def test_dtypes_without_a_counterpart() -> None:
    with pytest.raises(TypeError, match="torch.complex32 is not supported in collectives"):
        element_of(torch.complex32)


def test_bitwise_ops_take_integers() -> None:
    p = ProgramWriter(2)
    with pytest.raises(ValueError, match="BXOR takes integers or bools, not bf16"):
        Reduction("BXOR").all_reduce(p, p.parameter((2,), "bf16"))


def test_calls_that_differ_have_other_fingerprints() -> None:
    values = (((2, 3), torch.float32),)
    calls = [
        CollectiveCall("all_reduce", "sum", values),
        CollectiveCall("all_reduce", "max", values),
        CollectiveCall("reduce", "sum", values),
        CollectiveCall("all_reduce", "sum", (((3, 2), torch.float32),)),
        CollectiveCall("all_reduce", "sum", (((2, 3), torch.bfloat16),)),
        CollectiveCall("all_reduce", "sum", values * 2),
    ]
    assert len({call.fingerprint for call in calls}) == len(calls)
    assert str(calls[0]) == "all_reduce sum float32[2, 3]"
    assert all(0 <= call.fingerprint < 2**63 for call in calls)
