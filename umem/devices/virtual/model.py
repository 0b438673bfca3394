"""The model: updates pages and time with events.

docs/reference/virtual-gpu.md lists what it models and what it does not. All its counts are
*simulated*.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

from umem._common.locks import safe_lock
from umem._common.scopes import Scope
from umem._common.specs import Costs, GpuSpec, check_vram
from umem.devices.base import Policy, Span
from umem.devices.page_moves import ALREADY_WATCHED, Cause, MoveListener, Now, PageMove, Way
from umem.devices.virtual.advice import advice_flag
from umem.devices.virtual.clock import BlockMoves, Clock, Counters, Prefetches, StepCost
from umem.devices.virtual.clocks import Clocks
from umem.devices.virtual.copies import Copies
from umem.devices.virtual.driver import DriverModel, Placed, covered, half_covered, wholly_covered
from umem.devices.virtual.pool import Pool
from umem.errors import LimitError, OutOfMemoryError, StateError
from umem.trace import COPIES, GET, ONE_KERNEL, Access, Alloc, Event, Free, Hint, Kernels, Mark, Op
from umem.units import BLOCK_BYTES, format_bytes

Allocator = Literal["caching", "plain"]
FEW = 8
"""Up to this many accesses are searched linearly, which is faster than building a set. A guess: no
benchmark varies it.
"""


class Model:
    """The pages and time of one GPU; `on_event` feeds it.

    Args:
        spec: the GPU.
        costs: the cost constants.
        allocator: ``"caching"`` as CuPy's pool, or ``"plain"``: the driver serves every allocation.
        backend: the source of the events. With ``"cupy"`` the recorded host times of operations are
            used; otherwise an operation costs the host its phase's time in ``costs``, because the
            time measured on NumPy is the arithmetic's.
        policy: returns the policy of an allocation; called for each one.
        clocks: clocks for several costs, or for several GPUs with as much VRAM, instead of one for
            this GPU and these costs. Places and moves of blocks do not depend on clocks.

    Models: the caching pool, residency, the clocks. Does not model: contents.
    """

    def __init__(
        self,
        spec: GpuSpec,
        costs: Costs,
        allocator: Allocator,
        backend: str,
        policy: Callable[[], Policy],
        clocks: Sequence[Clock] = (),
    ) -> None:
        check_vram(spec)
        self.spec = spec
        self.lock = safe_lock()
        self.clocks = Clocks(clocks or (Clock(spec, costs),))
        self.clock = self.clocks[0]
        self.driver = DriverModel(spec.usable_bytes, allocator, self._on_moves, self.clocks.free)
        self.tensors: dict[int, Placed] = {}
        self.counters = Counters()
        self._policy = policy
        self._uses_host_times = backend == "cupy"
        self._has_run = False
        self._has_managed = False
        self._reserved: dict[Pool, int] = {}
        self.is_whole, self._has_warned, self._is_over = True, False, False
        self.prefetches = Prefetches(self.clocks)
        self.copies = Copies(self.clocks)
        self._on: dict[type, Callable[[Any], None]] = {
            Op: self._on_op,
            Alloc: self._on_alloc,
            Free: self._on_free,
            Hint: self._on_hint,
            Mark: self._on_mark,
        }

    @property
    def figures(self) -> StepCost:
        """Return the counts so far (simulated)."""
        copies, figures = self.copies, self.counters.figures(self.clock)
        return replace(figures, sent_bytes=copies.sent_bytes, fetched_bytes=copies.fetched_bytes)

    def on_event(self, event: Event) -> None:
        """Apply one event.

        A signal that interrupts it leaves the pages inconsistent: the model then ignores all
        events, and warns once.

        Raises:
            OutOfMemoryError: an allocation or a workspace does not fit; it was not allocated.
        """
        with self.lock:
            if not self.is_whole:
                self._warn_interrupted(event)
                return
            self.is_whole = False
            try:
                self._follow(event)
            except Exception:
                self.is_whole = True
                raise
            self.is_whole = True

    def watch_pages(self, listener: MoveListener, scope: Scope) -> Now:
        """Report every move of blocks until a scope is closed, by the model's addresses.

        Returns its clock.

        Raises:
            StateError: moves are already being reported.
        """
        residency = self.driver.residency

        def moved(start: int, stop: int, way: Way, cause: Cause) -> None:
            faults = stop - start if cause == "fault" and way != "out" else 0
            low, high = start * BLOCK_BYTES, stop * BLOCK_BYTES
            listener(PageMove(self.clock.seconds, low, high, high - low, way, cause, faults))

        def end() -> None:
            with self.lock:
                if residency.listener is moved:
                    residency.listener = None

        with self.lock:
            if residency.listener is not None:
                raise StateError(ALREADY_WATCHED)
            scope.at_close(end)  # first, as a signal may come behind the next line
            residency.listener = moved
        return lambda: self.clock.seconds

    def end(self) -> None:
        """End the run; its timeline excludes later frees."""
        self._is_over = True

    def _warn_interrupted(self, event: Event) -> None:
        if not self._has_warned and not isinstance(event, Free):
            self._has_warned = True
            warnings.warn(
                f"the simulated {self.spec.title} was interrupted in the middle of an operation, "
                "and counts no further: enter a new umem.virtual_gpu block",
                stacklevel=2,
            )

    def _follow(self, event: Event) -> None:
        self._on[type(event)](event)
        is_unsampled = type(event) is Mark and event.label == "backward"  # by a live run
        if not self._is_over and not is_unsampled:
            self.counters.sample(self.clock.seconds, self.driver.resident_count)

    def follow(self, events: Iterable[Event]) -> None:
        """Apply events as `on_event` does, without a timeline."""
        with self.lock:
            on, driver, hold_vram = self._on, self.driver, self.counters.hold_vram
            residency = driver.residency
            for event in events:
                on[type(event)](event)
                hold_vram(driver.pinned_count + residency.count)

    def synchronize(self) -> None:
        """Make the host wait for the GPU."""
        self.clocks.synchronize()

    def _on_mark(self, mark: Mark) -> None:
        if mark.label == "step":
            self.counters.step_ends.append(self.clock.seconds)
            self.driver.repeating.restart()
        elif mark.label == "start" and not self._has_run:
            self.clocks.restart()
            self.counters.restart()
            self.copies.restart()

    def _on_alloc(self, event: Alloc) -> None:
        if event.nbytes == 0:
            self.tensors[event.tensor] = Placed(None, Span(0, 0), 0, False)
            return
        tensor = self._malloc(event.nbytes, f"{event.label!r} {event.kind}")
        self.tensors[event.tensor] = tensor
        self.counters.hold(event.nbytes)
        if event.uploaded:
            self._copy(tensor.managed, tensor.part(0, tensor.nbytes))

    def copy(self, access: Access, *, to_host: bool = False) -> None:
        """Copy a part of a tensor from or to pinned host memory; the host waits for the copy."""
        tensor = self.tensors[access.tensor]
        with self.lock:
            self._copy(tensor.managed, tensor.part(*access[1:]), to_host)

    def _copy(self, managed: bool, span: Span, to_host: bool = False) -> None:
        """Copy between host and device, migrating managed blocks."""
        moves = BlockMoves()
        if managed:
            moves = self.driver.residency.copy(*covered(span), write=not to_host)
        self.counters.uploaded_bytes += 0 if to_host else span.nbytes
        self.counters.moves.add(moves)
        self.clocks.launch(None)
        self.clocks.move(moves, span.nbytes)
        if to_host:
            self.synchronize()

    def _on_free(self, event: Free) -> None:
        tensor = self.tensors.pop(event.tensor)
        self.counters.hold(-tensor.nbytes)
        if self.copies.are_running:
            self.copies.wait_for(event.tensor)
        tensor.free()

    def _on_op(self, op: Op) -> None:
        """Run an operation with its workspace."""
        self._has_run = True
        kernels = op.kernels or ONE_KERNEL
        workspace: list[Placed] = []
        if op.workspace_bytes:
            self._malloc_pieces(op, kernels, workspace)
            self.counters.hold(0, extra=op.workspace_bytes)
        host_seconds = op.host_seconds if self._uses_host_times else None
        if not self._has_managed and not self.copies.are_running:
            self.clocks.launch_and_compute(host_seconds, op)
        else:
            self.clocks.launch(host_seconds, op.phase, kernels.launch_count)
            if self.copies.are_running:
                self.copies.wait_before(op)
            self._run_on_blocks(op, workspace, kernels.copied_bytes)
        if op.name == GET:
            self.clocks.synchronize()
        if workspace:
            self.counters.hold_vram(self.driver.resident_count)
            for piece in workspace:
                piece.free()

    def _malloc_pieces(self, op: Op, kernels: Kernels, workspace: list[Placed]) -> None:
        """Allocate the arrays of an operation's workspace.

        Raises:
            OutOfMemoryError, LimitError: it does not fit; nothing was allocated.
        """
        try:
            for nbytes in kernels.pieces(op.workspace_bytes or 0):
                workspace.append(self._malloc(nbytes, f"{op.name!r} workspace"))
        except OutOfMemoryError:
            for piece in workspace:
                piece.free()
            raise

    def _run_on_blocks(self, op: Op, workspace: Sequence[Placed], copied_bytes: int) -> None:
        """Run an operation on managed blocks: migrate touched blocks, and wait for prefetches."""
        moves = BlockMoves()
        # What is both read and written is walked once.
        writes = op.writes
        both = writes if len(writes) <= FEW else frozenset(writes)
        reads = [access for access in op.reads if access not in both] if writes else op.reads
        waits: list[tuple[float, ...]] = []
        read_bytes, _ = self._touch_all(reads, (), False, moves, waits)
        written_bytes, both_bytes = self._touch_all(writes, op.reads, True, moves, waits)
        for piece in workspace:
            if piece.managed:
                on_host = self._touch_workspace(piece, moves)
                written_bytes, read_bytes = written_bytes + on_host, read_bytes + on_host
        self.counters.moves.add(moves)
        self.counters.fault_count += moves.migrated_in + moves.populated
        remote = None
        if read_bytes or written_bytes:
            remote = self._remote_bytes(op, read_bytes + both_bytes, written_bytes)
        stays = not (remote or waits or moves.migrated_in or moves.populated or moves.migrated_out)
        for index, clock in enumerate(self.clocks):
            if stays:
                clock.compute(op.flops, op.traffic_bytes, copied_bytes, op.arithmetic)
                continue
            over_bus = clock.remote_seconds(*remote, op.pattern) if remote else 0.0
            ready = max(wait[index] for wait in waits) if waits else 0.0
            clock.run(
                op.flops, op.traffic_bytes, over_bus, moves, op.pattern, ready, copied_bytes,
                op.arithmetic,
            )  # fmt: skip

    def _touch_workspace(self, workspace: Placed, moves: BlockMoves) -> float:
        """Write and read the workspace once; returns its bytes on the host."""
        start, stop = covered(workspace.part(0, workspace.nbytes))
        before = moves.remote
        self.driver.residency.touch(start, stop, write=True, moves=moves)
        return workspace.nbytes * (moves.remote - before) / (stop - start)

    def _touch_all(
        self,
        accesses: Iterable[Access],
        reads: tuple[Access, ...],
        write: bool,
        moves: BlockMoves,
        waits: list[tuple[float, ...]],
    ) -> tuple[float, float]:
        """Touch every access; adds the ends of the prefetches they need to ``waits``.

        Returns the bytes on the host, and how many of them are also in ``reads``.
        """
        remote_bytes = both_bytes = 0.0
        tensors, touch = self.tensors, self.driver.residency.touch
        both = reads if len(reads) <= FEW else frozenset(reads)
        for access in accesses:
            tensor_id, low, high = access
            tensor = tensors[tensor_id]
            if high <= low or not tensor.managed:
                continue
            address = tensor.span.address
            start, stop = (address + low) // BLOCK_BYTES, -(-(address + high) // BLOCK_BYTES)
            if self.prefetches:
                waits += self.prefetches.of(start, stop)
            remote = moves.remote
            touch(start, stop, write=write, moves=moves)
            if moves.remote != remote:
                part = (high - low) * (moves.remote - remote) / (stop - start)
                remote_bytes += part
                both_bytes += part if access in both else 0
        return remote_bytes, both_bytes

    def _remote_bytes(self, op: Op, read_bytes: float, written_bytes: float) -> tuple[float, float]:
        self.counters.remote_bytes += round(read_bytes + written_bytes)
        touched = sum(stop - start for _, start, stop in (*op.reads, *op.writes))
        more = 1.0
        if op.pattern == "random" and touched:
            more = max(more, op.traffic_bytes / touched)
        return read_bytes * more, written_bytes

    def _malloc(self, nbytes: int, what: str) -> Placed:
        """Allocate by the current policy.

        Raises:
            OutOfMemoryError, LimitError: it does not fit; nothing was allocated.
        """
        policy = self._policy()
        try:
            tensor = self.driver.malloc(nbytes, policy)
        except LimitError as error:
            where = f"{what}: {error} (simulated {self.spec.title})"
            text = f"{where}. Raise the limit, or free unneeded arrays."
            raise LimitError(text, needed_bytes=nbytes) from None
        except OutOfMemoryError:
            used, way_out = self.driver.no_room(policy)
            needed = f"needs {format_bytes(nbytes)} for {what}; {used}"
            text = f"{needed} (simulated {self.spec.title}). {way_out}"
            raise OutOfMemoryError(text, needed_bytes=nbytes) from None
        counters, pool = self.counters, tensor.pool
        if pool is not None and self._reserved.get(pool) != pool.reserved_bytes:
            self._reserved[pool] = pool.reserved_bytes
            reserved = self.driver.reserved_bytes
            counters.reserved_peak_bytes = max(counters.reserved_peak_bytes, reserved)
        self._has_managed = self._has_managed or tensor.managed
        if policy.prefetch and tensor.managed:
            moves = self.driver.residency.prefetch(*covered(tensor.part(0, nbytes)))
            counters.moves.add(moves)
            self.clocks.move(moves)
        return tensor

    def _on_moves(self, moves: BlockMoves) -> None:
        """Count blocks that cudaMalloc evicted, or that were returned."""
        self.counters.moves.add(moves)
        if moves.migrated_out:
            self.clocks.move(moves)

    def _on_hint(self, hint: Hint) -> None:
        self.clocks.launch(None)
        for access in hint.accesses:
            tensor_id, low, high = access
            tensor = self.tensors[tensor_id]
            if high > low and tensor.managed:
                self._hint_span(tensor.part(low, high), hint)
            if high > low and hint.action in COPIES:
                self.copies.begin(hint.action, access)

    def _hint_span(self, span: Span, hint: Hint) -> None:
        """Apply a hint or a copy to a span."""
        residency = self.driver.residency
        if hint.action == "prefetch":
            self._prefetch_blocks(*covered(span), hint)
        elif hint.action == "discard":
            self.counters.moves.add(residency.discard(*wholly_covered(span)))
        elif hint.action in COPIES:
            moves = residency.copy(*covered(span), write=hint.action == "fetch")
            self.counters.moves.add(moves)
            self.clocks.move(moves, overlap=True)
        else:
            flag = advice_flag(hint.action, hint.place)
            residency.advise(*half_covered(span), flag, unset=hint.unset)

    def _prefetch_blocks(self, start: int, stop: int, hint: Hint) -> None:
        residency = self.driver.residency
        to_host = hint.place == "cpu"
        moves = (residency.prefetch_out if to_host else residency.prefetch)(start, stop)
        self.counters.moves.add(moves)
        done = self.clocks.move(moves, overlap=hint.overlap)
        if hint.overlap and not to_host:
            self.prefetches.add(start, stop, done)
