"""Reading XLA's text, and counting what stands in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpu_compile.aot.chips import CHIPS
from tpu_compile.aot.costs import analyse, roofline
from tpu_compile.aot.hlo import Shape, parse
from tpu_core.lowering.kernel_costs import KernelCost

# Ten products of a stack of weights, gathered and then summed, as libtpu prints such a program.
TEXT = (Path(__file__).parent / "data" / "loop.hlo").read_text()


def test_loops_are_counted_as_often_as_they_run() -> None:
    module = parse(TEXT)
    assert module.entry == "main"
    assert module.counts == {"main": 1, "body": 10}
    cost = analyse(module, {"flops": 2.0 * 64 * 256 * 128, "bytes accessed": 1e6})
    assert cost.product_flops == cost.flops == 10 * 2 * 64 * 256 * 128
    assert cost.mxu_flops == 6 * cost.product_flops  # float32 at highest precision
    assert cost.float32_share == 1.0


def test_a_slice_of_a_stack_costs_the_slice() -> None:
    cost = analyse(parse(TEXT), {})
    layer = (64 * 256 + 256 * 128 + 64 * 128) * 4
    gathered = 64 * 128 * 4  # its result stays on the chip
    assert cost.hbm_bytes == 10 * (layer + gathered) + 2 * 64 * 256 * 4


def test_collectives_have_their_kind_group_bytes_and_module() -> None:
    gather, reduce = analyse(parse(TEXT), {}).collectives
    assert (gather.kind, gather.group, gather.count) == ("all-gather", 2, 10)
    assert gather.bytes == 10 * 64 * 256 * 4
    assert gather.moved == gather.bytes / 2
    assert gather.module == "blocks.*.up"
    assert (reduce.kind, reduce.group, reduce.count) == ("all-reduce", 4, 1)
    assert reduce.moved == 2 * reduce.bytes * 3 / 4
    assert reduce.module == "head"


def test_the_roofline_is_the_largest_part() -> None:
    chip = CHIPS["v5e"].per_device()
    line = roofline(analyse(parse(TEXT), {}), chip)
    assert line.step == max(line.compute, line.memory, line.communication)
    assert line.bound == "memory"


@pytest.mark.parametrize(
    ("shape", "padded"),
    [
        (Shape("f32", (10, 1024), (1, 0), (8, 128)), 16 * 1024 * 4),
        (Shape("bf16", (4, 100, 64), (2, 1, 0), (8, 128)), 4 * 104 * 128 * 2),
        (Shape("f32", (100,), (0,), (512,)), 512 * 4),
        (Shape("pred", (), (), (512,)), 1),
    ],
)
def test_shapes_fill_whole_tiles(shape: Shape, padded: int) -> None:
    assert shape.padded_bytes == padded


@pytest.mark.parametrize(
    ("line", "flops"),
    [
        # 3x3 over 16x16 with padding 1: of 48 * 48 meetings of rows and kernel, 46 each way count.
        (
            "  %c = f32[2,16,16,8]{3,2,1,0} convolution(%i, %k), window={size=3x3 pad=1_1x1_1}, "
            "dim_labels=b01f_01io->b01f",
            2 * 2 * 8 * 4 * 46 * 46,
        ),
        (
            "  %c = f32[2,8,8,8]{3,2,1,0} convolution(%i, %k), window={size=3x3 stride=2x2 "
            "pad=0_1x0_1}, dim_labels=b01f_01io->b01f",
            2 * 2 * 8 * 4 * 23 * 23,
        ),
    ],
)
def test_padding_of_a_convolution_costs_nothing(line: str, flops: float) -> None:
    text = (
        "ENTRY %main (i: f32[2,16,16,4], k: f32[3,3,4,8]) -> f32[2,16,16,8] {\n"
        "  %i = f32[2,16,16,4]{3,2,1,0} parameter(0)\n"
        "  %k = f32[3,3,4,8]{3,2,1,0} parameter(1)\n"
        f"{line}\n}}\n"
    )
    assert analyse(parse(text), {}).product_flops == flops


def test_a_kernel_tells_what_its_products_cost() -> None:
    scope = KernelCost(1000, 6).scope
    text = (
        "ENTRY %main (q: f32[8,128]) -> f32[8,128] {\n"
        "  %q = f32[8,128]{1,0} parameter(0)\n"
        # What else XLA calls within the scope is no kernel.
        '  %i = s32[8]{0} custom-call(%q), custom_call_target="AssumeGatherIndicesInBound", '
        f'metadata={{op_name="jit(main)/{scope}/gather"}}\n'
        '  ROOT %k = f32[8,128]{1,0} custom-call(%q), custom_call_target="tpu_custom_call", '
        f'metadata={{op_name="jit(main)/blocks.0/attention/{scope}/pallas_call"}}'
        "\n}\n"
    )
    module = parse(text)
    cost = analyse(module, {})
    assert (cost.product_flops, cost.mxu_flops, cost.float32_share) == (1000, 6000, 1)
    assert [i.module for i in module.computations["main"]][-1] == "blocks.0"


def test_a_slice_moves_no_more_than_itself() -> None:
    text = (
        "ENTRY %main (x: s8[4096,128]) -> s8[1024,128] {\n"
        "  %x = s8[4096,128]{1,0:T(8,128)(4,1)} parameter(0)\n"
        "  %s = (s8[4096,128]{1,0:T(8,128)(4,1)}, s8[1024,128]{1,0:T(8,128)(4,1)S(1)}, s32[]) "
        "slice-start(%x), slice={[0:1024], [0:128]}\n"
        "  ROOT %d = s8[1024,128]{1,0:T(8,128)(4,1)S(1)} slice-done(%s)\n}\n"
    )
    assert analyse(parse(text), {}).hbm_bytes == 1024 * 128
