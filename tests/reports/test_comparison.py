"""Tables and pictures of a comparison, with figures of every size and with none."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from umem.devices import Sample
from umem.errors import MissingDependencyError
from umem.predict import ModeRow, simulated_row
from umem.reports.side_by_side import draw_modes, mode_table
from umem.units import GIB, MIB


def shown(rows: list[ModeRow], simulated: bool = True) -> str:
    file = io.StringIO()
    Console(file=file, width=80).print(mode_table(rows, "a title", simulated=simulated))
    return file.getvalue()


UNKNOWN = ModeRow("hybrid", "run", True)
KNOWN = ModeRow(
    "managed",
    "replay",
    True,
    prefetch=True,
    peak_bytes=3 * GIB,
    resident_peak_bytes=512 * MIB,
    migrated_in_bytes=1536,
    migrated_out_bytes=0,
    remote_bytes=0,
    fault_count=1234567,
    seconds=0.25,
    loss=(3.456, 2.0, 1.234),
)


def test_what_a_device_cannot_know_is_a_dash_and_zero_is_zero() -> None:
    *_, line = shown([UNKNOWN]).splitlines()
    assert line.split() == ["hybrid", "run", "yes", *["-"] * 7]
    text = shown([KNOWN])
    cells = text.splitlines()[-2].split()
    assert cells[:3] == ["managed", "replay", "yes"]
    assert " ".join(cells[3:]) == "3.0 GiB 512 MiB 1.5 KiB 0 1.2 M 250.0 ms 3.46"
    assert text.splitlines()[-1].split() == ["+", "prefetch", "1.23"]


def test_only_a_model_says_simulated_in_its_headings() -> None:
    assert "(simul.)" in shown([KNOWN])
    assert "simul" not in shown([KNOWN], simulated=False)


SIZES = st.none() | st.integers(0, 2**49)


@given(
    st.sampled_from(["unmanaged", "managed", "hybrid"]),
    st.booleans(),
    st.lists(SIZES, min_size=4, max_size=4),
    st.none() | st.integers(0, 10**10),
    st.none() | st.floats(0, 864000),
    st.none() | st.lists(st.floats(0, 1e99) | st.just(float("nan")), max_size=3),
)
@example("unmanaged", False, [None, None, 1023437, 1023437], 99_950_000, None, None)
@example("unmanaged", False, [None, None, None, 1000], None, 610.0, [10.0])
@example("managed", True, [2**30 - 1, 1000 * 2**20, 1023 * 2**30, 2**49], 10**6, 0.25, [1.0])
@settings(deadline=None)
def test_a_table_never_passes_80_columns_and_loses_no_figure(
    mode: Any,
    fits: bool,
    sizes: list[int | None],
    faults: int | None,
    seconds: float | None,
    loss: list[float] | None,
) -> None:
    names = ("peak_bytes", "resident_peak_bytes", "migrated_in_bytes", "migrated_out_bytes")
    row = ModeRow(
        mode,
        "replay",
        fits,
        advice="read_mostly",
        **dict(zip(names, sizes, strict=True)),
        fault_count=faults,
        seconds=seconds,
        loss=None if loss is None else tuple(loss),
    )
    text = shown([row, KNOWN, UNKNOWN])
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    if faults is not None and faults < 10**6:
        assert f"{faults:,}" in text


def test_a_row_goes_to_json_without_its_timeline() -> None:
    row = KNOWN.to_json()
    assert row["loss"] == [3.456, 2.0, 1.234]
    assert "timeline" not in row
    assert UNKNOWN.to_json()["loss"] is None


def test_a_row_of_a_run_that_failed_has_no_time() -> None:
    import umem
    from umem.trace import Mark, Trace

    figures = umem.replay(Trace([Mark("step")] * 3), "t4").figures
    assert simulated_row("managed", "run", figures, (), None).seconds == 0.0
    assert simulated_row("managed", "run", figures, (), "full").seconds is None
    assert not simulated_row("managed", "run", figures, (), "full").fits


def rows_with_timeline(*seconds: float) -> list[ModeRow]:
    samples = tuple(Sample(s, 100 * MIB, 50 * MIB) for s in seconds)
    return [
        ModeRow("unmanaged", "run", False, timeline=samples[:1]),
        ModeRow("managed", "run", True, seconds=0.5, timeline=samples),
        UNKNOWN,
    ]


@pytest.mark.parametrize("seconds", [(0.0,), (0.0, 0.0), (0.0, 1.0, 2.5)])
def test_a_picture_is_drawn_of_the_rows_that_have_a_timeline(
    tmp_path: Path, seconds: tuple[float, ...]
) -> None:
    path = tmp_path / "x.png"
    draw_modes(rows_with_timeline(*seconds), 64 * MIB, "a $title_ with [marks]", path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Draw rows; the panels of the picture."""
    figure = pytest.importorskip("matplotlib.figure")
    saved: list[Any] = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: saved.append(self))

    def draw(*rows: ModeRow, vram_bytes: int = 64 * MIB, plain: float | None = None) -> list[Any]:
        draw_modes(rows, vram_bytes, "simulated", tmp_path / "x.png", plain)
        panels: list[Any] = saved.pop().axes
        return panels

    return draw


def words(panel: Any) -> list[str]:
    return [text.get_text() for text in panel.texts]


SLOW = ModeRow(
    "managed",
    "run",
    True,
    seconds=0.2,
    step_seconds=(1.0, 0.2),
    timeline=tuple(
        Sample(at, held * MIB, 0)
        for at, held in [(0.0, 1), (0.5, 999), (0.9, 20), (1.05, 80), (1.1, 100), (1.15, 30)]
    ),
)


def test_bars_have_one_scale_and_say_how_many_times_as_long(drawn: Callable[..., Any]) -> None:
    full = ModeRow("unmanaged", "run", False, seconds=None)
    times, _ = drawn(full, SLOW, plain=0.005)
    assert [bar.get_width() for bar in times.patches] == pytest.approx([5, 0, 200])
    assert times.get_xlabel() == "ms" and "simulated" in times.get_title(loc="left")
    names = [label.get_text() for label in times.get_yticklabels()]
    assert names == ["with all of its VRAM", "unmanaged", "managed"]
    assert words(times) == ["5.0 ms", "out of memory", "200.0 ms, 40 times as long"]


def test_memory_is_that_of_the_last_step_under_and_over_the_line_of_vram(
    drawn: Callable[..., Any],
) -> None:
    _, memory = drawn(ModeRow("unmanaged", "run", False, timeline=(Sample(0, 1, 1),)), SLOW)
    under, over = (band.get_paths()[0].get_extents() for band in memory.collections)
    assert (under.x0, under.x1) == (over.x0, over.x1) == (0, 1)
    assert (under.y1, over.y0, over.y1) == (64, 20, 100)  # 999 was in the step before
    assert "pace of managed" in memory.get_title(loc="left")
    assert sorted(words(memory)) == ["VRAM, 64.0 MiB", "peak, 100.0 MiB"]


def test_what_has_room_is_not_drawn_flat_under_a_far_line(drawn: Callable[..., Any]) -> None:
    _, memory = drawn(SLOW, vram_bytes=2 * GIB)
    assert memory.get_ylim()[1] < 130 and "VRAM, 2.0 GiB, is far above" in words(memory)


def test_a_step_that_no_mode_ends_is_drawn_until_memory_ran_out(drawn: Callable[..., Any]) -> None:
    samples = tuple(Sample(at / 10, at * 10 * MIB, 0) for at in range(6))
    times, memory = drawn(ModeRow("unmanaged", "run", False, timeline=samples))
    assert words(times) == ["out of memory"]
    assert memory.get_title(loc="left") == "Memory in unmanaged, until it ran out"
    assert [t.get_text() for t in memory.get_xticklabels()] == ["start", "out of memory"]


def test_a_picture_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        draw_modes(rows_with_timeline(0, 1), MIB, "x", tmp_path / "nowhere" / "x.png")


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'matplotlib.*plot\)$"):
        draw_modes([KNOWN], MIB, "x", tmp_path / "x.png")
