"""How many of CuPy's own tests pass on the software GPU?

Takes the folder of a checkout of CuPy's tests, of the version that is installed; they are no part
of this repository. Cases that ask for what the software GPU says it has not are left out by
`cupy_left_out.txt`, one reason each. The others run in processes of their own, some hundred cases
each, under a limit of memory and of time; what a process had not run when it ended early counts as
failed. Those that CuPy's tests skip themselves count as neither.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click
import common
from common import HERE
from report_tables import counted, percent, quantity, text

MEMORY_BYTES = 19 * 10**9
WANTED_SHARE, MOST_LEFT_OUT = 0.97, 0.05
DEFAULT_FOLDERS = ("core_tests", "creation_tests", "math_tests")
LEFT_OUT = HERE / "cupy_left_out.txt"
_OPTIONS = ("-q", "--no-header", "--tb=short", "-p", "cupy_tests_plugin", "-p", "no:cacheprovider")


def reasons() -> list[tuple[str, str]]:
    """Read the list: a reason, and a pattern or ``mark NAME``."""
    lines = LEFT_OUT.read_text(encoding="utf-8").splitlines()
    pairs = [line.split("|", 1) for line in lines if line.strip() and not line.startswith("#")]
    return [(reason.strip(), pattern.strip()) for reason, pattern in pairs]


def reason_of(case: str, marks: Sequence[str], listed: list[tuple[str, str]]) -> str | None:
    """Why a case is left out; None where it is not."""
    for reason, pattern in listed:
        if pattern.startswith("mark "):
            if pattern[5:] in marks:
                return reason
        elif fnmatchcase(case, pattern):
            return reason
    return None


def _run(
    root: Path, paths: Sequence[str], cases: Sequence[str] | None, seconds: float
) -> tuple[list[dict[str, Any]], str]:
    """Run pytest in a process of its own; return what the plugin wrote, and how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        results, job = Path(folder, "results"), Path(folder, "job")
        what = {"cases": cases, "results": str(results), "memory_bytes": MEMORY_BYTES}
        job.write_text(json.dumps(what), encoding="utf-8")
        python_path = os.pathsep.join(
            [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        )
        command = [sys.executable, "-m", "pytest", *_OPTIONS, f"--rootdir={root}", "-W", "ignore"]
        ended = "ended"
        with Path(folder, "output").open("w+", encoding="utf-8") as output:
            try:
                done = subprocess.run(
                    [*command, *(str(root / path) for path in paths)],
                    cwd=root,
                    env={**os.environ, "CUPY_TESTS_JOB": str(job), "PYTHONPATH": python_path},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=seconds,
                    check=False,
                )
                if done.returncode < 0:
                    ended = f"signal {-done.returncode}"
            except subprocess.TimeoutExpired:
                ended = "out of time"
            if not results.exists():
                output.seek(0)
                raise click.ClickException(f"pytest wrote nothing:\n{output.read()[-2000:]}")
        lines = results.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")], ended


def outcomes(cases: Sequence[str], said: list[dict[str, Any]], ended: str) -> dict[str, Any]:
    """Say of each case whether it passed, failed or was skipped, and what it said."""
    found: dict[str, Any] = {case: ("failed", f"not run: {ended}") for case in cases}
    for line in said:
        case = line["case"]
        if line.get("phase") == "start":
            found[case] = ("failed", f"did not end: {ended}")
        elif "outcome" in line:
            before = found[case][0]
            is_first = line["phase"] == "setup" or found[case][1].startswith("did not end")
            if line["outcome"] != "passed" and (before != "failed" or is_first):
                found[case] = (line["outcome"], line["said"])
            elif line["phase"] == "call" and line["outcome"] == "passed":
                found[case] = ("passed", "")
    return found


def _chunks(cases: list[str], size: int) -> Iterator[list[str]]:
    """Cut cases into chunks; those of a file stay together where they fit."""
    chunk: list[str] = []
    for file in dict.fromkeys(case.partition("::")[0] for case in cases):
        own = [case for case in cases if case.startswith(f"{file}::")]
        if chunk and len(chunk) + len(own) > size:
            yield chunk
            chunk = []
        chunk += own
        while len(chunk) > size:
            yield chunk[:size]
            chunk = chunk[size:]
    if chunk:
        yield chunk


def _row(file: str, cases: dict[str, tuple[str, str]]) -> dict[str, Any]:
    counts = Counter(outcome for outcome, _ in cases.values())
    ran = counts["passed"] + counts["failed"]
    return {
        "file": file,
        "case_count": len(cases),
        "left_out_count": counts["left out"],
        "skipped_count": counts["skipped"],
        "passed_count": counts["passed"],
        "failed_count": counts["failed"],
        "passed_share": counts["passed"] / ran if ran else None,
    }


def answer(result: common.Result) -> str:
    total = result["rows"][-1]
    sampled = result["options"]["sample"]
    return (
        f"{percent(total['passed_share'])} of {total['passed_count'] + total['failed_count']:,} "
        f"that ran{f', of a sample of {sampled:,}' if sampled else ''}; "
        f"{percent(result['left_out_share'])} of {result['all_count']:,} cases are left out, where "
        f"{percent(WANTED_SHARE)} and at most {percent(MOST_LEFT_OUT)} are wanted."
    )


def notes(result: common.Result) -> Iterator[str]:
    yield "Left out: " + "; ".join(
        f"{reason} {count:,}" for reason, count in sorted(result["left_out_by_reason"].items())
    )
    failed = result["failures"]
    if failed:
        yield f"Failed: {', '.join(sorted(failed)[:40])}{' ...' * (len(failed) > 40)}"


BENCH = common.Bench(
    "cupy_own_tests",
    __doc__,
    answer,
    (
        text("file", "file"),
        counted("cases", "case_count"),
        counted("left out", "left_out_count"),
        counted("skipped by CuPy", "skipped_count"),
        counted("passed", "passed_count"),
        counted("failed", "failed_count"),
        quantity("passed", lambda row: row["passed_share"], "%", per=0.01),
    ),
    notes=notes,
)


@click.command(help=__doc__)
@click.argument("tests", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--under", multiple=True, default=DEFAULT_FOLDERS, help="A folder or file in it.")
@click.option("--sample", type=click.IntRange(1), help="Run so many cases, drawn at random.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the sample.")
@click.option("--chunk", type=click.IntRange(1), default=400, show_default=True)
@click.option("--seconds", type=float, default=1200.0, show_default=True, help="For one process.")
@common.json_option
def main(
    tests: Path,
    under: tuple[str, ...],
    sample: int | None,
    seed: int,
    chunk: int,
    seconds: float,
    path: Path | None,
) -> None:
    common.writable(path)
    base = "cupy_tests/" if (tests / "cupy_tests").is_dir() else ""
    collected, _ = _run(tests, [base + name for name in under], None, seconds)
    broken = {line["case"]: line["broken"] for line in collected if "broken" in line}
    marks = {line["case"]: line["marks"] for line in collected if "marks" in line}
    listed = reasons()
    left_out = {case: reason_of(case, marks[case], listed) for case in marks}
    wanted = [case for case in marks if left_out[case] is None]
    if sample is not None and sample < len(wanted):
        wanted = sorted(random.Random(seed).sample(wanted, sample), key=list(marks).index)
    found: dict[str, tuple[str, str]] = {}
    started = time.monotonic()
    for cases in _chunks(wanted, chunk):
        files = list(dict.fromkeys(case.partition("::")[0] for case in cases))
        found.update(outcomes(cases, *_run(tests, files, cases, seconds)))
        counts = Counter(outcome for outcome, _ in found.values())
        click.echo(
            f"{len(found):,} of {len(wanted):,} in {time.monotonic() - started:.0f} s: "
            f"{counts['failed']:,} failed; {files[-1]}",
            err=True,
        )
    found.update({case: ("failed", said) for case, said in broken.items()})
    found.update({case: ("left out", reason) for case, reason in left_out.items() if reason})
    rows = []
    for file in dict.fromkeys(case.partition("::")[0] for case in (*marks, *broken)):
        own = {case: end for case, end in found.items() if case.partition("::")[0] == file}
        rows.append(_row(file, own))
    rows.append(_row("all", found))
    reasons_given = Counter(reason for reason in left_out.values() if reason)
    BENCH.finish(
        rows,
        path,
        simulated=True,
        options={"under": list(under), "sample": sample, "seed": seed, "chunk": chunk},
        all_count=len(marks) + len(broken),
        left_out_share=sum(reasons_given.values()) / max(1, len(marks)),
        left_out_by_reason=dict(reasons_given),
        failures={case: said for case, (end, said) in found.items() if end == "failed"},
    )


if __name__ == "__main__":
    main()
