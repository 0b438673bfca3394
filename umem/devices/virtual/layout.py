"""Layout of a trace's tensors in memory that is never full, and replays on it.

Managed memory is never full; plain memory is not while VRAM has room for all that its pool
reserves. Where the pool puts a tensor then depends on neither the GPU nor the mode, so that a
trace is laid out once, and replayed without a pool as often as there are GPUs.

Models: what `umem.devices.virtual.model` does with such memory, to the bit
(tests/devices/virtual/test_layout.py). Does not model: advice, discarding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from umem.devices.base import Policy, Span
from umem.devices.virtual.clock import BlockMoves, Clock, Prefetches
from umem.devices.virtual.clocks import Clocks
from umem.devices.virtual.copies import Copies
from umem.devices.virtual.driver import DriverModel, Placed, covered
from umem.devices.virtual.residency import Residency
from umem.errors import OutOfMemoryError
from umem.trace.events import COPIES, GET, ONE_KERNEL, Access, Alloc, Event, Free, Hint, Mark, Op
from umem.units import BLOCK_BYTES

Blocks = tuple[int, int]
"""A range of blocks: the first, and the one after the last."""
AMPLE_BYTES = 1 << 62
_MANAGED = Policy("managed")
_STILL = BlockMoves()


class Laid(NamedTuple):
    """An event with the blocks that it touches, in order.

    ``own`` is where the tensor that it allocates lies, or the arrays of its workspace.
    """

    event: Event
    touched: Sequence[Blocks] = ()
    own: Sequence[Span] = ()


@dataclass(frozen=True)
class Layout:
    """A trace with the blocks that each event touches.

    ``peak_bytes`` is the most that tensors and workspace hold at once, ``reserved_bytes`` what
    the pool takes for that, in ``block_count`` blocks.
    """

    laid: list[Laid]
    peak_bytes: int
    reserved_bytes: int
    block_count: int

    def with_laid(self, laid: list[Laid]) -> Layout:
        """Return the same with these events, of which none allocates more."""
        return replace(self, laid=laid)


def lay_out(events: Iterable[Event], *, repeats: bool = False) -> Layout | None:
    """Place a trace's tensors in memory that is never full; None if it discards or advises, or is
    too large.

    ``repeats``: each step gets the places of the one before, as `RepeatingPool` does.
    """
    layer = _Layer()
    layer.driver.repeating.repeats = repeats
    try:
        laid = list(map(layer.lay, events))
        reserved, count = layer.driver.managed_bytes, len(layer.driver.residency.resident) - 1
    except (OutOfMemoryError, _NoPrefetchError):
        return None
    finally:
        layer.driver.residency.forget()
    return None if layer.gave_back else Layout(laid, layer.peak, reserved, count)


class _NoPrefetchError(Exception):
    """A hint does more than move blocks."""


class _Layer:
    """Hands out memory as the pools do, without end."""

    def __init__(self) -> None:
        self.driver = DriverModel(AMPLE_BYTES, "caching", lambda _: None, self._on_free)
        self.gave_back = False
        self.peak = self._live = 0
        self._places: dict[int, Placed] = {}
        self._spans: dict[int, Span] = {}

    def lay(self, event: Event) -> Laid:
        """Place the tensors of the next event."""
        if isinstance(event, Op):
            return self._lay_op(event)
        if isinstance(event, Alloc):
            return self._lay_alloc(event)
        if isinstance(event, Hint):
            if event.action not in ("prefetch", *COPIES):
                raise _NoPrefetchError
            return Laid(event, _touched(event.accesses, self._spans))
        if isinstance(event, Free) and event.tensor in self._places:
            place = self._places.pop(event.tensor)
            del self._spans[event.tensor]
            self._live -= place.nbytes
            place.free()
        elif isinstance(event, Mark) and event.label == "step":
            self.driver.repeating.restart()
        return Laid(event)

    def _lay_op(self, op: Op) -> Laid:
        """Place the arrays of an operation's workspace, and free them."""
        own: list[Span] = []
        if op.workspace_bytes:
            sizes = (op.kernels or ONE_KERNEL).pieces(op.workspace_bytes)
            places = [self.driver.malloc(nbytes, _MANAGED) for nbytes in sizes]
            own = [place.part(0, place.nbytes) for place in places]
            for place in places:
                place.free()
            self.peak = max(self.peak, self._live + op.workspace_bytes)
        reads = [access for access in op.reads if access not in op.writes]
        return Laid(op, _touched((*reads, *op.writes), self._spans), own)

    def _lay_alloc(self, alloc: Alloc) -> Laid:
        if not alloc.nbytes:
            return Laid(alloc)
        self._places[alloc.tensor] = place = self.driver.malloc(alloc.nbytes, _MANAGED)
        self._spans[alloc.tensor] = own = place.part(0, alloc.nbytes)
        self._live += alloc.nbytes
        self.peak = max(self.peak, self._live)
        return Laid(alloc, (), (own,))

    def _on_free(self, count: int) -> None:
        self.gave_back = self.gave_back or count > 0


def _touched(accesses: Iterable[Access], spans: dict[int, Span]) -> list[Blocks]:
    found = []
    for tensor, low, high in accesses:
        if high > low and tensor in spans:
            address = spans[tensor].address
            found.append(((address + low) // BLOCK_BYTES, -(-(address + high) // BLOCK_BYTES)))
    return found


class Replayer:
    """Replays a layout with pages and time of GPUs with equal VRAM.

    Args:
        vram_bytes: usable VRAM.
        clocks: the clocks.
        uses_host_times: see `Model`.
        managed: whether memory is managed, and blocks come in as they are touched; plain memory
            must have room for the whole layout.
        prefetch: make memory resident as it is handed out.
    """

    def __init__(
        self,
        vram_bytes: int,
        clocks: Sequence[Clock],
        *,
        uses_host_times: bool,
        managed: bool,
        prefetch: bool = False,
    ) -> None:
        self.clocks = Clocks(clocks)
        self.copies = Copies(self.clocks)
        self.moves = BlockMoves()
        self.resident_peak_count = 0
        self._residency = Residency(vram_bytes // BLOCK_BYTES)
        self._uses_host_times = uses_host_times
        self._managed, self._prefetch = managed, prefetch
        self._has_run = False
        self._prefetches = Prefetches(self.clocks)

    def follow(self, laid: Iterable[Laid], block_count: int) -> None:
        """Replay some of a layout's events; ``block_count`` is the layout's."""
        self._residency.grow(block_count + 1)
        if not self._managed:
            self.resident_peak_count = block_count
        for event, touched, own in laid:
            if isinstance(event, Op):
                self._on_op(event, touched, own)
            elif isinstance(event, Alloc):
                for span in own:
                    self._on_alloc(event, span)
            elif isinstance(event, Hint):
                self._on_hint(event, touched)
            elif isinstance(event, Free):
                if self.copies.are_running:
                    self.copies.wait_for(event.tensor)
            elif event.label == "start" and not self._has_run:
                self.moves = BlockMoves()
                self.copies.restart()
                self.clocks.restart()

    def synchronize(self) -> None:
        """Make the host wait for the GPU."""
        self.clocks.synchronize()

    def _on_op(self, op: Op, touched: Sequence[Blocks], own: Sequence[Span]) -> None:
        """Replay an operation, for which the host waits if it copies to the host."""
        self._run(op, touched, own)
        if op.name == GET:
            self.clocks.synchronize()

    def _run(self, op: Op, touched: Sequence[Blocks], own: Sequence[Span]) -> None:
        """Replay an operation: launch, waits, page moves, computation."""
        self._has_run = True
        if self._prefetch and self._managed:
            for span in own:
                self._make_resident(span)
        host_seconds = op.host_seconds if self._uses_host_times else None
        if not self._managed and not self.copies.are_running:
            self.clocks.launch_and_compute(host_seconds, op)
            return
        launch_count, copied_bytes, *_ = op.kernels or ONE_KERNEL
        self.clocks.launch(host_seconds, op.phase, launch_count)
        if self.copies.are_running:
            self.copies.wait_before(op)
        if not self._managed:
            self.clocks.compute(op.flops, op.traffic_bytes, copied_bytes, op.arithmetic)
            return
        waits: list[tuple[float, ...]] = []
        for blocks in touched if self._prefetches else ():
            waits += self._prefetches.of(*blocks)
        moves = self._touch(touched, own)
        for index, clock in enumerate(self.clocks):
            if moves is _STILL and not waits:
                clock.compute(op.flops, op.traffic_bytes, copied_bytes, op.arithmetic)
            else:
                ready = max(wait[index] for wait in waits) if waits else 0.0
                clock.run(
                    op.flops, op.traffic_bytes, 0.0, moves, op.pattern, ready, copied_bytes,
                    op.arithmetic,
                )  # fmt: skip

    def _touch(self, touched: Sequence[Blocks], own: Sequence[Span] = ()) -> BlockMoves:
        """Make blocks and those of a workspace resident; returns the moves."""
        residency = self._residency
        is_missing, moves = residency.resident.find, _STILL
        for start, stop in (*touched, *map(covered, own)) if own else touched:
            if is_missing(0, start, stop) >= 0:
                moves = BlockMoves() if moves is _STILL else moves
                residency.touch(start, stop, write=True, moves=moves)
        if moves is not _STILL:
            self._count(moves)
        return moves

    def _count(self, moves: BlockMoves) -> None:
        self.moves.add(moves)
        self.resident_peak_count = max(self.resident_peak_count, self._residency.count)

    def _on_alloc(self, alloc: Alloc, own: Span) -> None:
        if self._prefetch:
            self._make_resident(own)
        if alloc.uploaded:
            moves = self._touch((covered(own),)) if self._managed else _STILL
            self.clocks.launch(None)
            self.clocks.move(moves, alloc.nbytes)

    def _make_resident(self, span: Span) -> None:
        moves = self._residency.prefetch(*covered(span))
        self._count(moves)
        self.clocks.move(moves)

    def _on_hint(self, hint: Hint, touched: Sequence[Blocks]) -> None:
        """Replay a hint or a copy."""
        self.clocks.launch(None)
        if hint.action in COPIES:
            self._copy(hint, touched)
            return
        to_host = hint.place == "cpu"
        move = self._residency.prefetch_out if to_host else self._residency.prefetch
        move = self._residency.discard if hint.action == "discard" else move
        for start, stop in touched if self._managed else ():
            moves = move(start, stop)
            self._count(moves)
            done = self.clocks.move(moves, overlap=hint.overlap)
            if hint.overlap and not to_host:
                self._prefetches.add(start, stop, done)

    def _copy(self, hint: Hint, touched: Sequence[Blocks]) -> None:
        some = [access for access in hint.accesses if access.stop > access.start]
        for access, blocks in zip(some, touched, strict=True):
            if self._managed:
                self.clocks.move(self._touch((blocks,)), overlap=True)
            self.copies.begin(hint.action, access)
