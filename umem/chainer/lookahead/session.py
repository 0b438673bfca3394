"""One use of a `LookaheadPrefetch` block: it follows the program, learns its order, moves memory.

It follows the events of its own recorder, which wraps the same points as `umem.record`: function
hooks do not see gradients. `umem.planner.prefetch` defines an order, and plans the moves of blocks;
`Pager` makes the device carry them out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import chainer

from umem._common.scopes import Scope
from umem.devices import Device
from umem.errors import LookaheadWarning, UmemError
from umem.memory import Pager, is_on, room
from umem.planner.prefetch import NOTHING, Iteration, MovePlan, Order, Step, footprint, plan_moves
from umem.trace import Alloc, Event, Free, Mark, Op
from umem.trace.recording import Reach, Recorder, active, follow_last
from umem.units import format_bytes

ORDERS = 4
"""At most this many orders of operations are remembered: the usual one, one for a last small batch,
or an alternation. A guess, not measured."""
LONGEST = 50_000
"""An iteration of more operations without an update is given up: a guess, far above all networks of
bench/."""


@dataclass(frozen=True)
class LookaheadReport:
    """Counts of what `LookaheadPrefetch` has done.

    Attributes:
        iteration_count: updates seen.
        followed_count: iterations that followed a known order.
        mismatch_count: iterations that left it, and got no help from that point on.
        fetched_bytes, sent_bytes: requested to be on the GPU, and on the host.
        discarded_bytes: of blocks whose contents were dropped, because no array used them.
        off: the reason why it has stopped for good; None if it has not.
        simulated: whether on a virtual GPU.
    """

    simulated: bool = False
    iteration_count: int = 0
    followed_count: int = 0
    mismatch_count: int = 0
    fetched_bytes: int = 0
    sent_bytes: int = 0
    discarded_bytes: int = 0
    off: str | None = None

    def __str__(self) -> str:
        """Format the counts as a table."""
        simulated = " (simulated)" if self.simulated else ""
        lines = [
            f"iterations   {self.iteration_count}: {self.followed_count} in a known order, "
            f"{self.mismatch_count} that left it",
            f"to the GPU   {format_bytes(self.fetched_bytes)}{simulated}",
            f"to the host  {format_bytes(self.sent_bytes)}{simulated}",
            f"discarded    {format_bytes(self.discarded_bytes)}{simulated}",
        ]
        return "\n".join(lines if self.off is None else [*lines, f"off          {self.off}"])


class Follower(Recorder):
    """A recorder that keeps weak references to tensors' arrays."""

    def __init__(self, listener: Callable[[Event], None]) -> None:
        super().__init__(listener, keep=False)
        self._refs: dict[int, Callable[[], Any]] = {}

    def is_last(self) -> bool:
        """Tell whether all other recorders started before this one; if not, move after them.

        The hints are events too, and must not come before the operation that they follow.
        """
        recorders = active()
        if recorders[-1:] == (self,):
            return True
        if self in recorders:
            follow_last(self)
        return False

    def array(self, tensor: int) -> Any:
        """Return a tensor's array, None if it was freed."""
        ref = self._refs.get(tensor)
        return None if ref is None else ref()

    def forget(self, tensor: int) -> None:
        """Drop the reference to a freed tensor."""
        self._refs.pop(tensor, None)

    def _allocate(self, root: Any, kind: str, label: str, uploaded: bool) -> Reach:
        access = super()._allocate(root, kind, label, uploaded)
        self._refs[access[0]] = self._known[id(root)]  # a weak reference
        return access


@dataclass
class Learned:
    """A remembered order of operations, the addresses of its arrays, and the planned moves.

    ``addresses`` are by slot, None for arrays outside of managed memory.
    """

    order: Order
    addresses: tuple[int | None, ...]
    moves: MovePlan
    capacity: int | None


class Session:
    """The state of one `LookaheadPrefetch` block."""

    def __init__(self, device: Device, depth: int) -> None:
        self.report = LookaheadReport(device.simulated)
        self._device, self._depth = device, depth
        self._pager = Pager(device)
        self._scope = Scope("the places of LookaheadPrefetch")
        self._follower = Follower(self._on_event)
        self._following = False
        self._bytes: dict[int, int] = {}
        self._kinds: dict[int, str] = {}
        self._tensor_count = 0
        self._iteration = Iteration(0)
        self._addresses: list[int | None] = []
        self._before: Iteration | None = None
        self._learned: list[Learned] = []  # the one used last is last
        self._current: Learned | None = None
        self._warned = False

    def start(self) -> None:
        """Start following the calling thread."""
        self._follower.__enter__()
        self._following = True
        self._device.repeat_places(self._scope)

    def stop(self) -> None:
        """Stop following; a second call does nothing."""
        if self._following:
            self._following = False
            self._scope.close()
            self._follower.__exit__(None, None, None)
        self._current = None
        self._learned.clear()

    # -- events ----------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        """Update the tables of tensors for an event of the recorder."""
        if isinstance(event, Op):
            self._on_op(event)
        elif isinstance(event, Alloc):
            self._bytes[event.tensor] = event.nbytes
            self._kinds[event.tensor] = event.kind
            self._tensor_count = event.tensor + 1
        elif isinstance(event, Free):
            self._iteration.free(event.tensor)
            self._follower.forget(event.tensor)
            del self._bytes[event.tensor], self._kinds[event.tensor]
        elif isinstance(event, Mark) and event.label == "step" and self._iteration.steps:
            self._end_iteration()

    def _on_op(self, op: Op) -> None:
        """Add an operation to the iteration, and carry out the moves planned for it."""
        if op.phase in ("forward", "array") and not chainer.config.enable_backprop:
            return  # an evaluation
        number = len(self._iteration.steps)
        if number == LONGEST:
            self._stop_for_good(f"{LONGEST:,} operations without an optimizer's update")
            return
        step = self._iteration.add(op, self._bytes)
        for tensor in self._iteration.tensors[len(self._addresses) :]:
            self._addresses.append(self._address(tensor))
        if self._current is not None:
            self._follow(self._current, number, step)

    def _follow(self, current: Learned, number: int, step: Step) -> None:
        """Compare an operation with the current order; switch to another known order, or count a
        mismatch.
        """
        steps = current.order.steps
        if number < len(steps) and steps[number] == step:
            self._move(current, number)
            return
        self._current = self._other(number + 1)
        if self._current is not None:
            self._move(self._current, number)
        else:
            self._mismatch(f"operation {number} is {step.name} ({step.phase})")

    def _other(self, count: int) -> Learned | None:
        """Return a known order that starts with the operations so far; None if there is none."""
        done = tuple(self._iteration.steps)
        for learned in reversed(self._learned):
            if learned.order.steps[:count] == done:
                return learned
        return None

    def _mismatch(self, where: str) -> None:
        """Count an iteration that follows no known order; warn once."""
        before = self.report
        self.report = replace(before, mismatch_count=before.mismatch_count + 1)
        # The second iteration may differ by objects that the first one made: only then it is usual.
        if before.iteration_count > 1 and not self._warned:
            self._warned = True
            warnings.warn(
                f"LookaheadPrefetch: iteration {before.iteration_count} takes an unknown order of "
                f"operations ({where}): it gets no prefetch, and is learned instead. "
                "This warning is given once; report() counts them",
                LookaheadWarning,
                stacklevel=2,
            )

    # -- learning --------------------------------------------------------------------------

    def _end_iteration(self) -> None:
        """Learn from the iteration that an optimizer's update ends, and count it."""
        iteration, self._iteration = self._iteration, Iteration(self._tensor_count)
        done = tuple(iteration.steps)
        known = next((item for item in self._learned if item.order.steps == done), None)
        if known is None and self._current is not None:
            self._mismatch(f"it ends after operation {len(done) - 1}")
        before = self.report
        self.report = replace(
            before,
            iteration_count=before.iteration_count + 1,
            followed_count=before.followed_count + (known is not None),
        )
        if not self._learned and not self._device.usage().managed_bytes:
            self._stop_for_good("no array is in managed memory")
        else:
            self._learn(iteration, known)
        self._addresses.clear()
        self._before = iteration
        self._device.next_step()

    def _learn(self, iteration: Iteration, known: Learned | None) -> None:
        """Remember an order as the latest, with the present addresses of its arrays."""
        kept = iteration.kept(None if self._learned else self._kinds)
        order = iteration.order(kept, self._before)
        learned = Learned(
            order,
            tuple(self._addresses),
            NOTHING,
            room(self._device, self._device.usage().managed_bytes),
        )
        if known is not None and _is_the_same(known, learned):
            learned.moves = known.moves
        elif learned.capacity is not None:
            try:
                forgets = self._device.forgets
            except UmemError as error:  # without cuda-core, or the driver refuses
                self._give_up(error)
                return
            used = footprint(order, learned.addresses, forgets=forgets)
            learned.moves = plan_moves(used, self._depth, learned.capacity)
        self._current = learned
        others = [item for item in self._learned if item is not known]
        self._learned = [*others, learned][-ORDERS:]

    def _stop_for_good(self, reason: str) -> None:
        self.report = replace(self.report, off=reason)
        self.stop()

    def _give_up(self, error: Exception) -> None:
        """Stop for good with a warning that names the error, because training must continue."""
        self._stop_for_good(str(error))
        warnings.warn(f"LookaheadPrefetch has stopped: {error}", LookaheadWarning, stacklevel=2)

    # -- moving ----------------------------------------------------------------------------

    def _move(self, current: Learned, number: int) -> None:
        """Carry out the moves planned for an operation; an error of the driver turns prefetch
        off.
        """
        if not current.moves or not self._follower.is_last():
            return
        pager = self._pager
        try:
            if pager.advance():
                pager.move(current.moves[number], current.addresses, self._array)
        except Exception as error:  # any error of the driver
            self._give_up(error)
        self.report = replace(
            self.report,
            fetched_bytes=pager.fetched_bytes,
            sent_bytes=pager.sent_bytes,
            discarded_bytes=pager.discarded_bytes,
        )

    def _array(self, slot: int) -> Any:
        """Return a slot's present array; None if it was freed or is not on the device."""
        tensors = self._iteration.tensors
        kept = {} if self._current is None else self._current.order.kept
        tensor = tensors[slot] if slot < len(tensors) else kept.get(slot)
        array = None if tensor is None else self._follower.array(tensor)
        return array if array is not None and is_on(self._device, array) else None

    def _address(self, tensor: int) -> int | None:
        array = self._follower.array(tensor)
        if array is None or not array.nbytes or not is_on(self._device, array):
            return None
        return self._device.address(array)


def _is_the_same(known: Learned, learned: Learned) -> bool:
    """Tell whether moves planned before are valid for the present addresses."""
    before, after = known.order, learned.order
    return (
        known.addresses == learned.addresses
        and known.capacity == learned.capacity
        and before.ends == after.ends
        and before.late_ends == after.late_ends
        and before.kept.keys() == after.kept.keys()
    )
