"""How results are written: figures, columns and tables, on a terminal and in bench/README.md."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import floor, log10
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

Row = Mapping[str, Any]
Value = str | Callable[[Row], Any]
FIGURES = 3
"""How many significant figures a number has."""


# -- numbers -------------------------------------------------------------------------------------


def figure(value: float, places: int = 9, signed: bool = False) -> str:
    """Write a number in three significant figures, and at most so many decimal places."""
    rounded = round(value, min(places, _places(value)))
    decimals = min(places, max(0, _places(rounded)))
    if rounded == 0:
        return "0"
    return f"{rounded:{'+' if signed else ''},.{decimals}f}"


def _places(value: float) -> int:
    return 0 if value == 0 else FIGURES - 1 - floor(log10(abs(value)))


def count(value: int) -> str:
    """Write a count, every digit of it."""
    return f"{value:,}"


def percent(share: float, signed: bool = False) -> str:
    """Write a share as a percentage."""
    return f"{figure(100 * share, 1, signed)} %"


def duration(seconds: float) -> str:
    """Write seconds in the unit that fits them."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{figure(seconds / size)} {unit}"
    return f"{figure(seconds * 1e6)} us"


def span(values: Iterable[float], write: Callable[[float], str] = figure) -> str:
    """Write the least and the most of some numbers, as "1.20 to 3.40"."""
    found = list(values)
    low, high = write(min(found)), write(max(found))
    return low if low == high else f"{low} to {high}"


def listed(words: Iterable[str]) -> str:
    """Write words as a list: "a, b and c"."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


# -- tables --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        head: says in words what stands in it, without the unit.
        value: the key of a row, or a function of the row; a value that is None is a dash.
        unit: stands behind the head.
        write: makes text of a value.
    """

    head: str
    value: Value
    unit: str = ""
    write: Callable[[Any], str] = str

    @property
    def title(self) -> str:
        return f"{self.head} ({self.unit})" if self.unit else self.head

    @property
    def is_text(self) -> bool:
        return self.write is str

    def cell(self, row: Row) -> str:
        value = self.value(row) if callable(self.value) else row.get(self.value)
        return "-" if value is None else self.write(value)


def text(head: str, value: Value) -> Column:
    return Column(head, value)


def counted(head: str, value: Value) -> Column:
    return Column(head, value, write=count)


def quantity(
    head: str,
    value: Value,
    unit: str = "",
    *,
    per: float = 1,
    places: int = 9,
    signed: bool = False,
) -> Column:
    """Make a column of numbers; ``per`` of what the row holds are one of the unit."""
    return Column(head, value, unit, lambda found: figure(found / per, places, signed))


def verdict(value: Value = "passed", met: str = "met", missed: str = "missed") -> Column:
    """Make a column that says whether a target was met."""
    return Column("target", value, write=lambda passed: met if passed else missed)


@dataclass(frozen=True)
class Table:
    """Rows under columns, with a title where there are several tables."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    title: str = ""

    def lines(self) -> list[list[str]]:
        return [[column.cell(row) for column in self.columns] for row in self.rows]

    def markdown(self) -> str:
        head = [column.title for column in self.columns]
        rule = ["---" if column.is_text else "---:" for column in self.columns]
        lines = [head, rule, *self.lines()]
        table = "\n".join(f"| {' | '.join(cells).replace(chr(10), ' ')} |" for cells in lines)
        return f"{self.title}\n\n{table}\n" if self.title else f"{table}\n"

    def show(self) -> None:
        """Print it: text to the left, numbers to the right."""
        table = RichTable(
            title=self.title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
        )
        for column in self.columns:
            side: Any = "left" if column.is_text else "right"
            table.add_column(column.title, justify=side, no_wrap=True)
        for line in self.lines():
            table.add_row(*map(Text, line))
        console = Console(file=sys.stdout, highlight=False)
        if not console.is_terminal:  # a pipe or a file takes lines of any length
            console = Console(file=sys.stdout, highlight=False, width=400)
        console.print(table)
