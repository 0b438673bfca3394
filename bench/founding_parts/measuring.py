"""Steps of several trainings in turn, each in a process of its own."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from founding_parts.worker import Settings

HERE = Path(__file__).resolve().parent
LEARNING_STEPS = 3
"""What Recompute needs to learn a graph and plan; accumulation proves itself in the first."""


@dataclass(frozen=True)
class Measured:
    """A technique, what the source measured of it, and how it is switched on."""

    name: str
    published_mib: int | None
    settings: Settings


class Worker:
    """A training in a process of its own, from `__enter__` on."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __enter__(self) -> Worker:
        """Start the process that trains."""
        paths = [str(HERE.parents[1]), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "worker.py"), json.dumps(asdict(self._settings))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        return self

    def __exit__(self, *error: Any) -> None:
        self._process.communicate()

    def step(self) -> dict[str, float]:
        """Take one step, and say what it took.

        Raises:
            RuntimeError: the process has ended; its errors are on standard error.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"a training ended before its step: {self._settings}")
        found: dict[str, float] = json.loads(answer)
        return found


def measure(techniques: tuple[Measured, ...], repeats: int) -> list[dict[str, Any]]:
    """A row a technique; the first is the base, which all others are compared with."""
    tensors = [_tensor_bytes(technique.settings) for technique in techniques]
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(technique.settings)) for technique in techniques]
        for worker in workers:
            for _ in range(LEARNING_STEPS):
                worker.step()
        rounds = [[worker.step() for worker in workers] for _ in range(repeats)]
    rows = []
    for index, technique in enumerate(techniques):
        steps = [each[index] for each in rounds]
        rows.append(
            {
                "technique": technique.name,
                "published_mib": technique.published_mib,
                "tensor_bytes": tensors[index],
                "process_bytes": max(step["process_bytes"] for step in steps),
                "seconds": [step["seconds"] for step in steps],
            }
        )
    return [compared(row, rows[0]) for row in rows]


def _tensor_bytes(settings: Settings) -> float:
    """The most that arrays take in a settled step, with all that lasts."""
    with Worker(replace(settings, traced=True)) as worker:
        return [worker.step() for _ in range(LEARNING_STEPS + 1)][-1]["tensor_bytes"]


def compared(row: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Say of a row what it saves of the base, and in which time."""
    ratios = [a / b for a, b in zip(row["seconds"], base["seconds"], strict=True)]
    of_base = statistics.median(ratios)
    return {
        **row,
        "published_saved": _saved(row, base, "published_mib"),
        "tensors_saved": _saved(row, base, "tensor_bytes"),
        "process_saved": _saved(row, base, "process_bytes"),
        "time_ratio": of_base,
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
    }


def _saved(row: dict[str, Any], base: dict[str, Any], key: str) -> float | None:
    return None if row[key] is None else 1 - row[key] / base[key]
