"""``umem run --dry GPU --all-gpus``: which GPUs of the table have the memory for a script.

A program whose pool never meets the end of VRAM runs alike on every GPU. So one run says it of all
GPUs with as much VRAM as its pool reserved, and of those with less than its arrays used. On those
between the pool would give back what it has cached, and they are run dry themselves.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from umem._common.specs import GPUS, GpuSpec
from umem.cli.run_ranks import umem_run

MOST_RUNS = 3
"""Sizes of VRAM between the two that are run: each takes as long as the first run. A choice that no
measurement supports."""


def which_fit(
    found: Mapping[str, Any], run: Callable[[str], Mapping[str, Any] | None]
) -> dict[str, bool | None]:
    """Tell of each GPU of the table whether the program fits; None where it was not tried.

    Args:
        found: the result of a dry run, as JSON has it.
        run: runs the program dry on a GPU; None where that is not possible.
    """
    gpus = sorted(GPUS.values(), key=lambda gpu: gpu.usable_bytes)
    if found["ended"] == "out of memory":
        larger = [gpu for gpu in gpus if gpu.usable_bytes > found["vram_bytes"] and gpu.chip]
        result = run(larger[-1].name) if larger else None
        if result is None or not result["fits"]:
            return {gpu.name: False if gpu.name == found["gpu"] else None for gpu in gpus}
        found = result
    tried: dict[int, bool | None] = {}
    fits: dict[str, bool | None] = {}
    for gpu in reversed(gpus):
        if gpu.usable_bytes >= found["reserved_peak_bytes"]:
            fits[gpu.name] = True
        elif gpu.usable_bytes < found["peak_bytes"]:
            fits[gpu.name] = False
        else:
            fits[gpu.name] = _tried(gpu, tried, run)
    return {gpu.name: fits[gpu.name] for gpu in gpus}


def _tried(
    gpu: GpuSpec, tried: dict[int, bool | None], run: Callable[[str], Mapping[str, Any] | None]
) -> bool | None:
    """Run the program on a GPU, unless one of its size has been tried, or enough have."""
    size = gpu.usable_bytes
    if size not in tried and len(tried) < MOST_RUNS and gpu.chip:
        result = run(gpu.name)
        is_out = result is not None and result["ended"] == "out of memory"
        tried[size] = True if result and result["fits"] else False if is_out else None
    return tried.get(size)


class Elsewhere:
    """Dry runs of a script on other GPUs, each in a process of its own.

    Args:
        arguments: the options but ``--dry``, the script and its arguments.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments, self._folder = arguments, Path.cwd()  # the script may change folders

    def which_fit(self, found: Mapping[str, Any]) -> dict[str, bool | None]:
        """Tell of each GPU whether the script fits, by its result on one; see `which_fit`."""
        if not found["fits"] and found["ended"] != "out of memory":
            return {}
        return which_fit(found, self._run)

    def _run(self, gpu: str) -> Mapping[str, Any] | None:
        with TemporaryDirectory(prefix="umem-") as folder:
            file = Path(folder, "dry.json")
            command = umem_run("--dry", gpu, "--json", str(file), *self._arguments)
            subprocess.run(command, capture_output=True, check=False, cwd=self._folder)
            return json.loads(file.read_text("utf-8")) if file.exists() else None


def lines(fits: Mapping[str, bool | None]) -> Iterator[str]:
    """Yield the GPUs with the same answer in a line each."""
    for answer, text in ((True, "fits on"), (False, "too large for"), (None, "not tried")):
        names = [name for name, each in fits.items() if each is answer]
        if names:
            yield f"  {text:<13} {', '.join(names)}"
            if answer is None:
                yield f"{'':16}To try one: umem run --dry {names[0]}"
