"""Messages between the processes of a communicator, in shared memory.

Each pair of ranks has a mailbox, which holds one piece of a message at a time. One rank counts the
pieces it has put in, the other the pieces it has taken out, so neither needs a lock. Each message
begins with a label, which shows whether both ranks call the same function.

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
"""Bytes of a message piece in a mailbox; the mailboxes of two ranks fit Docker's 64 MiB."""
LEFT = -1
"""Stored instead of the process id of a rank that has left."""
_SHARED = Path("/dev/shm")
_LONGEST_SLEEP, _CHECK_SECONDS = 1e-3, 0.2
"""Most seconds between two checks of a mailbox, and seconds between checks of its rank's process
(guesses).
"""


class RemoteError(Exception):
    """Another rank has ended, or called another function."""


class Label(NamedTuple):
    """The index of a message's function, and the message's bytes."""

    function: int
    nbytes: int


def new_place() -> str:
    """Return the path of a file for a new communicator's mailboxes."""
    folder = _SHARED if _SHARED.is_dir() else Path(tempfile.gettempdir())
    return str(folder / f"umem-nccl-{secrets.token_hex(16)}")


class Mailboxes:
    """One rank's view of a communicator's mailboxes.

    Args:
        place: a path from `new_place`, the same on each rank.
        size: the number of ranks.
        rank: this rank, which joins.
        device: the rank's GPU.

    Raises:
        OSError: there is no space for the mailboxes, or no permission.
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
        """Leave the communicator; other ranks notice when they wait for this one."""
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
        """Remove the file; each joined rank keeps its memory."""
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
    """One message, at its sender or receiver."""

    boxes: Mailboxes
    other: int
    data: Bytes
    function: int
    is_send: bool
    done: int = 0

    @property
    def lane(self) -> tuple[int, int, bool]:
        """Return the key of messages that must stay in order."""
        return id(self.boxes), self.other, self.is_send

    @property
    def is_over(self) -> bool:
        return self.done == len(self.data)

    def step(self, name_of: Callable[[int], str]) -> bool:
        """Send or receive one piece; return whether the mailbox was ready.

        Raises:
            RemoteError: the other rank sends a different message than this rank expects.
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

    Waits indefinitely for a late rank.

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
    """Raise if a message cannot arrive; a message already in the mailbox can."""
    boxes = waiting.boxes
    has_come = boxes.put[waiting.other, boxes.rank] != boxes.taken[waiting.other, boxes.rank]
    if waiting.is_send or not has_come:
        boxes.check(waiting.other)
