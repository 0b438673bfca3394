"""Traces: what a step allocated, freed, read and wrote, in order.

A trace is a list of events. It says nothing of contents, so it can be replayed on any device.

File format, version 1: gzip-compressed UTF-8 text, one JSON value a line. The first line is an
object, ``{"format": "umem-trace", "version": 1, "backend": "numpy", "meta": {...}}``. Then one
array an event, its kind first and its fields in the order of the classes below:
``["alloc", tensor, nbytes, kind, label, uploaded]``, ``["free", tensor]``,
``["op", name, phase, reads, writes, flops, traffic_bytes, pattern, host_seconds,
workspace_bytes]``, ``["hint", action, accesses, place, unset, overlap]``, ``["mark", label]``.
An access is ``[tensor, start, stop]`` in bytes. The last line is ``["end", event_count]``, so
that a truncated file is told from a short one. Loading parses JSON and executes nothing.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from umem.errors import TraceError

FORMAT = "umem-trace"
VERSION = 1
PHASES = ("forward", "backward", "update", "array")
PATTERNS = ("stream", "random", "strided")
KINDS = ("parameter", "input", "activation", "stash", "gradient", "state", "array")
ACTIONS = ("prefetch", "discard", "read_mostly", "preferred_location", "accessed_by")
LINE_BYTES = 16 << 20
"""The longest line that is read: what is longer is no event."""


class Access(NamedTuple):
    """A byte range of a tensor that an operation reads or writes."""

    tensor: int
    start: int
    stop: int


class Alloc(NamedTuple):
    """A tensor comes into being.

    ``uploaded`` says that its contents come from the host rather than from an operation.
    """

    tensor: int
    nbytes: int
    kind: str
    label: str
    uploaded: bool = False


class Free(NamedTuple):
    """The last reference to a tensor's memory is gone."""

    tensor: int


class Op(NamedTuple):
    """An operation has run.

    ``flops`` is an estimate. ``traffic_bytes`` is what it moves through device memory, which
    for gathers is more than what it touches. ``pattern`` is how it walks: ``stream``,
    ``random`` or ``strided``. ``host_seconds`` is what the host measured, None where memory
    rather than time was measured; ``workspace_bytes`` the reverse.
    """

    name: str
    phase: str
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    flops: int = 0
    traffic_bytes: int = 0
    pattern: str = "stream"
    host_seconds: float | None = None
    workspace_bytes: int | None = None


class Hint(NamedTuple):
    """A prefetch, a discard or advice was given.

    ``action`` is ``prefetch``, ``discard`` or an advice; ``place`` a GPU's ordinal or ``"cpu"``;
    ``overlap`` says that a prefetch runs beside the operations, on a stream of its own.
    """

    action: str
    accesses: tuple[Access, ...]
    place: int | str | None = None
    unset: bool = False
    overlap: bool = False


class Mark(NamedTuple):
    """A place in the trace with a name; ``"step"`` is the end of an optimizer's update."""

    label: str


Event = Alloc | Free | Op | Hint | Mark
CODES: dict[type, str] = {Alloc: "alloc", Free: "free", Op: "op", Hint: "hint", Mark: "mark"}
_TYPES = {code: kind for kind, code in CODES.items()}


class Lifetime(NamedTuple):
    """From the event that allocates a tensor to the one that frees it (None: never)."""

    alloc: Alloc
    birth: int
    death: int | None


@dataclass(frozen=True)
class Trace:
    """The events of a run, and the backend (``numpy``, ``cupy``, or ``model``) they came from."""

    events: list[Event]
    backend: str = "numpy"
    meta: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.events)

    @property
    def ops(self) -> Iterator[Op]:
        """The operations, in order."""
        return (event for event in self.events if isinstance(event, Op))

    @property
    def step_count(self) -> int:
        """How many optimizer updates ended in it."""
        return sum(event == Mark("step") for event in self.events)

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once, an operation's workspace included."""
        live = peak = 0
        sizes: dict[int, int] = {}
        for event in self.events:
            if isinstance(event, Alloc):
                live += event.nbytes
                sizes[event.tensor] = event.nbytes
            elif isinstance(event, Free):
                live -= sizes.pop(event.tensor)
            elif isinstance(event, Op):
                peak = max(peak, live + (event.workspace_bytes or 0))
            peak = max(peak, live)
        return peak

    def lifetimes(self) -> dict[int, Lifetime]:
        """Each tensor's birth and death, as indexes into the events."""
        found: dict[int, Lifetime] = {}
        for index, event in enumerate(self.events):
            if isinstance(event, Alloc):
                found[event.tensor] = Lifetime(event, index, None)
            elif isinstance(event, Free):
                found[event.tensor] = found[event.tensor]._replace(death=index)
        return found

    def with_workspace(self, calibration: Trace) -> Trace:
        """This trace with the workspace that a calibration pass of the same code measured.

        Raises:
            TraceError: the two passes did not run the same operations, or the calibration pass
                measured times.
        """
        measured = [(op.name, op.phase, op.workspace_bytes) for op in calibration.ops]
        own = [(op.name, op.phase) for op in self.ops]
        if own != [(name, phase) for name, phase, _ in measured]:
            raise TraceError(
                f"the calibration pass ran {len(measured)} operations and the recorded one "
                f"{len(own)}, or in another order: record the same step twice"
            )
        if measured and all(workspace is None for _, _, workspace in measured):
            raise TraceError(
                'the calibration pass measured no workspace: record it with measure="workspace"'
            )
        workspace = iter(measured)
        events: list[Event] = [
            event._replace(workspace_bytes=next(workspace)[2]) if isinstance(event, Op) else event
            for event in self.events
        ]
        return Trace(events, self.backend, self.meta)

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the trace; refuses to overwrite a file without ``force``.

        Raises:
            TraceError: the file exists, or cannot be written; nothing is left half-written.
        """
        path = Path(path)
        try:
            if not force and path.exists():
                raise TraceError(f"{path} exists; pass force=True to overwrite it")
            self._write(path, path.with_name(path.name + ".partial"))
        except TraceError:
            raise
        except (OSError, ValueError) as error:
            raise TraceError(f"cannot write the trace to {str(path)!r}: {error}") from error
        return path

    def _write(self, path: Path, partial: Path) -> None:
        try:
            with open(partial, "wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as file:
                file.writelines(line.encode() for line in self._lines())
            partial.replace(path)
        except BaseException:  # Ctrl-C included
            with contextlib.suppress(OSError, ValueError):
                partial.unlink()
            raise

    def _lines(self) -> Iterator[str]:
        header = {"format": FORMAT, "version": VERSION, "backend": self.backend}
        yield json.dumps({**header, "meta": dict(self.meta)}) + "\n"
        for event in self.events:
            yield json.dumps([CODES[type(event)], *event], separators=(",", ":")) + "\n"
        yield json.dumps(["end", len(self.events)]) + "\n"

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace and check that it holds together; executes nothing.

        Raises:
            TraceError: no such file, not a trace, truncated, from a newer umem, or inconsistent
                (a tensor used before it is allocated, freed twice, ...). Names the line.
        """
        path = Path(path)
        try:
            with gzip.open(path, "rb") as file:
                header = _header(path, file.readline(LINE_BYTES))
                return cls(_events(path, file), header["backend"], header["meta"])
        except EOFError as error:
            raise TraceError(f"{path} is truncated: {error}") from error
        except (OSError, zlib.error) as error:
            raise TraceError(f"{path} cannot be read as a trace: {error}") from error
        except TraceError:
            raise
        except ValueError as error:  # a path with a null byte
            raise TraceError(f"{str(path)!r} cannot be read as a trace: {error}") from error


def _header(path: Path, line: bytes) -> dict[str, Any]:
    try:
        header = json.loads(line)
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
    except TraceError:
        raise
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} is not a umem trace (line 1: {error})") from error
    return {"backend": backend, "meta": meta}


def _events(path: Path, file: gzip.GzipFile) -> list[Event]:
    events: list[Event] = []
    checker = Checker()
    for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES), b""), start=2):
        try:
            event = _decode(line)
            if isinstance(event, int):
                _check_end(event, len(events), file)
                return events
            checker.check(event)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
        events.append(event)
    raise TraceError(f"{path} is truncated: it has {len(events)} events and no end")


def _check_end(announced: int, count: int, file: gzip.GzipFile) -> None:
    if announced != count:
        raise TraceError(f"{count} events instead of the {announced} it announces")
    if file.read(1):
        raise TraceError("it goes on after its end")


def _decode(line: bytes) -> Event | int:
    """The event in a line, or the count that the last line announces."""
    value = json.loads(line)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise TraceError("not an event: an event is a list that begins with its kind")
    code, *fields = value
    if code == "end" and len(fields) == 1 and type(fields[0]) is int:
        return fields[0]
    if code not in _TYPES:
        raise TraceError(f"there is no event {code!r}")
    try:
        return decode(code, *fields)
    except TypeError as error:
        raise TraceError(f"{code!r} has other fields: {error}") from error


def decode(code: str, *fields: Any) -> Event:
    """The event of a kind's name and plain fields, as a file and a recorder keep it."""
    event: Event = _TYPES[code](*fields)
    if isinstance(event, Op):
        return event._replace(reads=_accesses(event.reads), writes=_accesses(event.writes))
    if isinstance(event, Hint):
        return event._replace(accesses=_accesses(event.accesses))
    return event


def _accesses(items: Iterable[Any]) -> tuple[Access, ...]:
    return tuple(Access(*item) for item in items)


class Checker:
    """Follows events and raises TraceError at the first that does not hold together."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}

    def check(self, event: Event) -> None:
        """Check one event against those before it."""
        if isinstance(event, Op):
            self._check_op(event)
        elif isinstance(event, Alloc):
            self._check_alloc(event)
        elif isinstance(event, Free):
            _check_count(event.tensor, "tensor")
            if self._sizes.pop(event.tensor, None) is None:
                raise TraceError(f"tensor {event.tensor} is freed, and is not alive")
        elif isinstance(event, Hint):
            self._check_hint(event)
        else:
            _check_type(event.label, str, "label")

    def _check_alloc(self, alloc: Alloc) -> None:
        _check_count(alloc.tensor, "tensor")
        _check_count(alloc.nbytes, "nbytes")
        _check_type(alloc.label, str, "label")
        _check_type(alloc.uploaded, bool, "uploaded")
        if alloc.kind not in KINDS:
            raise TraceError(f"kind {alloc.kind!r} is unknown")
        if alloc.tensor in self._sizes:
            raise TraceError(f"tensor {alloc.tensor} is allocated twice")
        self._sizes[alloc.tensor] = alloc.nbytes

    def _check_op(self, op: Op) -> None:
        _check_type(op.name, str, "name")
        if op.phase not in PHASES or op.pattern not in PATTERNS:
            raise TraceError(f"phase {op.phase!r} or pattern {op.pattern!r} is unknown")
        _check_count(op.flops, "flops")
        _check_count(op.traffic_bytes, "traffic_bytes")
        if op.workspace_bytes is not None:
            _check_count(op.workspace_bytes, "workspace_bytes")
        seconds = op.host_seconds
        if seconds is not None and not (type(seconds) in (int, float) and 0 <= seconds < 1e18):
            raise TraceError(f"host_seconds is {seconds!r}")
        self._check_accesses(op.reads)
        self._check_accesses(op.writes)

    def _check_hint(self, hint: Hint) -> None:
        if hint.action not in ACTIONS:
            raise TraceError(f"action {hint.action!r} is unknown")
        if hint.place is not None and hint.place != "cpu":
            _check_count(hint.place, "place")
        _check_type(hint.unset, bool, "unset")
        _check_type(hint.overlap, bool, "overlap")
        self._check_accesses(hint.accesses)

    def _check_accesses(self, accesses: tuple[Access, ...]) -> None:
        for tensor, start, stop in accesses:
            if type(tensor) is not int or type(start) is not int or type(stop) is not int:
                raise TraceError(f"an access is three whole numbers; got {[tensor, start, stop]}")
            size = self._sizes.get(tensor)
            if size is None:
                raise TraceError(f"tensor {tensor} is used, and is not alive")
            if not 0 <= start <= stop <= size:
                raise TraceError(f"bytes {start}:{stop} of tensor {tensor}, which has {size}")


def _check_type(value: Any, kind: type, name: str) -> None:
    if not isinstance(value, kind):
        raise TraceError(f"{name} is {value!r}, not a {kind.__name__}")


def _check_count(value: Any, name: str) -> None:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise TraceError(f"{name} is {value!r}, not a count of at most 63 bits")
