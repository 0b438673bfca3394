"""Do techniques change only what is documented, whatever is on together, in whatever order?

Each random composition (tests/support/random_compositions.py) is a small network with some of
accumulate (its check on), half precision, 8-bit states, activations in bfloat16, Recompute,
Offload, workspace, updates in chunks, tied and smaller layers; turned on and off in a drawn order,
and in five of seven stopped and resumed in the middle. It is compared with the run without what
changes no bit (the same bits), without what takes sums in another order (to rounding), and with
fewer bits off (losses as documented). What is refused has to be refused by a known error that
changes nothing, and the rest goes on. Everything else is unexplained.

``--composition SEED`` prints one, and what comes of it. Interrupted, it tells of those so far.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import bench_path  # noqa: F401
import click
import common
from report_tables import Row, Table, counted, text, verdict

QUICK = 12


def run(seed: int) -> dict[str, Any]:
    """Judge a composition."""
    from random_compositions import composition, judged

    drawn = composition(seed)
    found = judged(drawn)
    return {
        "seed": seed,
        "techniques": list(drawn.techniques),
        "stops": drawn.stops is not None,
        "outcome": found.outcome,
        "compared": list(found.compared),
        "refused": list(found.refused),
        "composition": str(drawn),
        "message": found.message,
    }


def counts(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Count the outcomes of some compositions."""
    found = Counter(row["outcome"] for row in rows)
    return {
        "name": name,
        "compositions": len(rows),
        "as documented": found["as documented"],
        "refused in part": found["refused in part"],
        "unexplained": found["unexplained"],
    }


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Count all, by what they were compared with, and by technique."""
    techniques = sorted({name for row in rows for name in row["techniques"]})
    compared = ("bits", "rounding", "fewer bits")
    return {
        "all": [counts("all", rows), counts("resumed", [row for row in rows if row["stops"]])],
        "compared": [
            counts(name, [row for row in rows if name in row["compared"]]) for name in compared
        ],
        "techniques": [
            {
                **counts(name, [row for row in rows if name in row["techniques"]]),
                "refused": sum(name in row["refused"] for row in rows),
            }
            for name in techniques
        ],
    }


def answer(result: common.Result) -> str:
    (row,) = result["rows"]
    every = row["all"][0]
    return (
        f"{'Yes' if row['passed'] else 'No'}: of {every['compositions']:,} random compositions "
        f"{every['as documented']:,} gave what the pages say, {every['refused in part']:,} so "
        f"without what was refused, and {every['unexplained']:,} are unexplained."
    )


COLUMNS = (
    counted("compositions", "compositions"),
    counted("as documented", "as documented"),
    counted("refused in part", "refused in part"),
    counted("unexplained", "unexplained"),
)


def tables(result: common.Result) -> Iterator[Table]:
    (row,) = result["rows"]
    yield Table((text("of", "name"), *COLUMNS), row["all"])
    yield Table((text("compared by", "name"), *COLUMNS), row["compared"])
    refused = counted("this one refused", "refused")
    yield Table((text("technique", "name"), *COLUMNS, refused), row["techniques"])
    yield Table((counted("first seed", "seed"), verdict()), [row])


def notes(result: common.Result) -> Iterator[str]:
    """Write what is unexplained."""
    for each in result["rows"][0]["failed"]:
        yield f"{each['composition']}: {' '.join(each['message'].split())[:300]}"


BENCH = common.Bench("compositions", __doc__, answer, tables=tables, notes=notes)


@click.command(help=__doc__)
@click.option("--count", type=click.IntRange(1), default=2_000, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="The first.")
@click.option("--composition", "only", type=int, default=None, help="Print this one.")
@click.option("--quick", is_flag=True, help=f"{QUICK} compositions.")
@common.json_option
def main(count: int, seed: int, only: int | None, quick: bool, path: Path | None) -> None:
    if only is not None:
        found = run(only)
        print(f"{found['composition']}\n{found['outcome']} {found['message']}".strip())
        return
    common.writable(path)
    count = QUICK if quick else count
    rows: list[Row] = []
    seeds = range(seed, seed + count)
    with (
        suppress(KeyboardInterrupt),
        click.progressbar(seeds, file=sys.stderr, hidden=not sys.stderr.isatty()) as bar,
    ):
        for each in bar:
            rows.append(run(each))
            if rows[-1]["outcome"] == "unexplained":
                print(rows[-1]["composition"], rows[-1]["message"], file=sys.stderr, flush=True)
    failed = [row for row in rows if row["outcome"] == "unexplained"]
    result = {"seed": seed, **summary(rows), "passed": not failed, "failed": failed}
    BENCH.finish([result], path, simulated=False, options={"count": len(rows), "seed": seed})
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
