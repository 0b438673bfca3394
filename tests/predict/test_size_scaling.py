"""Each size scaled: `umem.scale_each`, and `umem advise` that prints half of each."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

import umem
from tests.trace.test_scaling_axes import Terms, step, value
from umem.cli import main
from umem.errors import ScalingError, SizeError, TraceError, UnknownGpuError
from umem.predict.batches.scaled_sizes import Scaled, ScaledSizes
from umem.trace import Trace
from umem.trace.events import Access, Alloc, Event, Free, Mark, Op
from umem.units import MIB

FIXED = ("batch", "length", "width", "depth", "embedding", "precision")
WIDE: Terms = [(1000, (1, 0, 1))]
SQUARE: Terms = [(40, (0, 0, 2))]
TENSORS = [SQUARE, WIDE]
NODES = {"batch": (2, 4), "length": (1, 2), "width": (8, 16, 24)}


def peak_of(tensors: list[Terms], point: tuple[int, int, int]) -> int:
    """The peak of `test_scaling_axes.step`, worked out: all stay, the workspace is three times."""
    total = most = 0
    for terms in tensors:
        nbytes = 2 * value(terms, point)
        total += nbytes
        most = max(most, total + 3 * nbytes + 512)
    return most


def over(**nodes: tuple[int, ...]) -> Trace:
    """A recording of the step over some of batch, length and width; others are 1, 1 and 16."""
    fixed = {"batch": 1, "length": 1, "width": 16}
    points = [{}]
    for axis, sizes in nodes.items():
        points = [{**point, axis: size} for point in points for size in sizes]
    full = [{**fixed, **point} for point in points]
    traces = [step(TENSORS, (p["batch"], p["length"], p["width"])) for p in full]
    return Trace.join(traces, points)


def row(found: ScaledSizes, axis: str) -> Scaled:
    (one,) = (row for row in found.rows if row.axis == axis)
    return one


# -- figures -----------------------------------------------------------------------------------


@given(st.integers(2, 300), st.integers(2, 300))
@settings(deadline=None, max_examples=40)
def test_half_of_an_axis_takes_what_a_step_of_that_size_takes(batch: int, width: int) -> None:
    trace = over(batch=(2, 4), width=(8, 16, 24))
    found = umem.scale_each(trace, 0.5, "t4", {"batch": batch, "width": width})
    now = peak_of(TENSORS, (batch, 1, width))
    assert found.peak_bytes == now
    for axis, point in (
        ("batch", ((batch + 1) // 2, 1, width)),
        ("width", (batch, 1, (width + 1) // 2)),
    ):
        half = row(found, axis)
        assert half.peak_bytes == peak_of(TENSORS, point)
        assert half.saved_bytes == now - peak_of(TENSORS, point)
        assert half.saved_share == pytest.approx(half.saved_bytes / now)
        assert half.then == point[0 if axis == "batch" else 2]


def test_whether_it_then_fits_follows_from_the_peak() -> None:
    trace = over(batch=(2, 4), width=(8, 16, 24))
    size = {"batch": 8, "width": 2048}
    peaks = [peak_of(TENSORS, p) for p in ((8, 1, 2048), (4, 1, 2048), (8, 1, 1024))]
    vram = peaks[1] - MIB
    found = umem.scale_each(trace, 0.5, "t4", size, vram=vram)
    assert vram > 1.5 * peaks[2]  # with room for the gaps of a pool
    assert (found.fits, row(found, "batch").fits, row(found, "width").fits) == (False, False, True)
    assert found.helps
    little = umem.scale_each(trace, 0.5, "t4", size, vram=2 * MIB)
    assert not little.helps
    roomy = umem.scale_each(trace, 0.5, "t4", size)
    assert roomy.fits
    seconds = [roomy.seconds, *(row(roomy, axis).seconds or 0 for axis in ("batch", "width"))]
    assert seconds[0] > max(seconds[1:]) > 0
    assert [one.seconds for one in little.rows if one.fits is False] != []


def test_several_traces_each_over_other_axes_are_one_step() -> None:
    apart = [over(batch=(2, 4), width=(8, 16, 24)), over(batch=(2, 4))]
    found = umem.scale_each(apart, 0.5, "t4", {"batch": 8, "width": 16})
    assert found.size == {"batch": 8, "width": 16}
    assert row(found, "width").peak_bytes == peak_of(TENSORS, (8, 1, 8))
    assert row(found, "batch").peak_bytes == peak_of(TENSORS, (4, 1, 16))


def test_every_axis_has_a_row_and_those_that_were_not_recorded_say_what_to_record() -> None:
    found = umem.scale_each(over(batch=(2, 4)), 0.5, "t4")
    assert [one.axis for one in found.rows] == list(FIXED)
    assert found.size == {"batch": 4}
    for axis in ("length", "width", "embedding"):
        missing = row(found, axis).missing or ""
        (said,) = re.findall(r"sizes=(\{.*?\})", missing)
        assert set(json.loads(said.replace("(", "[").replace(")", "]"))) == {"batch", axis}
        assert row(found, axis).peak_bytes is None
    assert "--halved depth=FILE" in (row(found, "depth").missing or "")


def test_an_axis_of_ones_own_has_a_row_too() -> None:
    sizes = [{"nodes": n} for n in (2, 4)]
    trace = Trace.join([step(TENSORS, (n, 1, 16)) for n in (2, 4)], sizes)
    found = umem.scale_each(trace, 0.5, "t4", {"nodes": 10})
    assert row(found, "nodes").peak_bytes == peak_of(TENSORS, (5, 1, 16))
    assert "'nodes'" in row(found, "nodes").costs


def test_a_size_without_a_name_is_the_batch() -> None:
    trace = Trace.join([step(TENSORS, (n, 1, 16)) for n in (2, 4)], (2, 4))
    for size in (9, {"batch": 9}):
        found = umem.scale_each(trace, 0.5, "t4", size)
        assert (found.size, row(found, "batch").then) == (9, 5)
        assert row(found, "batch").peak_bytes == peak_of(TENSORS, (5, 1, 16))


def test_what_changes_the_operations_is_recorded_apart() -> None:
    deep, shallow = [WIDE] * 4, [WIDE] * 2
    traces = [
        Trace.join([step(t, (n, 1, 16)) for n in (2, 4)], [{"batch": n} for n in (2, 4)])
        for t in (deep, shallow)
    ]
    found = umem.scale_each(traces[0], 0.5, "t4", {"batch": 10}, scaled={"depth": traces[1]})
    assert row(found, "depth").peak_bytes == peak_of(shallow, (10, 1, 16))
    told = umem.scale_each(
        traces[0], 0.5, "t4", {"batch": 10, "depth": 4}, scaled={"depth": traces[1]}
    )
    assert (row(told, "depth").size, row(told, "depth").then) == (4, 2)
    wide = umem.scale_each(
        over(batch=(2, 4), width=(8, 16, 24)), 0.5, "t4", scaled={"depth": over(batch=(2, 4))},
        size={"batch": 10, "width": 16},
    )  # fmt: skip
    assert "'width' as it was recorded" in row(wide, "depth").costs


def test_the_batch_says_what_two_micro_batches_take() -> None:
    weights = Alloc(0, 4 * MIB, "parameter", "W", True)

    def train(batch: int) -> Trace:
        x, w = Access(1, 0, batch * MIB), Access(0, 0, 4 * MIB)
        gradient = Access(2, 0, 4 * MIB)
        return Trace([
            weights, Alloc(1, batch * MIB, "input", "x", True), Mark("start"),
            Op("f", "forward", (x, w), (), 1, 1, workspace_bytes=0),
            Alloc(2, 4 * MIB, "gradient", "W.grad"),
            Op("f", "backward", (x, w), (gradient,), 1, 1, workspace_bytes=0),
            Op("SGD", "update", (w, gradient), (w,), 1, 1, workspace_bytes=0),
            Free(1), Free(2), Mark("step"),
        ])  # fmt: skip

    trace = Trace.join([train(n) for n in (2, 4)], (2, 4))
    half = row(umem.scale_each(trace, 0.5, "t4", 16), "batch")
    assert half.peak_bytes == (4 + 8 + 4) * MIB
    assert half.accumulated_peak_bytes is not None and half.accumulated_seconds is not None
    assert half.accumulated_peak_bytes > half.peak_bytes  # a sum of gradients, the whole input
    assert half.line == "umem.chainer.accumulate(optimizer, micro_batch=8)"
    assert "gradient of the whole batch" in str(half)
    for name in ("BatchNormalization", "g"):

        def named(event: Event, name: str = name) -> Event:
            return event._replace(name=name) if isinstance(event, Op) else event

        other = Trace.join([train(n).map(named) for n in (2, 4)], (2, 4))
        found = row(umem.scale_each(other, 0.5, "t4", 16), "batch")
        assert (found.line is None) == (name == "BatchNormalization")
        assert found.peak_bytes == half.peak_bytes


def test_any_factor_scales_each_axis_up_or_down() -> None:
    trace, size = over(batch=(2, 4), width=(8, 16, 24)), {"batch": 10, "width": 30}
    for factor, batch, width in ((0.25, 3, 8), (1.5, 15, 45), (3, 30, 90)):
        found = umem.scale_each(trace, factor, "t4", size)
        peaks = [peak_of(TENSORS, p) for p in ((10, 1, 30), (batch, 1, 30), (10, 1, width))]
        rows = [row(found, axis) for axis in ("batch", "width")]
        assert [one.then for one in rows] == [batch, width]
        assert [one.peak_bytes for one in rows] == peaks[1:]
        assert rows[1].peak_factor == pytest.approx(peaks[2] / peaks[0])
        assert all((one.costs is None) == (factor > 1) for one in rows)
        assert "precision" not in [one.axis for one in found.rows]
    assert "width times 3: peak" in str(found)


# -- bad input ---------------------------------------------------------------------------------


def test_a_size_of_one_has_no_half() -> None:
    found = umem.scale_each(over(batch=(2, 4)), 0.5, "t4", {"batch": 1})
    assert row(found, "batch").missing == "it is 1, and stays so rounded up"
    assert row(found, "batch").peak_bytes is None


def test_a_trace_of_one_size_still_says_what_is_missing() -> None:
    found = umem.scale_each(step(TENSORS, (4, 1, 16)), 0.5, "t4")
    assert found.size is None
    assert found.peak_bytes == peak_of(TENSORS, (4, 1, 16))
    assert all(one.missing for one in found.rows)
    with pytest.raises(ScalingError, match="recorded at one size"):
        umem.scale_each(step(TENSORS, (4, 1, 16)), 0.5, "t4", 8)


def test_an_axis_that_does_not_scale_is_said_in_its_row() -> None:
    jumps = [step([[(n, (0, 0, 0))]], (1, 1, 1)) for n in (4000, 9000, 30_000)]
    found = umem.scale_each(Trace.join(jumps, (4, 8, 12)), 0.5, "t4", 12)
    assert "no line passes" in (row(found, "batch").missing or "")
    assert row(found, "batch").peak_bytes is None


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (([],), TraceError, "got none"),
        (("step.umem.gz",), TraceError, "umem.Trace.load"),
        ((Trace([]),), TraceError, "no operation"),
        ((over(batch=(2, 4)), "h9000"), UnknownGpuError, "h9000"),
        ((over(batch=(2, 4)), "t4", {"batch": 0}), SizeError, "at least 1"),
        ((over(batch=(2, 4)), "t4", {"batch": 4, "hight": 3}), SizeError, "no axis 'hight'"),
        ((over(batch=(2, 4)), "t4", 8), SizeError, "recorded along 'batch'"),
    ],
)
def test_bad_input_is_refused(arguments: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        umem.scale_each(arguments[0], 0.5, *arguments[1:])


@pytest.mark.parametrize("factor", [0, -1, 1, float("inf"), float("nan")])
def test_a_factor_that_scales_nothing_is_refused(factor: float) -> None:
    with pytest.raises(SizeError, match="above 0 and not 1"):
        umem.scale_each(over(batch=(2, 4)), factor)


@pytest.mark.parametrize(("name", "factor"), [("halve_each", "0.5"), ("double_each", "2")])
def test_the_names_that_are_gone_say_what_to_take(name: str, factor: str) -> None:
    with pytest.raises(AttributeError, match=rf"umem\.scale_each\(traces, {factor}, "):
        getattr(umem, name)


def test_traces_of_other_models_are_refused() -> None:
    other = Trace.join([step([WIDE], (n, 1, 16)) for n in (2, 4)], [{"batch": n} for n in (2, 4)])
    with pytest.raises(ScalingError, match="different models"):
        umem.scale_each([over(batch=(2, 4)), other], 0.5, "t4")


def test_traces_that_were_recorded_at_other_sizes_are_refused() -> None:
    apart = [over(batch=(2, 4), width=(8, 16, 24)), over(batch=(2, 4))]
    with pytest.raises(ScalingError, match=r"do not meet: .* MiB and .* MiB"):
        umem.scale_each(apart, 0.5, "t4", {"batch": 64, "width": 640})


def test_contradictory_halves_are_refused() -> None:
    whole, along = over(batch=(2, 4)), over(batch=(2, 4), width=(8, 16, 24))
    with pytest.raises(ScalingError, match="recorded as an axis and is given as scaled too"):
        umem.scale_each(along, 0.5, "t4", scaled={"width": whole})
    with pytest.raises(ScalingError, match="along the same axes"):
        umem.scale_each(whole, 0.5, "t4", scaled={"depth": step(TENSORS, (2, 1, 16))})
    larger = Trace.join(
        [step([WIDE] * 9, (n, 1, 64)) for n in (2, 4)], [{"batch": n} for n in (2, 4)]
    )
    with pytest.raises(ScalingError, match="swapped"):
        umem.scale_each(whole, 0.5, "t4", scaled={"depth": larger})


# -- the command -------------------------------------------------------------------------------


def run(*words: Any) -> Result:
    return CliRunner().invoke(main, ["advise", *map(str, words)])


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    traces = [over(batch=(2, 4), width=(8, 16, 24)), over(batch=(2, 4))]
    return [trace.save(tmp_path / f"{n}.umem.gz") for n, trace in enumerate(traces)]


def test_one_table_has_all_axes(files: list[Path]) -> None:
    done = run(*files, "--size", "batch=9,width=16")
    assert done.exit_code == 0, done.output
    first, now, _, head, *rows = done.output.splitlines()
    assert first.endswith("GiB of VRAM; all figures are simulated.")
    assert now.startswith("Now at batch 9, width 16: peak ")
    assert head.split() == ["halved", "now", "then", "peak", "then", "saved", "fits", "a", "step"]
    assert [line.split()[0] for line in rows[:6]] == list(FIXED)
    assert rows[0].split()[1:3] == ["9", "5"]
    assert "another model" in done.output


def test_json_says_what_is_simulated(files: list[Path]) -> None:
    done = run(files[1], "--json", "--halved", f"depth={files[1]}")
    found = json.loads(done.output)
    assert (found["simulated"], found["factor"]) == (True, 0.5)
    assert found["simulated_peak_bytes"] == peak_of(TENSORS, (4, 1, 16))
    rows = {one["axis"]: one for one in found["rows"]}
    assert rows["batch"]["simulated_peak_bytes"] == peak_of(TENSORS, (2, 1, 16))
    assert rows["batch"]["half"] == 2
    assert rows["depth"]["simulated_saved_bytes"] == 0
    assert rows["width"]["simulated_fits"] is None
    assert not {"peak_bytes", "seconds", "fits"} & rows["batch"].keys()


def test_nothing_that_helps_ends_with_status_three(files: list[Path]) -> None:
    size = "batch=6400,width=1600"
    done = run(files[0], "--vram", "2MiB", "--size", size)
    assert done.exit_code == 3
    assert "it does not fit" in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--halved", "depth"], "its name and a file"),
        (["--halved", "a=x", "--halved", "a=y"], "names an axis twice"),
        (["--halved", "depth=none.umem.gz"], "none.umem.gz"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    files: list[Path], words: list[str], said: str
) -> None:
    done = run(files[1], *words)
    assert done.exit_code in (1, 2)
    assert said in done.output


def test_files_of_one_step_recorded_apart_are_joined(tmp_path: Path) -> None:
    paths = [step(TENSORS, (n, 1, 16)).save(tmp_path / f"{n}.umem.gz") for n in (2, 4)]
    found = json.loads(run(*paths, "--sizes", "2,4", "--size", 8, "--json").output)
    assert found["simulated_peak_bytes"] == peak_of(TENSORS, (8, 1, 16))
