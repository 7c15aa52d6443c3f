"""``tpu cache warm --ops``: a program that no process has run begins op by op, by its programs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from interpreter import clean
from tpu_eager.op_library.builder import _products
from tpu_eager.op_library.samples import SIZES, samples

FILL = """
import torch
from tpu_eager.op_library import builder
from tpu_core.modes import default

kept = [s for s in builder.samples() if s[0] == "perceptron, ReLU"]
builder.samples = lambda: kept
builder._RUNGS = {count: (32, 64) for count in range(1, 4)}
seen = []
default().fill([torch.float32], lambda *shown: seen.append(shown))
assert seen[-1][1] == seen[-1][2] > 0
print(torch.tpu.metrics()["compiles"])
"""

STEPS = """
import json
import torch
import torch.nn.functional as F
from torch import nn

def steps(device, widths, batch):
    torch.manual_seed(3)
    pairs = zip(widths, widths[1:])
    layers = [layer for a, b in pairs for layer in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers[:-1]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        x = torch.randn(batch, widths[0]).to(device)
        y = torch.randint(widths[-1], (batch,)).to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if device == "tpu":
            found = torch.tpu.metrics()
            counts.append([int(found[k]) for k in ("compiles", "pieces", "padded_executions")])
    return losses

counts = []
sizes = [29, 50, 41, 23, 37, 31, 44, 35, 40, 12]
torch.testing.assert_close(steps("tpu", sizes, 21), steps("cpu", sizes, 21))
print(json.dumps(counts))
"""


def test_the_first_step_of_a_new_model_compiles_little(tmp_path: Path) -> None:
    settings = {
        "TPU_CACHE_DIR": str(tmp_path),
        "TPU_TIERS": "compiled",
        "TPU_EAGER_MODE": "fused",
        "TPU_COMPILE": "background",
    }
    ((_, *without), _) = json.loads(clean(STEPS, **settings))
    assert without == [0, 0]  # the whole step is compiled, and waited for
    shutil.rmtree(tmp_path)
    assert int(clean(FILL, **settings)) > 20
    (compiles, pieces, padded), (_, more, _) = json.loads(clean(STEPS, **settings))
    # What it lacks: the update, a list as long as the model has parameters, and the checks' word.
    assert compiles <= 4
    assert pieces > 50 and padded > pieces - 10
    assert more > pieces  # until the whole is compiled, in the background


def test_sizes_follow_from_no_others_in_all_samples() -> None:
    rows = [[s.batch, s.length, s.heads, s.head, s.hidden, s.classes, s.places] for s in SIZES]
    assert not _products(rows)
    assert all(len(set(row)) == len(row) for row in rows)
    assert len({name for name, _ in samples()}) == len(list(samples()))


def test_products_of_sizes_have_no_buckets_of_their_own() -> None:
    # Rows of a batch of sequences, three parts of them, and sizes of no relation.
    rows = [[55, 5, 11, 30, 7], [91, 7, 13, 42, 9], [114, 6, 19, 54, 4]]
    assert _products(rows) == {0: (1, (1, 2))}
    assert _products([[*row, 3 * row[1] * row[4]] for row in rows])[5] == (3, (1, 4))


def test_each_sample_runs_on_the_device() -> None:
    with torch.random.fork_rng():
        for _, sample in samples():
            sample(SIZES[0], torch.float32)
    torch.get_device_module("tpu").synchronize()
