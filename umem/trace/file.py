"""The file format of traces, version 7.

gzip-compressed UTF-8 text, one JSON value a line. The first line is an object,
``{"format": "umem-trace", "version": 7, "backend": "numpy", "meta": {...}}``. Then one array an
event, its kind first and its fields in the order of the classes of `umem.trace.events`:
``["alloc", tensor, nbytes, kind, label, uploaded, stack]``, ``["free", tensor]``,
``["op", name, phase, reads, writes, flops, traffic_bytes, pattern, host_seconds,
workspace_bytes, entry, kernels, arithmetic]``,
``["hint", action, accesses, place, unset, overlap]``, ``["mark", label, entry]``. ``entry`` is
null; other values, from older versions of umem, are ignored. Fields at the end may be missing, as
``entry`` is in version 2. An access is ``[tensor, start, stop]`` in bytes. The last line is
``["end", event_count]``, which tells a short file from a truncated one. Loading parses JSON and
executes nothing. No line is longer than `LINE_BYTES`.

A file from an older version may hold a step at several sizes. They are in its first line,
``"sizes": [4, 8]``, ascending; the events of each size follow in turn, each closed by its own
``["end", event_count]``. With named axes, which version 4 adds, a size is a list with one number an
axis: ``"axes": ["batch", "length"], "sizes": [[4, 16], [4, 32], ...]``. Only the last and largest
size is read.
Version 5 adds the hints ``"send"`` and ``"fetch"``, version 6 an operation's ``kernels``,
``[launch_count, copied_bytes, piece_bytes]``, version 7 the kind of its arithmetic, such as
``"float16 product"``; without it, it is ``"float32"``.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from umem._common.files import check_target, open_regular, reason, whole
from umem._common.printable import quoted, short
from umem.errors import FileError, TraceError
from umem.trace.events import CODES, LONGEST_TEXT, TYPES, Checker, Event, Mark, Op, decode
from umem.units import format_bytes

_MAGIC = b"\x1f\x8b"
FORMAT = "umem-trace"
VERSION = 7
LINE_BYTES = 1 << 20
"""The longest line that is read; no event is longer."""
MAX_EVENTS = 1_500_000
"""By default at most this many events are read; `umem run --record` keeps a million."""
MAX_BYTES = 256 << 20
"""By default at most this many bytes of text are read; an event takes about 100."""
ACCESSES = 4
"""At most this many accesses an event, on average over the most events read."""
_MORE_EVENTS = "max_events=, or --max-events, reads more"
_MORE_BYTES = "max_bytes=, or --max-bytes, reads more"


class Header(NamedTuple):
    """The first line of a file, without the format's name."""

    backend: str
    meta: Mapping[str, str]


def write(file_path: str | Path, header: Header, events: list[Event], *, force: bool) -> Path:
    """Write a file, atomically; see `umem.Trace.save`."""
    path = Path(file_path)
    try:
        check_target(path, force=force, way_out="pass force=True to overwrite it")
        with whole(path, force=force) as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as file:
            file.writelines(map(_encoded, _lines(header, events)))
    except FileError as error:
        raise TraceError(str(error)) from None
    except TraceError:
        raise
    except (OSError, ValueError) as error:
        raise TraceError(f"cannot write the trace to {short(path)}: {reason(error)}") from error
    return path


def _encoded(line: str) -> bytes:
    text = line.encode()
    if len(text) > LINE_BYTES:
        most = format_bytes(LINE_BYTES)
        raise TraceError(f"the trace cannot be saved: an event takes more than {most} of text")
    return text


def _lines(header: Header, events: list[Event]) -> Iterator[str]:
    first = {"format": FORMAT, "version": VERSION, "backend": header.backend}
    yield json.dumps({**first, "meta": dict(header.meta)}) + "\n"
    for event in events:
        fields = event._replace(entry=None) if isinstance(event, (Op, Mark)) else event
        yield json.dumps([CODES[type(event)], *fields], separators=(",", ":")) + "\n"
    yield json.dumps(["end", len(events)]) + "\n"


def read(
    file_path: str | Path, max_events: int | None = None, max_bytes: int | None = None
) -> tuple[Header, list[Event]]:
    """Read the header and the events of the last section; see `umem.Trace.load`."""
    path = Path(file_path)
    name = short(path)
    max_events = MAX_EVENTS if max_events is None else max_events
    max_bytes = MAX_BYTES if max_bytes is None else max_bytes
    try:
        with open_regular(path) as file:
            if not _MAGIC.startswith(file.read(len(_MAGIC))):
                raise ValueError("it is not compressed with gzip, as every trace is")
            file.seek(0)
            with gzip.GzipFile(fileobj=file) as text:
                lines = _Lines(name, text, max_bytes)
                header, count = _header(name, lines.next())
                return header, _last_section(name, lines, count, max_events)
    except EOFError:
        raise TraceError(f"{name} is truncated: its compressed data end too early") from None
    except TraceError:
        raise
    except (gzip.BadGzipFile, zlib.error):
        raise TraceError(
            f"{name} cannot be read as a trace: its compressed data are damaged"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: also a path with a null byte
        raise TraceError(f"{name} cannot be read as a trace: {reason(error)}") from None


class _Lines:
    """Reads lines of bounded length, and of at most ``max_bytes`` together."""

    def __init__(self, name: str, file: gzip.GzipFile, max_bytes: int) -> None:
        self._name, self._file, self._max_bytes = name, file, max_bytes
        self._left = max_bytes
        self.number = 0

    def next(self) -> bytes:
        """Return the next line; empty at the end.

        Raises:
            TraceError: the line is too long, or all lines together are.
        """
        line = self._file.readline(LINE_BYTES + 1)
        self.number += 1
        self._left -= len(line)
        if self._left < 0:
            most = format_bytes(self._max_bytes)
            raise TraceError(f"{self._name} holds more than {most}; {_MORE_BYTES}")
        if len(line) > LINE_BYTES:
            raise TraceError(
                f"{self._name}, line {self.number}: it is longer than {format_bytes(LINE_BYTES)}"
            )
        return line


def _header(name: str, line: bytes) -> tuple[Header, int]:
    """Parse and check the first line; return it with the number of sections.

    Raises:
        TraceError: the line is not a header, or is of a newer version.
    """
    try:
        if not line:
            raise ValueError("it is empty")
        header = _json(line)
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise ValueError(f'it does not begin with {{"format": "{FORMAT}"')
        version, backend, meta = header.get("version"), header.get("backend"), header.get("meta")
        if type(version) is not int or version < 1:
            raise ValueError(f"version is {quoted(version)}")
        if version > VERSION:
            raise TraceError(
                f"{name} is a trace of version {quoted(version)}; this umem reads up to version "
                f"{VERSION}: update umem to read it"
            )
        if not isinstance(backend, str) or not isinstance(meta, dict):
            raise ValueError("backend or meta is missing")
        if len(backend) > LONGEST_TEXT:
            raise ValueError("the name of the backend is too long")
        if not all(isinstance(value, str) for value in meta.values()):
            raise ValueError("meta holds something other than text")
        sizes = header.get("sizes", [])
        if not isinstance(sizes, list):
            raise ValueError(f"sizes must be a list; got {quoted(sizes)}")
    except TraceError:
        raise
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{name} is not a umem trace (line 1: {error})") from error
    return Header(backend, meta), max(1, len(sizes))


def _json(line: bytes) -> Any:
    try:
        return _JSON.decode(str(line, "utf-8"))
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_no_number)


def _last_section(name: str, lines: _Lines, count: int, max_events: int) -> list[Event]:
    """Return the events of the last section; at most ``max_events`` are in each."""
    events: list[Event] = []
    for _ in range(count):
        events = _events(name, lines, max_events)
    if lines.next():
        raise TraceError(f"{name} continues after its end")
    return events


def _events(name: str, lines: _Lines, max_events: int) -> list[Event]:
    """Return the events of a section."""
    events: list[Event] = []
    checker = Checker()
    check, append = checker.check, events.append
    texts: dict[Any, Any] = {}
    while line := lines.next():
        try:
            event = _decode(line, texts)
            if isinstance(event, int):
                if event != len(events):
                    raise TraceError(f"{len(events)} events instead of the {event} it announces")
                return events
            check(event)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{name}, line {lines.number}: {error}") from None
        if len(events) == max_events:
            raise TraceError(f"{name} has more than {max_events:,} events; {_MORE_EVENTS}")
        if checker.access_count > ACCESSES * max_events:
            most = f"{ACCESSES * max_events:,} accesses, {ACCESSES} for each of the {max_events:,}"
            raise TraceError(f"{name} has more than {most} events; {_MORE_EVENTS}")
        append(event)
    raise TraceError(f"{name} is truncated: it has {len(events)} events and no end")


_TEXT_AT = {"alloc": 3, "op": 0, "mark": 0}
"""Index of the field of an event that is its name."""
_STACK_AT = 5


def _decode(line: bytes, texts: dict[Any, Any]) -> Event | int:
    """Decode a line: an event, or the count that ends a section.

    ``texts`` stores each name and stack once, because most events share theirs.
    """
    value = _json(line)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise TraceError("not an event: an event is a list that begins with its kind")
    code, *fields = value
    if code == "end" and len(fields) == 1 and type(fields[0]) is int:
        return fields[0]
    if code not in TYPES:
        raise TraceError(f"there is no event {quoted(code)}")
    try:
        at = _TEXT_AT.get(code, len(fields))
        if at < len(fields):
            fields[at] = texts.setdefault(fields[at], fields[at])
            if at == 3 and len(fields) > _STACK_AT and isinstance(fields[_STACK_AT], list):
                stack = tuple(fields[_STACK_AT])
                fields[_STACK_AT] = texts.setdefault(stack, stack)
        return decode(code, *fields)
    except TypeError as error:
        raise TraceError(f"{quoted(code)} has other fields: {error}") from error
