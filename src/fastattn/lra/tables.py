"""Tables, in Markdown for readers and in CSV for programs."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

Value: TypeAlias = str | int | float | None


@dataclass(frozen=True)
class Table:
    """Rows of values under named columns; None is a value that is not known.

    Raises:
        ValueError: A row has another number of values.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"rows must have {len(self.columns)} values, got {row}")

    def without_empty_columns(self, *kept: str) -> Table:
        """The table without the columns that are None in every row, but for the ones kept."""
        used = [
            i
            for i, column in enumerate(self.columns)
            if column in kept or any(row[i] is not None for row in self.rows)
        ]
        return Table([self.columns[i] for i in used], [[row[i] for i in used] for row in self.rows])

    def markdown(self) -> str:
        """A pipe table: floats with two decimals, numbers on the right, None as a dash."""
        cells = [[escape(shown(value)) for value in row] for row in self.rows]
        rules = [
            "--:" if values and all(isinstance(x, int | float | None) for x in values) else "---"
            for values in (list(column) for column in zip(*self.rows, strict=True))
        ] or ["---"] * len(self.columns)
        lines = [[escape(column) for column in self.columns], rules, *cells]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def csv(self) -> str:
        """Comma-separated, with a header; numbers unrounded, None as nothing."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(["" if value is None else value for value in row] for row in self.rows)
        return buffer.getvalue()


def escape(text: str) -> str:
    """Any text as text of one line of a Markdown table, whatever it holds."""
    special = r"([\\`*<>\[\]|$&]|(?<![^\W_])_|_(?![^\W_]))"  # a _ inside a word is none
    return re.sub(special, r"\\\1", " ".join(text.split()))


def write_text(path: Path, text: str) -> None:
    """Replace a file whole."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def shown(value: Value) -> str:
    """As in a cell: floats with two decimals, None as a dash."""
    if value is None:
        return "–"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
