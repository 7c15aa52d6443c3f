"""Programs that other processes have compiled: nothing is traced, lowered or compiled again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from interpreter import clean

FACTORIZATIONS = """
import torch
x = torch.arange(16.0).reshape(4, 4) + 5 * torch.eye(4)
y = torch.linalg.cholesky((x @ x.T).to("tpu")).sum() + torch.linalg.det(x.to("tpu"))
print(round(y.item(), 2), torch.tpu.metrics()["compiles"] == 0)
"""

# Prints the losses, what XLA compiled, and how often JAX traced, lowered or compiled anything.
TRAINING = """
import pathlib, sys, time
import jax, torch
compiling = []
def listen(event, seconds, **kwargs):
    if event.startswith("/jax/core/compile/"):
        compiling.append(event)
jax.monitoring.register_event_duration_secs_listener(listen)
torch.tpu.init()
folder, together = pathlib.Path(sys.argv[1]), int(sys.argv[2])
(folder / f"{together} {__import__('os').getpid()}").touch()
while len(list(folder.glob(f"{together} *"))) < together:
    time.sleep(0.001)
compiling.clear()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
model.to("tpu")
x, labels = torch.randn(6, 8).to("tpu"), torch.arange(6).remainder(4).to("tpu")
for step in range(4):
    loss = torch.nn.functional.cross_entropy(model(x), labels)
    model.zero_grad()
    loss.backward()
    with torch.no_grad():  # torch.optim would import Dynamo, which takes longer than all the rest
        for p in model.parameters():
            p -= 0.1 * p.grad
    print(f"{loss.item():.6f}", end=" ")
counted = torch.tpu.metrics()
names = ("compiles", "cache_misses", "cache_hits_disk")
print(*(int(counted[name]) for name in names), len(compiling))
"""


def start(folder: Path, together: int) -> subprocess.Popen[str]:
    """One of ``together`` processes that begin to train when all of them have a device."""
    return subprocess.Popen(
        [sys.executable, "-c", TRAINING, folder, str(together)],
        env={**os.environ, "TPU_CACHE_DIR": str(folder / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[list[str], int, int, int, int]:
    """Losses, compiles, cache misses, hits on disk and JAX's traces, lowerings and compiles."""
    out, err = process.communicate(timeout=200)
    assert (process.returncode, err) == (0, "")
    *losses, compiles, misses, loaded, traced = out.split()
    return losses, int(compiles), int(misses), int(loaded), int(traced)


def test_four_processes_fill_the_cache_at_once_and_a_fifth_compiles_nothing(tmp_path):
    four = [finish(p) for p in [start(tmp_path, 4) for _ in range(4)]]
    losses = four[0][0]
    assert losses[-1] < losses[0]
    assert [f[0] for f in four] == [losses] * 4
    # Each program was compiled by one of them at least, which may have been ahead of the others.
    assert any(compiles for _, compiles, *_ in four)
    assert all(compiles < traced or not compiles + traced for _, compiles, _, _, traced in four)
    assert list((tmp_path / "cache").rglob(".tmp-*")) == []
    entries = len(list((tmp_path / "cache").glob("*/*.tpux")))
    *fifth, loaded, traced = finish(start(tmp_path, 1))
    assert (fifth, traced) == ([losses, 0, 0], 0)
    assert 0 < loaded <= entries <= loaded + 2  # each is there once


def test_factorizations_are_loaded_too(tmp_path):
    folder = {"TPU_CACHE_DIR": str(tmp_path / "cache")}
    first, second = clean(FACTORIZATIONS, **folder).split(), clean(FACTORIZATIONS, **folder).split()
    assert first[0] == second[0]
    assert (first[1], second[1]) == ("False", "True")
