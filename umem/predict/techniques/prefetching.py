"""Lookahead prefetch on a trace: the moves of `umem.chainer.LookaheadPrefetch`, as hints.

What it does to memory that no tensor has (discard it, have it ready) is no event of a trace: it is
in the layout beside the trace, by which both are replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from umem.devices.specs import GpuSpec
from umem.devices.virtual.layout import Blocks, Laid, Layout, lay_out
from umem.errors import StateError
from umem.planner.prefetch.footprint import footprint
from umem.planner.prefetch.moves import NOTHING, MovePlan, Moves, SomeBlocks, plan_moves
from umem.planner.prefetch.order import Iteration, Order
from umem.predict.techniques.step_variants import Prepared, StepVariants
from umem.trace.trace import Access, Alloc, Free, Hint, Mark, Op, Trace
from umem.trace.walk import renumbered
from umem.units import BLOCK_BYTES, format_bytes

DEPTH = 2
LINE = f"with umem.managed(), umem.chainer.LookaheadPrefetch({DEPTH}):"


def prepare(variants: StepVariants, gpu: GpuSpec) -> Prepared:
    """Every step but the first is helped, as by a `LookaheadPrefetch` that has learned it."""
    return lookahead(variants, variants.trace, gpu, LINE)


def lookahead(variants: StepVariants, trace: Trace, gpu: GpuSpec, line: str) -> Prepared:
    """Lookahead on what was made of a step.

    Raises:
        StateError: it has nothing to do, or the step does not fit managed memory either.
    """
    step = variants.replays.step(trace, gpu, "managed")
    if step.reason is not None:
        raise StateError(step.reason)
    reserved = step.cost.reserved_peak_bytes or 0
    if reserved <= gpu.usable_bytes:
        raise StateError(
            f"it moves nothing: {format_bytes(reserved)} are reserved, and all of that has room "
            f"in {format_bytes(gpu.usable_bytes)} of VRAM"
        )
    blocks = gpu.usable_bytes // BLOCK_BYTES

    def made() -> Trace:
        layout = lay_out(trace.events, repeats=True)
        if layout is None:
            raise StateError("the step gives advice, which lookahead does not plan with")
        helped = with_moves(layout, DEPTH, blocks, settled=True)
        hinted = trace.with_events([laid.event for laid in helped.laid])
        variants.replays.lay(hinted, helped)
        return hinted

    hinted = variants.made_once(("lookahead", id(trace), gpu.usable_bytes), made)
    if len(hinted) == len(trace):
        raise StateError(
            "it moves nothing: the arrays have room, and only the gaps between them have none"
        )
    return Prepared(hinted, line, "managed", hintless=trace)


def with_moves(layout: Layout, depth: int, blocks: int, *, settled: bool = False) -> Layout:
    """A trace's layout with what `LookaheadPrefetch` does: learns a step, helps the next.

    Args:
        layout: where some steps lie; ``lay_out(trace.events, repeats=True)``.
        depth: see `LookaheadPrefetch`.
        blocks: those of VRAM.
        settled: every step but the first is helped by what was learned of the last, as once the
            arrays have found their places.
    """
    helper = _Helper(depth, blocks)
    if settled:
        for laid in layout.laid:
            helper.after(laid)
        helper = _Helper(depth, blocks, helper.learned)
    found: list[Laid] = []
    ends = (i for i in range(len(layout.laid) - 1, -1, -1) if layout.laid[i].event == Mark("step"))
    last = next(ends, len(layout.laid))  # what it learns there helps no step
    for laid in layout.laid[:last]:
        found.append(laid)
        found += helper.after(laid)
    return layout.with_laid([*found, *layout.laid[last:]])


@dataclass(frozen=True)
class _LearnedSteps:
    """An order, where its arrays were, and the moves planned for that."""

    order: Order
    addresses: tuple[int | None, ...]
    moves: MovePlan


class _Helper:
    """Follows a trace as `umem.chainer.lookahead.session` follows a run.

    Tensors go by the order of their birth, which an `Iteration` knows old ones by.
    """

    def __init__(self, depth: int, blocks: int, settled: _LearnedSteps | None = None) -> None:
        self._depth, self._blocks, self._settled = depth, blocks, settled
        self.learned: _LearnedSteps | None = None
        self._births: dict[int, int] = {}
        self._alive: dict[int, Alloc] = {}  # by birth
        self._places: dict[int, int] = {}  # by birth
        self._bytes: dict[int, int] = {}
        self._before: Iteration | None = None
        self._iteration = Iteration(0)
        self._addresses: list[int | None] = []
        self._follows = False

    def after(self, laid: Laid) -> Sequence[Laid]:
        """The hints that come after an event."""
        event = laid.event
        if isinstance(event, Op):
            return self._after_op(event)
        if isinstance(event, Alloc):
            self._births[event.tensor] = birth = len(self._bytes)
            self._alive[birth], self._bytes[birth] = event, event.nbytes
            if laid.own is not None:
                self._places[birth] = laid.own.address
        elif isinstance(event, Free):
            birth = self._births.pop(event.tensor)
            self._iteration.free(birth)
            del self._alive[birth]
            self._places.pop(birth, None)
        elif event == Mark("step"):
            self._learn()
        return ()

    def _after_op(self, op: Op) -> Sequence[Laid]:
        """Return the moves that follow an operation, and learn the iteration where it ends."""
        number = len(self._iteration.steps)
        by_birth = renumbered(op, self._births)
        assert isinstance(by_birth, Op)
        step = self._iteration.add(by_birth, self._bytes)
        for birth in self._iteration.tensors[len(self._addresses) :]:
            self._addresses.append(self._places.get(birth))
        if self.learned is None or not self._follows:
            return ()
        self._follows = self.learned.order.steps[number : number + 1] == (step,)
        if not self._follows or not self.learned.moves:
            return ()
        return list(self._hints(self.learned, self.learned.moves[number]))

    def _hints(self, learned: _LearnedSteps, moves: Moves) -> Iterator[Laid]:
        if moves.discards:
            yield Laid(Hint("discard", ()), _runs(moves.discards))
        for part in moves.sends:
            yield from self._moved(learned, part, "cpu")
        for part in moves.fetches:
            yield from self._moved(learned, part, 0)
        if moves.ready:
            yield Laid(Hint("prefetch", (), 0, overlap=True), _runs(moves.ready))

    def _moved(self, learned: _LearnedSteps, part: SomeBlocks, place: int | str) -> Iterator[Laid]:
        """Yield hints that move blocks, by the arrays that lie in them."""
        births = self._iteration.tensors
        for slot in part.slots:
            birth = births[slot] if slot < len(births) else learned.order.kept.get(slot)
            alloc, planned = (
                self._alive.get(-1 if birth is None else birth),
                learned.addresses[slot],
            )
            if alloc is None or planned is None or birth is None:
                continue
            address = self._places[birth]
            for start, stop in _runs([part]):
                low = max(0, start * BLOCK_BYTES - planned)
                high = min(alloc.nbytes, stop * BLOCK_BYTES - planned)
                covered = (address + low) // BLOCK_BYTES, -(-(address + high) // BLOCK_BYTES)
                access = Access(alloc.tensor, low, high)
                yield Laid(Hint("prefetch", (access,), place, overlap=True), (covered,))
            return

    def _learn(self) -> None:
        """Plan the moves of the next iteration by the last one."""
        kinds = {birth: alloc.kind for birth, alloc in self._alive.items()}
        kept = self._iteration.kept(kinds if self.learned is None else None)
        order = self._iteration.order(kept, self._before)
        addresses = tuple(self._addresses)
        if self._settled is not None:
            self.learned = self._settled
        else:
            moves = plan_moves(footprint(order, addresses), self._depth, self._blocks)
            self.learned = _LearnedSteps(order, addresses, moves or NOTHING)
        self._follows, self._before = True, self._iteration
        self._iteration, self._addresses = Iteration(len(self._bytes)), []


def _runs(parts: Iterable[SomeBlocks]) -> list[Blocks]:
    """Runs of the blocks of parts."""
    runs: list[Blocks] = []
    for block in sorted({block for part in parts for block in part.blocks}):
        if runs and runs[-1][1] == block:
            runs[-1] = runs[-1][0], block + 1
        else:
            runs.append((block, block + 1))
    return runs
