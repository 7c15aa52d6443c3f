"""Addresses at which processes of a job reach this one and at which it listens."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

LOOPBACK = "127.0.0.1"


def own_host() -> str:
    """Address at which other processes of the job reach this one.

    That is where it would reach the master from; its name, where there is none.
    """
    master = os.environ.get("MASTER_ADDR")
    own = socket.gethostname()
    with contextlib.suppress(OSError):  # what does not resolve is passed on as it is
        if not master:
            socket.getaddrinfo(own, None)
            return own
        found = _source_towards(master)
        # A host may know its own name as 127.0.1.1, where others know it by another address.
        return master if _is_loopback(found) else found
    return master or "localhost"


def interface(size: int, environ: Mapping[str, str] = os.environ) -> str:
    """The address to listen on for other processes of the job: that of the interface by which
    this one reaches the master. Empty, for all interfaces, where it is not known.

    Args:
        size: Number of processes that take part.
        environ: Environment of torchrun.
    """
    local = int(environ.get("LOCAL_WORLD_SIZE") or 0)
    if local == int(environ.get("WORLD_SIZE") or 0) >= max(size, 1):
        return LOOPBACK  # all are on this host
    master = environ.get("MASTER_ADDR")
    try:
        found = _source_towards(master or socket.gethostname())
    except OSError:
        return ""
    if not _is_loopback(found):
        return found
    # A name that stands for this host here may be another address elsewhere; this one may not.
    return found if master == "localhost" or _is_loopback(master or "") else ""


def reached_at(listening: str) -> str:
    """Address to announce for one from `interface`."""
    return listening or own_host()


def gloo_options(size: int, timeout: float) -> Any:
    """Options of a gloo group: sockets on the job's interface, unless the user names one to gloo.

    Args:
        size: Number of processes.
        timeout: Seconds that an operation may take.
    """
    make: Any = dist.ProcessGroupGloo
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    options = make._Options()
    options._timeout = timedelta(seconds=timeout)
    if name:
        options._devices = [make.create_device(interface=n) for n in name.split(",")]
    elif host := interface(size):
        options._devices = [make.create_device(hostname=host)]
    else:
        options._devices = [make.create_default_device()]
    options._threads = 2 * len(options._devices)
    return options


def _source_towards(host: str) -> str:
    """The address of this host that the system would send from."""
    found = socket.getaddrinfo(host, 9, 0, socket.SOCK_DGRAM)
    # IPv4 first, as ever: that of a name in IPv6 may lead nowhere.
    for family, kind, _, _, address in sorted(found, key=lambda f: f[0] != socket.AF_INET):
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    raise OSError(f"there is no way to {host}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False
