"""Follows what Chainer does: sends what backward needs down, and brings it back before its use."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from umem.chainer.offload.journey import OffloadedPass as _Journey
from umem.chainer.offload.journey import Saved, released_first
from umem.chainer.saved.array_layout import is_bytes
from umem.chainer.saved.buffers import Buffer
from umem.chainer.saved.slots import functions_behind, slots_of
from umem.chainer.saved.tiers.tier import SMALLEST_BYTES, Process, Sent, Tier
from umem.chainer.tap import Proceed, Subscriber, subscribe, unsubscribe
from umem.locks import safe_lock
from umem.trace.recording.storage import root_of
from umem.units import MIB

IN_FLIGHT_BYTES = 32 * MIB
"""So much may be on its way down; forward waits then."""
NEWEST, OLDER = 16, 4
"""So many of the buffers that somebody else holds are looked at again before each function."""


class Mover(Subscriber):
    """Moves what the thread that starts it saves; any thread may go backward.

    A buffer is sent when the tape alone holds it, and its slots on the tape are emptied when the
    copy is whole and the tape still alone: so nobody can edit it in between. What somebody else
    holds is looked at again before later functions.

    Args:
        open_tier: opens the tier below an array; called once for each kind of arrays.
    """

    place = -4  # around those that change what is retained

    def __init__(self, open_tier: Callable[[Any], Tier]) -> None:
        self._open_tier = open_tier
        self.tiers: dict[type, Tier] = {}
        self._lock = safe_lock()
        self._thread, self._process = 0, Process()
        self._saved: WeakKeyDictionary[Any, Saved] = WeakKeyDictionary()
        self._applied: WeakSet[Any] = WeakSet()
        self._by_root: WeakValueDictionary[int, Buffer] = WeakValueDictionary()
        self._newest: deque[Buffer] = deque()
        self._older: deque[Buffer] = deque()
        self._going: deque[tuple[Buffer, Sent]] = deque()
        self._going_bytes = self._call_count = 0
        self._here = _Underway()

    def start(self) -> None:
        """Follow the calling thread."""
        self._thread, self._process = threading.get_ident(), Process()
        subscribe(self)

    def stop(self) -> None:
        """Follow it no more; graphs that are alive get back what they need.

        Raises:
            what the tier raises where it cannot bring something back; the rest is back.
        """
        unsubscribe(self)
        if not self._process.is_this():
            return
        with self._lock:
            while self._going:
                self._arrive(*self._going.popleft())
            errors = self._restore_all()
            self._saved.clear()
            self._applied.clear()
            self._newest.clear()
            self._older.clear()
            for tier in self.tiers.values():
                tier.close()
        if errors:
            raise errors[0]

    def _restore_all(self) -> list[Exception]:
        errors: list[Exception] = []
        for buffer in {one for saved in self._saved.values() for one in saved.buffers}:
            try:
                if buffer.is_below:
                    buffer.restore()
            except Exception as error:
                errors.append(error)
            buffer.forget()
        return errors

    # -- forward ---------------------------------------------------------------------------

    def apply(self, proceed: Proceed, func: Any, inputs: Any) -> Any:
        """Send what can be sent, then look at what the function saves."""
        if not self._process.is_this():
            return proceed(func, inputs)
        is_here = threading.get_ident() == self._thread
        if is_here:
            with self._lock:
                self._send_what_can_be()
        outputs = proceed(func, inputs)
        if func.inputs is not None:
            with self._lock:
                self._add(func, is_here)
        return outputs

    def _add(self, func: Any, is_here: bool) -> None:
        """Remember what a function reads of the buffers that are known, and of new ones.

        A place on the tape is left alone where functions may read it that nobody followed: inputs
        from outside, and outputs of functions that were applied before.
        """
        self._applied.add(func)
        buffers: dict[int, Buffer] = {}
        for slot in slots_of(func):
            array = slot.get()
            root = root_of(array)
            if array is None or root.nbytes < SMALLEST_BYTES:
                continue
            buffer = self._by_root.get(id(root))
            if buffer is not None and buffer.root() is not root:
                buffer = None
            if slot.maker() in self._applied:
                buffer = buffer or (self._new(root) if is_here else None)
            elif buffer is not None and not buffer.has(slot):
                buffer = None
            if buffer is not None:
                buffer.add(slot)
                buffers[id(buffer)] = buffer
        self._call_count += 1
        if buffers:
            self._saved[func] = Saved(self._call_count, tuple(buffers.values()))

    def _new(self, root: Any) -> Buffer | None:
        if not _can_be_sent(root):
            return None
        if type(root) not in self.tiers:
            self.tiers[type(root)] = self._open_tier(root)
        buffer = self._by_root[id(root)] = Buffer(root)
        self._wait(buffer, self._newest)
        return buffer

    def _wait(self, buffer: Buffer, queue: deque[Buffer]) -> None:
        """Look at a buffer again before later functions."""
        if not buffer.is_waiting:
            buffer.is_waiting = True
            queue.append(buffer)

    def _send_what_can_be(self) -> None:
        while self._going and _is_over(*self._going[0]):
            self._arrive(*self._going.popleft())
        if not self._here.journeys:
            for _ in range(len(self._newest)):
                self._look_at(self._newest.popleft(), self._newest)
            while len(self._newest) > NEWEST:
                self._older.append(self._newest.popleft())
            for _ in range(min(OLDER, len(self._older))):
                self._look_at(self._older.popleft(), self._older)
        while self._going_bytes > IN_FLIGHT_BYTES:
            self._arrive(*self._going.popleft())

    def _look_at(self, buffer: Buffer, again: deque[Buffer]) -> None:
        """Send a buffer if the tape alone holds it; otherwise it is looked at again."""
        buffer.is_waiting = False
        if buffer.sent is not None or not buffer.is_wanted():
            return
        if not buffer.pin_count and buffer.is_alone() and buffer.can_come_back():
            buffer.sent = self.tiers[buffer.kind].send(buffer.root())
        if buffer.sent is None:
            self._wait(buffer, again)
        else:
            self._going.append((buffer, buffer.sent))
            self._going_bytes += buffer.nbytes

    def _arrive(self, buffer: Buffer, sent: Sent) -> None:
        """Empty a buffer's slots once its copy is whole, unless somebody else holds it by now."""
        self._going_bytes -= buffer.nbytes
        if buffer.sent is not sent:  # it was read in between, and may have been edited
            return
        sent.let_go()
        if not buffer.is_wanted() or not sent.is_gone():
            buffer.forget()
        elif buffer.pin_count or not buffer.is_alone():
            self._hold(buffer)
        else:
            buffer.let_go()

    def _hold(self, buffer: Buffer) -> None:
        """Somebody may edit it: its contents are the truth, and what was sent is not."""
        buffer.forget()
        self._wait(buffer, self._older)

    # -- backward --------------------------------------------------------------------------

    def backward(self, proceed: Proceed, *args: Any, **kwargs: Any) -> None:
        """Bring back what the functions of this backward read, in their order."""
        nodes = [node for node, _ in (args[0] if args else kwargs["outputs"])]
        self._go(nodes, lambda: proceed(*args, **kwargs))

    def grad(self, proceed: Proceed, *args: Any, **kwargs: Any) -> Any:
        """The same for ``chainer.grad``."""
        nodes = [y.node for y in (args[0] if args else kwargs["outputs"])]
        return self._go(nodes, lambda: proceed(*args, **kwargs))

    def _go(self, nodes: list[Any], run: Any) -> Any:
        if self._process.is_this():
            with self._lock:
                journey = _Journey(self._order(nodes))
        else:
            journey = _Journey([])
        self._here.journeys.append(journey)
        try:
            with released_first(lambda: self._release(journey)):
                return run()
        finally:
            self._here.journeys.pop()
            with self._lock:
                journey.end()

    def _release(self, journey: _Journey) -> None:
        if self._lock.acquire(blocking=False):  # the collector may run while another lock is held
            try:
                journey.release()
            finally:
                self._lock.release()

    def _order(self, nodes: list[Any]) -> list[tuple[Any, Saved]]:
        """The functions before some nodes that read something, as backward takes them."""
        behind = functions_behind(nodes)
        found = [(func, self._saved[func]) for func in behind if func in self._saved]
        return sorted(found, key=lambda pair: (-pair[0].rank, -pair[1].number))

    def backprop_step(self, proceed: Proceed, func: Any, *args: Any) -> None:
        """Have there what the function reads, for as long as it runs."""
        saved = self._saved.get(func)
        if saved is None:
            proceed(func, *args)
            return
        journey = self._here.journeys[-1] if self._here.journeys else _Journey([])
        with self._lock:
            self._bring(saved.buffers)
        holders = sys.getrefcount(func)
        try:
            with self._lock:
                journey.read_ahead(func)
            proceed(func, *args)
        finally:
            is_private = sys.getrefcount(func) == holders
            with self._lock:
                for buffer in saved.buffers:
                    buffer.pin_count -= 1
                    if not buffer.pin_count:
                        self._settle(buffer, func if is_private else None, journey)

    def _bring(self, buffers: Iterable[Buffer]) -> None:
        """Have some buffers in their slots, and nobody empty these until they are read.

        Raises:
            what the tier raises; nobody holds any of them then.
        """
        for buffer in buffers:
            if buffer.is_below:
                root = buffer.restore()
                self._by_root[id(root)] = buffer
            elif buffer.sent is not None and self._process.is_this():
                buffer.forget()  # on its way down, and it may be edited now
        for buffer in buffers:
            buffer.pin_count += 1

    def _settle(self, buffer: Buffer, func: Any, journey: _Journey) -> None:
        """A function has read a buffer: its slots are emptied again."""
        if buffer.is_below or buffer.sent is None or not buffer.is_wanted():
            if buffer.sent is None and not buffer.is_below:
                self._wait(buffer, self._older)
            return
        if buffer.is_alone(but=func):
            buffer.let_go(keep=journey.needs_next(buffer))
        else:
            self._hold(buffer)


class _Underway(threading.local):
    """The backward passes that a thread is in, innermost last."""

    def __init__(self) -> None:
        self.journeys: list[_Journey] = []


def _is_over(buffer: Buffer, sent: Sent) -> bool:
    """Tell whether nobody has to wait for something that was sent."""
    return buffer.sent is not sent or sent.is_gone()


def _can_be_sent(root: Any) -> bool:
    """Tell whether an array owns memory that can be copied as bytes."""
    return bool(root.flags.owndata) and is_bytes(root)
