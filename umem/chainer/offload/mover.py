"""Follows Chainer's functions: offloads saved tensors in forward, prefetches them in backward."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from umem._common.locks import safe_lock
from umem.chainer.offload.offloaded_pass import OffloadedPass, Saved, released_first
from umem.chainer.saved.array_layout import is_bytes
from umem.chainer.saved.buffers import Buffer
from umem.chainer.saved.slots import functions_behind, slots_of
from umem.chainer.saved.tiers.tier import SMALLEST_BYTES, Process, Sent, Tier
from umem.chainer.tap import Proceed, Subscriber, subscribe, unsubscribe
from umem.planner import IN_FLIGHT_BYTES
from umem.trace.recording import root_of

NEWEST, OLDER = 16, 4
"""At most this many recent and older buffers that others refer to are checked before each function:
each check takes microseconds. Guesses, not measured."""


class Mover(Subscriber):
    """Offloads the saved tensors of the thread that starts it; any thread may run backward.

    A buffer is sent to the offload target when only the tape refers to it. Its slots on the tape
    are emptied once the copy is complete, if still only the tape refers to it, so that nothing can
    edit it in between. A buffer that others refer to is checked again before later functions.

    Args:
        open_tier: opens the offload target for an array; called once for each class of arrays.

    Attributes:
        tiers: the open targets, by class of arrays.
    """

    place = -4  # around subscribers that change the retained arrays

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
        """Follow the calling thread's functions from now on."""
        self._thread, self._process = threading.get_ident(), Process()
        subscribe(self)

    def stop(self) -> None:
        """Stop following, restore the saved tensors of live graphs, and close the targets.

        In a forked child process nothing is restored.

        Raises:
            The target's error for a buffer that it cannot restore; all others are restored.
        """
        unsubscribe(self)
        if not self._process.is_this():
            return
        with self._lock:
            while self._going:
                self._finish_sending(*self._going.popleft())
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
        """Restore every offloaded buffer, and return the errors of those that cannot be."""
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
        """Send buffers that only the tape holds, run the function, and remember its saved ones."""
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
        """Remember the buffers of the arrays that a function saves for its backward.

        An array is skipped if functions that were not followed may also read it: inputs from
        outside, and outputs of functions that ran before `start`. Arrays below 64 KiB are skipped
        as well.

        Args:
            func: a function that has run.
            is_here: the function ran in the thread whose saved tensors are offloaded; for others
                no new buffer is made, and only known ones are remembered.
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
        """Make a buffer of an array, and open the target if it is the first of its class.

        None if its memory cannot be copied as bytes.
        """
        if not _can_be_sent(root):
            return None
        if type(root) not in self.tiers:
            self.tiers[type(root)] = self._open_tier(root)
        buffer = self._by_root[id(root)] = Buffer(root)
        self._queue(buffer, self._newest)
        return buffer

    def _queue(self, buffer: Buffer, queue: deque[Buffer]) -> None:
        """Queue a buffer to be checked before a later function, unless it is queued already."""
        if not buffer.is_waiting:
            buffer.is_waiting = True
            queue.append(buffer)

    def _send_what_can_be(self) -> None:
        """Empty slots whose copies are complete, and send buffers that only the tape holds.

        Nothing is sent inside a backward pass. Waits while too many bytes are being transferred.
        """
        while self._going and _is_over(*self._going[0]):
            self._finish_sending(*self._going.popleft())
        if not self._here.passes:
            for _ in range(len(self._newest)):
                self._try_to_send(self._newest.popleft(), self._newest)
            while len(self._newest) > NEWEST:
                self._older.append(self._newest.popleft())
            for _ in range(min(OLDER, len(self._older))):
                self._try_to_send(self._older.popleft(), self._older)
        while self._going_bytes > IN_FLIGHT_BYTES:
            self._finish_sending(*self._going.popleft())

    def _try_to_send(self, buffer: Buffer, again: deque[Buffer]) -> None:
        """Send a buffer if only the tape holds it; otherwise queue it to be checked again."""
        buffer.is_waiting = False
        if buffer.sent is not None or not buffer.is_wanted():
            return
        if not buffer.pin_count and buffer.is_alone() and buffer.can_be_restored():
            buffer.sent = self.tiers[buffer.kind].send(buffer.root())
        if buffer.sent is None:
            self._queue(buffer, again)
        else:
            self._going.append((buffer, buffer.sent))
            self._going_bytes += buffer.nbytes

    def _finish_sending(self, buffer: Buffer, sent: Sent) -> None:
        """Wait for a buffer's copy, and empty its slots unless another reference exists by now."""
        self._going_bytes -= buffer.nbytes
        if buffer.sent is not sent:  # it was read in between, and may have been edited
            return
        sent.release()
        if not buffer.is_wanted() or not sent.is_gone():
            buffer.forget()
        elif buffer.pin_count or not buffer.is_alone():
            self._send_again_later(buffer)
        else:
            buffer.release()

    def _send_again_later(self, buffer: Buffer) -> None:
        """Discard the copy of a buffer that others may edit, and queue it to be sent again."""
        buffer.forget()
        self._queue(buffer, self._older)

    # -- backward --------------------------------------------------------------------------

    def backward(self, proceed: Proceed, *args: Any, **kwargs: Any) -> None:
        """Prefetch, during a backward, the offloaded buffers of its functions in their order."""
        nodes = [node for node, _ in (args[0] if args else kwargs["outputs"])]
        self._run_backward(nodes, lambda: proceed(*args, **kwargs))

    def grad(self, proceed: Proceed, *args: Any, **kwargs: Any) -> Any:
        """Prefetch as `backward` does, during ``chainer.grad``."""
        nodes = [y.node for y in (args[0] if args else kwargs["outputs"])]
        return self._run_backward(nodes, lambda: proceed(*args, **kwargs))

    def _run_backward(self, nodes: list[Any], run: Any) -> Any:
        """Run a backward from some variable nodes as one `OffloadedPass`.

        In a forked child process nothing is prefetched.
        """
        if self._process.is_this():
            with self._lock:
                current = OffloadedPass(self._order(nodes))
        else:
            current = OffloadedPass([])
        self._here.passes.append(current)
        try:
            with released_first(lambda: self._release(current)):
                return run()
        finally:
            self._here.passes.pop()
            with self._lock:
                current.end()

    def _release(self, current: OffloadedPass) -> None:
        """Drop prefetched buffers of a pass, unless another thread holds the lock."""
        if self._lock.acquire(blocking=False):  # the collector may run while another lock is held
            try:
                current.release()
            finally:
                self._lock.release()

    def _order(self, nodes: list[Any]) -> list[tuple[Any, Saved]]:
        """Return the functions behind some nodes that saved buffers, in the order of backward."""
        behind = functions_behind(nodes)
        found = [(func, self._saved[func]) for func in behind if func in self._saved]
        return sorted(found, key=lambda pair: (-pair[0].rank, -pair[1].number))

    def backprop_step(self, proceed: Proceed, func: Any, *args: Any) -> None:
        """Restore the buffers that a function's backward reads, run it, and offload them again."""
        saved = self._saved.get(func)
        if saved is None:
            proceed(func, *args)
            return
        current = self._here.passes[-1] if self._here.passes else OffloadedPass([])
        with self._lock:
            self._restore_and_pin(saved.buffers)
        holders = sys.getrefcount(func)
        try:
            with self._lock:
                current.read_ahead(func)
            proceed(func, *args)
        finally:
            is_private = sys.getrefcount(func) == holders
            with self._lock:
                for buffer in saved.buffers:
                    buffer.pin_count -= 1
                    if not buffer.pin_count:
                        self._unpin(buffer, func if is_private else None, current)

    def _restore_and_pin(self, buffers: Iterable[Buffer]) -> None:
        """Restore and pin some buffers, so that no thread empties their slots until `_unpin`.

        Raises:
            The target's errors; none of the buffers is then pinned.
        """
        for buffer in buffers:
            if buffer.is_below:
                root = buffer.restore()
                self._by_root[id(root)] = buffer
            elif buffer.sent is not None and self._process.is_this():
                buffer.forget()  # its copy is being made, and it may now be edited
        for buffer in buffers:
            buffer.pin_count += 1

    def _unpin(self, buffer: Buffer, func: Any, current: OffloadedPass) -> None:
        """Empty a buffer's slots again after its last reader has run, if only the tape holds it.

        Args:
            buffer: no longer pinned.
            func: the reader, if no reference to it was added while it ran; else None.
            current: the pass, which keeps the buffer for its next function.
        """
        if buffer.is_below or buffer.sent is None or not buffer.is_wanted():
            if buffer.sent is None and not buffer.is_below:
                self._queue(buffer, self._older)
            return
        if buffer.is_alone(but=func):
            buffer.release(keep=current.needs_next(buffer))
        else:
            self._send_again_later(buffer)


class _Underway(threading.local):
    """The backward passes that a thread is inside of, innermost last."""

    def __init__(self) -> None:
        self.passes: list[OffloadedPass] = []


def _is_over(buffer: Buffer, sent: Sent) -> bool:
    """Tell whether a copy is complete, or was discarded, so that `_arrive` does not wait."""
    return buffer.sent is not sent or sent.is_gone()


def _can_be_sent(root: Any) -> bool:
    """Tell whether an array owns its memory, and that can be copied as bytes."""
    return bool(root.flags.owndata) and is_bytes(root)
