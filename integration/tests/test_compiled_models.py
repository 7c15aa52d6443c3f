"""Models compiled by `torch.compile` train on the device as they do in eager on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from training import JOBS

STEPS = 4
# Random numbers differ between devices, bfloat16 has tests of its own.
NAMES = [n for n, j in JOBS.items() if not j.autocast and "dropout" not in n and "64" not in n]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    # Left to eager unless it is asked for; each layer is one op here, whatever its length.
    with torch._dynamo.config.patch(allow_rnn=True):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", NAMES)
def test_training_as_on_the_cpu(name: str) -> None:
    job = JOBS[name]
    torch.manual_seed(0)
    initial = job.model()
    losses = {}
    for device in ("cpu", "tpu"):
        model = copy.deepcopy(initial).to(device)
        optimizer = job.optimizer(list(model.parameters()))
        loss_of = model.loss
        if device == "tpu":
            loss_of = torch.compile(model.loss, fullgraph=True)
        generator = torch.Generator().manual_seed(1)
        losses[device] = []
        for _ in range(STEPS):
            batch = [x.to(device) for x in job.batch(generator)]
            optimizer.zero_grad()
            loss = loss_of(*batch)
            loss.backward()
            if job.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip)
            optimizer.step()
            losses[device].append(loss.detach())
    got, want = (torch.stack(losses[d]).cpu() for d in ("tpu", "cpu"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_inference_as_on_the_cpu(name: str) -> None:
    job = JOBS[name]
    model = job.model().eval()
    batch = job.batch(torch.Generator().manual_seed(1))
    compiled = torch.compile(copy.deepcopy(model).to("tpu").loss, fullgraph=True)
    with torch.inference_mode():
        got, want = compiled(*(x.to("tpu") for x in batch)).cpu(), model.loss(*batch)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
