"""How many of ChainerMN's own tests pass under umem, on the CPU?

Takes the folder `tests/chainermn_tests` of a checkout of Chainer 7.8.1; it is no part of this
repository. Cases marked for a GPU do not count; `chainermn_left_out.txt` leaves out others, with a
reason each. Each folder runs on 2 and on 3 ranks, started by mpiexec. A case has passed when it has
on every rank, and hung when a rank was still in it as the time was over: those after it run in
processes of their own. Cases that ask for ChainerX, which Chainer's wheel has not, run until they
do, and are counted apart: such a case has not passed. MNIST, which tests download, is a small set
of drawn pictures instead.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import bench_path
import click
import common
import foreign_tests
import numpy as np
from mpi_start import ranks_command, ranks_environment
from report_tables import counted, percent, text

MOST_LEFT_OUT = 0.03
LEFT_OUT = bench_path.HERE / "chainermn_left_out.txt"
_OPTIONS = ("-q", "--no-header", "-p", "chainermn_tests_plugin", "-p", "no:cacheprovider")
_WORST_FIRST = ("failed", "hung", "not run", "cut short", "skipped", "passed")
_ASKS_FOR_CHAINERX = "asked for ChainerX"
"""What the plugin says of a case that did."""


def reasons() -> list[tuple[str, str, str]]:
    """Read the list: a reason, a pattern, and the number of ranks that it is for; "" for any."""
    pairs = ((reason, *rest.partition("|")) for reason, rest in foreign_tests.reasons(LEFT_OUT))
    return [(reason, pattern.strip(), only.strip()) for reason, pattern, _, only in pairs]


def reason_of(case: str, ranks: int, listed: list[tuple[str, str, str]]) -> str | None:
    """Why a case is left out; None where it is not."""
    for reason, pattern, only in listed:
        if only in ("", str(ranks)) and fnmatchcase(case, pattern):
            return reason
    return None


def draw_mnist(folder: Path) -> None:
    """Write pictures of ten kinds where Chainer keeps MNIST once it is downloaded."""
    random = np.random.RandomState(0)
    kinds = random.randint(0, 200, (10, 784))
    home = folder / "pfnet" / "chainer" / "mnist"
    home.mkdir(parents=True)
    for name, count in (("train", 2000), ("test", 400)):
        labels = random.randint(0, 10, count)
        pictures = kinds[labels] + random.randint(0, 56, (count, 784))
        np.savez(home / f"{name}.npz", x=pictures.astype(np.uint8), y=labels.astype(np.uint8))


def run(
    root: Path, paths: Sequence[str], cases: Sequence[str] | None, ranks: int, seconds: float
) -> list[dict[str, dict[str, Any]]]:
    """Run pytest on so many ranks; return what each said of each case."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = folder / "job"
        job.write_text(json.dumps({"cases": cases, "results": str(folder / "said")}), "utf-8")
        draw_mnist(folder / "data")
        environment = ranks_environment(
            bench_path.HERE,
            CHAINERMN_TESTS_JOB=str(job),
            CHAINER_DATASET_ROOT=str(folder / "data"),
            OMPI_MCA_mpi_yield_when_idle="1",
            TMPDIR=name,
        )
        command = [sys.executable, "-m", "pytest", *_OPTIONS, f"--rootdir={root}", "-W", "ignore"]
        if ranks > 1:
            command = [*ranks_command(ranks, "--bind-to", "none"), *command]
        with (folder / "output").open("w+", encoding="utf-8") as output:
            process = subprocess.Popen(
                [*command, *(str(root / path) for path in paths)],
                cwd=root,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            _wait(process, seconds)
            files = [folder / f"said{rank}" for rank in range(ranks)]
            if not all(file.exists() for file in files):
                output.seek(0)
                raise click.ClickException(f"pytest wrote nothing:\n{output.read()[-2000:]}")
        return [_said(file) for file in files]


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for mpiexec; end it in time, in a way that lets it end the ranks."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _said(file: Path) -> dict[str, dict[str, Any]]:
    """The line of each case that counts: its call's, or that of a set-up or clean-up that failed.

    One that began and did not end has hung.
    """
    found: dict[str, dict[str, Any]] = {}
    whole = (one for one in file.read_text(encoding="utf-8").splitlines() if one.endswith("}"))
    for line in map(json.loads, whole):
        if line.get("phase") == "start":
            found[line["case"]] = {"outcome": "hung"}
        elif line.get("phase", "call") == "call" or line["outcome"] != "passed":
            found[line["case"]] = line
    return found


def outcome(case: str, ranks: Sequence[dict[str, dict[str, Any]]]) -> tuple[str, str]:
    """The worst that a rank says of a case, and its words."""
    return min(
        (_outcome_of(rank.get(case, {})) for rank in ranks),
        key=lambda end: _WORST_FIRST.index(end[0]),
    )


def _outcome_of(line: dict[str, Any]) -> tuple[str, str]:
    words = line.get("said", "")
    is_cut = words == _ASKS_FOR_CHAINERX
    return "cut short" if is_cut else line.get("outcome", "not run"), words


def run_folder(
    root: Path, cases: list[str], ranks: int, seconds: float
) -> dict[str, tuple[str, str]]:
    """Run a folder's cases; those behind one that hung, or failed on one rank alone, anew."""
    found: dict[str, tuple[str, str]] = {}
    while left := [case for case in cases if case not in found]:
        files = list(dict.fromkeys(case.partition("::")[0] for case in left))
        said = run(root, files, left, ranks, seconds)
        found[left[0]] = ("hung", "not begun")
        for case in left:
            end = outcome(case, said)
            if end[0] == "not run":
                break
            found[case] = end
            ends = {_outcome_of(rank.get(case, {}))[0] for rank in said}
            if len(ends) > 1 or end[0] == "hung":
                break  # the ranks are no longer at the same place
    return found


def _folder(case: str) -> str:
    return case.partition("::")[0].rpartition("/")[0]


_COUNTED = ("passed", "failed", "hung", "skipped", "cut short", "left out")


def _row(folder: str, ranks: int, ends: Sequence[tuple[str, str]]) -> dict[str, Any]:
    counts = Counter(end for end, _ in ends)
    return {
        "folder": folder,
        "rank_count": ranks,
        "case_count": len(ends),
        **{f"{name.replace(' ', '_')}_count": counts[name] for name in _COUNTED},
    }


def answer(result: common.Result) -> str:
    totals = [row for row in result["rows"] if row["folder"] == "all"]
    each = "; ".join(
        f"on {row['rank_count']} ranks {row['passed_count']} of {_asked(row)} pass, "
        f"{row['failed_count']} fail and {row['hung_count']} hang"
        for row in totals
    )
    left_out, cut = (
        max(row[key] / max(1, row["case_count"]) for row in totals)
        for key in ("left_out_count", "cut_short_count")
    )
    return (
        f"{each[0].upper()}{each[1:]}; {percent(left_out)} are left out, where at most "
        f"{percent(MOST_LEFT_OUT)} are wanted, and {percent(cut)} end where they ask for ChainerX."
    )


def _asked(row: dict[str, Any]) -> int:
    """The cases that could pass."""
    others = ("left_out_count", "skipped_count", "cut_short_count")
    return int(row["case_count"]) - sum(row[key] for key in others)


def notes(result: common.Result) -> Iterator[str]:
    yield "Left out: " + "; ".join(
        f"{count}: {reason}" for reason, count in sorted(result["left_out_by_reason"].items())
    )
    if result["failures"]:
        yield f"Failed or hung: {', '.join(sorted(result['failures']))}"


BENCH = common.Bench(
    "chainermn_own_tests",
    __doc__,
    answer,
    (
        text("folder", "folder"),
        counted("ranks", "rank_count"),
        counted("cases", "case_count"),
        counted("left out", "left_out_count"),
        counted("skipped by ChainerMN", "skipped_count"),
        counted("asked for ChainerX", "cut_short_count"),
        counted("passed", "passed_count"),
        counted("failed", "failed_count"),
        counted("hung", "hung_count"),
    ),
    notes=notes,
)


def _numbers(_: Any, __: Any, value: str) -> list[int]:
    return [int(part) for part in value.split(",")]


@click.command(help=__doc__)
@click.argument("tests", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--ranks", default="2,3", show_default=True, callback=_numbers)
@click.option("--under", multiple=True, help="Only this file or folder of it.")
@click.option("--seconds", type=float, default=300.0, show_default=True, help="For a folder.")
@common.json_option
def main(
    tests: Path, ranks: list[int], under: tuple[str, ...], seconds: float, path: Path | None
) -> None:
    common.writable(path)
    tests = tests.resolve()
    collected = run(tests, under or (".",), None, 1, seconds)[0]
    broken = {case: line["broken"] for case, line in collected.items() if "broken" in line}
    listed, by_case = reasons(), {}
    whole = [
        case
        for case, line in collected.items()
        if case not in broken and "gpu" not in line["marks"]
    ]
    rows, failures = [], dict(broken)
    for count in ranks:
        left_out = {case: reason_of(case, count, listed) for case in whole}
        by_case.update({case: reason for case, reason in left_out.items() if reason})
        found = {case: ("left out", reason) for case, reason in left_out.items() if reason}
        found.update({case: ("failed", said) for case, said in broken.items()})
        for folder in dict.fromkeys(map(_folder, left_out)):
            own = [case for case in left_out if _folder(case) == folder]
            wanted = [case for case in own if case not in found]
            found.update(run_folder(tests, wanted, count, seconds))
            rows.append(_row(folder, count, [found[case] for case in own]))
            click.echo(f"{count} ranks: {rows[-1]}", err=True)
        rows.append(_row("all", count, list(found.values())))
        bad = {case: said for case, (end, said) in found.items() if end in ("failed", "hung")}
        failures.update({f"{case} on {count} ranks": said for case, said in bad.items()})
    BENCH.finish(
        rows,
        path,
        simulated=False,
        options={"ranks": ranks, "under": list(under)},
        left_out_by_reason=dict(Counter(by_case.values())),
        failures=failures,
    )


if __name__ == "__main__":
    main()
