"""Writes bench/README.md: what each benchmark asks, and what bench/results/ says.

``--check`` writes nothing and fails where the file is not what it would write.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
import common

from umem.units import format_bytes, format_seconds

README = common.HERE / "README.md"
RESULTS = common.HERE / "results"
HELPERS = (
    "common", "cuda_workloads", "gpu_guard", "hostile_bases", "hostile_mutations", "make_readme",
    "oversubscribe_views", "um_gcn", "um_programs",
)  # fmt: skip
INTRODUCTION = """# Benchmarks

One question a script. Most take `--quick` (seconds) and `--json PATH` (machine,
versions, commit, every repeat). What runs on a virtual GPU is simulated, and says so.

Run one from the repository's root: `python bench/validate_um.py --help`.
This file is written by `python bench/make_readme.py` from the scripts and from `results/`.
"""


def question(path: Path) -> str:
    """The first sentence of a script's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; None is a dash."""
    lines = [columns, ["---"] * len(columns), *rows]
    cells = (
        ["-" if cell is None else str(cell).replace("|", "/") for cell in row] for row in lines
    )
    return "\n".join("| " + " | ".join(row) + " |" for row in cells) + "\n"


def scripts() -> str:
    """Which script answers what."""
    paths = [path for path in sorted(common.HERE.glob("*.py")) if path.stem not in HELPERS]
    return table(("script", "question"), [(f"`{path.name}`", question(path)) for path in paths])


def where(result: dict[str, Any]) -> str:
    """The line that says where a result comes from."""
    machine, versions = result["machine"], result["versions"]
    names = ", ".join(f"{name} {version}" for name, version in versions.items())
    gpu = machine["gpu"]["name"] if machine.get("gpu") else "no GPU"
    word = "Simulated" if result["simulated"] else "Measured"
    return (
        f"{word}, at commit {result['commit'] or 'unknown'}, on {machine['core_count']} cores of "
        f"{machine['processor']} ({gpu}), {machine['system']}; {names}.\n"
    )


def validate_um(result: dict[str, Any]) -> str:
    """A line a published figure."""

    def cells(row: dict[str, Any]) -> list[Any]:
        verdict = {None: "shown", True: "pass", False: "**miss**"}[row["passed"]]
        unit = row["unit"]
        figures = [
            None if row[key] is None else f"{row[key]:.4g} {unit}" for key in ("model", "published")
        ]
        if row.get("fits") is False:
            figures[0] = "out of memory"
        if row.get("published_fits") is False:
            figures[1] = "out of memory"
        error = None if row["error_percent"] is None else f"{row['error_percent']:+.1f} %"
        limit = row["tolerance_percent"]
        limit = None if limit is None else f"{limit:g} %"
        return [f"{row['name']}: {row['case']}", row["gpu"], *figures, error, limit, verdict]

    columns = ("program", "GPU", "model (simulated)", "published", "error", "tolerance", "")
    notes = sorted({f"- {row['name']}: {row['note']}" for row in result["rows"] if row["note"]})
    sources = sorted({f"- {row['source']}" for row in result["rows"] if row["source"]})
    lines = [table(columns, map(cells, result["rows"])), *notes, "", "Sources:", "", *sources]
    return "\n".join(lines) + "\n"


def oversubscribe(result: dict[str, Any]) -> str:
    """A table a workload, a column a mode."""
    word = "simulated" if result["simulated"] else "measured"
    parts = []
    for workload in dict.fromkeys(row["workload"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["workload"] == workload]
        modes = list(dict.fromkeys(row["mode"] for row in rows))
        lines = []
        for factor in dict.fromkeys(row["factor"] for row in rows):
            same = {row["mode"]: row for row in rows if row["factor"] == factor}
            first = same[modes[0]]
            sizes = [format_bytes(first["nbytes"]), format_bytes(first["vram_bytes"])]
            lines.append([f"{factor:g}", *sizes, *(_step(same[mode]) for mode in modes)])
        columns = ("factor", "data", "VRAM", *modes)
        parts.append(f"`{workload}`: time of a step ({word}), and per byte relative to the first\n")
        parts.append(table(columns, lines))
    picture = f"{result['bench']}-{'virtual' if result['simulated'] else 'cuda'}.png"
    if (RESULTS / picture).exists():
        parts.append(f"![time per byte against the oversubscription factor](results/{picture})\n")
    return "\n".join(parts)


def _step(row: dict[str, Any]) -> str:
    if not row["fits"]:
        return "out of memory"
    return f"{format_seconds(row['seconds'])}, {row['relative']:.2f}x"


def anything(result: dict[str, Any]) -> str:
    """Any other result: the rows' plain figures, column by column."""
    rows = result.get("rows", [])
    names = dict.fromkeys(key for row in rows for key, value in row.items() if _is_plain(value))
    lines = [[_plain(row.get(name)) for name in names] for row in rows]
    return table(tuple(names), lines)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float)) or value is None


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if _is_plain(value) else None


SHOWN = {"validate_um": validate_um, "oversubscribe": oversubscribe}


def results() -> str:
    """A section a file of results/."""
    sections = []
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if not {"bench", "question", "rows", "machine"} <= result.keys():
            continue  # not the envelope of common.report
        body = SHOWN.get(result["bench"], anything)(result)
        sections.append(f"## {path.stem}\n\n{result['question']}\n\n{where(result)}\n{body}")
    return "\n".join(sections)


def readme() -> str:
    """The whole file."""
    return f"{INTRODUCTION}\n{scripts()}\n{results()}"


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
