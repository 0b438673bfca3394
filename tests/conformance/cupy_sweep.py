"""Which functions of CuPy work on the software GPU?

Every public function of `cupy` and `cupyx` is called with arguments that NumPy's or SciPy's
function of its name takes, and its result is compared with theirs; where they have none, that it
ends without an error is all that is said. Many functions share a process; one that ends the
process counts as a crash, and a new process goes on behind it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench_path
import click
import common
from report_tables import Column, Table, count, counted, text

MEMORY_BYTES = 19 * 10**9
STATES = {
    "works": "works, and gives what NumPy or SciPy gives",
    "no oracle": "works; there is nothing to compare with",
    "missing": "NotImplementedError, by name",
    "error": "another error, some of them CuPy's own",
    "differs": "differs from NumPy or SciPy",
    "crash": "ends the process, or takes too long",
}
WORKER = "import cupy_calls; cupy_calls.main()"


def _paths() -> list[str]:
    return [str(bench_path.HERE), str(bench_path.ROOT), os.environ.get("PYTHONPATH", "")]


def _process(wanted: list[str], seconds: float) -> list[dict[str, Any]]:
    """Run the calls in a process of their own, until the end, a crash or a call that takes long."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results")
        results.touch()
        started = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(MEMORY_BYTES), str(results)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_paths())},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert started.stdin is not None
        started.stdin.write(json.dumps(wanted))
        started.stdin.close()
        size, changed = 0, time.monotonic()
        while started.poll() is None:
            time.sleep(0.2)
            if results.stat().st_size != size:
                size, changed = results.stat().st_size, time.monotonic()
            if time.monotonic() - changed > seconds:
                started.kill()
        lines = results.read_text(encoding="utf-8").splitlines()
        said = f"the process ended with status {started.wait()}"
    found = [json.loads(line) for line in lines]
    for line in found:
        if line.get("status") == "crash":
            line["said"] = said
    return found


def calls(names: list[str], seconds: float) -> dict[str, dict[str, Any]]:
    """Call every function; a line for each."""
    found: dict[str, dict[str, Any]] = {}
    while left := [name for name in names if name not in found]:
        said = {line["name"]: line for line in _process(left, seconds)}
        if not said:
            raise click.ClickException("a process ended before its first call")
        found.update(said)
        click.echo(f"{len(found):,} of {len(names):,}", err=True)
    return {name: found[name] for name in names}


def rows(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for every module, and one for all."""
    modules: dict[str, Counter[str]] = {}
    for name, line in found.items():
        modules.setdefault(name.rpartition(".")[0], Counter())[line["status"]] += 1
    modules["all"] = sum(modules.values(), Counter())
    return [
        {"module": name, **{state: own[state] for state in STATES}, "functions": own.total()}
        for name, own in modules.items()
    ]


def answer(result: common.Result) -> str:
    total = result["rows"][-1]
    return (
        f"Of {total['functions']:,} functions {total['works']:,} give what NumPy or SciPy gives, "
        f"{total['no oracle']:,} more work, {total['missing']:,} say that they are not there, "
        f"{total['error']:,} end in another error, {total['differs']:,} differ and "
        f"{total['crash']:,} end the process."
    )


def notes(result: common.Result) -> Iterator[str]:
    if result["worked_before"] is not None:
        yield f"What worked at commit {result['worked_before']} was not called again."
    for state, words in list(STATES.items())[2:]:
        listed = [line["name"] for line in result["calls"] if line["status"] == state]
        if listed:
            yield f"{words[0].upper()}{words[1:]}: {', '.join(listed)}"


COLUMNS: tuple[Column, ...] = (
    text("module", "module"),
    counted("functions", "functions"),
    *(Column(state, state, write=count) for state in STATES),
)
BENCH = common.Bench("cupy_sweep", __doc__, answer, COLUMNS, notes=notes)


def page(result: common.Result) -> str:
    """Write the page of the documentation."""
    parts = [
        "# What of CuPy works on the software GPU\n",
        "Every public function of these modules was called on the [software GPU](software-gpu.md), "
        "and its result was compared with that of NumPy's or SciPy's function of the same name. "
        "Written by `tests/conformance/cupy_sweep.py`.\n",
        answer(result) + "\n",
        Table(COLUMNS, result["rows"]).markdown(),
        "\n".join(f"- *{state}*: {words}." for state, words in STATES.items()) + "\n",
    ]
    for state, words in list(STATES.items())[2:]:
        lines = [line for line in result["calls"] if line["status"] == state]
        if lines:
            parts.append(f"## {words[0].upper()}{words[1:]}\n")
            parts += [f"- `{line['name']}`: {_short(line['said'])}" for line in lines]
            parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _short(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    found = (lines[0] if lines else "").replace("|", "/").replace("`", "'")
    return f"`{found[:140]}`" if found else ""


@click.command(help=__doc__)
@click.option("--only", multiple=True, help="Call the functions whose name begins so.")
@click.option("--seconds", type=float, default=120.0, show_default=True, help="For one call.")
@click.option(
    "--previous",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A report: what worked in it is not called again.",
)
@click.option("--page", "page_path", type=click.Path(path_type=Path), help="Write the page there.")
@common.json_option
def main(
    only: tuple[str, ...],
    seconds: float,
    previous: Path | None,
    page_path: Path | None,
    path: Path | None,
) -> None:
    common.writable(path, page_path)
    names = [line["name"] for line in _process([], seconds)]
    wanted = [name for name in names if not only or name.startswith(only)]
    before = {} if previous is None else json.loads(previous.read_text(encoding="utf-8"))
    worked = {
        line["name"]: line
        for line in before.get("calls", ())
        if line["status"] in ("works", "no oracle") and line["name"] in wanted
    }
    again = calls([name for name in wanted if name not in worked], seconds)
    found = {name: worked.get(name) or again[name] for name in wanted}
    result = BENCH.finish(
        rows(found),
        path,
        simulated=True,
        options={"only": list(only), "seconds": seconds},
        calls=list(found.values()),
        worked_before=None if previous is None else before["commit"],
    )
    if page_path is not None:
        page_path.write_text(page(result), encoding="utf-8")


if __name__ == "__main__":
    main()
