"""``umem replay TRACE``: a recorded step on the models of GPUs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import click
from rich.console import Console

import umem
from umem._common.as_json import json_text, named
from umem._common.printable import short
from umem._common.specs import GPUS, gpu_spec
from umem.cli.files_and_sizes import caps, say, spec_with_vram
from umem.cli.help_layout import Names
from umem.devices import MODES, Mode
from umem.predict import Replay
from umem.reports import Column, table, wrapped
from umem.trace import Trace
from umem.units import format_bytes, format_seconds

NOTHING_FITS = 3
"""Exit status if the trace fits nowhere; 1 and 2 are errors."""


@click.command("replay")
@click.argument("path", metavar="TRACE", type=click.Path(path_type=Path))
@click.option("--gpu", metavar="NAME", help="The GPU, such as v100-16gb (default: t4).")
@click.option("--vram", metavar="SIZE", help="Usable VRAM, such as 12GiB (default: the card's).")
@click.option(
    "--mode",
    "modes",
    type=Names(MODES),
    metavar="MODE",
    multiple=True,
    help="The memory mode: managed, hybrid or unmanaged (default: all). May be repeated.",
)
@click.option("--all-gpus", is_flag=True, help="Replay on every GPU that umem knows.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@caps
def command(
    path: Path,
    gpu: str | None,
    vram: str | None,
    modes: tuple[Mode, ...],
    all_gpus: bool,
    as_json: bool,
    max_events: int,
    max_bytes: int,
) -> None:
    """Predict the memory and time of a recorded step on a GPU.

    TRACE is a file of `umem run --record` or umem.record(). Nothing runs: memory and times come
    from a model of the GPU, and are simulated. A trace recorded with NumPy is replayed with
    NumPy's bytes. The exit status is 3 if the trace fits nowhere.

    \b
    Examples:

    \b
        # Replay on a T4, in each memory mode
        umem replay out/run.umem.gz --gpu t4
        # Which GPUs have room for it?
        umem replay out/run.umem.gz --all-gpus --mode unmanaged
    """
    if isinstance(sys.stdout, TextIOWrapper):  # names may have letters that it cannot write
        sys.stdout.reconfigure(errors="backslashreplace")
    if all_gpus and (gpu is not None or vram is not None):
        raise click.UsageError("--all-gpus replays on every GPU. Leave out --gpu and --vram")
    gpus = list(map(gpu_spec, GPUS)) if all_gpus else [spec_with_vram(gpu or "t4", vram)]
    trace = Trace.load(path, max_events=max_events, max_bytes=max_bytes)
    found = [umem.replay(trace, each, mode) for each in gpus for mode in modes or MODES]
    if as_json:
        say(json_text({"simulated": True, "replays": [_plain(replay) for replay in found]}))
    else:
        for line in _lines(found, trace, short(path), Console().width):
            say(line)
    if not any(replay.fits for replay in found):
        click.get_current_context().exit(NOTHING_FITS)


def _seconds(replay: Replay) -> float | None:
    """Return the mean time of the steps, or of all where none ends; None where it does not fit."""
    if not replay.fits:
        return None
    steps = replay.step_seconds
    return sum(steps) / len(steps) if steps else replay.seconds


def _plain(replay: Replay) -> dict[str, Any]:
    """Return a replay without its timeline, for JSON."""
    return named(
        replay, ("gpu", "vram_bytes", "mode", "caveat", "because", *_FIGURES), _FIGURES
    ) | {"simulated_step_seconds": _seconds(replay), "reason": replay.reason}


_FIGURES = (
    "fits", "needed_bytes", "peak_bytes", "resident_peak_bytes", "migrated_bytes", "seconds",
    "seconds_low", "seconds_high",
)  # fmt: skip


def _lines(found: Sequence[Replay], trace: Trace, name: str, width: int) -> Iterator[str]:
    """Format replays of one trace as lines."""
    first = found[0]
    needs = f"{name} needs {format_bytes(first.needed_bytes)} at its peak"
    because = "" if first.because is None else f": {first.because}"
    yield from wrapped(f"{needs}{because}. All figures are simulated.", width)
    if first.caveat is not None:
        yield from wrapped(first.caveat, width)
    steps = len(first.step_seconds) or trace.step_count
    columns = [
        Column("GPU", [replay.gpu for replay in found]),
        Column("VRAM", [format_bytes(replay.vram_bytes) for replay in found], drop=3),
        Column("mode", [replay.mode for replay in found], left=True),
        Column("fits", ["yes" if replay.fits else "NO" for replay in found], left=True),
        Column("step" if steps else "time", [_time(replay) for replay in found]),
        Column("moved", [_moved(replay) for replay in found], drop=1),
    ]
    yield from table(columns, width)
    whole = "The time is that of the whole trace, because no step ends in it."
    text = f"The step time is the mean of {steps:,}." if steps else whole
    yield from wrapped(f"{text} Moved counts the whole trace, in both directions.", width)
    for reason in dict.fromkeys(replay.reason for replay in found if replay.reason is not None):
        yield from wrapped(reason, width)


def _time(replay: Replay) -> str:
    seconds = _seconds(replay)
    return "-" if seconds is None else format_seconds(seconds)


def _moved(replay: Replay) -> str:
    return format_bytes(replay.figures.moved_bytes) if replay.fits else "-"
