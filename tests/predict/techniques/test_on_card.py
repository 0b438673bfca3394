"""Recomputation on a GPU's own pool: one piece, gaps, the budget that is the card, and caps."""

from __future__ import annotations

import pytest

import umem
from tests.predict.techniques.test_techniques import chain_of
from umem.devices.specs import gpu_spec
from umem.errors import BudgetError, StateError
from umem.planner.pool_gaps import LEAST_GAPS, PLAIN_GAPS
from umem.predict.techniques import capped_workspace, offloading
from umem.predict.techniques import recomputation as budgets
from umem.predict.techniques.on_card import gaps_of, in_one_piece, plans_for_card
from umem.predict.techniques.step_variants import StepVariants
from umem.trace import Access, Alloc, Free, Mark, Op, Trace
from umem.units import BLOCK_BYTES, MIB

GPU = gpu_spec("t4")


def chain(count: int, nbytes: int, workspace: int = 0) -> StepVariants:
    """Calls one after another, as a step whose bytes are taken as they are."""
    events = [
        e._replace(workspace_bytes=workspace) if isinstance(e, Op) and e.phase == "forward" else e
        for e in chain_of(count, nbytes)
    ]
    return StepVariants(Trace([*events, Mark("step")]), correct="off")


def test_a_piece_holds_arrays_for_which_the_driver_would_take_whole_blocks() -> None:
    step = chain(20, 5 * MIB // 4)  # 21 arrays at once: 26.25 MiB, or 42 in blocks of their own
    gpu = GPU.with_vram(32 * MIB)
    assert not step.fits(gpu)
    assert step.fits(gpu, in_one_piece(step.trace, gpu))
    small = GPU.with_vram(26 * MIB)
    assert not step.fits(small, in_one_piece(step.trace, small))


def test_a_piece_is_what_the_first_arrays_leave() -> None:
    step = chain(4, MIB)
    piece = next(e for e in in_one_piece(step.trace, GPU.with_vram(32 * MIB)).events if is_piece(e))
    assert piece.nbytes == 32 * MIB - BLOCK_BYTES, "the input shares a block with nothing"
    full = GPU.with_vram(BLOCK_BYTES)
    assert in_one_piece(step.trace, full) is step.trace, "nothing is left"


def is_piece(event: object) -> bool:
    return isinstance(event, Alloc) and event.label == "one piece"


def test_gaps_are_what_the_pool_takes_beyond_what_is_in_use() -> None:
    step = chain(8, 2 * MIB)
    # In use are 10 arrays and the input; the arrays lie side by side, and the input has a block.
    assert gaps_of(step.trace) == pytest.approx(11 / (10 + 1 / 32768), rel=1e-6)


def test_a_plan_for_the_card_leaves_room_for_gaps() -> None:
    step = chain(40, 4 * MIB)
    gpu = GPU.with_vram(96 * MIB)
    prepared = budgets.prepare_largest(step, gpu)
    assert prepared.line == 'with umem.chainer.Recompute("card"):'
    assert prepared.trace.peak_bytes <= 96 * MIB / LEAST_GAPS
    assert prepared.pooled is not None and step.fits(gpu, prepared.pooled)
    least = budgets.prepare_least(step, gpu)
    assert least.line == 'with umem.chainer.Recompute("min"):'
    assert least.trace.peak_bytes < prepared.trace.peak_bytes
    assert sum(1 for _ in prepared.trace.ops) < sum(1 for _ in least.trace.ops)


def test_a_plain_step_that_has_room_in_one_piece_is_left_alone() -> None:
    step = chain(20, 5 * MIB // 4)
    gpu = GPU.with_vram(32 * MIB)
    assert 32 * MIB / PLAIN_GAPS > step.trace.peak_bytes
    assert not any(any(plan.recomputed) for plan in plans_for_card(step, gpu))


def test_a_card_that_is_too_small_for_the_least_plan_is_refused() -> None:
    step = chain(40, 4 * MIB)
    with pytest.raises(BudgetError, match=r"44.0 MiB, .* 16.0 MiB of VRAM"):
        plans_for_card(step, GPU.with_vram(16 * MIB))


def test_a_share_is_offered_only_where_the_passes_that_learn_fit() -> None:
    step = chain(40, 4 * MIB)
    assert budgets.prepare(step, GPU, "50%").line == 'with umem.chainer.Recompute("50%"):'
    with pytest.raises(StateError, match="card"):
        budgets.prepare(step, GPU.with_vram(96 * MIB), "50%")


def test_what_is_said_to_need_is_what_arrays_use_and_not_the_piece() -> None:
    step = chain(40, 4 * MIB)
    found = {o.name: o for o in umem.choose(step.recorded, GPU, vram="96MiB").options}
    assert found["recompute min"].peak_bytes == step.under(None).peak_bytes


# -- offload -----------------------------------------------------------------------------------


def test_offload_does_not_help_while_all_is_on_its_way() -> None:
    step = chain(10, 3 * MIB)  # 30 MiB: a run has all of it in flight
    moves = offloading.all_offloaded(step.problems[0]).moves
    assert moves == ()


def test_what_is_offloaded_leaves_after_more_is_on_its_way() -> None:
    step = chain(20, 8 * MIB)
    moves = offloading.all_offloaded(step.problems[0]).moves
    names = step.problems[0].names
    place = {name: index for index, name in enumerate(names)}
    assert moves, "160 MiB are more than are in flight"
    for move in moves:
        # Four more of 8 MiB are in flight, and are fetched before a tensor is needed.
        assert place[move.leaves_after] - place[move.node] >= 4
        assert place[move.fetched_before] - place[move.node] <= 4


def test_passes_that_learn_offload_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    step = chain(40, 4 * MIB)
    gpu = GPU.with_vram(96 * MIB)
    least = step.under(None)
    fits = StepVariants.fits

    def tight(variants: StepVariants, gpu: object, trace: Trace | None = None) -> bool:
        is_least = trace is not None and list(trace.ops) == list(least.ops)
        return not is_least and fits(variants, gpu, trace)  # type: ignore[arg-type]

    monkeypatch.setattr(StepVariants, "fits", tight)
    with pytest.raises(BudgetError, match="offload nothing"):
        offloading.prepare_quickest(step, gpu)


# -- caps --------------------------------------------------------------------------------------


def test_the_cap_is_the_largest_that_fits() -> None:
    events = [Alloc(0, MIB, "activation", "x")]
    for _ in range(2):
        access = (Access(0, 0, MIB),)
        events += [
            Op("Convolution2DFunction", "forward", access, access, 1, 1, "stream", None, 40 * MIB)
        ]  # type: ignore[list-item]
    step = StepVariants(Trace([*events, Mark("step")]), correct="off")
    assert step.trace.peak_bytes == 42 * MIB
    assert 'workspace("16MiB")' in str(capped_workspace.prepare(step, GPU.with_vram(40 * MIB)).line)
    assert 'workspace("4MiB")' in str(capped_workspace.prepare(step, GPU.with_vram(12 * MIB)).line)
    assert 'workspace("1MiB")' in str(capped_workspace.prepare(step, GPU.with_vram(4 * MIB)).line)


# -- programs without Chainer ------------------------------------------------------------------


def loop(stack: tuple[str, ...] = ()) -> Trace:
    """Return three rounds over 24 arrays of 4 MiB, in which the first eight are read five times."""
    events: list[object] = []
    for n in range(24):
        access = (Access(n, 0, 4 * MIB),)
        events += [Alloc(n, 4 * MIB, "array", "a", stack=stack)]
        events += [Op("add", "array", access, access, 1, MIB)]
    for _ in range(3):
        for n in range(24):
            access = (Access(n, 0, 4 * MIB),)
            events += [Op("add", "array", access, access, 1, MIB)] * (5 if n < 8 else 1)
        events += [Mark("step")]
    return Trace(events, "software")


def test_a_program_without_chainer_is_offered_no_technique_of_chainer() -> None:
    choice = umem.choose(loop(), GPU, vram="64MiB")
    assert [o for o in choice.options if o.moved_bytes], "it does not fit as it is"
    every = {o.name: o for o in (*choice.options, *choice.dropped)}
    assert not any("umem.chainer" in (o.line or "") for o in every.values())
    assert "umem.lookahead" in str(every["managed, lookahead"].line)
    assert every["recompute 50%, lookahead"].reason


def test_what_is_read_least_stays_on_the_host() -> None:
    trace = loop(("/home/me/loop.py:12 main", "/home/me/loop.py:40 <module>"))
    choice = umem.choose(trace, GPU, vram="64MiB")
    by_name = {o.name: o for o in choice.options}
    streaming, managed = by_name["managed, streaming"], by_name["managed"]
    assert streaming.line == (
        'with umem.managed(): umem.preset(arrays, "streaming")  # 8 arrays: loop.py:12 (32.0 MiB)'
    )
    assert (streaming.seconds or 0) < (managed.seconds or 0)
    assert streaming.exact and streaming.peak_bytes == managed.peak_bytes


def test_advice_is_not_offered_where_it_gains_nothing() -> None:
    def reason(trace: Trace, vram: str) -> str:
        dropped = umem.choose(trace, GPU, vram=vram).dropped
        return next(str(o.reason) for o in dropped if o.name == "managed, streaming")

    assert "has room" in reason(loop(), "128MiB")
    access = (Access(0, 0, 4 * MIB),)
    op = Op("add", "array", access, access, 1, MIB)
    short = [Alloc(0, 4 * MIB, "array", "a"), op, Free(0), Mark("step")]
    assert "no array outlives" in reason(Trace(short, "software"), "2MiB")
    chainer_op = op._replace(phase="forward")
    of_chainer = Trace([Alloc(0, 4 * MIB, "activation", "a"), chainer_op, Mark("step")])
    assert "without Chainer" in reason(of_chainer, "2MiB")
