"""Lines of a given width: tables that drop columns rather than overflow, and wrapped text."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rich.cells import cell_len, chop_cells, set_cell_size

from umem._common.printable import printable, short

GAP = 2
LONGEST = 1000
"""At most this many characters of a text are wrapped: more than umem itself writes at once."""
_HANG = "  "
MOST_LINES = 4
"""A name takes at most this many lines; the end of a longer one is cut off."""
NARROWEST = 18
"""The first column keeps this width while other columns can be dropped."""


class Column(NamedTuple):
    """A column of a table; if space is short, columns with the highest ``drop`` are dropped first.

    A column with ``drop`` 0 stays.
    """

    title: str
    cells: Sequence[str]
    drop: int = 0
    left: bool = False


def table(columns: Sequence[Column], width: int) -> list[str]:
    """Format a heading and rows, no line wider than ``width``.

    The first column is narrowed: its longer cells continue on the next lines.
    """
    kept = [column._replace(cells=[printable(c) for c in column.cells]) for column in columns]
    while _narrowest(kept) > width and any(column.drop for column in kept):
        kept.remove(max(kept, key=lambda column: column.drop))
    first = min(_natural(kept[0]), max(1, width - _rest(kept)))
    sizes = [first, *(_natural(column) for column in kept[1:])]
    rows = zip(*([column.title, *column.cells] for column in kept), strict=True)
    return [line for row in rows for line in _lines(row, kept, sizes, width)]


def _lines(
    row: Sequence[str], columns: Sequence[Column], sizes: list[int], width: int
) -> Iterator[str]:
    """Format a row and the continuation lines of its first cell."""
    first, *others = _folded(row[0], sizes[0])
    yield _line([first, *row[1:]], columns, sizes, width)
    yield from (clipped(f"{_HANG}{other}", width) for other in others)


def _folded(text: str, width: int) -> list[str]:
    """Split a name into pieces, at spaces if it has some; all but the first are indented."""
    room = width - len(_HANG)
    if cell_len(text) <= width or room < 1:
        return [text]
    if cell_len(text) > len(text):  # letters of two cells, which textwrap counts as one
        first = chop_cells(text, width)[0]
        found = [first, *chop_cells(text[len(first) :], room)]
    else:
        found = textwrap.wrap(text, width, subsequent_indent=_HANG, break_on_hyphens=False)
        found = [found[0], *(piece[len(_HANG) :] for piece in found[1:])]
    last = " ".join(found[MOST_LINES - 1 :])
    return found if len(found) <= MOST_LINES else [*found[: MOST_LINES - 1], clipped(last, room)]


def _natural(column: Column) -> int:
    return max(cell_len(cell) for cell in (column.title, *column.cells))


def _rest(columns: Sequence[Column]) -> int:
    return sum(GAP + _natural(column) for column in columns[1:])


def _narrowest(columns: Sequence[Column]) -> int:
    return min(_natural(columns[0]), NARROWEST) + _rest(columns)


def _line(row: Iterable[str], columns: Sequence[Column], sizes: list[int], width: int) -> str:
    cells = [
        _left(cell, size) if column.left or not number else cell.rjust(size)
        for number, (cell, column, size) in enumerate(zip(row, columns, sizes, strict=True))
    ]
    return clipped((" " * GAP).join(cells).rstrip(), width)


def _left(cell: str, size: int) -> str:
    return set_cell_size(clipped(cell, size), size)


def clipped(text: str, width: int) -> str:
    """Cut a text to a width."""
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 2)) + ".."


def wrapped(text: str, width: int, indent: str = "", hang: int = 0) -> list[str]:
    """Wrap text of any origin to lines; a word that is too long is broken.

    Every line begins with ``indent``, those after the first with ``hang`` more spaces.
    """
    text = short(text, LONGEST)
    wide = cell_len(text) > len(text)  # of letters that take two cells half as many fit
    room = max(width // 2 if wide else width, len(indent) + hang + 1)
    return textwrap.wrap(text, room, initial_indent=indent, subsequent_indent=indent + " " * hang)


def code_lines(first: str, line: str, width: int) -> list[str]:
    """Format a line of code so that it stays code: a comment that has no room follows below.

    Args:
        first: text before the line; its width is the indentation of the following lines.
        line: a statement, or a ``with`` statement with or without its body, and a comment.
        width: cells of a line; code that cannot be broken may be wider.
    """
    if len(first) + cell_len(line) <= width:
        return [first + line]
    indent = " " * len(first)
    code, _, comment = line.partition("  # ")
    head, colon, body = code.partition("): ")
    if code.startswith("with ") and code.endswith(":"):
        found = _with_block(first, code, width)
    elif colon and len(first) + cell_len(code) > width:
        found = [f"{first}{head}):", f"{indent}    {body}"]
    else:
        found = [first + code]
    return [*found, *wrapped(comment, width, f"{indent}# ")]


def _with_block(first: str, line: str, width: int) -> list[str]:
    """Format a ``with`` statement, with a line for each manager, and for arguments if needed.

    Args:
        first: text before the statement.
        line: the statement, with its colon.
        width: cells of a line.
    """
    inside = " " * (len(first) + 2)
    found = [f"{first}with ("]
    for manager in re.split(r"(?<=\)), ", line.removeprefix("with ").removesuffix(":")):
        name, _, arguments = manager.removesuffix(")").partition("(")
        if len(inside) + len(manager) < width or not arguments:
            found.append(f"{inside}{manager},")
        else:
            found += [f"{inside}{name}(", f"{inside}  {arguments}", f"{inside}),"]
    return [*found, " " * len(first) + "):"]
