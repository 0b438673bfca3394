"""Other programs stop a dry run, and its own Pythons share its scratch disk."""

from __future__ import annotations

import dbm
import importlib.util
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import sysconfig
import textwrap
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import umem
from umem.dry.disk import scratch_disk
from umem.errors import DryRunError

ROOT = Path(umem.__file__).parent.parent


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that reads umem's file as it starts, whatever is installed here."""
    spec = importlib.util.spec_from_file_location("built", ROOT / "scripts/build_backend.py")
    assert spec is not None and spec.loader is not None
    backend = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(backend)
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    here = f"{ROOT}\n{sysconfig.get_path('purelib')}\n"
    (packages / "a_path.pth").write_text(here)
    (packages / backend.NAME).write_text(backend.LINE)
    return str(folder / "bin/python")


def run(python: str, folder: Path, program: str, **given: str) -> subprocess.CompletedProcess[str]:
    """Run a program inside of a scratch disk, in a folder, from a file called train.py."""
    script = folder.parent / "train.py"
    script.write_text(textwrap.dedent(program))
    starter = folder.parent / "starter.py"
    starter.write_text(
        "import runpy, sys\n"
        "from umem.dry.disk import scratch_disk\n"
        f"with scratch_disk(**{given}) as disk:\n"
        "    runpy.run_path(sys.argv[1], run_name='__main__')\n"
        "print('written:', *(path.rpartition('/')[2] for path in disk.written))\n"
    )
    names = {k: v for k, v in os.environ.items() if not k.startswith(("UMEM", "PYTHON", "COV"))}
    return subprocess.run(
        [python, str(starter), str(script)],
        cwd=folder,
        env=names,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=30,
    )  # fmt: skip


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "a.txt").write_text("one")
    return tmp_path / "work"


def is_as_before(work: Path) -> bool:
    return os.listdir(work) == ["a.txt"] and (work / "a.txt").read_text() == "one"


# -- Pythons ---------------------------------------------------------------------------------------

CHILD = "open('a.txt', 'a').write('+two'); open('child', 'w').write('c')"


@pytest.mark.parametrize("env", ["", ", env={'PATH': ''}"])
def test_a_python_that_the_program_starts_shares_the_disk(
    python: str, work: Path, env: str
) -> None:
    done = run(
        python, work,
        f"""
        import os, subprocess, sys
        child = "import sys; assert 'umem' not in sys.modules and 'numpy' not in sys.modules; "
        child += {CHILD!r}
        subprocess.run([sys.executable, "-c", child]{env}, check=True)
        assert open("a.txt").read() == "one+two" and open("child").read() == "c"
        os.remove("a.txt")
        subprocess.run([sys.executable, "-c", "open('a.txt')"]{env}, stderr=subprocess.DEVNULL)
        look = "import os, umem; print(sorted(os.listdir()), os.environ['UMEM_DRY'])"
        print(subprocess.check_output([sys.executable, "-c", look]{env}, text=True))
        """,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "['child'] 1" in done.stdout and "written: child\n" in done.stdout
    assert is_as_before(work)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_of_multiprocessing_share_the_disk(python: str, work: Path, method: str) -> None:
    done = run(
        python, work,
        f"""
        import multiprocessing, os
        def child(number):
            with open("a.txt", "a") as file:
                file.write("+two")
            with open(f"child{{number}}", "w") as file:
                file.write("c")
        if __name__ == "__main__":
            context = multiprocessing.get_context({method!r})
            with open("parent", "w") as file:
                file.write("p")
            with context.Pool(2) as pool:
                pool.map(child, range(3))
            manager = context.Manager()
            manager.dict()["a"] = 1
            manager.shutdown()
            assert open("a.txt").read() == "one+two+two+two"
            print(sorted(os.listdir()))
        """,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "['a.txt', 'child0', 'child1', 'child2', 'parent']" in done.stdout
    assert is_as_before(work)


def test_a_fork_that_leaves_the_block_leaves_the_folder(python: str, work: Path) -> None:
    done = run(
        python, work,
        """
        import os, sys
        if os.fork() == 0:
            sys.exit(0)
        os.wait()
        open("new", "w").write("x")
        """,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "written: new" in done.stdout and is_as_before(work)


@pytest.mark.parametrize(
    ("start", "why"),
    [
        ('subprocess.run([sys.executable, "-S", "-c", "1"])', "with -S"),
        ('subprocess.run([sys.executable, "-bSc", "1"])', "with -S"),
        ('os.environ.pop("UMEM_DRY_DISK"); subprocess.run([sys.executable])', "environment lacks"),
        ('os.spawnve(os.P_WAIT, sys.executable, ["python", "-c", "1"], {})', "environment lacks"),
        ('os.posix_spawn(sys.executable, ["python", "-c", "1"], {})', "environment lacks"),
        ('os.execv(sys.executable, ["python"])', "replaces itself"),
    ],
)
def test_a_python_that_would_not_share_it_stops_the_run(
    python: str, work: Path, start: str, why: str
) -> None:
    done = run(python, work, f"import os, subprocess, sys\n{start}\n")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "DryRunError: train.py:2 " in last and why in last
    assert is_as_before(work)


def test_an_environment_without_the_line_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with scratch_disk(), pytest.raises(DryRunError, match=r"does not load umem_software_gpu\.pth"):
        subprocess.run([sys.executable, "-c", "1"])


def test_a_python_after_the_run_ends_at_once(python: str, work: Path) -> None:
    names = {**os.environ, "UMEM_DRY_DISK": "scratch:stop:/none/there"}
    done = subprocess.run(
        [python, "-c", CHILD], cwd=work, env=names, capture_output=True, text=True
    )
    assert done.returncode == 1 and "/none/there" in done.stderr and is_as_before(work)


# -- other programs --------------------------------------------------------------------------------

STARTS: dict[str, Callable[[], Any]] = {
    "run": lambda: subprocess.run(["touch", "a.txt"]),
    "shell": lambda: subprocess.run("echo two > a.txt", shell=True),
    "check_output": lambda: subprocess.check_output(["git", "rev-parse", "HEAD"]),
    "system": lambda: os.system("echo two > a.txt"),
    "popen": lambda: os.popen("echo two > a.txt"),
    "spawn": lambda: os.spawnlp(os.P_WAIT, "touch", "touch", "a.txt"),
    "posix_spawn": lambda: os.posix_spawn("/bin/touch", ["touch", "a.txt"], os.environ),
    "exec": lambda: os.execvp("touch", ["touch", "a.txt"]),
}


@pytest.mark.parametrize("way", STARTS)
def test_another_program_stops_the_run_with_its_line(
    way: str, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(work)
    expected = r"^test_programs\.py:\d+ starts another program: .*allow it with --programs run$"
    with scratch_disk(), pytest.raises(DryRunError, match=expected):
        STARTS[way]()
    assert is_as_before(work)


def test_programs_may_run(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    with scratch_disk(programs="run"):
        assert os.system("echo theirs > theirs") == 0
        subprocess.run(["cp", "a.txt", "copy"], check=True)
        Path("ours").write_text("x")
        assert sorted(os.listdir()) == ["a.txt", "copy", "ours", "theirs"]
    assert sorted(os.listdir()) == ["a.txt", "copy", "theirs"]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")
def test_a_compiler_runs() -> None:
    with scratch_disk():
        assert "cc" in subprocess.check_output(["cc", "--version"], text=True).lower()
        subprocess.run(["uname"], check=True, stdout=subprocess.DEVNULL)


def test_pythons_own_look_ups_run() -> None:
    import ctypes.util
    import platform

    with scratch_disk():
        assert platform.system() == "Linux" and platform.processor() is not None
        assert ctypes.util.find_library("c")


def test_everything_that_starts_programs_is_put_back() -> None:
    before = subprocess.Popen.__init__, vars(os)["_spawnvef"], list(sys.meta_path)
    with pytest.raises(ZeroDivisionError), scratch_disk():
        assert subprocess.Popen.__init__ is not before[0]
        _ = 1 / 0
    assert before == (subprocess.Popen.__init__, vars(os)["_spawnvef"], sys.meta_path)
    subprocess.run(["true"], check=True)


# -- files that C code opens -----------------------------------------------------------------------


def test_hdf5_stops_the_run_where_it_would_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    h5py = pytest.importorskip("h5py")
    monkeypatch.chdir(tmp_path)
    real = h5py.File.__init__
    with h5py.File("old.h5", "w") as file:
        file["x"] = 3
    with scratch_disk():
        for mode in ("w", "a", "r+", "x", "w-"):
            with pytest.raises(DryRunError, match=r"^test_programs\.py:\d+ opens a file for writ"):
                h5py.File("new.h5", mode)
        shutil.copy("old.h5", "copied.h5")
        for name in ("old.h5", "copied.h5"):
            with h5py.File(name) as file:
                assert file["x"][()] == 3
        with h5py.File("core.h5", "w", driver="core", backing_store=False) as file:
            file["x"] = 1
    assert h5py.File.__init__ is real and os.listdir() == ["old.h5"]
    with scratch_disk(writes="real"), h5py.File("new.h5", "w"):
        pass
    assert os.path.exists("new.h5")


def test_a_library_that_is_imported_later_is_stopped_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cv2.py").write_text("def imwrite(filename, image):\n    return True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cv2", raising=False)
    with scratch_disk():
        import cv2

        with pytest.raises(DryRunError, match=r"in cv2, .*: out\.png"):
            cv2.imwrite("out.png", None)
    assert cv2.imwrite("out.png", None) is True
    assert type(cv2.__spec__.loader).__name__ == "SourceFileLoader"


def test_a_database_stops_the_run_unless_it_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with scratch_disk():
        with pytest.raises(DryRunError, match="opens a database"):
            sqlite3.connect("results.db")
        connection = sqlite3.connect(":memory:")
        connection.execute("create table t (x)")
        for name in ("'other.db'", "'oth' || 'er.db'"):
            with pytest.raises(sqlite3.DatabaseError, match="not authorized"):
                connection.execute(f"attach {name} as other")
        with pytest.raises(sqlite3.DatabaseError):
            connection.execute("vacuum into 'other.db'")
        connection.close()
    assert os.listdir() == []


@pytest.mark.parametrize("kind", ["dbm.gnu", "dbm.ndbm"])
def test_a_dbm_in_c_stops_the_run(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(kind)
    monkeypatch.chdir(tmp_path)
    with scratch_disk(), pytest.raises(DryRunError):
        getattr(dbm, kind.partition(".")[2]).open("names", "c")
    assert os.listdir() == []


# -- connections -----------------------------------------------------------------------------------


def connect(address: Any, family: int = socket.AF_INET) -> None:
    with socket.socket(family, socket.SOCK_DGRAM) as one:
        try:
            one.connect(address)
        except OSError:  # no network here: the attempt is what counts
            pass


def test_the_first_connection_to_another_machine_is_remembered() -> None:
    with scratch_disk() as disk:
        connect(("127.0.0.1", 9))
        connect(("localhost", 9))
        connect("/none", socket.AF_UNIX)
        assert disk.first_connection is None
        connect(("192.0.2.1", 80))
        connect(("192.0.2.2", 81))
        found = disk.first_connection
    assert found is not None and found == disk.first_connection
    name, _, rest = found.partition(":")
    assert name == "test_programs.py" and rest.endswith(" connects to 192.0.2.1:80")


# -- a training script -----------------------------------------------------------------------------

TRAIN = """
import json, os, shutil
import numpy as np
import umem.chainer
import chainer
from chainer import training
from chainer.training import extensions

shutil.rmtree("result")
model = chainer.links.Classifier(chainer.links.Linear(4, 2))
optimizer = chainer.optimizers.Adam().setup(model)
data = chainer.datasets.TupleDataset(np.ones((8, 4), "f"), np.zeros(8, "i"))
iterator = chainer.iterators.SerialIterator(data, 4)
trainer = training.Trainer(training.StandardUpdater(iterator, optimizer), (2, "epoch"), "result")
trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
trainer.extend(extensions.snapshot(), trigger=(1, "epoch"))
trainer.extend(extensions.snapshot_object(model, "model.npz"), trigger=(1, "epoch"))
trainer.extend(extensions.PlotReport(["main/loss"], trigger=(1, "epoch")))
trainer.run()
with open("result/log") as log:
    assert len(json.load(log)) == 4
chainer.serializers.load_npz("result/snapshot_iter_4", trainer)
chainer.serializers.save_npz("a.txt", model)
chainer.serializers.load_npz("a.txt", model)
print(sorted(os.listdir("result")))
"""


def test_a_script_of_chainers_saves_and_loads(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("chainer") is None:
        pytest.skip("Chainer is not installed")
    (work / "result").mkdir()
    (work / "result" / "log").write_text("of a year")
    before = (work / "result" / "log").stat()
    monkeypatch.chdir(work)
    with scratch_disk() as disk:
        exec(compile(TRAIN, "train.py", "exec"), {"__name__": "train"})
        found = sorted(os.listdir("result"))
    assert found[:2] == ["log", "model.npz"] and found[-2:] == [
        "snapshot_iter_2",
        "snapshot_iter_4",
    ]
    assert str(work / "a.txt") in disk.written
    assert sorted(os.listdir(work)) == ["a.txt", "result"] and os.listdir("result") == ["log"]
    assert (work / "result" / "log").stat() == before and (work / "a.txt").read_text() == "one"
