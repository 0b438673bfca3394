"""Files: only regular ones are read; what is written is there whole, or all is as it was."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO, Any

import pytest

import umem
from umem._common import files
from umem._common.files import check_folder, check_target, claimed, open_regular, whole
from umem.errors import FileError, UmemError
from umem.graphs import karate_club, load_npz, save_npz
from umem.trace import Mark, Trace


def everything(folder: Path) -> dict[str, tuple[int, str]]:
    """Each name in a folder, hidden ones too: its mode, and where it leads or what it says."""
    found = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        text = os.readlink(path) if stat.S_ISLNK(mode) else ""
        found[str(path)] = mode, path.read_bytes().hex() if stat.S_ISREG(mode) else text
    return found


def graph_writer(path: Path) -> None:
    save_npz(path, karate_club())


def page_writer(path: Path) -> None:
    from umem.cli import write

    write(path, lambda file: file.write(b"page") and None, force=True)


WRITERS = {
    "a trace": lambda path: Trace([Mark("new")]).save(path, force=True),
    "a graph": graph_writer,
    "a report": page_writer,
    "any file": lambda path: put(path, b"new", force=True),
}


def put(path: Path, content: bytes, *, force: bool = False) -> None:
    with whole(path, force=force) as file:
        file.write(content)


# -- what is in the way ------------------------------------------------------------------------


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("planted", ["link", "dangling", "loop", "pipe", "folder", "to a folder"])
def test_what_is_planted_in_the_place_of_a_file_is_refused_and_stays(
    tmp_path: Path, writer: Any, planted: str
) -> None:
    path, victim = tmp_path / "out", tmp_path / "victim"
    victim.write_text("theirs")
    plant = {
        "link": lambda: path.symlink_to(victim),
        "dangling": lambda: path.symlink_to(tmp_path / "nowhere"),
        "loop": lambda: path.symlink_to(path),
        "pipe": lambda: os.mkfifo(path),
        "folder": lambda: path.mkdir(),
        "to a folder": lambda: path.symlink_to(tmp_path),
    }
    plant[planted]()
    before = everything(tmp_path)
    with pytest.raises(Exception) as caught:
        writer(path)
    assert isinstance(caught.value, UmemError) or type(caught.value).__name__ == "ClickException"
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("name", [".partial", "{}.partial", ".{}.partial", ".{}.probe", "{}.tmp"])
def test_files_of_any_name_beside_it_are_neither_followed_nor_replaced(
    tmp_path: Path, writer: Any, name: str
) -> None:
    """Names that a temporary file could have had, as links to what must not change."""
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    (tmp_path / name.format("out")).symlink_to(victim)
    before = everything(tmp_path)
    writer(tmp_path / "out")
    after = everything(tmp_path)
    assert stat.S_ISREG(after.pop(str(tmp_path / "out"))[0])
    assert after == before


def test_a_claim_follows_no_link_and_removes_no_file(tmp_path: Path) -> None:
    victim, probe = tmp_path / "victim", tmp_path / ".out.probe"
    victim.write_text("theirs")
    probe.symlink_to(victim)
    before = everything(tmp_path)
    with claimed(tmp_path / "out", force=False):
        assert everything(tmp_path) == before
    (tmp_path / "out").symlink_to(victim)
    with pytest.raises(UmemError, match="is a link"), claimed(tmp_path / "out", force=True):
        pass
    assert victim.read_text() == "theirs"


def test_the_temporary_name_cannot_be_guessed_and_is_made_by_this_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = set()
    for _ in range(5):
        with whole(tmp_path / "out", force=True):
            names |= {path.name for path in tmp_path.iterdir()} - {"out"}
    assert len(names) == 5
    monkeypatch.setattr("secrets.token_hex", lambda count: "known")
    (tmp_path / ".umem-known.tmp").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        put(tmp_path / "out", b"new", force=True)
    assert not (tmp_path / "victim").exists()
    assert (tmp_path / ".umem-known.tmp").is_symlink()


def test_what_appears_while_a_file_is_written_is_not_replaced_without_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for links in (True, False):
        path = tmp_path / f"out{links}"
        if not links:  # as on FAT
            monkeypatch.setattr(os, "link", no_links)
        with pytest.raises(FileError, match="exists"), whole(path) as file:
            file.write(b"new")
            path.write_text("theirs")
        assert path.read_text() == "theirs"
        put(tmp_path / f"other{links}", b"new")
        assert (tmp_path / f"other{links}").read_bytes() == b"new"
    assert len(list(tmp_path.iterdir())) == 4


def no_links(*_: object, **__: object) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


# -- whole or not at all -----------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError(errno.ENOSPC, "full")])
@pytest.mark.parametrize("exists", [True, False])
def test_an_error_on_the_way_leaves_all_as_it_was(tmp_path: Path, error: Any, exists: bool) -> None:
    path = tmp_path / "out"
    if exists:
        path.write_text("old")
    before = everything(tmp_path)
    with pytest.raises(BaseException) as caught, whole(path, force=True) as file:
        file.write(b"half")
        raise error
    assert caught.type in (error, type(error))
    assert everything(tmp_path) == before


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is full")
def test_a_disk_that_is_full_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fdopen

    def full(handle: int, mode: str) -> IO[bytes]:
        os.dup2(os.open("/dev/full", os.O_WRONLY), handle)
        return real(handle, mode)

    monkeypatch.setattr(files.os, "fdopen", full)
    with pytest.raises(UmemError, match=r"cannot write the trace to .*: no space left on device"):
        Trace([Mark("x")] * 1000).save(tmp_path / "out")
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_a_name_as_long_as_the_disk_allows_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    assert Trace([Mark("x")]).save(path).read_bytes()
    with claimed(path, force=True):
        pass


# -- permissions -------------------------------------------------------------------------------


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, 0o755])
def test_a_file_that_is_replaced_keeps_its_permissions(
    tmp_path: Path, writer: Any, mode: int
) -> None:
    path = tmp_path / "out"
    path.write_text("old")
    path.chmod(mode)
    writer(path)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert path.read_bytes() != b"old"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_has_the_permissions_that_any_has(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        put(tmp_path / "out", b"new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == mode


def test_the_contents_for_a_private_file_are_private_all_along(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("old")
    path.chmod(0o600)
    with whole(path, force=True):
        (temporary,) = set(tmp_path.iterdir()) - {path}
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600


def test_a_file_that_may_not_be_written_to_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out"
    path.write_text("kept")
    path.chmod(0o444)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_, **__: False)  # root may write anywhere
        with pytest.raises(FileError, match="is not writable"):
            put(path, b"new", force=True)
    assert path.read_text() == "kept"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_stays_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out"
    path.write_text("old")
    os.chown(path, 12345, 23456)
    put(path, b"new", force=True)
    assert (path.stat().st_uid, path.stat().st_gid, path.read_bytes()) == (12345, 23456, b"new")

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", refuse)
    with pytest.raises(FileError, match="belongs to another user or group"):
        put(path, b"newer", force=True)
    assert path.read_bytes() == b"new" and len(list(tmp_path.iterdir())) == 1


# -- looking and reading -----------------------------------------------------------------------


def test_what_is_in_the_way_is_said_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    check_target(tmp_path / "new", force=False)
    check_target(tmp_path / "file", force=True)
    with pytest.raises(FileError, match=r"file exists; do this$"):
        check_target(tmp_path / "file", force=False, way_out="do this")
    with pytest.raises(FileError, match="is not a regular file"):
        check_target(Path(os.devnull), force=True)
    check_folder(tmp_path)
    with pytest.raises(OSError):
        check_folder(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("what", ["pipe", "device", "linked device", "folder", "loop", "nothing"])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, what: str) -> None:
    path = tmp_path / "in"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "loop":
        path.symlink_to(path)
    elif what == "linked device":
        path.symlink_to("/dev/zero")
    elif what == "device":
        path = Path("/dev/zero")
    with pytest.raises(umem.errors.TraceError, match="cannot be read as a trace: ") as caught:
        Trace.load(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(umem.errors.DataError, match="cannot be read: "):
        load_npz(path)
    with pytest.raises(OSError):
        open_regular(path)


def test_what_becomes_a_pipe_after_it_was_looked_at_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    before = os.stat(tmp_path / "file")
    monkeypatch.setattr(files.os, "stat", lambda path: before)
    with pytest.raises(FileError, match="it is a pipe"):
        open_regular(tmp_path / "pipe")


def test_a_link_to_a_trace_is_read(tmp_path: Path) -> None:
    path = Trace([Mark("x")]).save(tmp_path / "x")
    (tmp_path / "link").symlink_to(path)
    assert Trace.load(tmp_path / "link") == Trace([Mark("x")])
