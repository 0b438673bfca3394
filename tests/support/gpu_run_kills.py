"""Kills bench/gpu_run.py again and again, and looks at what is left each time."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
import uuid
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MARK = "UMEM_TEST_OF_GPU_RUN"
GONE_SECONDS = 60.0
"""The longest wait for what a killed run had started."""


def marked(mark: str) -> list[str]:
    """List the processes that run with a mark in their environment, by their command lines."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
    return found


def left_running(mark: str) -> list[str]:
    """The same, after a moment for it to be gone."""
    end = time.monotonic() + GONE_SECONDS
    while (found := marked(mark)) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def records(archive: Path) -> dict[str, Any]:
    """What an archive has of each step; it must be whole."""
    if not archive.exists():
        return {}
    with zipfile.ZipFile(archive) as file:
        assert file.testzip() is None
        names = [name for name in file.namelist() if name.endswith(".json")]
        return {name.removesuffix(".json"): json.loads(file.read(name)) for name in names}


def killed_and_continued(
    program: Sequence[str], archive: Path, kills: int, longest_seconds: float, seed: int
) -> dict[str, Any]:
    """Run a program that writes an archive, kill it ``kills`` times, let it end at last.

    Returns what is in the archive. Nothing may be left running at any time, and nothing that was
    found be lost.
    """
    moments, mark = random.Random(seed), uuid.uuid4().hex
    environment = {**os.environ, MARK: mark}
    before: dict[str, Any] = {}
    done = 0
    while True:
        running = subprocess.Popen(
            [sys.executable, *program], env=environment, stdout=subprocess.PIPE, text=True
        )
        try:
            wait = moments.uniform(0, longest_seconds) if done < kills else None
            output, _ = running.communicate(timeout=wait)
        except subprocess.TimeoutExpired:
            running.kill()
            running.communicate()
            done += 1
        assert left_running(mark) == []
        now = records(archive)
        for name, record in before.items():
            if record["state"] in ("passed", "failed", "timed out") and name != "00-wheels":
                assert now[name] == record
        before = now
        if running.returncode >= 0:
            assert done == kills, f"it was over after {done} kills: {output}"
            assert not list(archive.parent.glob("*.running")), "something is left of the last step"
            return now
