"""Lookahead prefetch on a trace: the moves of `umem.chainer.LookaheadPrefetch`, as hints.

A trace cannot express moves of memory that no tensor has (discarding it, having it ready): these
are in the layout beside the trace, which is replayed with it.
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
from umem.predict.techniques.steady_state import steady
from umem.predict.techniques.step_variants import STEPS, Prepared, StepVariants
from umem.trace.trace import Access, Alloc, Free, Hint, Mark, Op, Trace
from umem.trace.walk import renumbered
from umem.units import BLOCK_BYTES, format_bytes

DEPTH = 2
LINE = f"with umem.managed(), umem.chainer.LookaheadPrefetch({DEPTH}):"
LOOP_LINE = "with umem.managed(): look = umem.lookahead()  # look.uses(x, y), look.step()"
"""The code for a program without Chainer, which has to tell what it uses."""


def prepare(variants: StepVariants, gpu: GpuSpec) -> Prepared:
    """Prepare the step in managed memory with the hints of a `LookaheadPrefetch` that knows it.

    Raises:
        StateError: as `lookahead`.
    """
    return lookahead(variants, variants.trace, gpu, LINE if variants.of_chainer else LOOP_LINE)


def lookahead(variants: StepVariants, trace: Trace, gpu: GpuSpec, line: str) -> Prepared:
    """Prepare a variant of a step in managed memory with lookahead prefetch.

    Args:
        variants: the step.
        trace: the trace of the variant.
        gpu: the GPU.
        line: the code that turns both on.

    Raises:
        StateError: no block would move, the step gives advice, or the step does not fit managed
            memory either.
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
        """Return the steps with hints; the trace itself if no block moves."""
        # The blocks that are in VRAM at first are others than later; as many steps again, and they
        # have settled.
        longer = steady(trace, 2 * STEPS)
        layout = lay_out(longer.events, repeats=True)
        if layout is None:
            raise StateError("the step gives advice, which lookahead does not plan with")
        helped = with_moves(layout, DEPTH, blocks, settled=True)
        if len(helped.laid) == len(layout.laid):
            return trace
        hinted = trace.with_events([laid.event for laid in helped.laid])
        variants.replays.lay(hinted, helped)
        return hinted

    hinted = variants.made_once(("lookahead", id(trace), gpu.usable_bytes), made)
    if hinted is trace:
        raise StateError(
            "it moves nothing: the arrays have room, and only the gaps between them have none"
        )
    return Prepared(hinted, line, "managed", hintless=trace)


def with_moves(layout: Layout, depth: int, blocks: int, *, settled: bool = False) -> Layout:
    """Return a layout with the hints of `LookaheadPrefetch`, which learns each step for the next.

    Args:
        layout: of some steps; ``lay_out(trace.events, repeats=True)``.
        depth: see `LookaheadPrefetch`.
        blocks: the number of blocks of VRAM.
        settled: give every step but the first the moves learned from the last step, as in a run
            whose arrays have reached their final addresses.
    """
    helper = _Helper(depth, blocks)
    if settled:
        for laid in layout.laid:
            helper.after(laid)
        helper = _Helper(depth, blocks, helper.learned)
    found: list[Laid] = []
    ends = (i for i in range(len(layout.laid) - 1, -1, -1) if layout.laid[i].event == Mark("step"))
    last = next(ends, len(layout.laid))  # moves learned there serve no later step
    for laid in layout.laid[:last]:
        found.append(laid)
        found += helper.after(laid)
    return layout.with_laid([*found, *layout.laid[last:]])


@dataclass(frozen=True)
class _LearnedSteps:
    """The order of a step, the addresses of its arrays, and the moves planned for these."""

    order: Order
    addresses: tuple[int | None, ...]
    moves: MovePlan


class _Helper:
    """Follows a trace as `umem.chainer.lookahead.session` follows a run.

    Tensors are numbered by birth, so that an `Iteration` can tell tensors older than itself.
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
        """Follow an event, and return the hints to replay after it."""
        event = laid.event
        if isinstance(event, Op):
            return self._after_op(event)
        if isinstance(event, Alloc):
            self._births[event.tensor] = birth = len(self._bytes)
            self._alive[birth], self._bytes[birth] = event, event.nbytes
            for span in laid.own:
                self._places[birth] = span.address
        elif isinstance(event, Free):
            birth = self._births.pop(event.tensor)
            self._iteration.free(birth)
            del self._alive[birth]
            self._places.pop(birth, None)
        elif event == Mark("step"):
            self._learn()
        return ()

    def _after_op(self, op: Op) -> Sequence[Laid]:
        """Add an operation to the iteration; return its moves if the learned order goes on."""
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
        """Yield hints that move blocks of the first array found there, at its present address."""
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
        """Plan the moves of the next iteration from the one that ends, and begin the next."""
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
    """Return the blocks of some parts as contiguous ranges, in rising order."""
    runs: list[Blocks] = []
    for block in sorted({block for part in parts for block in part.blocks}):
        if runs and runs[-1][1] == block:
            runs[-1] = runs[-1][0], block + 1
        else:
            runs.append((block, block + 1))
    return runs
