"""The report of a dry run as text: whether the program fits."""

from __future__ import annotations

from collections.abc import Iterator

from umem._common.printable import printable
from umem.dry.outcome import DryOutcome, Failure
from umem.units import format_bytes, format_seconds

_UNKNOWN = "not known whether it fits"
_MOST_LINES = 8
"""At most this many lines of the program are listed with their reads; the JSON has all."""


def report(outcome: DryOutcome, script: str) -> str:
    """Format an outcome as lines of text.

    Args:
        outcome: the run's outcome.
        script: the program's short name.
    """
    vram = format_bytes(outcome.vram_bytes)
    title = f"umem: dry run of {script} on {outcome.title} with {vram} of VRAM"
    if outcome.mode != "unmanaged":
        title += f", {outcome.mode}"
    rows = [f"  {name:<11}{text}" for name, text in _rows(outcome)]
    texts = [f"{title} (simulated)", *_verdict(outcome), *rows]
    return "\n".join(printable(line) for text in texts for line in text.splitlines())


# -- the answer --------------------------------------------------------------------------------


def _verdict(outcome: DryOutcome) -> Iterator[str]:
    """Yield the answer and its reason: fits, does not fit, or unknown."""
    lines = list(dict.fromkeys(one.line for one in outcome.asked if not one.answered))
    where = _listed(lines)
    if outcome.failure is not None:
        yield from _failed(outcome, outcome.failure, lines)
    elif outcome.ended == "interrupted":
        yield f"{_UNKNOWN}: the run was interrupted. Figures so far:"
    elif outcome.ended == "nothing on the GPU":
        yield (
            "nothing ran on the GPU. If the script has an option for the GPU, add it, such as "
            "--gpu 0 or --device @cupy:0"
        )
    elif outcome.exit_status:
        asked = f", after it read values that a dry run does not compute, at {where}"
        code = printable(str(outcome.own_exit_code))
        yield f"{_UNKNOWN}: the script exited with status {code}{asked if lines else ''}"
        if lines:
            yield f"  to supply a value: --answer {lines[0]}=VALUE"
    else:
        yield f"fits, if the values read at {where} are as assumed" if lines else "fits"


def _failed(outcome: DryOutcome, failure: Failure, lines: list[str]) -> Iterator[str]:
    """Yield the reason for the script's end."""
    if outcome.ended == "out of memory":
        when = f", in step {failure.step}" if outcome.has_steps else ""
        if failure.extension is not None:
            when = f", in the extension {failure.extension}, after step {failure.step - 1}"
        yield f"does not fit: out of memory at {failure.line}{when}"
        yield failure.explanation or failure.message
    elif outcome.ended == "asked too often":
        yield (
            f"{_UNKNOWN}: {failure.line} reads values again and again, probably in a loop that "
            f"waits for one. To supply it: --answer {failure.line}=VALUE"
        )
    elif failure.missing is not None:
        yield (
            f"{_UNKNOWN}: {failure.line} finds no file {failure.missing}. A file of the same "
            "shapes with any values is enough for a dry run"
        )
    else:
        when = f", in step {failure.step}" if outcome.has_steps else ""
        yield f"{_UNKNOWN}: the script failed at {failure.line}{when}: {failure.message}"
        if lines:
            yield (
                f"  It had read values that a dry run does not compute, at {_listed(lines)}. If "
                f"one is the cause, supply it: --answer {lines[-1]}=VALUE"
            )


# -- the figures -------------------------------------------------------------------------------


def _rows(outcome: DryOutcome) -> Iterator[tuple[str, str]]:
    """Yield the figures, each with its name."""
    peak, reserved = map(format_bytes, (outcome.peak_bytes, outcome.reserved_peak_bytes))
    yield "peak", f"{peak} in use, {reserved} with CuPy's pool"
    what = "a step" if outcome.steps_run else "in all"
    if outcome.step_seconds is not None:
        yield "time", f"{format_seconds(outcome.step_seconds)} {what} (simulated)"
    for name, seconds, count in (
        ("epoch", outcome.epoch_seconds, outcome.epoch_steps),
        ("whole run", outcome.run_seconds, outcome.steps_in_script),
    ):
        if seconds is not None:
            yield name, f"{format_seconds(seconds)} for {count:,} steps (simulated)"
    yield "moved", f"{format_bytes(outcome.moved_bytes)} {what}"
    if outcome.steps_run:
        yield "ran", _ran(outcome)
    yield "here", f"the script took {format_seconds(outcome.wall_seconds)}, loading data included"
    for caught in outcome.caught_out_of_memory:
        often = _times(caught.error_count)
        yield "caught", f"out of memory at {caught.line}, {often}; the script continued"
    yield from _asked(outcome)
    for line in outcome.unused_answers:
        yield "answer", f"{line} read no value, so its --answer was not used"
    if outcome.first_connection is not None:
        yield "network", outcome.first_connection
    if outcome.written:
        count = len(outcome.written)
        files = "1 file" if count == 1 else f"{count:,} files"
        yield "disk", f"wrote {files} to a scratch folder, now deleted"
    for note in outcome.notes:
        yield "note", note


def _ran(outcome: DryOutcome) -> str:
    """Format how much of the program ran."""
    whole = f" of {outcome.steps_in_script:,}" if outcome.steps_in_script is not None else ""
    text = f"{outcome.steps_run:,}{whole} {'steps' if outcome.steps_run > 1 or whole else 'step'}"
    if outcome.ended == "steady":
        text += ", until two were alike"
    if outcome.evaluated is not None:
        text += ", and evaluation" if outcome.evaluated else "; evaluation was not reached"
    elif outcome.steps_in_script is None and outcome.ended in ("steady", "steps"):
        text += "; the rest did not run (--dry-steps all runs it)"
    return text


def _asked(outcome: DryOutcome) -> Iterator[tuple[str, str]]:
    """Yield the reads of unknown values, a row for each line of the program."""
    lines = list(dict.fromkeys(one.line for one in outcome.asked))
    for line in lines[:_MOST_LINES]:
        of_line = [one for one in outcome.asked if one.line == line]
        count, names = sum(one.read_count for one in of_line), [one.what for one in of_line]
        kernels = ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")
        how = "as answered" if of_line[0].answered else f"--answer {line}=VALUE supplies a value"
        yield "asked", f"{line}, {_times(count)}, for a result of {kernels}; {how}"
    if len(lines) > _MOST_LINES:
        yield "asked", f"{len(lines) - _MOST_LINES:,} more lines"
    if outcome.reported:
        yield "reported", f"{outcome.reported:,} values, which Chainer printed or saved as zeros"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _listed(lines: list[str]) -> str:
    if len(lines) < 3:
        return " and ".join(lines)
    return f"{', '.join(lines[:2])} and {len(lines) - 2:,} more lines"
