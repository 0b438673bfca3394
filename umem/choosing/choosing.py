"""`choose`: run a program dry under each technique, and list the quickest that fits first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from threading import Event
from typing import Any

from umem._common.as_json import named
from umem._common.printable import command_line
from umem._common.specs import gpu_spec
from umem.choosing.child import UNTOUCHED, DryProgram, DryResult, MadeAt, run_dry
from umem.choosing.technique import Technique
from umem.choosing.technique_rows import TECHNIQUES
from umem.errors import DryRunError
from umem.units import format_bytes, parse_bytes

AT_A_TIME = 2
"""Dry runs at a time: laptops have at least as many cores, and each run takes a few hundred MiB of
host memory. A choice: no measurement compares it with others."""
REPEATS = 3
"""Dry runs of a technique with managed memory, or of one that fits with little to spare. The chunk
that CuPy's pool hands out depends on addresses, so the pool's gaps differ from process to process,
and the time by tens of percent. Three is the least number whose median ignores an outlier; no
measurement compares it with more."""

RunDry = Callable[[DryProgram, Technique, Event], DryResult]


@dataclass(frozen=True)
class TriedTechnique:
    """A program under a technique (simulated).

    Attributes:
        name: the technique's name.
        line: the command or the line of Python that turns it on.
        results: the results of its dry runs.
    """

    name: str
    line: str
    results: tuple[DryResult, ...]

    simulated = True

    @property
    def fits(self) -> bool:
        """Tell whether every dry run fits the GPU's memory."""
        return all(one.why_not is None for one in self.results)

    @property
    def why_not(self) -> str | None:
        """Return why it does not fit, or why that is unknown; None if it fits."""
        return next((one.why_not for one in self.results if one.why_not is not None), None)

    @property
    def failed(self) -> bool:
        """Tell whether a dry run ended with an error other than running out of memory."""
        return any(one.failed for one in self.results)

    @property
    def missing_bytes(self) -> int | None:
        """Return the least number of bytes that were missing; None if it is unknown."""
        return max((one.missing_bytes for one in self.results if one.missing_bytes), default=None)

    @property
    def seconds(self) -> float | None:
        """Return the time of a step, the median of the dry runs; None if it does not fit."""
        return median(one.seconds[-1] for one in self.results) if self.fits else None

    @property
    def seconds_low(self) -> float | None:
        """Return the shortest time."""
        return min(second for one in self.results for second in one.seconds) if self.fits else None

    @property
    def seconds_high(self) -> float | None:
        """Return the longest time."""
        return max(second for one in self.results for second in one.seconds) if self.fits else None

    @property
    def width(self) -> float:
        """Return the width of the range of times."""
        return (self.seconds_high or 0.0) - (self.seconds_low or 0.0)

    @property
    def peak_bytes(self) -> int:
        """Return the most that arrays used."""
        return max(one.peak_bytes for one in self.results)

    @property
    def reserved_peak_bytes(self) -> int:
        """Return the most that CuPy's pool took."""
        return max(one.reserved_peak_bytes for one in self.results)

    @property
    def moved_bytes(self) -> int:
        """Return the bytes that a step moved over the bus, the median of the dry runs."""
        return round(median(one.moved_bytes for one in self.results))

    def to_json(self) -> dict[str, Any]:
        """Return it for JSON."""
        keys = (
            "name", "line", "simulated", "fits", "seconds", "seconds_low", "seconds_high",
            "peak_bytes", "reserved_peak_bytes", "moved_bytes", "why_not", "missing_bytes",
        )  # fmt: skip
        return named(self, keys)


@dataclass(frozen=True)
class ScriptChoice:
    """A program under every technique (simulated).

    Attributes:
        program: the program and the GPU.
        title, vram_bytes: the GPU's title and VRAM.
        rows: the techniques: those that fit, the quickest first; then the others, the fewest
            missing bytes first.
        uses_chainer: whether the program uses Chainer; the techniques differ.
        large_arrays: of a program without Chainer, the lines that make large arrays.
        asked_lines: lines that read unknown values.
    """

    program: DryProgram
    title: str
    vram_bytes: int
    rows: tuple[TriedTechnique, ...]
    uses_chainer: bool
    large_arrays: tuple[MadeAt, ...] = ()
    asked_lines: tuple[str, ...] = ()

    simulated = True

    @property
    def fitting(self) -> tuple[TriedTechnique, ...]:
        """Return the rows that fit."""
        return tuple(row for row in self.rows if row.fits)

    @property
    def best(self) -> TriedTechnique | None:
        """Return the first row that fits; None if none does."""
        return next(iter(self.fitting), None)

    @property
    def has_steps(self) -> bool:
        """Tell whether the program has steps; the times are of one, else of all of it."""
        return any(one.has_steps for row in self.rows for one in row.results)

    @property
    def summary(self) -> str:
        """Return a sentence on the fewest missing bytes if nothing fits; otherwise an empty text.

        The bytes are a lower bound: the run ended at the first allocation that failed.
        """
        if self.fitting:
            return ""
        short = [row for row in self.rows if row.missing_bytes is not None]
        if not short:
            return "nothing fits"
        least = min(short, key=lambda row: row.missing_bytes or 0)
        return (
            f"nothing fits; {least.name} comes closest, and needs at least "
            f"{format_bytes(least.missing_bytes)} more"
        )

    @property
    def advice(self) -> str:
        """Return a sentence on ways to change a program without Chainer; empty with Chainer.

        They need the order in which the program uses its arrays, which it must declare itself.
        """
        if self.uses_chainer or not self.large_arrays:
            return ""
        made = ", ".join(f"{one.line} ({format_bytes(one.nbytes)})" for one in self.large_arrays)
        return (
            "If you can change the program: umem.blocks computes on host arrays in parts, and "
            "umem.lookahead moves managed arrays to the GPU before they are used. The arrays to "
            f"use them on are made at {made}"
        )

    def line_of(self, row: TriedTechnique) -> str:
        """Return the line to type for a row; a command includes the program."""
        return row.line if not row.line.startswith("umem run") else full_line(row, self.program)

    def to_json(self) -> dict[str, Any]:
        """Return it for JSON."""
        rows = [{**row.to_json(), "line": self.line_of(row)} for row in self.rows]
        keys = (
            "simulated", "title", "vram_bytes", "uses_chainer", "summary", "advice", "asked_lines",
        )  # fmt: skip
        extra = {"gpu": self.program.gpu, "program": self.program.argv()}
        return {**named(self, keys), **extra, "rows": rows}


def full_line(row: TriedTechnique, program: DryProgram) -> str:
    """Return a row's command with the program in it, before its comment."""
    command, mark, comment = row.line.partition("  # ")
    return f"{command} {command_line(*program.argv())}{mark}{comment}"


def choose(
    script: str,
    *args: str,
    gpu: str = "t4",
    vram: int | str | None = None,
    options: Sequence[str] = (),
) -> ScriptChoice:
    """Find the techniques that make a program fit a GPU, by a dry run under each.

    Each dry run executes the technique's own code, without arithmetic, in a process of its own, and
    takes seconds; two run at a time. Techniques with managed memory, and those that fit with little
    to spare, run three times.

    Args:
        script: a Python program that trains or computes on a GPU with CuPy; it is not edited.
        args: the program's arguments, as on a command line.
        gpu: a GPU's name in the table, such as ``"t4"``.
        vram: usable VRAM in bytes, or as text such as "8GiB"; None: the table's figure.
        options: options of ``umem run --dry``, such as ``["--answer", "train.py:41=1000"]``.

    Raises:
        DryRunError: without any technique the program fails for another reason than memory, or it
            uses no GPU memory.
        UnknownGpuError, SizeError: see `umem.software_gpu`.
    """
    gpu_spec(gpu)
    size = None if vram is None else str(parse_bytes(vram, "vram"))
    given = tuple(map(str, args))
    return choose_for(DryProgram(str(script), given, gpu, size, options=tuple(options)))


@contextmanager
def two_at_a_time(stop: Event) -> Iterator[ThreadPoolExecutor]:
    """Provide threads for dry runs; an error in the block, such as an interrupt, ends the runs.

    Args:
        stop: the runs' event, which an error sets.
    """
    with ThreadPoolExecutor(AT_A_TIME) as executor:
        try:
            yield executor
        except BaseException:
            stop.set()
            executor.shutdown(cancel_futures=True)
            raise


def choose_for(
    program: DryProgram,
    on_tried: Callable[[str], object] = lambda name: None,
    run_dry: RunDry = run_dry,
    techniques: Sequence[Technique] = TECHNIQUES,
) -> ScriptChoice:
    """Find the techniques that make a program fit a GPU; see `choose`.

    Args:
        program: the program and the GPU.
        on_tried: called with the name of each technique that has been tried.
        run_dry: makes a dry run.
        techniques: the techniques to try; the first is the unchanged program.
    """
    stop = Event()
    plain, *others = techniques
    first = run_dry(program, plain, stop)
    check_uses_gpu(program, first)
    rows = [TriedTechnique(plain.name, plain.line, _repeated(first, run_dry, program, plain, stop))]
    on_tried(plain.name)
    suited = [row for row in others if row.suits(has_chainer=first.uses_chainer)]
    with two_at_a_time(stop) as executor:
        running: list[tuple[Technique, list[Future[tuple[DryResult, ...]]]]] = [
            (row, [executor.submit(_results, run_dry, program, row, stop) for _ in _repeats(row)])
            for row in suited
        ]
        for row, futures in running:
            results = tuple(one for future in futures for one in future.result())
            on_tried(row.name)
            rows.append(TriedTechnique(row.name, row.line, results))
    shown = [one for row in rows for one in row.results]
    return ScriptChoice(
        program,
        first.title,
        first.vram_bytes,
        tuple(ordered(rows)),
        first.uses_chainer,
        next((one.large_arrays for one in reversed(shown) if one.large_arrays), ()),
        tuple(dict.fromkeys(line for one in shown for line in one.asked_lines)),
    )


def _repeats(row: Technique) -> range:
    return range(REPEATS if row.is_paging else 1)


def _results(
    run_dry: RunDry, program: DryProgram, row: Technique, stop: Event
) -> tuple[DryResult, ...]:
    """Run a program under a technique; several times if it fits with little to spare."""
    first = run_dry(program, row, stop)
    return (first,) if row.is_paging else _repeated(first, run_dry, program, row, stop)


def _repeated(
    first: DryResult, run_dry: RunDry, program: DryProgram, row: Technique, stop: Event
) -> tuple[DryResult, ...]:
    """Return a dry run, and more of them if another order of the pool's chunks may not fit."""
    if first.why_not is not None or not first.is_tight:
        return (first,)
    return (first, *(run_dry(program, row, stop) for _ in range(REPEATS - 1)))


def check_uses_gpu(program: DryProgram, plain: DryResult) -> None:
    """Refuse a program that fails by itself, or does not use the GPU.

    Raises:
        DryRunError: the program is refused.
    """
    name = command_line(*program.argv())
    if plain.failed:
        raise DryRunError(f"cannot run {name}: {plain.why_not}")
    if plain.why_not in (None, UNTOUCHED) and not plain.peak_bytes:
        on_numpy = ""
        if plain.uses_chainer:
            budget = f"umem run --recompute {program.vram or 'SIZE'}"
            on_numpy = f". To train with NumPy within a budget: {budget}"
        raise DryRunError(
            f"{name} allocates nothing on the GPU, so there is nothing to choose. If it has an "
            f"option for the GPU, such as -g 0 or --device 0, add it{on_numpy}"
        )


def ordered(rows: Sequence[TriedTechnique]) -> list[TriedTechnique]:
    """Order rows: those that fit, the quickest first; those that do not, the fewest missing bytes
    first; and last those that failed otherwise.

    The first of ``rows`` is the unchanged program. If it fits, it precedes all rows that are not
    quicker by more than the width of their range. Rows of equal times keep their order.
    """
    fitting = sorted((row for row in rows if row.fits), key=lambda row: row.seconds or 0.0)
    plain = rows[0]
    if plain.fits:
        assert plain.seconds is not None
        others = [row for row in fitting if row is not plain]
        better = [row for row in others if (row.seconds or 0.0) + row.width < plain.seconds]
        fitting = [*better, plain, *(row for row in others if row not in better)]
    missing = [row for row in rows if not row.fits]
    return fitting + sorted(missing, key=lambda row: (row.failed, row.missing_bytes or 0))
