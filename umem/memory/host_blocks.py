"""Blocks of a host array on the GPU, copied ahead of their use and written back behind it.

Two buffers an array: while the loop's body works on one block, the next one is copied in and the
one before is copied out, each on a stream of its own. Events order these with the stream that is
current in the loop's body. Host arrays are not pinned, so that a block goes through a pinned piece
of memory: the host copies into it while the copy before is on its way.
"""

from __future__ import annotations

import mmap
import operator
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

from umem.devices import CONTEXT_FAULTS, current_device, pinned_room
from umem.errors import DeviceError, OutOfMemoryError, SizeError, StateError
from umem.memory.limits import Size
from umem.memory.mode_blocks import unmanaged
from umem.units import MIB, RelativeSize, format_bytes, parse_size

LEAST_COUNT = 24
"""Blocks that an array is cut into at least, if they are not smaller than `SMALLEST_BYTES` then:
the first copy in and the last one out run beside nothing, which is a 24th of the copies each way. A
choice: no bench compares counts."""
SMALLEST_BYTES = 2 * MIB
"""Bytes of a block below which it is not cut for the sake of `LEAST_COUNT`: over a link of 12 GB/s
a copy of so much takes 175 us, a launch some 10 (docs/reference/virtual-gpu.md)."""
BUFFERS = 2
"""Buffers each way: one is worked on while the other is copied."""


class Piece(NamedTuple):
    """A block along the axis: where it begins and ends, with its halo from ``low`` to ``high``."""

    start: int
    stop: int
    low: int
    high: int


class HostBlocks:
    """The blocks of a host array; see `blocks`.

    Attributes:
        axis, halo: as given; the axis from the front, the halo at most as long as that.
        length: along the axis, of a block without its halo; the last one may be shorter.
        piece: the block that the loop is at; None outside of the loop.
        done_count: blocks with which the last loop has finished.
        read_bytes, written_bytes: copied to the GPU and back so far.
    """

    def __init__(
        self, x: Any, out: Any, axis: int, room: int | float, halo: int, write: bool
    ) -> None:
        self._source, self._target, self._room, self._write = x, out, room, write
        self._item = np.dtype(x.dtype).itemsize
        self.axis, self.halo = axis, min(halo, x.shape[axis])
        self._device: Any = current_device()
        if self._device.backend != "cupy":
            raise DeviceError(
                "umem.blocks copies to a GPU of CuPy, and a virtual GPU is current: on a machine "
                'without one run the program on a software GPU, umem.software_gpu("t4")'
            )
        self.length = self._length()
        self.piece: Piece | None = None
        self._is_running = False
        self.done_count = self.read_bytes = self.written_bytes = 0

    def __len__(self) -> int:
        """Return the number of blocks."""
        size = self._source.shape[self.axis]
        return -(-size // self.length) if self._row else 0

    def __str__(self) -> str:
        """Format how far the loop is, and the bytes so far."""
        block, read = format_bytes(self._row * self.length), format_bytes(self.read_bytes)
        written = format_bytes(self.written_bytes)
        done = f"{self.done_count} of {len(self)} blocks of {block}"
        return f"{done}; {read} to the GPU and {written} back"

    @property
    def inner(self) -> tuple[slice, ...]:
        """Return the index that takes the halo off the block that the loop is at.

        Raises:
            StateError: outside of the loop.
        """
        if self.piece is None:
            raise StateError("inner is of the block that a loop is at, and no loop is going on")
        return self._inside(self.piece)

    def _inside(self, piece: Piece) -> tuple[slice, ...]:
        start, stop, low, _ = piece
        return self._index(start - low, stop - low)

    def __iter__(self) -> Iterator[Any]:
        """Yield each block as an array of CuPy, with ``out`` a pair of arrays.

        Raises:
            StateError: another loop over these blocks is going on.
        """
        if self._is_running:
            raise StateError("a loop over these blocks is going on: call umem.blocks for another")
        self.done_count = 0
        if not len(self):
            return
        self._is_running = True
        copier = None
        pieces = [self._piece(number) for number in range(len(self))]
        try:
            copier = _Copier(self)
            copier.read(0, pieces[0])
            for number, piece in enumerate(pieces):
                if number + 1 < len(pieces):
                    copier.read(number + 1, pieces[number + 1])
                self.piece = piece
                given = copier.given(number, piece)
                stream = self.xp.cuda.get_current_stream()
                try:
                    yield given
                except GeneratorExit:  # break, return, or an error in the body: all look alike
                    if self._write:
                        with stream:  # the body's, which may be current no more
                            copier.used(number, piece)
                    raise
                copier.used(number, piece)
                self.done_count += 1
        finally:
            self.piece = None
            self._is_running = False
            if copier is not None:
                copier.close()

    def _piece(self, number: int) -> Piece:
        size = self._source.shape[self.axis]
        start = number * self.length
        stop = min(start + self.length, size)
        return Piece(start, stop, max(0, start - self.halo), min(size, stop + self.halo))

    def _index(self, low: int, high: int) -> tuple[slice, ...]:
        return (*[slice(None)] * self.axis, slice(low, high))

    # -- sizes -----------------------------------------------------------------------------

    @property
    def _row(self) -> int:
        """Return the bytes of one index along the axis."""
        size = self._source.shape[self.axis]
        return int(self._item * (prod(self._source.shape) // size)) if size else 0

    @property
    def _back_row(self) -> int:
        """Return the bytes of one index along the axis that are written back."""
        if self._target is not None:
            return int(self._row // self._item * np.dtype(self._target.dtype).itemsize)
        return self._row if self._write else 0

    def _length(self) -> int:
        """Return how long a block is along the axis.

        Half of the room is for blocks, the rest for what the loop's body allocates. Pinned memory
        bounds it too.

        Raises:
            SizeError: a block of length 1 does not fit.
        """
        size, row = self._source.shape[self.axis], self._row
        if not row:
            return 1
        out_row = 0 if self._target is None else self._back_row
        whole, host = self._room_bytes(), pinned_room()
        most = self._fits(whole // 2, row + out_row)
        if most < 1:
            need = 2 * BUFFERS * (row + out_row + 2 * self.halo * row)
            raise SizeError(
                f"blocks: a block of length 1 along axis {self.axis} needs {format_bytes(need)}, "
                f"and {format_bytes(whole)} is the room: cut along another axis, or give more room"
            )
        if host is not None:
            most = min(most, self._fits(host, row + self._back_row))
        if most < 1:
            raise SizeError(
                f"blocks: a block of length 1 along axis {self.axis} needs "
                f"{format_bytes(self.pinned_bytes(1))} of pinned memory, and the host has "
                f"{format_bytes(host or 0)} for it: cut along another axis, or free host memory"
            )
        if self._write and most < min(self.halo, size):
            raise SizeError(
                f"blocks: {most} along axis {self.axis} have room in {format_bytes(whole)}, and a "
                f"halo of {self.halo} would reach into blocks that are written already: give out="
            )
        wanted = max(-(-size // LEAST_COUNT), -(-SMALLEST_BYTES // row), self.halo)
        return int(max(1, min(most, wanted, size)))

    def _fits(self, room: int, row: int) -> int:
        """Return how long blocks can be of which an index takes ``row`` bytes, beside halos."""
        return int((room - BUFFERS * 2 * self.halo * self._row) // (BUFFERS * row))

    def pinned_bytes(self, length: int) -> int:
        """Return the bytes of pinned memory that a loop with blocks of some length takes."""
        longest = min(length + 2 * self.halo, self._source.shape[self.axis])
        return int(BUFFERS * (longest * self._row + length * self._back_row))

    def _room_bytes(self) -> int:
        """Return the bytes of VRAM that the loop may take.

        A share is of what is free now, for which umem's pools give their free blocks back, and of
        what a limit of CuPy's pool leaves.
        """
        if isinstance(self._room, int):
            return self._room
        self._device.pools.give_back_all()
        free = self._device.free_bytes + self._device.pools.free_plain_bytes()
        own = self._device.driver.default_pool
        if own.get_limit():
            free = min(free, int(own.get_limit()) - int(own.used_bytes()))
        return int(self._room * free)

    # -- host ------------------------------------------------------------------------------

    def fetch(self, piece: Piece) -> Any:
        """Return the part of the host's array that a block has, with its halo.

        Raises:
            StateError: the file of a memory map is shorter than the array, where reading it would
                end the process.
        """
        _check_file(self._source)
        values = self._source[self._index(piece.low, piece.high)]
        if np.shape(values) != self.shape(piece.high - piece.low):
            raise ValueError(f"blocks: a slice of x has the shape {np.shape(values)}")
        return values

    def store(self, piece: Piece, values: Any) -> None:
        """Write a block to the host's array; raises as `fetch` does."""
        target = self._source if self._target is None else self._target
        _check_file(target)
        target[self._index(piece.start, piece.stop)] = values

    @property
    def writes(self) -> bool:
        """Tell whether blocks are written back."""
        return self._write or self._target is not None

    @property
    def read_dtype(self) -> Any:
        """Return the type of a block, in this machine's order of bytes."""
        return np.dtype(self._source.dtype).newbyteorder("=")

    @property
    def out_dtype(self) -> Any:
        """Return the type of what is written to ``out``; None without it."""
        return None if self._target is None else np.dtype(self._target.dtype).newbyteorder("=")

    def shape(self, length: int) -> tuple[int, ...]:
        """Return the shape of a block of a length."""
        shape = self._source.shape
        return (*shape[: self.axis], length, *shape[self.axis + 1 :])

    @property
    def xp(self) -> Any:
        return self._device.xp


class _Copier:
    """The buffers and the streams of a loop over blocks.

    A buffer is used by every second block: event ``filled`` is after its copy to the GPU, ``used``
    after the loop's body, ``written`` after its copy to the host.
    """

    def __init__(self, of: HostBlocks) -> None:
        self._of, xp = of, of.xp
        self._up, self._down = (xp.cuda.Stream(non_blocking=True) for _ in range(2))
        longest = min(of.length + 2 * of.halo, of._source.shape[of.axis])
        need, room = of.pinned_bytes(of.length), pinned_room()
        if room is not None and need > room:
            raise _no_pinned_memory(need, room)
        self._in = [_Buffer(xp, of.shape(longest), of.read_dtype) for _ in range(BUFFERS)]
        self._out = self._in
        if of.out_dtype is not None:
            shape = of.shape(of.length)
            self._out = [_Buffer(xp, shape, of.out_dtype) for _ in range(BUFFERS)]
        for buffer in self._in:
            buffer.host_in = pinned(xp, buffer.nbytes)
        for buffer in self._out if of.writes else ():
            buffer.host_out = pinned(xp, prod(of.shape(of.length)) * buffer.dtype.itemsize)
        self._pending: list[tuple[int, Piece]] = []
        # What allocated the buffers may still be at work on the current stream.
        begun = xp.cuda.get_current_stream().record()
        self._up.wait_event(begun)
        self._down.wait_event(begun)

    def read(self, number: int, piece: Piece) -> None:
        """Begin to copy a block to the GPU."""
        buffer = self._in[number % BUFFERS]
        buffer.filled.synchronize()  # its pinned memory is free
        self._up.wait_event(buffer.used)
        if self._out is self._in:
            self._up.wait_event(buffer.written)
        values = self._of.fetch(piece)
        array = buffer.array(self._of.shape(piece.high - piece.low))
        buffer.pinned(array.shape)[...] = values
        buffer.send(array, self._up)
        self._of.read_bytes += array.nbytes

    def given(self, number: int, piece: Piece) -> Any:
        """Return what the loop's body gets, once the current stream waits for it."""
        buffer, stream = self._in[number % BUFFERS], self._of.xp.cuda.get_current_stream()
        stream.wait_event(buffer.filled)
        array = buffer.array(self._of.shape(piece.high - piece.low))
        if self._out is self._in:
            return array
        target = self._out[number % BUFFERS]
        stream.wait_event(target.written)
        return array, target.array(self._of.shape(piece.stop - piece.start))

    def used(self, number: int, piece: Piece) -> None:
        """End the loop's body for a block, and begin to copy it back."""
        stream = self._of.xp.cuda.get_current_stream()
        self._in[number % BUFFERS].used.record(stream)
        if not self._of.writes:
            return
        self._store(number - BUFFERS)  # frees the pinned memory that this one is copied to
        target = self._out[number % BUFFERS]
        target.used.record(stream)
        self._down.wait_event(target.used)
        if self._out is self._in:
            whole = target.array(self._of.shape(piece.high - piece.low))
            array = whole[self._of._inside(piece)]
        else:
            array = target.array(self._of.shape(piece.stop - piece.start))
        target.fetch(array, self._down)
        self._of.written_bytes += array.nbytes
        self._pending.append((number, piece))

    def _store(self, upto: int) -> None:
        """Write blocks to the host's array whose copies have come, up to a number."""
        while self._pending and self._pending[0][0] <= upto:
            number, piece = self._pending.pop(0)
            target = self._out[number % BUFFERS]
            target.written.synchronize()
            self._of.store(piece, target.back(self._of.shape(piece.stop - piece.start)))

    def close(self) -> None:
        """Write what is left, wait for all copies, and free the pinned memory."""
        try:
            self._store(len(self._of))
        finally:
            self._up.synchronize()
            self._down.synchronize()
            for buffer in (*self._in, *self._out):
                buffer.host_in = buffer.host_out = None


class _Buffer:
    """Device memory of one block at a time, with pinned memory for the ways that it is copied."""

    def __init__(self, xp: Any, shape: tuple[int, ...], dtype: Any) -> None:
        self._xp, self.dtype = xp, np.dtype(dtype)
        self.nbytes = prod(shape) * self.dtype.itemsize
        with unmanaged():
            self._memory = xp.empty(self.nbytes, np.uint8)
        self.host_in: Any = None
        self.host_out: Any = None
        self.filled, self.used, self.written = (xp.cuda.Event() for _ in range(3))

    def array(self, shape: tuple[int, ...]) -> Any:
        """Return the block's memory as an array."""
        nbytes = prod(shape) * self.dtype.itemsize
        return self._memory[:nbytes].view(self.dtype).reshape(shape)

    def pinned(self, shape: tuple[int, ...]) -> Any:
        """Return the pinned memory for a copy to the GPU as an array."""
        return np.frombuffer(self.host_in, self.dtype, prod(shape)).reshape(shape)

    def back(self, shape: tuple[int, ...]) -> Any:
        """Return the pinned memory of a copy to the host as an array."""
        return np.frombuffer(self.host_out, self.dtype, prod(shape)).reshape(shape)

    def send(self, array: Any, stream: Any) -> None:
        """Copy the pinned memory to an array on a stream."""
        array.set(self.pinned(array.shape), stream)
        self.filled.record(stream)

    def fetch(self, array: Any, stream: Any) -> None:
        """Copy an array to pinned memory on a stream."""
        with stream:
            array = self._xp.ascontiguousarray(array)
            array.get(stream, out=self.back(array.shape), blocking=False)
        self.written.record(stream)


def pinned(xp: Any, nbytes: int) -> Any:
    """Pin so many bytes, without CuPy's pool, which rounds up to a power of two and keeps them.

    Raises:
        OutOfMemoryError: the host refuses.
        CUDARuntimeError: a kernel has ended the GPU's context.
    """
    try:
        return xp.cuda.PinnedMemoryPointer(xp.cuda.PinnedMemory(nbytes), 0)
    except xp.cuda.runtime.CUDARuntimeError as error:
        if error.status in CONTEXT_FAULTS:
            raise
        raise _no_pinned_memory(nbytes, None) from error


def _no_pinned_memory(nbytes: int, room: int | None) -> OutOfMemoryError:
    has = "refuses them" if room is None else f"has {format_bytes(room)} for them"
    return OutOfMemoryError(
        f"blocks: needs {format_bytes(nbytes)} of pinned memory, and the host {has}: call "
        "umem.blocks anew for smaller blocks, cut along another axis, or free host memory",
        needed_bytes=nbytes,
    )


def _check_file(x: Any) -> None:
    """Raise StateError if the file of a memory map ends before the array does."""
    # NumPy's private, also of views: the file's name may be another's by now, or gone.
    mapped = getattr(x, "_mmap", None)
    if not isinstance(x, np.memmap) or not isinstance(mapped, mmap.mmap) or not x.size:
        return
    length = mapped.size()
    ends = ((n - 1) * stride for n, stride in zip(x.shape, x.strides, strict=True) if stride > 0)
    behind = x.ctypes.data + sum(ends) + x.itemsize - np.frombuffer(mapped, np.uint8).ctypes.data
    needed = x.offset - x.offset % mmap.ALLOCATIONGRANULARITY + behind
    if length < needed:
        raise StateError(
            f"blocks: {x.filename} has {format_bytes(length)}, and the array needs "
            f"{format_bytes(needed)}: the file was cut short"
        )


def blocks(
    x: Any,
    axis: int = 0,
    *,
    out: Any = None,
    write: bool = False,
    room: Size = "80%",
    halo: int = 0,
) -> HostBlocks:
    """Loop over a host array in blocks on the GPU, copied ahead of their use.

    ``for block in umem.blocks(x)`` yields arrays of CuPy, in order. With ``out``, it yields pairs:
    a block to read, and one of ``out`` to fill. With ``write``, what the body leaves in a block is
    written to ``x``. The next block is copied in and the one before is copied back while the body
    works. A block's memory is used again two blocks later: copy what is to be kept, and do not
    collect the blocks in a list. A loop that is left early, by ``break`` or by an error, writes
    what its body has done so far, as a loop over slices of ``x`` would: with ``write`` also the
    block that it was at. With ``out`` that block is not written, because the body may not have
    filled it. Copies are ordered with the stream that is
    current where the loop takes the next block: a stream of the program's own goes around the
    loop, ``with stream:``, not into its body.

    Args:
        x: an array of NumPy, a memory map, or anything with ``shape``, ``dtype`` and slices that
            give arrays of NumPy, such as an array of Zarr.
        axis: the axis to cut along.
        out: an array of the same shape, of any type of numbers, that slices can be assigned to;
            of other memory than ``x``.
        write: write the blocks back to ``x``; not with ``out``.
        room: the VRAM that the loop may take, half of it for what its body allocates: bytes, or
            text such as "2GiB" or "80%" (of what is free, where free blocks of pools count).
        halo: how many neighbours along the axis a block has besides, on each side, as far as there
            are any. ``blocks.inner`` is the index of the block without them; they are not written
            back.

    Returns:
        the blocks: iterable, with a length; ``piece`` is where the loop is, ``str`` how far.

    Raises:
        TypeError: ``x`` or ``out`` is no array of numbers on the host, or has a mask; an axis or
            halo that is no integer.
        ValueError: an axis that there is not, a halo below 0, ``out`` of another shape or in the
            memory of ``x``, what is to be written is read-only.
        SizeError: not a size, or a block of length 1 has no room.
        DeviceError: a virtual GPU is current, which CuPy does not use.
        DeviceNotFoundError: there is no CUDA device.

    In the loop: StateError if the file of a memory map was cut short, or another loop over the same
    object is going on; OutOfMemoryError if the host has no room for its pinned memory: as much as
    two blocks each way, at most half of what the host has available, freed at the loop's end. Cost:
    a copy in the host's memory each way, as the arrays are not pinned. Gain: bench/recipes.py,
    simulated; never run on a GPU yet.
    """
    _check_array(x, "x")
    axis, halo = operator.index(axis), operator.index(halo)
    if not -len(x.shape) <= axis < len(x.shape):
        raise ValueError(f"blocks: axis {axis} is none of an array of {len(x.shape)} axes")
    if halo < 0:
        raise ValueError(f"blocks: halo must be 0 or more; got {halo}")
    if out is not None:
        _check_array(out, "out")
        if tuple(out.shape) != tuple(x.shape):
            raise ValueError(f"blocks: out has shape {out.shape}, and x has {x.shape}")
        if write:
            raise ValueError("blocks: write is for x, and out is there: give one of them")
        if _is_shared(x, out):
            raise ValueError("blocks: out is in the memory of x: write=True writes to x")
    if write or out is not None:
        _check_writable(x if out is None else out, "x" if out is None else "out")
    return HostBlocks(x, out, axis % len(x.shape), _room(room), halo, write)


def _is_shared(x: Any, out: Any) -> bool:
    """Tell whether two arrays have memory in common; of other kinds, whether they are one."""
    if isinstance(x, np.ndarray) and isinstance(out, np.ndarray):
        return bool(np.shares_memory(x, out))
    return x is out


def _check_writable(x: Any, name: str) -> None:
    """Raise ValueError if nothing can be assigned to an array."""
    if (isinstance(x, np.ndarray) and not x.flags.writeable) or not hasattr(x, "__setitem__"):
        raise ValueError(f"blocks: {name} is read-only")


def _room(room: Size) -> int | float:
    """Return bytes, or a share of the free VRAM as a float.

    Raises:
        SizeError: it is neither.
    """
    accepted = 'room= is bytes, or a share such as "80%" of free VRAM'
    size = parse_size(room, "room", "%", accepted)
    return float(size.factor) if isinstance(size, RelativeSize) else size


def _check_array(x: Any, name: str) -> None:
    """Raise TypeError if something is no array of numbers on the host."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype") or not hasattr(x, "__getitem__"):
        raise TypeError(f"blocks: {name} must be an array on the host; got {type(x).__name__}")
    if hasattr(x, "__cuda_array_interface__"):
        raise TypeError(
            f"blocks: {name} is on the GPU already: umem.lookahead moves managed arrays of a loop"
        )
    dtype = np.dtype(x.dtype)
    largest = {"b": 1, "i": 8, "u": 8, "f": 8, "c": 16}.get(dtype.kind, 0)
    if dtype.itemsize > largest:
        raise TypeError(f"blocks: {name} has the type {dtype}, and CuPy has numbers up to 64 bits")
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"blocks: {name} has a mask, which a block on the GPU would not have")
    if not x.shape:
        raise TypeError(f"blocks: {name} has no axis to cut along")
