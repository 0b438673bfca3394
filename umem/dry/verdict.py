"""The report of a dry run, for a person who asks whether a program will fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from umem.dry.outcome import DryOutcome
from umem.printable import printable
from umem.units import format_bytes, format_seconds


def report(outcome: DryOutcome, script: str) -> str:
    """Format an outcome as lines of text.

    Args:
        outcome: of the run.
        script: the program's short name.
    """
    vram = format_bytes(outcome.vram_bytes)
    title = f"umem: dry run of {script} on {outcome.title} with {vram} of VRAM"
    if outcome.mode != "unmanaged":
        title += f", {outcome.mode}"
    rows = [f"  {name:<12}{text}" for name, text in _rows(outcome)]
    lines = [f"{title} (simulated)", *_verdict(outcome), *rows]
    return "\n".join(printable(line) for text in lines for line in text.splitlines())


def _verdict(outcome: DryOutcome) -> Iterator[str]:
    """Yield the answer: fits or not, and on what that rests."""
    failure = outcome.failure
    lines = sorted({one.line for one in outcome.asked if not one.answered})
    where = _listed(lines)
    if failure is not None and outcome.ended == "out of memory":
        yield f"does not fit: out of memory at {failure.line}, in step {failure.step}"
        yield failure.explanation or failure.message
        return
    if failure is not None and outcome.ended == "asked too often":
        yield (
            f"not known whether it fits: {failure.line} asks for values again and again, as a loop "
            "does that ends by a value"
        )
        yield f"  say which: --answer {failure.line}=VALUE"
        return
    if failure is not None:
        yield (
            f"not known whether it fits: the script failed at {failure.line}, in step "
            f"{failure.step}: {failure.message}"
        )
        if lines:
            answer = f"--answer {lines[0]}=VALUE"
            yield f"  before, it read values that are not known at {where}: {answer}"
        return
    if outcome.ended == "interrupted":
        yield "not known whether it fits: interrupted; so far:"
    elif outcome.exit_status:
        yield "not known whether it fits: the script ended itself with an exit status of its own"
    else:
        yield f"fits, if the values asked for at {where} are as assumed" if lines else "fits"


def _rows(outcome: DryOutcome) -> Iterator[tuple[str, str]]:
    """Yield the figures, each with its name."""
    peak, reserved = map(format_bytes, (outcome.peak_bytes, outcome.reserved_peak_bytes))
    yield "peak", f"{peak} in use, {reserved} with CuPy's pool"
    has_steps = bool(outcome.steps_run)
    if outcome.step_seconds is not None:
        what = "a step" if has_steps else "in all"
        yield "time", f"{format_seconds(outcome.step_seconds)} {what} (simulated)"
        for name, seconds, count in (
            ("epoch", outcome.epoch_seconds, outcome.epoch_steps),
            ("whole run", outcome.run_seconds, outcome.steps_in_script),
        ):
            if seconds is not None:
                yield name, f"{format_seconds(seconds)} for {count:,} steps (simulated)"
        yield "moved", f"{format_bytes(outcome.moved_bytes)} {what}"
    if has_steps:
        yield "ran", _ran(outcome)
    yield "script", f"{format_seconds(outcome.wall_seconds)} here, without the GPU's work"
    for caught in outcome.caught_out_of_memory:
        yield (
            "caught",
            f"out of memory at {caught.line}, {_times(caught.error_count)}; the script goes on",
        )
    counts: Counter[str] = Counter()
    kernels: dict[str, list[str]] = {}
    for one in outcome.asked:
        counts[one.line] += one.read_count
        kernels.setdefault(one.line, []).append(one.what)
    answered = {one.line for one in outcome.asked if one.answered}
    for line, count in counts.items():
        how = "as answered" if line in answered else f"--answer {line}=VALUE says another"
        yield "asked", f"{line}, {_times(count)}, of {', '.join(kernels[line][:3])}; {how}"
    for line in outcome.unused_answers:
        yield "answer", f"{line} asked for nothing: its --answer was not used"
    if outcome.first_connection is not None:
        yield "network", f"the script connects to {outcome.first_connection}"
    if outcome.written:
        count = len(outcome.written)
        files = "1 file" if count == 1 else f"{count} files"
        yield "disk", f"wrote {files}, to a scratch folder that is gone now"
    for note in outcome.notes:
        yield "note", note


def _ran(outcome: DryOutcome) -> str:
    whole = f" of {outcome.steps_in_script:,}" if outcome.steps_in_script is not None else ""
    text = f"{outcome.steps_run:,}{whole} steps"
    if outcome.ended == "steady":
        text += ", the last two alike"
    if outcome.evaluated is not None:
        text += ", and evaluation" if outcome.evaluated else "; no evaluation"
    return text


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _listed(lines: list[str]) -> str:
    if len(lines) < 3:
        return " and ".join(lines)
    return f"{', '.join(lines[:2])} and {len(lines) - 2} more lines"
