"""Messages between the processes of a communicator, by shared memory.

For each pair of ranks there is a mailbox, which holds one piece of a message at a time: one rank
counts what it has put in, the other what it has taken out, so that neither needs a lock. Each
message begins with a label, by which ranks are found out that do not call the same function.

Models: order. Does not model: the time of links between devices, network interfaces.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from umem.host_cuda.device_state import DeviceState

Bytes = NDArray[np.uint8]
PIECE_BYTES = 1 << 18
"""Bytes of a message in a mailbox at a time; the mailboxes of two ranks fit Docker's 64 MiB."""
LEFT = -1
"""Stored in place of the process id of a rank that has left."""
_SHARED = Path("/dev/shm")
_LONGEST_SLEEP, _CHECK_SECONDS = 1e-3, 0.2
"""Seconds between two looks at a mailbox, at most, and at whether its rank lives (guesses)."""


class RemoteError(Exception):
    """Another rank has ended, or called another function."""


class Label(NamedTuple):
    """The function that a message belongs to, by index, and the message's bytes."""

    function: int
    nbytes: int


def new_place() -> str:
    """Return the path of a file for a new communicator's mailboxes."""
    folder = _SHARED if _SHARED.is_dir() else Path(tempfile.gettempdir())
    return str(folder / f"umem-nccl-{secrets.token_hex(16)}")


class Mailboxes:
    """A communicator's mailboxes, as seen by one rank.

    Args:
        place: a path of `new_place`, the same on each rank.
        size: the number of ranks.
        rank: this one; it joins.
        device: the rank's GPU.

    Raises:
        OSError: there is no room for the mailboxes, or no right to them.
    """

    def __init__(self, place: str, size: int, rank: int, device: DeviceState) -> None:
        words = size + 4 * size * size
        nbytes = 8 * words + size * size * PIECE_BYTES
        opened = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(opened, 0, nbytes)  # a full disk is an error now, no signal later
            self._memory = mmap.mmap(opened, nbytes)
        finally:
            os.close(opened)
        numbers = np.frombuffer(self._memory, np.int64, words)
        self.processes, counts = numbers[:size], numbers[size:]
        self.put, self.taken = counts[: 2 * size * size].reshape(2, size, size)
        self.labels = counts[2 * size * size :].reshape(size, size, 2)
        pieces = np.frombuffer(self._memory, np.uint8, offset=8 * words)
        self.pieces = pieces.reshape(size, size, PIECE_BYTES)
        self.size, self.rank, self.place, self.device = size, rank, place, device
        self.others = {*range(size)} - {rank}
        self.processes[rank] = os.getpid()
        if all(self.processes):
            self._remove()

    def leave(self) -> None:
        """Leave the communicator; others notice when they wait for this rank."""
        self.processes[self.rank] = LEFT
        self._remove()

    def check(self, rank: int) -> None:
        """Raise RemoteError if a rank has ended.

        Raises:
            RemoteError: its process has ended, or it has left.
        """
        process = int(self.processes[rank])
        if process > 0 and not _is_running(process):
            raise RemoteError(f"rank {rank} (process {process}) has ended")
        if process == LEFT:
            raise RemoteError(f"rank {rank} has destroyed its communicator")

    def _remove(self) -> None:
        """Remove the file, of which each rank that has joined has the memory."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.place)


def _is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] not in "ZX"


@dataclass
class Transfer:
    """One message, at its sender or its receiver."""

    boxes: Mailboxes
    other: int
    data: Bytes
    function: int
    is_send: bool
    done: int = 0

    @property
    def lane(self) -> tuple[int, int, bool]:
        """Return the key of messages whose order is kept."""
        return id(self.boxes), self.other, self.is_send

    @property
    def is_over(self) -> bool:
        return self.done == len(self.data)

    def step(self, name_of: Callable[[int], str]) -> bool:
        """Send or receive one piece; returns whether the mailbox was free.

        Raises:
            RemoteError: the other rank's message is not the one that this rank waits for.
        """
        boxes, mine = self.boxes, self.boxes.rank
        pair = (mine, self.other) if self.is_send else (self.other, mine)
        is_full = boxes.put[pair] != boxes.taken[pair]
        if is_full == self.is_send:
            return False
        rest = self.data[self.done : self.done + PIECE_BYTES]
        if self.is_send:
            boxes.labels[pair] = self.function, len(self.data)
            boxes.pieces[pair][: len(rest)] = rest
            boxes.put[pair] += 1
        else:
            found, wanted = (
                Label(*boxes.labels[pair].tolist()),
                Label(self.function, len(self.data)),
            )
            if found != wanted:
                raise RemoteError(
                    f"rank {mine} calls {name_of(wanted.function)} for {wanted.nbytes} bytes of "
                    f"rank {self.other}, which calls {name_of(found.function)} with {found.nbytes}"
                )
            rest[...] = boxes.pieces[pair][: len(rest)]
            boxes.taken[pair] += 1
        self.done += len(rest)
        return True


def carry_out(transfers: Iterable[Transfer], name_of: Callable[[int], str]) -> None:
    """Send and receive messages concurrently, keeping the order between two ranks.

    Waits without end for a rank that is late.

    Raises:
        RemoteError: see `Mailboxes.check` and `Transfer.step`.
    """
    lanes: dict[tuple[int, int, bool], deque[Transfer]] = defaultdict(deque)
    for transfer in transfers:
        if len(transfer.data):
            lanes[transfer.lane].append(transfer)
    sleep, looked = 0.0, time.monotonic()
    while lanes:
        has_moved = False
        for key, lane in list(lanes.items()):
            while lane and lane[0].step(name_of):
                has_moved = True
                if lane[0].is_over:
                    lane.popleft()
            if not lane:
                del lanes[key]
        if has_moved:
            sleep = 0.0
            continue
        if time.monotonic() - looked > _CHECK_SECONDS:
            looked = time.monotonic()
            for lane in lanes.values():
                _check(lane[0])
        time.sleep(sleep)
        sleep = min(_LONGEST_SLEEP, sleep + 2e-5)


def _check(waiting: Transfer) -> None:
    """Raise if a message cannot move any more; one already put in can, even if its sender has
    left.
    """
    boxes = waiting.boxes
    has_come = boxes.put[waiting.other, boxes.rank] != boxes.taken[waiting.other, boxes.rank]
    if waiting.is_send or not has_come:
        boxes.check(waiting.other)
