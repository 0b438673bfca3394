"""Do the lines that `umem.choose` says fit a GPU train there from the first step, in its order?

A script of Chainer trains nine networks on a software T4, at shares of the least VRAM in which it
trains as it is. `umem.choose` runs it dry under each technique; each line that is said to fit then
runs with its arithmetic, in a process of its own, with the same VRAM, where memory that does not
fit is refused, the gaps of CuPy's own pool included. A technique is turned on by the same code in
both. Networks and batches are small, so that they can be computed.

Times are simulated, both: of the last two steps. Under a technique by which the driver moves memory
a dry time is a range, of three runs. The first three lines are in order where no earlier one takes
longer live than a later one, pairs of lines apart whose ranges overlap.

It takes hours, so that rows in the file are kept, each with its commit; a network or a share that
is named is tried again.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import click
import common
from choice_parts.live import run_live
from choice_parts.networks import GPU, GRANULE, NETWORKS, least_bytes, program
from report_tables import counted, listed, quantity, text

from umem.choosing import TECHNIQUES, DryProgram, Technique, TriedTechnique, choose_for
from umem.units import MIB

SHARES = (0.6, 0.4, 0.8)
"""Of the least VRAM; the middle one first, for all networks, as a run may be ended early."""
QUICK = ("nothing", "recompute min", "managed")
"""The techniques of the quick form."""
TOP = 3
"""So many lines are to be in live's order."""
CASES_AT_A_TIME = 3
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # of the processes it starts
EXPLAINED = {
    ("U-Net", "order"): "hybrid's time follows from the order of the pool's chunks: four more dry"
    " runs took 10.3 to 13.1 ms, three more live 12.4 to 12.7",
    ("VGG16", "order"): "gradients of halves overflow in the live steps, so that their update is"
    " skipped and takes no time; the zeros of a dry run never overflow",
}
"""Why a line is not as it was said, by network and technique."""


class Case(NamedTuple):
    """A network on a share of the least VRAM in which it trains as it is."""

    network: str
    share: float


def measure(
    case: Case, least: dict[str, int], techniques: Sequence[Technique] = TECHNIQUES
) -> dict[str, Any]:
    """Choose for a case, and try each line that is said to fit.

    Args:
        case: the network and the share.
        least: the least VRAM by network; that of the case is added where it is not known.
        techniques: those that are tried.
    """
    if case.network not in least:
        least[case.network] = least_bytes(case.network)
    vram = round(case.share * least[case.network] / GRANULE) * GRANULE
    dry_program = program(case.network, vram)
    choice = choose_for(dry_program, techniques=techniques)
    lines = [tried(dry_program, row) for row in choice.fitting]
    trains = [line for line in lines if not line["why_not"]]
    return {
        "network": case.network, "share": case.share, "commit": common.commit(),
        "vram_bytes": vram,
        "said": len(lines), "trained": len(trains),
        "in_order": all(map(are_in_order, *pairs(trains[:TOP]))),
        "first": lines[0]["technique"] if lines else None,
        "lines": lines,
        "left": {row.name: row.why_not for row in choice.rows if not row.fits},
    }  # fmt: skip


def tried(dry_program: DryProgram, row: TriedTechnique) -> dict[str, Any]:
    """Train under a technique, with arithmetic."""
    technique = next(each for each in TECHNIQUES if each.name == row.name)
    live = run_live(dry_program, technique)
    return {
        "technique": row.name,
        "dry_seconds": [row.seconds_low, row.seconds, row.seconds_high],
        "live_seconds": live.seconds,
        "dry_reserved_bytes": row.reserved_peak_bytes,
        "live_reserved_bytes": live.reserved_peak_bytes,
        "why_not": live.why_not,
    }


def pairs(lines: Sequence[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """Return earlier and later lines of each pair."""
    found = [*itertools.combinations(lines, 2)]
    return [one for one, _ in found], [other for _, other in found]


def are_in_order(earlier: dict[str, Any], later: dict[str, Any]) -> bool:
    """Tell whether the earlier line is no slower live, or the ranges overlap."""
    one, other = earlier["dry_seconds"], later["dry_seconds"]
    return bool(
        min(earlier["live_seconds"]) <= max(later["live_seconds"])
        or (one[0] <= other[-1] and other[0] <= one[-1])
    )


# -- the table ---------------------------------------------------------------------------------


def answer(result: common.Result) -> str:
    """Word the answer to the question, from the rows of a result."""
    rows = result["rows"]
    claimed, trained, order = (
        sum(row[key] for row in rows) for key in ("said", "trained", "in_order")
    )
    return (
        f"{trained} of {claimed} lines that are said to fit train from the first step; the first "
        f"{TOP} are in the order of their live times, or their ranges overlap, in {order} of "
        f"{len(rows)} choices."
    )


def notes(result: common.Result) -> list[str]:
    """Say which lines do not train, and which are out of order, and why; and each commit's rows."""
    counts = Counter(row["commit"] for row in result["rows"])
    found = [f"{count} choices at commit {commit}" for commit, count in counts.items()]
    for row in result["rows"]:
        place = f"{row['network']} at {row['share']:.0%}"
        for line in row["lines"]:
            if line["why_not"]:
                why = EXPLAINED.get((row["network"], line["technique"]), "not explained")
                found.append(f"{place}, {line['technique']}: {line['why_not']}; {why}")
        if not row["in_order"]:
            trains = [line for line in row["lines"] if not line["why_not"]][:TOP]
            live = listed(
                f"{line['technique']} ({1e3 * line['dry_seconds'][1]:.4g} ms, live "
                f"{1e3 * line['live_seconds'][-1]:.4g})"
                for line in trains
            )
            why = EXPLAINED.get((row["network"], "order"), "not explained")
            found.append(f"{place}, out of order: {live}; {why}")
    return found


BENCH = common.Bench(
    "choice_live",
    __doc__,
    answer,
    (
        text("network", "network"),
        quantity("of plain's VRAM", "share"),
        quantity("VRAM", "vram_bytes", "MiB", per=MIB),
        counted("said to fit", "said"),
        counted("train", "trained"),
        text("first three in order", lambda row: "yes" if row["in_order"] else "no"),
        text("first", "first"),
    ),
    notes=notes,
)


def kept(path: Path | None) -> dict[str, Any]:
    """Return what a file has, of whatever commits."""
    if path is None or not path.exists():
        return {"rows": [], "least": {}}
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="One network, one share, three techniques.")
@click.option("--only", "names", multiple=True, type=click.Choice([*NETWORKS]))
@click.option("--share", "given", multiple=True, type=click.FloatRange(0, 1, min_open=True))
@common.json_option
def main(quick: bool, names: tuple[str, ...], given: tuple[float, ...], path: Path | None) -> None:
    """Measure what no kept row has, and write the result after each."""
    common.writable(path)
    chosen = names or (("GCN",) if quick else tuple(NETWORKS))
    shares = given or (SHARES[:1] if quick else SHARES)
    before = kept(path)
    least = dict(before["least"])
    cases = [Case(name, share) for share in shares for name in chosen]
    if not (names or given):
        there = {Case(row["network"], row["share"]) for row in before["rows"]}
        cases = [case for case in cases if case not in there]
    rows = [row for row in before["rows"] if Case(row["network"], row["share"]) not in cases]
    how: dict[str, Any] = {
        "simulated": True, "options": {"quick": quick, "gpu": GPU}, "least": least,
    }  # fmt: skip
    order = [*NETWORKS]
    techniques = [each for each in TECHNIQUES if not quick or each.name in QUICK]
    with ThreadPoolExecutor(CASES_AT_A_TIME) as executor:
        running = [executor.submit(measure, case, least, techniques) for case in cases]
        for done in as_completed(running):
            rows.append(done.result())
            rows.sort(key=lambda row: (order.index(row["network"]), row["share"]))
            click.echo(json.dumps(done.result()), err=True)
            if path is not None:
                common.write_json(path, BENCH.report(rows, **how))
    BENCH.finish(rows, path, **how)


if __name__ == "__main__":
    main()
