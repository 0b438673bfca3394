"""Writes bench/README.md: what each benchmark asks, and what bench/results/ answers.

``--check`` writes nothing and fails where the file is not what it would write.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from typing import Any

import click
import common
from common import Bench

README = common.HERE / "README.md"
RESULTS = common.HERE / "results"
INTRODUCTION = """# Benchmarks

One question a script. Most take `--quick` (seconds) and `--json PATH` (machine,
versions, commit, medians and spread). What runs on a virtual GPU is simulated, and says so.

Run one from the repository's root: `python bench/validate_um.py --help`.
On a machine with a GPU `python bench/gpu_run.py OUT.zip --minutes 9` runs all that wants one, by
order of value, tests included, and goes on where the last call ended; with `--software` it
rehearses that on the software GPU.
This file is written by `python bench/make_readme.py` from the scripts and from `results/`.
"""


def benches() -> dict[str, Bench]:
    """Find what the scripts declare, by name; imports each script that declares something."""
    found = {}
    for path in sorted(common.HERE.glob("*.py")):
        if re.search(r"^\w+ = (common\.)?Bench\(", path.read_text(encoding="utf-8"), re.M):
            module = importlib.import_module(path.stem)
            values = [value for value in vars(module).values() if isinstance(value, Bench)]
            found.update({bench.name: bench for bench in values})
    return found


def results() -> Iterator[tuple[str, dict[str, Any]]]:
    """Read each file of results/, with its name."""
    for path in sorted(RESULTS.glob("*.json")):
        yield path.stem, json.loads(path.read_text(encoding="utf-8"))


def where(result: dict[str, Any]) -> str:
    """Say in one small line where a result comes from."""
    machine = result["machine"]
    names = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    gpu = machine["gpu"]["name"] if machine.get("gpu") else "no GPU"
    cores = machine["core_count"]
    return (
        f"<sub>`{script(result['bench'])}`, {'simulated' if result['simulated'] else 'measured'} "
        f"at commit {result['commit'] or 'unknown'} on {cores} core{'s' * (cores > 1)} of "
        f"{machine['processor']}, {gpu}, {machine['system']}; {names}.</sub>\n"
    )


def script(name: str) -> str:
    return f"{name.partition('-')[0]}.py"


def section(bench: Bench, stem: str, result: dict[str, Any]) -> str:
    """Write one result: question, answer, tables, notes, and where it comes from."""
    parts = [f"## {bench.question}\n", f"{bench.answer(result)}\n"]
    parts += [table.markdown() for table in bench.tables_of(result)]
    if (RESULTS / f"{stem}.png").exists():
        parts.append(f"![{bench.question}](results/{stem}.png)\n")
    notes = "\n".join(f"- {note}" for note in bench.notes(result))
    return "\n".join([*parts, *([notes + "\n"] if notes else []), where(result)])


def index(found: dict[str, Bench], answered: set[str]) -> str:
    """List the questions by script, each with a link to its answer where there is one."""
    lines = ["| script | question |", "| --- | --- |"]
    for name, bench in found.items():
        anchor = re.sub(r"[^\w\- ]", "", bench.question.lower()).replace(" ", "-")
        said = f"[{bench.question}](#{anchor})" if name in answered else bench.question
        lines.append(f"| `{script(name)}` | {said} |")
    return "\n".join(lines) + "\n"


def readme() -> str:
    """Write the whole file."""
    found, answers = benches(), list(results())
    sections = [section(found[result["bench"]], stem, result) for stem, result in answers]
    listed = index(found, {result["bench"] for _, result in answers})
    return "\n".join([INTRODUCTION, listed, *sections])


@click.command(help=__doc__)
@click.option("--check", is_flag=True, help="Write nothing; fail where the file is out of date.")
def main(check: bool) -> None:
    text = readme()
    if not check:
        README.write_text(text, encoding="utf-8")
        click.echo(f"Wrote {README.name}")
    elif not README.exists() or README.read_text(encoding="utf-8") != text:
        raise click.ClickException("bench/README.md is out of date; run bench/make_readme.py")


if __name__ == "__main__":
    main()
