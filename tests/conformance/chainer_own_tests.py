"""How many of Chainer's own GPU tests pass on the software GPU?

Takes the folder `tests` of a checkout of Chainer 7.8.1; it is no part of this repository. Cases
count that are marked `gpu`, and not `cudnn`, `ideep` or `chainerx`, which the software GPU has not.
They run in processes of their own, some hundred cases each, under a limit of memory and of time;
one that ends its process has failed. Those that need more GPUs than one are counted apart, by
`chainer_left_out.txt` others, with a reason each. With `--kept` a run goes on where the last one
stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench_path
import click
import common
import foreign_tests
from report_tables import counted, percent, quantity, text

WANTED_SHARE = 0.995
FOLDERS = ("functions_tests", "links_tests", "optimizers_tests")
_OTHERS = {"cudnn", "ideep", "chainerx", "skip"}  # Chainer's conftest marks those of ChainerX so


def counts(marks: Sequence[str]) -> bool:
    """Tell whether a case with these marks is for CuPy without another library."""
    return "gpu" in marks and not _OTHERS.intersection(marks)


def answer(result: common.Result) -> str:
    return f"{foreign_tests.passed(result)}; {percent(WANTED_SHARE)} are wanted."


BENCH = common.Bench(
    "chainer_own_tests",
    __doc__,
    answer,
    (
        text("folder", "name"),
        counted("cases", "case_count"),
        counted("left out", "left_out_count"),
        counted("skipped by Chainer", "skipped_count"),
        counted("passed", "passed_count"),
        counted("failed", "failed_count"),
        quantity("passed", lambda row: row["passed_share"], "%", per=0.01),
    ),
    notes=foreign_tests.notes,
)


@click.command(help=__doc__)
@click.argument("tests", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--under", multiple=True, default=FOLDERS, help="In its folder chainer_tests.")
@foreign_tests.options
def main(tests: Path, under: tuple[str, ...], devices: int, path: Path | None, **how: Any) -> None:
    common.writable(path)
    suite = foreign_tests.Suite(
        tests.resolve(),
        [f"chainer_tests/{name}" for name in under],
        "t4,vram=8GiB,force",
        bench_path.HERE / "chainer_left_out.txt",
        counts,
        imports=("chainer_tests_start",),
        environment={"CHAINER_TEST_GPU_LIMIT": str(devices)},
        devices=devices,
    )
    found = foreign_tests.examine(suite, depth=2, **how)
    BENCH.finish(found.pop("rows"), path, **found)


if __name__ == "__main__":
    main()
