"""``umem graph cut``: a graph in parts, for ranks that train on it together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from umem._common.printable import short
from umem.cli.files_and_sizes import say
from umem.cli.help_layout import Commands

if TYPE_CHECKING:
    from umem.graphs import Cut


@click.group("graph", cls=Commands)
def command() -> None:
    """Cut graphs into parts for training on several ranks.

    \b
    Examples:

    \b
        # Cut a graph into 12 parts
        umem graph cut graph.npz parts --parts 12
        # Read its features from a file of their own
        umem graph cut graph.npz parts --parts 4 --features features.npy
    """


@command.command("cut")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--parts", type=click.IntRange(1), required=True, metavar="N", help="The number of parts."
)
@click.option(
    "--features",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Read the features from this .npy file, if FILE has none.",
)
def cut_file(file: Path, out: Path, parts: int, features: Path | None) -> None:
    """Cut a graph into parts, one file each.

    FILE is a graph in an .npz file. OUT is a new folder for the parts. METIS keeps the number of
    edges between parts low, and the parts about equal in size. One cut serves any number of ranks
    up to N. For example, 12 parts divide evenly among 1, 2, 3, 4, 6 and 12 ranks.

    \b
    Examples:

    \b
        # Cut a graph into 12 parts
        umem graph cut graph.npz parts --parts 12
        # Read its features from a file of their own
        umem graph cut graph.npz parts --parts 4 --features features.npy
    """
    from umem.graphs import cut, load_npz

    found = cut(load_npz(file, features), parts, out)
    say(summary(found))


def summary(cut: Cut) -> str:
    """Describe a cut in a few lines."""
    share = cut.across_count / cut.tie_count if cut.tie_count else 0.0
    ties = f"{cut.across_count:,} of {cut.tie_count:,} edges ({share:.1%}) are between parts"
    return "\n".join(
        [
            f"Wrote {short(cut.folder)}: {len(cut.nodes)} parts, {sum(cut.nodes):,} nodes",
            ties,
            f"entries a part: {min(cut.entries):,} to {max(cut.entries):,} "
            f"(the largest has {cut.imbalance:.3f} times the average)",
            f"nodes a part: {min(cut.nodes):,} to {max(cut.nodes):,}",
            f"graph {cut.graph[:16]}, cut {cut.identity[:16]}",
        ]
    )
