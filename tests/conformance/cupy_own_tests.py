"""How many of CuPy's own tests pass on the software GPU?

Takes the folder `tests` of a checkout of CuPy, of the version that is installed; it is no part of
this repository. Cases that ask for what the software GPU says it has not are left out by
`cupy_left_out.txt`, one reason each. The others run in processes of their own, some hundred cases
each, under a limit of memory and of time; one that ends its process has failed. Those that CuPy's
tests skip themselves count as neither. With `--kept` a run goes on where the last one stopped. With
`--mode` the cases run under `umem.enable` with that mode; `--under` chooses some.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bench_path
import click
import common
import foreign_tests
from report_tables import counted, percent, quantity, text

WANTED_SHARE, MOST_LEFT_OUT = 0.99, 0.05
GPU = "t4,vram=4GiB,force"
LEFT_OUT = bench_path.HERE / "cupy_left_out.txt"


def answer(result: common.Result) -> str:
    return (
        f"{foreign_tests.passed(result)}; {percent(result['left_out_share'])} of "
        f"{result['all_count']:,} cases are left out, where "
        f"{percent(WANTED_SHARE)} and at most {percent(MOST_LEFT_OUT)} are wanted."
    )


BENCH = common.Bench(
    "cupy_own_tests",
    __doc__,
    answer,
    (
        text("folder", "name"),
        counted("cases", "case_count"),
        counted("left out", "left_out_count"),
        counted("skipped by CuPy", "skipped_count"),
        counted("passed", "passed_count"),
        counted("failed", "failed_count"),
        quantity("passed", lambda row: row["passed_share"], "%", per=0.01),
    ),
    notes=foreign_tests.notes,
)


@click.command(help=__doc__)
@click.argument("tests", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--under", multiple=True, default=("cupy_tests", "cupyx_tests"), help="In it.")
@click.option("--gpu", default=GPU, show_default=True, help="As UMEM_SOFTWARE_GPU has it.")
@click.option("--mode", type=click.Choice(["managed", "hybrid"]), help="Of umem.enable.")
@foreign_tests.options
def main(
    tests: Path,
    under: tuple[str, ...],
    gpu: str,
    mode: str | None,
    devices: int,
    path: Path | None,
    **how: Any,
) -> None:
    common.writable(path)
    suite = foreign_tests.Suite(
        tests.resolve(),
        under,
        gpu,
        LEFT_OUT,
        imports=["enabled_mode"] if mode else [],
        environment={"UMEM_MODE": mode} if mode else {},
        devices=devices,
    )
    found = foreign_tests.examine(suite, depth=2, **how)
    found["options"]["gpu"] = gpu
    BENCH.finish(found.pop("rows"), path, **found)


if __name__ == "__main__":
    main()
