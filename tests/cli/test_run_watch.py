"""``umem run --watch``: memory and speed while a script runs, and its own output as it is."""

from __future__ import annotations

import io
import os
import re
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import umem
from umem.cli.run_watch import LiveRegion, RunSoFar, Simulated, line, summary, view
from umem.devices.cost import StepCost
from umem.trace import Alloc, Free, Mark, Op
from umem.trace.recording.recorder import Recorder
from umem.trace.recording.tally import GROUPS, Tally

pytest.importorskip("umem.chainer")

pytestmark = pytest.mark.thorough
ROOT = Path(umem.__file__).parent.parent
MIB = 1 << 20


class Screen:
    """A terminal that knows what the view uses: lines, clearing one, going up; no scrolling."""

    def __init__(self) -> None:
        self.rows = [""]
        self.row = self.column = 0

    def feed(self, text: str) -> None:
        for part in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|[\s\S]", text):
            if part == "\n":
                self.row, self.column = self.row + 1, 0
                self.rows += [""] * (self.row + 1 - len(self.rows))
            elif part == "\r":
                self.column = 0
            elif part.endswith("A") and len(part) > 1:
                self.row -= int(part[2:-1])
            elif part == "\x1b[2K":
                self.rows[self.row] = ""
            elif part == "\x1b[J":
                self.rows[self.row + 1 :] = []
            elif len(part) > 1:
                assert part.endswith("m"), f"{part!r} is not expected"
            else:
                line = self.rows[self.row].ljust(self.column)
                self.rows[self.row] = line[: self.column] + part + line[self.column + 1 :]
                self.column += 1

    @property
    def text(self) -> str:
        return "\n".join(row.rstrip() for row in self.rows).rstrip("\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# -- the tally ---------------------------------------------------------------------------------


def test_a_tally_counts_what_is_alive_by_group_and_remembers_its_peak() -> None:
    tally = Tally()
    events = [
        Alloc(0, 100, "parameter", "W"), Alloc(1, 40, "input", "x"), Alloc(2, 7, "stash", "s"),
        Alloc(3, 50, "activation", "y"), Op("f", "forward", (), ()), Free(3), Free(2),
        Alloc(4, 30, "gradient", "g"), Mark("step"), Mark("other"), Alloc(5, 1, "state", "m"),
    ]  # fmt: skip
    for event in events:
        tally.on_event(event)
    assert tally.current_bytes == 171 and tally.peak_bytes == 197
    assert tally.at_peak == {
        "parameters": 100,
        "gradients": 0,
        "state": 0,
        "activations": 57,
        "inputs": 40,
    }
    assert tally.current == {
        "parameters": 100,
        "gradients": 30,
        "state": 1,
        "activations": 0,
        "inputs": 40,
    }
    assert (tally.op_count, tally.step_count) == (1, 1)


def test_every_kind_of_tensor_has_a_group() -> None:
    from umem.trace.events import KINDS

    assert set(GROUPS) == set(KINDS)


def test_a_recorder_feeds_a_tally() -> None:
    tally = Tally()
    with Recorder(tally.on_event, keep=False) as recorder:
        a = np.ones(1000, "f")
        recorder.access(a, "parameter", "a")
        del a
        recorder.flush()
    assert (tally.peak_bytes, tally.current_bytes) == (4000, 0)


# -- what is shown -----------------------------------------------------------------------------

SEEN = RunSoFar(
    seconds=65.0,
    step_count=1300,
    op_count=260_000,
    current_bytes=300 * MIB,
    peak_bytes=400 * MIB,
    steps_per_second=20.25,
    ops_per_second=4000.4,
    kinds={"parameters": 100 * MIB, "state": 200 * MIB, "inputs": 0},
    simulated=Simulated(
        "t4",
        StepCost(
            fault_count=1234,
            migrated_in_bytes=3 << 30,
            migrated_out_bytes=0,
            remote_bytes=0,
            seconds=7.5,
        ),
    ),
)


def test_the_view_has_a_line_for_each_figure_and_bars_to_scale() -> None:
    lines = [str(text) for text in view(SEEN, 65, "#")]
    assert lines == [
        "steps              1,300  20.2/s",
        "operations       260,000  4,000/s",
        "now            300.0 MiB " + "#" * 30,
        "peak           400.0 MiB " + "#" * 40,
        "parameters     100.0 MiB " + "#" * 10,
        "state          200.0 MiB " + "#" * 20,
        "inputs               0 B ",
        "simulated t4",
        "  faults           1,234",
        "  moved          3.0 GiB",
        "  time             7.5 s",
    ]


def test_a_line_and_a_summary() -> None:
    assert line(SEEN) == (
        "umem: step 1,300, 20.2 steps/s, 4,000 operations/s; 300.0 MiB now: parameters 100.0 MiB, "
        "state 200.0 MiB; 400.0 MiB peak; simulated t4: 1,234 faults, 3.0 GiB moved, 7.5 s"
    )
    assert summary(SEEN) == (
        "umem: 1,300 steps in 65.0 s, 20.0/s; peak 400.0 MiB: parameters 100.0 MiB, state 200.0 "
        "MiB; simulated t4: 1,234 faults, 3.0 GiB moved, 7.5 s"
    )


def test_nothing_yet_is_no_obstacle() -> None:
    nothing = RunSoFar(0.0, 0, 0, 0, 0)
    assert len(list(view(nothing, 40))) == 4
    assert line(nothing) == "umem: step 0; 0 B now: nothing; 0 B peak"
    assert "no operation of Chainer" in summary(nothing)
    on_gpu = RunSoFar(2.0, 0, 5, 0, 8, pools_peak_bytes=512)
    assert line(on_gpu).endswith(
        "8 B peak; 512 B used of CuPy's pools at their peak, workspace included"
    )
    assert [text.plain.split()[-2:] for text in view(on_gpu, 20)][-1] == ["512", "B"]
    only = RunSoFar(2.0, 0, 5, 0, 8, kinds={"inputs": 8})
    assert summary(only) == "umem: 0 steps in 2.0 s; peak 8 B: inputs 8 B"


sizes = st.integers(0, 1 << 50)


@given(st.integers(25, 200), sizes, sizes, st.floats(0, 1e6), st.integers(0, 10**9))
def test_no_line_is_wider_than_the_terminal_but_counts_that_are(
    width: int, one: int, other: int, rate: float, count: int
) -> None:
    low, high = sorted((one, other))
    seen = RunSoFar(1.0, count, count, low, high, rate, rate, {"inputs": low // 2})
    bars = [text for text in view(seen, width)][2:]
    assert all(text.cell_len <= width for text in bars)


# -- the region --------------------------------------------------------------------------------


def start(monkeypatch: pytest.MonkeyPatch) -> tuple[LiveRegion, Terminal]:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    region = LiveRegion(terminal)
    region.start()
    return region, terminal


def shown(terminal: Terminal) -> str:
    screen = Screen()
    screen.feed(terminal.getvalue())
    return screen.text


def test_what_is_written_goes_above_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    region, terminal = start(monkeypatch)
    print("first")
    region.draw(["a", "b"])
    print("second")
    print("third", file=sys.stderr)
    region.draw(["c", "d", "e"])
    assert shown(terminal) == "first\nsecond\nthird\nc\nd\ne"
    region.draw(["f"])
    assert shown(terminal) == "first\nsecond\nthird\nf"
    region.stop()
    assert shown(terminal) == "first\nsecond\nthird"
    assert sys.stdout is sys.stderr is terminal


def test_an_open_line_stays_open_and_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    region, terminal = start(monkeypatch)
    region.draw(["a"])
    sys.stdout.write("epoch 1 ...")
    region.draw(["b"])
    assert shown(terminal) == "epoch 1 ..."
    sys.stdout.writelines([" done", "\n"])
    region.draw(["c"])
    assert shown(terminal) == "epoch 1 ... done\nc"
    for percent in ("10%", "20%"):
        sys.stdout.write(f"\r{percent}")
    region.draw(["d"])
    assert shown(terminal) == "epoch 1 ... done\n20%"
    region.stop()


def test_a_bar_that_moves_the_cursor_is_redrawn_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Chainer's ProgressBar does."""
    region, terminal = start(monkeypatch)
    plain = Terminal()
    for percent in (10, 20, 30):
        for text in ("\x1b[J", f"total {percent}%\nepoch {percent}%\n", "\x1b[2A"):
            region.draw(["view", "view"])
            sys.stdout.write(text)
            plain.write(text)
    region.stop()
    assert shown(terminal) == shown(plain) == "total 30%\nepoch 30%"


@given(st.lists(st.one_of(st.text("ab\n\r", max_size=6), st.integers(0, 3)), max_size=12))
def test_whatever_is_written_and_drawn_the_output_is_the_scripts_own(parts: list[Any]) -> None:
    plain = Terminal()
    terminal = Terminal()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stderr", terminal)
        region = LiveRegion(terminal)
        region.start()
        for part in parts:
            if isinstance(part, str):
                assert sys.stdout.write(part) == len(part)
                plain.write(part)
            else:
                region.draw(["view"] * part)
        region.stop()
    if plain.getvalue()[-1:] not in ("", "\n"):
        plain.write("\n")
    terminal.write("umem: over\n")
    plain.write("umem: over\n")
    assert shown(terminal) == shown(plain)


def test_streams_that_the_program_replaces_stay_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    region, _ = start(monkeypatch)
    kept, mine = sys.stdout, io.StringIO()
    monkeypatch.setattr(sys, "stdout", mine)
    region.stop()
    assert sys.stdout is mine
    print("late", file=kept)  # what kept the stream can go on writing
    assert kept.isatty() and kept.encoding is None


def test_a_stream_that_is_no_terminal_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, file = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    monkeypatch.setattr(sys, "stderr", terminal)
    region = LiveRegion(terminal)
    region.start()
    region.draw(["view"])
    print("text")
    assert sys.stdout is file and file.getvalue() == "text\n"
    region.stop()


# -- the command -------------------------------------------------------------------------------

TRAIN = """
import sys, time
import chainer, numpy as np
model = chainer.links.Classifier(chainer.links.Linear(512, 512))
optimizer = chainer.optimizers.Adam().setup(model)
x, t = np.ones((4, 512), "f"), np.zeros(4, "i")

def step():
    model.cleargrads()
    model(x, t).backward()
    optimizer.update()

def steps_until(is_enough):
    while not is_enough():
        step()
        time.sleep(0.01)

"""


def environment(**variables: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    return {**inherited, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **variables}


def piped(folder: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(TRAIN + textwrap.dedent(code))
    return subprocess.run(
        [sys.executable, "-m", "umem", "run", "--watch", *options, "script.py"],
        text=True,
        capture_output=True,
        cwd=folder,
        env=environment(),
        timeout=120,
        check=False,
    )


def test_without_a_terminal_lines_go_to_standard_error(tmp_path: Path) -> None:
    options = ("--virtual", "t4", "--vram", "4MiB", "--mode", "managed")
    done = piped(tmp_path, "for i in range(20): step()\nprint('the end', end='')", *options)
    assert (done.returncode, done.stdout) == (0, "the end")
    *told, last = done.stderr.splitlines()  # a slow machine tells of a step every five seconds
    assert "\x1b" not in done.stderr and all(text.startswith("umem: step ") for text in told)
    match = re.fullmatch(
        r"umem: (\d+) steps in \S+ m?s, [\d.]+/s; peak (\S+) MiB: .*; "
        r"simulated t4: (\S+) faults, \S+ \S+ moved, \S+ \S+",
        last,
    )
    assert match is not None, last
    megabytes = 512 * 513 * 4 / MIB  # of parameters; as much of gradients and of both moments
    assert 4 * megabytes - 0.05 <= float(match[2]) <= 4 * megabytes + 0.15
    assert f"parameters {megabytes:.1f} MiB" in last
    assert match[1] == "20" and int(match[3].replace(",", "")) > 0


def test_lines_are_told_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from contextlib import ExitStack

    from umem.cli import run_watch as watching

    monkeypatch.setattr(watching, "TOLD_EVERY_SECONDS", 0.05)
    namespace: dict[str, Any] = {}
    exec(TRAIN, namespace)
    text = ""
    with ExitStack() as stack:
        found = watching.Watching()
        found.begin(stack)
        found.follow(stack)

        def is_enough() -> bool:
            nonlocal text
            text += capsys.readouterr().err
            return text.count("\n") >= 4

        namespace["steps_until"](is_enough)
    text += capsys.readouterr().err
    said = text.splitlines()
    assert len(said) >= 5 and said[-1].startswith("umem: ")
    told = [
        re.match(r"umem: step (\d+), [\d.]+ steps/s, \d+ operations/s; ", x) for x in said[1:-1]
    ]
    counts = [int(match[1]) for match in told if match]
    assert len(counts) == len(said) - 2 and counts == sorted(counts)


def test_a_child_and_a_script_that_fails(tmp_path: Path) -> None:
    code = """
    import os
    step()
    if not os.fork():
        sys.exit(0)
    os.wait()
    1 / 0
    """
    done = piped(tmp_path, code)
    assert done.returncode == 1
    assert done.stderr.count("umem: 1 steps") == 1
    assert done.stderr.index("ZeroDivisionError") < done.stderr.index("umem: 1 steps")


def test_a_script_without_chainer_is_told_that_nothing_was_seen(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print(1)")
    done = subprocess.run(
        [sys.executable, "-m", "umem", "run", "--watch", "script.py"],
        text=True,
        cwd=tmp_path,
        capture_output=True,
        env=environment(),
        timeout=120,
        check=True,
    )
    assert done.stdout == "1\n" and "no operation of Chainer" in done.stderr


@pytest.fixture
def on_a_terminal(tmp_path: Path) -> Callable[..., str]:
    """Run a script on a terminal of so many columns; what it was sent.

    When the terminal has been sent a view, the file ``view-1`` is there, and so on.
    """
    pty = pytest.importorskip("pty")
    fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")

    def run(code: str, columns: int, **variables: str) -> str:
        (tmp_path / "script.py").write_text(TRAIN + textwrap.dedent(code))
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        process = subprocess.Popen(
            [sys.executable, "-m", "umem", "run", "--watch", "script.py"],
            cwd=tmp_path,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment(**variables),
        )
        os.close(theirs)
        sent = b""
        while True:
            try:
                data = os.read(ours, 1 << 16)
            except OSError:  # how Linux says that the other end is closed
                data = b""
            if not data:
                break
            sent += data
            for count in range(sent.count(b"operations ")):
                (tmp_path / f"view-{count + 1}").touch()
        os.close(ours)
        assert process.wait(timeout=300) == 0
        return sent.decode().replace("\r\n", "\n")

    return run


def test_on_a_terminal_of_40_columns_without_colour(on_a_terminal: Callable[..., str]) -> None:
    code = """
    import os
    from chainer.training import extensions
    for i in range(3):
        steps_until(lambda: os.path.exists(f"view-{i + 1}"))
        print("line", i)
    out = extensions.PrintReport([])._out  # the standard output as Chainer found it
    out.write("by PrintReport\\n")
    """
    sent = on_a_terminal(code, 40, NO_COLOR="1")
    screen = Screen()
    screen.feed(sent)
    assert screen.text.startswith("line 0\nline 1\nline 2\nby PrintReport\numem: ")
    assert sum(row.startswith("umem:") for row in screen.rows) == 1
    assert sent.count("operations ") >= 3
    drawn = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", sent).split("\n")
    assert all(len(row) < 40 for row in drawn if not row.startswith("umem:"))
    assert not re.search(r"\x1b\[(?:[0-9;]*;)?(?:3|4|9|10)[0-9][;m]", sent)  # no colour


def test_a_terminal_that_can_do_nothing_gets_lines(on_a_terminal: Callable[..., str]) -> None:
    sent = on_a_terminal("for _ in range(20): step()\nprint('x')", 80, TERM="dumb")
    assert "\x1b" not in sent
    *told, x, last = sent.splitlines()
    assert x == "x" and last.startswith("umem: ") and not last.startswith("umem: step ")
    assert all(text.startswith("umem: step ") for text in told)
