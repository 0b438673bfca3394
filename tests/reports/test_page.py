"""The page of a report, opened from disk in a real browser without a network."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, BrowserError, executable

from umem.reports.page.step_page import PARTS, SCRIPTS, embedded, step_page
from umem.trace import Access, Alloc, Event, Free, Mark, Op, Trace
from umem.trace.analysis import KINDS, Vram, analyse
from umem.units import format_bytes

needs_browser = pytest.mark.skipif(
    executable() is None, reason="no Chromium (Debian: apt install chromium)"
)

HOSTILE = (
    "</script><script>document.title='taken'</script>",
    "<img src=x onerror=\"document.title='taken'\">",
    "<!-- <b>&amp;</b> -->",
    "line\u2028end\u2029 'quoted' \"twice\" @data@",
    "tab\tnew\nline \x1b[31m \u202eturned",
    "half \ud800 a pair",
)


def steps(count: int = 2) -> Trace:
    """A small network of bands that are large enough to point at; the losses are collected."""
    events: list[Event] = [Alloc(0, 4000, "parameter", "W", True)]
    W = Access(0, 0, 4000)
    for n in range(count):
        h, y, g, gW, x = (10 * (n + 1) + k for k in range(5))
        whole = {h: 6000, y: 3000, g: 3000, gW: 4000, x: 2000}
        read = {tensor: Access(tensor, 0, size) for tensor, size in whole.items()}
        events += [
            Alloc(x, 2000, "input", "x", True),
            Alloc(h, 6000, "activation", "hidden", stack=("net.py:7 forward", "train.py:3 step")),
            Op("Linear", "forward", (W, read[x]), (read[h],), host_seconds=0.01),
            Alloc(y, 3000, "activation", "loss", stack=("net.py:9 forward", "train.py:3 step")),
            Op("Mean", "forward", (read[h],), (read[y],), host_seconds=0.002),
            Alloc(g, 3000, "gradient", "g"),
            Op("MeanGrad", "backward", (read[y],), (read[g],), host_seconds=0.003),
            Alloc(gW, 4000, "gradient", "gW"),
            Op("LinearGrad", "backward", (read[g], read[h]), (read[gW],), host_seconds=0.02),
            Free(g),
            Free(h),
            Op("SGD", "update", (W, read[gW]), (W,), host_seconds=0.001),
            Mark("step"),
            Free(gW),
            Free(x),
        ]
    return Trace(events, "numpy", {"model": "small"})


def page_of(trace: Trace, name: str = "small.umem.gz", vram: Vram | None = None) -> str:
    return step_page(analyse(trace), name, {"umem": "1.2.3", "written": "today"}, vram)


def written(folder: Path, trace: Trace, **more: Any) -> Path:
    path = folder / "page.html"
    path.write_text(page_of(trace, **more), encoding="ascii")
    return path


def content_of(page: str) -> Any:
    """The data in a page, as a browser would read it."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(text)


# -- without a browser -------------------------------------------------------------------------


def test_the_page_needs_no_network_and_no_other_file() -> None:
    page = page_of(steps())
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:)""", page)
    assert "http:" not in page and "https:" not in page and "@import" not in page
    assert "default-src 'none'" in page and page.isascii()


def test_names_cannot_leave_the_data() -> None:
    events: list[Event] = [Alloc(n, 8, "array", name) for n, name in enumerate(HOSTILE)]
    page = page_of(Trace(events, "numpy", {"meta </script>": "<b>"}), name="<i>.gz")
    assert page.count("</script>") == 2 and page.count("<img") == 0 and "\u2028" not in page
    assert sorted(content_of(page)["names"]) == sorted(HOSTILE)
    assert "<i>" not in page and "<b>" not in page


def test_what_is_embedded_is_what_was_there() -> None:
    value = {"<&>": [*HOSTILE, 1, 2.5, None, True]}
    text = embedded(value)
    assert json.loads(text) == value
    assert text.isascii() and not set("<>&") & set(text)


def test_the_page_carries_figures_and_where_it_comes_from() -> None:
    content = content_of(page_of(steps(), vram=Vram("t4", 40_000)))
    assert content["peak"]["peak_bytes"] == steps().peak_bytes
    assert content["vram"] == {
        "gpu": "t4",
        "vram_bytes": 40_000,
        "peak_share": steps().peak_bytes / 40_000,
    }
    assert content["provenance"] == [["umem", "1.2.3"], ["written", "today"]]
    assert len(content["tensors"]) == 11


def test_every_script_has_its_place_in_the_page() -> None:
    assert {path.stem for path in PARTS.glob("*.js")} == set(SCRIPTS)


# -- in a browser ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = Browser()
    try:
        chromium.__enter__()
    except (BrowserError, OSError) as error:  # a stub, or a machine that lacks what it needs
        pytest.skip(f"Chromium does not start: {error}")
    with contextlib.closing(chromium):
        yield chromium


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Iterator[Browser]:
    """The small network in a window; at the end no error of the page may have come up."""
    browser.open(written(tmp_path, steps(), vram=Vram("t4", 25_000)))
    yield browser
    assert browser.errors == []


def plot(page: Browser) -> tuple[float, float, float, float, float]:
    """Left, top, width, height of the bands, and the bytes that the top stands for."""
    page.run("byId('chart').scrollIntoView({block: 'center'})")
    left, top, width, height, high = page.run(
        "(r => [r.left, r.top, r.width, r.height, +byId('chart').dataset.top])"
        "(byId('bands').getBoundingClientRect())"
    )
    return left, top, width, height, high


def stacked(trace: Trace, event: int) -> list[tuple[Alloc, int, int]]:
    """What is alive after an event with the bytes below it and at its top: kinds in order, then
    age. Worked out from the events alone."""
    alive: dict[int, tuple[int, Alloc]] = {}
    for index, happened in enumerate(trace.events[: event + 1]):
        if isinstance(happened, Alloc):
            alive[happened.tensor] = (index, happened)
        elif isinstance(happened, Free):
            del alive[happened.tensor]
    ranks = {"W": 0, "x": 3, "hidden": 5, "loss": 5, "g": 7, "gW": 7}
    found, level = [], 0
    for _, alloc in sorted(alive.values(), key=lambda pair: (ranks[pair[1].label], pair[0])):
        found.append((alloc, level, level + alloc.nbytes))
        level += alloc.nbytes
    return found


@needs_browser
def test_it_opens_from_disk_and_asks_for_nothing_else(page: Browser) -> None:
    assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []
    assert len(page.requests) <= 2
    assert page.run("document.title") == "Memory of small.umem.gz"
    assert page.run("byId('cards').innerText").startswith(format_bytes(steps().peak_bytes))


@needs_browser
def test_pointing_at_a_band_shows_its_tensor(page: Browser) -> None:
    trace = steps()
    left, top, width, height, high = plot(page)
    tried = 0
    for event in range(len(trace)):
        for alloc, low, up in stacked(trace, event):
            x = left + (event + 0.5) / len(trace) * width
            y = top + height * (1 - (low + up) / 2 / high)
            page.move(x, y)
            shown = page.run(
                "[byId('tip').hidden, byId('tip').innerText, byId('readout').innerText]"
            )
            assert shown[0] is False
            assert shown[1].splitlines()[0] == alloc.label
            assert format_bytes(alloc.nbytes) in shown[1].splitlines()[1]
            birth = trace.events.index(alloc)
            assert f"alive from event {birth} to" in shown[1]
            assert shown[2].startswith(f"event {event} of {len(trace)} ")
            tried += 1
    assert tried > 100
    page.move(left + 5, top + 2)
    assert page.run("byId('tip').hidden") is True


@needs_browser
def test_a_peak_of_one_event_is_seen_among_many(browser: Browser, tmp_path: Path) -> None:
    events: list[Event] = [Alloc(0, 1000, "array", "base")]
    for n in range(1, 9000):
        size, label = (9000, "spike") if n == 6000 else (2000, "small")
        events += [Alloc(n, size, "gradient", label), Free(n)]
    browser.open(written(tmp_path, Trace(events)))
    left, top, width, height, high = plot(browser)
    x = left + 11_999 / len(events) * width
    shown = []
    for column in (-1, 0, 1):
        browser.move(int(x) + column, top + height * (1 - 9500 / high))
        shown.append(browser.run("byId('tip').hidden ? '' : byId('tip').innerText").split("\n")[0])
    assert sorted(shown) == ["", "", "spike"]


ALPHA = "byId('bands').getContext('2d').getImageData({x}, {y}, 1, 1).data[3]"


@needs_browser
def test_bands_thinner_than_a_pixel_hide_nothing_above_them(
    browser: Browser, tmp_path: Path
) -> None:
    events: list[Event] = [Alloc(n, 150, "parameter", f"W{n}", True) for n in range(200)]
    events += [Alloc(999, 100_000, "gradient", "g"), Op("F", "backward", (), ())]
    browser.open(written(tmp_path, Trace(events)))
    _, _, width, height, high = plot(browser)
    drawn = [
        browser.run(ALPHA.format(x=int(width) - 2, y=int(height * (1 - level / high))))
        for level in (5_000, 25_000, 40_000, 129_000, 131_500)
    ]
    assert drawn == [255, 255, 255, 255, 0]


@needs_browser
def test_what_was_there_before_is_no_part_of_a_step(page: Browser) -> None:
    left, top, width, height, _ = plot(page)
    page.move(left + 0.5 / len(steps()) * width, top + height - 3)
    assert "there when the recording began" in page.run("byId('readout').innerText")
    assert "from before the recording" in page.run("byId('tip').innerText")
    page.move(left + 2.5 / len(steps()) * width, top + height - 3)
    assert "step 1 \u00b7 forward \u00b7 Linear" in page.run("byId('readout').innerText")


@needs_browser
def test_a_band_says_who_made_it_and_where(page: Browser) -> None:
    left, top, width, height, high = plot(page)
    event = 3
    (_, low, up), *_ = (band for band in stacked(steps(), event) if band[0].label == "hidden")
    page.move(
        left + (event + 0.5) / len(steps()) * width, top + height * (1 - (low + up) / 2 / high)
    )
    text = page.run("byId('tip').innerText")
    assert "made by Linear, forward, step 1" in text
    assert "saved for backward" in text
    assert "net.py:7 forward" in text
    assert "last used at event 9 by LinearGrad, backward" in text


def view(page: Browser) -> tuple[float, float]:
    low, high = page.run("(d => [+d.low, +d.high])(byId('chart').dataset)")
    return low, high


@needs_browser
def test_dragging_zooms_to_what_was_dragged_over_and_a_double_click_shows_all(
    page: Browser,
) -> None:
    count = len(steps())
    left, top, width, height, _ = plot(page)
    middle = top + height / 2
    page.drag(left + 0.25 * width, middle, left + 0.75 * width)
    low, high = view(page)
    assert low == pytest.approx(0.25 * count, abs=0.2)
    assert high == pytest.approx(0.75 * count, abs=0.2)
    page.move(left + 0.5 * width, middle)
    assert page.run("byId('readout').innerText").startswith(f"event {count // 2} of")
    page.click(left + 0.5 * width, middle, count=2)
    assert view(page) == (0, count)


@needs_browser
def test_wheel_keys_and_buttons_zoom_and_move(page: Browser) -> None:
    count = len(steps())
    left, top, width, *_ = plot(page)
    page.mouse("Wheel", left + width / 4, top + 50, deltaX=0, deltaY=-60, modifiers=2)
    low, high = view(page)
    assert high - low == pytest.approx(count * 2.718281828**-0.6, rel=0.01)
    assert low + (high - low) / 4 == pytest.approx(count / 4, abs=0.2)
    page.run("byId('chart').focus()")
    page.key("0")
    assert view(page) == (0, count)
    page.key("+")
    assert view(page) == (count / 4, 3 * count / 4)
    page.key("ArrowRight")
    assert view(page) == (3 * count / 8, 7 * count / 8)
    page.run("document.querySelector('[data-do=left]').click()")
    assert view(page) == (count / 4, 3 * count / 4)
    page.run("document.querySelector('[data-do=all]').click()")
    assert view(page) == (0, count)
    page.run("document.querySelector('[data-do=peak]').click()")
    low, high = view(page)
    assert low <= analyse(steps()).peak.event <= high < count + 1 and high - low < count


@needs_browser
def test_zooming_never_leaves_the_trace(page: Browser) -> None:
    count = len(steps())
    for action in ("in",) * 12 + ("left",) * 30 + ("out",) * 3 + ("right",) * 30 + ("out",) * 20:
        page.run(f"document.querySelector('[data-do={action}]').click()")
        low, high = view(page)
        assert 0 <= low < high <= count + 1e-9
    assert view(page) == (0, count)


@needs_browser
def test_by_host_time_a_slow_operation_is_wide(page: Browser) -> None:
    page.run("byId('by-time').click()")
    left, top, width, height, _ = plot(page)
    assert view(page) == (0, pytest.approx(72_000))  # microseconds of two steps
    page.move(left + 20 / 72 * width, top + height - 3)  # 20 ms: LinearGrad ran from 15 to 35
    assert "backward \u00b7 LinearGrad" in page.run("byId('readout').innerText")
    page.move(left + 33 / 72 * width, top + height - 3)
    assert "backward \u00b7 LinearGrad" in page.run("byId('readout').innerText")


def column(page: Browser, table: str, number: int) -> list[str]:
    found: list[str] = page.run(
        f"[...document.querySelectorAll('#{table} tbody tr')].map(r => r.cells[{number}].innerText)"
    )
    return found


def sort_by(page: Browser, table: str, number: int) -> str:
    page.run(f"document.querySelectorAll('#{table} th button')[{number}].click()")
    found: str = page.run(
        f"document.querySelectorAll('#{table} th')[{number}].getAttribute('aria-sort')"
    )
    return found


@needs_browser
def test_tables_sort_both_ways(page: Browser) -> None:
    ops = analyse(steps()).ops
    by_time = [op.name for op in sorted(ops, key=lambda op: -(op.seconds or 0))]
    assert column(page, "operations", 0) == by_time
    assert sort_by(page, "operations", 3) == "ascending"
    assert column(page, "operations", 0) == by_time[::-1]
    assert sort_by(page, "operations", 0) == "ascending"
    assert column(page, "operations", 0) == sorted(by_time, key=str.lower)
    assert sort_by(page, "operations", 5) == "descending"
    assert column(page, "operations", 0)[0] == "Linear"


@needs_browser
def test_the_tensors_can_be_searched_and_lead_to_their_bands(page: Browser) -> None:
    assert len(column(page, "tensors", 0)) == 11
    page.run("byId('only-peak').click()")
    at_peak = [alloc.label for alloc, *_ in stacked(steps(), analyse(steps()).peak.event)]
    assert sorted(column(page, "tensors", 0)) == sorted(at_peak)
    page.run("byId('only-peak').click()")
    page.run("byId('find').value = 'NET.PY:7'; byId('find').dispatchEvent(new Event('input'))")
    assert column(page, "tensors", 0) == ["hidden", "hidden"]
    page.run("document.querySelector('#tensors tbody tr:last-child').click()")
    low, high = view(page)
    assert low <= 2 and 11 <= high < len(steps())
    assert page.run("document.querySelectorAll('#tensors tr.chosen').length") == 1


@needs_browser
def test_what_outlives_its_step_and_the_peak_by_kind_are_told(page: Browser) -> None:
    peak = analyse(steps()).peak
    kinds = sorted(peak.by_kind, key=lambda kind: -kind.total_bytes)
    assert column(page, "kinds", 0) == [kind.kind for kind in kinds]
    assert column(page, "kinds", 1) == [format_bytes(kind.total_bytes) for kind in kinds]
    (leak,) = analyse(steps()).leaks
    assert column(page, "outliving", 0) == ["\n".join(("loss", *leak.stack))]
    assert column(page, "outliving", 3) == ["Mean, forward"]
    assert page.run("byId('provenance').innerText").split("\n")[:2] == ["umem", "1.2.3"]


@needs_browser
def test_the_page_counts_steps_as_the_run_did(browser: Browser, tmp_path: Path) -> None:
    trace = Trace(steps(3).events, "numpy", {"steps": "2-4"})
    browser.open(written(tmp_path, trace))
    assert " steps 2-4 " in browser.run("byId('subtitle').textContent")
    assert "step 4, " in browser.run("byId('cards').innerText")
    assert column(browser, "outliving", 5) == ["2, 3"]
    assert sorted(set(column(browser, "tensors", 4))) == ["2", "3", "4"]
    left, top, width, height, _ = plot(browser)
    browser.move(left + (len(trace) - 4.5) / len(trace) * width, top + height - 3)
    assert "step 4" in browser.run("byId('readout').textContent")
    assert browser.errors == []


@needs_browser
def test_the_page_says_where_workspace_is_missing(browser: Browser, tmp_path: Path) -> None:
    browser.open(written(tmp_path, steps()))
    said = "Workspace was not measured. The real peak is higher."
    assert browser.run("byId('caveat').innerText") == said
    assert browser.run("byId('caveat').hidden") is False
    events = [e._replace(workspace_bytes=0) if isinstance(e, Op) else e for e in steps().events]
    browser.open(written(tmp_path, Trace(events)))
    assert browser.run("byId('caveat').innerText") == ""
    assert browser.run("byId('caveat').hidden") is True
    assert browser.errors == []


@needs_browser
def test_the_card_of_leaks_says_whether_there_are_any(browser: Browser, tmp_path: Path) -> None:
    def card() -> str:
        return str(browser.run("byId('cards').lastChild.innerText"))

    browser.open(written(tmp_path, steps()))
    assert card() == "2.9 KiB\noutlives its step\nusually a leak"
    browser.open(written(tmp_path, Trace([Alloc(0, 8, "input", "x", True), *[Mark("step")] * 3])))
    assert card() == "none\noutlives its step\nno sign of a leak"


@needs_browser
def test_a_place_never_breaks_in_its_line_number(browser: Browser, tmp_path: Path) -> None:
    browser.open(written(tmp_path, steps()), 400, 900)
    count = """(() => {
      const box = document.createElement('div'), found = [];
      box.style.font = '12px monospace';
      document.body.append(box);
      for (let width = 60; width < 200; width++) {
        box.style.width = width + 'px';
        box.replaceChildren(codeLine('place', '/home/of/a/user/script.py:1234567 step'));
        found.push(box.querySelector('.whole').getClientRects().length);
      }
      return Math.max(...found);
    })()"""
    assert browser.run(count) == 1
    texts = "['a.py:3 f', 'odd', 'C:\\\\x.py:12'].map((t) => codeLine('p', t).textContent)"
    assert browser.run(texts) == ["a.py:3 f", "odd", "C:\\x.py:12"]


# -- sizes, colours, names ---------------------------------------------------------------------

OUTSIDE = """[...document.querySelectorAll('body *')].filter((e) => {
  const r = e.getBoundingClientRect();
  return r.width && (r.right > innerWidth + 0.5 || r.left < -0.5);
}).map((e) => e.tagName + ' ' + e.id + ' ' + e.innerText?.slice(0, 40))"""


@needs_browser
@pytest.mark.parametrize("width", [400, 800])
def test_nothing_overflows(browser: Browser, tmp_path: Path, width: int) -> None:
    long = Alloc(77, 9000, "array", "a_very_long_name_without_any_break_" * 6)
    trace = Trace([long, *steps(3).events], "numpy", {"meta": "x" * 300})
    path = tmp_path / "page.html"
    where = {"command": "umem report " + "folder/" * 40, **trace.meta}
    text = step_page(analyse(trace), "n" * 120, where, Vram("t4", 25_000))
    path.write_text(text, encoding="ascii")
    browser.open(path, width, 900)
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run(OUTSIDE) == []
    left, top, size, height, high = plot(browser)
    for place in (0.02, 0.5, 0.98):
        browser.move(left + place * size, top + height * (1 - 2000 / high))
        assert browser.run("byId('tip').hidden") is False
        assert browser.run(OUTSIDE) == []
    assert browser.errors == []


def luminance(color: str) -> float:
    """Relative luminance of a CSS colour, as WCAG 2 defines it."""
    parts = [int(number) / 255 for number in re.findall(r"\d+", color)[:3]]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


COLORS = """(() => {
  const of = (s) => getComputedStyle(document.querySelector(s));
  const c = byId('bands'), pixel = c.getContext('2d').getImageData(2, c.height - 3, 1, 1).data;
  return {ground: of('body').backgroundColor, ink: of('h1').color, quiet: of('.quiet').color,
          panel: of('.card').backgroundColor, card: of('.card span').color,
          pixel: [...pixel].join()};
})()"""


@needs_browser
def test_dark_and_light_are_both_readable_and_change_while_open(page: Browser) -> None:
    found = {"light": page.run(COLORS)}
    page.prefer("dark")
    page.settle()
    found["dark"] = page.run(COLORS)
    for colors in found.values():
        assert contrast(colors["ground"], colors["ink"]) >= 7
        assert contrast(colors["ground"], colors["quiet"]) >= 4.5
        assert contrast(colors["panel"], colors["card"]) >= 4.5
    assert luminance(found["light"]["ground"]) > 0.8 > 0.1 > luminance(found["dark"]["ground"])
    assert found["light"]["pixel"] != found["dark"]["pixel"]


@needs_browser
def test_names_with_html_in_them_are_text(browser: Browser, tmp_path: Path) -> None:
    events: list[Event] = [Alloc(n, 1000 - n, "array", name) for n, name in enumerate(HOSTILE)]
    read = (Access(0, 0, 8),)
    events += [Op(name, "array", read, read, host_seconds=1.0) for name in HOSTILE]
    browser.open(written(tmp_path, Trace(events), name=HOSTILE[0]))
    assert browser.errors == []
    assert browser.run("document.title") == "Memory of " + HOSTILE[0]
    assert browser.run("document.querySelectorAll('img, b b, main script').length") == 0
    shown = column(browser, "tensors", 0)
    assert shown[:3] == [" ".join(name.split()) for name in HOSTILE[:3]]
    assert "\\u2028" in shown[3] and "\\u001b[31m" in shown[4] and "\\u202eturned" in shown[4]
    assert len(column(browser, "operations", 0)) == len(HOSTILE)


@pytest.mark.thorough
@needs_browser
@pytest.mark.parametrize(
    "events",
    [
        [],
        [Mark("step")],
        [Alloc(0, 0, "array", "nothing")],
        [Alloc(0, 5, "parameter", "W", True)],
        [Op("F", "forward", (), (), workspace_bytes=70)],
        [Alloc(0, 2**50, "array", "huge"), Free(0)],
    ],
)
def test_a_trace_with_hardly_anything_in_it_has_a_page(
    browser: Browser, tmp_path: Path, events: list[Event]
) -> None:
    browser.open(written(tmp_path, Trace(events)), 600, 500)
    left, top, width, height, _ = plot(browser)
    browser.move(left + width / 2, top + height - 4)
    for action in ("peak", "in", "out", "left", "right", "all"):
        browser.run(f"document.querySelector('[data-do={action}]').click()")
    assert browser.errors == []


@pytest.mark.thorough
@needs_browser
def test_small_tensors_are_folded_and_workspace_is_a_band_of_its_own(
    browser: Browser, tmp_path: Path
) -> None:
    events: list[Event] = [Alloc(0, 100_000, "parameter", "W", True)]
    events += [Alloc(n, 60, "gradient", f"g{n}") for n in range(1, 201)]
    events += [Op("Adam", "update", (), (), workspace_bytes=50_000)]
    browser.open(written(tmp_path, Trace(events)))
    left, top, width, height, high = plot(browser)
    x = left + width - 1
    for nbytes, said in (
        (50_000, "W"),
        (106_000, "small tensors: gradients"),
        (137_000, "workspace"),
    ):
        browser.move(x, top + height * (1 - nbytes / high))
        assert browser.run("byId('tip').innerText").startswith(said)
    assert format_bytes(12_000) + " together" not in browser.run("byId('tip').innerText")
    assert "200 smaller ones folded together" in browser.run("byId('tensors-note').innerText")


@pytest.mark.thorough
def test_the_kinds_of_the_page_are_those_of_the_analysis() -> None:
    content = content_of(page_of(steps()))
    assert content["kinds"] == list(KINDS)
    style = re.findall(r"--k(\d):", page_of(steps()))
    assert sorted(set(map(int, style))) == list(range(len(KINDS))) and len(style) == 2 * len(KINDS)
