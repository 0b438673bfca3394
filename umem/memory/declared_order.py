"""Prefetch by a declared order: the program tells which arrays each part of a loop uses."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import numpy as np

from umem.devices import Device, Span, current_device
from umem.errors import HintError, LookaheadWarning
from umem.memory.hints import arrays_in
from umem.memory.pager import Pager, is_on, room
from umem.planner.prefetch import NOTHING, MovePlan, Order, Step, footprint, plan_moves
from umem.trace.recording import root_of
from umem.units import BLOCK_BYTES, format_bytes

__all__ = ["Lookahead", "lookahead"]

Chunk = TypeVar("Chunk")


class Lookahead(Generic[Chunk]):
    """Moves managed arrays before a loop uses them; see `lookahead`.

    Attributes:
        round_count: number of finished rounds of the loop.
        followed_count: number of rounds that had the same order as the round before.
        off: why prefetch has stopped for good; None while it runs.
    """

    def __init__(self, chunks: Iterable[Chunk] = (), depth: int = 2) -> None:
        self._chunks, self._depth = list(chunks), depth
        self._device: Device = current_device()
        self._pager = Pager(self._device)
        self._round: list[tuple[Span, ...]] = []
        self._known: tuple[tuple[Span, ...], ...] = ()
        self._roots: dict[Span, weakref.ref[Any]] = {}
        self._places: tuple[Span, ...] = ()
        self._moves: MovePlan = NOTHING
        self._capacity: int | None = None
        self._follows = False
        self.round_count = self.followed_count = 0
        self.off: str | None = None
        if self._chunks:
            self._learn([self._places_of(chunk) for chunk in self._chunks])

    @property
    def fetched_bytes(self) -> int:
        """Return the bytes prefetched to the GPU so far."""
        return self._pager.fetched_bytes

    @property
    def sent_bytes(self) -> int:
        """Return the bytes prefetched to the host so far."""
        return self._pager.sent_bytes

    def __str__(self) -> str:
        """Format the counts as a line."""
        simulated = " (simulated)" if self._device.simulated else ""
        return (
            f"{self.followed_count} of {self.round_count} rounds in a known order; "
            f"{format_bytes(self.fetched_bytes)} to the GPU and {format_bytes(self.sent_bytes)} to "
            f"the host{simulated}" + ("" if self.off is None else f"; off: {self.off}")
        )

    def __iter__(self) -> Iterator[Chunk]:
        """Yield the chunks, each as a use of its arrays; the end of the loop ends the round.

        If you leave the loop early, the round does not count, and the next loop starts a new one.
        """
        self._begin()
        for chunk in self._chunks:
            self.uses(chunk)
            yield chunk
        self.step()

    def uses(self, *arrays: Any) -> None:
        """Declare the arrays that operations use up to the next `uses` or `step`.

        Args:
            arrays: contiguous CuPy arrays or contiguous parts of them, in anything that
                `umem.prefetch` takes.

        Raises:
            HintError: an array is not on the current GPU, or has gaps. Nothing has changed.
        """
        places = self._places_of(arrays)
        number = len(self._round)
        if number:
            self._move(number - 1)
        known = self._known
        self._follows = self._follows and number < len(known) and known[number] == places
        self._round.append(places)

    def step(self) -> None:
        """End a round: the next `uses` is the first of the order again."""
        done = self._round
        if not done:
            return
        self.round_count += 1
        if self._follows and len(done) == len(self._known):
            self.followed_count += 1
            self._move(len(done) - 1)
        if tuple(done) != self._known or self._room() != self._capacity:
            self._learn(done)
        self._begin()

    def _begin(self) -> None:
        self._round, self._follows = [], bool(self._known)

    # -- the order -------------------------------------------------------------------------

    def _places_of(self, arrays: Any) -> tuple[Span, ...]:
        """Return the places of the arrays in ``arrays``, and hold their memory weakly."""
        found: list[Span] = []
        for array in arrays_in(arrays):
            place = self._place(array) if array.nbytes else None
            if place is not None:
                self._roots[place] = weakref.ref(root_of(array))
                found.append(place)
        return tuple(found)

    def _place(self, array: Any) -> Span | None:
        """Return the place of an array; None for unmanaged memory, which does not move.

        Raises:
            HintError: the array is not on the current device, or has gaps.
        """
        if not is_on(self._device, array):
            raise HintError(
                f"lookahead: an array of shape {array.shape} is not on the current device"
            )
        if not _is_whole(array):
            raise HintError(
                f"lookahead: an array of shape {array.shape} and strides {array.strides} has gaps; "
                "pass contiguous chunks, such as x[a:b] of an array in C order"
            )
        address = self._device.address(array)
        return None if address is None else Span(address, int(array.nbytes))

    def _learn(self, rounds: Iterable[tuple[Span, ...]]) -> None:
        """Expect this order in the next round, and plan the moves of its blocks.

        The first time, free blocks are given back, because blocks left over from creating the data
        would count as reserved. The next round reserves blocks for temporary arrays again, and the
        plan made after that round leaves room for them.
        """
        if not self._known:
            self._device.give_back()
        self._known = tuple(rounds)
        slots: dict[Span, int] = {}
        for place in (place for places in self._known for place in places):
            slots.setdefault(place, len(slots))
        self._places = tuple(slots)
        self._roots = {place: self._roots[place] for place in slots}
        self._capacity = self._room()
        self._moves = NOTHING
        if self._capacity is None or self.off is not None:
            return
        steps = [
            Step("uses", "array", tuple(slots[place] for place in places), (), ())
            for places in self._known
        ]
        sizes = tuple(place.nbytes for place in slots)
        order = Order(tuple(steps), sizes, {}, {slot: slot for slot in range(len(slots))})
        used = footprint(order, [place.address for place in slots], forgets=False)
        self._moves = plan_moves(used, self._depth, self._capacity)

    def _room(self) -> int | None:
        """Return the blocks of VRAM for the loop's arrays; None while all memory fits."""
        own_bytes = end = count = block = 0
        for address, nbytes in sorted(self._places):  # parts of an array may overlap
            own_bytes += max(0, address + nbytes - max(address, end))
            end = max(end, address + nbytes)
            behind = -(-end // BLOCK_BYTES)
            count += max(0, behind - max(address // BLOCK_BYTES, block))
            block = behind
        return room(self._device, own_bytes, count * BLOCK_BYTES)

    # -- moving ----------------------------------------------------------------------------

    def _move(self, number: int) -> None:
        """Carry out the moves planned for a use; a driver error turns prefetch off."""
        if not self._follows or not self._moves:
            return
        addresses = [place.address for place in self._places]
        try:
            if self._pager.advance():
                self._pager.move(self._moves[number], addresses, self._array)
        except Exception as error:  # whatever the driver reports, the program must continue
            self.off, self._moves = str(error), NOTHING
            warnings.warn(f"lookahead has stopped: {error}", LookaheadWarning, stacklevel=4)

    def _array(self, slot: int) -> Any:
        """Return the bytes of a slot as an array; None if its memory was freed.

        None, too, if the array that owns the memory has gaps: the driver then moves it by faults.
        """
        place = self._places[slot]
        root = self._roots[place]()
        begin = None if root is None or not _is_whole(root) else self._device.address(root)
        if root is None or begin is None:
            return None
        flat = root if root.flags.c_contiguous else root.T
        start = place.address - begin
        return flat.reshape(-1).view(np.uint8)[start : start + place.nbytes]


def _is_whole(array: Any) -> bool:
    """Tell whether an array is one piece of memory in C or Fortran order."""
    return bool(array.flags.c_contiguous or array.flags.f_contiguous)


def lookahead(chunks: Iterable[Chunk] = (), *, depth: int = 2) -> Lookahead[Chunk]:
    """Prefetch managed memory in the order in which a loop uses it.

    ``for chunk in umem.lookahead(chunks)`` yields the chunks, and moves the next ones to the GPU
    while the program works on one. To repeat the loop, iterate over the same object, which knows
    the data in VRAM. In any other loop, call ``look.uses(x, y)`` before the operations that use x
    and y, and ``look.step()`` at the end of a round.

    From the second round in the same order on, umem moves blocks of 2 MiB on a stream of its own:
    blocks whose next use is farthest to the host, blocks that are used next to the GPU. The driver
    then never has to evict. While all reserved memory fits in VRAM, nothing moves. Contents never
    change. A round in another order is not prefetched; umem learns its order. Arrays are held
    weakly, chunks are not. Do not declare arrays that are freed within a round: they count as
    memory that stays in VRAM.

    Args:
        chunks: arrays in managed memory, or tuples of them, in the order of their use.
        depth: how many uses ahead an array may be prefetched if VRAM has room; 1 or more.

    Raises:
        ValueError: the depth is not an int of 1 or more.
        HintError: ``chunks`` is a single array; or a chunk has an array that is not on the current
            GPU, or has gaps.
        DeviceNotFoundError: there is no CUDA device and no virtual GPU.

    Cost: some microseconds per use and array; a plan takes milliseconds. Thread-safety: use it from
    one thread. Gain: bench/lookahead.py, simulated; never run on a GPU yet.

    >>> import umem
    >>> with umem.virtual_gpu("v100-16gb", "8MiB"), umem.managed() as memory:
    ...     look = umem.lookahead([memory.xp.ones(1 << 20, "float32") for _ in range(4)])
    ...     for _ in range(3):
    ...         total = sum(chunk.sum() for chunk in look)
    >>> look.round_count
    3
    """
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise ValueError(f"lookahead: depth must be an int from 1 up; got {depth!r}")
    if hasattr(chunks, "shape"):
        raise HintError(
            "lookahead takes the chunks of a loop, such as a list of arrays; got one array: "
            "pass [x] to use the array as one chunk, or list(x) to use its rows"
        )
    return Lookahead(chunks, depth)
