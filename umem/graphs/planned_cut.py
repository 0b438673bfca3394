"""A cut with what any number of ranks would send, each planned once."""

from __future__ import annotations

from os import PathLike, fspath

from umem.graphs.cut_folder import open_cut
from umem.graphs.halo import HaloPlan, halo_plan


class PlannedCut:
    """A cut for ``umem.choose_ranks``, described by its counts; features are never read.

    Args:
        folder: an output of `umem.graphs.cut` or ``umem graph cut``.

    Attributes:
        nodes: by part.
        entries: by part, those of its rows of the adjacency, loops included.

    Raises:
        DataError: it cannot be read, or is no cut.
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        self._cut = open_cut(fspath(folder))
        self.nodes, self.entries = self._cut.nodes, self._cut.entries
        self._plans: dict[int, HaloPlan] = {}

    def plan(self, ranks: int) -> HaloPlan:
        """Return the halo plan for a number of ranks, computed once; see
        `umem.graphs.halo.halo_plan`.

        Raises:
            SizeError: there are more ranks than parts.
            DataError: a part cannot be read, or is one of another cut.
        """
        if ranks not in self._plans:
            self._plans[ranks] = halo_plan(self._cut, ranks)
        return self._plans[ranks]
