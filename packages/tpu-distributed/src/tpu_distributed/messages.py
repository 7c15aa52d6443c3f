"""Messages between two ranks, by way of the hosts.

A program that two of many chips run is not possible on every TPU (where routing is limited, all
chips of a slice must enter it), and it would hold up whatever the device has to do next. So a
message goes over the hosts' network, matched by source and tag, in any order against collectives.
"""

from __future__ import annotations

import torch

from tpu_core.errors import ProcessGroupError
from tpu_distributed.rendezvous import CollectiveCall, Rendezvous
from tpu_distributed.work import Received, Sent


def send(control: Rendezvous, tensor: torch.Tensor, to: int, tag: int) -> Sent:
    """Send a tensor to a rank; waits until it is computed, not until it is received."""
    host = tensor.detach().cpu().contiguous()
    record = control.message(_call("send", tensor, f"to {to}"))
    with control.errors(record):
        work = control.gloo.send([_bytes(host)], to, tag)
    record.issue()
    return Sent(work, host, tensor, control, record)


def receive(control: Rendezvous, tensor: torch.Tensor, source: int, tag: int) -> Received:
    """Receive a tensor from a rank, or from any: -1."""
    if control.size == 1:
        raise ProcessGroupError("There is no other rank to receive from.")
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    whom = f"from {source}" if source >= 0 else "from any"
    record = control.message(_call("recv", tensor, whom))
    with control.errors(record):
        if source < 0:
            work = control.gloo.recv_anysource([_bytes(host)], tag)
        else:
            work = control.gloo.recv([_bytes(host)], source, tag)
    record.issue()
    return Received(work, host, tensor, control, record)


def _bytes(host: torch.Tensor) -> torch.Tensor:
    return host.view(-1).view(torch.uint8)


def _call(kind: str, tensor: torch.Tensor, whom: str) -> CollectiveCall:
    return CollectiveCall(kind, whom, ((tuple(tensor.shape), tensor.dtype),))
