"""Training steps whose ops the library has programs of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

DEVICE = "tpu"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a step; no two are equal, nor follow from one another in all of `SIZES`.

    Attributes:
        batch, length: Of the input.
        places: Number of positions that there could be.
        heads, head: Number of attention heads, and their size.
        hidden: Width of the layer between two others.
        classes: Number of classes, and of tokens.
        channels, image: Of a picture.
    """

    batch: int
    length: int
    places: int
    heads: int
    head: int
    hidden: int
    classes: int
    channels: int
    image: int

    @property
    def width(self) -> int:
        """Width of a token."""
        return self.heads * self.head


SIZES = (
    Sizes(5, 11, 23, 2, 10, 43, 17, 9, 14),
    Sizes(7, 13, 31, 3, 12, 59, 29, 13, 20),
    Sizes(6, 19, 41, 5, 8, 83, 37, 10, 26),
)

Sample = Callable[[Sizes, torch.dtype], None]


def _step(model: nn.Module, loss: torch.Tensor) -> None:
    """Gradients, an update and the state of an optimizer."""
    loss.backward()
    torch.optim.AdamW(model.parameters()).step()


def _inputs(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device="cpu").to(dtype).to(DEVICE).requires_grad_()


def _targets(count: int, *shape: int) -> torch.Tensor:
    return torch.randint(count, shape, device="cpu").to(DEVICE)


def _perceptron(activation: type[nn.Module]) -> Sample:
    def run(n: Sizes, dtype: torch.dtype) -> None:
        layers = (nn.Linear(n.width, n.hidden), activation(), nn.Linear(n.hidden, n.classes))
        model = nn.Sequential(*layers).to(dtype).to(DEVICE)
        x = _inputs(n.batch, n.width, dtype=dtype)
        _step(model, F.cross_entropy(model(x), _targets(n.classes, n.batch)))

    return run


def _regression(n: Sizes, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(n.width, n.hidden, bias=False), nn.Dropout(0.1))
    model = model.to(dtype).to(DEVICE)
    x = _inputs(n.batch, n.length, n.width, dtype=dtype)
    target = torch.randn(n.batch, n.length, n.hidden, device="cpu").to(dtype).to(DEVICE)
    _step(model, F.mse_loss(model(x), target))


class _Block(nn.Module):
    """Attention and a perceptron, each behind a norm and beside what it is given."""

    def __init__(self, n: Sizes, causal: bool) -> None:
        super().__init__()
        self.n, self.causal = n, causal
        self.norm, self.after = nn.LayerNorm(n.width), nn.LayerNorm(n.width)
        self.qkv, self.out = nn.Linear(n.width, 3 * n.width), nn.Linear(n.width, n.width)
        self.up, self.down = nn.Linear(n.width, n.hidden), nn.Linear(n.hidden, n.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of tokens [batch, length, width]."""
        n = self.n
        q, k, v = (
            part.view(n.batch, n.length, n.heads, n.head).transpose(1, 2)
            for part in self.qkv(self.norm(x)).split(n.width, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(seen.transpose(1, 2).reshape(n.batch, n.length, n.width))
        return x + self.down(F.gelu(self.up(self.after(x))))


def _transformer(causal: bool) -> Sample:
    def run(n: Sizes, dtype: torch.dtype) -> None:
        tokens, places = nn.Embedding(n.classes, n.width), nn.Embedding(n.places, n.width)
        head = nn.Linear(n.width, n.classes, bias=False)
        model = nn.ModuleList([tokens, places, _Block(n, causal), head]).to(dtype).to(DEVICE)
        ids = _targets(n.classes, n.batch, n.length + 1)
        given, expected = (ids[:, :-1], ids[:, 1:]) if causal else (ids[:, 1:].clone(),) * 2
        x = tokens(given) + places(torch.arange(n.length, device=DEVICE))
        scores = head(model[2](x)).reshape(-1, n.classes)
        _step(model, F.cross_entropy(scores, expected.reshape(-1)))

    return run


def _convolutions(n: Sizes, dtype: torch.dtype) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, n.channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(n.channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(n.channels, n.hidden, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(n.hidden, n.channels, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(n.channels, n.classes),
    )
    model = model.to(dtype).to(DEVICE)
    x = torch.randn(n.batch, 3, n.image, n.image, device="cpu").to(dtype).to(DEVICE)
    _step(model, F.cross_entropy(model(x), _targets(n.classes, n.batch)))


def _inference(n: Sizes, dtype: torch.dtype) -> None:
    """Ops on the scores of a model, as generation and evaluation have them."""
    with torch.no_grad():
        x = torch.randn(n.batch, n.classes, device="cpu").to(dtype).to(DEVICE)
        y = torch.randn(n.batch, n.classes, device="cpu").to(dtype).to(DEVICE)
        for op in (torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.eq, torch.gt):
            op(x, y)
        functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
            *(torch.exp, torch.log, torch.sqrt, torch.abs, torch.neg, torch.tanh, torch.clone),
            *(torch.sigmoid, F.silu, F.relu, F.gelu),
        ]
        for f in functions:
            f(x)
        for numbers in (x + 1.5, x * 0.5, x / 3.0, x - 2.0, x.clamp(min=0.1)):
            torch.where(numbers > 0, numbers, x)
        for total in (x.sum(), x.mean(), x.sum(-1), x.mean(-1), x.amax(-1)):
            total.float()
        x.softmax(-1).argmax(-1)
        x.log_softmax(-1).max(-1)


def samples() -> Iterator[tuple[str, Sample]]:
    """Name and function of each step."""
    for activation in (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid):
        yield f"perceptron, {activation.__name__}", _perceptron(activation)
    yield "regression", _regression
    yield "transformer", _transformer(causal=False)
    yield "causal transformer", _transformer(causal=True)
    yield "convolutions", _convolutions
    yield "scores", _inference
