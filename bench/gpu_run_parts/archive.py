"""The results of bench/gpu_run.py: one zip, whole at every moment, beside it what runs now."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 60.0
"""How long to wait for what a killed run has left: its keeper needs a moment to end a step."""


class Archive:
    """One zip of results.

    It is written anew and put in the place of the last one, so that who is killed while writing
    leaves the last one.

    Args:
        path: of the zip; beside it ``PATH.running`` is what runs now.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.running = path.with_name(path.name + ".running")
        self.lock = -1

    def entries(self) -> dict[str, bytes]:
        """Read everything; nothing where there is no file yet.

        Raises:
            zipfile.BadZipFile, OSError: it is no archive, or cannot be read.
        """
        if not self.path.exists():
            return {}
        with zipfile.ZipFile(self.path) as file:
            return {name: file.read(name) for name in file.namelist()}

    def record(self, name: str) -> dict[str, Any]:
        """Read what was found of a step; nothing where nothing was."""
        try:
            found = json.loads(self.entries().get(f"{name}.json", b"{}"))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def add(self, name: str, record: dict[str, Any], output: bytes | None = None) -> None:
        """Write what was found of a step, in the place of what was there of it."""
        text = json.dumps(record, indent=1, default=str) + "\n"
        new = {f"{name}.json": text.encode(), **({} if output is None else {f"{name}.txt": output})}
        made = self.path.with_name(self.path.name + ".part")
        with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as file:
            for entry, content in sorted({**self.entries(), **new}.items()):
                file.writestr(entry, content)
        with open(made, "rb+") as written:
            os.fsync(written.fileno())
        made.replace(self.path)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Be alone in writing it; waits for what a killed run has left to be over.

        Raises:
            TimeoutError: another run has it.
        """
        self.lock = self._locked()
        try:
            yield
        finally:
            if not any(self.running.glob("*.json")):  # else there is something to take over
                shutil.rmtree(self.running, ignore_errors=True)
            os.close(self.lock)
            self.lock = -1

    def _locked(self) -> int:
        """Take the lock of the archive, which a killed run's keeper may hold for a while."""
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            self.running.mkdir(exist_ok=True)
            lock = os.open(self.running / "lock", os.O_RDWR | os.O_CREAT)
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.stat(self.running / "lock").st_ino == os.fstat(lock).st_ino:
                    return lock
            os.close(lock)
            if time.monotonic() > end:
                raise TimeoutError(f"another run is writing {self.path}")
            time.sleep(0.05)

    def begin(self, name: str, record: dict[str, Any]) -> tuple[Path, Path]:
        """Note that a step runs; returns the files for what it says and what it writes."""
        self.clear(name)
        (self.running / f"{name}.json").write_text(json.dumps(record), encoding="utf-8")
        return self.running / f"{name}.txt", self.running / f"{name}.result"

    def clear(self, name: str) -> None:
        """Forget what ran."""
        for suffix in ("txt", "result", "json"):  # the note last: it says that there is something
            (self.running / f"{name}.{suffix}").unlink(missing_ok=True)

    def take_over(self) -> None:
        """Add what a killed run has left, unless that got as far as adding it."""
        for note in sorted(self.running.glob("*.json")):
            name = note.stem
            try:
                left = json.loads(note.read_text(encoding="utf-8"))
            except ValueError:  # killed before it began
                left = {}
            if left and self.record(name).get("began") != left["began"]:
                text = self.running / f"{name}.txt"
                output = text.read_bytes() if text.exists() else b""
                self.add(name, {**left, "state": "killed"}, output)
            self.clear(name)
