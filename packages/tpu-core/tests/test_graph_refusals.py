"""What a captured graph refuses, when it does so, and what is left as it was."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

from graph_marks import CAPTURES
from tpu_core import interop
from tpu_core.errors import GraphCaptureError

pytestmark = [pytest.mark.usefixtures("every_tier"), CAPTURES]

REFUSED = {
    "item": lambda x: x[0].item(),
    "print": lambda x: str(x),
    "cpu": lambda x: (x + 1).cpu(),
    "an if": lambda x: bool(x.sum() > 0),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "a host tensor": lambda x: x + torch.tensor([1.0], device="tpu"),
    "to the device": lambda x: torch.ones(2).to("tpu"),
    "copy_ from the host": lambda x: x.copy_(torch.ones(2)),
    "synchronize": lambda x: torch.tpu.synchronize(),
    "query": lambda x: torch.tpu.current_stream().query(),
    "event": lambda x: torch.tpu.current_stream().record_event().synchronize(),
    "timed event": lambda x: torch.Event("tpu", enable_timing=True).record(),
    "seed": lambda x: torch.manual_seed(3),
    "state": lambda x: torch.tpu.set_rng_state(torch.zeros(16, dtype=torch.uint8)),
    "to_jax": lambda x: interop.to_jax(x),
    "resize": lambda x: x.untyped_storage().resize_(0),
    "grow": lambda x: (x + 1).resize_(40),
    "save": lambda x: copy.deepcopy(x).numpy(force=True),
    "capture": lambda x: torch.accelerator.Graph().capture_begin(),
    "an op of the CPU": lambda x: torch.linalg.eig(torch.diag(x)),
}


@pytest.mark.filterwarnings("ignore::tpu_core.errors.FallbackWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str):
    x = torch.ones(2).to("tpu")
    y = torch.zeros(2).to("tpu")
    graph = torch.accelerator.Graph()
    with pytest.raises(GraphCaptureError) as raised, graph:
        y += 1
        REFUSED[name](x)
    assert "test_graph_refusals.py" in str(raised.value)
    assert not torch.tpu.is_current_stream_capturing()
    # What was there before is as it was, and the next capture is not concerned.
    assert (x.tolist(), y.tolist()) == ([1, 1], [0, 0])
    if name != "capture":
        with pytest.raises(GraphCaptureError, match="The capture of this graph failed"):
            graph.replay()
        graph.reset()
        with graph:
            y += x
    graph.replay()
    assert y.tolist() == [1, 1]


def test_refusals_that_the_program_swallows():
    x = torch.ones(2).to("tpu")
    graph = torch.accelerator.Graph()
    graph.capture_begin()
    with pytest.raises(GraphCaptureError):
        x.tolist()
    with pytest.raises(GraphCaptureError, match="A read of the device"):
        graph.capture_end()
    assert x.tolist() == [1, 1]


def test_errors_of_pytorch_in_a_capture():
    x = torch.ones(2).to("tpu")
    graph = torch.accelerator.Graph()
    with graph:
        with pytest.raises(RuntimeError, match="shape .* is invalid"):
            x.reshape(3)
        y = x + 1
    graph.replay()
    assert y.tolist() == [2, 2]


def test_errors_of_pytorch_that_values_might_explain():
    x, y = torch.ones(2).to("tpu"), torch.ones(3).to("tpu")
    with pytest.raises(GraphCaptureError) as raised, torch.accelerator.Graph():
        x + y
    assert "PyTorch refuses this call" in "".join(raised.value.__notes__)


def test_calls_out_of_order():
    graph = torch.accelerator.Graph(keep_graph=True)
    for call in (graph.replay, graph.instantiate, graph.capture_end, graph.pool):
        with pytest.raises(GraphCaptureError):
            call()
    x = torch.ones(2).to("tpu")
    with graph:
        x += 1
        with pytest.raises(GraphCaptureError, match="still being captured"):
            graph.replay()
    with pytest.raises(GraphCaptureError, match="captured already"):
        graph.capture_begin()
    graph.instantiate()
    graph.replay()
    graph.reset()
    with pytest.raises(GraphCaptureError, match="Nothing was captured"):
        graph.replay()
    assert x.tolist() == [2, 2]


def test_storages_that_have_another_size_by_the_replay():
    x, y = torch.ones(4).to("tpu"), torch.zeros(4).to("tpu")
    graph = torch.accelerator.Graph()
    with graph:
        y.copy_(x)
    y.untyped_storage().resize_(0)
    with pytest.raises(GraphCaptureError, match="resized"):
        graph.replay()
    x.untyped_storage().resize_(0)
    with pytest.raises(GraphCaptureError, match="has 0 bytes"):
        graph.replay()


def test_a_graph_that_ends_while_it_captures():
    x = torch.ones(2).to("tpu")
    graph = torch.accelerator.Graph()
    graph.capture_begin()
    x += 1
    del graph
    gc.collect()
    assert not torch.tpu.is_current_stream_capturing()
    assert x.tolist() == [1, 1]
