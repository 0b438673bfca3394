"""Writes README.md of bench/ and of tests/conformance: what each script asks, and results/ answers.

``--check`` writes nothing and fails where the file is not what it would write.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import common
from common import Bench

MOST_ROWS = 4
"""The first table of a result is shown, to so many rows; results/ has all, a row a line."""
INTRODUCTION = """# Benchmarks

One question a script, and in some another one behind an option that `--help` names. Most take
`--quick` (seconds) and `--json PATH` (machine, versions, commit, medians and spread). What runs on
a virtual GPU is simulated, and says so.

Run one from the repository's root: `python bench/validate_um.py --help`.
On a machine with a GPU `python bench/gpu_run.py OUT.zip --minutes 9` runs all that wants one, by
order of value, tests included, and goes on where the last call ended; with `--software` it
rehearses that on the software GPU, and `--wheels` says what to bring. What it has found is kept by
`python bench/hardware_page.py --keep OUT.zip NAME`, which writes docs/hardware.md.
Tables are cut to their first rows; `results/` has all of them, a row a line.
This file is written by `python bench/make_readme.py` from the scripts and from `results/`.
"""
CONFORMANCE_INTRODUCTION = """# Conformance

Other projects' tests on the software GPU and under umem, and programs drawn at random. Each script
answers one question, and runs from the repository's root: `python tests/conformance/clients.py
--help`. None of it is collected by `pytest`, unless it is named.
This file is written by `python bench/make_readme.py` from the scripts and from `results/`.
"""


class Place(NamedTuple):
    """A folder of scripts with a README and results."""

    folder: Path
    introduction: str

    @property
    def readme(self) -> Path:
        return self.folder / "README.md"

    def benches(self) -> dict[str, Bench]:
        """Find what the scripts declare, by name; imports each script that declares something."""
        found = {}
        if str(self.folder) not in sys.path:
            sys.path.append(str(self.folder))
        for path in sorted(self.folder.glob("*.py")):
            if re.search(r"^\w+ = (common\.)?Bench\(", path.read_text(encoding="utf-8"), re.M):
                module = importlib.import_module(path.stem)
                values = [value for value in vars(module).values() if isinstance(value, Bench)]
                found.update({bench.name: bench for bench in values})
        return found

    def results(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Read each file of results/, with its name."""
        for path in sorted(self.folder.glob("results/*.json")):
            yield path.stem, json.loads(path.read_text(encoding="utf-8"))

    def text(self) -> str:
        """Write the whole file."""
        found, answers = self.benches(), list(self.results())
        sections = [self.section(found[each["bench"]], stem, each) for stem, each in answers]
        open_ones = unanswered(found, {result["bench"] for _, result in answers})
        return "\n".join([self.introduction, *sections, open_ones])

    def section(self, bench: Bench, stem: str, result: dict[str, Any]) -> str:
        """Write one result: question, answer, tables, notes, and where it comes from."""
        parts = [f"## {bench.question}\n", f"{bench.answer(result)}\n"]
        table = bench.tables_of(result)[0]
        parts.append(replace(table, rows=table.rows[:MOST_ROWS]).markdown())
        if (self.folder / "results" / f"{stem}.png").exists():
            parts.append(f"![{bench.question}](results/{stem}.png)\n")
        notes = "\n".join(f"- {note}" for note in bench.notes(result))
        return "\n".join([*parts, *([notes + "\n"] if notes else []), where(result, stem)])


BENCH = Place(common.HERE, INTRODUCTION)
CONFORMANCE = Place(common.HERE.parent / "tests" / "conformance", CONFORMANCE_INTRODUCTION)


def where(result: dict[str, Any], stem: str) -> str:
    """Say in one small line where a result comes from."""
    machine = result["machine"]
    names = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    gpu = machine["gpu"]["name"] if machine.get("gpu") else "no GPU"
    cores = machine["core_count"]
    how = "simulated" if result["simulated"] else "measured"
    return (
        f"<sub>`{script(result['bench'])}`, [all rows](results/{stem}.json), {how} "
        f"at commit {result['commit'] or 'unknown'} on {cores} core{'s' * (cores > 1)} of "
        f"{machine['processor']}, {gpu}, {machine['system']}; {names}.</sub>\n"
    )


def script(name: str) -> str:
    return f"{name.partition('-')[0]}.py"


def unanswered(benches: dict[str, Bench], answered: set[str]) -> str:
    """List the questions that have no result here, by script."""
    lines = ["| script without a result here | question |", "| --- | --- |"]
    asked = {name: bench.question for name, bench in benches.items() if name not in answered}
    lines += [f"| `{script(name)}` | {question} |" for name, question in asked.items()]
    return "\n".join(lines) + "\n"


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Write nothing; fail where the file is out of date.")
def main(check: bool) -> None:
    for place in (BENCH, CONFORMANCE):
        text, path = place.text(), place.readme.relative_to(common.HERE.parent)
        if not check:
            place.readme.write_text(text, encoding="utf-8")
            click.echo(f"Wrote {path}")
        elif not place.readme.exists() or place.readme.read_text(encoding="utf-8") != text:
            raise click.ClickException(f"{path} is out of date; run bench/make_readme.py")


if __name__ == "__main__":
    main()
