"""Writes the summary of a run of tests on the software GPU, and annotations for CI."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from umem_software_gpu import faults, parsed, with_seed
from umem_software_gpu.each_test import OPENING
from umem_software_gpu.faults import Fault, Known

NEEDS_GPU = "needs_gpu"
INSTALLING, KERNELS = "umem.host_cuda.installing", "umem.host_cuda.kernels"
_DATA = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_PROPERTY = {**_DATA, ":": "%3A", ",": "%2C"}
"""Characters to escape in a workflow command's message and in its properties: escapeData and
escapeProperty of actions/toolkit, packages/core/src/command.ts.
"""


def figures() -> dict[str, Any]:
    """Return the counts of this process as simple values, which pytest-xdist can send."""
    kernels, opening, installing = map(sys.modules.get, (KERNELS, OPENING, INSTALLING))
    gpu = None if opening is None else opening.opened()
    peaks = [] if gpu is None else [each.figures.resident_peak_bytes for each in gpu.devices]
    return {
        "compiled": 0 if kernels is None else len(kernels.compiled),
        "absent": [] if installing is None else sorted(installing.absent),
        "peak": max((peak for peak in peaks if peak is not None), default=None),
    }


class Figures:
    """A pytest plugin for workers of pytest-xdist: sends their counts to the controller.

    Args:
        config: pytest's configuration, with a ``workeroutput``.
    """

    def __init__(self, config: Any) -> None:
        self._output = config.workeroutput

    def pytest_sessionfinish(self) -> None:
        self._output["umem"] = figures()


class Summary:
    """A pytest plugin that counts results, and prints a summary at the end.

    Args:
        text: the GPU, with the base seed.
        count: the number of base seeds that each test runs under.
        known: known faults, which fail no test.
        new: the file to write the found faults to, if any.
    """

    def __init__(self, text: str, count: int, known: set[Known], new: Path | None) -> None:
        self._text, self._count, self._known, self._new = text, count, known, new
        self._workers: list[dict[str, Any]] = []
        self._late = self._checked = self._needing = self._caught = 0
        self._ran: set[str] = set()
        self._found: set[Known] = set()
        self._absent: set[str] = set()
        self._failed: list[Any] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count a phase of a test, and keep its fault or failure for the summary."""
        facts = getattr(report, "umem", {})
        if report.when == "call" and not report.skipped:
            self._late += facts.get("late", False)
            self._checked += facts.get("checked", False)
        if report.when == "setup" and report.skipped and NEEDS_GPU in report.keywords:
            self._needing += 1
        self._caught += facts.get("caught", False)
        if "fault" in facts:
            test, *fault = facts["fault"]
            self._found.add(Known(test, Fault(*fault)))
        if "absent" in facts:
            self._absent.add(facts["absent"])
        self._ran.add(report.nodeid)
        if report.failed:
            self._failed.append(report)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._failed.append(report)

    @pytest.hookimpl(optionalhook=True)  # pytest-xdist's
    def pytest_testnodedown(self, node: Any) -> None:
        """Take a worker's counts; a crashed worker has none."""
        self._workers.append(getattr(node, "workeroutput", {}).get("umem", {}))

    def pytest_terminal_summary(self, terminalreporter: Any, config: Any) -> None:
        terminalreporter.write_line(self.line())
        for line in self._baseline():
            terminalreporter.write_line(line)
        has_other = config.pluginmanager.has_plugin("pytest_github_actions_annotate_failures")
        if os.environ.get("GITHUB_ACTIONS") == "true" and not has_other:
            for report in self._failed:
                terminalreporter.write_line(annotation(report, config.rootpath))

    def line(self) -> str:
        """Return the summary line."""
        all_figures = [figures(), *self._workers]
        seed: int | None = parsed(self._text)[1].get("stream_seed")
        parts = ["at once"]
        if seed is not None:
            last = seed + self._count - 1
            seeds = f"seed {seed}" if last == seed else f"seeds {seed} to {last}"
            parts = [seeds, f"{_counted(self._late, 'test')} late"]
        if parsed(self._text)[1].get("checked"):
            parts.append(f"{_counted(self._checked, 'test')} checked")
        compiled = sum(each.get("compiled", 0) for each in all_figures)
        parts.append(f"{_counted(compiled, 'kernel')} compiled")
        peaks = [each["peak"] for each in all_figures if each.get("peak") is not None]
        if peaks:
            parts.append(f"at most {max(peaks) / (1 << 20):,.1f} MiB of VRAM in use (simulated)")
        if self._needing:
            parts.append(f"{_counted(self._needing, 'test')} skipped (needs a real GPU)")
        if self._caught:
            parts.append(f"{_counted(self._caught, 'test')} caught a fault that ends the context")
        absent = {name for each in all_figures for name in each.get("absent", ())}
        others = {parts for parts in self._absent if not any(name in parts for name in absent)}
        if absent or others:
            parts.append(f"not there: {'; '.join(sorted(absent | others))}")
        return f"software GPU {with_seed(self._text, None)}: {', '.join(parts)}"

    def _baseline(self) -> Iterator[str]:
        """Yield lines about known faults; write the file of found faults."""
        if self._known:
            gone = [each for each in self._known - self._found if each.test in self._ran]
            yield f"known faults: {len(self._known & self._found)} found again, {len(gone)} gone"
            yield from (f"  gone: {each.test}: {' '.join(each.fault)}" for each in sorted(gone))
        if self._new is not None:
            faults.write(self._new, self._found)
            yield f"known faults: {len(self._found)} written to {self._new}"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


# -- annotations of GitHub Actions ---------------------------------------------------------------


def annotation(report: Any, root: Path) -> str:
    """Return a workflow command that marks a failure at the project's line, on one line.

    Args:
        report: the report of a failed test or collector.
        root: pytest's root; file names are relative to GITHUB_WORKSPACE, if that is set.
    """
    file, line = _place(report, root)
    place = f"file={escaped(file, _PROPERTY)}" + (f",line={line}" if line else "")
    return f"::error {place}::{escaped(f'{report.nodeid}: {_message(report)}', _DATA)}"


def escaped(text: str, letters: dict[str, str]) -> str:
    """Escape a message or a property."""
    return "".join(letters.get(letter, letter) for letter in text)


def _message(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(report.longreprtext if crash is None else crash.message)


def _place(report: Any, root: Path) -> tuple[str, int]:
    """Return the file and line, from 1, of the innermost frame in the project's code."""
    base = Path(os.environ.get("GITHUB_WORKSPACE") or root)
    name, number, _ = getattr(report, "location", None) or (report.nodeid.split("::")[0], None, "")
    found = root / name, (-1 if number is None else number) + 1
    for path, line in _frames(report):
        if (root / path).is_relative_to(root) and "site-packages" not in path.parts:
            found = root / path, line
    file, line = found
    return str(file.relative_to(base) if file.is_relative_to(base) else file), line


def _frames(report: Any) -> Iterator[tuple[Path, int]]:
    """Yield the frames of a failure, the outermost first."""
    traceback = getattr(report.longrepr, "reprtraceback", None)
    for entry in () if traceback is None else traceback.reprentries:
        place = getattr(entry, "reprfileloc", None)
        if place is not None:
            yield Path(place.path), place.lineno
