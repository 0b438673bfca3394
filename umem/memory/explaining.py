"""Explain why CuPy's memory ran out: which variables hold it, and which changes would fit."""

from __future__ import annotations

import gc
import math
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath
from types import CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any, NamedTuple

import numpy as np

from umem._common.host import HOST_SHARE
from umem._common.specs import GpuSpec, spec_of_driver
from umem.devices import current_device
from umem.errors import DeviceError, LimitError, is_cupys_out_of_memory
from umem.memory.held_graphs import HeldGraph, held_graphs
from umem.memory.tracking import Tracker
from umem.units import MIB, format_bytes

SHOWN = 8
"""Number of holders to list. A choice: no measurement supports it."""
LIBRARIES = ("chainer", "umem")
"""Packages whose own variables are searched after the program's variables."""
PLACE_OF_PAST = (
    "when it ran out: values without a name, such as the items of an unfinished list, and gaps "
    "between arrays"
)
HOLD_NOTHING = (
    str, bytes, int, float, complex, np.ndarray, np.generic, type, ModuleType, FunctionType,
    FrameType, CodeType,
)  # fmt: skip
"""Types that hold no CuPy arrays, or only arrays that other variables hold."""
Scope = tuple[dict[str, Any], str]
"""Variables by name, and a text that tells where they are."""


class Held(NamedTuple):
    """Memory that a variable, or a line of the program, holds."""

    nbytes: int
    array_count: int
    place: str


class Remedy(NamedTuple):
    """A line of code with which the program would continue, and its effect."""

    line: str
    why: str


@dataclass(frozen=True)
class Explanation:
    """The use of a GPU's memory; see `explain`.

    Attributes:
        asked_bytes: size of the failed allocation; None if unknown.
        vram_bytes, free_bytes: VRAM of the GPU, and its free part: the driver's free memory plus
            free blocks in pools of plain memory.
        used_bytes: bytes of arrays in CuPy's pool, in umem's pools and in the holders.
        past_bytes: bytes that CuPy's pool held besides when memory ran out, by its message: arrays
            of an expression that the error ended, such as a list comprehension, and gaps.
        held: the holders, largest first; an array counts for the first holder that has it.
        graph: the Chainer graph with repeated calls that holds half of the arrays' bytes or more;
            None without one.
        remedies: changes with which the allocation would fit, the smallest first. If there is such
            a graph, the ways to cut it, because a growing graph uses up any room.
    """

    asked_bytes: int | None
    vram_bytes: int
    free_bytes: int
    used_bytes: int
    held: tuple[Held, ...]
    remedies: tuple[Remedy, ...]
    past_bytes: int = 0
    graph: HeldGraph | None = None

    @property
    def other_bytes(self) -> int:
        """Return the bytes of arrays that no holder holds."""
        return max(0, self.used_bytes - sum(one.nbytes for one in self.held))

    def __str__(self) -> str:
        """Format the explanation as lines of text."""
        vram = format_bytes(self.vram_bytes)
        used = f"arrays use {format_bytes(self.used_bytes)}"
        if self.past_bytes and not self.used_bytes:
            used = f"arrays used up to {format_bytes(self.past_bytes)} until the error freed them"
        now = " now" if self.free_bytes >= (self.asked_bytes or math.inf) else ""
        lines = [f"{format_bytes(self.free_bytes)} of {vram} of VRAM are free{now}, and {used}"]
        if self.asked_bytes is not None:
            lines[0] = f"{format_bytes(self.asked_bytes)} were asked for; {lines[0]}"
        rows = [(format_bytes(one.nbytes), one.array_count, one.place) for one in self.held[:SHOWN]]
        for nbytes, place in (
            (
                sum(one.nbytes for one in self.held[SHOWN:]),
                f"in {len(self.held) - SHOWN} more places",
            ),
            (self.other_bytes, "elsewhere"),
            (self.past_bytes, PLACE_OF_PAST),
        ):
            if nbytes:
                rows.append((format_bytes(nbytes), 0, place))
        lines[0] += ":" if rows else ""
        lines += [
            f"  {size:>10}  {place}" + (f", {count} arrays" if count > 1 else "")
            for size, count, place in rows
        ]
        if self.graph is not None:
            size, count = format_bytes(self.graph.nbytes), self.graph.array_count
            lines.append(f"{size} in {count} arrays belong to {self.graph}")
            lines.append("Each further call adds to it. To cut it:")
        elif self.remedies:
            lines.append("Ways to make it fit:")
        lines += [f"  {one.line}\n      {one.why}" for one in self.remedies]
        return "\n".join(lines)


def explain(error: BaseException | None = None, by: Tracker | None = None) -> Explanation:
    """Explain why CuPy's memory ran out: which variables hold it, and which changes would fit.

    Searches the variables' containers and objects, as far as the garbage collector knows their
    references. Frees and changes nothing. Times are simulated for the GPU of the table that has
    this GPU's chip, and left out if there is none. The proposed changes rely on the host memory
    that is available now. Never run on a GPU yet.

    Args:
        error: the out-of-memory error, whose traceback has the variables. None means the error that
            is being handled, or the last one that an interactive session has shown; without any,
            the callers' variables are searched.
        by: a `umem.track` that watches the program: the holders are then the lines that allocated.

    Raises:
        TypeError: ``error`` is not an exception.
        DeviceError: a virtual GPU is current.
        DeviceNotFoundError: there is no CUDA device.
    """
    if error is not None and not isinstance(error, BaseException):
        raise TypeError(f"explain takes an error, or by=tracker; got {type(error).__name__}")
    device: Any = current_device()
    if device.backend != "cupy":
        raise DeviceError("explain needs CuPy, and a virtual GPU is current")
    if error is None:
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    refusal = _refusal(error)
    asked = None if refusal is None else _asked_bytes(refusal)
    free = min(device.free_bytes + device.pools.free_plain_bytes(), device.vram_bytes)
    frames = _frames(None if error is None else error.__traceback__)
    own, inside = _scopes(frames)
    held = _by_variable([*own, *inside]) if by is None else _by_line(by)
    used = max(device.pools.all_used_bytes(), sum(one.nbytes for one in held))
    past = max(0, getattr(refusal, "_total", 0) - used)  # CuPy's private; its message has it
    if not used:  # without arrays there are no gaps
        free = max(0, free - past)
    host = device.host_available_bytes()
    room = None if host is None else int(host * HOST_SHARE)
    graph = next((one for one in held_graphs(own) if 2 * one.nbytes >= used), None)
    remedies = [*_remedies(asked, used + past, free, device, room, _limit(refusal))]
    if graph is not None:
        remedies = [*_cuts(graph)]
    cap = min(asked or 0, free) // 2
    if cap >= MIB and _has_columns(frames):
        remedies.insert(0, _cap(cap))
    return Explanation(
        asked, device.vram_bytes, free, used, tuple(held), tuple(remedies), past, graph
    )


def _refusal(error: BaseException | None) -> BaseException | None:
    """Return the out-of-memory error that has sizes: the error itself, or its cause."""
    while error is not None and is_cupys_out_of_memory(error):
        if _asked_bytes(error) is not None:
            return error
        error = error.__cause__
    return None


def _asked_bytes(error: BaseException) -> int | None:
    """Return the bytes requested when umem's or CuPy's out-of-memory error was raised."""
    nbytes: int | None = getattr(error, "needed_bytes", getattr(error, "_size", None))
    return nbytes


def _limit(refusal: BaseException | None) -> str | None:
    """Return the line that lifts the limit that caused the error; None if no limit did."""
    cupys = "cupy.get_default_memory_pool().set_limit(size=0)"
    if isinstance(refusal, LimitError):
        other = "a higher limit= in umem.managed, hybrid, unmanaged or enable, or UMEM_LIMIT"
        return cupys if refusal.is_cupys_limit else other
    size, total, limit = (getattr(refusal, name, 0) for name in ("_size", "_total", "_limit"))
    return cupys if limit and size + total > limit else None


# -- who holds it ------------------------------------------------------------------------------


def _frames(traceback: TracebackType | None) -> list[FrameType]:
    """Return the frames of a traceback, or of the callers, the innermost first."""
    found: list[FrameType] = []
    while traceback is not None:
        found.append(traceback.tb_frame)
        traceback = traceback.tb_next
    frame = None if found else sys._getframe(2)  # CPython's; inspect would read the sources
    outer = found[0].f_back if found else frame
    found.reverse()
    while outer is not None:
        found.append(outer)
        outer = outer.f_back
    return found


def _by_variable(scopes: Iterable[Scope]) -> list[Held]:
    """Return the memory that the variables of scopes hold, each allocation once."""
    addresses: set[int] = set()
    seen: set[int] = set()
    held: list[Held] = []
    for variables, where in scopes:
        for name, value in variables.items():
            found = _memory_of(value, seen)
            sizes = [size for address, size in found if not _known(address, addresses)]
            if sizes:
                held.append(Held(sum(sizes), len(sizes), f"{name}, {where}"))
    return sorted(held, key=lambda one: -one.nbytes)


def _scopes(frames: list[FrameType]) -> tuple[list[Scope], list[Scope]]:
    """Return the program's scopes, frames before their modules, and the libraries' scopes.

    The arguments of a library's function belong to the program, which has other names for them.
    """
    own: list[Scope] = []
    inside: list[Scope] = []
    modules: dict[int, Scope] = {}
    for frame in frames:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package in ("cupy", "cupyx"):
            continue  # the arguments of CuPy's own functions are held by the caller, too
        file = PurePath(frame.f_code.co_filename).name
        if frame.f_locals is not frame.f_globals and frame.f_code.co_name != "<module>":
            into = inside if package in LIBRARIES else own
            into.append((_variables(frame), f"in {frame.f_code.co_name} of {file}"))
        if package not in LIBRARIES:
            modules[id(frame.f_globals)] = dict(frame.f_globals), f"of the module {file}"
    return [*own, *modules.values()], inside


def _variables(frame: FrameType) -> dict[str, Any]:
    """Return a function's variables.

    Up to Python 3.12, reading them leaves a copy on the frame, which would keep arrays alive that
    the function drops later. This empties the copy, unless the program has it from ``locals()``.
    """
    found = frame.f_locals
    variables = dict(found)
    if sys.version_info < (3, 13) and sys.getrefcount(found) <= 3:  # the frame's, ours, the call's
        found.clear()
    return variables


def _memory_of(value: Any, seen: set[int]) -> Iterator[tuple[int, int]]:
    """Yield address and bytes of the memory of CuPy's arrays in a value, the nearest first.

    A variable may hold any object, and accessing one may run its own code. The garbage collector
    knows the references of an object without running any.
    """
    queue = deque([value])
    while queue:
        one = queue.popleft()
        kind = type(one)
        if issubclass(kind, HOLD_NOTHING) or id(one) in seen:
            continue
        seen.add(id(one))
        if not hasattr(kind, "__cuda_array_interface__"):
            queue.extend(gc.get_referents(one))
            continue
        with suppress(Exception):  # an object that only looks like an array of CuPy
            memory = one.data.mem
            yield int(memory.ptr), int(memory.size)


def _known(address: int, seen: set[int]) -> bool:
    """Tell whether an address was seen, and remember it."""
    known = address in seen
    seen.add(address)
    return known


def _by_line(tracker: Tracker) -> list[Held]:
    """Return a tracker's live memory, by the line that allocated it."""
    return [
        Held(one.nbytes, one.count, str(one.stack[0]) if one.stack else one.label)
        for one in tracker.outstanding()
    ]


# -- what would fit ----------------------------------------------------------------------------


def _remedies(
    asked: int | None, used: int, free: int, device: Any, room: int | None, limit: str | None
) -> Iterator[Remedy]:
    """Yield the lines with which the allocation would fit, the smallest change first."""
    if asked is None:
        return
    in_pieces = asked <= free  # CuPy has given back free blocks before it raised
    over = asked if in_pieces else asked - free
    spec = spec_of_driver(device.name)
    if limit is not None:
        yield Remedy(limit, "A limit refused the request, even if VRAM is free.")
    elif room is None or over <= room:
        yield Remedy(
            'umem.enable("hybrid")',
            f"{'The free memory is in pieces, or was freed since the error. ' if in_pieces else ''}"
            "Call it before the first array. An array that does not fit stays on the host, and the "
            f"GPU reads it over the bus. This one: {format_bytes(asked)}{_seconds(asked, spec)}.",
        )
        if device.why_not("managed") is None:
            most = f"{format_bytes(used + asked)}{_seconds(used + asked, spec)}"
            yield Remedy(
                "umem.enable()",
                "Call it before the first array. Managed memory moves to the GPU when it is "
                "used: at "
                f"most {most}. umem.paging shows what moves, and umem.lookahead moves it early.",
            )
    else:
        yield Remedy(
            "a smaller array, or float32 for float64",
            f"{format_bytes(over)} exceed VRAM, and the host has {format_bytes(room)} for them.",
        )
    yield Remedy(
        "for block in umem.blocks(x):",
        f"Computes on a host array in blocks{_of_some(free // 8)}, copied before they are used: "
        f"{format_bytes(asked)}{_seconds(asked, spec)}.",
    )
    yield Remedy(
        "umem.on_out_of_memory(callback)",
        "The callback frees memory that the program can recompute, such as a cache.",
    )


_COLUMNS = tuple(f"chainer.functions.connection.{name}" for name in ("conv", "deconv"))
"""Beginnings of the modules of Chainer whose functions need columns where there is no cuDNN."""


def _cap(most: int) -> Remedy:
    """Name the largest cap of a power of two, in MiB, within most bytes."""
    size = f"{1 << ((most // MIB).bit_length() - 1)}MiB"
    return Remedy(
        f"umem run --workspace {size} SCRIPT",
        f'Or in code: with umem.chainer.workspace("{size}"). The columns of a convolution ran out '
        "of memory. With a cap they are computed in parts, and results round differently.",
    )


def _has_columns(frames: Iterable[FrameType]) -> bool:
    """Tell whether a convolution of Chainer ran out of memory, and not under a cap."""
    modules = [str(frame.f_globals.get("__name__")) for frame in frames]
    is_capped = any(name.startswith("umem.chainer.chunking") for name in modules)
    return not is_capped and any(name.startswith(_COLUMNS) for name in modules)


def _cuts(graph: HeldGraph) -> Iterator[Remedy]:
    """Yield the lines that free a graph that extends back through repeated calls."""
    for link in graph.stateful[:1]:
        yield Remedy(
            f"{link}.reset_state()",
            "Call it where a new sequence begins. It frees the graph of the last one.",
        )
    yield Remedy(
        f"{graph.names[0]}.unchain_backward()",
        "Call it after an update. Backward then stops there, and earlier arrays are freed. If you "
        f"need only the numbers later, keep {graph.names[0]}.array instead.",
    )
    yield Remedy(
        "with chainer.no_backprop_mode():",
        "Use it around calls without a backward, such as evaluation. They then build no graph.",
    )
    yield Remedy(
        'with umem.chainer.Recompute("card"):',
        "Use it only if one backward must go through all of these calls.",
    )


def _of_some(nbytes: int) -> str:
    """Format the size of blocks; empty below a MiB, where arrays must be freed first."""
    return f" of about {format_bytes(nbytes)}" if nbytes >= MIB else ""


def _seconds(nbytes: int, spec: GpuSpec | None) -> str:
    """Format how long it takes to read bytes over a GPU's link."""
    if spec is None or not spec.host_in_bandwidth:
        return ""
    return f", {1e3 * nbytes / spec.host_in_bandwidth:.3g} ms a pass (simulated)"
