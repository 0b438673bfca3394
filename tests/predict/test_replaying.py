"""A replayed trace is the run that it came from, and what must hold on any GPU holds."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import umem.chainer  # isort: skip  (before Chainer, which it makes ready)
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import traces

import umem
from umem.devices.virtual import VirtualGPU
from umem.errors import HintError, SizeError, StateError, TraceError, UnknownGpuError
from umem.predict.comparing import replayed_row, simulated_row
from umem.trace import Access, Alloc, Event, Free, Hint, Mark, Op, Trace
from umem.units import BLOCK_BYTES, MIB

BLOCK = BLOCK_BYTES


# -- programs ----------------------------------------------------------------------------------


def train(hints: bool = False) -> None:
    """Three steps of a small network whose step needs some 9 MiB."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((128, 256), dtype=np.float32)
    t = rng.integers(0, 10, 128).astype(np.int32)
    model = chainer.Sequential(
        L.Linear(256, 512), F.relu, L.Linear(512, 512), F.relu, F.dropout, L.Linear(512, 10)
    )
    optimizer = chainer.optimizers.Adam().setup(model)
    for step in range(3):
        optimizer.update(lambda: F.softmax_cross_entropy(model(x), t))
        if hints and step == 0:
            umem.preset(optimizer, "optimizer_state")
        elif hints:
            umem.prefetch(optimizer, "cpu")
            umem.prefetch(model, stream=object())


def compute(hints: bool = False) -> None:
    """Arrays, views and frees on the current device."""
    xp = umem.devices.open.current_device().xp
    a, b = xp.ones((12, MIB), "u1"), xp.asarray(np.ones((12, MIB), "u1"))
    if hints:
        umem.advise(b, "read_mostly")
        umem.advise(a[:6], "preferred_location", "cpu")
        umem.prefetch(a[2:5], "cpu")
    for _ in range(3):
        c = a + b
        c[3:5] *= 2
        a[::2] += c[1::2]
        del c
        umem.prefetch(b[4:], stream=object() if hints else None)
    a[0].sum()


def run(
    program: Callable[[bool], None], block: AbstractContextManager[Any], vram: str, hints: bool
) -> tuple[VirtualGPU, Trace]:
    np.random.seed(0)
    with umem.virtual_gpu("v100-16gb", vram) as gpu, umem.record() as recorder, block:
        program(hints)
    return gpu, recorder.trace


CASES: list[tuple[Any, Callable[[], AbstractContextManager[Any]], dict[str, Any]]] = [
    ("unmanaged", nullcontext, {"mode": "unmanaged", "vram": "256MiB"}),
    ("managed, all fits", umem.managed, {"mode": "managed", "vram": "256MiB"}),
    ("managed, tight", umem.managed, {"mode": "managed", "vram": "6MiB"}),
    ("prefetch", lambda: umem.managed(prefetch=True),
     {"mode": "managed", "vram": "6MiB", "prefetch": True}),
    ("limit", lambda: umem.managed("1GiB"), {"mode": "managed", "vram": "6MiB", "limit": "1GiB"}),
    ("hybrid", umem.hybrid, {"mode": "hybrid", "vram": "6MiB"}),
    ("hybrid that migrates", lambda: umem.hybrid("4MiB", spill="migrate"),
     {"mode": "hybrid", "vram": "6MiB", "limit": "4MiB", "spill": "migrate"}),
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("hints", [False, True], ids=["plain", "hints"])
@pytest.mark.parametrize("program", [train, compute])
@pytest.mark.parametrize(("name", "block", "arguments"), CASES, ids=lambda x: str(x)[:20])
def test_a_replay_is_the_live_run_in_every_figure(
    name: str, block: Any, arguments: dict[str, Any], program: Any, hints: bool, tmp_path: Path
) -> None:
    gpu, trace = run(program, block(), arguments["vram"], hints)
    loaded = Trace.load(trace.save(tmp_path / "x.trace"))
    for each in (trace, loaded):
        replay = umem.replay(each, "v100-16gb", **arguments)
        assert replay.fits
        assert replay.reason is None
        assert replay.figures == gpu.figures
        assert list(replay.timeline) == gpu.timeline
    assert trace.peak_bytes == gpu.figures.peak_bytes == replay.peak_bytes
    assert replay.seconds == gpu.figures.seconds
    assert replay.migrated_bytes or name not in ("managed, tight", "prefetch")
    figures = gpu.figures
    assert replay.migrated_bytes == figures.migrated_in_bytes + figures.migrated_out_bytes
    assert replay.factor == trace.peak_bytes / replay.vram_bytes
    assert (replay.simulated, replay.gpu, replay.mode) == (True, "v100-16gb", arguments["mode"])
    assert replayed_row(replay) == simulated_row(
        arguments["mode"],
        "replay",
        gpu.figures,
        gpu.timeline,
        None,
        prefetch=arguments.get("prefetch", False),
    )


def test_a_row_has_bytes_faults_and_time_of_the_same_steps() -> None:
    with umem.virtual_gpu("v100-16gb", "16MiB") as gpu, umem.managed(), umem.record() as recorder:
        held = [gpu.xp.ones(6 * MIB, "u1") for _ in range(4)]
        for _ in range(3):
            for x in held:
                x += 1
            umem.mark("step")
    replay = umem.replay(recorder.trace, "v100-16gb", "managed", "16MiB")
    row, figures = replayed_row(replay), replay.figures
    assert len(figures.step_seconds) == 3 and (figures.migrated_in_bytes or 0) > 0
    assert row.seconds == pytest.approx(sum(figures.step_seconds) / 3)
    for name in ("migrated_in_bytes", "migrated_out_bytes", "remote_bytes", "fault_count"):
        assert getattr(row, name) == round((getattr(figures, name) or 0) / 3)
    assert row.peak_bytes == figures.peak_bytes


# -- what must hold ----------------------------------------------------------------------------


def stream(arrays: int, blocks: int, passes: int) -> Trace:
    """So many arrays of whole blocks, read in order again and again."""
    events: list[Event] = [Alloc(n, blocks * BLOCK, "array", f"a{n}") for n in range(arrays)]
    for _ in range(passes):
        for n in range(arrays):
            events.append(Op("read", "array", (Access(n, 0, blocks * BLOCK),), ()))
        events.append(Mark("step"))
    return Trace(events, "model")


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
@settings(deadline=None, max_examples=40)
def test_more_vram_never_moves_more_of_a_stream(arrays: int, blocks: int, passes: int) -> None:
    trace, total = stream(arrays, blocks, passes), arrays * blocks
    moved = []
    for capacity in range(1, total + 2):
        figures = umem.replay(trace, "t4", vram=capacity * BLOCK).figures
        moved.append((figures.migrated_in_bytes, figures.migrated_out_bytes))
        missed = total * passes if capacity < total else total  # first in, first out: all or none
        assert figures.fault_count == missed
        assert figures.populated_bytes == total * BLOCK
        assert figures.migrated_in_bytes == (missed - total) * BLOCK
        assert figures.migrated_out_bytes == max(0, missed - capacity) * BLOCK
        assert figures.resident_peak_bytes == min(capacity, total) * BLOCK
        assert len(figures.step_seconds) == passes
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] == (0, 0)


@pytest.mark.thorough
@given(traces(max_bytes=5 * BLOCK).filter(len), st.integers(1, 6))
@settings(deadline=None, max_examples=60)
def test_any_trace_keeps_to_the_rules_in_any_mode(trace: Trace, capacity: int) -> None:
    vram = capacity * BLOCK
    for mode in ("unmanaged", "managed", "hybrid"):
        replay = umem.replay(trace, "rtx-3090", mode, vram, limit=None)  # type: ignore[arg-type]
        figures = replay.figures
        assert figures.resident_peak_bytes <= vram
        assert figures.peak_bytes <= trace.peak_bytes
        assert replay == umem.replay(trace, "rtx-3090", mode, vram)  # type: ignore[arg-type]
        if mode == "managed":
            assert replay.fits
        if replay.fits:
            assert figures.peak_bytes == trace.peak_bytes
            assert len(figures.step_seconds) == trace.step_count
            assert sum(figures.step_seconds) <= figures.seconds + 1e-12
            assert figures.compute_seconds + figures.stall_seconds <= figures.seconds + 1e-12
        else:
            assert replay.reason
        if mode == "unmanaged":
            assert (replay.migrated_bytes, figures.remote_bytes, figures.fault_count) == (0, 0, 0)
        seconds = [sample.seconds for sample in replay.timeline]
        assert seconds == sorted(seconds)
        assert len(seconds) <= len(trace)


@given(traces(max_bytes=3 * BLOCK))
@settings(deadline=None, max_examples=40)
def test_where_everything_fits_hybrid_is_unmanaged_and_nothing_is_copied_out(trace: Trace) -> None:
    plain = Trace([event for event in trace.events if type(event) is not Hint] + [Mark("end")])
    unmanaged = umem.replay(plain, "t4", "unmanaged")
    hybrid = umem.replay(plain, "t4", "hybrid")
    managed = umem.replay(plain, "t4")
    assert unmanaged.fits
    assert (hybrid.figures, hybrid.timeline) == (unmanaged.figures, unmanaged.timeline)
    assert managed.migrated_bytes == 0
    assert managed.seconds >= unmanaged.seconds
    ahead = umem.replay(plain, "t4", prefetch=True)
    assert ahead.figures.fault_count == 0
    assert ahead.migrated_bytes == 0


# -- advice by label ---------------------------------------------------------------------------


def test_advice_goes_to_the_tensors_whose_labels_match() -> None:
    events: list[Event] = []
    for n, label in enumerate(("Linear.W", "Linear.b", "Other.W")):
        events.append(Alloc(n, 2 * BLOCK, "parameter", label))
    uses = [Op("use", "array", (), (Access(n, 0, 2 * BLOCK),)) for n in range(3)]
    by_hand = {
        "*": (0, 1, 2),
        "Linear.*": (0, 1),
        "*.W": (0, 2),
        "linear*": (),
        "Linear.[Wx]": (0,),
    }
    for pattern, tensors in by_hand.items():
        expected: list[Event] = []
        for event in events:
            expected.append(event)
            if isinstance(event, Alloc) and event.tensor in tensors:
                whole = (Access(event.tensor, 0, event.nbytes),)
                expected.append(Hint("preferred_location", whole, "cpu"))
        written = umem.replay(Trace([*expected, *uses]), "t4").figures
        assert bool(written.remote_bytes) == bool(tensors)
        gpu = [e._replace(place=0) if isinstance(e, Hint) else e for e in expected]
        advised = umem.replay(Trace([*events, *uses]), "t4", advice={pattern: "preferred_location"})
        assert advised.figures == umem.replay(Trace([*gpu, *uses]), "t4").figures


# -- results instead of exceptions, and exceptions ---------------------------------------------


def test_what_does_not_fit_is_a_result() -> None:
    trace = stream(4, 2, 1)
    replay = umem.replay(trace, "t4", "unmanaged", 6 * BLOCK)
    assert not replay.fits
    assert replay.reason is not None
    assert "needs 4.0 MiB for 'a3' array; 12.0 MiB of 12.0 MiB of VRAM in use" in replay.reason
    assert "simulated" in replay.reason
    assert replay.peak_bytes == 6 * BLOCK
    assert len(replay.timeline) == 3
    assert umem.replay(trace, "t4", "unmanaged", 8 * BLOCK).fits


@pytest.mark.parametrize("mode", ["managed", "hybrid"])
def test_a_jetson_refuses_with_a_reason(mode: Any) -> None:
    replay = umem.replay(stream(1, 1, 1), "jetson-orin-64gb", mode)
    assert not replay.fits
    assert replay.reason is not None
    assert "nothing to oversubscribe" in replay.reason
    assert (replay.peak_bytes, replay.timeline) == (0, ())
    assert umem.replay(stream(1, 1, 1), "jetson-orin-64gb", "unmanaged").fits


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"gpu": "v101"}, UnknownGpuError, "did you mean"),
        ({"mode": "mangaed"}, StateError, "mode must be one of"),
        ({"mode": None}, StateError, "mode must be one of"),
        ({"vram": "12 parsecs"}, SizeError, "vram must be a size"),
        ({"vram": 0}, SizeError, "vram must be above zero"),
        ({"vram": True}, SizeError, "vram must be"),
        ({"vram": "1MiB"}, SizeError, "2"),
        ({"limit": "-1GiB"}, SizeError, "limit must be a size"),
        ({"limit": 0}, SizeError, "limit must be above zero"),
        ({"spill": "disk"}, StateError, "spill must be 'host' or 'migrate'; got 'disk'"),
        ({"allocator": "magic"}, StateError, "allocator must be 'caching' or 'plain'"),
        ({"advice": {"*": "hot"}}, HintError, "advice must be one of"),
        ({"advice": {"*": None}}, HintError, "advice must be one of"),
    ],
)
def test_arguments_that_make_no_sense_are_errors(arguments: Any, error: Any, text: str) -> None:
    with pytest.raises(error) as caught:
        umem.replay(stream(1, 1, 1), **{"gpu": "t4", **arguments})
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "events",
    [[Free(0)], [Op("F", "array", (Access(3, 0, 1),), ())], [Hint("discard", (Access(1, 0, 1),))]],
)
def test_a_trace_that_does_not_hold_together_is_refused(events: list[Event]) -> None:
    with pytest.raises(TraceError, match="not alive"):
        umem.replay(Trace(events), "t4")


def test_an_empty_trace_is_refused_and_one_that_holds_nothing_fits() -> None:
    for mode in ("unmanaged", "managed", "hybrid"):
        with pytest.raises(TraceError, match="the trace is empty: there is no event to replay"):
            umem.replay(Trace([]), "t4", mode)  # type: ignore[arg-type]
        replay = umem.replay(Trace([Mark("step")]), "t4", mode)  # type: ignore[arg-type]
        assert (replay.fits, replay.seconds, replay.peak_bytes) == (True, 0.0, 0)


def test_a_replay_prints_as_one_line_that_says_simulated() -> None:
    trace = stream(3, 2, 2)
    said = "<Replay on t4, managed: 5.2 ms for 2 steps, needs 12.0 MiB of 1.0 GiB; simulated>"
    assert re.sub(r"[0-9.]+ [mu]s", "5.2 ms", repr(umem.replay(trace, "t4", vram="1GiB"))) == said
    failed = repr(umem.replay(trace, "t4", "unmanaged", "6MiB"))
    assert failed == (
        "<Replay on t4, unmanaged: does not fit, needs 12.0 MiB of 6.0 MiB; simulated>"
    )


def test_a_quicker_host_is_taken_from_a_gpus_trace_and_a_wait_for_that_gpu_is_not() -> None:
    def replayed(seconds: float, backend: Literal["numpy", "cupy"]) -> float | None:
        ops: list[Event] = [Op("F", "array", (), (), host_seconds=seconds) for _ in range(3)]
        return umem.replay(Trace(ops, backend), "t4").seconds

    assert replayed(1e-6, "cupy") == pytest.approx(3e-6)
    launches = replayed(1e-6, "numpy")
    assert launches == replayed(1.0, "numpy") == replayed(1.0, "cupy")
