"""The file format of traces, version 2.

gzip-compressed UTF-8 text, one JSON value a line. The first line is an object,
``{"format": "umem-trace", "version": 2, "backend": "numpy", "meta": {...}}``. Then one array an
event, its kind first and its fields in the order of the classes of `umem.events`:
``["alloc", tensor, nbytes, kind, label, uploaded, stack]``, ``["free", tensor]``,
``["op", name, phase, reads, writes, flops, traffic_bytes, pattern, host_seconds,
workspace_bytes]``, ``["hint", action, accesses, place, unset, overlap]``, ``["mark", label]``.
An access is ``[tensor, start, stop]`` in bytes. The last line is ``["end", event_count]``, so
that a truncated file is told from a short one. Loading parses JSON and executes nothing.

A trace of several sizes has them in its first line, ``"sizes": [4, 8]``, ascending, and then the
events of one size after another, each closed by its own ``["end", event_count]``.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from umem.errors import TraceError
from umem.events import CODES, TYPES, Checker, Event, decode

FORMAT = "umem-trace"
VERSION = 2
LINE_BYTES = 16 << 20
"""The longest line that is read: what is longer is no event."""


class Header(NamedTuple):
    """What the first line says besides the format; ``sizes`` is empty for one section."""

    backend: str
    meta: Mapping[str, str]
    sizes: tuple[int, ...] = ()


def write(path: Path, header: Header, sections: list[list[Event]], *, force: bool) -> Path:
    """Write a file of a section a size, whole or not at all; see `umem.Trace.save`."""
    try:
        if not force and path.exists():
            raise TraceError(f"{path} exists; pass force=True to overwrite it")
        if path.exists() and not path.is_file():  # a device would be replaced by a file
            raise TraceError(f"{path} is no file; give the name of one")
        _write(path, path.with_name(path.name + ".partial"), _lines(header, sections))
    except TraceError:
        raise
    except (OSError, ValueError) as error:
        raise TraceError(f"cannot write the trace to {str(path)!r}: {_plain(error)}") from error
    return path


def _plain(error: Exception) -> str:
    """What is wrong with a path or a file, as a person would say it."""
    if isinstance(error, FileNotFoundError):
        return "there is no such file or folder"
    if isinstance(error, IsADirectoryError):
        return "it is a folder"
    if isinstance(error, gzip.BadGzipFile) and str(error).startswith("Not a gzip"):
        return "it is not compressed with gzip, as every trace is"
    if isinstance(error, (gzip.BadGzipFile, zlib.error)):
        return "its compressed data are damaged"
    reason = getattr(error, "strerror", None) or str(error)
    return reason[:1].lower() + reason[1:]


def _write(path: Path, partial: Path, lines: Iterator[str]) -> None:
    try:
        with open(partial, "wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as file:
            file.writelines(line.encode() for line in lines)
        partial.replace(path)
    except BaseException:  # Ctrl-C included
        with contextlib.suppress(OSError, ValueError):
            partial.unlink()
        raise


def _lines(header: Header, sections: list[list[Event]]) -> Iterator[str]:
    first = {"format": FORMAT, "version": VERSION, "backend": header.backend}
    sizes = {"sizes": list(header.sizes)} if header.sizes else {}
    yield json.dumps({**first, "meta": dict(header.meta), **sizes}) + "\n"
    for events in sections:
        for event in events:
            yield json.dumps([CODES[type(event)], *event], separators=(",", ":")) + "\n"
        yield json.dumps(["end", len(events)]) + "\n"


def read(path: Path) -> tuple[Header, list[list[Event]]]:
    """The first line of a file and the events of its sections; see `umem.Trace.load`."""
    try:
        with gzip.open(path, "rb") as file:
            header = _header(path, file.readline(LINE_BYTES))
            return header, _sections(path, file, max(1, len(header.sizes)))
    except EOFError as error:
        raise TraceError(f"{path} is truncated: {error}") from error
    except (OSError, zlib.error) as error:
        raise TraceError(f"{path} cannot be read as a trace: {_plain(error)}") from error
    except TraceError:
        raise
    except ValueError as error:  # a path with a null byte
        raise TraceError(f"{str(path)!r} cannot be read as a trace: {_plain(error)}") from error


def _header(path: Path, line: bytes) -> Header:
    try:
        if not line:
            raise ValueError("it is empty")
        header = _json(line)
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise ValueError(f'it does not begin with {{"format": "{FORMAT}"')
        version, backend, meta = header.get("version"), header.get("backend"), header.get("meta")
        if type(version) is not int or version < 1:
            raise ValueError(f"version is {version!r}")
        if version > VERSION:
            raise TraceError(
                f"{path} is a trace of version {version}; this umem reads up to version "
                f"{VERSION}: update umem to read it"
            )
        if not isinstance(backend, str) or not isinstance(meta, dict):
            raise ValueError("backend or meta is missing")
        if not all(isinstance(value, str) for value in meta.values()):
            raise ValueError("meta holds something other than text")
        sizes = _sizes(header.get("sizes", []))
    except TraceError:
        raise
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} is not a umem trace (line 1: {error})") from error
    return Header(backend, meta, sizes)


def _json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None


def _sizes(value: Any) -> tuple[int, ...]:
    whole = isinstance(value, list) and all(type(size) is int and size > 0 for size in value)
    if not whole or len(value) == 1 or sorted(set(value)) != value:
        raise ValueError(f"sizes are two or more ascending whole numbers; got {value!r}")
    return tuple(value)


def _sections(path: Path, file: gzip.GzipFile, count: int) -> list[list[Event]]:
    lines = enumerate(iter(lambda: file.readline(LINE_BYTES), b""), start=2)
    sections = [_events(path, lines) for _ in range(count)]
    if file.read(1):
        raise TraceError(f"{path} goes on after its end")
    return sections


def _events(path: Path, lines: Iterator[tuple[int, bytes]]) -> list[Event]:
    events: list[Event] = []
    checker = Checker()
    for number, line in lines:
        try:
            event = _decode(line)
            if isinstance(event, int):
                if event != len(events):
                    raise TraceError(f"{len(events)} events instead of the {event} it announces")
                return events
            checker.check(event)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
        events.append(event)
    raise TraceError(f"{path} is truncated: it has {len(events)} events and no end")


def _decode(line: bytes) -> Event | int:
    """The event in a line, or the count that the last line announces."""
    value = _json(line)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise TraceError("not an event: an event is a list that begins with its kind")
    code, *fields = value
    if code == "end" and len(fields) == 1 and type(fields[0]) is int:
        return fields[0]
    if code not in TYPES:
        raise TraceError(f"there is no event {code!r}")
    try:
        return decode(code, *fields)
    except TypeError as error:
        raise TraceError(f"{code!r} has other fields: {error}") from error
