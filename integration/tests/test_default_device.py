"""``torch.set_default_device`` moves what a program makes, not what the packages make inside."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

PACKAGES = Path(__file__).parents[2] / "packages"
FACTORIES = {
    *("empty", "empty_strided", "zeros", "ones", "full", "tensor", "as_tensor", "scalar_tensor"),
    *("arange", "linspace", "logspace", "eye", "tril_indices", "triu_indices"),
    *("rand", "randn", "randint", "randperm", "normal"),
}
# Programs of their own, which move what they make to the device.
OTHERS = {"canaries.py", "common_ops.py"}


def values(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).mul(0.37).sin().reshape(shape)


def calls_without_device(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {
            f"torch.{f}" for f in FACTORIES
        }:
            if not any(k.arg in ("device", None) for k in node.keywords):
                yield f"{file.name}:{node.lineno}: {ast.unparse(node)}"


def test_factories_in_the_packages_name_their_device() -> None:
    files = [f for f in PACKAGES.glob("*/src/**/*.py") if f.name not in OTHERS]
    assert len(files) > 100
    assert [call for file in files for call in calls_without_device(file)] == []


def batches_of_other_sizes() -> list[torch.Tensor]:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(values(*p.shape))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for n in (3, 5, 4, 9, 7):
        losses.append(F.cross_entropy(model(values(n, 8)), torch.arange(n) % 4))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def packed_sequences() -> list[torch.Tensor]:
    layer = nn.GRU(4, 6)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(values(*p.shape))
    packed = nn.utils.rnn.pack_padded_sequence(values(5, 3, 4), [5, 3, 2])
    y, h = layer(packed)
    return [nn.utils.rnn.pad_packed_sequence(y)[0], h]


def lists_as_indices_and_lengths() -> list[torch.Tensor]:
    x = values(6, 7)
    x[[1, 2], [3, 0]] = torch.tensor([7.0, 8.0])
    loss = F.ctc_loss(
        values(9, 2, 5).log_softmax(-1), torch.tensor([[1, 2, 3], [2, 2, 1]]), [9, 8], [3, 2]
    )
    return [x[x > 0.1], x[:, torch.tensor([3, 1])], x.quantile(0.3), loss]


def graphs_of_other_sizes() -> list[torch.Tensor]:
    torch._dynamo.reset()
    f = torch.compile(lambda x: F.softmax(x, -1).sum(0) * torch.arange(3.0), dynamic=True)
    return [f(values(n, 3)) for n in (4, 5, 7)]


@pytest.mark.parametrize(
    "program",
    [
        batches_of_other_sizes,
        packed_sequences,
        lists_as_indices_and_lengths,
        graphs_of_other_sizes,
    ],
)
def test_programs_without_a_device(program) -> None:
    expected = program()
    with torch.device("tpu"):
        got = program()
        torch.tpu.synchronize()
    assert all(x.device.type == "tpu" for x in got)
    torch.testing.assert_close([x.cpu() for x in got], expected, rtol=1e-4, atol=1e-5)
