"""``umem run --old-numpy PACKAGE``: the package sees what NumPy removed, the script does not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.cli.test_run import CHAINER, Process, Run, execute, lines, run
from umem.cli import main
from umem.cli.run_script import advice

__all__ = ["run"]

OLD = "import numpy as np\ndef kind(x=np.{}): return x.__name__\n"
SCRIPT = """\
import multiprocessing, subprocess, sys
import numpy as np
import old.code
def kinds(_):
    import older
    return old.code.kind(), older.kind(), hasattr(np, "float")
if __name__ == "__main__":
    print(*kinds(0))
    for way in sys.argv[1:]:
        with multiprocessing.get_context(way).Pool(1) as pool:
            print(*pool.map(kinds, [0])[0])
    if not sys.argv[1:]:
        sys.stdout.flush()
        subprocess.run([sys.executable, "-c", "import older; print(older.kind())"], check=True)
"""
BOTH = ("--old-numpy", "old", "--old-numpy", "older")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two old packages, beside the script that `run` writes."""
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "__init__.py").touch()
    (tmp_path / "old" / "code.py").write_text(OLD.format("float"))
    (tmp_path / "older.py").write_text(OLD.format("int"))
    return tmp_path


def test_packages_beside_the_script_are_lent_names_and_the_script_is_not(
    run: Run, folder: Path
) -> None:
    assert lines(run(SCRIPT, *BOTH)) == ["float int False", "int"]


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["fork", "spawn", "forkserver"])
def test_worker_processes_are_lent_them_too(run: Run, folder: Path, way: str) -> None:
    if way != "spawn" and sys.platform == "win32":
        pytest.skip("there is no fork")
    assert lines(run(SCRIPT, *BOTH, arguments=(way,))) == ["float int False"] * 2


def test_a_module_beside_the_current_folder_is_found(folder: Path) -> None:
    (folder / "program.py").write_text("import old.code; print(old.code.kind())")
    done = execute("-m", "umem", "run", *BOTH, "-m", "program", cwd=folder)
    assert lines(done) == ["float"]


@pytest.mark.thorough
@CHAINER
def test_child_processes_without_the_package_go_on(run: Run, folder: Path) -> None:
    code = """\
    import subprocess, sys
    child = "import chainer; print(chainer.__version__[:3])"
    subprocess.run([sys.executable, "-c", child], check=True, cwd="/")
    """
    assert lines(run(code, *BOTH)) == ["7.8"]


def test_without_it_the_script_ends_as_under_python_with_the_way_out(
    run: Run, folder: Path
) -> None:
    done: Process = run(SCRIPT)
    assert done.returncode == 1
    assert "AttributeError" in done.stderr
    assert done.stderr.endswith("  umem run --old-numpy old script.py\n")
    more = run(SCRIPT, "--old-numpy", "older", "--workspace", "1MiB")
    assert more.stderr.endswith(
        "  umem run --old-numpy old --workspace 1MiB --old-numpy older script.py\n"
    )


@pytest.mark.parametrize(
    "error",
    [
        "import numpy; numpy.float",
        "import numpy; numpy.product",
        "from numpy import product",
        "import pkg_resources",
    ],
)
def test_advice_names_the_package_that_asks(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pkg_resources", None)
    for package, lent in (("old.code", "old"), ("__main__", "__main__"), ("chainer.links", "")):
        with pytest.raises((AttributeError, ImportError)) as caught:
            exec(error, {"__name__": package})
        frames = caught.value.__traceback__
        assert frames is not None
        raised = caught.value.with_traceback(frames.tb_next)  # from the package's own code on
        said = advice(raised, ["a.py"], None, None)
        assert (said or "").endswith(f"--old-numpy {lent} a.py" if lent else "")
        assert bool(said) is bool(lent)


ITSELF = """\
import numpy
import numpy as np
import beside
print(np.float.__name__, np is numpy, beside.has)
"""


@pytest.mark.parametrize("name", ["__main__", "script"])
def test_a_script_itself_is_lent_names(run: Run, folder: Path, name: str) -> None:
    (folder / "beside.py").write_text("import numpy\nhas = hasattr(numpy, 'float')\n")
    assert lines(run(ITSELF, "--old-numpy", name)) == ["float True False"]


def test_a_package_that_is_run_is_lent_names_itself(run: Run, folder: Path) -> None:
    (folder / "old" / "__main__.py").write_text("import old.code\nprint(old.code.kind())\n")
    assert lines(execute("-m", "umem", "run", "--old-numpy", "old", "-m", "old", cwd=folder)) == [
        "float"
    ]


def test_a_script_without_them_is_told_how(run: Run, folder: Path) -> None:
    done: Process = run("import numpy as np\nnp.float")
    assert done.returncode == 1
    assert done.stderr.endswith("  umem run --old-numpy __main__ script.py\n")


@pytest.mark.parametrize("error", ["import numpy; numpy.lookfor", "[].float", "import no_such"])
def test_there_is_no_advice_on_other_names(error: str) -> None:
    with pytest.raises((AttributeError, ImportError)) as caught:
        exec(error, {"__name__": "old"})
    assert advice(caught.value, ["a.py"], None, None) is None


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("package", "says"),
    [
        ("olt", "no package 'olt' to lend names to; near: old"),
        ("chainer", "mended by umem.compat.install"),
    ],
)
def test_what_cannot_be_lent_is_refused_before_the_script_runs(
    run: Run, folder: Path, package: str, says: str
) -> None:
    done = run("print('ran')", "--old-numpy", package)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--old-numpy" in done.stderr and says in " ".join(done.stderr.split())


def test_ranks_are_given_each_of_several_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []

    def run_ranks(command: list[str], *_: object) -> int:
        given.extend(command)
        return 0

    monkeypatch.setattr("umem.cli.run_ranks.run_ranks", run_ranks)
    result = CliRunner().invoke(main, ["run", "-n", "2", *BOTH, __file__])
    assert result.exit_code == 0, result.output
    assert given[given.index("run") + 1 :][:4] == list(BOTH)
