"""A program of a dry run reads back what it writes, and the disk stays as it was."""

from __future__ import annotations

import builtins
import fcntl
import gzip
import io
import logging
import os
import pickle
import posix
import shutil
import stat
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from umem.dry.disk import ScratchDisk, scratch_disk
from umem.dry.redirected import TREATMENTS
from umem.errors import DryRunError, StateError


def facts(folder: Path) -> dict[str, Any]:
    """Everything about a real folder, read by the functions that nobody replaces."""
    found: dict[str, Any] = {}
    for name in sorted(posix.listdir(str(folder))):
        path = f"{folder}/{name}"
        seen = posix.lstat(path)
        kept = seen.st_mode, seen.st_ino, seen.st_mtime_ns, seen.st_size, seen.st_nlink
        if stat.S_ISDIR(seen.st_mode):
            found[name] = kept, facts(Path(path))
        elif stat.S_ISLNK(seen.st_mode):
            found[name] = kept, posix.readlink(path)
        else:
            number = posix.open(path, os.O_RDONLY)
            found[name] = kept, posix.read(number, 1 << 20)
            posix.close(number)
    return found


def text(path: Any) -> str:
    """What the program reads."""
    with open(path) as file:
        return file.read()


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the user's, current; afterwards it has to be as it was."""
    folder = tmp_path / "work"
    (folder / "sub" / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("one\n")
    (folder / "sub" / "b.txt").write_text("bee")
    (folder / "sub" / "deep" / "c.txt").write_text("sea")
    (folder / "link").symlink_to("a.txt")
    (folder / "sublink").symlink_to(folder / "sub")
    monkeypatch.chdir(folder)
    before, beside = facts(folder), sorted(os.listdir(tmp_path))
    yield folder
    assert facts(folder) == before
    assert sorted(os.listdir(tmp_path)) == beside


@pytest.fixture
def disk(work: Path) -> Iterator[ScratchDisk]:
    with scratch_disk() as disk:
        yield disk
    assert not os.path.exists(disk.folder)


# -- what a program reads back ---------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["a.txt", "link", "sub/../a.txt", "./a.txt", "sub/deep/../../link"]
)
@pytest.mark.parametrize("kind", [str, os.fsencode, Path, os.path.abspath])
def test_a_file_is_appended_to_in_the_scratch_folder(
    disk: ScratchDisk, work: Path, name: str, kind: Callable[[str], Any]
) -> None:
    with open(kind(name), "a") as file:
        file.write("two")
    assert text("a.txt") == text(kind(name)) == "one\ntwo"
    assert os.path.getsize("link") == 7
    assert disk.written == (str(work / "a.txt"),)


def test_modes_of_open(disk: ScratchDisk) -> None:
    with open("a.txt", "r+") as file:
        assert file.read(2) == "on"
        file.seek(0)
        file.write("ONE")
    assert Path("a.txt").read_text() == "ONE\n"
    with open("a.txt", "w+b") as binary:
        binary.write(b"xyz")
        binary.seek(1)
        assert binary.read() == b"yz"
    with open("new", "x") as file:
        assert file.name == "new"
    with pytest.raises(FileExistsError):
        open("new", "x")
    with pytest.raises(FileExistsError):
        open("sub/b.txt", "xb")
    with pytest.raises(FileNotFoundError) as error:
        open("none/x", "w")
    assert error.value.filename == "none/x"
    with pytest.raises(FileNotFoundError):
        open("none", "r+")
    with pytest.raises(IsADirectoryError):
        open("sub", "w")
    with pytest.raises(FileNotFoundError):
        open("", "w")
    with pytest.raises(ValueError, match="mode"):
        open("a.txt", "wr")
    with open("a.txt", "rb", buffering=0) as raw:
        assert raw.name == "a.txt" and raw.read() == b"xyz"


def test_flags_of_os_open(disk: ScratchDisk, work: Path) -> None:
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND, os.O_RDONLY | os.O_TRUNC):
        os.close(os.open("a.txt", flags))
    assert Path("a.txt").read_text() == ""
    number = os.open("sub", os.O_RDONLY)
    other = os.open("new", os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600, dir_fd=number)
    assert os.write(other, b"12") == 2
    assert os.stat("new", dir_fd=number).st_size == 2
    os.rename("new", "newer", src_dir_fd=number, dst_dir_fd=number)
    os.mkdir("made", dir_fd=number)
    os.unlink("b.txt", dir_fd=number)
    assert sorted(os.listdir(number)) == sorted(os.listdir("sub")) == ["deep", "made", "newer"]
    os.close(number)
    os.close(other)
    with pytest.raises(OSError, match="symbolic links"):
        os.open("link", os.O_WRONLY | os.O_NOFOLLOW)


def test_files_are_renamed_and_removed(disk: ScratchDisk) -> None:
    os.rename("a.txt", "b")
    assert not os.path.exists("a.txt") and Path("b").read_text() == "one\n"
    assert os.path.islink("link") and not os.path.exists("link")
    os.replace("sub/b.txt", "b")
    assert Path("b").read_text() == "bee" and os.listdir("sub") == ["deep"]
    os.remove("b")
    with pytest.raises(FileNotFoundError):
        os.remove("b")
    with pytest.raises(FileNotFoundError):
        open("a.txt")
    assert not os.access("a.txt", os.F_OK) and os.access("sub", os.W_OK)
    os.unlink("link")
    assert sorted(os.listdir()) == ["sub", "sublink"]
    with pytest.raises(OSError, match="not empty"):
        os.rmdir("sub")
    with pytest.raises(IsADirectoryError):
        os.remove("sub")
    os.rename("sub", "moved")
    assert Path("moved/deep/c.txt").read_text() == "sea" and not os.path.exists("sublink/deep")
    assert list(os.walk(".")) == [
        (".", ["moved"] if os.path.isdir("moved") else [], ["sublink"]),
        ("./moved", ["deep"], []),
        ("./moved/deep", [], ["c.txt"]),
    ]


def test_facts_of_files_change(disk: ScratchDisk) -> None:
    os.chmod("a.txt", 0o600)
    os.utime("link", (5, 7))
    os.truncate("sub/b.txt", 1)
    Path("touched").touch()
    Path("a.txt").touch()
    found = os.stat("a.txt")
    assert stat.S_IMODE(found.st_mode) == 0o600 and found.st_mtime > 7
    assert Path("sub/b.txt").read_text() == "b" and os.path.getsize("touched") == 0
    number = os.open("sub/deep/c.txt", os.O_RDONLY)
    os.fchmod(number, 0o640)
    os.chmod(number, 0o641)
    os.utime(number, (1, 1))
    os.close(number)
    assert stat.S_IMODE(os.stat("sub/deep/c.txt").st_mode) == 0o641
    assert os.stat("sub/deep/c.txt").st_mtime == 1


def test_links_are_made(disk: ScratchDisk, work: Path) -> None:
    os.symlink("sub", "other")
    os.symlink(work / "a.txt", "sub/up")
    os.link("a.txt", "hard")
    with open("hard", "a") as file:
        file.write("two")
    assert Path("a.txt").read_text() == Path("sub/up").read_text() == "one\ntwo"
    Path("other/through").write_text("t")
    assert Path("sub/through").read_text() == "t" and os.readlink("other") == "sub"
    assert os.path.realpath("other/through") == str(work / "sub/through")
    with open("sublink/b.txt", "w") as file:
        file.write("new")
    assert Path("sub/b.txt").read_text() == "new"


def test_a_folder_that_was_removed_is_empty_when_it_is_made_again(disk: ScratchDisk) -> None:
    shutil.rmtree("sub")
    assert not os.path.exists("sub/deep/c.txt") and not os.path.isdir("sub")
    with pytest.raises(FileNotFoundError):
        Path("sub/x").write_text("")
    os.makedirs("sub/deep/new")
    assert os.listdir("sub") == ["deep"] and os.listdir("sub/deep") == ["new"]
    Path("sub/b.txt").write_text("again")
    shutil.rmtree("sub")
    os.mkdir("sub")
    assert os.listdir("sub") == [] and not os.path.exists("sub/b.txt")


def test_the_folder_that_the_program_lies_in_is_removed(disk: ScratchDisk, work: Path) -> None:
    shutil.rmtree(work)
    assert not work.exists()
    with pytest.raises(FileNotFoundError):
        os.mkdir("result")  # below the current folder, which is gone, as on any disk
    os.makedirs(work / "result")
    Path("result/log").write_text("x")
    assert os.listdir(work) == ["result"] and text("result/log") == "x"


def test_the_current_folder_may_be_new(disk: ScratchDisk, work: Path) -> None:
    os.makedirs("new/inner")
    os.chdir("new/inner")
    assert os.getcwd() == str(work / "new/inner") and os.getcwdb() == os.fsencode(os.getcwd())
    Path("x").write_text("1")
    assert text("x") == "1" and text("../../a.txt") == "one\n"
    assert os.listdir() == ["x"] and Path("x").resolve() == work / "new/inner/x"
    os.chdir(work)
    assert Path("new/inner/x").read_text() == "1"


def test_folders_show_what_the_program_sees(disk: ScratchDisk, work: Path) -> None:
    Path("new.txt").write_text("")
    os.remove("a.txt")
    names = ["link", "new.txt", "sub", "sublink"]
    assert sorted(os.listdir(work)) == sorted(p.name for p in work.iterdir()) == names
    assert sorted(os.listdir(os.fsencode(work))) == [os.fsencode(name) for name in names]
    with os.scandir() as entries:
        found = {entry.name: entry for entry in entries}
    assert found["sub"].is_dir() and not found["sub"].is_symlink() and found["sub"].path == "./sub"
    assert (
        found["new.txt"].is_file() and found["sublink"].is_symlink() and found["sublink"].is_dir()
    )
    assert found["new.txt"].inode() == os.stat("new.txt").st_ino
    assert sorted(work.glob("**/*.txt")) == [
        work / f"{n}.txt" for n in ("new", "sub/b", "sub/deep/c")
    ]


def test_libraries_write_and_read_back(disk: ScratchDisk) -> None:
    x = np.arange(6.0).reshape(2, 3)
    np.save("x.npy", x)
    np.savez("x.npz", x=x)
    with np.load("x.npz") as loaded:
        assert np.array_equal(loaded["x"], x)
    np.savetxt("x.csv", x)
    x.tofile("raw")
    x.dump("dumped")
    assert np.array_equal(np.load("x.npy", mmap_mode="r+"), x)
    assert np.array_equal(np.loadtxt("x.csv"), x)
    assert np.array_equal(np.fromfile("raw"), x.ravel())
    mapped = np.memmap("mapped", dtype="f4", mode="w+", shape=(3,))
    mapped[:] = 2
    mapped.flush()
    assert np.memmap("mapped", dtype="f4", mode="r").tolist() == [2, 2, 2]
    with zipfile.ZipFile("z.zip", "w") as archive:
        archive.writestr("in", "side")
    with zipfile.ZipFile("z.zip") as archive:
        assert archive.read("in") == b"side"
    with gzip.open("z.gz", "wt") as packed:
        packed.write("packed")
    with gzip.open("z.gz", "rt") as packed:
        assert packed.read() == "packed"
    with open("p", "wb") as file:
        pickle.dump({"a": 1}, file)
    assert pickle.loads(Path("p").read_bytes()) == {"a": 1}
    handler = logging.FileHandler("train.log")
    handler.emit(logging.makeLogRecord({"msg": "hello"}))
    handler.close()
    assert Path("train.log").read_text() == "hello\n"


def test_shutil_copies_and_moves(disk: ScratchDisk) -> None:
    shutil.copy("a.txt", "copy")
    shutil.copy2("copy", "sub")
    shutil.copyfile("link", "linked", follow_symlinks=False)
    shutil.copytree("sub", "tree", symlinks=True)
    shutil.move("tree", "elsewhere")
    shutil.move("a.txt", "elsewhere/deep")
    assert Path("elsewhere/deep/a.txt").read_text() == "one\n" == Path("sub/copy").read_text()
    assert os.path.islink("linked") and not os.path.exists("tree") and not os.path.exists("a.txt")
    with open("sub/b.txt", "rb") as source, open("sent", "wb") as target:
        assert os.sendfile(target.fileno(), source.fileno(), 0, 3) == 3
    assert Path("sent").read_text() == "bee"


def test_temporary_files_are_gone_with_the_run(work: Path) -> None:
    outside = tempfile.gettempdir()
    with scratch_disk():
        number, name = tempfile.mkstemp()
        os.close(number)
        kept = tempfile.mkdtemp()
        with tempfile.NamedTemporaryFile("w", dir=".", delete=False) as file:
            file.write("z")
        with tempfile.TemporaryFile() as nameless, tempfile.TemporaryDirectory() as folder:
            nameless.write(b"x")
            Path(folder, "x").write_text("")
        os.replace(name, "taken")
        os.replace(file.name, "also")
        assert os.path.exists("taken") and Path("also").read_text() == "z"
        assert os.path.exists(kept)
    assert not os.path.exists(kept) and tempfile.gettempdir() == outside


def test_an_atomic_write_replaces_the_file(disk: ScratchDisk) -> None:
    with tempfile.NamedTemporaryFile("w", dir=".", delete=False) as file:
        file.write("new")
        os.fsync(file.fileno())
    os.replace(file.name, "a.txt")
    assert Path("a.txt").read_text() == "new" and "tmp" not in "".join(os.listdir())


def test_an_opener_is_judged_by_what_it_opens(disk: ScratchDisk, work: Path) -> None:
    number = os.open("sub", os.O_RDONLY)
    with open("b.txt", "w", opener=lambda name, flags: os.open(name, flags, dir_fd=number)) as file:
        file.write("opened")
    os.close(number)
    assert Path("sub/b.txt").read_text() == "opened"
    with pytest.raises(DryRunError):
        open("a.txt", "w", opener=lambda name, flags: posix.open(name, flags))


def test_devices_pipes_and_descriptors_are_real(disk: ScratchDisk) -> None:
    for name in ("/dev/null", "/proc/self/fd/1", "/dev/stdout"):
        with open(name, "a") as file:
            file.write("")
    reading, writing = os.pipe()
    with open(writing, "w") as file:
        file.write("through")
    assert os.read(reading, 10) == b"through"
    os.close(reading)
    os.mkfifo("pipe")
    assert stat.S_ISFIFO(os.stat("pipe").st_mode)
    assert disk.written[-1].endswith("/pipe")


def test_ways_around_by_proc_lead_back(disk: ScratchDisk) -> None:
    Path("/proc/self/cwd/a.txt").write_text("changed")
    Path("/proc/self/root", str(Path("sub/b.txt").resolve())[1:]).write_text("changed")
    assert Path("a.txt").read_text() == Path("sub/b.txt").read_text() == "changed"


def test_caches_stay_real(
    work: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(cache))
    with scratch_disk() as disk:
        (cache / "kernel").write_text("compiled")
        (cache / "__pycache__").mkdir()
        os.replace(cache / "kernel", cache / "renamed")
        assert disk.written == ()
    assert (cache / "renamed").read_text() == "compiled" and (cache / "__pycache__").exists()


# -- the net ---------------------------------------------------------------------------------------

AROUND: dict[str, Callable[[], Any]] = {
    "FileIO": lambda: io.FileIO("a.txt", "w"),
    "FileIO, appending": lambda: io.FileIO("new", "a"),
    "open": lambda: posix.open("a.txt", os.O_WRONLY | os.O_TRUNC),
    "truncating": lambda: posix.open("a.txt", os.O_RDONLY | os.O_TRUNC),
    "remove": lambda: posix.remove("a.txt"),
    "unlink": lambda: posix.unlink("link"),
    "rmdir": lambda: posix.rmdir("sub/deep"),
    "mkdir": lambda: posix.mkdir("new"),
    "rename": lambda: posix.rename("a.txt", "b"),
    "replace": lambda: posix.replace("a.txt", "b"),
    "link": lambda: posix.link("a.txt", "b"),
    "symlink": lambda: posix.symlink("a.txt", "b"),
    "truncate": lambda: posix.truncate("a.txt", 0),
    "chmod": lambda: posix.chmod("link", 0o600),
    "utime": lambda: posix.utime("a.txt", (1, 1)),
    "chown": lambda: posix.chown("a.txt", os.getuid(), os.getgid()),
    "a folder's descriptor": lambda: posix.unlink("b.txt", dir_fd=os.open("sub", os.O_RDONLY)),
    "a file's descriptor": lambda: posix.chmod(os.open("a.txt", os.O_RDONLY), 0o600),
    "links of the scratch folder": lambda: posix.open("made", os.O_WRONLY),
}


@pytest.mark.thorough
@pytest.mark.parametrize("way", AROUND)
def test_what_cannot_be_redirected_stops_with_its_line(disk: ScratchDisk, way: str) -> None:
    os.symlink("a.txt", "made")
    with pytest.raises(DryRunError, match=r"^test_disk\.py:\d+ .* allow it with --writes real"):
        AROUND[way]()


def test_a_function_that_was_kept_before_the_run_stops(work: Path) -> None:
    class Kept:
        write = open

    with scratch_disk(), pytest.raises(DryRunError):
        Kept.write("a.txt", "w")


def test_every_function_that_tells_of_paths_is_treated() -> None:
    """os.supports_* list what takes a descriptor or a link in the place of a path."""
    listed = {f.__name__ for f in os.supports_dir_fd | os.supports_fd | os.supports_follow_symlinks}
    left = {"pathconf", "execve"}  # looks up a constant; is a program
    assert listed - left <= set(TREATMENTS)


# -- on and off ------------------------------------------------------------------------------------


def replaceable() -> list[Any]:
    return [builtins.open, io.open, *(getattr(os, name) for name in sorted(TREATMENTS))]


def test_all_is_as_before_after_an_error(work: Path) -> None:
    functions, variables, outside = replaceable(), dict(os.environ), tempfile.tempdir
    with pytest.raises(ZeroDivisionError), scratch_disk() as disk:
        assert os.environ["UMEM_DRY"] == "1" and os.environ["UMEM_DRY_DISK"]
        assert all(a is not b for a, b in zip(functions, replaceable(), strict=True))
        assert os.stat in os.supports_dir_fd and pickle.loads(pickle.dumps(os.remove)) is os.remove
        Path("a.txt").write_text("x")
        kept = open
        _ = 1 / 0
    assert all(a is b for a, b in zip(functions, replaceable(), strict=True))
    assert dict(os.environ) == variables and tempfile.tempdir == outside
    assert not os.path.exists(disk.folder)
    assert disk.written == (str(work / "a.txt"),)
    with kept("a.txt") as file:  # real again
        assert file.read() == "one\n"


def test_a_second_one_is_refused(disk: ScratchDisk) -> None:
    with pytest.raises(StateError, match="on already"), scratch_disk():
        pass
    Path("a.txt").write_text("x")
    assert disk.written


def test_a_scratch_folder_that_something_else_has_removed_has_no_files(disk: ScratchDisk) -> None:
    Path("a.txt").write_text("x")
    assert len(disk.written) == 1
    assert disk.overlay is not None
    posix.rename(disk.overlay.files, f"{disk.folder}/moved")
    assert disk.written == ()
    posix.rename(f"{disk.folder}/moved", disk.overlay.files)


def test_what_killed_runs_have_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is locked is that of a run, and a fresh one may be about to be locked."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, running, fresh = (tmp_path / f"umem-dry-{name}" for name in ("left", "running", "fresh"))
    for folder in (left, running, fresh):
        folder.mkdir()
        (folder / "x").write_text("")
        if folder != fresh:
            os.utime(folder, (0, 0))
    number = os.open(running, os.O_RDONLY)
    fcntl.flock(number, fcntl.LOCK_EX)
    with scratch_disk():
        pass
    assert [folder.exists() for folder in (left, running, fresh)] == [False, True, True]
    os.close(number)


@pytest.mark.parametrize("given", [{"writes": "no"}, {"programs": "maybe"}])
def test_words_are_checked(given: dict[str, str]) -> None:
    with pytest.raises(ValueError, match='writes must be "scratch"'), scratch_disk(**given):
        pass


def test_writes_may_be_real(tmp_path: Path) -> None:
    with scratch_disk(writes="real") as disk:
        (tmp_path / "x").write_text("real")
        io.FileIO(tmp_path / "y", "w").close()
        assert os.environ["UMEM_DRY"] == "1" and disk.written == ()
        with pytest.raises(DryRunError):
            os.system("true")
    assert (tmp_path / "x").read_text() == "real" and (tmp_path / "y").exists()


def test_threads_share_it(disk: ScratchDisk) -> None:
    errors: list[BaseException] = []

    def append(number: int) -> None:
        try:
            for turn in range(20):
                with open("a.txt", "a") as file:
                    file.write("x")
                Path(f"{number}-{turn}").write_text("")
                os.rename(f"{number}-{turn}", f"{number}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=append, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and Path("a.txt").read_text() == "one\n" + 40 * "x"
    assert {"0", "1"} < set(os.listdir())


def test_a_file_that_may_not_be_written_is_refused_as_ever(work: Path) -> None:
    if os.getuid() == 0:
        pytest.skip("root may write everything")
    os.chmod("a.txt", 0o400)
    with scratch_disk(), pytest.raises(PermissionError):
        open("a.txt", "a")
    os.chmod("a.txt", 0o644)
