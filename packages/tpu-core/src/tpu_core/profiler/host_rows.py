"""Rows of what CPU kernels ran on the device's memory, and of programs that became ready."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tpu_core.metrics import CompileEvent
from tpu_core.profiler.events import HostOp, Transfer
from tpu_core.profiler.rows import Kind, Row, Tracks, op_name, short_name
from tpu_core.profiler.xla_rows import marker


def op_rows(ops: Sequence[HostOp], tracks: Tracks, flows: Iterator[int]) -> Iterator[Row]:
    """Rows of ops that ran by CPU kernels (docs/adr/0025-tiers.md)."""
    threads: dict[int, str] = {}
    for op in ops:
        lane = threads.setdefault(op.thread, f"CPU kernels {len(threads) + 1}")
        name = short_name(op.name)
        row = Row(
            Kind.OP,
            op_name(name, op.line),
            op.start,
            op.end,
            op.device,
            tracks.number(op.device, lane),
            op.correlation,
            metadata={"op": name, "line": op.line},
        )
        if op.correlation:
            row.flow = next(flows)
            yield marker(row)
        yield row


def transfer_rows(transfers: Sequence[Transfer], tracks: Tracks) -> Iterator[Row]:
    """Rows of copies between host and device, named as those of CUDA."""
    for t in transfers:
        yield Row(
            Kind.TRANSFER,
            "Memcpy HtoD" if t.is_to_device else "Memcpy DtoH",
            t.start,
            t.end,
            t.device,
            tracks.number(t.device, "Transfers"),
            t.correlation,
            metadata={"bytes": t.bytes},
        )


def compile_rows(events: Sequence[CompileEvent], tracks: Tracks) -> Iterator[Row]:
    """Rows of compiles and loads."""
    for event in events:
        end = int(event.time * 1e9)
        loaded = event.source == "disk"
        yield Row(
            Kind.HOST,
            "tpu::load" if loaded else "tpu::compile",
            end - int(event.seconds * 1e9),
            end,
            0,
            tracks.number(0, "Loads" if loaded else "Compiles"),
            metadata={
                "reason": event.reason,
                "source": event.source,
                "ops": event.ops,
                "line": event.line,
                "key": event.key,
            },
        )
