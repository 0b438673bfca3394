"""A step recorded along several axes: products and squares of them are predicted exactly."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import umem
from umem.errors import ScalingError, SizeError, TraceError
from umem.trace import Trace
from umem.trace.events import Access, Alloc, Checker, Event, Free, Mark, Op
from umem.trace.fits import along_a_tensor

AXES = ("batch", "length", "hidden")
NODES = {"batch": (2, 4), "length": (16, 32, 48), "hidden": (64, 128, 192)}
Terms = list[tuple[int, tuple[int, int, int]]]
"""Coefficients, and the powers of batch, length and hidden that each goes with."""


def value(terms: Terms, point: tuple[int, ...]) -> int:
    """What a figure is at a point, worked out without the code under test."""
    total = 0
    for coefficient, powers in terms:
        product = coefficient
        for base, power in zip(point, powers, strict=True):
            product *= base**power
        total += product
    return total


def step(tensors: list[Terms], point: tuple[int, ...], seconds: float | None = None) -> Trace:
    """A step with these tensors, each written whole and then read from its middle on."""
    events: list[Event] = []
    for number, terms in enumerate(tensors):
        nbytes = 2 * value(terms, point)
        events.append(Alloc(number, nbytes, "activation", f"t{number}"))
        write, rest = Access(number, 0, nbytes), Access(number, nbytes // 2, nbytes)
        workspace = 3 * nbytes + 512
        events.append(
            Op(f"f{number}", "forward", (), (write,), 7 * nbytes, nbytes, "stream", seconds,
               workspace)
        )  # fmt: skip
        events.append(Op(f"g{number}", "forward", (rest,), (), 1, 1, "stream", seconds, 0))
    events += [Free(number) for number in range(len(tensors))]
    checker = Checker()
    for event in events:
        checker.check(event)
    return Trace([*events, Mark("step")])


def joined(tensors: list[Terms], nodes: dict[str, tuple[int, ...]] = NODES) -> Trace:
    points = list(itertools.product(*nodes.values()))
    sizes = [dict(zip(nodes, point, strict=True)) for point in points]
    return Trace.join([step(tensors, point) for point in points], sizes)


POWERS = st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 2))
TERMS = st.lists(st.tuples(st.integers(1, 9), POWERS), min_size=1, max_size=4)
ALL: Terms = [(4, (1, 1, 1))]


@given(
    st.lists(TERMS, max_size=4),
    st.tuples(st.integers(1, 99), st.integers(1, 200), st.integers(1, 200)),  # below 64 TiB
)
@settings(deadline=None, max_examples=60)
def test_products_and_squares_of_axes_are_predicted_exactly(
    tensors: list[Terms], point: tuple[int, int, int]
) -> None:
    tensors = [*tensors, ALL]
    found = joined(tensors).at(dict(zip(AXES, point, strict=True)))
    assert found == step(tensors, point)


def test_two_sizes_of_an_axis_are_a_line_along_it() -> None:
    nodes = {"batch": (2, 4), "length": (16, 32), "hidden": (64, 128)}
    tensors: list[Terms] = [[(3, (1, 1, 1)), (5, (0, 1, 1)), (2, (1, 0, 0)), (9, (0, 0, 0))]]
    size = {"hidden": 1000, "batch": 7, "length": 300}
    assert joined(tensors, nodes).at(size) == step(tensors, (7, 300, 1000))


def test_what_was_recorded_is_given_as_it_is_and_the_largest_comes_first() -> None:
    trace = joined([ALL])
    assert trace.axes == AXES
    assert len(trace.sizes) == 18
    assert trace.events == step([ALL], (4, 48, 192)).events
    assert trace.at({"batch": 2, "length": 16, "hidden": 128}) == step([ALL], (2, 16, 128))
    assert trace.sizes[0] == {"batch": 2, "length": 16, "hidden": 64}
    assert trace.sizes[-1] == {"batch": 4, "length": 48, "hidden": 192}
    assert "batch 2, length 16, hidden 64; " in repr(trace)


def test_replays_and_choices_take_a_size_along_axes() -> None:
    trace = joined([ALL])
    size = {"batch": 8, "length": 64, "hidden": 512}
    found = umem.replay(trace, "t4", "unmanaged", size=size)
    assert found.needed_bytes == trace.at(size).peak_bytes
    assert "size batch 8, length 64, hidden 512" in repr(found)
    assert umem.choose(trace, "t4", size).to_json()["size"] == size
    assert umem.choose(trace, "t4").size == trace.sizes[-1]


def test_host_times_do_not_run_away_with_the_noise_between_the_sizes() -> None:
    points = list(itertools.product((2, 4), (16, 32, 48)))
    noisy = [0.001, 0.0011, 0.0010, 0.0010, 0.0012, 0.00101]
    recorded = [
        step([[(4, (1, 1, 0))]], (*p, 1), seconds) for p, seconds in zip(points, noisy, strict=True)
    ]
    sizes = [{"batch": batch, "length": length} for batch, length in points]
    found = Trace.join(recorded, sizes).at({"batch": 4, "length": 384})
    assert all(op.host_seconds is not None and op.host_seconds < 0.01 for op in found.ops)


def test_doubling_each_axis_says_what_grows_as_a_square() -> None:
    tensors: list[Terms] = [[(4, (1, 2, 0))], [(4, (1, 0, 1))]]
    size = {"batch": 32, "length": 256, "hidden": 512}
    result = umem.scale_each(joined(tensors), 2, "t4", size, vram="64MiB")
    found = [row for row in result.rows if row.missing is None]
    now = [value(terms, (32, 256, 512)) for terms in tensors]
    assert [(each.axis, each.then) for each in found] == [(a, 2 * n) for a, n in size.items()]
    peaks = [2 * sum(now) * 2, 2 * (4 * now[0] + now[1]), 2 * (now[0] + 2 * now[1])]
    spare = max(3 * 4 * 2 * now[0] + 512, 0)  # workspace is 3 times what an operation writes
    assert [each.peak_bytes for each in found] == pytest.approx(
        [peaks[0] + spare // 2, peaks[1] - 2 * now[1] + spare, peaks[2] + spare // 4], rel=0.01
    )
    assert [each.fits for each in found] == [each.peak_bytes <= 64 << 20 for each in found]
    assert 1 < found[0].seconds_factor < found[1].seconds_factor
    assert found[1].to_json()["simulated_peak_factor"] == found[1].peak_factor
    assert "length doubled: peak" in str(found[1])


def test_doubling_starts_from_the_largest_recorded_and_needs_sizes() -> None:
    plain = Trace.join([step([ALL], (n, 50, 50)) for n in (1, 2)], (1, 2))
    found = umem.scale_each(plain, 2, "t4").rows[0]
    assert (found.axis, found.size, found.then) == ("batch", 2, 4)
    assert str(found).startswith("batch doubled")
    assert all(row.missing for row in umem.scale_each(step([ALL], (1, 1, 1)), 2).rows)


# -- workspace ---------------------------------------------------------------------------------


def test_workspace_follows_the_tensor_that_it_is_a_line_of() -> None:
    """Buffers that stop growing: neither a line nor a parabola over the lengths."""
    points = list(itertools.product((2, 4), (16, 32, 48)))
    scores = [32 * batch * n * n for batch, n in points]
    measured = [n + min(n, 32_768) for n in scores]
    other = [100 * batch * n for batch, n in points]
    found = along_a_tensor([(other, 100 * 4 * 256), (scores, 32 * 4 * 256 * 256)], measured)
    assert found == 32 * 4 * 256 * 256 + 32_768


def test_workspace_that_no_tensor_tells_is_left_to_the_polynomials() -> None:
    assert along_a_tensor([([100, 200, 300], 1000)], [50, 9000, 10]) is None
    assert along_a_tensor([([100, 100], 100)], [50, 60]) is None
    assert along_a_tensor([], [50, 60]) is None


# -- files -------------------------------------------------------------------------------------


def test_a_trace_along_axes_is_one_file(tmp_path: Path) -> None:
    trace = joined([ALL])
    loaded = Trace.load(trace.save(tmp_path / "x"))
    assert loaded == trace
    size = {"batch": 9, "length": 10, "hidden": 11}
    assert loaded.at(size) == trace.at(size)


def test_only_axes_need_the_new_version_of_the_format(tmp_path: Path) -> None:
    def header(trace: Trace, name: str) -> Any:
        text = gzip.decompress(trace.save(tmp_path / name).read_bytes()).decode()
        return json.loads(text.splitlines()[0])

    plain = Trace.join([step([ALL], (n, 1, 1)) for n in (1, 2)], (1, 2))
    assert header(plain, "plain")["version"] == 3
    found = header(joined([ALL], {"batch": (2, 4), "length": (1, 2), "hidden": (3, 5)}), "axes")
    assert (found["version"], found["axes"]) == (4, list(AXES))
    assert found["sizes"][:2] == [[2, 1, 3], [2, 1, 5]]


@pytest.mark.parametrize(
    "change",
    [
        {"axes": ["batch"]},
        {"axes": ["batch", "batch"]},
        {"axes": ["batch", 3]},
        {"axes": "batch"},
        {"axes": ["batch", "2"]},
        {"axes": []},
        {"sizes": [[2, 1], [2, 2], [4, 1]]},
        {"sizes": [[2, 1], [2, 2], [4, 2], [4, 1]]},
        {"sizes": [[2, 1], [2, 2], [4, 1], [4, 0]]},
        {"sizes": [[2, 1], [2, 2], [4, 1], [4, "2"]]},
        {"sizes": [[2, 1], [2, 2], [2, 1], [2, 2]]},
        {"sizes": [2, 4]},
        {"sizes": []},
    ],
)
def test_axes_of_a_file_that_do_not_hold_together_are_refused(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    points = [(2, 1), (2, 2), (4, 1), (4, 2)]
    trace = Trace.join(
        [step([[(4, (1, 1, 0))]], (*p, 1)) for p in points],
        [{"batch": b, "length": n} for b, n in points],
    )
    lines = gzip.decompress(trace.save(tmp_path / "x").read_bytes()).decode().splitlines(True)
    header = {**json.loads(lines[0]), **change}
    (tmp_path / "x").write_bytes(
        gzip.compress((json.dumps(header) + "\n" + "".join(lines[1:])).encode())
    )
    with pytest.raises(TraceError, match="x"):
        Trace.load(tmp_path / "x")


# -- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (64, "recorded along 'batch' and 'length' and 'hidden': give size="),
        ({"batch": 4}, "the axis 'length' is missing"),
        ({"batch": 4, "length": 16, "hiden": 4}, "there is no axis 'hiden'"),
        ({"batch": 4, "length": 16, "hidden": 0}, "'hidden' is a whole number of at least 1"),
        ({"batch": 4, "length": 16, "hidden": -1}, "at least 1"),
        ({"batch": 4, "length": 1.5, "hidden": 4}, "'length' is a whole number"),
        ({"batch": True, "length": 1, "hidden": 4}, "'batch' is a whole number"),
        ({}, "the axis 'batch' is missing"),
        (None, "recorded along"),
    ],
)
def test_what_is_no_size_along_these_axes_is_refused(size: Any, said: str) -> None:
    with pytest.raises(SizeError, match=said):
        joined([ALL]).at(size)


def test_a_named_size_of_a_trace_without_names_is_refused() -> None:
    plain = Trace.join([step([ALL], (n, 1, 1)) for n in (1, 2)], (1, 2))
    with pytest.raises(SizeError, match="sizes without a name: give one number"):
        plain.at({"batch": 4})
    with pytest.raises(ScalingError, match="degree is for a size without a name"):
        joined([ALL]).at({"batch": 9, "length": 9, "hidden": 9}, degree=2)


@pytest.mark.parametrize(
    ("sizes", "error", "said"),
    [
        ([{"batch": 2, "length": 1}, {"batch": 4, "length": 2}], ScalingError, "a whole grid"),
        ([{"batch": 2}, {"batch": 2}], ScalingError, "a whole grid"),
        ([{"batch": 2}, 4], SizeError, "recorded along 'batch'"),
        ([{"batch": 2}, {"length": 4}], SizeError, "there is no axis 'length'"),
        ([{"batch": 0}, {"batch": 4}], SizeError, "at least 1"),
        ([{"batch": 2}], ScalingError, "two sizes at least"),
        ([{}, {}], ScalingError, "names an axis at least"),
    ],
)
def test_what_is_no_grid_is_not_joined(sizes: Any, error: Any, said: str) -> None:
    traces = [step([ALL], (n + 1, 1, 1)) for n in range(len(sizes))]
    with pytest.raises(error, match=said):
        Trace.join(traces, sizes)


def test_an_axis_on_which_nothing_depends_is_named() -> None:
    with pytest.raises(ScalingError, match="nothing of the step depends on 'length': at batch 4"):
        joined([[(4, (1, 0, 1))]])


def test_an_axis_along_which_the_step_shrinks_is_named() -> None:
    points = list(itertools.product((2, 4), (16, 32)))
    traces = [step([[(64, (1, 0, 0))]], (batch * 64 // length, 1, 1)) for batch, length in points]
    sizes = [{"batch": batch, "length": length} for batch, length in points]
    with pytest.raises(ScalingError, match="the step shrinks as 'length' grows"):
        Trace.join(traces, sizes)


@pytest.mark.parametrize(
    ("sizes", "error", "said"),
    [
        ({}, ScalingError, "name an axis"),
        ({"batch": (4,)}, ScalingError, "'batch' needs two sizes"),
        ({"batch": 4}, ScalingError, "'batch' needs two sizes"),
        ({"batch": (4, 4)}, ScalingError, "must differ"),
        ({"batch": (4, 0)}, SizeError, "at least 1"),
        ({"batch": (4, 8.5)}, SizeError, "whole number"),
        ({"batch": (1, 2, 3, 4)}, ScalingError, "has 4 sizes"),
        ({3: (1, 2)}, ScalingError, "name of an axis"),
        ({"a b": (1, 2)}, ScalingError, "name of an axis"),
    ],
)
def test_bad_axes_are_refused_before_anything_runs(sizes: Any, error: Any, said: str) -> None:
    def run(**size: int) -> None:
        pytest.fail("it ran")

    with pytest.raises(error, match=said):
        umem.record_at(run, sizes)


@pytest.mark.parametrize("sizes", [{"batch": (2, 4), "length": (16, 32)}, (2, 4)])
def test_a_step_that_does_not_take_its_sizes_is_refused_before_it_runs(sizes: Any) -> None:
    def run() -> None:
        pytest.fail("it ran")

    with pytest.raises(ScalingError, match=r"the step is called as step\(.*does not take that"):
        umem.record_at(run, sizes)
