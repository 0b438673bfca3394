"""Graphs to train on: generated, read from a file, or Zachary's karate club.

A graph is a plain set of NumPy arrays (`Graph`); `normalised_adjacency` turns it into the sparse
matrix that a graph convolution multiplies by. Only NumPy is imported with this package.
"""

from typing import TYPE_CHECKING

from umem.graphs.csr import GraphData as Graph
from umem.graphs.csr import normalised_adjacency
from umem.graphs.cut_folder import Cut, open_cut
from umem.graphs.cutting import cut
from umem.graphs.generator import rmat
from umem.graphs.halo import HaloPlan, halo_plan
from umem.graphs.karate import karate_club
from umem.graphs.npz import load_npz, save_npz
from umem.graphs.planted_partition import communities

__all__ = [
    "Cut",
    "Graph",
    "HaloPlan",
    "communities",
    "cut",
    "halo_plan",
    "karate_club",
    "load_npz",
    "normalised_adjacency",
    "open_cut",
    "rmat",
    "save_npz",
]


if TYPE_CHECKING:
    from umem.graphs.csr import Array
    from umem.graphs.halo import ColumnBlock, RankBlocks, parts_of_ranks, rank_blocks
else:
    from umem._common.faces import face

    _, __getattr__ = face(
        __name__, csr="Array", halo="ColumnBlock RankBlocks parts_of_ranks rank_blocks"
    )
