"""Attention by flash attention kernels: values by the interpreter, and when they are chosen."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import entry_points
from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F

import tpu_kernels
from tpu_core.lowering import load
from tpu_core.lowering.evaluate import call_lowering
from tpu_core.lowering.implementations import GROUP, Target
from tpu_core.lowering.operand_sharding import OperandSharding
from tpu_core.lowering.registry import REGISTRY
from tpu_core.pjrt.chips import AbstractChip
from tpu_kernels import KernelRuleError
from tpu_kernels.ops.attention.api import KERNEL
from tpu_kernels.ops.attention.arguments import AttentionArguments
from tpu_kernels.ops.attention.overloads import BACKWARD, FORWARD
from tpu_kernels.ops.table import KERNELS

TPU = Target("tpu")


CASES: dict[str, dict[str, Any]] = {
    "causal, grouped queries": {"is_causal": True, "enable_gqa": True},
    "a mask": {"attn_mask": torch.rand(2, 1, 150, 130) < 0.5, "enable_gqa": True},
}


def run(inputs: list[torch.Tensor], grad: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """Output and gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = F.scaled_dot_product_attention(*leaves, **options)
    return [x.detach().cpu().double() for x in (out, *torch.autograd.grad(out, leaves, grad))]


@pytest.mark.parametrize("name", CASES)
def test_a_call_that_names_the_kernel_is_computed_by_it(name: str) -> None:
    shapes = [(2, 4, 150, 48), *2 * [(2, 2, 130, 48)]]
    inputs, grad = [torch.randn(shape) for shape in shapes], torch.randn(shapes[0])
    expected = run([x.double() for x in inputs], grad.double(), **CASES[name])
    moved = {k: v.to("tpu") if isinstance(v, torch.Tensor) else v for k, v in CASES[name].items()}
    with tpu_kernels.using(attention="pallas"):
        got = run([x.to("tpu") for x in inputs], grad.to("tpu"), **moved)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


def arguments(**changes: Any) -> AttentionArguments:
    shape = (2, 8, 512, 128)
    given = AttentionArguments(shape, shape, shape, "bfloat16", None, 0.0, True, None)
    return replace(given, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "float32", "scale": 0.1},
        {"key": (2, 2, 512, 128), "value": (2, 2, 512, 128)},
        {"query": (2, 8, 1, 80), "key": (2, 8, 77, 80), "value": (2, 8, 77, 96)},
        {"bias": (512, 512)},
        {"bias": (2, 1, 1, 512)},
        {"bias": (8, 512, 512), "bias_gradient": True},
        {"dropout": 0.1},
    ],
)
def test_a_tpu_takes_the_kernel_by_itself(changes: dict[str, Any]) -> None:
    assert KERNEL.select(arguments(**changes), TPU, None).name == "pallas"
    assert KERNEL.select(arguments(**changes), TPU, "plain").name == "plain"
    assert KERNEL.select(arguments(**changes), Target("cpu"), None).name == "plain"


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"dtype": "float64"}, "The dtype is bfloat16 or float32, the same for all tensors."),
        ({"dtype": "mixed"}, "The dtype is bfloat16 or float32, the same for all tensors."),
        ({"query": (8, 512, 128)}, "the dimensions (batch, heads, length, head size)"),
        ({"query": (2, 8, 0, 128)}, "none of them 0"),
        ({"key": (1, 8, 512, 128)}, "the same batch"),
        ({"query": (2, 8, 512, 64)}, "Query and key have the same head size"),
        ({"value": (2, 8, 512, 576)}, "none is above 512"),
        ({"key": (2, 3, 512, 128), "value": (2, 3, 512, 128)}, "heads of the query are a multiple"),
        ({"value": (2, 8, 256, 128)}, "Key and value have the same length."),
        ({"bias": (1, 512), "bias_gradient": True}, "A mask whose gradient is asked for has a row"),
        ({"scale": torch.ones(())}, "The scale is a number, not a tensor."),
    ],
)
def test_what_breaks_a_rule_is_computed_plainly(changes: dict[str, Any], rule: str) -> None:
    given = arguments(**changes)
    assert KERNEL.select(given, TPU, None).name == "plain"
    with pytest.raises(KernelRuleError) as raised:
        KERNEL.select(given, TPU, "pallas")
    assert rule in str(raised.value)
    assert str(list(given.query)) in str(raised.value)


def test_a_program_for_several_devices_has_to_say_how_it_is_divided() -> None:
    several = Target("tpu", 4)
    assert KERNEL.select(arguments(), several, None).name == "plain"
    with pytest.raises(KernelRuleError, match="The program is for one device"):
        KERNEL.select(arguments(), several, "pallas")
    divided = Target("tpu", 4, division=OperandSharding(AbstractChip().mesh({"data": 4})))
    assert KERNEL.select(arguments(), divided, None).name == "pallas"


def test_chips_that_the_kernels_do_not_compile_for_compute_plainly() -> None:
    assert KERNEL.select(arguments(), Target("tpu", kind="TPU v5e"), None).name == "pallas"
    assert KERNEL.select(arguments(), Target("tpu", kind="TPU v3"), None).name == "plain"


def lowered(length: int) -> str:
    """StableHLO for TPUs of attention and its gradient."""
    load()
    x = jax.ShapeDtypeStruct((1, 4, length, 128), "bfloat16")
    few = jax.ShapeDtypeStruct((1, 2, length, 128), "bfloat16")
    seed = jax.ShapeDtypeStruct((), "int64")
    rows = jax.ShapeDtypeStruct((1, 4, length), "float32")

    def both(q: Any, k: Any, v: Any, grad: Any) -> Any:
        forward, backward = REGISTRY.get(FORWARD), REGISTRY.get(BACKWARD)
        assert forward is not None and backward is not None
        out = (x, rows, None, None, None, None, seed, seed, None)
        got = call_lowering(forward, (q, k, v, None, 0.0, True), {}, out)
        saved = (got[0], got[1], None, None, length, length, 0.0, True, got[6], got[7])
        args = (grad, q, k, v, None, [True, True, True, False], *saved)
        return got[0], call_lowering(backward, args, {}, (x, few, few, None))[:3]

    with jax.enable_x64(True), TPU.applied():
        text: str = jax.jit(both).trace(x, few, few, x).lower(lowering_platforms=("tpu",)).as_text()
    return text


def test_programs_for_tpus_have_three_kernels() -> None:
    assert lowered(200).count("@tpu_custom_call") == 3
    with tpu_kernels.using(attention="plain"):
        assert "@tpu_custom_call" not in lowered(200)


def test_a_named_implementation_that_does_not_take_a_call_is_an_error_at_the_line() -> None:
    x = torch.randn(1, 2, 100, 64, dtype=torch.float64)
    device_x = x.to("tpu")
    compiled = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x) * 2)
    expected = F.scaled_dot_product_attention(x, x, x)
    with tpu_kernels.using(attention="pallas"):
        with pytest.raises(KernelRuleError, match="The dtype is bfloat16 or float32") as raised:
            F.scaled_dot_product_attention(device_x, device_x, device_x).cpu()
        assert "float64[1, 2, 100, 64]" in str(raised.value)
        assert raised.value.line is not None and "test_attention_kernels.py" in raised.value.line
        with pytest.raises(KernelRuleError, match="The dtype is bfloat16 or float32"):
            compiled(device_x).cpu()
        with tpu_kernels.using(attention="plain"):  # of the inner block
            out = F.scaled_dot_product_attention(device_x, device_x, device_x)
            torch.testing.assert_close(out.cpu(), expected)
    torch.testing.assert_close(compiled(device_x).cpu(), 2 * expected)


def test_names_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="There is no kernel 'atention'. There are attention"):
        tpu_kernels.using(atention="pallas")
    with pytest.raises(ValueError, match="no implementation 'cuda'. It has 'pallas', 'plain'"):
        tpu_kernels.using(attention="cuda")


def test_each_overload_has_an_entry_point() -> None:
    points = {p.name: p for p in entry_points(group=GROUP) if p.module.startswith("tpu_kernels.")}
    assert set(points) == {overload for op in KERNELS.values() for overload in op.bind}
    for overload, point in points.items():
        assert overload in point.load().bind
        assert point.load() in KERNELS.values()
