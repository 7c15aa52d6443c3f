"""Which ops on logits are followed, and which losses are left as they are."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tpu_compile import linear_loss
from tpu_compile.linear_loss import Logits, after, call_of, from_linear, may_write, verdict

X = torch.ones(2)
LOGITS = Logits(None, None, None, (16, 40), torch.bfloat16)


def followed(name: str, *rest: Any, made: torch.Tensor, **kwargs: Any) -> Logits | None:
    before = torch.empty(2, 3, 40, dtype=torch.bfloat16)
    return after(LOGITS, name, rest, kwargs, before, made)


@pytest.mark.parametrize(
    ("name", "rest", "shape", "steps"),
    [
        ("view", (-1, 40), (6, 40), (("reshape", (6,)),)),
        ("flatten", (0, 1), (6, 40), (("reshape", (6,)),)),
        ("view", (3, 80), (3, 80), None),  # rows of two tokens
        ("transpose", (0, 1), (3, 2, 40), None),
        ("__getitem__", (0,), (3, 40), (("slice", (0,)),)),
        (
            "getitem",
            ((slice(None), slice(1, None)),),
            (2, 2, 40),
            (("slice", (slice(None), slice(1, None))),),
        ),
        (
            "getitem",
            ((Ellipsis, slice(1, None), slice(None)),),
            (2, 2, 40),
            (("slice", (Ellipsis, slice(1, None), slice(None))),),
        ),
        ("getitem", ((Ellipsis, slice(0, 40)),), (2, 3, 40), None),
        ("getitem", (torch.tensor([True, False]),), (1, 3, 40), None),
    ],
)
def test_what_is_done_to_rows(name: str, rest: Any, shape: tuple[int, ...], steps: Any) -> None:
    found = followed(name, *rest, made=torch.empty(shape, dtype=torch.bfloat16))
    assert (found.steps if found else None) == steps


def test_casts_to_float32_are_followed() -> None:
    assert followed("float", made=torch.empty(2, 3, 40)) == LOGITS
    for dtype in (torch.int64, torch.float8_e4m3fn, torch.float16, torch.float64):
        assert followed("to", dtype, made=torch.empty(2, 3, 40, dtype=dtype)) is None


def test_keyword_arguments_are_followed_where_the_result_tells_what_they_say() -> None:
    made = torch.empty(2, 3, 40, dtype=torch.bfloat16)
    assert followed("to", made=torch.empty(2, 3, 40), dtype=torch.float32) == LOGITS
    assert followed("flatten", 0, made=made.view(6, 40), end_dim=1) is not None
    assert followed("div", 2.0, made=made) is not None
    assert followed("div", 2.0, made=made, rounding_mode="floor") is None
    assert followed("float", made=torch.empty(2, 3, 40), out=made) is None


def test_a_cap_is_three_ops() -> None:
    x = torch.empty(2, 3, 40, dtype=torch.bfloat16)
    divided = after(LOGITS, "truediv", (30.0,), {}, x, x)
    bounded = divided and after(divided, "tanh", (), {}, x, x)
    capped = bounded and after(bounded, "mul", (30.0,), {}, x, x)
    assert capped is not None and capped.softcap == 30.0 and not capped.divided
    assert bounded is not None and after(bounded, "mul", (20.0,), {}, x, x) is None
    assert bounded is not None and after(bounded, "mul", (30.0,), {"out": x}, x, x) is None
    assert after(LOGITS, "tanh", (), {}, x, x) is None
    assert after(LOGITS, "truediv", (float("inf"),), {}, x, x) is None


@pytest.mark.parametrize(
    ("bias", "dtype", "casts", "is_found"),
    [
        (None, torch.float32, False, True),
        (torch.ones(40), torch.float32, False, True),
        (torch.ones(1), torch.float32, False, False),
        (torch.ones(6, 40), torch.float32, False, False),
        (torch.ones(40, dtype=torch.bfloat16), torch.float32, False, False),  # raises
        (torch.ones(40, dtype=torch.bfloat16), torch.bfloat16, True, True),
    ],
)
def test_layers_whose_logits_can_be_left_out(
    bias: torch.Tensor | None, dtype: torch.dtype, casts: bool, is_found: bool
) -> None:
    x, w = torch.empty(6, 16), torch.empty(40, 16)
    made = torch.empty(6, 40, dtype=dtype, device="tpu")
    found = from_linear((x, w, bias), {}, lambda t: t, made, casts)
    assert (found is not None) == is_found


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "writes"),
    [
        ("add_", (1,), {}, True),
        ("__setitem__", (0, 1), {}, True),
        ("__iadd__", (1,), {}, True),
        ("__add__", (1,), {}, False),
        ("view", (-1,), {}, False),
        (operator.setitem, (X, 0, 1), {}, True),
        (operator.iadd, (X, 1), {}, True),
        (operator.add, (X, 1), {}, False),
        (torch.add, (X, 1), {"out": X}, True),
        (torch.add, (X, 1), {}, False),
        (torch.relu_, (X,), {}, True),
        (F.relu, (X, True), {}, True),
        (F.relu, (X,), {}, False),
        (F.embedding, (X.long(), X), {"max_norm": 1.0}, True),
        (F.embedding, (X.long(), X), {}, False),
        (F.batch_norm, (X, X, X), {}, True),
        (torch.ops.aten.mul_.Tensor, (X, X), {}, True),
        (torch.ops.aten.mul.Tensor, (X, X), {}, False),
        (lambda x: x, (X,), {}, True),
    ],
)
def test_calls_that_may_write(target: Any, args: Any, kwargs: Any, writes: bool) -> None:
    assert may_write(target, args, kwargs) == writes


def test_class_weights_and_probabilities_need_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.empty(6, 40), torch.zeros(6, dtype=torch.int64)
    assert call_of((x, y), {"weight": torch.ones(40)}) is None
    assert call_of((x, y), {"reduction": "sum"}) is not None
    monkeypatch.setattr(linear_loss, "offered", lambda: F.cross_entropy)
    reason = verdict(LOGITS, x, torch.empty(6, 40))
    assert reason is not None and "no indices" in reason
    reason = verdict(LOGITS, x, y.int())
    assert reason is not None and "no indices" in reason


def test_without_a_package_that_offers_it_the_loss_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_loss, "offered", lambda: None)
    reason = verdict(LOGITS, torch.empty(6, 40), torch.zeros(6, dtype=torch.int64))
    assert reason == "no installed package offers a loss without them"


@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss])
def test_labels_of_int32_raise_as_on_the_cpu(loss: Any) -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda x, y: loss(x, y))
    x, y = torch.randn(6, 8), torch.zeros(6, dtype=torch.int32)
    with pytest.raises(RuntimeError) as expected:
        loss(x, y)
    with pytest.raises(RuntimeError) as raised:
        compiled(x.to("tpu"), y.to("tpu"))
    assert str(raised.value) == str(expected.value)
