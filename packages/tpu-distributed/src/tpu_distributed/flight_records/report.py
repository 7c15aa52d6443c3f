"""Read the dumps of all ranks, put them side by side and say where they part."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from tpu_distributed.flight_records.recorder import VERSION

# A group of processes: its name, and its ranks.
Group = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Dump:
    """The dump of one rank.

    Attributes:
        rank: In the default group.
        size: Of the default group.
        reason: Reason of the report.
        dropped: Number of records that are older than those that were kept.
        records: As `FlightRecorder.records` gives them.
    """

    rank: int
    size: int
    reason: str
    dropped: int
    records: list[dict[str, Any]]


def read(folder: Path) -> list[Dump]:
    """The dumps in a folder, by rank.

    Raises:
        ValueError: A file is not a dump, or of another version.
    """
    dumps = []
    for file in folder.glob("rank-*.json"):
        try:
            content = json.loads(file.read_text())
            version = content["version"]
            fields = [content[name] for name in ("rank", "size", "reason", "dropped", "records")]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is not a dump of flight records: {error!r}") from error
        if version != VERSION:
            raise ValueError(f"{file} has version {version}; this is for version {VERSION}.")
        dumps.append(Dump(*fields))
    return sorted(dumps, key=lambda dump: dump.rank)


def findings(dumps: Sequence[Dump]) -> list[str]:
    """Differences between ranks, a sentence or two each; empty where they agree.

    Of each group only the first difference is told: what comes after follows from it.
    """
    size = max((dump.size for dump in dumps), default=0)
    missing = sorted(set(range(size)) - {dump.rank for dump in dumps})
    found = []
    if missing:
        found.append(
            f"{_named(missing)} left no dump: killed, or not in a collective when others failed."
        )
    for group in _groups(dumps):
        finding = _first_difference(group, [d for d in dumps if d.rank in group[1]])
        if finding:
            found.append(finding)
    return found


def table(dumps: Sequence[Dump], last: int) -> Table:
    """The last collectives of each group, those that ranks have in common in one row.

    Args:
        dumps: Of all ranks.
        last: Number of entries to show of each group.
    """
    shown = Table("group", "#", "call", "ranks", "state", "waited", "line", box=None)
    for name, ranks in _groups(dumps):
        rows: dict[int, dict[tuple[str, ...], list[tuple[int, dict[str, Any]]]]] = {}
        for rank, record in _of_group(dumps, (name, ranks)):
            row = (record["call"], record["state"], record["line"] or "")
            rows.setdefault(record["sequence"], {}).setdefault(row, []).append((rank, record))
        for sequence in sorted(rows)[-last:]:
            for (call, state, line), members in rows[sequence].items():
                waits = [r["issued"] - r["called"] for _, r in members if r["issued"]]
                cells = (
                    name,
                    str(sequence),
                    call,
                    spans(rank for rank, _ in members),
                    state,
                    f"{max(waits):.3f} s" if waits else "",
                    line,
                )
                style = "red" if len(rows[sequence]) > 1 or state == "failed" else ""
                shown.add_row(*(Text(cell) for cell in cells), style=style)
    for dump in dumps:
        for record in [r for r in dump.records if r["sequence"] is None][-last:]:
            state, line = record["state"], record["line"] or ""
            message = (record["group"], "", record["call"], str(dump.rank), state, "", line)
            shown.add_row(*(Text(cell) for cell in message))
    return shown


def spans(ranks: Iterable[int]) -> str:
    """Ranks in short: ``"0-3, 7"``."""
    numbers = sorted(set(ranks))
    starts = [n for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n - 1]
    ends = [a for a, b in pairwise(numbers) if b != a + 1] + numbers[-1:]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends))


def _groups(dumps: Sequence[Dump]) -> list[Group]:
    """Groups that have collectives, in the order in which they were first used."""
    found: dict[Group, float] = {}
    for dump in dumps:
        for record in dump.records:
            if record["sequence"] is not None:
                group = record["group"], tuple(record["ranks"])
                found[group] = min(found.get(group, record["called"]), record["called"])
    return sorted(found, key=lambda group: found[group])


def _of_group(dumps: Iterable[Dump], group: Group) -> list[tuple[int, dict[str, Any]]]:
    return [
        (dump.rank, record)
        for dump in dumps
        for record in dump.records
        if record["sequence"] is not None and (record["group"], tuple(record["ranks"])) == group
    ]


def _first_difference(group: Group, dumps: Sequence[Dump]) -> str | None:
    name = f"Group '{group[0]}'"
    by_number: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for rank, record in _of_group(dumps, group):
        by_number[record["sequence"]][rank] = record
        first.setdefault(rank, record["sequence"])
        last[rank] = record["sequence"]
    for dump in dumps:  # one that never came to a collective of the group
        if dump.rank not in last and not dump.dropped:
            first[dump.rank], last[dump.rank] = 1, 0
    start = max(first.values())
    for number in sorted(n for n in by_number if n >= start):
        records = by_number[number]
        calls: dict[tuple[str, str], list[int]] = defaultdict(list)
        for rank, record in records.items():
            calls[_call(record), record["call"]].append(rank)
        if len({call for _, call in calls}) > 1:
            told = "; ".join(f"{_named(ranks)}: {text}" for (text, _), ranks in calls.items())
            return f"{name}: collective {number} differs. {told}."
        absent = [rank for rank in last if rank not in records]
        if absent:
            here = "; ".join(f"{_named(ranks)}: {text}" for (text, _), ranks in calls.items())
            stood = _last_calls(group, dumps, absent)
            return f"{name}: {_named(absent)} never came to collective {number}. {here}. {stood}"
        failed = [rank for rank, record in records.items() if record["state"] == "failed"]
        if failed:
            return f"{name}: collective {number} failed. {_order_of(records)}"
    return None


def _last_calls(group: Group, dumps: Iterable[Dump], absent: Iterable[int]) -> str:
    told = []
    for dump in dumps:
        if dump.rank in absent:
            records = dump.records
            where = f"{_call(records[-1])} ({records[-1]['state']})" if records else "nothing"
            told.append(f"The last that rank {dump.rank} called: {where}.")
    return " ".join(told)


def _order_of(records: dict[int, dict[str, Any]]) -> str:
    """Order of arrival; clocks of different hosts may differ."""
    order = sorted(records, key=lambda rank: records[rank]["called"])
    (first, *_, late) = order if len(order) > 1 else (order[0], order[0])
    text = f"{_call(records[first])}, called by rank {first} first"
    if late != first:
        seconds = records[late]["called"] - records[first]["called"]
        text += f" and by rank {late} last, {seconds:.1f} s later"
    return f"{text}."


def _call(record: dict[str, Any]) -> str:
    return f"{record['call']} at {record['line']}" if record["line"] else str(record["call"])


def _named(ranks: Iterable[int]) -> str:
    found = sorted(set(ranks))
    return f"rank {found[0]}" if len(found) == 1 else f"ranks {spans(found)}"
