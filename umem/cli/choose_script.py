"""``umem choose SCRIPT``: what makes a program fit a GPU, as text."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

from rich.console import Console
from rich.text import Text

from umem._common.printable import command_line
from umem.choosing import (
    TECHNIQUES,
    DryProgram,
    ScriptChoice,
    Technique,
    TriedTechnique,
    choose_for,
)
from umem.cli.files_and_sizes import print_result, say
from umem.reports import Column, code_lines, table, wrapped
from umem.units import format_bytes, format_seconds

LONG = 5.0
"""Seconds of a first dry run from which on the wait is announced, also where a log is written. A
choice that no measurement supports."""
ENDLESS = 10_000
"""A width that any table has room in."""


def choose_script(program: DryProgram, *, as_json: bool) -> bool:
    """Print what makes a program fit; returns whether anything does.

    Raises:
        DryRunError, UnknownGpuError, SizeError: see `umem.choose`.
    """
    choice = tried(program)
    print_result(choice, partial(_lines, choice), as_json=as_json)
    return bool(choice.fitting)


def tried(program: DryProgram, techniques: Sequence[Technique] = TECHNIQUES) -> ScriptChoice:
    """Try techniques, and show how far that is on a terminal."""
    count = 0
    name = command_line(*program.argv())
    console, begun = Console(stderr=True), time.perf_counter()
    with console.status(f"Running {name} dry (Ctrl-C stops)") as status:

        def on_tried(technique: str) -> None:
            """Count a technique; after the first, tell of a long wait."""
            nonlocal count
            count += 1
            took = time.perf_counter() - begun
            if count == 1 and took > LONG:
                say(
                    f"umem: the first dry run took {took:.0f} s; up to {len(techniques) - 1} "
                    "techniques follow, two at a time",
                    err=True,
                )
            status.update(f"Running {name} dry: {count} of {len(techniques)}, {technique}")

        return choose_for(program, on_tried, techniques=techniques)


def _lines(choice: ScriptChoice, width: int) -> Iterator[Text]:
    """Format a choice as text of a width."""
    name = command_line(*choice.program.argv())
    on = f"{choice.title} with {format_bytes(choice.vram_bytes)} of VRAM"
    title = f"{name} on {on}, quickest first (simulated)"
    if not choice.fitting:
        title = f"{name} on {on} (simulated): {choice.summary}"
    yield from (Text(line, style="bold") for line in wrapped(title, width))
    if choice.fitting:
        yield from map(Text, _table(choice, width))
    dropped = [row for row in choice.rows if not row.fits]
    if dropped:
        yield Text()
        yield Text("These do not fit, or do not apply", style="bold")
    for row in dropped:
        yield from map(Text, wrapped(f"{row.name}: {_why_not(row)}", width, hang=2))
    for text in filter(None, (choice.advice, _unknown_values(choice))):
        yield Text()
        yield from map(Text, wrapped(text, width, hang=2))


def _table(choice: ScriptChoice, width: int) -> Iterator[str]:
    """Format what fits, each with its line to type: beside it, or below where there is no room."""
    columns, lines = _columns(choice), [row.line for row in choice.fitting]
    beside = [*columns, Column("type", lines, left=True)]
    if max(map(len, table(beside, ENDLESS))) <= width:
        yield from table(beside, width)
        return
    head, *rows = table(columns, width)
    if len(rows) != len(lines):  # names take several lines
        head, *rows = table(columns, ENDLESS)
    yield head
    for row, line in zip(rows, lines, strict=True):
        yield row
        yield from code_lines("    ", line, width)


def _columns(choice: ScriptChoice) -> list[Column]:
    rows = choice.fitting
    return [
        Column("technique", [row.name for row in rows]),
        Column("step" if choice.has_steps else "time", [_step(row) for row in rows]),
        Column("peak", [format_bytes(row.peak_bytes) for row in rows]),
        Column("pool", [format_bytes(row.reserved_peak_bytes) for row in rows], drop=2),
        Column("moved", [format_bytes(row.moved_bytes) for row in rows], drop=1),
    ]


def _step(row: TriedTechnique) -> str:
    low, high = format_seconds(row.seconds_low), format_seconds(row.seconds_high)
    return low if low == high else f"{low} - {high}"


def _why_not(row: TriedTechnique) -> str:
    if row.missing_bytes is None:
        return str(row.why_not)
    return f"{row.why_not}; needs at least {format_bytes(row.missing_bytes)} more"


def _unknown_values(choice: ScriptChoice) -> str:
    if not choice.asked_lines:
        return ""
    lines = ", ".join(choice.asked_lines[:3])
    first = choice.asked_lines[0]
    return (
        f"The program reads values that a dry run does not compute, at {lines}. To supply one: "
        f"--answer {first}=VALUE"
    )
