"""``umem choose``: what it prints at any width, writes and refuses."""

from __future__ import annotations

import ast
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.cells import cell_len

from tests.predict.techniques.test_techniques import chain_of
from umem.cli import main
from umem.devices.specs import GPUS
from umem.predict.choosing import choose, choose_each
from umem.predict.techniques import prefetching
from umem.predict.techniques.registry import TECHNIQUES
from umem.reports.choice_report import choice_text, gpus_text
from umem.reports.text.lines import code_lines
from umem.trace import Mark, Op, Trace
from umem.units import GIB, MIB


def trace(nbytes: int = 12 * MIB, count: int = 12) -> Trace:
    return Trace([*chain_of(count, nbytes), Mark("step")])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return trace().save(tmp_path / "step.umem.gz")


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """For questions that are asked of every GPU."""
    return trace(count=4).save(tmp_path / "short.umem.gz")


def run(*args: Any, width: int = 80, **env: str) -> Result:
    variables = {"COLUMNS": str(width), "NO_COLOR": "1", **env}
    return CliRunner(env=variables).invoke(main, ["choose", *map(str, args)])


def refused(*args: Any) -> str:
    done = run(*args)
    assert done.exit_code != 0 and "Traceback" not in done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return " ".join(done.output.split())


# -- what it prints ----------------------------------------------------------------------------


@pytest.mark.thorough
def test_it_prints_what_fits_and_the_code(path: Path) -> None:
    done = run(path, "--gpu", "t4", "--vram", "128MiB")
    assert done.exit_code == 0
    assert "All figures are simulated" in " ".join(done.output.split())
    lines = done.output.splitlines()
    wanted = choose(trace(), "t4", vram="128MiB")
    start = next(n for n, line in enumerate(lines) if "# technique" in line)
    rows = [line for line in lines[start:] if line.split()[:1] and line.split()[0].isdigit()]
    for number, option in enumerate(wanted.options, 1):  # long names go on in the next line
        assert rows[number - 1].split()[0] == str(number)
        assert option.name.split(",")[0] in rows[number - 1]
    assert 'with umem.chainer.Recompute("card"):' in done.output
    assert "more do not fit" in done.output and "it needs 168.0 MiB" not in done.output
    assert f"umem choose {path} --all-gpus" in done.output


@pytest.mark.thorough
def test_all_says_why_the_others_do_not(path: Path) -> None:
    done = run(path, "--vram", "128MiB", "--all")
    assert "nothing:\n   it needs 168.0 MiB, and 128.0 MiB of VRAM are usable\n" in done.output


@pytest.mark.thorough
@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("vram", ["48MiB", "128MiB", None])
def test_no_line_is_wider_than_the_terminal(width: int, vram: str | None) -> None:
    choice = choose(trace(), "t4", vram=vram)
    for every in (False, True):
        lines = [line.plain for line in choice_text(choice, width, every=every)]
        assert max(map(cell_len, lines)) <= width
    choices = choose_each(trace(30 * GIB, 6), ["t4", "jetson-orin-64gb", "h200"])
    lines = [line.plain for line in gpus_text(choices, width)]
    assert max(map(cell_len, lines)) <= width


@pytest.mark.thorough
def test_code_that_is_broken_over_lines_is_still_code() -> None:
    choice = choose(trace(), "t4", vram="48MiB")
    lines = [line.plain for line in choice_text(choice, 40)]
    start = lines.index("To turn it on") + 1
    text = "\n".join(line[3:] for line in lines[start : start + 40])
    begin = text.index("with (")
    broken = text[begin : text.index("\n):\n", begin) + 3]
    compile(broken + "\n    pass", "choice", "exec")
    assert "LookaheadPrefetch" in text


@pytest.mark.parametrize("width", [40, 50, 60, 80])
def test_a_body_and_a_comment_stay_code_at_any_width(width: int) -> None:
    advice = 'with umem.managed(): umem.preset(arrays, "streaming")  # 8 arrays: a.py:12 (32.0 MiB)'
    for line in (prefetching.LOOP_LINE, advice):
        lines = code_lines(" 1 ", line, width)
        assert max(map(cell_len, lines)) <= width
        text = "\n".join(part[3:] for part in lines)
        assert ast.unparse(ast.parse(text)) == ast.unparse(ast.parse(line)) and "# " in text


@pytest.mark.thorough
def test_a_step_that_fits_nowhere_has_its_nearest(tmp_path: Path) -> None:
    path = trace(4 * MIB, 40).save(tmp_path / "long.umem.gz")
    done = run(path, "--gpu", "jetson-orin-64gb", "--vram", "16MiB")
    said = " ".join(done.output.split())
    assert done.exit_code == 3
    assert "Nothing makes the step fit a Jetson AGX Orin 64 GB" in said and "(simulated)" in said
    assert "Closest comes 'recompute min': it needs 44.0 MiB" in said


@pytest.fixture(scope="module")
def every_gpu(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What is said of every GPU, of a step that is too large for some."""
    path = trace(30 * GIB, 6).save(tmp_path_factory.mktemp("every") / "large.umem.gz")
    done = run(path, "--all-gpus", width=100)
    assert done.exit_code == 0
    return done.output


@pytest.mark.thorough
def test_every_gpu_is_listed_and_those_that_cannot_say_why(every_gpu: str) -> None:
    table = every_gpu[every_gpu.index("Which GPU runs the step") :]
    head, _, cannot = table.partition("Cannot run it")
    assert "All figures are simulated" in head
    assert "jetson-orin-64gb" in cannot and "jetson" not in head
    assert all(name in head for name in GPUS if not name.startswith("jetson"))
    assert "--gpu NAME" in every_gpu


def test_output_that_is_no_terminal_has_no_colour(path: Path) -> None:
    assert "\x1b" not in run(path, NO_COLOR="").output


@pytest.mark.thorough
def test_json_is_what_python_gives(path: Path, short: Path) -> None:
    done = run(path, "--vram", "128MiB", "--json")
    assert json.loads(done.output) == choose(trace(), "t4", vram="128MiB").to_json()
    every = json.loads(run(short, "--all-gpus", "--json").output)
    assert every["simulated"] is True and len(every["gpus"]) == len(GPUS)
    assert all(each["simulated"] is True for each in every["gpus"])


@pytest.mark.thorough
def test_two_traces_are_joined_and_taken_to_a_size(tmp_path: Path) -> None:
    small = trace(4 * MIB).save(tmp_path / "a.umem.gz")
    large = trace(8 * MIB).save(tmp_path / "b.umem.gz")
    done = run(small, large, "--sizes", "4,8", "--size", "64", "--json")
    found = json.loads(done.output)
    assert found["size"] == 64
    assert found["options"] == choose(trace(64 * MIB), "t4").to_json()["options"]
    assert "at size 64" in run(small, large, "--sizes", "4,8", "--size", 64).output


def test_a_trace_of_two_sizes_says_which_one_is_taken(tmp_path: Path) -> None:
    joined = Trace.join([trace(4 * MIB, 6), trace(8 * MIB, 6)], (4, 8))
    path = joined.save(tmp_path / "joined.umem.gz")
    done = run(path)
    assert "at size 8, shortest" in " ".join(done.output.split())
    assert "This is size 8, the largest recorded; --size N" in done.output
    assert "the largest recorded" not in run(path, "--size", 4).output
    assert json.loads(run(path, "--json").output)["size"] == 8
    assert [c.size for c in choose_each(joined, ["t4"])] == [8]
    assert choose(joined, "t4").options == choose(joined, "t4", size=8).options


@pytest.mark.thorough
def test_columns_are_explained_and_those_left_out_are_named(path: Path) -> None:
    wide, narrow = (run(path, "--vram", "128MiB", width=width).output for width in (120, 40))
    for title in ("range: ", "peak: ", "host: ", "moved: "):
        assert title in wide
    assert "A wider terminal" not in wide
    head = next(line for line in narrow.splitlines() if "technique" in line)
    said = " ".join(narrow.split())
    assert "peak" in head and "peak: what" in said and "moved: " not in said
    assert "A wider terminal also shows range, host, moved; --json has all." in said


def test_a_range_names_a_unit_once_where_it_is_one() -> None:
    plain = choose(trace(), "t4").options[0]
    ends = [(0.0342, 0.0458), (0.9e-3, 0.0012), (125.0, 125.0), (125.0, 185.0)]
    options = [replace(plain, seconds_low=low, seconds_high=high) for low, high in ends]
    choice = replace(choose(trace(), "t4"), options=tuple(options))
    shown = "\n".join(line.plain for line in choice_text(choice, 100))
    minutes = ("2 min 5 s - 2 min 5 s", "2 min 5 s - 3 min 5 s")
    for wanted in ("34.2 - 45.8 ms", "900.0 us - 1.2 ms", *minutes):
        assert f"  {wanted}" in shown


def test_the_host_is_named_where_it_limits(tmp_path: Path) -> None:
    # 17 + 10 us forward, 21 + 10 backward: 29 in the middle. Arithmetic is quick, or slow.
    quick = trace(4096, 6).save(tmp_path / "quick.umem.gz")
    said = "limited by the host: the host needs about 29.0 us to issue an operation"
    assert f"'nothing' is {said}" in " ".join(run(quick).output.split())
    assert f"All are {said}" in " ".join(run(quick, "--all-gpus", width=200).output.split())
    events = [e._replace(flops=10**11) if isinstance(e, Op) else e for e in trace(4096, 6).events]
    slow = Trace(events).save(tmp_path / "slow.umem.gz")
    assert "limited by the host" not in run(slow, "--all-gpus").output


def stopping(count: int) -> list[Any]:
    """The techniques, of which one is interrupted after so many were tried."""
    left = iter(range(count))

    def prepare(technique: Any, *args: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return technique.prepare(*args)

    return [replace(each, prepare=partial(prepare, each)) for each in TECHNIQUES]


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_ctrl_c_ends_it_without_a_traceback(
    form: tuple[str, ...], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umem.predict.choosing.TECHNIQUES", stopping(3))
    done = run(path, "--vram", "128MiB", *form)
    assert done.exit_code == 130 and "Traceback" not in done.output
    assert "Interrupted." in done.stderr and done.stdout == ""


@pytest.mark.thorough
def test_ctrl_c_of_a_running_command_ends_it(tmp_path: Path) -> None:
    path = trace(4 * MIB, 6000).save(tmp_path / "long.umem.gz")  # much longer than a signal takes
    code = (  # what a shell starts in the background is born with Ctrl-C ignored, tests too
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import umem.cli.choose; print(flush=True)\n"
        "import umem.cli; umem.cli.main(prog_name='umem')"
    )
    command = [sys.executable, "-c", code, "choose", str(path), "--all-gpus"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None and started.stderr is not None
        started.stdout.readline()
        time.sleep(1)  # into the search
        started.send_signal(signal.SIGINT)
        rest, said = started.stdout.read(), started.stderr.read()
    assert "Traceback" not in said and "Interrupted" in said
    assert started.returncode == 130, (rest, said)


@pytest.mark.parametrize("which", [(), ("--all-gpus",)])
def test_where_nothing_fits_there_is_another_status(
    which: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umem.cli.choose.GPUS", ["jetson-orin-64gb"])
    path = trace(30 * GIB, 6).save(tmp_path / "large.umem.gz")
    args = which or ("--gpu", "jetson-orin-64gb")
    assert run(path, *args).exit_code == run(path, *args, "--json").exit_code == 3
    assert "status is 3 where nothing" in " ".join(run("--help").output.split())


# -- what it refuses ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--batch"], "umem batch TRACE..."),
        (["--batch", "--effective", "64"], "umem batch TRACE..."),
        (["--effective", "64"], "umem choose TRACE... --size N"),
        (["--maximum", "64"], "umem batch TRACE... --maximum N"),
        (["--margin=0.1"], "umem batch TRACE... --margin SHARE"),
        (["--advise"], "umem advise TRACE..."),
        (["--halved", "depth=x"], "umem advise TRACE... --halved AXIS=FILE"),
        (["--png", "x.png"], "umem choose TRACE... --json, which has every figure"),
    ],
)
def test_an_option_that_went_names_its_successor(path: Path, words: list[str], line: str) -> None:
    done = run(path, *words)
    name = words[0].partition("=")[0]
    assert done.exit_code == 2 and f"choose has no {name} any more; run {line}" in done.output


def test_bad_options_are_refused(path: Path) -> None:
    assert "no GPU named 't5'" in refused(path, "--gpu", "t5")
    assert "no GPU named ''" in refused(path, "--gpu", "")
    assert "has its name alone: v100-16gb" in refused(path, "--gpu", "virtual:V100 16GB")
    assert "has its name alone, such as" in refused(path, "--gpu", "virtual:t5")
    assert "has its name alone, such as" in refused(path, "--gpu", "virtual:")
    assert "recorded at one size" in refused(path, "--size", 64)
    assert "names 2 sizes, and there is 1 trace:" in refused(path, "--sizes", "4,8", "--size", 64)
    assert "names 1 size, and there are 2 traces:" in refused(path, path, "--sizes", "4")
    assert "2 traces need --sizes" in refused(path, path, "--size", 64)
    assert "whole numbers with commas" in refused(path, "--sizes", "4;8")
    assert "sizes must differ" in refused(path, path, "--sizes", "4,4", "--size", 8)
    larger = trace(24 * MIB).save(path.with_name("larger.umem.gz"))
    assert "at least 1" in refused(path, larger, "--sizes", "4,8", "--size", 0)
    assert "Are the sizes swapped?" in refused(path, larger, "--sizes", "8,4", "--size", 64)
    assert "Is it one recording twice" in refused(path, path, "--sizes", "4,8", "--size", 64)
    assert "at least 1" in refused(path, path, "--sizes", "0,8", "--size", 3)
    assert "leave --gpu and" in refused(path, "--all-gpus", "--gpu", "t4")
    assert "--all says more" in refused(path, "--all-gpus", "--all")
    assert "vram must be" in refused(path, "--vram", "lots")
    assert "Missing argument" in refused()


def test_bad_traces_are_refused(path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.umem.gz"
    broken.write_bytes(path.read_bytes()[:-40])
    assert "broken.umem.gz" in refused(broken)
    assert "none.umem.gz" in refused(tmp_path / "none.umem.gz")
    empty = Trace([]).save(tmp_path / "empty.umem.gz")
    assert "no operation" in refused(empty)
    other = trace(count=20).save(tmp_path / "other.umem.gz")
    assert "not do the same" in refused(path, other, "--sizes", "4,8", "--size", 16)
