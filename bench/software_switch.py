"""What does the switch of the software GPU cost a Python process that does not use it?

Two environments without packages, of which one has `umem_software_gpu.pth`. Processes that do
nothing are started in both by turns, without UMEM_SOFTWARE_GPU. A third environment has an empty
file of that name, which tells how much reading any such file takes. Time is that of the processor:
other programs change it less than that of the clock.
"""

from __future__ import annotations

import os
import resource
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import common
from report_tables import figure, quantity, text

LIMIT_MS = 1.0
NONE, EMPTY, SWITCH = CASES = ("no file", "an empty file", "the switch")
BACKEND = common.HERE.parent / "scripts" / "build_backend.py"


def environment(folder: Path, content: str | None) -> Path:
    """Make an environment, and return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    if content is not None:
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "umem_software_gpu.pth").write_text(content)
    return folder / "bin" / "python"


def spent() -> float:
    """Seconds of the processor that children took which have ended."""
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


def measure(count: int) -> dict[str, list[float]]:
    """Milliseconds of the processor of each start, by turns."""
    line = runpy.run_path(str(BACKEND))["LINE"]
    found: dict[str, list[float]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as folder:
        pythons = {
            case: environment(Path(folder, str(at)), content)
            for at, (case, content) in enumerate(zip(CASES, (None, "", line), strict=True))
        }
        for _ in range(count):
            for case, python in pythons.items():
                start = spent()
                subprocess.run([python, "-c", ""], check=True, env={"PATH": os.environ["PATH"]})
                found[case].append(1000 * (spent() - start))
    return found


def answer(result: common.Result) -> str:
    rows = {row["case"]: row["ms"] for row in result["rows"]}
    more = rows[SWITCH] - rows[NONE]
    return (
        f"{more:+.2f} ms in the median of {result['options']['starts']} starts, of "
        f"{figure(rows[NONE])} ms of the processor ({rows[EMPTY] - rows[NONE]:+.2f} for an empty "
        f"file); at most {figure(LIMIT_MS)} ms were aimed at."
    )


COLUMNS = (
    text("site-packages has", "case"),
    quantity("start and end of a process, of the processor", "ms", "ms"),
    quantity("least", "low", "ms"),
    quantity("most", "high", "ms"),
)
BENCH = common.Bench("software_switch", __doc__, answer, COLUMNS)


@click.command(help=__doc__)
@click.option("--starts", type=click.IntRange(1), default=300, show_default=True)
@click.option("--quick", is_flag=True, help="Three starts.")
@common.json_option
def main(starts: int, quick: bool, path: Path | None) -> None:
    common.writable(path)
    starts = 3 if quick else starts
    rows = []
    for case, ms in measure(starts).items():
        median, low, high = common.summary(ms)
        rows.append({"case": case, "ms": median, "low": low, "high": high, "repeats": ms})
    BENCH.finish(rows, path, simulated=False, options={"quick": quick, "starts": starts})


if __name__ == "__main__":
    main()
