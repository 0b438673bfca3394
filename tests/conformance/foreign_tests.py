"""Runs cases of another project's tests on the software GPU, in processes of their own.

What is found is kept in a file, a line a case, so that hours of tests can be stopped at any moment
and go on from there. A case that ends its process, or takes too long, has failed; a new process
goes on behind it.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import bench_path
import click
import common

MEMORY_BYTES = 19 * 10**9
TWO = "two devices"
"""The reason why cases are left out that need several GPUs."""
COUNTED = ("left out", "skipped", "passed", "failed", "not run")
_OPTIONS = ("-q", "--no-header", "--tb=short", "-p", "foreign_tests_plugin")
_OPTIONS += ("-p", "no:cacheprovider", "-W", "ignore")


@dataclass(frozen=True)
class Suite:
    """Tests of another project.

    Attributes:
        root: a folder, from which cases and ``paths`` are named.
        paths: the files and folders with the tests.
        gpu: a value of ``UMEM_SOFTWARE_GPU``; umem has to be installed where ``python`` runs.
        left_out: a list as `reasons` reads it.
        counts: tells by a case's marks whether it counts at all.
        imports: modules that are imported before a conftest is read.
        options: more options of pytest's.
        environment: more variables.
        devices: how many GPUs there are; what is left out for want of two is not, if there are.
        python: the interpreter.
    """

    root: Path
    paths: Sequence[str]
    gpu: str
    left_out: Path
    counts: Callable[[Sequence[str]], bool] = lambda marks: True
    imports: Sequence[str] = ()
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: int = 1
    python: str = sys.executable


class End(NamedTuple):
    """How a case ended: one of `COUNTED`, what it said, and its seconds."""

    outcome: str
    said: str = ""
    seconds: float = 0.0


# -- what is left out ---------------------------------------------------------------------------


def reasons(file: Path) -> list[tuple[str, str]]:
    """Read a list: on each line a reason, and a pattern, ``mark NAME`` or ``mark NAME PATTERN``."""
    lines = file.read_text(encoding="utf-8").splitlines()
    pairs = [line.split("|", 1) for line in lines if line.strip() and not line.startswith("#")]
    return [(reason.strip(), pattern.strip()) for reason, pattern in pairs]


def reason_of(case: str, marks: Sequence[str], listed: list[tuple[str, str]]) -> str | None:
    """Why a case is left out; None where it is not."""
    for reason, pattern in listed:
        mark, names = "", pattern
        if pattern.startswith("mark "):
            mark, _, names = pattern[5:].partition(" ")
        if (not mark or mark in marks) and fnmatchcase(case, names or "*"):
            return reason
    return None


# -- one process --------------------------------------------------------------------------------


def collected(suite: Suite, seconds: float, kept: Path | None = None) -> list[dict[str, Any]]:
    """List the cases with their ``marks``, and what could not be read, as ``broken``.

    For a large suite this takes minutes, so the list is kept beside what was found, if it is.
    """
    listed = kept and kept.with_name(f"{kept.name}.cases")
    if listed and listed.exists():
        before = json.loads(listed.read_text(encoding="utf-8"))
        if before["paths"] == list(suite.paths):
            return list(before["lines"])
    lines, ended = _process(suite, suite.paths, None, seconds)
    if ended != "ended":
        raise click.ClickException(f"pytest listed no cases: {ended}")
    if listed:
        text = json.dumps({"paths": list(suite.paths), "lines": lines})
        listed.write_text(text, encoding="utf-8")
    return lines


def _process(
    suite: Suite, paths: Sequence[str], cases: Sequence[str] | None, seconds: float
) -> tuple[list[dict[str, Any]], str]:
    """Run pytest in a process of its own; return what the plugin wrote, and how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        results, job = Path(folder, "results"), Path(folder, "job")
        what = {"cases": cases, "results": str(results), "memory_bytes": MEMORY_BYTES}
        job.write_text(json.dumps({**what, "imports": list(suite.imports)}), encoding="utf-8")
        with Path(folder, "output").open("w+", encoding="utf-8") as output:
            started = subprocess.Popen(
                _command(suite, paths),
                cwd=suite.root,
                env={**os.environ, **suite.environment, **_variables(suite, job)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                ended = _wait(started, results, seconds)
            finally:
                _end(started)
            if not results.exists():
                output.seek(0)
                raise click.ClickException(f"pytest wrote nothing:\n{output.read()[-2000:]}")
        lines = results.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")], ended


def _command(suite: Suite, paths: Sequence[str]) -> list[str]:
    chosen = [f"--rootdir={suite.root}", *(str(suite.root / path) for path in paths)]
    return [suite.python, "-m", "pytest", *_OPTIONS, *suite.options, *chosen]


def _variables(suite: Suite, job: Path) -> dict[str, str]:
    paths = [str(bench_path.HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    gpu = suite.gpu + (f",devices={suite.devices}" if suite.devices > 1 else "")
    # What fails is compared from run to run, so that no seed is drawn; --gpu may name one.
    gpu += "" if ",seed=" in gpu else ",seed=off"
    return {
        "FOREIGN_TESTS_JOB": str(job),
        "PYTHONPATH": os.pathsep.join(paths),
        "UMEM_SOFTWARE_GPU": gpu,
    }


def _wait(started: subprocess.Popen[bytes], results: Path, seconds: float) -> str:
    """Wait until a process ends, or has written nothing for so many seconds."""
    size, changed = 0, time.monotonic()
    while started.poll() is None:
        now = results.stat().st_size if results.exists() else 0
        if now != size:
            size, changed = now, time.monotonic()
        if time.monotonic() - changed > seconds:
            return f"out of time after {seconds:.0f} s"
        time.sleep(0.05)
    return f"signal {-started.returncode}" if started.returncode < 0 else "ended"


def _end(started: subprocess.Popen[bytes]) -> None:
    """Kill a process, if it still runs, and what its tests have started."""
    try:
        os.killpg(started.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    started.wait()


# -- many cases ---------------------------------------------------------------------------------


def ends(cases: Sequence[str], lines: Iterable[dict[str, Any]], ended: str) -> dict[str, End]:
    """Say how each case ended that was begun; all, where the process ended by itself."""
    found = {}
    for line in lines:
        if line.get("phase") == "start":
            found[line["case"]] = End("failed", f"did not end: {ended}")
        elif line["phase"] == "call" or line["outcome"] != "passed":
            found[line["case"]] = End(line["outcome"], line["said"], line["seconds"])
    if ended == "ended":
        found.update({case: End("failed", "not run") for case in cases if case not in found})
    elif not found:
        found[cases[0]] = End("failed", f"not begun: {ended}")
    return found


def chunks(cases: Sequence[str], size: int) -> Iterator[list[str]]:
    """Cut cases into chunks; those of a file stay together where they fit."""
    files: dict[str, list[str]] = {}
    for case in cases:
        files.setdefault(file_of(case), []).append(case)
    chunk: list[str] = []
    for own in files.values():
        if chunk and len(chunk) + len(own) > size:
            yield chunk
            chunk = []
        chunk += own
        while len(chunk) > size:
            yield chunk[:size]
            chunk = chunk[size:]
    if chunk:
        yield chunk


def run_all(suite: Suite, cases: Sequence[str], seconds: float) -> Iterator[dict[str, End]]:
    """Run cases, in a new process behind each that ended one; yield what each process found."""
    left = list(cases)
    while left:
        files = list(dict.fromkeys(map(file_of, left)))
        lines, ended = _process(suite, files, left, seconds)
        found = ends(left, [line for line in lines if "phase" in line], ended)
        yield {case: found[case] for case in left if case in found}
        left = [case for case in left if case not in found]


def file_of(case: str) -> str:
    return case.partition("::")[0]


# -- what is kept -------------------------------------------------------------------------------


def read_kept(file: Path | None, cases: Iterable[str]) -> list[dict[str, Any]]:
    """Read the lines of those cases that were run before; the last of a case counts."""
    if file is None or not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines()
    found = {line["case"]: line for line in map(json.loads, filter(_is_whole, lines))}
    return [found[case] for case in cases if case in found]


def _is_whole(line: str) -> bool:
    return line.endswith("}")  # the last may have been cut


def keep(file: Path | None, found: Mapping[str, End]) -> None:
    """Add lines to the file of what was found."""
    if file is not None:
        version = common.commit()
        with file.open("a", encoding="utf-8") as lines:
            for case, end in found.items():
                line = {"case": case, **end._asdict(), "commit": version}
                lines.write(json.dumps(line) + "\n")


def run(
    suite: Suite,
    cases: Sequence[str],
    *,
    chunk: int,
    seconds: float,
    kept: Path | None = None,
    again: bool = False,
    minutes: float | None = None,
) -> dict[str, End]:
    """Run cases that were not run before, for so many minutes; return how all of them ended.

    Args:
        suite: where they are from.
        cases: their names.
        chunk: how many share a process at most.
        seconds: the longest that a process may be silent; a case that takes longer has failed.
        kept: a file of what was found before, to which lines are added.
        again: run those again that failed.
        minutes: begin no chunk after these.
    """
    found = {line["case"]: _end_of(line) for line in read_kept(kept, cases)}
    wanted = [case for case in cases if _is_wanted(found.get(case), again)]
    started, done = time.monotonic(), 0
    for part in chunks(wanted, chunk):
        if minutes is not None and time.monotonic() - started > 60 * minutes:
            break
        for some in run_all(suite, part, seconds):
            keep(kept, some)
            found.update(some)
            done += len(some)
            failed_count = sum(end.outcome == "failed" for end in found.values())
            click.echo(
                f"{done:,} of {len(wanted):,} in {time.monotonic() - started:.0f} s: "
                f"{failed_count:,} failed; {file_of(part[-1])}",
                err=True,
            )
    return {case: found.get(case, End("not run")) for case in cases}


def _end_of(line: Mapping[str, Any]) -> End:
    return End(line["outcome"], line["said"], line["seconds"])


def _is_wanted(end: End | None, again: bool) -> bool:
    return end is None or (again and end.outcome == "failed")


# -- a benchmark of them --------------------------------------------------------------------------


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of `examine`, and ``--json``."""
    for decorate in (
        common.json_option,
        click.option("--devices", type=int, default=1, show_default=True, help="How many GPUs."),
        click.option("--minutes", type=float, help="Begin no chunk after so many."),
        click.option("--again", is_flag=True, help="Run those that failed before again."),
        click.option("--kept", type=click.Path(path_type=Path), help="A file to go on from."),
        click.option("--seconds", type=float, default=300.0, show_default=True, help="For a case."),
        click.option("--chunk", type=click.IntRange(1), default=400, show_default=True),
        click.option("--seed", type=int, default=0, show_default=True, help="Of the sample."),
        click.option("--sample", type=click.IntRange(1), help="Run so many, drawn at random."),
    ):
        command = decorate(command)
    return command


def examine(
    suite: Suite, *, depth: int, sample: int | None, seed: int, **how: Any
) -> dict[str, Any]:
    """Run the cases of a suite, or a sample of them; return what `common.Bench.finish` takes.

    Args:
        suite: where they are from.
        depth: of the folders that have a row each.
        sample: how many are drawn; None for all.
        seed: of the sample.
        how: as of `run`.
    """
    listed = collected(suite, how["seconds"], how["kept"])
    broken = {line["case"]: line["broken"] for line in listed if "broken" in line}
    patterns = [pair for pair in reasons(suite.left_out) if suite.devices < 2 or pair[0] != TWO]
    why = {
        line["case"]: reason_of(line["case"], line["marks"], patterns)
        for line in listed
        if "marks" in line and suite.counts(line["marks"])
    }
    wanted = [case for case, reason in why.items() if reason is None]
    if sample is not None and sample < len(wanted):
        drawn = set(random.Random(seed).sample(wanted, sample))
        wanted = [case for case in wanted if case in drawn]
    ran = run(suite, wanted, **how)
    found = {case: End("left out", reason) for case, reason in why.items() if reason is not None}
    found.update({case: End("failed", said) for case, said in broken.items()})
    found.update(ran)
    given = Counter(reason for reason in why.values() if reason is not None)
    return {
        "rows": rows(found, depth),
        "simulated": True,
        "options": {
            "under": list(suite.paths),
            "sample": sample,
            "seed": seed,
            "devices": suite.devices,
        },
        "all_count": len(why) + len(broken),
        "left_out_share": given.total() / max(1, len(why)),
        "left_out_by_reason": dict(given),
        "commits": dict(Counter(line["commit"] for line in read_kept(how["kept"], wanted))),
        "skipped_by_reason": skip_reasons(found.values()),
        "failures": {case: end.said for case, end in found.items() if end.outcome == "failed"},
    }


# -- rows ---------------------------------------------------------------------------------------


def row(name: str, found: Iterable[End]) -> dict[str, Any]:
    """Count how cases ended; the share of those that passed is of those that ran."""
    counts = Counter(end.outcome for end in found)
    ran = counts["passed"] + counts["failed"]
    return {
        "name": name,
        "case_count": counts.total(),
        **{f"{outcome.replace(' ', '_')}_count": counts[outcome] for outcome in COUNTED},
        "passed_share": counts["passed"] / ran if ran else None,
    }


def rows(found: Mapping[str, End], depth: int) -> list[dict[str, Any]]:
    """Count by folder, so many names deep, and all."""
    folders: dict[str, list[End]] = {}
    for case, end in found.items():
        *parents, _ = file_of(case).split("/")
        folders.setdefault("/".join(parents[:depth]) or ".", []).append(end)
    each = [row(name, ends) for name, ends in folders.items()]
    return [*each, row("all", found.values())]


def skip_reasons(found: Iterable[End]) -> dict[str, int]:
    """Count why a project's own tests skip cases, the most frequent first."""
    said = (end.said for end in found if end.outcome == "skipped")
    words = (re.search(r"Skipped: (.*?)['\"]\)$", text) for text in said)
    return dict(Counter(word[1] if word else "xfail" for word in words).most_common())


def passed(result: common.Result) -> str:
    """Say how many passed of those that ran, and how many were not run yet."""
    total, sample = result["rows"][-1], result["options"]["sample"]
    not_run = total.get("not_run_count", 0)
    return (
        f"{total['passed_count']:,} of "
        f"{total['passed_count'] + total['failed_count']:,} that ran"
        f"{f', of a sample of {sample:,}' if sample else ''}"
        f"{f', {not_run:,} not run yet' if not_run else ''}"
    )


def notes(result: common.Result) -> Iterator[str]:
    """Say what was left out, skipped and failed."""
    for head, key in (("Left out", "left_out_by_reason"), ("Skipped", "skipped_by_reason")):
        if result.get(key):
            each = "; ".join(f"{reason} {count:,}" for reason, count in result[key].items())
            yield f"{head}: {each}"
    failed = sorted(result["failures"])
    if failed:
        yield f"Failed: {', '.join(failed[:40])}{' ...' * (len(failed) > 40)}"
