"""Calls whose values the CPU's kernels reject, and calls of the same ops that are fine."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

X = torch.arange(20.0).reshape(4, 5)
i = torch.tensor
Call = Callable[[str], torch.Tensor]

# Checked by default.
INDICES: dict[str, Call] = {
    "index": lambda d: X.to(d)[i([1, 7]).to(d)],
    "index below": lambda d: X.to(d)[i([1, -7]).to(d)],
    "index of another dim": lambda d: X.to(d)[:, i([1, 9]).to(d)],
    "two indices": lambda d: X.to(d)[i([1, 2]).to(d), i([1, 9]).to(d)],
    "index in two dims": lambda d: X.to(d)[i([[1], [-5]]).to(d)],
    "index_put": lambda d: X.to(d).index_put((i([1, 9]).to(d),), torch.ones(5).to(d)),
    "index_put_, accumulating": lambda d: (
        X.to(d).clone().index_put_((i([1, -9]).to(d),), torch.ones(5).to(d), accumulate=True)
    ),
    "embedding": lambda d: F.embedding(i([1, 9]).to(d), X.to(d)),
    "embedding below": lambda d: F.embedding(i([1, -1]).to(d), X.to(d)),
    "embedding with max_norm": lambda d: F.embedding(i([1, 9]).to(d), X.to(d).clone(), max_norm=1),
    "embedding_bag": lambda d: F.embedding_bag(i([1, -9]).to(d), X.double().to(d), i([0, 1]).to(d)),
    "embedding_bag's first offset": lambda d: F.embedding_bag(
        i([1, 2]).to(d), X.to(d), i([1, 1]).to(d)
    ),
    "embedding_bag's last offset": lambda d: F.embedding_bag(
        i([1, 2]).to(d), X.to(d), i([0, 5]).to(d)
    ),
    "gather": lambda d: X.to(d).gather(1, i([[0, 5]]).to(d)),
    "gather below": lambda d: X.to(d).gather(1, i([[0, -1]]).to(d)),
    "gather by int32": lambda d: X.to(d).gather(1, i([[0, 5]], dtype=torch.int32).to(d)),
    "scatter a value": lambda d: X.to(d).scatter(1, i([[0, 5]]).to(d), 1.0),
    "scatter_": lambda d: X.to(d).clone().scatter_(0, i([[0, -5]]).to(d), torch.ones(1, 2).to(d)),
    "scatter_add": lambda d: X.to(d).scatter_add(1, i([[0, 5]]).to(d), torch.ones(1, 2).to(d)),
    "scatter_reduce": lambda d: X.to(d).scatter_reduce(
        1, i([[0, 5]]).to(d), torch.ones(1, 2).to(d), "amax"
    ),
    "index_add": lambda d: X.to(d).index_add(0, i([1, 9]).to(d), torch.ones(2, 5).to(d)),
    "index_add of a vector": lambda d: (
        X[0].to(d).index_add(0, i([1, 9]).to(d), torch.ones(2).to(d))
    ),
    "index_copy": lambda d: X.to(d).index_copy(0, i([1, -1]).to(d), torch.ones(2, 5).to(d)),
    "index_fill": lambda d: X.to(d).index_fill(1, i([1, -9]).to(d), 1.0),
    "index_select": lambda d: X.to(d).index_select(0, i([1, 9]).to(d)),
    "index_select of columns": lambda d: X.to(d).index_select(1, i([1, 9]).to(d)),
    "take": lambda d: X.to(d).take(i([1, 99]).to(d)),
    "put": lambda d: X.to(d).put(i([1, -99]).to(d), torch.ones(2).to(d)),
    "nll_loss": lambda d: F.nll_loss(X.to(d), i([1, 2, 3, 12]).to(d)),
    "nll_loss of one": lambda d: F.nll_loss(X[0].to(d), i(12).to(d)),
    "cross_entropy": lambda d: F.cross_entropy(X.to(d), i([1, 2, 3, -1]).to(d)),
    "cross_entropy with smoothing": lambda d: F.cross_entropy(
        X.to(d), i([1, 2, 3, 12]).to(d), label_smoothing=0.1
    ),
    "cross_entropy of images": lambda d: F.cross_entropy(
        torch.zeros(2, 3, 4, 4).to(d), torch.full((2, 4, 4), 3).to(d)
    ),
    "multi_margin_loss": lambda d: F.multi_margin_loss(X.to(d), i([1, 2, 3, 12]).to(d)),
    "multilabel_margin_loss": lambda d: F.multilabel_margin_loss(
        X.to(d), torch.full((4, 5), 9).to(d)
    ),
    "max_unpool1d": lambda d: F.max_unpool1d(torch.ones(1, 1, 2).to(d), i([[[0, 9]]]).to(d), 2),
    "max_unpool2d": lambda d: F.max_unpool2d(
        torch.ones(1, 1, 2, 2).to(d), i([[[[0, 9], [2, 99]]]]).to(d), 2
    ),
    "max_unpool3d": lambda d: F.max_unpool3d(
        torch.ones(1, 1, 1, 2, 2).to(d), i([[[[[0, 9], [2, 99]]]]]).to(d), 2
    ),
    "inv_ex": lambda d: torch.linalg.inv_ex(torch.zeros(2, 2).to(d), check_errors=True)[0],
    "inv_ex of a batch": lambda d: (
        torch.linalg.inv_ex(torch.stack([torch.eye(2), torch.zeros(2, 2)]).to(d), check_errors=True)
    )[0],
    "inv": lambda d: torch.linalg.inv(torch.zeros(2, 2).to(d)),
    "linalg.cholesky": lambda d: torch.linalg.cholesky(-torch.eye(2).to(d)),
    "solve": lambda d: torch.linalg.solve(torch.zeros(2, 2).to(d), torch.ones(2).to(d)),
    "cholesky_ex": lambda d: torch.linalg.cholesky_ex(-torch.eye(2).to(d), check_errors=True)[0],
    "solve_ex": lambda d: torch.linalg.solve_ex(
        torch.zeros(2, 2).to(d), torch.ones(2).to(d), check_errors=True
    )[0],
    "lu_factor_ex": lambda d: torch.linalg.lu_factor_ex(torch.zeros(2, 2).to(d), check_errors=True)[
        0
    ],
    "cholesky_inverse": lambda d: torch.cholesky_inverse(torch.zeros(2, 2).to(d)),
    "multinomial, negative": lambda d: torch.multinomial(i([1.0, -2.0]).to(d), 1),
    "multinomial, NaN": lambda d: torch.multinomial(i([1.0, float("nan")]).to(d), 1),
    "multinomial, zeros": lambda d: torch.multinomial(i([[0.0, 0.0], [1.0, 1.0]]).to(d), 1),
    "multinomial with replacement": lambda d: torch.multinomial(i([1.0, -1.0]).to(d), 2, True),
    "multinomial with replacement, infinite": lambda d: torch.multinomial(
        i([1.0, float("inf")]).to(d), 2, True
    ),
    "bernoulli": lambda d: torch.bernoulli(i([0.5, 1.5]).to(d)),
    "bernoulli_": lambda d: torch.ones(2).to(d).bernoulli_(i([0.5, -1.5]).to(d)),
    "normal": lambda d: torch.normal(torch.zeros(2).to(d), i([-1.0, 1.0]).to(d)),
    "poisson": lambda d: torch.poisson(i([-1.0]).to(d)),
    "binary_cross_entropy": lambda d: F.binary_cross_entropy(
        i([0.5, 1.5]).to(d), i([0.5, 1.0]).to(d)
    ),
    "masked_scatter": lambda d: X.to(d).masked_scatter((X > 2).to(d), X[:2].to(d)),
    "masked_scatter of nothing": lambda d: X.to(d).masked_scatter((X > 2).to(d), X[:0].to(d)),
    "histc of NaN": lambda d: torch.histc(i([1.0, float("nan")]).to(d), 3),
    "histc of infinities": lambda d: torch.histc(i([-2.5, float("inf")]).to(d), 3),
    "searchsorted by a sorter": lambda d: torch.searchsorted(
        i([1.0, 2.0, 3.0]).to(d), X.to(d), sorter=i([0, 1, 5]).to(d)
    ),
    "lu_solve": lambda d: torch.linalg.lu_solve(
        torch.eye(2).to(d), i([1, 9], dtype=torch.int32).to(d), torch.ones(2, 1).to(d)
    ),
    "lu_solve below": lambda d: torch.linalg.lu_solve(
        torch.eye(2).to(d), i([0, 1], dtype=torch.int32).to(d), torch.ones(2, 1).to(d)
    ),
}

# Checked with TPU_CHECKS=all.
OTHERS: dict[str, Call] = {
    "div, floored": lambda d: torch.div(i([3, 4]).to(d), i([1, 0]).to(d), rounding_mode="floor"),
    "div, truncated": lambda d: torch.div(i([3, 4]).to(d), i([1, 0]).to(d), rounding_mode="trunc"),
    "floor_divide": lambda d: i([3, 4]).to(d) // i([1, 0]).to(d),
    "floor_divide_": lambda d: i([3, 4]).to(d).floor_divide_(i([1, 0]).to(d)),
    "remainder": lambda d: i([3, 4]).to(d) % i([1, 0]).to(d),
    "remainder of a number": lambda d: 5 % i([1, 0]).to(d),
    "fmod": lambda d: torch.fmod(i([3, 4]).to(d), i([1, 0]).to(d)),
}

# Nothing is wrong.
FINE: dict[str, Call] = {
    "negative indices": lambda d: X.to(d)[i([-1, -4]).to(d), i([-5, 4]).to(d)],
    "a mask": lambda d: X.to(d)[(X > 3).to(d)],
    "a mask that is written": lambda d: X.to(d).clone().masked_fill_((X > 3).to(d), 1.0),
    "no indices": lambda d: X.to(d)[torch.zeros(0, dtype=torch.long).to(d)],
    "uint8 in a large dim": lambda d: (
        torch.arange(300.0).to(d).gather(0, i([200, 255], dtype=torch.uint8).long().to(d))
    ),
    "negative take": lambda d: X.to(d).take(i([-20, 19]).to(d)),
    "negative fill": lambda d: X.to(d).index_fill(0, i([-4, 3]).to(d), 1.0),
    "ignored labels": lambda d: F.cross_entropy(X.to(d), i([1, -100, 3, -100]).to(d)),
    "an ignored label in range": lambda d: F.cross_entropy(
        X.to(d), i([1, 2, 9, 2]).to(d), ignore_index=9
    ),
    "all labels ignored": lambda d: F.nll_loss(X.to(d), i([-100] * 4).to(d), reduction="sum"),
    "padding_idx": lambda d: F.embedding(i([0, 3]).to(d), X.to(d), padding_idx=-1),
    "the ends of multilabels": lambda d: F.multilabel_margin_loss(
        X.to(d), i([[1, -1, 0, 0, 0]] * 4).to(d)
    ),
    "floats over zero": lambda d: i([3.0, -4.0]).to(d) // i([0.0, 0.0]).to(d),
    "zero over integers": lambda d: i([0, 0]).to(d) // i([1, -2]).to(d),
    "zero weights": lambda d: torch.multinomial(i([0.0, 1.0]).to(d), 1),
    "certain events": lambda d: torch.bernoulli(i([0.0, 1.0]).to(d)),
    "enough to scatter": lambda d: X.to(d).masked_scatter((X > 2).to(d), X.to(d)),
    "histc of a range": lambda d: torch.histc(i([1.0, float("inf")]).to(d), 3, 0, 2),
    "a sorter": lambda d: torch.searchsorted(
        i([3.0, 2.0, 1.0]).to(d), X.to(d), sorter=i([2, 1, 0]).to(d)
    ),
    "a regular matrix": lambda d: torch.linalg.inv_ex(torch.eye(2).to(d), check_errors=True)[0],
}


def outcome(call: Call, device: str) -> str:
    """What a call and the read of its result raise."""
    try:
        call(device).cpu()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "fine"
