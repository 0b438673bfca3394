"""What the benchmarks share: where they ran, what they write, how they answer.

Every script declares a `Bench`, from which both the terminal and bench/README.md are written, and
writes the same envelope: the question, the machine, the versions, the commit, the options, and
one object a row, on a line of its own, with the least, the median and the most of its repeats.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import click
from report_tables import Column, Row, Table

import umem
from umem._common.files import reason, whole

HERE = Path(__file__).resolve().parent
PACKAGES = (
    "numpy",
    "scipy",
    "chainer",
    "cupy",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "cuda-core",
    "blosc2",
    "onnx",
    "dask",
)
REPEATS = (
    "seconds",
    "clock_seconds",
    "processor_seconds",
    "forward_seconds",
    "decode_seconds_a_gb",
    "touches_per_second",
    "repeats",
    "repeats_ms",
    "repeats_us",
)
"""What scripts call the numbers of repeats, where they call them nothing else."""


def errors(*keys: str) -> Callable[[Mapping[str, Any]], list[str]]:
    """Notes of the rows that have an ``error``, each named by these keys."""

    def notes(result: Mapping[str, Any]) -> list[str]:
        rows = [row for row in result["rows"] if "error" in row]
        return [f"{', '.join(str(row[key]) for key in keys)}: {row['error']}" for row in rows]

    return notes


# -- where it ran ------------------------------------------------------------------------------


def machine(gpu: Any = None) -> dict[str, Any]:
    """Processor, cores, memory and system; no names of hosts, users or folders.

    Args:
        gpu: what is known of the GPU that was used, None where none was.
    """
    return {
        "processor": _processor(),
        "core_count": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
        "gpu": gpu,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "unknown")


def versions() -> dict[str, str]:
    """Versions of Python, umem and what it stands on; imports nothing."""
    found = {"python": platform.python_version(), "umem": umem.__version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit that is checked out; ``+`` behind it where the sources differ from it.

    None outside a repository.
    """
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None or head.returncode:
        return None
    same = _git("diff", "--quiet", "HEAD", "--", "umem", "bench/*.py", "tests/conformance")
    return head.stdout.strip() + ("" if same is not None and same.returncode == 0 else "+")


def _git(*args: str) -> subprocess.CompletedProcess[str] | None:
    """Run git in the repository; None where there is no git."""
    try:
        return subprocess.run(
            ["git", "--no-optional-locks", *args],
            cwd=HERE.parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None


# -- what it asks and answers --------------------------------------------------------------------

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Bench:
    """One question, and how its answer is shown.

    Attributes:
        name: the script without ``.py``, or with a word behind it where it has several.
        doc: the script's docstring; its first paragraph is the question.
        answer: makes one sentence of a result, with figures from its rows.
        columns: those of the table; or ``tables`` makes some.
        notes: makes further lines of a result.
        repeats: keys of rows below which lists of numbers have one a repeat.
    """

    name: str
    doc: str | None
    answer: Callable[[Result], str]
    columns: Sequence[Column] = ()
    tables: Callable[[Result], Iterable[Table]] | None = None
    notes: Callable[[Result], Iterable[str]] = lambda result: ()
    repeats: Sequence[str] = REPEATS

    @property
    def question(self) -> str:
        return " ".join((self.doc or "").split("\n\n")[0].split())

    def tables_of(self, result: Result) -> list[Table]:
        if self.tables is not None:
            return list(self.tables(result))
        return [Table(self.columns, result["rows"])]

    def report(
        self,
        rows: Sequence[Row],
        *,
        simulated: bool,
        options: Mapping[str, Any],
        gpu: Any = None,
        **more: Any,
    ) -> dict[str, Any]:
        """Make the envelope that every benchmark writes.

        Args:
            rows: one object a row, every repeat in it; of more than three the result keeps the
                least, the median and the most.
            simulated: whether the figures are a model's.
            options: what the script was called with.
            gpu: see `machine`.
            more: further objects of this benchmark.
        """
        return {
            "bench": self.name,
            "question": self.question,
            "simulated": simulated,
            "machine": machine(gpu),
            "versions": versions(),
            "commit": commit(),
            "options": dict(options),
            **more,
            "rows": [_spread(dict(row), self.repeats) for row in rows],
        }

    def finish(self, rows: Sequence[Row], path: str | Path | None, **how: Any) -> dict[str, Any]:
        """Print the question, the tables and the answer; write the report where there is a path.

        Raises:
            click.ClickException: the file cannot be written; an older one is as it was.
        """
        result = self.report(rows, **how)
        print(f"{self.question} ({'simulated' if result['simulated'] else 'measured'})\n")
        for table in self.tables_of(result):
            table.show()
        print(*self.notes(result), self.answer(result), sep="\n")
        if path is not None:
            write_json(path, result)
        return result


def _spread(value: Any, repeats: Sequence[str], inside: bool = False) -> Any:
    """Keep the least, the median and the most of each list of repeats: its median is the same."""
    if isinstance(value, dict):
        return {
            key: _spread(each, repeats, inside or key in repeats) for key, each in value.items()
        }
    if not inside or not isinstance(value, list | tuple):
        return value
    if any(isinstance(each, list | tuple) for each in value):
        return [_spread(each, repeats, inside) for each in value]
    if len(value) <= 3:
        return value
    found = summary(value)
    return [found.low, found.median, found.high]


def write_json(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write a report, whole or not at all; each key has a line, and each row of a list of rows.

    Raises:
        click.ClickException: the file cannot be written; an older one is as it was.
    """
    lines = [f" {json.dumps(key)}: {_lines(value)}" for key, value in content.items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    try:
        with whole(Path(path), force=True) as file:
            file.write(text.encode())
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {reason(error)}") from error


def _lines(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        rows = ",\n".join(f"  {json.dumps(row, allow_nan=False)}" for row in value)
        return f"[\n{rows}\n ]"
    return json.dumps(value, allow_nan=False)


def writable(*paths: str | Path | None) -> None:
    """Refuse a folder that is not there before minutes of work, not after."""
    for path in paths:
        if path and not Path(path).resolve().parent.is_dir():
            raise click.ClickException(f"cannot write {path}: its folder does not exist")


class Summary(NamedTuple):
    """Median of repeats, and the smallest and largest."""

    median: float
    low: float
    high: float


def summary(repeats: Iterable[float]) -> Summary:
    """Median and spread of repeats; there must be one at least."""
    values = sorted(repeats)
    return Summary(statistics.median(values), values[0], values[-1])


def child(script: str | Path, *arguments: str, **environment: str) -> Any:
    """Run a script in a process of its own; return the JSON in the last line that it prints.

    Raises:
        click.ClickException: it failed; the message is the end of what it said.
    """
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    if done.returncode:
        raise click.ClickException(done.stderr.strip()[-2000:] or f"exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


# -- how it is called ----------------------------------------------------------------------------


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the option ``--json``, as ``path``."""
    kind: Any = click.Path(path_type=Path, dir_okay=False)
    return click.option("--json", "path", type=kind, help="Write the rows there.")(command)
