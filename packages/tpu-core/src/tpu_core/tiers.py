"""Tiers of execution on the CPU platform: CPU kernels of PyTorch, and programs of XLA.

See ``docs/adr/0025-tiers.md``.
"""

from __future__ import annotations

from typing import Any

import torch

from tpu_core import _C
from tpu_core.config import config

NUMBERS = _C.ENUMS["Tiers"]


def choose(client: Any) -> None:
    """Tell the extension which tiers serve a client.

    CPU kernels need memory that the host addresses, and values that this process alone holds.

    Args:
        client: A `tpu_core.pjrt.client.Client`.
    """
    # What other processes hold is not in this one's memory.
    processes = {d.process_index for d in client.backend.devices()}
    on_host = client.platform.name == "cpu" and len(processes) == 1
    # TPU_DEBUG_NANS checks the runs of programs, and needs the inputs of one that is to blame.
    _C.set_donates(not config().debug_nans)
    name = config().tiers if on_host and not config().debug_nans else "compiled"
    _C.set_tiers(NUMBERS[name])
    _C.set_patience(config().tier_patience)
    _compute_gradients_here(name != "compiled")


def switch(name: str, patience: float) -> None:
    """Have other tiers from the next op on, on the CPU platform; nothing is pending then.

    Args:
        name: As of ``TPU_TIERS``.
        patience: As of ``TPU_TIER_PATIENCE``.
    """
    _C.set_tiers(NUMBERS[name])
    _C.set_patience(patience)


def pin_to_programs(pinned: bool, client: Any) -> None:
    """Have ops run as programs from the next on, or again as `choose` decided.

    Args:
        pinned: Whether CPU kernels run nothing.
        client: The running device's.
    """
    torch.accelerator.synchronize(torch.device("tpu", _C.current_device()))
    if pinned:
        _C.set_tiers(NUMBERS["compiled"])
        _compute_gradients_here(False)
    else:
        choose(client)


_here = False


def _compute_gradients_here(here: bool) -> None:
    """Have this thread compute its gradients itself, or end that.

    CPU kernels run where they are called. Autograd's thread for the device would do so while this
    one waits: a handover of control, and of the interpreter's lock, at each backward.
    """
    global _here
    if here != _here:
        torch.autograd.set_multithreading_enabled(not here)
        _here = here
