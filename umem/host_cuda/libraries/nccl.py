"""NCCL between the processes of one machine, and between several devices of one process.

The functions of nccl.h, which CuPy's own module calls through a stand-in for NVIDIA's library. Each
call has finished when it returns: it waits for the other ranks. Inside a group, calls wait together
at the group's end, as NCCL's documentation requires for one thread with several devices.

Models: results with the same bits on each rank (added in rank order); reads and writes of a call.
Does not model: the time of the links; calls that return before the other ranks have joined, so that
ranks that also synchronize otherwise, in another order, deadlock; bfloat16 and 8-bit types.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from umem.host_cuda.deferred_streams import DeferredRuntime
from umem.host_cuda.device_state import DeviceState
from umem.host_cuda.dry.dry_runtime import DryRuntime
from umem.host_cuda.libraries.handles import Array, HostLibrary
from umem.host_cuda.libraries.mailboxes import (
    Mailboxes,
    RemoteError,
    Transfer,
    carry_out,
    new_place,
)
from umem.host_cuda.linking import LibraryFailure
from umem.host_cuda.observer import Launch
from umem.host_cuda.runtime import HostRuntime

CUDA_ERROR, SYSTEM_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR = 1, 2, 4, 5, 6
"""Values of ncclResult_t, from nccl.h."""
VERSION = 22809
DTYPES = ("i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8")
"""Dtypes in the order of ncclDataType_t."""
AVERAGE = 4
NO_COLOR = -1
OPERATIONS: tuple[Any, ...] = (np.add, np.multiply, np.fmax, np.fmin, np.add)
"""Operations in the order of ncclRedOp_t; the last is `AVERAGE`."""
FUNCTIONS = ("", "AllReduce", "Reduce", "Broadcast", "ReduceScatter", "AllGather", "Send",
             "CommSplit")  # fmt: skip
C_FUNCTIONS = {
    "ncclGetVersion": "p", "ncclGetUniqueId": "p", "ncclGroupStart": "", "ncclGroupEnd": "",
    "ncclCommInitRank": "piui", "ncclCommInitRankConfig": "piuip", "ncclCommInitAll": "pip",
    "ncclCommSplit": "piipp", "ncclCommDestroy": "p", "ncclCommAbort": "p",
    "ncclCommGetAsyncError": "pp", "ncclCommCount": "pp", "ncclCommUserRank": "pp",
    "ncclCommCuDevice": "pp", "ncclAllReduce": "pppiipp", "ncclReduce": "pppiiipp",
    "ncclBroadcast": "pppiipp", "ncclBcast": "ppiipp", "ncclReduceScatter": "pppiipp",
    "ncclAllGather": "pppipp", "ncclSend": "ppiipp", "ncclRecv": "ppiipp",
}  # fmt: skip
"""Functions with the letters of their arguments; see `umem.host_cuda.linking`."""


@dataclass
class _NcclCall:
    """One call: its memory, its messages, and its final step."""

    device: DeviceState
    stream: int
    reads: Sequence[Array]
    writes: Sequence[Array]
    transfers: list[Transfer]
    finish: Callable[[], None]


@dataclass
class _Group(threading.local):
    """A thread's depth of groups, and the calls deferred to the group's end."""

    depth: int = 0
    calls: list[_NcclCall] = field(default_factory=list)

    def take(self) -> list[_NcclCall]:
        """Return and clear the deferred calls."""
        calls, self.calls = self.calls, []
        return calls


class HostNccl(HostLibrary):
    """NCCL's functions on addresses; they raise `LibraryFailure`."""

    def __init__(self, runtime: HostRuntime) -> None:
        super().__init__(runtime)
        self._group = _Group()

    # -- communicators -----------------------------------------------------------------------

    def ncclGetVersion(self, found: int) -> None:
        _store(found, VERSION)

    def ncclGetUniqueId(self, found: int) -> None:
        ctypes.memmove(found, new_place().encode().ljust(128, b"\0"), 128)

    def ncclCommInitRank(self, found: int, size: int, name: Any, rank: int) -> None:
        _check_rank(rank, size)
        place = bytes(name).rstrip(b"\0").decode(errors="replace")
        _store(found, self._join(place, size, rank, self._runtime.here), ctypes.c_void_p)

    def ncclCommInitRankConfig(self, found: int, size: int, name: Any, rank: int, _: int) -> None:
        self.ncclCommInitRank(found, size, name, rank)

    def ncclCommInitAll(self, found: int, size: int, devices: int) -> None:
        """Make a communicator of several devices of this process."""
        numbers = self._vector("i4", devices, size).tolist() if devices else [*range(size)]
        states = self._runtime.devices
        if not all(0 <= n < len(states) for n in numbers):
            raise LibraryFailure(
                INVALID_ARGUMENT, f"devices {numbers}, but there are {len(states)}"
            )
        place = new_place()
        for rank, number in enumerate(numbers):
            _store(found + 8 * rank, self._join(place, size, rank, states[number]), ctypes.c_void_p)

    def ncclCommSplit(self, comm: int, color: int, key: int, found: int, _: int) -> None:
        """Make a communicator for each color, with ranks ordered by key."""
        old, size = self._of(comm), self._of(comm).size
        own = np.zeros(1, [("color", "i4"), ("key", "i4"), ("place", "S128")])
        own[0] = color, key, new_place().encode()
        each = np.concatenate([own] * size)

        def join() -> None:
            ranks = [i for i in range(size) if each["color"][i] == color]
            ranks.sort(key=lambda i: (each["key"][i], i))
            place = each["place"][ranks[0]].decode()
            made = self._join(place, len(ranks), ranks.index(old.rank), old.device)
            _store(found, made, ctypes.c_void_p)

        finish = join if color != NO_COLOR else partial(_store, found, None, ctypes.c_void_p)
        sends = dict.fromkeys(range(size), own)
        receives = {i: each[i : i + 1] for i in range(size)}
        self._do("CommSplit", old, 0, [], [], sends, receives, finish)

    def ncclCommDestroy(self, comm: int) -> None:
        self._of(comm).leave()
        self._drop(comm)

    ncclCommAbort = ncclCommDestroy

    def ncclCommGetAsyncError(self, comm: int, found: int) -> None:
        _store(found, 0)

    def ncclCommCount(self, comm: int, found: int) -> None:
        _store(found, self._of(comm).size)

    def ncclCommUserRank(self, comm: int, found: int) -> None:
        _store(found, self._of(comm).rank)

    def ncclCommCuDevice(self, comm: int, found: int) -> None:
        _store(found, self._of(comm).device.ordinal)

    # -- groups ------------------------------------------------------------------------------

    def ncclGroupStart(self) -> None:
        self._group.depth += 1

    def ncclGroupEnd(self) -> None:
        if not self._group.depth:
            raise LibraryFailure(INVALID_USAGE, "the end of a group that has not begun")
        self._group.depth -= 1
        if not self._group.depth:
            self._run(self._group.take())

    # -- collectives -------------------------------------------------------------------------

    def ncclAllReduce(
        self, given: int, made: int, count: int, dtype: int, op: int, comm: int, stream: int
    ) -> None:
        self._reduce("AllReduce", given, made, count, dtype, op, None, comm, stream)

    def ncclReduce(
        self, given: int, made: int, count: int, dtype: int, op: int, root: int, comm: int,
        stream: int,
    ) -> None:  # fmt: skip
        self._reduce("Reduce", given, made, count, dtype, op, root, comm, stream)

    def _reduce(
        self, name: str, given: int, made: int, count: int, dtype: int, op: int, root: int | None,
        comm: int, stream: int,
    ) -> None:  # fmt: skip
        """Reduce all ranks' data in order, on the root, or without a root on each rank."""
        found = self._of(comm, root or 0)
        data, operation = self._memory(given, count, dtype), _operation(op)
        sends = {i: data for i in (found.others if root is None else {root} & found.others)}
        if root not in (None, found.rank):
            self._do(name, found, stream, [data], [], sends, {})
            return
        result = self._memory(made, count, dtype)
        receives = {i: np.empty_like(data) for i in found.others}
        each = [receives.get(i, data) for i in range(found.size)]
        add = partial(_reduced, each, result, operation, op == AVERAGE)
        self._do(name, found, stream, [data], [result], sends, receives, add)

    def ncclReduceScatter(
        self, given: int, made: int, count: int, dtype: int, op: int, comm: int, stream: int
    ) -> None:
        """Reduce all ranks' data, and store each rank's part there."""
        found, operation = self._of(comm), _operation(op)
        data = self._memory(given, count * found.size, dtype)
        result = self._memory(made, count, dtype)
        parts = data.reshape(found.size, count)
        each = np.empty_like(parts)
        add = partial(_reduced, each, result, operation, op == AVERAGE)
        sends, receives = dict(enumerate(parts)), dict(enumerate(each))
        self._do("ReduceScatter", found, stream, [data], [result], sends, receives, add)

    def ncclBroadcast(
        self, given: int, made: int, count: int, dtype: int, root: int, comm: int, stream: int
    ) -> None:
        """Copy the root's data to all ranks."""
        found = self._of(comm, root)
        result = self._memory(made, count, dtype)
        if found.rank != root:
            self._do("Broadcast", found, stream, [], [result], {}, {root: result})
            return
        data = self._memory(given, count, dtype)
        sends, copy = {i: data for i in found.others}, partial(np.copyto, result, data)
        self._do("Broadcast", found, stream, [data], [result], sends, {}, copy)

    def ncclBcast(
        self, made: int, count: int, dtype: int, root: int, comm: int, stream: int
    ) -> None:
        self.ncclBroadcast(made, made, count, dtype, root, comm, stream)

    def ncclAllGather(
        self, given: int, made: int, count: int, dtype: int, comm: int, stream: int
    ) -> None:
        found = self._of(comm)
        data = self._memory(given, count, dtype)
        result = self._memory(made, count * found.size, dtype).reshape(found.size, count)
        sends, receives = {i: data for i in found.others}, {i: result[i] for i in found.others}
        copy = partial(np.copyto, result[found.rank], data)
        self._do("AllGather", found, stream, [data], [result], sends, receives, copy)

    def ncclSend(
        self, given: int, count: int, dtype: int, peer: int, comm: int, stream: int
    ) -> None:
        found, data = self._of(comm, peer), self._memory(given, count, dtype)
        self._do("Send", found, stream, [data], [], {peer: data}, {})

    def ncclRecv(
        self, made: int, count: int, dtype: int, peer: int, comm: int, stream: int
    ) -> None:
        found, result = self._of(comm, peer), self._memory(made, count, dtype)
        self._do("Send", found, stream, [], [result], {}, {peer: result})

    # -- inside ------------------------------------------------------------------------------

    def _do(
        self,
        name: str,
        comm: Mailboxes,
        stream: int,
        reads: Sequence[Array],
        writes: Sequence[Array],
        sends: Mapping[int, Array],
        receives: Mapping[int, Array],
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        """Run a call, or defer it to the end of the group.

        Args:
            name: the function's name, equal on all ranks whose messages belong together.
            sends, receives: arrays by target rank and by source rank.
            finish: called once all messages have arrived.
        """
        number = FUNCTIONS.index(name)
        transfers = [
            Transfer(comm, other, data.view(np.uint8), number, is_send)
            for each, is_send in ((sends, True), (receives, False))
            for other, data in each.items()
        ]
        call = _NcclCall(comm.device, stream, reads, writes, transfers, finish)
        self._group.calls.append(call)
        if not self._group.depth:
            self._run(self._group.take())

    def _run(self, calls: list[_NcclCall]) -> None:
        """Run calls together: wait for their streams, report them, and exchange their messages."""
        runtime = self._runtime
        calls = [c for c in calls if not (runtime.captures and runtime.is_captured(c.stream))]
        for call in calls:
            if isinstance(runtime, DeferredRuntime):  # elsewhere streams do their work at once
                runtime.wait_for_stream(call.stream)
            reads, writes = (
                [a for array in each for a in runtime.access_of(array)]
                for each in (call.reads, call.writes)
            )
            try:
                runtime.operation(Launch("nccl", call.device.ordinal, reads, writes))
            except runtime.error_type as error:
                raise LibraryFailure(CUDA_ERROR, str(error)) from None
        if isinstance(runtime, DryRuntime):
            for array in (array for call in calls for array in call.writes):
                runtime.leave_out("nccl", array)
            calls = [call for call in calls if not (call.reads or call.writes)]  # CommSplit
        try:
            carry_out((t for call in calls for t in call.transfers), FUNCTIONS.__getitem__)
        except RemoteError as error:
            raise LibraryFailure(REMOTE_ERROR, str(error)) from None
        for call in calls:
            call.finish()

    def _join(self, place: str, size: int, rank: int, device: DeviceState) -> int:
        try:
            return self._keep(Mailboxes(place, size, rank, device))
        except OSError as error:
            raise LibraryFailure(SYSTEM_ERROR, f"ranks share memory in a file: {error}") from None

    def _of(self, comm: int, rank: int = 0) -> Mailboxes:
        """Return a communicator; raises if the given root is not one of its ranks."""
        found: Mailboxes | None = self._made.get(comm)
        if found is None:
            raise LibraryFailure(
                INVALID_ARGUMENT, "the communicator does not exist, or was destroyed"
            )
        _check_rank(rank, found.size)
        return found

    def _memory(self, address: int, count: int, dtype: int) -> Array:
        if not 0 <= dtype < len(DTYPES):
            raise LibraryFailure(INVALID_ARGUMENT, f"the software GPU's NCCL has no type {dtype}")
        if count and self._runtime.allocation_of(address) is None:
            raise LibraryFailure(INVALID_ARGUMENT, f"{address:#x} is not device memory")
        return self._vector(DTYPES[dtype], address, count)


def _store(address: int, value: int | None, kind: Any = ctypes.c_int) -> None:
    kind.from_address(address).value = value


def _check_rank(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise LibraryFailure(INVALID_ARGUMENT, f"there is no rank {rank} of {size}")


def _operation(op: int) -> Any:
    if not 0 <= op < len(OPERATIONS):
        raise LibraryFailure(INVALID_ARGUMENT, f"the software GPU's NCCL has no operation {op}")
    return OPERATIONS[op]


def _reduced(each: Iterable[Array], result: Array, operation: Any, is_average: bool) -> None:
    """Reduce the arrays of all ranks into ``result``."""
    first, *others = each
    found = first.copy()
    for array in others:
        operation(found, array, out=found)
    if is_average:
        found = (found / (1 + len(others))).astype(found.dtype)
    result[...] = found
