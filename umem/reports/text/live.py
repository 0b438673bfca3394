"""A running program's memory and speed: a view for a terminal, a line, a summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rich.text import Text

from umem.trace.frameworks import names
from umem.units import format_bytes, format_seconds

_LABEL, _VALUE = 12, 12
_STYLES = {
    "now": "bold",
    "peak": "bold red",
    "parameters": "blue",
    "gradients": "magenta",
    "state": "yellow",
    "activations": "green",
    "inputs": "cyan",
}


@dataclass(frozen=True)
class Simulated:
    """What a virtual GPU says so far; all of it simulated."""

    gpu: str
    fault_count: int
    moved_bytes: int
    seconds: float


@dataclass(frozen=True)
class Seen:
    """What was seen of a run so far; ``kinds`` is what is alive now, or was at the peak.

    Rates are those of the last seconds; None where nothing has happened yet.
    """

    seconds: float
    step_count: int
    op_count: int
    current_bytes: int
    peak_bytes: int
    steps_per_second: float | None = None
    ops_per_second: float | None = None
    kinds: Mapping[str, int] = field(default_factory=dict)
    simulated: Simulated | None = None


def view(seen: Seen, width: int, bar: str = "━") -> Iterator[Text]:
    """The lines of the terminal's view; none is wider than ``width``, from 25 columns on."""
    yield _counted("steps", seen.step_count, seen.steps_per_second)
    yield _counted("operations", seen.op_count, seen.ops_per_second)
    room = max(0, width - _LABEL - _VALUE - 1)
    sizes = {"now": seen.current_bytes, "peak": seen.peak_bytes, **seen.kinds}
    for name, nbytes in sizes.items():
        length = round(room * nbytes / seen.peak_bytes) if seen.peak_bytes else 0
        text = Text(f"{name:<{_LABEL}}{format_bytes(nbytes):>{_VALUE}} ")
        yield text.append(bar * length, _STYLES.get(name, ""))
    if seen.simulated is not None:
        yield from _simulated_lines(seen.simulated)


def _counted(name: str, count: int, rate: float | None) -> Text:
    text = f"{name:<{_LABEL}}{count:>{_VALUE},}"
    return Text(text if rate is None else f"{text}  {_rate(rate)}/s")


def _simulated_lines(found: Simulated) -> Iterator[Text]:
    yield Text(f"simulated {found.gpu}", "dim")
    values = {
        "faults": f"{found.fault_count:,}",
        "moved": format_bytes(found.moved_bytes),
        "time": format_seconds(found.seconds),
    }
    for name, value in values.items():
        yield Text(f"  {name:<{_LABEL - 2}}{value:>{_VALUE}}", "dim")


def line(seen: Seen) -> str:
    """The same as one line, for a file or a pipe."""
    rates = [
        f"{_rate(rate)} {what}/s"
        for what, rate in (("steps", seen.steps_per_second), ("operations", seen.ops_per_second))
        if rate is not None
    ]
    now, peak = format_bytes(seen.current_bytes), format_bytes(seen.peak_bytes)
    return "; ".join(
        (
            ", ".join((f"umem: step {seen.step_count:,}", *rates)),
            f"{now} now: {_kinds(seen)}",
            f"{peak} peak",
            *_simulated(seen),
        )
    )


def summary(seen: Seen) -> str:
    """What a whole run came to, in one line; ``seen.kinds`` are those at the peak."""
    if not seen.op_count:
        return f"umem: no operation of {names()} ran in the script's main thread"
    took = f"umem: {seen.step_count:,} steps in {format_seconds(seen.seconds)}"
    if seen.step_count:
        took += f", {_rate(seen.step_count / seen.seconds)}/s"
    peak = f"peak {format_bytes(seen.peak_bytes)}: {_kinds(seen)}"
    return "; ".join((took, peak, *_simulated(seen)))


def _kinds(seen: Seen) -> str:
    parts = (f"{name} {format_bytes(nbytes)}" for name, nbytes in seen.kinds.items() if nbytes)
    return ", ".join(parts) or "nothing"


def _simulated(seen: Seen) -> Iterator[str]:
    found = seen.simulated
    if found is not None:
        moved, seconds = format_bytes(found.moved_bytes), format_seconds(found.seconds)
        faults = f"{found.fault_count:,} faults"
        yield f"simulated {found.gpu}: {faults}, {moved} moved, {seconds}"


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.2g}" if rate < 1 else f"{rate:.1f}"
