"""Messages between two ranks, by way of the hosts.

A program that two of many chips run is not possible on every TPU (where routing is limited, all
chips of a slice must enter it), and it would hold up whatever the device has to do next. So a
message goes over the hosts' network, matched by source and tag, in any order against collectives.
"""

from __future__ import annotations

import torch

from tpu_core.errors import ProcessGroupError
from tpu_distributed.control import Call, Control
from tpu_distributed.work import Received, Sent


def send(control: Control, tensor: torch.Tensor, to: int, tag: int) -> Sent:
    """Send a tensor to a rank; waits until it is computed, not until it is received."""
    call = _describe("send", tensor, f"to {to}")
    host = tensor.detach().cpu().contiguous()
    with control.errors(call):
        work = control.gloo.send([_bytes(host)], to, tag)
    return Sent(work, host, tensor, control, call)


def receive(control: Control, tensor: torch.Tensor, source: int, tag: int) -> Received:
    """Receive a tensor from a rank, or from any: -1."""
    if control.size == 1:
        raise ProcessGroupError("There is no other rank to receive from.")
    call = _describe("recv", tensor, f"from {source}" if source >= 0 else "from any")
    host = torch.empty(tensor.shape, dtype=tensor.dtype)
    with control.errors(call):
        if source < 0:
            work = control.gloo.recv_anysource([_bytes(host)], tag)
        else:
            work = control.gloo.recv([_bytes(host)], source, tag)
    return Received(work, host, tensor, control, call)


def _bytes(host: torch.Tensor) -> torch.Tensor:
    return host.view(-1).view(torch.uint8)


def _describe(kind: str, tensor: torch.Tensor, whom: str) -> str:
    return str(Call(kind, whom, ((tuple(tensor.shape), tensor.dtype),)))
