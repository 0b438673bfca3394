"""What `umem run -n` refuses: one sentence, an exit status, and no process is started or left."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from ranks import Ended, needs_ranks, start

from umem.cli import main
from umem.errors import LaunchError, MissingDependencyError
from umem.launch import AskedRanks, mpi, run_ranks
from umem.launch.hosts import Host, listed, read_hosts
from umem.launch.mpi import Mpiexec, family_of, find_mpiexec

HERE = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!{text}")
    path.chmod(0o755)
    return path


def refused(
    folder: Path, *options: str, code: str = "print('begun')", n: int = 2, **environment: str
) -> Ended:
    ended = start(folder, code, *options, n=n, environment=environment).finish()
    assert ended.status != 0 and ended.left == set(), ended.err
    assert "begun" not in ended.out and "Traceback" not in ended.err
    return ended


def on_path(folder: Path) -> str:
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


# -- mpiexec and mpi4py ---------------------------------------------------------------------------

OPEN_MPI = "Open MPI v5.0.11"
TEXTS = {
    "Open MPI v5.0.11, package: Open MPI, ident: 5.0.11": "Open MPI",
    "mpiexec (Open MPI) 5.0.11\n\nReport bugs to": "Open MPI",
    "mpirun (Open MPI) 4.1.4": "Open MPI",
    "MPICH Version:\t4.2.1\nMPICH Release date: x": "MPICH",
    "HYDRA build details:\n    Version:   4.2.1\n": "MPICH",
    "Intel(R) MPI Library 2021.11 for Linux*": "MPICH",
    "Another MPI": "Another MPI",
}


@pytest.mark.parametrize("text", TEXTS)
def test_an_mpi_is_known_by_what_it_says_of_itself(text: str) -> None:
    assert family_of(text) == TEXTS[text]


def fake_mpiexec(folder: Path, says: str) -> Path:
    return executable(folder / "mpiexec", f"/bin/sh\necho '{says}'\n")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that is all of PATH, and Python's own is elsewhere."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "elsewhere" / "python"))
    return folder


def test_without_mpiexec_the_packages_are_named(alone: Path) -> None:
    with pytest.raises(MissingDependencyError, match=r"no mpiexec on PATH.*pip install 'mpi4py"):
        find_mpiexec(OPEN_MPI)


def test_the_mpiexec_of_mpi4pys_own_mpi_is_taken(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "conda"
    fake_mpiexec(alone, "HYDRA build details: Version: 4.2.1")
    own = fake_mpiexec(other, "mpiexec (Open MPI) 5.0.3")
    monkeypatch.setenv("PATH", f"{alone}{os.pathsep}{other}")
    assert find_mpiexec(OPEN_MPI) == Mpiexec(own, "Open MPI")


def test_an_mpiexec_of_another_mpi_is_refused(alone: Path) -> None:
    fake_mpiexec(alone, "HYDRA build details: Version: 4.2.1")
    with pytest.raises(LaunchError, match=r"for Open MPI v5\.0\.11,.*only itself.*\(MPICH\)"):
        find_mpiexec(OPEN_MPI)


def test_without_mpi4py_the_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "find_spec", lambda name: None)
    for name in HERE:
        monkeypatch.setenv(name, "1")
    with pytest.raises(MissingDependencyError, match=r"need mpi4py; pip install 'mpi4py>=4.0'"):
        run_ranks([sys.executable, "-c", ""], AskedRanks(2), print)


@needs_ranks
def test_an_mpi4py_that_finds_no_mpi_is_refused(tmp_path: Path) -> None:
    ended = refused(tmp_path, MPI4PY_LIBMPI=str(tmp_path / "libmpi.so"))
    assert "mpi4py is installed but not usable" in ended.last


# -- who, where and what --------------------------------------------------------------------------


@needs_ranks
@pytest.mark.skipif(os.geteuid() != 0, reason="this is about root")
def test_root_is_refused_unless_allowed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('begun')")
    environment = {name: value for name, value in os.environ.items() if name not in HERE}
    result = subprocess.run(
        [sys.executable, "-m", "umem", "run", "-n", "2", str(script)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: you are root") and "--allow-root" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-n", "0"], "0 is not in the range"),
        (["-n", "two"], "not a valid integer"),
        (["--hosts", "x"], "--hosts needs -n N"),
        (["--threads", "2"], "--threads needs -n N"),
        (["--allow-root"], "--allow-root needs -n N"),
        (["--verbose"], "--verbose needs -n N"),
        (["-n", "2", "--threads", "0"], "0 is not in the range"),
        (["-n", "2", "--vram", "1GiB"], "--vram needs"),
        (["-n", "2", "--steps", "3"], "--steps needs --record"),
    ],
)
def test_options_that_do_not_go_together(tmp_path: Path, options: list[str], message: str) -> None:
    (tmp_path / "script.py").write_text("print('begun')")
    result = CliRunner().invoke(main, ["run", *options, str(tmp_path / "script.py")])
    assert result.exit_code == 2 and message in result.output and "begun" not in result.output


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["run", "-n", "2", str(tmp_path / "none.py")])
    assert result.exit_code == 2 and "there is no file" in result.output


HOSTS = {
    "a.example\n\n# a comment\nb slots=4\nuser@c:2 # two\n": [
        Host("a.example"),
        Host("b", 4),
        Host("user@c", 2),
    ],
    "\ufeffa slots=4\r\nb:2\r\n\r\n": [Host("a", 4), Host("b", 2)],
}


@pytest.mark.parametrize("text", HOSTS)
def test_a_file_of_hosts(tmp_path: Path, text: str) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(text.encode())
    assert read_hosts(path) == HOSTS[text]


def test_each_mpiexec_gets_the_hosts_as_it_reads_them() -> None:
    here = socket.gethostname()
    given = [Host("a", 4), Host("localhost"), Host("a", 2), Host("b"), Host(here, 2), Host("b")]
    with listed(given, mpi.OPEN_MPI) as file:
        assert file is not None
        assert file.read_text() == "a slots=6\nlocalhost slots=3\nb slots=2\n"
    assert not file.exists()
    with listed([Host("a", 4), Host("b")], mpi.MPICH) as file:
        assert file is not None and file.read_text() == "a:4\nb\n"
    with listed([], mpi.OPEN_MPI) as file:
        assert file is None


@pytest.mark.thorough
@needs_ranks
def test_this_machine_may_be_a_host_in_every_form(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(f"localhost:1\r\n{socket.gethostname()} slots=1\r\n".encode())
    code = "from mpi4py import MPI; print(MPI.COMM_WORLD.size)"
    ended = start(tmp_path, code, "--hosts", str(path)).finish()
    assert (ended.status, ended.out.count("] 2\n")) == (0, 2), ended.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no host"),
        ("# none\n", "names no host"),
        ("a b c", "line 1: 'a b c' names no host"),
        ("a\n-oProxyCommand=x", "line 2: '-oProxyCommand=x' names no host"),
        ("a;reboot", "'a;reboot' names no host"),
        ("a slots=many", "names no host"),
        ("a:2 slots=1", "names no host"),
        ("b\na slots=0", "line 2: 'a slots=0' runs no rank"),
        ("a:0", "line 1: 'a:0' runs no rank"),
    ],
)
def test_a_file_of_hosts_that_says_something_else(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(LaunchError) as caught:
        read_hosts(path)
    assert message in str(caught.value)


def test_a_file_of_hosts_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot be read: there is no such file"):
        read_hosts(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(LaunchError, match="it is not a text file"):
        read_hosts(tmp_path / "bytes")


SSH = """/bin/sh
# Another machine that is this one; `gone` does not answer, `silent` never, `bare` has no Python.
while [ "${1#-}" != "$1" ]; do case "$1" in -o|-p|-l) shift 2;; *) shift;; esac; done
host=$1; shift
[ "$host" = gone ] && { echo "ssh: connect to host gone port 22: No route to host" >&2; exit 255; }
[ "$host" = silent ] && exec sleep 100
[ "$host" = bare ] && { echo "sh: python: not found" >&2; exit 127; }
exec sh -c "$*"
"""


def hosts(folder: Path, text: str) -> tuple[list[str], dict[str, str]]:
    executable(folder / "bin" / "ssh", SSH)
    path = folder / "hosts"
    path.write_text(text)
    return ["--hosts", str(path)], {"PATH": on_path(folder / "bin")}


@needs_ranks
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gone", "No route to host"),
        pytest.param("silent", "no reply in 20 s", marks=pytest.mark.thorough),
    ],
)
def test_a_host_that_does_not_answer_is_named_soon(tmp_path: Path, name: str, why: str) -> None:
    options, environment = hosts(tmp_path, f"{name}\nlocalhost\n")
    ended = refused(tmp_path, *options, **environment)
    assert f"the host {name} does not answer: " in ended.last and why in ended.last


@needs_ranks
def test_without_ssh_a_host_cannot_be_reached(tmp_path: Path) -> None:
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    assert found is not None
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "mpiexec").symlink_to(found)
    path = tmp_path / "hosts"
    path.write_text("a.example\n")
    ended = refused(tmp_path, "--hosts", str(path), PATH=str(folder))
    assert "the host a.example is reached by ssh, which is not on PATH" in ended.last


@needs_ranks
@pytest.mark.thorough
def test_two_hosts_run_a_rank_each(tmp_path: Path) -> None:
    """They are this machine twice, so that Open MPI has no way between them: they only begin."""
    options, environment = hosts(tmp_path, "one slots=1\ntwo slots=1\n")
    code = "import os; print(os.environ['PMIX_HOSTNAME'], os.environ['OMPI_COMM_WORLD_SIZE'])"
    ended = start(tmp_path, code, *options, environment=environment).finish()
    assert (ended.status, ended.left) == (0, set()), ended.err
    assert [ended.of(rank)[0].split()[-1] for rank in range(2)] == ["2", "2"]


@needs_ranks
def test_a_host_without_this_python_is_named(tmp_path: Path) -> None:
    options, environment = hosts(tmp_path, "bare\nlocalhost\n")
    ended = refused(tmp_path, *options, **environment)
    assert "the host bare cannot run umem by " in ended.last and "not found" in ended.last


def test_a_small_dev_shm_is_said_and_files_are_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from umem.launch import small_shm

    said: list[str] = []
    monkeypatch.setattr(mpi, "room_in_shm", lambda: 64 << 20)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert small_shm(2, said.append) == {} and not said
    assert small_shm(4, said.append) == {"OMPI_MCA_btl_sm_backing_directory": str(tmp_path)}
    assert len(said) == 1
    assert said[0].startswith("umem: 64.0 MiB are free in /dev/shm and 4 ranks may need 96.0 MiB")


@needs_ranks
def test_doctor_says_which_mpi_is_here() -> None:
    result = CliRunner().invoke(main, ["doctor", "--device", "virtual:t4", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["mpi"] == mpi.describe_mpi()
    assert "by mpi4py" in mpi.describe_mpi() and "mpiexec" in mpi.describe_mpi()


def test_doctor_says_why_there_is_no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "find_spec", lambda name: None)
    assert mpi.describe_mpi().startswith("several ranks need mpi4py; pip install")
