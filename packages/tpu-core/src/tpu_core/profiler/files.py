"""``torch.tpu.profiler.trace``: a profile as files for XProf, TensorBoard and Perfetto."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from tpu_core.profiler import collection, xplane
from tpu_core.profiler.collection import Taken

_traces = itertools.count()


@dataclass(slots=True)
class Trace:
    """A trace, whose files are written when its block ends.

    Attributes:
        profile: PyTorch's profile: ``key_averages()``, ``events()``.
        xplane: XLA's trace with the rows of the device, for XProf and TensorBoard.
        perfetto: PyTorch's trace, for Perfetto.
    """

    profile: profile
    xplane: Path
    perfetto: Path

    def explain(self, folder: Path) -> str:
        """Text that says how to open the files."""
        return (
            f"Profile of rank {_rank()} in {self.xplane.parent}\n"
            f"  XProf:    pip install xprof; xprof --logdir {folder}\n"
            f"            (or tensorboard --logdir {folder}, with xprof installed)\n"
            f"  Perfetto: load {self.perfetto} at https://ui.perfetto.dev"
        )


@contextmanager
def trace(
    folder: str | os.PathLike[str],
    *,
    record_shapes: bool = False,
    profile_memory: bool = False,
    with_stack: bool = False,
) -> Iterator[Trace]:
    """Profile the block, and write files for XProf, TensorBoard and Perfetto.

    Each process writes files of its own; ranks of one process group write into one folder. How to
    open them is printed. The files are written where the block raises, too.

    Args:
        folder: Target folder; the files lie in ``plugins/profile/<run>``, as TensorBoard wants.
        record_shapes: Record the shapes of the inputs of ops.
        profile_memory: Record memory as it is allocated and freed.
        with_stack: Record the Python stack of ops.

    Yields:
        The trace.

    Raises:
        RuntimeError: Another profile is being taken.

    Example:
        >>> with torch.tpu.profiler.trace("profiles"):
        ...     for i in range(3):
        ...         with torch.tpu.profiler.step(i):
        ...             train_step()
    """
    folder = Path(folder)
    run = folder / "plugins" / "profile" / _run_name(next(_traces))
    run.mkdir(parents=True, exist_ok=True)
    name = f"{socket.gethostname()}.rank{_rank()}"
    taken = Trace(
        profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1],
            record_shapes=record_shapes,
            profile_memory=profile_memory,
            with_stack=with_stack,
        ),
        run / f"{name}.xplane.pb",
        run / f"{name}.perfetto.json.gz",
    )
    with collection.keeping() as kept:
        try:
            with taken.profile:
                yield taken
        finally:
            if kept:
                taken.xplane.write_bytes(_xspace(kept[-1]))
                taken.profile.export_chrome_trace(str(taken.perfetto))
                print(taken.explain(folder))


def _xspace(taken: Taken) -> bytes:
    """XLA's trace, with the rows of each device as a plane of its own."""
    names = {(device, number): name for device, number, name in taken.tracks.all()}
    planes = []
    for device in sorted({device for device, _ in names}):
        tracks = {number: name for (d, number), name in names.items() if d == device}
        own = [row for row in taken.rows if row.device == device and not row.is_marker]
        # XProf shows planes of this prefix as devices that it does not know.
        planes.append(xplane.plane(f"/device:CUSTOM:tpu:{device}", own, tracks, taken.started))
    return b"".join([taken.xspace, *planes])


def _rank() -> int:
    """Rank in the default group; of a process that has none yet, as its launcher says."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def _run_name(number: int) -> str:
    """Name of a run's folder, one for all ranks of a process group."""
    name = time.strftime("%Y_%m_%d_%H_%M_%S") + f"_{time.time_ns() // 1_000_000 % 1000:03d}"
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return name
    from torch.distributed.distributed_c10d import _get_default_store

    # The first rank that comes here gives the name.
    store = _get_default_store()
    return str(store.compare_set(f"tpu_core/profiler/{number}", "", name).decode())
