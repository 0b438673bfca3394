"""``umem graph cut``: a graph in parts, for ranks that train on it together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from umem._common.printable import short
from umem.cli.files_and_sizes import say

if TYPE_CHECKING:
    from umem.graphs import Cut


@click.group("graph")
def command() -> None:
    """Work on graphs in files."""


@command.command("cut")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--parts", type=click.IntRange(1), required=True, metavar="N", help="How many parts.")
@click.option(
    "--features",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="An .npy file of the features, where FILE has none; read some rows at a time.",
)
def cut_file(file: Path, out: Path, parts: int, features: Path | None) -> None:
    """Cut the graph of FILE (.npz) into N parts, in the new folder OUT, one file each.

    Few ties lead from one part to another, and parts have about as many entries each (METIS).
    One cut serves any number of ranks up to N: 12 parts go evenly to 1, 2, 3, 4, 6 and 12.
    """
    from umem.graphs import cut, load_npz

    found = cut(load_npz(file, features), parts, out)
    say(summary(found))


def summary(cut: Cut) -> str:
    """Describe a cut in a few lines."""
    share = cut.across_count / cut.tie_count if cut.tie_count else 0.0
    ties = f"{cut.across_count:,} of {cut.tie_count:,} ties ({share:.1%}) lead across parts"
    return "\n".join(
        [
            f"Wrote {short(cut.folder)}: {len(cut.nodes)} parts, {sum(cut.nodes):,} nodes",
            ties,
            f"entries a part: {min(cut.entries):,} to {max(cut.entries):,} "
            f"(the largest has {cut.imbalance:.3f} of an average part's)",
            f"nodes a part: {min(cut.nodes):,} to {max(cut.nodes):,}",
            f"graph {cut.graph[:16]}, cut {cut.identity[:16]}",
        ]
    )
