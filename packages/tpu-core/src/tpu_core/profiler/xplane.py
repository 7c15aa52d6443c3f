"""Rows as a plane of an XSpace, the format of XLA's traces (tsl/profiler/protobuf/xplane.proto).

A serialized message that is appended to another adds its repeated fields, so that the plane joins
XLA's own by concatenation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from tpu_core.profiler.rows import Row


def plane(name: str, rows: Sequence[Row], tracks: Mapping[int, str], start: int) -> bytes:
    """A plane, to append to an XSpace.

    Args:
        name: Its name.
        rows: Rows to show.
        tracks: Names of the tracks that the rows are on; each is a line.
        start: Time at which the trace began, nanoseconds since the epoch.
    """
    names: dict[str, int] = {}
    keys: dict[str, int] = {}
    lines: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        lines[row.resource].append(row)
    body = [_text(2, name)]
    for track, own in sorted(lines.items()):
        events = [
            _message(
                4,
                _integer(1, names.setdefault(row.name, len(names) + 1)),
                _integer(2, max(row.start - start, 0) * 1000),  # picoseconds
                _integer(3, max(row.end - row.start, 0) * 1000),
                *(
                    _message(
                        4, _integer(1, keys.setdefault(key, len(keys) + 1)), _text(5, str(value))
                    )
                    for key, value in row.metadata.items()
                ),
            )
            for row in sorted(own, key=lambda row: row.start)
        ]
        body.append(_message(3, _integer(1, track), _text(2, tracks[track]), *events))
    body += [_entry(4, number, text) for text, number in names.items()]
    body += [_entry(5, number, text) for text, number in keys.items()]
    return _message(1, *body)


def _entry(field: int, number: int, name: str) -> bytes:
    """An entry of a map from numbers to what they name."""
    return _message(field, _integer(1, number), _message(2, _integer(1, number), _text(2, name)))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _text(field: int, text: str) -> bytes:
    return _bytes(field, text.encode())


def _message(field: int, *parts: bytes) -> bytes:
    return _bytes(field, _joined(parts))


def _joined(parts: Iterable[bytes]) -> bytes:
    return b"".join(parts)
