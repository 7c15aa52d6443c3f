"""Foreach ops on lists with many items of few shapes: results, and errors of single items."""

from __future__ import annotations

import pytest
import torch

from tpu_core.recorder.meta import distinct_items

SHAPES = [(3, 2), (4,), (3, 2), (4,), (2, 3), (3, 2)]


def lists(device: str, count: int) -> list[list[torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    made = [[torch.rand(s, generator=g) + 0.5 for s in SHAPES] for _ in range(count)]
    return [[t.to(device) for t in items] for items in made]


CALLS = {
    "in place": (lambda a, b, c: torch._foreach_addcdiv_(a, b, c, [0.5] * len(a)), True),
    "numbers": (lambda a, b, c: torch._foreach_add_(a, [1, 2.5, 3, 4.5, 5, 6]), True),
    "new lists": (lambda a, b, c: torch._foreach_mul(a, b), False),
    "another shape": (lambda a, b, c: torch._foreach_norm(a, 2), False),
    "a tensor for all": (lambda a, b, c: torch._foreach_mul(a, b[0][0, 0]), False),
    "broadcast": (lambda a, b, c: torch._foreach_add(a, [t[:1] for t in b]), False),
    "other dtypes": (lambda a, b, c: torch._foreach_add(a, [t.int() for t in b]), False),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_item_has_its_result(call):
    compute, in_place = CALLS[call]
    here, there = lists("cpu", 3), lists("tpu", 3)
    expected, result = compute(*here), compute(*there)
    if in_place:
        expected, result = here[0], there[0]
    for a, b in zip(expected, result, strict=True):
        torch.testing.assert_close(b.cpu(), a)
        assert (b.stride(), b.dtype) == (a.stride(), a.dtype)


@pytest.mark.parametrize("fault", ["shape", "length", "dtype"])
def test_a_wrong_item_has_the_cpus_error(fault):
    messages = []
    for device in ("cpu", "tpu"):
        a, b = lists(device, 2)
        if fault == "shape":
            b[4] = torch.rand(5, 7, device=device)
        elif fault == "length":
            del b[4]
        else:
            a[4] = a[4].long()
        with pytest.raises(RuntimeError) as error:
            torch._foreach_mul_(a, b)
        messages.append(str(error.value).splitlines()[0])
    assert messages[0] == messages[1]


TERNARY = ("_foreach_addcmul_", "_foreach_addcdiv_", "_foreach_lerp_")
BINARY = tuple(
    f"_foreach_{name}_"
    for name in "add sub mul div pow maximum minimum clamp_max clamp_min copy".split()
)


@pytest.mark.parametrize("larger", [(2, 3), (1, 1)])
@pytest.mark.parametrize("name", BINARY + TERNARY)
def test_an_operand_larger_than_what_is_written_has_the_cpus_error(name, larger):
    messages = []
    for device in ("cpu", "tpu"):
        written = [torch.ones(2, 3), torch.ones(larger[1:])]
        others = [torch.ones(2, 3), torch.ones(larger)]
        lists = [written, *[others] * (1 + (name in TERNARY))]
        with pytest.raises(RuntimeError) as error:
            getattr(torch, name)(*([t.to(device) for t in items] for items in lists))
        messages.append(str(error.value).splitlines()[0])
    assert messages[0] == messages[1]


def test_one_item_of_each_kind_is_asked_about():
    (items,) = lists("cpu", 1)
    multiply = torch.ops.aten._foreach_mul.List
    assert distinct_items(multiply, [items, items]) == [0, 1, 0, 1, 4, 0]
    assert distinct_items(multiply, [items, items[1:]]) is None
    assert distinct_items(torch.ops.aten.cat.default, [items]) is None


@pytest.mark.usefixtures("every_tier")
@pytest.mark.parametrize("op", ["addcdiv", "addcdiv_", "addcmul", "addcmul_"])
def test_scalars_may_lie_on_the_cpu(op: str) -> None:
    """As they have to on CUDA."""
    scalars = torch.arange(1.0, 1 + len(SHAPES))
    (a, b, c), (x, y, z) = lists("cpu", 3), lists("tpu", 3)
    call = getattr(torch, f"_foreach_{op}")
    expected, found = call(a, b, c, scalars), call(x, y, z, scalars)
    if op.endswith("_"):
        expected, found = a, x
    torch.testing.assert_close([t.cpu() for t in found], list(expected))
    with pytest.raises(RuntimeError) as of_cpu:
        call(a, b, c, scalars[1:])
    with pytest.raises(RuntimeError) as of_device:
        call(x, y, z, scalars[1:])
    assert str(of_device.value) == str(of_cpu.value)


@pytest.mark.usefixtures("every_tier")
def test_copies_between_devices() -> None:
    (host,), (device,) = lists("cpu", 1), lists("tpu", 1)
    twice = [2 * t for t in host]
    torch._foreach_copy_(device, twice)
    torch.testing.assert_close([t.cpu() for t in device], twice)
    torch._foreach_copy_(host, [t + 1 for t in device])
    torch.testing.assert_close(host, [t + 1 for t in twice])
    torch._foreach_copy_(device, [device[0] * 0, *host[1:]])  # of both
    torch.testing.assert_close([t.cpu() for t in device], [host[0] * 0, *host[1:]])
    versions = [t._version for t in device]
    torch._foreach_copy_(device, host)
    assert [t._version for t in device] == [v + 1 for v in versions]
