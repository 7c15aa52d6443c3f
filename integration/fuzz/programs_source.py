"""A program of the fuzzer ``programs`` as Python that needs torch alone."""

from __future__ import annotations

import inspect
import pprint
from typing import Any

from . import programs_images, programs_model, programs_sequences

LOOP = """
torch.set_num_threads(1)


def train(spec, device):
    model = build(spec)
    optim = optimizer(spec, model.to(device))
    call = torch.compile(model, dynamic=True) if HOW == "compile" and device == "tpu" else model
    losses = []
    for step in spec["steps"]:
        if step["zeroes"]:
            optim.zero_grad(set_to_none=step["to_none"])
        data = {k: v.to(device) for k, v in batch(spec, step).items()}
        loss = loss_of(call, spec, data)
        backward_and_update(loss, model, optim, spec, step)
        losses.append(loss.detach())
    return [float(x) for x in losses], [p.detach().cpu() for p in model.parameters()]


for spec in SPECS:
    (losses, params), (want, right) = train(spec, "tpu"), train(spec, "cpu")
    for i, pair in enumerate(zip(losses, want)):
        print(i, *pair)
    print(max(float((p - q).abs().max()) for p, q in zip(params, right)))
"""


def source(data: dict[str, Any]) -> str:
    lines = ["import threading", "import torch", "import torch.nn.functional as F"]
    lines += ["from torch import Tensor, nn", "", "_seeded = threading.Lock()"]
    lines += [f"CLASSES = {programs_model.CLASSES}", f"TOKENS = {programs_model.TOKENS}"]
    lines += ["Data = Spec = Step = dict", ""]
    lines.append("from collections.abc import Callable")
    for family, module in (("images", programs_images), ("sequences", programs_sequences)):
        specs = [s for s in data["specs"] if s["family"] == family]
        kinds = sorted({b["kind"] for s in specs for b in s["blocks"]})
        lines += [inspect.getsource(getattr(module, kind)) for kind in kinds]
    for name in ("Model", "build", "batch", "optimizer", "loss_of", "backward_and_update"):
        lines.append(inspect.getsource(getattr(programs_model, name)))
    lines.append("from types import SimpleNamespace")
    lines.append("programs_images = programs_sequences = SimpleNamespace(**globals())")
    lines += [f"HOW = {data['how']!r}", f"SPECS = {pprint.pformat(data['specs'], width=100)}"]
    return "\n".join(lines) + LOOP
