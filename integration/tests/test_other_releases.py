"""Programs on the CPU run as ever where the device has no build or JAX is of another release."""

from __future__ import annotations

import subprocess
import sys

import pytest

ANOTHER_TORCH = """
import importlib.util, sys
(folder,) = importlib.util.find_spec("tpu_core").submodule_search_locations
file = folder + "/cpp_extension.py"
spec = importlib.util.spec_from_file_location("tpu_core.cpp_extension", file)
extension = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(extension)
extension.CORE.builds = lambda: {"2.9": None}
"""
ANOTHER_JAX = """
from importlib import metadata
known = metadata.version
metadata.version = lambda name: "0.13.0" if name in ("jax", "jaxlib") else known(name)
"""
PROGRAM = """
import io, sys
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
for name in ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "NAdam", "Rprop", "LBFGS"):
    optimizer = getattr(torch.optim, name)(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(torch.randn(5, 4)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
with torch.autocast("cpu", torch.bfloat16):
    model(torch.randn(3, 4))
file = io.BytesIO()
torch.save(model.state_dict(), file)
file.seek(0)
model.load_state_dict(torch.load(file))
for x in torch.utils.data.DataLoader(torch.randn(6, 4), batch_size=3, num_workers=1):
    model(x)
checkpoint(model, torch.randn(3, 4, requires_grad=True), use_reentrant=False).sum().backward()
compiled = torch.compile(model.eval(), backend="aot_eager")
torch.testing.assert_close(compiled(x), model(x))
torch.manual_seed(1)
assert "jax" not in sys.modules
try:
    torch.ones(2, device="tpu")
except RuntimeError as error:
    print(type(error).__name__, "jax" in str(error))
"""


@pytest.mark.parametrize(
    ("other", "end"),
    [
        (ANOTHER_TORCH, "VersionMismatchError False"),
        (ANOTHER_JAX, "VersionMismatchError True"),
        ("", ""),
    ],
    ids=["torch", "jax", "neither"],
)
def test_the_cpu_is_unharmed(other: str, end: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", other + PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == end
