"""The answer, tables and notes of bench/validate_um.py: they see its rows and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import common
from report_tables import Column, Row, Table, Value, figure, quantity, span, text


def answer(result: common.Result) -> str:
    judged = [row for row in result["rows"] if row["judged"]]
    if not judged:
        return (
            f"None of the {len(result['rows'])} figures shown has a published one to judge it by."
        )
    errors = [abs(row["error_percent"]) for row in judged]
    return (
        f"{sum(row['passed'] for row in judged)} of the {len(judged)} figures that are judged are "
        f"within their tolerance, {span(errors, partial(figure, places=1))} % off."
    )


def by_unit(result: common.Result) -> Iterator[Table]:
    """Make a table a unit."""
    rows = result["rows"]
    for unit in dict.fromkeys(row["unit"] for row in rows):
        columns = (
            text("program", lambda row: f"{row['name']}: {row['case']}"),
            text("GPU", "gpu"),
            Column("model, simulated", _or_why("model", "fits"), unit),
            Column("published", _or_why("published", "published_fits"), unit),
            quantity("error", "error_percent", "%", places=1, signed=True),
            quantity("tolerance", "tolerance_percent", "%", places=0),
            text("judged", lambda row: {None: "no", True: "pass", False: "MISS"}[row["passed"]]),
        )
        yield Table(columns, [row for row in rows if row["unit"] == unit])


def _or_why(key: str, fits: str) -> Value:
    def cell(row: Row) -> str | None:
        if row[key] is not None:
            return figure(row[key])
        return "out of memory" if row.get(fits) is False else None

    return cell


def notes(result: common.Result) -> Iterator[str]:
    rows = result["rows"]
    for row in rows:
        if row.get("band_seconds"):
            yield (
                f"{row['case']}: {span(row['band_seconds'])} s with 5 % more or less VRAM and "
                "faults of 200 to 300 us."
            )
    yield from dict.fromkeys(f"{row['name']}: {row['note']}." for row in rows if row["note"])
    yield from sorted({f"Source: {row['source']}." for row in rows if row["source"]})
