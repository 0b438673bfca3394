"""Writes docs/hardware.md: which public functions have run on a card, and on which.

``--keep OUT.zip NAME`` first takes over what a run of bench/gpu_run.py has found, as
bench/results/gpu_run/NAME.json. ``--check`` writes nothing and fails where the page is not what it
would write. The functions are those of the package as it is: a new one appears by itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))

import check_site  # noqa: E402
from gpu_run_parts import calls  # noqa: E402
from gpu_run_parts.archive import Archive  # noqa: E402

KEPT = ROOT / "bench" / "results" / "gpu_run"
PAGE = ROOT / "docs" / "hardware.md"
STEPS = ("first-light", "pressure", "host-calls", "oversubscribe")
INTRODUCTION = """# What has run on a GPU

Where each public function has run: on a card, on the
[software GPU](reference/software-gpu.md), or nowhere.
The table is of calls that `bench/gpu_run.py` makes; each compares its result with NumPy's, with
plain Chainer's, or with what the driver says. `python bench/hardware_page.py` writes this page from
`bench/results/gpu_run/`.
"""
BEYOND = """## What a call does not show

A call says that a function works on small arrays, not what it costs. Costs are measured by the
pressure calls above, by `bench/cuda_constants.py` and by `bench/cuda_managed.py`, all of which
`bench/gpu_run.py` runs on a card. Everything that this documentation says of the time of VRAM,
pages and PCIe is simulated until a card stands in the table.

The first thing to time on a card is what `LookaheadPrefetch` discards: operations wait for each
discard, which may stall them ([Paging by plan](reference/offload.md#paging-by-plan)). No run with
dask-cuda, RMM, UCX or two ranks on two cards exists.
"""


def kept() -> list[dict[str, Any]]:
    """Read the runs that are kept, cards first, in the order of their dates."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(KEPT.glob("*.json"))]
    return sorted(found, key=lambda run: (run["simulated"], run["date"]))


def keep(archive: Path, name: str) -> Path:
    """Take over what a run has found.

    Raises:
        SystemExit: there is no such archive, or its machine was never asked.
    """
    entries = Archive(archive).entries()
    records = {
        key[3:].removesuffix(".json"): json.loads(value)
        for key, value in entries.items()
        if key.endswith(".json")
    }
    machine = (records.get("machine") or {}).get("result") or {}
    if "device" not in machine:
        raise SystemExit(f"{archive} does not say of which machine it is: run its step 'machine'")
    lines = [{**line, "step": step} for step in STEPS for line in _lines(records.get(step))]
    run = {
        "device": machine["device"],
        "simulated": machine["simulated"],
        "date": records["machine"]["began"][:10],
        "versions": {**machine["versions"], **machine["cuda"]},
        "calls": lines,
    }
    KEPT.mkdir(parents=True, exist_ok=True)
    path = KEPT / f"{name}.json"
    text = ",\n  ".join(json.dumps(line) for line in run.pop("calls"))
    head = json.dumps(run, indent=1).removesuffix("\n}")
    path.write_text(f'{head},\n "calls": [\n  {text}\n ]\n}}\n', encoding="utf-8")
    return path


def _lines(record: Any) -> Iterable[dict[str, Any]]:
    """Leave out of lines what is long, and says where a machine has its files."""
    for line in (record or {}).get("result") or ():
        found = line.get("found")
        short = {key: value for key, value in line.items() if key not in ("where", "found")}
        if isinstance(found, dict):
            short["found"] = {key: _figures(value) for key, value in found.items()}
        yield short


def _figures(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _figures(each) for key, each in value.items() if _is_figure(each)}
    return value if _is_figure(value) else None


def _is_figure(value: Any) -> bool:
    return isinstance(value, (bool, int, float, dict))


def state(lines: Iterable[dict[str, Any]]) -> str:
    """Say how the calls of one thing have ended, in a word."""
    states = {line["state"]: line for line in lines}
    for bad in ("failed", "hung", "died", "cut"):
        if bad in states:
            return bad if bad == "cut" else f"**{bad}**"
    return "runs" if "passed" in states else "-"


Chosen = Callable[[dict[str, Any]], bool]


def cells(runs: list[dict[str, Any]], chosen: Chosen) -> tuple[str, str]:
    """Say how the calls that are chosen have ended: on cards, and on the software GPU.

    The newest run of each device counts.
    """
    newest = {run["device"] + str(run["simulated"]): run for run in runs}.values()
    said: dict[bool, list[str]] = {False: [], True: []}
    for run in newest:
        how = state(line for line in run["calls"] if chosen(line))
        if how != "-":
            where = run["device"] if run["simulated"] else f"{run['device']}, {run['date']}"
            said[run["simulated"]].append(where if how == "runs" else f"{where}: {how}")
    return "; ".join(said[False]), "; ".join(said[True])


def covers(name: str) -> Chosen:
    """Choose the calls of a public function."""
    return lambda line: name in line["covers"]


def measures(name: str) -> Chosen:
    """Choose a call that measures, by its name."""
    return lambda line: line["step"] in ("pressure", "oversubscribe") and line["name"] == name


def note(runs: list[dict[str, Any]], name: str) -> str:
    """Say what is not the real thing in the calls of a function."""
    lines = [line for run in runs for line in run["calls"] if name in line["covers"]]
    if lines and all(line["step"] == "host-calls" for line in lines):
        return "needs no GPU"
    stand_ins = {line.get("stand_in") or "" for line in lines}
    return "" if "" in stand_ins or not stand_ins else f"with stand-ins: {min(stand_ins)}"


def functions(runs: list[dict[str, Any]], names: Iterable[str]) -> str:
    """Write the table of public functions."""
    rows = ["| function | on a card | on the software GPU | |", "| --- | --- | --- | --- |"]
    for name in names:
        cards, software = cells(runs, covers(name))
        said = note(runs, name) if cards or software else "not at all"
        rows.append(f"| `{name}` | {cards or '-'} | {software or '-'} | {said} |")
    return "\n".join(rows) + "\n"


def pressure(runs: list[dict[str, Any]]) -> str:
    """Write the table of the calls that measure."""
    rows = ["| call | on a card | on the software GPU |", "| --- | --- | --- |"]
    for call in (*calls.calls_of("pressure"), *calls.calls_of("oversubscribe")):
        what = (call.run.__doc__ or call.name).partition("\n")[0].rstrip(".")
        cards, software = cells(runs, measures(call.name))
        rows.append(f"| {call.name}: {what} | {cards or '-'} | {software or '-'} |")
    return "\n".join(rows) + "\n"


def history(runs: list[dict[str, Any]]) -> str:
    """Write the table of the runs that are kept."""
    rows = ["| run | date | Python | CuPy | CUDA | calls |", "| --- " * 6 + "|"]
    if all(run["simulated"] for run in runs):
        rows.append("| no card | - | - | - | - | none |")
    for run in runs:
        versions = run["versions"]
        cupy = next((versions[key] for key in sorted(versions) if key.startswith("cupy")), "-")
        states = [line["state"] for line in run["calls"]]
        said = ", ".join(f"{states.count(how)} {how}" for how in sorted(set(states)))
        device = f"{run['device']}, software GPU" if run["simulated"] else run["device"]
        words = (device, run["date"], versions["python"], cupy, versions["cuda of cupy"], said)
        rows.append(f"| {' | '.join(words)} |")
    return "\n".join(rows) + "\n"


def page(runs: list[dict[str, Any]] | None = None, names: Iterable[str] | None = None) -> str:
    """Write the page."""
    runs = kept() if runs is None else runs
    names = check_site.public_names() if names is None else names
    return "\n".join(
        [
            INTRODUCTION,
            "## Runs\n",
            history(runs),
            "## Public functions\n",
            functions(runs, names),
            "## Pressure\n",
            "Beside plain memory, with the same bits; `bench/gpu_run_parts/pressure.py`.\n",
            pressure(runs),
            BEYOND,
        ]
    )


def main() -> int:
    """Returns 1 where --check finds the page out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", nargs=2, metavar=("OUT.zip", "NAME"), help="take over a run")
    parser.add_argument("--check", action="store_true", help="write nothing")
    given = parser.parse_args()
    if given.keep:
        print(f"Wrote {keep(Path(given.keep[0]), given.keep[1]).relative_to(ROOT)}")
    text = page()
    if given.check:
        if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
            return 0
        print(f"{PAGE.relative_to(ROOT)} is out of date; run bench/hardware_page.py")
        return 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"Wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
