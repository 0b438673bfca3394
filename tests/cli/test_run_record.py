"""``umem run --record``: the trace of two steps of a script that knows nothing of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import umem
from umem.cli import main
from umem.trace import Alloc

pytest.importorskip("umem.chainer")

pytestmark = pytest.mark.thorough
ROOT = Path(umem.__file__).parent.parent
Process = subprocess.CompletedProcess[str]
Run = Callable[..., Process]

TRAIN = """
import sys
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

model = L.Classifier(L.Linear(8, 4))
optimizer = chainer.optimizers.Adam().setup(model)
x, t = np.ones((4, 8), "f"), np.zeros(4, "i")

def step():
    loss = model(x, t)
    model.cleargrads()
    loss.backward()
    optimizer.update()

"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run code as a script, recorded to a.umem.gz."""

    def run(code: str, *options: str, record: str = "a.umem.gz") -> Process:
        (tmp_path / "script.py").write_text(TRAIN + textwrap.dedent(code))
        command = [sys.executable, "-m", "umem", "run", "--record", record, *options, "script.py"]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env=environment(),
            timeout=120,
        )

    return run


def test_two_steps_are_written_and_the_next_commands_told(tmp_path: Path, run: Run) -> None:
    done = run("for _ in range(6): step()\nprint('the end')", record="out/deep/run.umem.gz")
    assert (done.returncode, done.stdout) == (0, "the end\n")
    path = tmp_path / "out/deep/run.umem.gz"
    trace = umem.Trace.load(path)
    assert trace.step_count == 2 and trace.meta["steps"] == "2-3"
    assert trace.meta["script"] == "script.py" and str(tmp_path) not in str(trace.meta)
    said = done.stderr.splitlines()
    count = sum(1 for _ in trace.ops)
    assert said[0].startswith(
        f"umem: wrote out/deep/run.umem.gz: steps 2-3, {count} operations, peak "
    )
    assert said[1] == "  umem report out/deep/run.umem.gz"
    assert said[2:] == ["  umem replay out/deep/run.umem.gz --gpu t4"]
    assert [p.name for p in path.parent.iterdir()] == ["run.umem.gz"]


def test_a_trainer_on_a_virtual_gpu_in_a_mode_with_stacks(tmp_path: Path, run: Run) -> None:
    code = """
    data = chainer.datasets.TupleDataset(np.ones((8, 8), "f"), np.zeros(8, "i"))
    iterator = chainer.iterators.MultiprocessIterator(data, 4, n_processes=1)
    updater = chainer.training.StandardUpdater(iterator, optimizer)
    chainer.training.Trainer(updater, (5, "iteration"), out="result").run()
    """
    options = ("--virtual", "t4", "--vram", "64MiB", "--mode", "managed", "--stacks")
    done = run(code, *options)
    assert done.returncode == 0, done.stderr
    trace = umem.Trace.load(tmp_path / "a.umem.gz")
    assert trace.step_count == 2
    made = [e for e in trace.events if isinstance(e, Alloc) and e.kind == "activation"]
    line = len((TRAIN + textwrap.dedent(code)).rstrip().splitlines())
    assert {event.stack for event in made} == {(f"script.py:{line} <module>",)}


@pytest.mark.parametrize(
    ("code", "returncode", "last"),
    [
        ("for _ in range(5): step()\n1 / 0", 1, "ZeroDivisionError"),
        ("for _ in range(3): step()\nraise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        ("for _ in range(3): step()\nsys.exit(7)", 7, ""),
    ],
)
def test_a_script_that_fails_keeps_its_exit_code_and_its_trace(
    tmp_path: Path, run: Run, code: str, returncode: int, last: str
) -> None:
    done = run(code)
    assert done.returncode == returncode and last in done.stderr
    assert "umem: wrote a.umem.gz: steps 2-3" in done.stderr
    assert umem.Trace.load(tmp_path / "a.umem.gz").step_count == 2


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_after_a_step_leaves_a_trace(tmp_path: Path) -> None:
    code = "step(); print('on', flush=True); import time; time.sleep(60)"
    (tmp_path / "script.py").write_text(TRAIN + code)
    process = subprocess.Popen(
        [sys.executable, "-m", "umem", "run", "--record", "a.umem.gz", "script.py"],
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None and process.stdout.readline() == "on\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "umem: the run ended after step 1, before step 2: step 1 is kept" in said
    assert umem.Trace.load(tmp_path / "a.umem.gz").step_count == 1


def test_stop_ends_the_script_once_the_steps_are_there(tmp_path: Path, run: Run) -> None:
    code = """
    try:
        for i in range(1000): step(); done = i + 1
    finally:
        print("cleaned up after", done)
    """
    done = run(code, "--stop", "--steps", "2-3")
    assert (done.returncode, done.stdout) == (0, "cleaned up after 3\n")  # within the fourth
    assert umem.Trace.load(tmp_path / "a.umem.gz").step_count == 2
    again = run(code, "--stop", "--steps", "3", "--no-workspace", "--force")
    assert again.stdout == "cleaned up after 2\n"
    trace = umem.Trace.load(tmp_path / "a.umem.gz")
    assert all(op.workspace_bytes is None for op in trace.ops) and "umem: the work" not in (
        again.stderr
    )


def test_a_script_that_records_nothing_is_told_and_fails(tmp_path: Path, run: Run) -> None:
    done = run("", record="new/a.umem.gz")
    assert done.returncode == 1
    assert "umem: nothing was recorded" in done.stderr
    assert not (tmp_path / "new").exists()
    assert run("sys.exit(3)").returncode == 3


def test_a_script_that_only_predicts_is_kept(tmp_path: Path, run: Run) -> None:
    done = run("for _ in range(3): model(x, t)")
    assert done.returncode == 0
    assert "no whole step" in done.stderr and "no step ended in this thread" in done.stderr
    assert sum(op.name == "LinearFunction" for op in umem.Trace.load(tmp_path / "a.umem.gz").ops)


def test_children_do_not_write(tmp_path: Path, run: Run) -> None:
    code = """
    import os
    step()
    if os.fork():
        os.wait()
        for _ in range(2): step()
    else:
        for _ in range(9): step()
    """
    done = run(code)
    assert done.returncode == 0
    assert done.stderr.count("umem: wrote") == 1 and "steps 2-3" in done.stderr


def test_a_trace_that_cannot_be_written_is_told_and_the_script_goes_on(run: Run) -> None:
    code = """
    import shutil
    shutil.rmtree("new")
    for _ in range(9): step()
    print("trained")
    """
    done = run(code, record="new/a.umem.gz")
    assert (done.returncode, done.stdout) == (1, "trained\n")
    assert "umem: cannot write the trace to" in done.stderr and "new/a.umem.gz" in done.stderr


def test_a_script_that_changes_folders_is_no_obstacle(tmp_path: Path, run: Run) -> None:
    code = """
    import os
    os.mkdir("elsewhere")
    os.chdir("elsewhere")
    for _ in range(5): step()
    """
    done = run(code)
    assert done.returncode == 0 and "umem: wrote a.umem.gz" in done.stderr
    assert umem.Trace.load(tmp_path / "a.umem.gz").step_count == 2


def test_a_file_that_appeared_meanwhile_is_not_overwritten(tmp_path: Path, run: Run) -> None:
    done = run("open('a.umem.gz', 'w').write('mine')\nfor _ in range(9): step()")
    assert done.returncode == 1 and "a.umem.gz exists" in done.stderr
    assert (tmp_path / "a.umem.gz").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--record", "old.gz"], 1, "exists"),
        (["--record", "folder"], 1, "is a folder"),
        (["--record", "folder/"], 1, "is a folder"),
        (["--record", "old.gz/a.gz"], 1, "cannot write"),
        (["--record", "/dev/null", "--force"], 1, "is not a regular file"),
        (["--record", "n" * 300], 1, "file name too long"),
        (["--record", ""], 1, "is a folder"),
        (["--record", "a.gz", "--steps", "0"], 2, "steps must be"),
        (["--record", "a.gz", "--steps", "3-2"], 2, "is before the first"),
        (["--record", "a.gz", "--steps", "all", "--stop"], 2, "--stop needs a last step"),
        (["--steps", "2-3"], 2, "--steps needs --record"),
        (["--stacks"], 2, "--stacks needs --record"),
        (["--stop"], 2, "--stop needs --record"),
        (["--force"], 2, "--force needs --record"),
        (["--no-workspace"], 2, "--no-workspace needs --record"),
        (["--record", "new/a.gz", "--virtual", "v101"], 1, "did you mean"),
    ],
)
def test_bad_input_is_refused_before_the_script_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text("raise SystemError")
    Path("folder").mkdir()
    Path("old.gz").write_text("old")
    result = CliRunner().invoke(main, ["run", *arguments, "script.py"])
    assert text in " ".join(result.output.split())
    assert result.exit_code == code
    assert sorted(os.listdir()) == ["folder", "old.gz", "script.py"]
    assert Path("old.gz").read_text() == "old"


def test_a_folder_without_permission_is_found_before_the_script_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "script.py").write_text("raise SystemError")
    monkeypatch.setattr("umem._common.files.check_folder", refuse)  # root may write anywhere
    path = str(tmp_path / "new" / "a.gz")
    result = CliRunner().invoke(main, ["run", "--record", path, str(tmp_path / "script.py")])
    assert result.exit_code == 1
    assert "permission denied" in " ".join(result.output.split())
    assert not (tmp_path / "new").exists()
