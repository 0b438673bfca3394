"""Runs that are killed, at any moment and inside of each file operation, and go on."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from resume_parts.runs import Kind, serial, train
from umem.chainer.resume import saver
from umem.snapshots import FileOperations

OPERATIONS = (
    "make_folder",
    "create",
    "write",
    "synchronize",
    "synchronize_folder",
    "rename",
    "remove",
    "remove_folder",
)
LONGEST_SECONDS = 120.0


class KillingDisk(FileOperations):
    """A disk whose process is killed at one of its operations: before it, or after it.

    Args:
        operation: its name.
        number: which of that name, counted from 0.
        moment: "before" or "after"; a write is half done by then.
        note: a file to which the operation's name is written first.
    """

    def __init__(self, operation: str, number: int, moment: str, note: Path) -> None:
        self._operation, self._left, self._moment, self._note = operation, number, moment, note

    def _die(self) -> None:
        self._note.write_text(self._operation)
        os.kill(os.getpid(), signal.SIGKILL)

    def _around(self, name: str, do: Callable[[], Any]) -> Any:
        if name != self._operation:
            return do()
        self._left -= 1
        if self._left == -1 and self._moment == "before":
            self._die()
        result = do()
        if self._left == -1:
            self._die()
        return result

    def write(self, handle: int, data: memoryview) -> None:
        last = self._operation == "write" and self._left == 0
        part = data[: len(data) // 2] if last else data
        self._around("write", lambda: FileOperations.write(self, handle, part))


def _counted(name: str) -> Any:
    def operation(self: KillingDisk, *args: Any) -> Any:
        return self._around(name, lambda: getattr(FileOperations, name)(self, *args))

    return operation


for _name in OPERATIONS:
    if _name != "write":
        setattr(KillingDisk, _name, _counted(_name))


# -- a life of a run ---------------------------------------------------------------------------


def live(kind: Kind, folder: Path, disk: FileOperations | None, after: float | None) -> bool:
    """Have a child process train; returns whether it came to its end.

    Args:
        disk: its disk, where that is to kill it.
        after: seconds until it is killed; None lets it live.
    """
    child = os.fork()
    if child == 0:
        _be_the_child(kind, folder, disk)
    try:
        status = _wait(child, after)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # the workers of its iterator
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return False
    if status:
        raise RuntimeError(f"a run of {kind.name!r} failed: {(folder / 'error').read_text()}")
    return True


def _be_the_child(kind: Kind, folder: Path, disk: FileOperations | None) -> None:
    code = 1
    try:
        os.setsid()
        sys.stderr = open(os.devnull, "w")
        if disk is not None:
            saver.FileOperations = lambda: disk  # type: ignore[assignment, misc]
        train(kind, folder)
        code = 0
    except BaseException:
        (folder / "error").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def _wait(child: int, after: float | None) -> int:
    end = time.monotonic() + (LONGEST_SECONDS if after is None else after)
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.002)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if after is None:
        raise RuntimeError("a run does not end")
    return status


# -- many of them ------------------------------------------------------------------------------


def losses(folder: Path) -> list[tuple[int, str]]:
    """The update and the loss of every line that was written, in order."""
    lines = (folder / "losses").read_text().splitlines() if (folder / "losses").exists() else []
    return [(int(number), loss) for number, loss in (line.split() for line in lines)]


def warm_up(kinds: Sequence[Kind]) -> None:
    """Have this process load and compile what its children would, where that leaves nothing on."""
    for kind in kinds:
        if kind.iterator is serial and kind.prepare is None:
            with tempfile.TemporaryDirectory() as name:
                train(kind, Path(name), 1)


def kill(kind: Kind, kills: int, seed: int) -> dict[str, Any]:
    """Kill runs of a kind until there were so many kills; every run goes on to its end.

    Returns:
        a row: ``kills``, ``resumes`` (runs that began after a kill), ``runs``, ``wrong`` (those
        with a loss that the run which nobody killed has not), and ``inside``: kills by operation.
    """
    random_ = random.Random(seed)
    inside: Counter[str] = Counter()
    row = {"kind": kind.name, "kills": 0, "resumes": 0, "runs": 0, "wrong": 0}
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name) / "whole"
        whole.mkdir()
        begin = time.monotonic()
        live(kind, whole, None, None)
        seconds, wanted = time.monotonic() - begin, dict(losses(whole))
        while row["kills"] < kills:
            folder = Path(name) / f"run-{row['runs']}"
            folder.mkdir()
            while not _life(kind, folder, row, kills, inside, random_, seconds):
                row["resumes"] += 1
            row["runs"] += 1
            found = losses(folder)
            good = all(wanted[number] == loss for number, loss in found)
            row["wrong"] += not (good and {number for number, _ in found} == wanted.keys())
    return {**row, "inside": dict(sorted(inside.items()))}


def _life(
    kind: Kind,
    folder: Path,
    row: dict[str, Any],
    kills: int,
    inside: Counter[str],
    random_: random.Random,
    seconds: float,
) -> bool:
    """Have a run live once, and be killed where there are kills left; whether it ended."""
    disk, after, note = None, None, folder / "killed in"
    if row["kills"] < kills:
        if random_.random() < 0.6:
            operation, moment = random_.choice(OPERATIONS), random_.choice(("before", "after"))
            disk = KillingDisk(operation, random_.randrange(12), moment, note)
        else:
            after = random_.uniform(0.0, seconds)
    if live(kind, folder, disk, after):
        return True
    row["kills"] += 1
    inside[note.read_text() if after is None else "at a random moment"] += 1
    return False
