"""``TPU_DEBUG_NANS=1`` in Fused and Strict mode: the op of a program that made a NaN."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

MODEL = """
    import sys
    import torch
    from tpu_core.errors import NonFiniteError

    torch.manual_seed(0)

    def shown(function):
        try:
            function()
        except NonFiniteError as error:
            print(str(error).splitlines()[0].partition("] ")[2], "|", mark(error.line))
        else:
            print("finite")

    def mark(line):
        file, _, number = line.partition(" in ")[0].rpartition(":")
        return open(file).readlines()[int(number) - 1].rpartition("# ")[2].strip()
"""


def run(folder: Path, code: str, **environment: str) -> list[str]:
    """Lines that a script prints in a process of its own."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(MODEL) + textwrap.dedent(code))
    result = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TPU_DEBUG_NANS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()


TRAINING = """
    class Block(torch.nn.Module):
        def __init__(self, bad):
            super().__init__()
            self.linear, self.bad = torch.nn.Linear(16, 16), bad

        def forward(self, x):
            y = torch.tanh(self.linear(x))
            if self.bad and step == 3:
                y = y + torch.log(y.sum() * 0 - 1)  # layer 7
            return x + y

    model = torch.nn.Sequential(*(Block(i == 7) for i in range(12))).to("tpu")
    optimizer = torch.optim.Adam(model.parameters())

    def train():
        optimizer.zero_grad()
        x = torch.randn(8 + step, 16).to("tpu")
        mask = torch.full((8 + step, 8 + step), float("-inf"), device="tpu").triu(1)
        loss = model(torch.softmax(x @ x.T + mask, -1) @ x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()

    for step in range(4):
        shown(train)
"""


@pytest.mark.parametrize("mode, tiers", [("fused", "auto"), ("strict", "compiled")])
def test_a_nan_in_one_of_twelve_layers(tmp_path: Path, mode: str, tiers: str) -> None:
    lines = run(tmp_path, TRAINING, TPU_EAGER_MODE=mode, TPU_TIERS=tiers)
    assert lines[:3] == ["finite"] * 3
    assert lines[3:] == ["aten.log.default produced 1 NaN of 1 values. | layer 7"]


def test_what_is_counted(tmp_path: Path) -> None:
    lines = run(
        tmp_path,
        """
        x = torch.tensor([0.0, 4.0]).to("tpu").requires_grad_()
        zero, one = torch.zeros(2).to("tpu"), torch.ones(2).to("tpu")

        # Dropped before it is a result.
        shown(lambda: torch.where(zero == 0, one, torch.log(zero - 1)).tolist())
        # Meant to be infinite.
        shown(lambda: zero.masked_fill(one > 0, float("-inf")).exp().tolist())
        shown(lambda: (zero.masked_fill(one > 0, float("-inf")) + 1).tolist())

        shown(lambda: (one / zero).tolist())  # division
        shown(lambda: (zero * float("inf")).tolist())  # zero times infinity
        def gradient():
            y = x.sqrt()  # forward
            y.sum().backward()
            x.grad.tolist()
        shown(gradient)

        given = torch.tensor([float("nan")]).to("tpu")
        shown(lambda: (given + 1).tolist())  # given
        shown(lambda: given.nan_to_num().tolist())

        w = torch.full((2,), 4.0).to("tpu")
        def in_place():
            w.sub_(5).sqrt_()  # in place
            w.tolist()
        shown(in_place)
        print((one + 1).tolist())
        """,
    )
    assert lines == [
        *["finite"] * 3,
        "aten.div.Tensor produced 2 infinite of 2 values. | division",
        "aten.mul.Tensor produced 2 NaN of 2 values. | zero times infinity",
        "aten.div.Tensor produced 1 infinite of 2 values. | forward",
        "aten.add.Tensor produced 1 NaN of 1 values. | given",
        "finite",
        "aten.sqrt_.default produced 2 NaN of 2 values. | in place",
        "[2.0, 2.0]",
    ]


def test_a_compiled_graph_is_named(tmp_path: Path) -> None:
    lines = run(
        tmp_path,
        """
        f = torch.compile(lambda x: torch.log(x - 5).sum())
        try:
            f(torch.ones(2, device="tpu")).item()
        except NonFiniteError as error:
            print("TORCH_COMPILE_DISABLE=1" in str(error))
        """,
    )
    assert lines == ["True"]
