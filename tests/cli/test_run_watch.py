"""``umem run --watch``: memory and speed while a script runs, and its own output as it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import umem
from umem.cli.run_watch import RunSoFar, Simulated, line, summary
from umem.devices import StepCost
from umem.trace import Alloc, Free, Mark, Op
from umem.trace.recording import GROUPS, Recorder, Tally

pytest.importorskip("umem.chainer")

pytestmark = pytest.mark.thorough
ROOT = Path(umem.__file__).parent.parent
MIB = 1 << 20


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
    from umem.trace import KINDS

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
    assert line(nothing) == "umem: step 0; 0 B now: nothing; 0 B peak"
    assert "no operation of Chainer" in summary(nothing)
    on_gpu = RunSoFar(2.0, 0, 5, 0, 8, pools_peak_bytes=512)
    assert line(on_gpu).endswith(
        "8 B peak; 512 B used of CuPy's pools at their peak, workspace included"
    )
    only = RunSoFar(2.0, 0, 5, 0, 8, kinds={"inputs": 8})
    assert summary(only) == "umem: 0 steps in 2.0 s; peak 8 B: inputs 8 B"


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


def test_lines_go_to_standard_error(tmp_path: Path) -> None:
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
        found = watching.WatchOption()
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
