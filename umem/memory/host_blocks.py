"""Blocks of a host array on the GPU, copied before their use and written back after it.

Each array has two buffers. While the loop's body works on one block, the next block is copied in
and the previous one is copied out, each on its own stream. Events order the copies with the stream
that is current in the loop's body. Host arrays are not pinned, so a block passes through pinned
memory: the host fills it while the previous copy is in flight.
"""

from __future__ import annotations

import mmap
import operator
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

from umem._common.host import CONTEXT_FAULTS, pinned_room
from umem.devices import current_device
from umem.errors import DeviceError, OutOfMemoryError, SizeError, StateError
from umem.memory.limits import Size
from umem.memory.mode_blocks import unmanaged
from umem.units import MIB, RelativeSize, format_bytes, parse_size

LEAST_COUNT = 24
"""Least number of blocks of an array, unless they would be smaller than `SMALLEST_BYTES`. The first
copy in and the last copy out overlap with nothing; they are a 24th of the copies each way. A
choice: no bench compares counts."""
SMALLEST_BYTES = 2 * MIB
"""Least bytes of a block that is made smaller for `LEAST_COUNT`. Over a link of 12 GB/s the copy of
such a block takes 175 us; a launch takes about 10 (docs/reference/virtual-gpu.md)."""
BUFFERS = 2
"""Buffers each way: one is in use while the other is copied."""


class Piece(NamedTuple):
    """A block along the axis, from ``start`` to ``stop``; with its halo, ``low`` to ``high``."""

    start: int
    stop: int
    low: int
    high: int


class HostBlocks:
    """The blocks of a host array; see `blocks`.

    Attributes:
        axis, halo: as given, but the axis counts from the front and the halo is at most the axis's
            size.
        length: length of a block along the axis, without its halo; the last one may be shorter.
        piece: the loop's current block; None outside of the loop.
        done_count: number of blocks that the last loop has finished.
        read_bytes, written_bytes: bytes copied to the GPU and back so far.
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
                "umem.blocks copies to CuPy's GPU, but a virtual GPU is current: on a machine "
                'without a GPU use the software GPU, umem.software_gpu("t4")'
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
        """Format the loop's progress and the bytes copied so far."""
        block, read = format_bytes(self._row * self.length), format_bytes(self.read_bytes)
        written = format_bytes(self.written_bytes)
        done = f"{self.done_count} of {len(self)} blocks of {block}"
        return f"{done}; {read} to the GPU and {written} back"

    @property
    def inner(self) -> tuple[slice, ...]:
        """Return the index of the current block without its halo.

        Raises:
            StateError: no loop is running.
        """
        if self.piece is None:
            raise StateError("inner is the index of a loop's current block, but no loop is running")
        return self._inside(self.piece)

    def _inside(self, piece: Piece) -> tuple[slice, ...]:
        start, stop, low, _ = piece
        return self._index(start - low, stop - low)

    def __iter__(self) -> Iterator[Any]:
        """Yield each block as a CuPy array, or with ``out`` as a pair of arrays.

        Raises:
            StateError: another loop over these blocks is running.
        """
        if self._is_running:
            raise StateError("a loop over these blocks is running: call umem.blocks for another")
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
                        with stream:  # the body's, which may no longer be current
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
        """Return the length of a block along the axis.

        Half of the room is for blocks, the rest for the allocations of the loop's body. Pinned
        memory is a second bound.

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
                f"and room is {format_bytes(whole)}: cut along another axis, or give a larger room"
            )
        if host is not None:
            most = min(most, self._fits(host, row + self._back_row))
        if most < 1:
            raise SizeError(
                f"blocks: a block of length 1 along axis {self.axis} needs "
                f"{format_bytes(self.pinned_bytes(1))} of pinned memory, and the host can pin "
                f"{format_bytes(host or 0)}: cut along another axis, or free host memory"
            )
        if self._write and most < min(self.halo, size):
            raise SizeError(
                f"blocks: {most} along axis {self.axis} fit in {format_bytes(whole)}, and a halo "
                f"of {self.halo} would reach into blocks that are already written: give out="
            )
        wanted = max(-(-size // LEAST_COUNT), -(-SMALLEST_BYTES // row), self.halo)
        return int(max(1, min(most, wanted, size)))

    def _fits(self, room: int, row: int) -> int:
        """Return the length of blocks that fit, with ``row`` bytes an index, beside their halos."""
        return int((room - BUFFERS * 2 * self.halo * self._row) // (BUFFERS * row))

    def pinned_bytes(self, length: int) -> int:
        """Return the bytes of pinned memory for a loop with blocks of a length."""
        longest = min(length + 2 * self.halo, self._source.shape[self.axis])
        return int(BUFFERS * (longest * self._row + length * self._back_row))

    def _room_bytes(self) -> int:
        """Return the bytes of VRAM that the loop may take.

        A share is relative to the VRAM that is free once umem's pools have given back their free
        blocks, bounded by a limit on CuPy's pool.
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
        """Return a block's part of the host array, with its halo.

        Raises:
            StateError: the file of a memory map is shorter than the array, so that reading it would
                end the process.
        """
        _check_file(self._source)
        values = self._source[self._index(piece.low, piece.high)]
        if np.shape(values) != self.shape(piece.high - piece.low):
            raise ValueError(f"blocks: a slice of x has the shape {np.shape(values)}")
        return values

    def store(self, piece: Piece, values: Any) -> None:
        """Write a block to the host array; raises as `fetch` does."""
        target = self._source if self._target is None else self._target
        _check_file(target)
        target[self._index(piece.start, piece.stop)] = values

    @property
    def writes(self) -> bool:
        """Tell whether blocks are written back."""
        return self._write or self._target is not None

    @property
    def read_dtype(self) -> Any:
        """Return the type of a block, in native byte order."""
        return np.dtype(self._source.dtype).newbyteorder("=")

    @property
    def out_dtype(self) -> Any:
        """Return the type of a block of ``out``; None without ``out``."""
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

    Every second block uses the same buffer. Its event ``filled`` follows the copy to the GPU,
    ``used`` the loop's body, ``written`` the copy to the host.
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
        # Earlier work on the buffers' memory may still be running on the current stream.
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
        """Return the arrays for the loop's body, once the current stream waits for their copies."""
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
        """Write the blocks up to a number to the host array, once their copies are complete."""
        while self._pending and self._pending[0][0] <= upto:
            number, piece = self._pending.pop(0)
            target = self._out[number % BUFFERS]
            target.written.synchronize()
            self._of.store(piece, target.back(self._of.shape(piece.stop - piece.start)))

    def close(self) -> None:
        """Write the remaining blocks, wait for all copies, and free the pinned memory."""
        try:
            self._store(len(self._of))
        finally:
            self._up.synchronize()
            self._down.synchronize()
            for buffer in (*self._in, *self._out):
                buffer.host_in = buffer.host_out = None


class _Buffer:
    """Device memory of one block at a time, with pinned memory for its copies each way."""

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
    """Pin host memory without CuPy's pool, which rounds up to a power of two and keeps it.

    Raises:
        OutOfMemoryError: the host refuses.
        CUDARuntimeError: a kernel's fault has ended the GPU's context.
    """
    try:
        return xp.cuda.PinnedMemoryPointer(xp.cuda.PinnedMemory(nbytes), 0)
    except xp.cuda.runtime.CUDARuntimeError as error:
        if error.status in CONTEXT_FAULTS:
            raise
        raise _no_pinned_memory(nbytes, None) from error


def _no_pinned_memory(nbytes: int, room: int | None) -> OutOfMemoryError:
    has = "refuses it" if room is None else f"can pin {format_bytes(room)}"
    return OutOfMemoryError(
        f"blocks: needs {format_bytes(nbytes)} of pinned memory, and the host {has}: call "
        "umem.blocks again for smaller blocks, cut along another axis, or free host memory",
        needed_bytes=nbytes,
    )


def _check_file(x: Any) -> None:
    """Raise StateError if the file of a memory map ends before the array does."""
    # NumPy's private attribute, which views have too. The file's name may have changed meanwhile.
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
    """Loop over a host array in blocks on the GPU, copied before their use.

    ``for block in umem.blocks(x)`` yields CuPy arrays, in order. With ``out`` it yields pairs: a
    block to read, and a block of ``out`` to fill. With ``write`` each block is written back to
    ``x`` after the loop's body. While the body works on a block, the next block is copied in and
    the previous one is copied back. Blocks share two buffers: copy data that you keep, and do not
    collect blocks in a list.

    A loop that ends early, by ``break`` or by an error, writes the blocks that are done, like a
    loop over slices of ``x``. With ``write`` it also writes the current block; with ``out`` it does
    not, because the body may not have filled it.

    Copies are ordered with the stream that is current when the loop takes the next block: put
    ``with stream:`` around the loop, not inside its body.

    Args:
        x: a NumPy array, a memory map, or any object with ``shape``, ``dtype`` and slices that
            return NumPy arrays, such as a Zarr array.
        axis: the axis to cut along.
        out: an array of the same shape and any numeric type, with assignable slices, which shares
            no memory with ``x``.
        write: write the blocks back to ``x``; not with ``out``.
        room: the VRAM for the loop, half of it for allocations of its body: bytes, or text such as
            "2GiB" or "80%" (of free VRAM, which includes free blocks of pools).
        halo: number of neighbours along the axis that a block has in addition on each side, cut off
            at the ends of the array. ``blocks.inner`` is the index of the block without its halo.
            Halos are not written back.

    Returns:
        the blocks: iterable, with a length; ``piece`` is the current block, ``str`` the progress.

    Raises:
        TypeError: ``x`` or ``out`` is not a numeric array on the host, or has a mask; ``axis`` or
            ``halo`` is not an integer.
        ValueError: ``x`` has no such axis, the halo is negative, ``out`` has another shape or
            shares memory with ``x``, or the array to write is read-only.
        SizeError: ``room`` is not a size, or too small for a block of length 1.
        DeviceError: a virtual GPU is current, which CuPy does not use.
        DeviceNotFoundError: there is no CUDA device.

    The loop itself raises StateError if the file of a memory map was cut short, or another loop
    over the same object is running; and OutOfMemoryError if the host cannot pin enough memory. A
    loop pins up to two blocks each way, at most half of the available host memory, and frees them
    at its end. Cost: one more copy in host memory each way, because the arrays are not pinned.
    Gain: bench/recipes.py, simulated; never run on a GPU yet.
    """
    _check_array(x, "x")
    axis, halo = operator.index(axis), operator.index(halo)
    if not -len(x.shape) <= axis < len(x.shape):
        raise ValueError(f"blocks: axis {axis} is out of range: x has {len(x.shape)} axes")
    if halo < 0:
        raise ValueError(f"blocks: halo must be 0 or more; got {halo}")
    if out is not None:
        _check_array(out, "out")
        if tuple(out.shape) != tuple(x.shape):
            raise ValueError(f"blocks: out has shape {out.shape}, and x has {x.shape}")
        if write:
            raise ValueError("blocks: write=True writes to x: give either write or out")
        if _is_shared(x, out):
            raise ValueError("blocks: out shares memory with x: write=True writes to x")
    if write or out is not None:
        _check_writable(x if out is None else out, "x" if out is None else "out")
    return HostBlocks(x, out, axis % len(x.shape), _room(room), halo, write)


def _is_shared(x: Any, out: Any) -> bool:
    """Tell whether two arrays share memory; for other types, whether they are the same object."""
    if isinstance(x, np.ndarray) and isinstance(out, np.ndarray):
        return bool(np.shares_memory(x, out))
    return x is out


def _check_writable(x: Any, name: str) -> None:
    """Raise ValueError if an array is read-only."""
    if (isinstance(x, np.ndarray) and not x.flags.writeable) or not hasattr(x, "__setitem__"):
        raise ValueError(f"blocks: {name} is read-only")


def _room(room: Size) -> int | float:
    """Return bytes, or a share of the free VRAM as a float.

    Raises:
        SizeError: ``room`` is neither.
    """
    accepted = 'room= is bytes, or a share such as "80%" of free VRAM'
    size = parse_size(room, "room", "%", accepted)
    return float(size.factor) if isinstance(size, RelativeSize) else size


def _check_array(x: Any, name: str) -> None:
    """Raise TypeError if ``x`` is not a numeric array on the host."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype") or not hasattr(x, "__getitem__"):
        raise TypeError(f"blocks: {name} must be an array on the host; got {type(x).__name__}")
    if hasattr(x, "__cuda_array_interface__"):
        raise TypeError(
            f"blocks: {name} is already on the GPU: use umem.lookahead for managed arrays of a loop"
        )
    dtype = np.dtype(x.dtype)
    largest = {"b": 1, "i": 8, "u": 8, "f": 8, "c": 16}.get(dtype.kind, 0)
    if dtype.itemsize > largest:
        raise TypeError(f"blocks: {name} has the type {dtype}, which CuPy does not support")
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"blocks: {name} has a mask, which blocks on the GPU would lose")
    if not x.shape:
        raise TypeError(f"blocks: {name} has no axis to cut along")
