"""A report as text, JSON, a picture and trace events: every width, every odd trace."""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from strategies import traces

from umem._common.printable import printable
from umem.errors import MissingDependencyError
from umem.reports.perfetto import perfetto
from umem.reports.pictures.timeline import draw_timeline
from umem.reports.plain_values import comparison_json, step_json
from umem.reports.text.comparison import comparison_text, signed
from umem.reports.text.lines import Column, table, wrapped
from umem.reports.text.step import step_text
from umem.trace import Access, Alloc, Event, Free, Mark, Op, Trace
from umem.trace.analysis import KINDS, Analysis, Vram, analyse, compare
from umem.units import MIB, format_bytes


def access(tensor: int, size: int = 8) -> tuple[Access, ...]:
    return (Access(tensor, 0, size),)


def training(steps: int = 3, *, timed: bool = True) -> Trace:
    """Steps whose losses are collected, with a matrix of 4 MiB."""
    events: list[Event] = [Alloc(0, 4 * MIB, "parameter", "W", True)]
    for n in range(1, steps + 1):
        seconds = 0.25 if timed else None
        events += [
            Alloc(n, MIB, "activation", "loss", stack=("train.py:5 step", "train.py:9 main")),
            Op("Mean", "forward", access(0), access(n), host_seconds=seconds),
            Alloc(100 + n, 2 * MIB, "gradient", "gW"),
            Op("MeanGrad", "backward", access(n), access(100 + n), host_seconds=seconds),
            Op("SGD", "update", access(0) + access(100 + n), access(0), host_seconds=seconds),
            Mark("step"),
            Free(100 + n),
        ]
    return Trace(events, "numpy", {"model": "small"})


def text_of(trace: Trace, width: int = 80, **more: Any) -> str:
    return "\n".join(line.plain for line in step_text(analyse(trace), "t.gz", width, **more))


# -- text --------------------------------------------------------------------------------------


def test_the_text_says_peak_kinds_operations_and_leaks() -> None:
    text = text_of(training())
    assert "t.gz: 22 events, 9 operations, 3 steps, recorded on numpy" in text
    assert "2.2 s of host time in operations, 750.0 ms a step" in text
    # W, the losses of three steps, and the gradient of the third
    assert "Peak 9.0 MiB at event 17 of 22, step 3, backward, MeanGrad, after 1.8 s." in text
    assert "No later operation uses 2.0 MiB of it, made at train.py:5 (2.0 MiB)." in text
    assert "saved for backward  3.0 MiB  33.3%        3" in text
    assert "Tensors that outlive their step: 2.0 MiB (leaks?)" in text
    assert "2.0 MiB in 2 tensors of 'loss' (saved for backward), made by Mean" in text
    assert text.endswith("    made at train.py:5 step\n    called at train.py:9 main")


NUMBERED = Trace(training().events, "numpy", {"steps": "2-4"})


def test_steps_have_the_numbers_that_they_had_in_the_run() -> None:
    text = text_of(NUMBERED)
    assert "t.gz: 22 events, 9 operations, steps 2-4, recorded on numpy" in text
    assert "Peak 9.0 MiB at event 17 of 22, step 4, backward" in text
    assert "; in steps 2, 3 made at" in " ".join(text.split())
    content = step_json(analyse(NUMBERED), "t.gz")
    assert (content["first_step"], content["peak"]["step"]) == (2, 4)
    assert content["outliving"][0]["steps"] == [2, 3]
    by_birth = sorted(content["peak"]["tensors"], key=lambda tensor: tensor["birth"])
    assert [tensor["step"] for tensor in by_birth] == [2, 2, 3, 4, 4]
    names = [event["name"] for event in perfetto(analyse(NUMBERED), "t")["traceEvents"]]
    assert [name for name in names if "end of" in name] == [f"end of step {n}" for n in (2, 3, 4)]
    one = Trace(training(1).events, "numpy", {"steps": "7"})
    assert "3 operations, step 7, recorded" in text_of(one)


@pytest.mark.parametrize("steps", ["", "0", "-3", "2-", "x", "9" * 30, "\u0662", "1-3", "2-3\n"])
def test_steps_that_a_trace_does_not_name_count_from_one(steps: str) -> None:
    text = text_of(Trace(training().events, "numpy", {"steps": steps}))
    assert "9 operations, 3 steps, recorded" in text and "22, step 3, backward" in text


def test_of_what_outlives_its_step_it_is_told_when_it_was_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = analyse(training()).leaks[0]
    when = {"earlier_count": 1, "freed_count": 2}

    def told(**more: Any) -> str:
        leak = dataclasses.replace(first, **{**when, **more})
        monkeypatch.setattr(Analysis, "leaks", [leak])
        lines = step_text(analyse(training()), "t.gz", 200)
        (line,) = (text.plain for text in lines if "of 'loss' (" in text.plain)
        return line.partition("; ")[2]

    assert told() == "in steps 1, 2; 1 made before the recording; 2 freed later"
    assert told(steps=(4,), freed_count=0) == "in step 5; 1 made before the recording"
    assert told(steps=(), freed_count=0) == "1 made before the recording"
    many = told(steps=tuple(range(20)), earlier_count=0, freed_count=0)
    assert many == "in steps 1, 2, 3, 4, 5, 6, 7, 8 and 12 more"


def test_a_peak_without_workspace_says_that_it_is_one() -> None:
    said = "Workspace was not measured. The real peak is higher."
    trace = training()
    assert text_of(trace).splitlines().count(said) == 1
    content = step_json(analyse(trace), "t.gz")
    assert (content["caveat"], content["unmeasured_op_count"]) == (said, 9)
    ops = [e._replace(workspace_bytes=8) if isinstance(e, Op) else e for e in trace.events]
    assert "not measured" not in text_of(Trace(ops))
    content = step_json(analyse(Trace(ops)), "t.gz")
    assert (content["caveat"], content["unmeasured_op_count"]) == (None, 0)


def test_a_comparison_says_which_trace_has_no_workspace() -> None:
    events = training().events
    ops = [e._replace(workspace_bytes=8) if isinstance(e, Op) else e for e in events]
    without, whole = analyse(Trace(events)), analyse(Trace(ops))
    said = "Workspace was not measured. The real peak is higher."
    for pair, expected in (
        ((without, whole), [f"a: {said}"]),
        ((whole, without), [f"b: {said}"]),
        ((without, without), [f"a: {said}", f"b: {said}"]),
        ((whole, whole), []),
    ):
        comparison = compare(*pair)
        lines = [line.plain for line in comparison_text(comparison, "a", "b", 80)]
        assert [line for line in lines if "measured" in line] == expected
        caveats = comparison_json(comparison, "a", "b")["caveats"]
        assert [*caveats] == ["before", "after"]
        assert [name for name, text in zip("ab", caveats.values(), strict=True) if text] == [
            line[0] for line in expected
        ]


def test_alike_tensors_are_one_line() -> None:
    lines = text_of(training()).splitlines()
    (line,) = (line for line in lines if line.startswith("loss"))
    assert line.split() == "loss 3 1.0 MiB 3.0 MiB saved for backward Mean, forward".split()


def test_operations_come_by_time_and_by_memory() -> None:
    text = text_of(training())
    by_time, by_memory = text.index("Operations by time"), text.index("Operations by memory")
    first = text[by_memory:].splitlines()[2]
    assert by_time < by_memory and first.split()[:2] == ["MeanGrad", "backward"]
    assert "6.0 MiB" in first and "33.3%" in first


def test_without_times_and_with_workspace() -> None:
    trace = training(timed=False)
    events = [e._replace(workspace_bytes=MIB) if isinstance(e, Op) else e for e in trace.events]
    text = text_of(Trace(events))
    assert "The trace has no times." in text and "host time" not in text
    assert "workspace" in text.split("Operations by memory")[1].splitlines()[1]


def test_the_vram_is_compared_with_the_peak() -> None:
    assert "That is 56.2% of the 16.0 MiB of VRAM of t4." in text_of(
        training(), vram=Vram("t4", 16 * MIB)
    )
    text = text_of(training(), 200, vram=Vram("t4", MIB // 2))
    assert "That is 18 times of the 512.0 KiB of VRAM of t4." in text
    assert "Corrected for CuPy" not in text, "there is nothing to correct"


@pytest.mark.parametrize("events", [[], [Mark("step")], [Op("F", "forward", (), ())]])
def test_a_trace_without_tensors_says_so(events: list[Event]) -> None:
    assert "Nothing was allocated" in text_of(Trace(events), 30).replace("\n", " ")


def test_one_step_cannot_tell_leaks() -> None:
    assert "Two recorded steps are needed to find them." in text_of(training(1))
    two = [Alloc(0, 5, "input", "x", True), Mark("step"), Mark("step")]
    assert "None found. Record one more step" in text_of(Trace(two))
    assert text_of(Trace([*two, Free(0)])).endswith("Tensors that outlive their step\nNone.")


def test_the_curve_is_as_high_as_the_bytes() -> None:
    events: list[Event] = []
    for n in range(8):  # 1/8, 2/8 ... of the peak, one column each
        events += [Alloc(n, 100, "array", "a")]
    text = text_of(Trace(events), 80, plain=True)
    rows = [line.split("|")[1] for line in text.split("Memory over")[1].splitlines()[1:9]]
    assert [row.count("#") for row in rows] == [1, 2, 3, 4, 5, 6, 7, 8]
    marks = next(line for line in text.splitlines() if line.lstrip().startswith("+"))
    assert marks.strip() == "+-------^"


ODD = Trace(
    [
        Alloc(0, 2**50, "activation", "\u6f22\u5b57\u540d" * 15, stack=("x" * 99, "a\nb")),
        Op("\x1b[31mred\x1b[0m\n\t" * 4, "forward", (), access(0), host_seconds=1e9),
        Op("\ud800 [bold]markup[/bold] $x_1$", "backward", access(0), (), host_seconds=0.0),
        *[Mark("step")] * 3,
    ]
)


@pytest.mark.thorough
@given(traces(max_events=40), st.integers(20, 130), st.booleans())
@example(ODD, 40, False)
@example(ODD, 80, True)
@example(training(), 40, True)
@settings(deadline=None, max_examples=40)
def test_no_line_is_wider_than_the_terminal(trace: Trace, width: int, plain: bool) -> None:
    analysis = analyse(trace)
    vram = Vram("t4", 12345)
    lines = [*step_text(analysis, "a name.umem.gz", width, vram=vram, plain=plain)]
    lines += comparison_text(compare(analysis, analyse(training())), "a.gz", "b" * 90, width)
    for line in lines:
        assert cell_len(line.plain) <= width, line.plain
        assert line.plain.isprintable()


def test_plain_text_is_ascii() -> None:
    assert text_of(training(), plain=True).isascii() and text_of(ODD, 60, plain=True).isascii()
    assert not text_of(training()).isascii()


# -- lines -------------------------------------------------------------------------------------


def test_a_table_leaves_out_what_matters_least() -> None:
    columns = [
        Column("name", ["a" * 30]),
        Column("kept", ["1"]),
        Column("second", ["22"], 1),
        Column("first", ["333"], 2),
    ]
    assert table(columns, 80)[0].split() == ["name", "kept", "second", "first"]
    assert table(columns, 40)[0].split() == ["name", "kept", "second", "first"]
    assert table(columns, 33)[0].split() == ["name", "kept", "second"]
    assert table(columns, 26)[0] == "name                  kept"


def test_a_name_that_has_no_room_goes_on_in_the_next_line() -> None:
    name, kept = "_SoftmaxCrossEntropyGrad_NoDoubleBackprop", Column("kept", ["1", "2"])
    lines = table([Column("name", [name, "ReLU"]), kept], 30)
    assert lines[1:] == [f"{name[:24]}     1", f"  {name[24:]}", "ReLU" + " " * 25 + "2"]
    spaced = table([Column("name", ["two words that are long", "b"]), kept], 18)
    assert spaced[1:4] == [f"{'two words':<17}1", "  that are", "  long"]
    wide = table([Column("name", ["網" * 20, "b"]), kept], 24)
    assert "".join(line.split()[0] for line in wide[1:4]) == "網" * 20
    endless = table([Column("name", ["a" * 10_000, "b"]), kept], 40)
    assert len(endless) == 1 + 4 + 1 and endless[4].endswith("..")
    assert all(cell_len(line) <= 24 for line in wide)
    assert table([Column("name", ["abcdef", "b"]), kept], 8)[1].endswith("1")


def test_an_empty_table_is_its_heading_and_a_long_word_is_broken() -> None:
    assert table([Column("name", []), Column("size", [])], 80) == ["name  size"]
    assert wrapped("x" * 25, 10) == ["x" * 10, "x" * 10, "x" * 5]


def test_what_cannot_be_printed_is_an_escape() -> None:
    assert printable("a\x1b[2J\nb\u202e\ud800") == "a\\x1b[2J\\nb\\u202e\\ud800"
    assert printable("na\u00efve \u6f22\u5b57") == "na\u00efve \u6f22\u5b57"


# -- JSON --------------------------------------------------------------------------------------


def test_the_json_has_every_figure() -> None:
    content = step_json(analyse(training()), "t.gz", Vram("t4", 18 * MIB))
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert content["peak"]["peak_bytes"] == 9 * MIB and content["vram"]["peak_share"] == 0.5
    assert (content["host_seconds"], content["host_seconds_per_step"]) == (2.25, 0.75)
    kinds = {kind["kind"]: kind["total_bytes"] for kind in content["peak"]["by_kind"]}
    assert kinds == {"parameters": 4 * MIB, "saved for backward": 3 * MIB, "gradients": 2 * MIB}
    (leak,) = content["outliving"]
    assert leak["stack"] == ["train.py:5 step", "train.py:9 main"]
    assert leak["steps"] == [1, 2] and content["peak"]["step"] == 3
    assert content["peak"]["tensors"][0]["label"] == "W"
    assert [point["event"] for point in content["timeline"]] == list(range(22))
    assert max(point["live_bytes"] for point in content["timeline"]) == 9 * MIB


def test_a_long_timeline_is_thinned_and_keeps_the_peak() -> None:
    events: list[Event] = [Alloc(0, 5, "array", "a")]
    for n in range(1, 4000):
        events += [Alloc(n, 100 + (n == 2500), "array", "a"), Free(n)]
    content = step_json(analyse(Trace(events)), "t.gz")
    assert len(content["timeline"]) == 1000
    assert max(point["live_bytes"] for point in content["timeline"]) == 106


def test_a_comparison_goes_to_json_with_signs() -> None:
    comparison = compare(analyse(training(3)), analyse(training(1)))
    content = comparison_json(comparison, "a.gz", "b.gz")
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert content["peak_bytes"] == {"before": 9 * MIB, "after": 7 * MIB, "change": -2 * MIB}
    assert content["by_kind"]["saved for backward"]["change"] == -2 * MIB
    assert content["host_seconds"]["change"] == 0


def test_a_comparison_as_text() -> None:
    other = Trace([e for e in training(1).events if not isinstance(e, Mark)])
    comparison = compare(analyse(training(3)), analyse(other))
    text = "\n".join(line.plain for line in comparison_text(comparison, "a", "b", 80))
    assert "peak               9.0 MiB   7.0 MiB  -2.0 MiB" in text
    assert "Operations that changed most (" not in text and "Operations that changed most" in text
    assert "Mean       forward      -2  -500.0 ms   -2.0 MiB" in text
    same = compare(analyse(other), analyse(other))
    text = "\n".join(line.plain for line in comparison_text(same, "a", "a", 80))
    assert "The operations are the same." in text


def test_a_comparison_with_a_gpu_says_the_share_of_its_vram() -> None:
    comparison, room = compare(analyse(training(3)), analyse(training(1))), Vram("t4", 10 * MIB)
    text = "\n".join(line.plain for line in comparison_text(comparison, "a", "b", 80, room))
    assert "share of t4's VRAM 90.0% 70.0% -20.0%" in " ".join(text.split())
    assert comparison_json(comparison, "a.gz", "b.gz", room)["vram"] == {
        "gpu": "t4",
        "vram_bytes": 10 * MIB,
        "peak_share": {"before": 0.9, "after": 0.7, "change": pytest.approx(-0.2)},
    }
    assert comparison_json(comparison, "a.gz", "b.gz")["vram"] is None


def test_two_models_with_little_in_common_are_told() -> None:
    def named(*names: str) -> Trace:
        tensor: list[Event] = [Alloc(0, 8, "array", "a")]
        return Trace([*tensor, *(Op(name, "forward", access(0), ()) for name in names)])

    def said(first: Trace, second: Trace) -> str:
        comparison = compare(analyse(first), analyse(second))
        assert comparison_json(comparison, "a", "b")["common_share"] == comparison.common_share
        lines = comparison_text(comparison, "a", "b", 200)
        return "\n".join(line.plain for line in lines)

    first = named("A", "A", "A", "B")
    assert "Only 20.0% of the operations are in both: " in said(first, named("B", "C"))
    assert "Only 0.0% of the operations" in said(first, named("C"))
    assert "in both" not in said(first, named("A", "A", "A", "C"))  # three of five
    assert "in both" not in said(first, first) and "in both" not in said(Trace([]), Trace([]))


def test_signs() -> None:
    assert [signed(n, format_bytes) for n in (-2048, 0, 3, None)] == [
        "-2.0 KiB",
        "0 B",
        "+3 B",
        "-",
    ]


# -- trace events ------------------------------------------------------------------------------


def check_trace_events(content: Any) -> None:
    """The rules of the Trace Event Format for what is used of it: the object form, complete
    events, counters, instants and metadata."""
    json.dumps(content, allow_nan=False)
    assert isinstance(content["traceEvents"], list)
    assert content["displayTimeUnit"] in ("ms", "ns")
    ends: dict[tuple[int, int], float] = defaultdict(float)
    for event in content["traceEvents"]:
        assert type(event["pid"]) is int and type(event["tid"]) is int
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            wanted = {"process_name": str, "thread_name": str, "thread_sort_index": int}
            (value,) = event["args"].values()
            assert isinstance(value, wanted[event["name"]])
            continue
        assert event["ts"] >= 0
        if event["ph"] == "X":
            track = event["pid"], event["tid"]
            assert event["dur"] >= 0 and event["ts"] >= ends[track] - 1e-6  # slices do not cross
            ends[track] = event["ts"] + event["dur"]
        elif event["ph"] == "C":
            assert event["args"] and all(type(v) in (int, float) for v in event["args"].values())
        else:
            assert event["ph"] == "i" and event["s"] in ("g", "p", "t")


@pytest.mark.thorough
@given(traces(max_events=40))
@settings(deadline=None, max_examples=40)
def test_the_export_keeps_to_the_format(trace: Trace) -> None:
    content = perfetto(analyse(trace), "t.gz")
    check_trace_events(content)
    slices = [event for event in content["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in slices] == [op.name for op in trace.ops]
    counters = [event for event in content["traceEvents"] if event["ph"] == "C"]
    highest = max((sum(event["args"].values()) for event in counters), default=0)
    assert highest == trace.peak_bytes


def test_slices_lie_on_the_tracks_of_their_phases_at_host_time() -> None:
    events = perfetto(analyse(training()), "t.gz")["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    assert [tracks[e["tid"]] for e in slices[:3]] == ["forward", "backward", "update"]
    assert [(e["ts"], e["dur"]) for e in slices[:3]] == [
        (0, 250_000),
        (250_000, 250_000),
        (500_000, 250_000),
    ]
    marks = [e for e in events if e["ph"] == "i"]
    assert [(e["name"], e["ts"]) for e in marks] == [
        (f"end of step {n}", 750_000 * n) for n in (1, 2, 3)
    ]


def test_the_counter_is_by_kind() -> None:
    events = perfetto(analyse(training(1)), "t.gz")["traceEvents"]
    counters = [(e["ts"], e["args"]) for e in events if e["ph"] == "C"]
    kinds = {"parameters": 4 * MIB, "saved for backward": MIB, "gradients": 0}
    assert counters[0] == (0, kinds)
    assert counters[1] == (250_000, {**kinds, "gradients": 2 * MIB})
    assert counters[-1] == (750_000, kinds)


def test_the_counter_has_the_workspace_of_its_own_operation_only() -> None:
    ops = [Op("F", "array", (), (), host_seconds=1.0, workspace_bytes=n) for n in (70, 0, 30)]
    events = perfetto(analyse(Trace([Alloc(0, 5, "array", "a"), *ops])), "t.gz")["traceEvents"]
    counters = [(e["ts"], e["args"]) for e in events if e["ph"] == "C"]
    expected = [(1e6 * n, {"arrays": 5, "workspace": w}) for n, w in enumerate((70, 0, 30))]
    assert counters == expected


def test_without_times_the_clock_counts_operations_and_says_so() -> None:
    content = perfetto(analyse(training(timed=False)), "t.gz")
    names = [e["args"]["name"] for e in content["traceEvents"] if e["name"] == "process_name"]
    assert names == ["umem: t.gz (sequence clock, not time)"]
    assert content["otherData"]["clock"].startswith("sequence")
    slices = [e for e in content["traceEvents"] if e["ph"] == "X"]
    assert [(e["ts"], e["dur"]) for e in slices] == [(n, 1) for n in range(9)]


# -- the picture -------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("trace", "vram"),
    [
        (training(), None),
        (training(), Vram("t4", 2**40)),
        (training(timed=False), Vram("$t4_", 12 * MIB)),
        (ODD, None),
        (ODD, Vram("$t4_", 12 * MIB)),
        (Trace([]), None),
        (Trace([]), Vram("t4", 2**40)),
        (Trace([Mark("step")]), Vram("$t4_", 12 * MIB)),
        (Trace([Op("F", "array", (), (), workspace_bytes=5)]), Vram("$t4_", 12 * MIB)),
        (Trace([Alloc(0, 0, "array", "a")]), Vram("$t4_", 12 * MIB)),
    ],
)
def test_a_picture_is_drawn_of_any_trace(tmp_path: Path, trace: Trace, vram: Vram | None) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_timeline(analyse(trace), "\u6f22 $name_{1}$ [x]", path, vram)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_the_peak_and_every_kind(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    seen: dict[str, Any] = {}
    original = figure.Figure.savefig

    def savefig(self: Any, *args: Any, **more: Any) -> None:
        seen["figure"] = self
        original(self, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figure.Figure, "savefig", savefig)
        draw_timeline(analyse(training()), "t.gz", tmp_path / "p.png", Vram("t4", 12 * MIB))
    panel = seen["figure"].axes[0]
    (point,) = [line for line in panel.lines if line.get_marker() == "o"]
    assert (list(point.get_xdata()), list(point.get_ydata())) == ([17], [9.0])
    assert len(panel.collections) == 3  # parameters, saved, gradients
    assert {text.get_text() for text in panel.texts} == {"peak 9.0 MiB", "VRAM of t4"}
    assert panel.get_ylim()[1] > 12


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'matplotlib.*plot\)$"):
        draw_timeline(analyse(training()), "x", tmp_path / "x.png")


def test_page_and_picture_have_the_same_colours() -> None:
    from umem.reports.page.step_page import PARTS
    from umem.reports.pictures.timeline import COLORS

    style = (PARTS / "style.css").read_text().split("@media")[0]
    for number, kind in enumerate(KINDS):
        assert f"--k{number}: {COLORS[kind]};" in style
