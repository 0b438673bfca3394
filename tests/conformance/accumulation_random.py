"""Does a batch in parts give the gradient of the whole, whatever loss is drawn at random?

Each random program (tests/support/random_losses.py) is a small network with a loss and two to four
batches of differing composition. It is trained by whole batches with Chainer alone, and in parts
with `umem.chainer.accumulate`; the parameters are compared after every update. An update is right
if it differs by rounding only. A refusal is an error of umem's that leaves parameters, persistent
values and NumPy's random state as they were.

The classes: "known" are sums with factors of Chainer's losses and of means, and "weight" are other
losses with a right ``weight=``; both have to be accepted. "wrong" are given a wrong ``weight=``
that shows in three samples, and have to be refused. "other" may be refused, but has to be right
where it is accepted. "wrong, later" are those of "other" that are wrong only after their first
update, which a comparison of that update's samples cannot show (docs/reference/accumulation.md,
Limits); they are counted and shown, and fail nothing. Where backward is called by hand nothing can
be compared, so a right program that was warned of that counts as accepted. A program counts in the
row of each kind of loss that it has.

``--program SEED`` prints one, and what comes of it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import bench_path  # noqa: F401
import click
import common
from report_tables import Row, Table, counted, percent, text, verdict

QUICK = 60
LEAST_ACCEPTED = 0.95
"""Of the known, and of those with a right weight=."""
ACCEPTED = ("known", "weight")
CLASSES = (*ACCEPTED, "wrong", "other")
WAYS = ("micro_batch", "steps", "by hand", "updater")
FAILED = ("wrong", "refused, state changed", "traceback")
OWN = "raised by the loss"
"""The loss function itself fails with so few samples, which Chainer's plain call shows as well."""
WARNED = "wrong, warned"
"""After an AccumulationWarning, where nothing could be compared; not so where it is known."""
LATER = "wrong, later"
RIGHT_WARNED = "right, warned"
TOLD = (*FAILED, LATER, WARNED, OWN)
SHOWN = 12


def run(seeds: Sequence[int]) -> list[Row]:
    """Judge programs; a row each."""
    from loss_verdicts import judged
    from random_losses import program

    rows = []
    for seed in seeds:
        one = program(seed)
        found = judged(one)
        rows.append(
            {
                "seed": seed,
                "class": one.grade,
                "how": one.how,
                "kinds": list(one.kinds),
                "outcome": found.outcome,
                "update": found.update,
                "message": found.message,
            }
        )
    return rows


def measure(seeds: range, processes: int, tell: Callable[[int], None]) -> list[Row]:
    """Judge all programs, in so many processes."""
    chunks = [seeds[start : start + 50] for start in range(0, len(seeds), 50)]
    found: list[Row] = []
    for rows in _mapped(chunks, processes):
        found += rows
        tell(len(rows))
    return found


def _mapped(chunks: Sequence[range], processes: int) -> Iterator[list[Row]]:
    if processes == 1:
        yield from map(run, chunks)
        return
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(run, chunks)


def counts(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Count the outcomes of some programs."""
    found = Counter(row["outcome"] for row in rows)
    judged = len(rows) - found["skipped"]
    warned = sum((row["outcome"], row["how"]) == (RIGHT_WARNED, "by hand") for row in rows)
    accepted = found["right"] + warned
    return {
        "name": name,
        "programs": judged,
        "right": found["right"],
        **{outcome: found[outcome] for outcome in (RIGHT_WARNED, "refused", *TOLD)},
        "accepted": accepted / judged if judged else None,
        "skipped": found["skipped"],
    }


def summary(rows: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    """Count by class, by the way in which parts are taken, and by kind of term."""
    kinds = sorted({kind for row in rows for kind in row["kinds"]})
    return {
        "classes": [
            counts(name, [row for row in rows if row["class"] == name]) for name in CLASSES
        ],
        "ways": [counts(name, [row for row in rows if row["how"] == name]) for name in WAYS],
        "kinds": [counts(kind, [row for row in rows if kind in row["kinds"]]) for kind in kinds],
    }


def passed(classes: Sequence[Row]) -> bool:
    """Say whether none failed, and whether those were accepted that have to be."""
    failed = sum(row[outcome] for row in classes for outcome in FAILED)
    accepted = [row for row in classes if row["name"] in ACCEPTED]
    return failed == sum(row[WARNED] for row in accepted) == 0 and all(
        (row["accepted"] or 0) >= LEAST_ACCEPTED for row in accepted
    )


def answer(result: common.Result) -> str:
    (row,) = result["rows"]
    classes = row["classes"]
    total = sum(each["programs"] for each in classes)
    names = (*FAILED, LATER, WARNED)
    failed = "; ".join(f"{sum(each[name] for each in classes):,} {name}" for name in names)
    shares = " and ".join(
        f"{percent(each['accepted'] or 0)} of the {each['programs']:,} {each['name']}"
        for each in classes
        if each["name"] in ACCEPTED
    )
    return (
        f"{'Yes' if row['passed'] else 'No'}: of {total:,} random programs "
        f"{sum(each['right'] + each[RIGHT_WARNED] for each in classes):,} are right and "
        f"{sum(each['refused'] for each in classes):,} refused; {failed}; accepted "
        f"are {shares}."
    )


COLUMNS = (
    counted("programs", "programs"),
    *(counted(name, name) for name in ("right", RIGHT_WARNED, "refused", *TOLD)),
    counted("skipped", "skipped"),
)


def tables(result: common.Result) -> Iterator[Table]:
    (row,) = result["rows"]
    yield Table((text("class", "name"), *COLUMNS), row["classes"])
    yield Table((text("parts by", "name"), *COLUMNS), row["ways"])
    yield Table((text("kind", "name"), *COLUMNS), row["kinds"])
    yield Table((counted("first seed", "seed"), verdict()), [row])


def _has_failed(row: Row) -> bool:
    """Say whether a program is not what its class has to be."""
    return row["class"] in ACCEPTED or row["outcome"] not in (LATER, WARNED)


def notes(result: common.Result) -> Iterator[str]:
    """Write the families that are wrong later, and the first programs of each way to fail."""
    (row,) = result["rows"]
    later = [f"{each['name']} {each[LATER]}" for each in row["kinds"] if each[LATER]]
    yield f"Wrong in a later update only: {'; '.join(later) or 'none'}"
    failed = [each for each in row["failed"] if _has_failed(each)]
    for name in (*FAILED, WARNED, OWN, "refused"):
        for each in [each for each in failed if each["outcome"] == name][:SHOWN]:
            message = " ".join(each["message"].split())[:200]
            yield (
                f"{each['seed']} {each['class']}, {each['how']}, {name} (update {each['update']}), "
                f"{'; '.join(each['kinds'])}: {message}"
            )


BENCH = common.Bench("accumulation_random", __doc__, answer, tables=tables, notes=notes)


@click.command(help=__doc__)
@click.option("--count", type=click.IntRange(1), default=10_000, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="The first.")
@click.option("--processes", type=click.IntRange(1), default=1, show_default=True)
@click.option("--program", "only", type=int, default=None, help="Print this one and its outcome.")
@click.option("--quick", is_flag=True, help=f"{QUICK} programs.")
@common.json_option
def main(
    count: int, seed: int, processes: int, only: int | None, quick: bool, path: Path | None
) -> None:
    if only is not None:
        import loss_verdicts

        loss_verdicts.main([str(only)])
        return
    common.writable(path)
    count = QUICK if quick else count
    with click.progressbar(length=count, file=sys.stderr, hidden=not sys.stderr.isatty()) as bar:
        rows = measure(range(seed, seed + count), processes, bar.update)
    found = summary(rows)
    failed = [
        row
        for row in rows
        if row["outcome"] in (*FAILED, LATER, WARNED)
        or (row["outcome"] in ("refused", OWN) and row["class"] in ACCEPTED)
    ]
    result = {"seed": seed, **found, "passed": passed(found["classes"]), "failed": failed}
    BENCH.finish([result], path, simulated=False, options={"count": count, "seed": seed})
    if not result["passed"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
