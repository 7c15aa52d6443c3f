"""Tables that print as text anywhere and as rich tables in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """A title, column names and rows of text."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def __str__(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        text = [
            "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) for line in lines
        ]
        return "\n".join([self.title, *(f"  {row}".rstrip() for row in text)])

    def __rich__(self) -> Any:
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(*self.columns, title=self.title, title_justify="left")
        for row in self.rows:
            # Text, so that shapes in square brackets are not read as markup.
            table.add_row(*(Text(cell) for cell in row))
        return table
