"""``umem report``: what it prints and writes, and what it says of what it cannot."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest
from click.testing import CliRunner, Result
from project import ROOT

from umem._common.specs import gpu_spec
from umem.cli import main
from umem.trace import Access, Alloc, Free, Mark, Op, Trace
from umem.units import MIB


def small(size: int = MIB) -> Trace:
    W, y = (Access(0, 0, 4 * MIB),), (Access(1, 0, size),)
    return Trace(
        [
            Alloc(0, 4 * MIB, "parameter", "W", True),
            Alloc(1, size, "activation", "na\u00efve <b>"),
            Op("Linear", "forward", W, y, host_seconds=0.25),
            Op("LinearGrad", "backward", W + y, (), host_seconds=0.5),
            Op("SGD", "update", W, W, host_seconds=0.125),
            Mark("step"),
            Free(1),
        ],
        "numpy",
        {"model": "small"},
    )


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return small().save(tmp_path / "run.umem.gz")


def report(*args: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["report", *map(str, args)])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def failure(*args: object, code: int = 1) -> str:
    """The one line that is said of what went wrong."""
    lines = report(*args, code=code).stderr.strip().splitlines()
    if code == 2:  # a mistake in the command line comes with how to use it
        assert lines[0].startswith("Usage: main report") and "--help" in lines[1]
        lines = lines[3:]
    assert len(lines) == 1 and lines[0].startswith("Error: ")
    return lines[0]


# -- what it shows -----------------------------------------------------------------------------


def test_without_options_the_report_goes_to_the_terminal(trace: Path) -> None:
    lines = report(trace).stdout.splitlines()
    assert lines[0] == "run.umem.gz: 7 events, 3 operations, 1 step, recorded on numpy"
    assert "Peak 5.0 MiB at event 1 of 7, step 1, forward, Linear." in lines
    assert max(map(len, lines)) <= 80


def test_json_is_json_and_nothing_else(trace: Path) -> None:
    content = json.loads(report(trace, "--json", "--gpu", "T4").stdout)
    assert content["trace"] == "run.umem.gz" and content["meta"] == {"model": "small"}
    assert content["peak"]["peak_bytes"] == 5 * MIB
    assert (
        content["vram"]["gpu"] == "t4"
        and content["vram"]["vram_bytes"] == gpu_spec("t4").usable_bytes
    )


def test_a_given_vram_goes_before_the_tables(trace: Path) -> None:
    content = json.loads(report(trace, "--json", "--gpu", "t4", "--vram", "10MiB").stdout)
    assert content["vram"] == {"gpu": "t4", "vram_bytes": 10 * MIB, "peak_share": 0.5}
    assert "That is 50.0% of the 10.0 MiB of VRAM" in report(trace, "--vram", "10MiB").stdout


def test_files_are_written_and_named_with_what_to_do_next(trace: Path) -> None:
    page, picture, events = (trace.with_name(name) for name in ("p.html", "p.PNG", "p.json"))
    pytest.importorskip("matplotlib")
    result = report(trace, "--html", page, "--png", picture, "--export", "perfetto", events)
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"Wrote {page}.") and lines[1] == f"Wrote {picture}."
    assert lines[2].startswith(f"Wrote {events}.") and "ui.perfetto.dev" in lines[2]
    assert lines[3].startswith("Next: umem report") and len(lines) == 4
    assert page.read_text().startswith("<!doctype html>") and "5.2 MiB" not in page.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(events.read_text())["traceEvents"]
    names = sorted(p.name for p in trace.parent.iterdir())
    assert names == ["p.PNG", "p.html", "p.json", "run.umem.gz"]


def test_the_next_command_runs(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trace.parent)
    lines = report("run.umem.gz", "--export", "perfetto", "p.json").stdout.splitlines()
    assert lines[-1] == "Next: umem report run.umem.gz --html run.html"
    report(*lines[-1].split()[3:])
    assert Path("run.html").exists()


def test_with_json_the_names_of_files_go_to_standard_error(trace: Path) -> None:
    result = report(trace, "--json", "--html", trace.with_name("p.html"))
    assert json.loads(result.stdout)["op_count"] == 3
    assert result.stderr.startswith("Wrote ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], ""),
        (["--vram", "10MiB"], f" --vram {10 * MIB}"),
        (["--gpu", "T4"], " --gpu t4"),
        (["--gpu", "t4", "--vram", "10MiB"], f" --gpu t4 --vram {10 * MIB}"),
    ],
)
def test_the_page_says_where_it_comes_from(trace: Path, options: list[str], said: str) -> None:
    page = trace.with_name("p.html")
    report(trace, "--html", page, *options)
    text = page.read_text().partition('id="data">')[2].partition("</script>")[0]
    found = dict(json.loads(text)["provenance"])
    assert found["command"] == f"umem report {trace} --html {page}{said}"
    assert found["recorded on"] == "numpy" and found["trace: model"] == "small"
    assert found["written"][:2] == "20" and found["umem"]


def test_two_traces_are_compared(trace: Path) -> None:
    other = small(3 * MIB).save(trace.with_name("other.umem.gz"))
    text = report(trace, other).stdout
    assert text.startswith("run.umem.gz -> other.umem.gz")
    assert "peak                5.0 MiB   7.0 MiB  +2.0 MiB" in text
    content = json.loads(report(other, trace, "--json").stdout)
    assert content["peak_bytes"]["change"] == -2 * MIB


def test_two_traces_are_compared_with_a_gpu(trace: Path) -> None:
    other = small(3 * MIB).save(trace.with_name("other.umem.gz"))
    text = report(trace, other, "--gpu", "t4", "--vram", "10MiB").stdout
    assert "share of t4's VRAM 50.0% 70.0% +20.0%" in " ".join(text.split())
    content = json.loads(report(trace, other, "--json", "--vram", "10MiB").stdout)
    assert content["vram"]["vram_bytes"] == 10 * MIB
    assert content["vram"]["peak_share"]["after"] == 0.7
    assert "no GPU named 't44'" in failure(trace, other, "--gpu", "t44")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("columns", "encoding"), [("40", "utf-8"), ("40", "ascii"), ("100", "ascii")]
)
def test_on_any_terminal(trace: Path, columns: str, encoding: str) -> None:
    environment = {
        **os.environ,
        "COLUMNS": columns,
        "PYTHONIOENCODING": encoding,
        "NO_COLOR": "1",
        "PYTHONPATH": str(ROOT),
        "TERM": "dumb",
    }
    done = subprocess.run(
        [sys.executable, "-m", "umem", "report", str(trace)],
        capture_output=True,
        check=True,
        env=environment,
    )
    text = done.stdout.decode(encoding)
    assert "\x1b" not in text and done.stderr == b""
    assert max(map(len, text.splitlines())) <= int(columns)
    assert ("na\\xefve" if encoding == "ascii" else "na\u00efve") in text
    assert text.isascii() is (encoding == "ascii")


# -- what it refuses ---------------------------------------------------------------------------


@pytest.mark.parametrize("option", [["--html"], ["--png"], ["--export", "perfetto"]])
def test_a_file_that_exists_stays_unless_forced(trace: Path, option: list[str]) -> None:
    pytest.importorskip("matplotlib")
    there = trace.with_name("there.png")
    there.write_text("mine")
    assert failure(trace, *option, there) == f"Error: {there} exists; --force overwrites it"
    assert there.read_text() == "mine"
    report(trace, *option, there, "--force")
    assert there.read_bytes() != b"mine"
    assert sorted(p.name for p in trace.parent.iterdir()) == ["run.umem.gz", "there.png"]


def test_the_trace_itself_is_never_written_over(trace: Path) -> None:
    before = trace.read_bytes()
    assert "is given twice" in failure(trace, "--html", trace, "--force", code=2)
    link = trace.with_name("link")
    link.symlink_to(trace)
    assert "is given twice" in failure(trace, "--html", link, "--force", code=2)
    assert trace.read_bytes() == before


def test_each_file_has_a_name_of_its_own(trace: Path) -> None:
    path = trace.with_name("x.png")
    assert "is given twice" in failure(trace, "--html", path, "--png", path, code=2)
    assert not path.exists()


def test_places_that_cannot_be_written(trace: Path) -> None:
    folder = trace.parent
    assert "is a folder" in failure(trace, "--html", folder, "--force")
    missing = folder / "nowhere" / "p.html"
    assert f"there is no folder {missing.parent}" in failure(trace, "--html", missing)
    assert "cannot write" in failure(trace, "--html", folder / ("n" * 260))
    assert [p.name for p in folder.iterdir()] == ["run.umem.gz"]


def test_a_failed_write_keeps_the_old_file(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = trace.with_name("p.png")
    picture.write_text("old")

    def full(analysis: Any, name: str, file: IO[bytes], *_: Any) -> None:
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("umem.reports.pictures.timeline.draw_timeline", full)
    assert "no space left on device" in failure(trace, "--png", picture, "--force")
    assert picture.read_text() == "old"
    assert sorted(p.name for p in trace.parent.iterdir()) == ["p.png", "run.umem.gz"]


def test_without_matplotlib_the_extra_is_named(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'matplotlib" in failure(trace, "--png", trace.with_name("p.png"))
    assert [p.name for p in trace.parent.iterdir()] == ["run.umem.gz"]


@pytest.mark.parametrize("name", ["x.foo", "x", "x.png.gz", ".png", "x.svg"])
def test_a_picture_has_a_name_that_says_so(
    trace: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umem.cli.report.analyse", None)  # it is refused before any work
    assert "a picture is a PNG" in failure(trace, "--png", trace.with_name(name), code=2)
    assert [p.name for p in trace.parent.iterdir()] == ["run.umem.gz"]


def test_mistakes_in_the_command_line(trace: Path) -> None:
    page = trace.with_name("p.html")
    assert "Give one trace, two traces" in failure(trace, trace, trace, code=2)
    assert "take one trace" in failure(trace, trace, "--html", page, code=2)
    assert "TRACE" in failure(code=2)
    assert "perfetto" in failure(trace, "--export", "json", "x", code=2)
    assert "no GPU named 't44'; did you mean t4 or l4?" in failure(trace, "--gpu", "t44")
    assert "--vram must be a size" in failure(trace, "--vram", "lots")
    assert "--vram must be above zero" in failure(trace, "--vram", "0")
    assert not page.exists()


def written(path: Path, *lines: Any) -> Path:
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    return path


def test_traces_that_cannot_be_read(trace: Path) -> None:
    folder = trace.parent
    assert "cannot be read as a trace" in failure(folder / "missing.gz")
    assert "cannot be read as a trace" in failure(folder)
    text = folder / "text.txt"
    text.write_text("hello")
    assert "text.txt" in failure(text)
    cut = folder / "cut.gz"
    cut.write_bytes(trace.read_bytes()[:-20])
    assert "truncated" in failure(cut)
    header = json.loads(gzip.decompress(trace.read_bytes()).splitlines()[0])
    newer = written(folder / "newer.gz", {**header, "version": header["version"] + 1}, ["end", 0])
    assert "update umem to read it" in failure(newer)
    early = written(folder / "early.gz", header, ["free", 3], ["end", 1])
    assert "line 2: tensor 3 is freed, and is not alive" in failure(early)
    assert "line 2: tensor 3 is freed" in failure(trace, early)
    assert "line 2: tensor 3 is freed" in failure(early, "--html", folder / "p.html")
    assert not (folder / "p.html").exists()


def test_traces_with_hardly_anything_in_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    empty = Trace([]).save(tmp_path / "empty.gz")
    assert "Nothing was allocated" in report(empty).stdout
    assert json.loads(report(empty, "--json").stdout)["timeline"] == []
    still = Trace([Alloc(0, 5, "array", "a")]).save(tmp_path / "still.gz")
    assert "Peak 5 B at event 0 of 1." in report(still).stdout
    for path in (empty, still):
        files = (
            "--html",
            tmp_path / "p",
            "--png",
            tmp_path / "q.png",
            "--export",
            "perfetto",
            tmp_path / "r",
        )
        report(path, *files, "--force")
        report(empty, path)
