"""Training on a cached dataset that is killed at random moments, and goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from project import ROOT

from umem.compat import find_package

if find_package() is None:
    pytest.skip("Chainer is not installed", allow_module_level=True)

import data_kill_program
import resume_cases

PROGRAM = ROOT / "tests" / "support" / "data_kill_program.py"
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs a POSIX system"),
]


def start(out: Path, kind: str) -> subprocess.Popen[str]:
    """The run in a session of its own, so that its workers are killed with it."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore::DeprecationWarning", str(PROGRAM), str(out), kind],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def killed(out: Path, kind: str, after: int, seconds: float) -> list[int]:
    """Kill a run some time after so many updates of this life; returns those that it did."""
    run, done = start(out, kind), list[int]()
    assert run.stdout is not None
    for line in run.stdout:
        done.append(int(line))
        if len(done) == after:
            time.sleep(seconds)
            os.killpg(run.pid, signal.SIGKILL)
            break
    _, error = run.communicate(timeout=60)
    assert run.returncode == -signal.SIGKILL, error
    return done


def ended(out: Path, kind: str) -> list[str]:
    """A run to its end; returns what it says last."""
    run = start(out, kind)
    said, error = run.communicate(timeout=120)
    assert run.returncode == 0 and "DataWarning" not in error, error
    return said.splitlines()[-1].split()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run without a cache, which nobody kills."""
    out = tmp_path_factory.mktemp("plain")
    ended(out, "plain")
    return resume_cases.losses(out)


@pytest.mark.parametrize("kind", ["serial", "threads", "processes"])
def test_a_run_that_is_killed_anywhere_goes_on_to_the_same_curve(
    kind: str, tmp_path: Path, undisturbed: list[float]
) -> None:
    draw, updates = random.Random(f"kills of {kind}"), data_kill_program.UPDATES
    for life in range(3):  # the second snapshot, of update 8, waits until the first is written
        done = killed(tmp_path, kind, draw.randrange(9, 17), draw.random() * 0.02)
        assert life == 0 or done[0] > 1  # it went on from a snapshot
        assert list((tmp_path / "disk").iterdir()) == []
    word, hits, from_disk = ended(tmp_path, kind)
    assert word == "done" and int(hits) + int(from_disk) > 20
    found = resume_cases.losses(tmp_path)
    assert len(found) == updates and found == undisturbed
    assert list((tmp_path / "disk").iterdir()) == []
    left = {path.name for path in tmp_path.iterdir()} - {"disk", "snapshots"}
    assert all(name.startswith("log") for name in left), left  # Chainer writes its log beside it
