"""Which ops on logits are followed, and which losses are left as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tpu_compile import linear_loss
from tpu_compile.linear_loss import Logits, after, call_of, verdict

LOGITS = Logits(None, None, None, (16, 40), torch.bfloat16)


def followed(name: str, *rest: Any, made: torch.Tensor) -> Logits | None:
    before = torch.empty(2, 3, 40, dtype=torch.bfloat16)
    return after(LOGITS, name, rest, before, made)


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


def test_casts_to_wider_dtypes_are_followed() -> None:
    assert followed("float", made=torch.empty(2, 3, 40)) == LOGITS
    assert followed("to", torch.int64, made=torch.empty(2, 3, 40, dtype=torch.int64)) is None
    narrow = torch.empty(2, 3, 40, dtype=torch.float8_e4m3fn)
    assert followed("to", torch.float8_e4m3fn, made=narrow) is None


def test_a_cap_is_three_ops() -> None:
    x = torch.empty(2, 3, 40, dtype=torch.bfloat16)
    divided = after(LOGITS, "truediv", (30.0,), x, x)
    bounded = divided and after(divided, "tanh", (), x, x)
    capped = bounded and after(bounded, "mul", (30.0,), x, x)
    assert capped is not None and capped.softcap == 30.0 and not capped.divided
    assert bounded is not None and after(bounded, "mul", (20.0,), x, x) is None
    assert after(LOGITS, "tanh", (), x, x) is None


def test_class_weights_and_probabilities_need_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.empty(6, 40), torch.zeros(6, dtype=torch.int64)
    assert call_of((x, y), {"weight": torch.ones(40)}) is None
    assert call_of((x, y), {"reduction": "sum"}) is not None
    monkeypatch.setattr(linear_loss, "offered", lambda: F.cross_entropy)
    reason = verdict(LOGITS, x, torch.empty(6, 40))
    assert reason is not None and "no indices" in reason


def test_without_a_package_that_offers_it_the_loss_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_loss, "offered", lambda: None)
    reason = verdict(LOGITS, torch.empty(6, 40), torch.zeros(6, dtype=torch.int64))
    assert reason == "no installed package offers a loss without them"
