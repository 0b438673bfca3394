"""umem.choose: what fits, in which order, at what time; held against sums by hand."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from project import ROOT

import umem
from tests.predict.techniques.test_techniques import chain_of, step
from umem.devices.specs import GPUS, gpu_spec
from umem.errors import ScalingError, SizeError, TraceError, UnknownGpuError
from umem.predict.choosing import Choice, Search, choose_each
from umem.predict.techniques.registry import TECHNIQUES
from umem.reports.choice_report import choice_text, gpus_text
from umem.trace import Access, Alloc, Free, Hint, Mark, Op, Trace
from umem.units import MIB

FLOPS = 10**11
T4_SECONDS = FLOPS / (0.6 * 8.1e12)  # of an operation, at the T4's rate and the model's efficiency


def heavy(count: int, backend: str = "numpy", **fields: Any) -> Trace:
    """A chain whose operations take so long that nothing else counts."""
    events = [
        e._replace(flops=FLOPS, **fields) if isinstance(e, Op) else e for e in chain_of(count)
    ]
    return Trace([*events, Mark("step")], backend)


def named(choice: Choice, name: str) -> Any:
    (found,) = [o for o in (*choice.options, *choice.dropped) if o.name == name]
    return found


def test_where_all_fits_nothing_is_best_and_takes_what_its_operations_take() -> None:
    choice = umem.choose(heavy(10), "t4")
    assert choice.best is not None and choice.best.name == "nothing"
    assert choice.best.line is None and choice.best.exact and choice.best.fits
    assert choice.best.seconds == pytest.approx(20 * T4_SECONDS, rel=1e-3)
    assert choice.best.moved_bytes == 0
    assert choice.nearest is None
    assert {o.name for o in (*choice.options, *choice.dropped)} == {t.name for t in TECHNIQUES}


def test_a_trace_without_workspace_is_told_from_one_with_it() -> None:
    said = "Workspace was not measured: the real peak is higher."
    for trace, caveat in ((heavy(10), said), (heavy(10, workspace_bytes=0), None)):
        choice = umem.choose(trace, "t4")
        assert choice.caveat == choice.to_json()["caveat"] == caveat
        one, many = choice_text(choice, 80), gpus_text([choice], 80)
        for lines in (one, many):
            text = [line.plain for line in lines]
            assert text.count(said) == (caveat is not None)


@pytest.mark.thorough
def test_recomputation_takes_the_time_of_what_runs_again() -> None:
    trace = heavy(40)
    choice = umem.choose(trace, "t4", vram="128MiB")
    nothing, fit = named(choice, "nothing"), named(choice, "recompute to fit")
    assert not nothing.fits and nothing.seconds is None
    assert nothing.reason == "it needs 168.0 MiB, and 128.0 MiB of VRAM are usable"
    assert fit.fits and fit.peak_bytes <= 128 * MIB
    again = fit.seconds / T4_SECONDS - 80
    assert again == pytest.approx(round(again), abs=0.01) and 0 < round(again) < 40
    least = named(choice, "recompute min")
    assert least.fits and least.seconds > fit.seconds and least.peak_bytes < fit.peak_bytes


@pytest.mark.thorough
def test_what_has_no_room_in_vram_needs_host_memory() -> None:
    # 40 values and 2 gradients of 4 MiB are there at once; VRAM has 128 MiB.
    choice = umem.choose(heavy(40), "t4", vram="128MiB")
    for name in ("managed", "managed, prefetch", "hybrid"):
        assert (42 * 4 - 128) * MIB <= named(choice, name).host_bytes <= (42 * 4 - 120) * MIB
    assert named(choice, "recompute to fit").host_bytes == 0
    roomy = umem.choose(heavy(40), "t4")
    assert all(option.host_bytes == 0 for option in roomy.options)


@pytest.mark.thorough
def test_what_does_as_another_does_has_nothing_to_offer() -> None:
    choice = umem.choose(heavy(10), "t4")
    assert "it moves nothing: 'nothing' does the same" == named(choice, "managed").reason
    for name in ("hybrid", "managed", "managed, prefetch", "recompute min, managed"):
        option = named(choice, name)
        assert option in choice.dropped and option.fits and option.moved_bytes == 0
    assert "'recompute min' does the same" in named(choice, "recompute min, managed").reason
    tight = umem.choose(heavy(40), "t4", vram="128MiB")
    moving = [option.name for option in tight.options if option.moved_bytes]
    assert {"hybrid", "managed", "managed, prefetch"} <= set(moving)


def test_budgets_that_give_one_plan_give_one_line() -> None:
    choice = umem.choose(heavy(6), "t4")
    least = named(choice, "recompute min")
    assert least.fits and least.reason == "its plan is that of 'recompute 75%'"
    assert least.peak_bytes == named(choice, "recompute 75%").peak_bytes
    shown = [(o.peak_bytes, o.seconds) for o in choice.options]
    assert len(set(shown)) == len(shown)


def test_a_step_beyond_any_host_says_so_of_all_that_moves() -> None:
    choice = umem.choose(Trace([*chain_of(4, 9 << 40), Mark("step")]), "t4")
    assert choice.best is None
    for name in ("hybrid", "managed", "managed, lookahead", "recompute min, lookahead"):
        assert "no host has more than 8.0 TiB" in named(choice, name).reason


def test_the_host_is_what_limits_a_step_of_small_operations() -> None:
    # 17 + 10 us forward, 21 + 10 us backward, 10 of each; nothing for the GPU to do.
    small = [
        e._replace(flops=0, traffic_bytes=0) if isinstance(e, Op) else e for e in chain_of(10, 4096)
    ]
    best = umem.choose(Trace(small), "t4").best
    assert best is not None and best.is_host_bound and best.op_count == 20
    assert best.host_seconds == pytest.approx(10 * 27e-6 + 10 * 31e-6)
    slow = umem.choose(heavy(10), "t4").best
    assert slow is not None and not slow.is_host_bound


@pytest.mark.thorough
def test_managed_memory_moves_what_has_no_room() -> None:
    choice = umem.choose(heavy(40), "t4", vram="128MiB")
    managed = named(choice, "managed")
    assert managed.fits and managed.moved_bytes > 40 * MIB
    assert managed.seconds > 80 * T4_SECONDS
    assert managed.resident_peak_bytes <= 128 * MIB < managed.peak_bytes


def test_a_step_does_not_begin_before_the_one_before_is_over() -> None:
    # Without arithmetic a step is the host's time. Managed memory's first step takes longer,
    # because its blocks are new; that time is not there for the second to hide in.
    events = [
        e._replace(flops=0, traffic_bytes=0) if isinstance(e, Op) else e for e in chain_of(10)
    ]
    choice = umem.choose(Trace([*events, Mark("step")]), "t4")
    nothing, managed = named(choice, "nothing"), named(choice, "managed")
    assert managed.seconds == pytest.approx(nothing.seconds, rel=0.01)


@pytest.mark.thorough
def test_options_come_by_time_and_what_is_less_to_do_goes_first() -> None:
    for vram in ("64MiB", "128MiB", None):
        options = umem.choose(heavy(40), "t4", vram=vram).options
        shown = [float(f"{option.seconds:.2e}") for option in options]
        assert shown == sorted(shown)
        assert all(o.seconds_low <= o.seconds <= o.seconds_high for o in options)
    names = [option.name for option in umem.choose(heavy(10), "t4").options]
    order = [t.name for t in TECHNIQUES if t.name in names[:3]]
    assert names[:3] == order


@pytest.mark.thorough
def test_a_gpu_without_a_bus_offers_no_managed_memory_and_may_fit_nothing() -> None:
    choice = umem.choose(heavy(40), "jetson-orin-64gb", vram="16MiB")
    assert choice.best is None and choice.options == ()
    assert "shares its memory with the CPU" in named(choice, "managed").reason
    assert choice.nearest is not None
    known = [o.peak_bytes for o in choice.dropped if o.peak_bytes is not None]
    assert choice.nearest.peak_bytes == min(known)
    assert umem.choose(heavy(40), "jetson-orin-64gb").best.name == "nothing"  # type: ignore[union-attr]


def test_a_choice_prints_a_line_for_each_technique_that_fits() -> None:
    choice = umem.choose(heavy(40), "t4", vram="16MiB")
    title, *lines, caveat = str(choice).splitlines()
    assert title == "T4, 16.0 MiB of VRAM; all figures are simulated."
    assert [line.split("  ")[0] for line in lines] == [option.name for option in choice.options]
    assert caveat == choice.caveat
    nothing = str(umem.choose(heavy(40), "jetson-orin-64gb", vram="16MiB")).splitlines()[1]
    assert nothing.startswith("Nothing makes the step fit. Closest comes '")


@pytest.mark.thorough
def test_every_gpu_is_asked_and_the_shortest_step_comes_first() -> None:
    choices = choose_each(heavy(12))
    assert {choice.gpu for choice in choices} == set(GPUS)
    times = [choice.best.seconds for choice in choices if choice.best is not None]
    assert times == sorted(times)
    rates = [gpu_spec(choice.gpu).fp32_rate for choice in choices]
    assert rates == sorted(rates, reverse=True), "the work is all arithmetic"
    some = choose_each(heavy(40), ["t4", gpu_spec("jetson-orin-64gb").with_vram(16 * MIB), "h200"])
    assert [choice.gpu for choice in some] == ["h200", "t4", "jetson-orin-64gb"]
    assert some[-1].best is None


def test_how_quick_the_recording_gpu_was_is_not_in_the_choice() -> None:
    issued, waited = (umem.choose(heavy(10, "cupy", host_seconds=s), "t4") for s in (None, 0.25))
    assert issued.best is not None
    assert issued.options == waited.options


def test_a_step_is_taken_to_a_size_that_was_not_recorded() -> None:
    from umem.trace import Trace

    small, large = (Trace([*chain_of(12, size * MIB), Mark("step")]) for size in (4, 8))
    trace = Trace.join([small, large], (4, 8))
    wanted = Trace([*chain_of(12, 64 * MIB), Mark("step")])
    ours, theirs = umem.choose(trace, "t4", size=64), umem.choose(wanted, "t4")
    assert ours.size == 64 and theirs.size is None
    assert ours.options == theirs.options
    assert umem.choose(trace, "t4").size == 8 and choose_each(trace, ["t4"])[0].size == 8
    assert umem.choose(trace, "t4").options == umem.choose(large, "t4").options


@pytest.mark.thorough
def test_a_choice_among_gpus_is_the_choice_for_each() -> None:
    gpus = [
        gpu_spec(name).with_vram(size * MIB)
        for name in ("t4", "h200", "jetson-orin-64gb")
        for size in (24, 40, 52, 1024)
    ]
    together = choose_each(heavy(16), gpus)
    assert len(together) == len(gpus)
    alone = {(c.gpu, c.vram_bytes): c for c in (umem.choose(heavy(16), gpu) for gpu in gpus)}
    for choice in together:
        assert choice == alone[choice.gpu, choice.vram_bytes]


@pytest.mark.thorough
def test_whether_the_step_fits_as_it_is_comes_first_of_every_gpu() -> None:
    gpus = [gpu_spec("t4").with_vram(52 * MIB), gpu_spec("h200"), gpu_spec("l4")]
    search = Search(heavy(16), gpus)
    found = search.found()
    first = [next(found) for _ in gpus]
    assert {gpu.name for gpu, _ in first} == {"t4", "h200", "l4"}
    assert all(option.name == "nothing" for _, option in first)
    assert not any(map(search.is_done, gpus)) and search.choices() == ()
    rest = list(found)
    assert len(rest) == len(gpus) * (len(TECHNIQUES) - 1) and all(map(search.is_done, gpus))
    assert set(search.choices()) == set(choose_each(heavy(16), gpus))


def fragmented() -> Trace:
    """Arrays that come and go, each larger than the one before: no free piece serves the next."""
    events: list[Any] = [Alloc(0, 64, "input", "x", True)]
    for number in range(1, 9):
        whole = Access(number, 0, (8 + 2 * number) * MIB)
        events += [
            Alloc(number, whole.stop, "activation", "f"),
            Op("f", "forward", (Access(0, 0, 64),), (whole,), FLOPS),
            Free(number),
        ]
    return Trace([*events, Mark("step")])


def test_managed_memory_that_moves_where_plain_memory_fits_says_why_and_is_not_listed() -> None:
    choice = umem.choose(fragmented(), "t4", vram="48MiB")
    nothing, managed = named(choice, "nothing"), named(choice, "managed")
    assert nothing.fits and nothing.moved_bytes == 0
    assert managed.fits and managed.moved_bytes and managed in choice.dropped
    assert "'nothing' fits and moves nothing, and this moves" in managed.reason
    # 10 + 12 + ... + 24 MiB are reserved, for the pool never gives anything back.
    assert "136.0 MiB in all for 48.0 MiB of VRAM" in managed.reason
    assert [option.name for option in choice.options] == ["nothing"]


@pytest.mark.thorough
def test_why_more_moves_than_has_no_room_is_said() -> None:
    text = " ".join(
        line.plain for line in choice_text(umem.choose(heavy(40), "t4", vram="128MiB"), 80)
    )
    assert "have no room: what gives way is what came first" in text
    roomy = " ".join(line.plain for line in choice_text(umem.choose(heavy(10), "t4"), 80))
    assert "gives way" not in roomy


def test_what_gpus_are_compared_by_is_said() -> None:
    text = " ".join(line.plain for line in gpus_text(choose_each(heavy(4), ["t4", "h200"]), 80))
    assert "rests on datasheets: fp32 peak and memory bandwidth" in text and "TF32" in text


def test_steps_whose_shapes_vary_are_told_from_those_that_do_not() -> None:
    def steps(*sizes: int, updated: tuple[int, ...] = (900,)) -> Trace:
        events: list[Any] = [Alloc(n, 64, "parameter", "W", True) for n in set(updated)]
        for index, size in enumerate(sizes):
            number, mine = index + 1, Access(updated[index % len(updated)], 0, 64)
            whole = Access(number, 0, size)
            events += [
                Alloc(number, size, "activation", "f"),
                Op("f", "forward", (mine,), (whole,), size, size),
                Free(number),
                Op("u", "update", (mine,), (mine,)),
                Mark("step"),
            ]
        return Trace(events)

    said = "Its steps differ in shapes or operations"
    assert said in str(umem.choose(steps(4096, 8192, 4096), "t4").caveat)
    turns = steps(4096, 8192, 4096, 8192, updated=(900, 901))
    for alike in (steps(4096), steps(4096, 4096), turns):
        assert said not in str(umem.choose(alike, "t4").caveat)
    assert "pad what varies to the longest" in str(umem.choose(steps(64, 128), "t4").caveat)
    assert "umem.record_at" in str(umem.choose(steps(64, 128), "t4").caveat)


def test_bad_input_is_refused_before_anything_is_tried() -> None:
    trace = heavy(4)
    with pytest.raises(UnknownGpuError, match="did you mean"):
        umem.choose(trace, "t5")
    with pytest.raises(ScalingError, match="recorded at one size"):
        umem.choose(trace, "t4", size=64)
    with pytest.raises(SizeError, match="whole number of at least 1"):
        umem.choose(trace, "t4", size=0)
    with pytest.raises(SizeError, match="vram"):
        umem.choose(trace, "t4", vram="lots")
    with pytest.raises(TraceError, match="no operation"):
        umem.choose(Trace([]), "t4")
    with pytest.raises(UnknownGpuError):
        choose_each(trace, ["t4", "t5"])


def test_a_trace_that_does_not_hold_together_is_refused_in_words() -> None:
    op = Op("f", "forward", (Access(0, 0, 64),), ())
    for events in ([op], [Free(3), op], [Alloc(0, 64, "array", "a"), Free(0), op]):
        with pytest.raises(TraceError, match="tensor"):
            umem.choose(Trace(events), "t4")
    with pytest.raises(SizeError, match="at least one block"):
        choose_each(heavy(40), [gpu_spec("h200"), gpu_spec("t4").with_vram(MIB)])


def test_what_ran_before_the_start_finds_what_it_needs() -> None:
    whole = Access(0, 0, 64)
    for kind in ("array", "state", "gradient", "parameter"):
        for early in (Op("f", "array", (whole,), ()), Hint("prefetch", (whole,), 0)):
            events = [
                Alloc(0, 64, kind, "a", True),
                early,
                Mark("start"),
                Alloc(1, 64, "array", "b"),
                Op("g", "forward", (), (Access(1, 0, 64),)),
            ]
            assert umem.choose(Trace([*events, Mark("step")]), "t4").best is not None


def test_figures_as_large_as_events_hold_are_no_more_than_does_not_fit() -> None:
    most = (1 << 63) - 1

    def with_all(**fields: int) -> Trace:
        return Trace([e._replace(**fields) if isinstance(e, Op) else e for e in heavy(6).events])

    for fields in ({"flops": most}, {"traffic_bytes": most}):
        choice = umem.choose(with_all(**fields), "t4")
        assert choice.options or choice.dropped
    with pytest.raises(TraceError, match="no trace has more than"):
        umem.choose(with_all(workspace_bytes=most), "t4")


def test_a_trace_without_backward_has_nothing_to_run_again() -> None:
    choice = umem.choose(Trace(step(backward=False)), "t4")
    assert choice.best is not None and choice.best.name == "nothing"
    recompute = [option for option in choice.dropped if "recompute" in option.name]
    assert len(recompute) == sum("recompute" in t.name for t in TECHNIQUES)
    for option in recompute:
        said = ("no backward", "everything kept", "no convolution")
        assert any(words in option.reason for words in said)


@pytest.mark.thorough
def test_json_says_of_every_figure_that_it_is_simulated() -> None:
    content = umem.choose(heavy(40), "t4", vram="128MiB").to_json()
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert content["simulated"] is True and content["options"] and content["dropped"]
    for option in (*content["options"], *content["dropped"]):
        plain = {"name", "exact", "tolerance", "line", "reason"}
        assert all(key in plain or key.startswith("simulated_") for key in option)


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("chainer") is None, reason="Chainer is not installed")
def test_the_code_of_its_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs" / "choosing.md"
    _, code, *_ = page.read_text(encoding="utf-8").split("```python\n")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code.partition("```")[0], names)
    assert names["choice"].best.name != "nothing" and names["choice"].dropped
    assert Trace.load("step.umem.gz").sizes == (4, 8)
