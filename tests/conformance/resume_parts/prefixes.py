"""Every prefix of the log of a run's file operations, and every disk that may be left there."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from resume_parts.forgetful_disk import RecordingDisk, after, crashes, lay_out
from umem.snapshots import FileOperations, prune, read_newest, sweep, write_snapshot

KEEP = 2


def arrays(step: int) -> dict[str, Any]:
    """What a run has at a step: a few arrays, of which it can be told."""
    random = np.random.default_rng(step)
    return {"W": random.random((5, 7)), "codes": random.integers(0, 255, 40, np.uint8)}


def record(root: Path, snapshots: int, kind: type[RecordingDisk] = RecordingDisk) -> list[Any]:
    """Write some snapshots, and one of them twice; returns the log of the operations."""
    disk = kind(root)
    folder = root / "run"
    disk.make_folder(folder)
    disk.synchronize_folder(root)
    for step in [*range(1, snapshots + 1), snapshots]:
        path = write_snapshot(disk, folder, step, arrays(step), {"step": step})
        disk.log.append(("done", step))
        prune(disk, path, KEEP)
    return disk.log


def try_all(
    snapshots: int, draws: int, kind: type[RecordingDisk] = RecordingDisk
) -> dict[str, int]:
    """Cut the log everywhere and load from every disk that may be left.

    Returns:
        how many ``prefixes`` and ``disks`` there were, and on how many the newest that was
        promised was ``lost``, what was loaded was ``wrong``, or the run was ``stuck``: it could
        not save its next snapshot.
    """
    found = {"prefixes": 0, "disks": 0, "lost": 0, "wrong": 0, "stuck": 0}
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "disk").mkdir()
        log = record(Path(name) / "disk", snapshots, kind)
        for cut in range(len(log) + 1):
            promised = max((step for op, step, *_ in log[:cut] if op == "done"), default=0)
            found["prefixes"] += 1
            for tree in crashes(after(log[:cut]), cut, draws):
                here = Path(name) / "left"
                lay_out(tree, here)
                found["disks"] += 1
                _judge(here / "run", promised, found)
                shutil.rmtree(here)
    return found


def _judge(folder: Path, promised: int, found: dict[str, int]) -> None:
    disk = FileOperations()
    saved, _ = read_newest(disk, folder)
    step = 0 if saved is None else saved.step
    found["lost"] += step < promised
    found["wrong"] += saved is not None and not _is(saved, step)
    if saved is not None:
        saved.close()
    found["stuck"] += not _goes_on(disk, folder, step + 1)


def _is(saved: Any, step: int) -> bool:
    wanted = arrays(step)
    return saved.values == {"step": step} and all(
        np.array_equal(saved.arrays[name], wanted[name]) for name in wanted
    )


def _goes_on(disk: FileOperations, folder: Path, step: int) -> bool:
    """Whether the run that begins there can save its next snapshot."""
    if not folder.exists():
        disk.make_folder(folder)
    sweep(disk, folder)
    prune(disk, write_snapshot(disk, folder, step, arrays(step), {"step": step}), KEEP)
    saved, _ = read_newest(disk, folder)
    good = saved is not None and saved.step >= step and _is(saved, saved.step)
    if saved is not None:
        saved.close()
    return good
