"""Options of the commands that read traces: how much of one is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import click

from umem.errors import SizeError
from umem.trace_file import MAX_BYTES, MAX_EVENTS
from umem.units import format_bytes, parse_bytes


class _Bytes(click.ParamType):  # type: ignore[type-arg]
    """A size such as 2GiB."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        try:
            return parse_bytes(value, "--max-bytes")
        except SizeError as error:
            raise click.BadParameter(str(error), ctx, param) from None


class Caps(NamedTuple):
    """What `umem.Trace.load` takes."""

    max_events: int
    max_bytes: int


def caps(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--max-events`` and ``--max-bytes`` to a command."""
    events = click.option(
        "--max-events",
        type=click.IntRange(1),
        default=MAX_EVENTS,
        metavar="N",
        help=f"Read traces of up to so many events (default: {MAX_EVENTS:,}).",
    )
    nbytes = click.option(
        "--max-bytes",
        type=_Bytes(),
        default=MAX_BYTES,
        metavar="SIZE",
        help=f"Read up to so much text, decompressed (default: {format_bytes(MAX_BYTES)}).",
    )
    return events(nbytes(command))
