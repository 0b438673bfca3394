"""The events of a step: allocations, releases, operations, hints, marks.

All code in umem that follows or replays a run takes these events.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from umem._common.arithmetic import ARITHMETIC, FLOAT32
from umem._common.printable import quoted
from umem.errors import TraceError

PHASES = ("forward", "backward", "update", "array")
PATTERNS = ("stream", "random", "strided")
KINDS = ("parameter", "input", "activation", "stash", "gradient", "state", "array")
LARGEST_BYTES = 1 << 46
"""The largest number of bytes in a trace: 64 TiB, more than any machine has."""
LARGEST_TOTAL_BYTES = 1 << 54
"""The largest sum of all allocations of a trace, workspace included: 16 PiB."""
LONGEST_TEXT = 10_000
"""The most characters of a name."""
MOST_PIECES = 8
"""A workspace that would consist of more arrays counts as one. A choice that no measurement
supports."""
GET = "get"
"""The name of a copy to pageable host memory, for which the host waits."""
COPIES = ("send", "fetch")
"""Actions that copy to pinned host memory, and back."""
ACTIONS = ("prefetch", "discard", "read_mostly", "preferred_location", "accessed_by", *COPIES)


class Access(NamedTuple):
    """A byte range of a tensor that an operation reads or writes."""

    tensor: int
    start: int
    stop: int


class Alloc(NamedTuple):
    """A tensor is allocated.

    ``uploaded``: its contents come from the host, not from an operation. ``stack`` has the places
    in the user's code, innermost first, each as ``file:line function``; empty if stacks were not
    recorded.
    """

    tensor: int
    nbytes: int
    kind: str
    label: str
    uploaded: bool = False
    stack: tuple[str, ...] = ()


class Free(NamedTuple):
    """A tensor's memory is freed."""

    tensor: int


OUTSIDE, LEAF = -1, -2
"""Sources of an input that no recorded call made: without and with a gradient."""


class TapeEntry(NamedTuple):
    """A call of forward that is on the tape for backward, in a step of an exported model.

    ``number`` identifies it. ``sources`` has for each input the number of the call that made it,
    or `OUTSIDE` or `LEAF`. Until the call's backward the tape keeps the inputs at the places
    ``retained``, and the outputs if ``retains_outputs``. ``gradient_bytes`` are the bytes of its
    outputs' gradients; zero if they are views of the inputs' gradients.
    """

    number: int
    sources: tuple[int, ...]
    retained: tuple[int, ...]
    retains_outputs: bool
    gradient_bytes: int


class Kernels(NamedTuple):
    """The kernels that an operation launches on a GPU.

    ``launch_count`` is their number. ``copied_bytes`` are moved through device memory by all but
    the main one, such as the columns of a convolution (im2col); the operation's own traffic is the
    main kernel's. ``piece_bytes`` is the largest array of its workspace, which is allocated in
    pieces of at most so many bytes; 0: in one piece.
    """

    launch_count: int = 1
    copied_bytes: int = 0
    piece_bytes: int = 0

    def pieces(self, workspace_bytes: int) -> list[int]:
        """Return the bytes of each array that a workspace consists of."""
        piece = self.piece_bytes
        if not 0 < piece < workspace_bytes <= MOST_PIECES * piece:
            return [workspace_bytes]
        count, rest = divmod(workspace_bytes, piece)
        return [rest, *[piece] * count] if rest else [piece] * count


ONE_KERNEL = Kernels()


class Op(NamedTuple):
    """An operation ran.

    ``flops`` is an estimate. ``traffic_bytes`` are the bytes moved through device memory, for
    gathers more than the bytes touched. ``pattern`` is the order of accesses: ``stream``,
    ``random`` or ``strided``. ``host_seconds`` is time on the host, None if memory was measured
    instead; ``workspace_bytes`` is None if time was. ``entry`` is its entry on the tape; None
    without a tape, as in recorded and loaded traces. ``kernels`` are a GPU's kernels; None, if
    they are unknown, counts as one. ``arithmetic`` is the kind of its flops, one of
    `umem._common.arithmetic.ARITHMETIC`.
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
    entry: TapeEntry | None = None
    kernels: Kernels | None = None
    arithmetic: str = FLOAT32


class Hint(NamedTuple):
    """A prefetch, discard or advice was given, or a copy to or from pinned memory started.

    ``action`` is ``prefetch``, ``discard``, ``send``, ``fetch`` or an advice; ``place`` a GPU's
    ordinal or ``"cpu"``; ``overlap``: a prefetch runs beside the operations, on a stream of its
    own, as a copy always does. A sent tensor stays until it is freed, and the free waits for the
    copy. A fetched tensor was allocated before, and its users wait for the copy.
    """

    action: str
    accesses: tuple[Access, ...]
    place: int | str | None = None
    unset: bool = False
    overlap: bool = False


class Mark(NamedTuple):
    """A named place in the trace.

    ``"step"`` is the end of an optimizer's update. ``"start"``, before the first operation, starts
    the clock of a replay: tensors uploaded before are already there. ``"backward"`` is the end of
    the backward of the call with the number ``entry``, in a step of an exported model.
    """

    label: str
    entry: int | None = None


Event = Alloc | Free | Op | Hint | Mark
CODES: dict[type, str] = {Alloc: "alloc", Free: "free", Op: "op", Hint: "hint", Mark: "mark"}
TYPES = {code: kind for kind, code in CODES.items()}


def decode(code: str, *fields: Any) -> Event:
    """Make an event from its kind and plain fields, as files store it.

    A tape entry, which older versions of umem wrote, is ignored.
    """
    event: Event = TYPES[code](*fields)
    if isinstance(event, Op):
        reads, writes = accesses(event.reads), accesses(event.writes)
        # Older versions of umem wrote a fourth number.
        kernels = None if event.kernels is None else Kernels(*event.kernels[:3])
        return event._replace(reads=reads, writes=writes, entry=None, kernels=kernels)
    if isinstance(event, Hint):
        return event._replace(accesses=accesses(event.accesses))
    if isinstance(event, Alloc):
        stack: Any = event.stack
        return event._replace(stack=tuple(stack)) if isinstance(stack, list) else event
    return event._replace(entry=None) if isinstance(event, Mark) else event


def accesses(items: Iterable[Any]) -> tuple[Access, ...]:
    """Make accesses from plain values."""
    return tuple(Access(*item) for item in items)


class Checker:
    """Checks a sequence of events; raises TraceError at the first inconsistent one.

    Code that follows a trace relies on these checks: no number of bytes, and no sum of them, is
    larger than any machine's memory.
    """

    def __init__(self) -> None:
        self.access_count = 0
        self._sizes: dict[int, int] = {}
        self._total_bytes = 0

    def check(self, event: Event) -> None:
        """Check one event against the earlier ones."""
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
            _check_text(event.label, "label")

    def _check_alloc(self, alloc: Alloc) -> None:
        """Check an allocation, and note its tensor as alive."""
        tensor, nbytes, kind, label, uploaded, stack = alloc
        _check_count(tensor, "tensor")
        self._add(nbytes, "nbytes")
        _check_text(label, "label")
        _check_type(uploaded, bool, "uploaded")
        _check_type(stack, tuple, "stack")
        for place in stack:
            _check_text(place, "a place of the stack")
        if kind not in KINDS:
            raise TraceError(f"kind {quoted(kind)} is unknown")
        if tensor in self._sizes:
            raise TraceError(f"tensor {tensor} is allocated twice")
        self._sizes[tensor] = nbytes

    def _check_op(self, op: Op) -> None:
        """Check an operation's fields and accesses."""
        _check_text(op.name, "name")
        if op.phase not in PHASES or op.pattern not in PATTERNS:
            raise TraceError(f"phase {quoted(op.phase)} or pattern {quoted(op.pattern)} is unknown")
        if op.arithmetic not in ARITHMETIC:
            raise TraceError(f"arithmetic {quoted(op.arithmetic)} is unknown")
        _check_count(op.flops, "flops")
        _check_count(op.traffic_bytes, "traffic_bytes")
        if op.workspace_bytes is not None:
            self._add(op.workspace_bytes, "workspace_bytes")
        for name, count in op.kernels._asdict().items() if op.kernels is not None else ():
            _check_count(count, name)
        seconds = op.host_seconds
        if seconds is not None and not (type(seconds) in (int, float) and 0 <= seconds < 1e18):
            raise TraceError(f"host_seconds is {quoted(seconds)}")
        self._check_accesses(op.reads)
        self._check_accesses(op.writes)

    def _add(self, nbytes: int, name: str) -> None:
        """Check a figure of bytes, and the running sum, which must fit 64 bits."""
        _check_count(nbytes, name)
        self._total_bytes += nbytes
        if nbytes > LARGEST_BYTES or self._total_bytes > LARGEST_TOTAL_BYTES:
            most = LARGEST_BYTES if nbytes > LARGEST_BYTES else LARGEST_TOTAL_BYTES
            what = name if nbytes > LARGEST_BYTES else "the sum of all allocations up to here"
            value = nbytes if nbytes > LARGEST_BYTES else self._total_bytes
            raise TraceError(f"{what} is {value} bytes; no trace has more than {most}")

    def _check_hint(self, hint: Hint) -> None:
        """Check a hint's action, place and accesses."""
        if hint.action not in ACTIONS:
            raise TraceError(f"action {quoted(hint.action)} is unknown")
        if hint.place is not None and hint.place != "cpu":
            _check_count(hint.place, "place")
        _check_type(hint.unset, bool, "unset")
        _check_type(hint.overlap, bool, "overlap")
        if hint.action in COPIES and not hint.overlap:
            raise TraceError(f"a {hint.action} runs beside the operations, and overlap is False")
        self._check_accesses(hint.accesses)

    def _check_accesses(self, accesses: tuple[Access, ...]) -> None:
        """Check that each access is inside a tensor that is alive."""
        self.access_count += len(accesses)
        for tensor, start, stop in accesses:
            if type(tensor) is not int or type(start) is not int or type(stop) is not int:
                found = quoted([tensor, start, stop])
                raise TraceError(f"an access is three whole numbers; got {found}")
            size = self._sizes.get(tensor)
            if size is None:
                raise TraceError(f"tensor {tensor} is used, and is not alive")
            if not 0 <= start <= stop <= size:
                raise TraceError(f"bytes {start}:{stop} of tensor {tensor}, which has {size}")


def check_figures(events: Iterable[Event]) -> None:
    """Check the byte figures of an unchecked trace as `Checker` does.

    Raises:
        TraceError: a figure is larger than any machine's memory.
    """
    checker = Checker()
    for event in events:
        if isinstance(event, Alloc):
            checker._add(event.nbytes, f"the tensor {quoted(event.label)}")
        elif isinstance(event, Op) and event.workspace_bytes:
            checker._add(event.workspace_bytes, f"the workspace of {quoted(event.name)}")


def _check_type(value: Any, kind: type, name: str) -> None:
    if not isinstance(value, kind):
        raise TraceError(f"{name} is {quoted(value)}, not a {kind.__name__}")


def _check_text(value: Any, name: str) -> None:
    if not isinstance(value, str):
        raise TraceError(f"{name} is {quoted(value)}, not a str")
    if len(value) > LONGEST_TEXT:
        raise TraceError(f"{name} has {len(value):,} letters; {LONGEST_TEXT:,} are the most")


def _check_count(value: Any, name: str) -> None:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise TraceError(f"{name} is {quoted(value)}, not a count of at most 63 bits")
