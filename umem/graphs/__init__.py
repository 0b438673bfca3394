"""Graphs to train on: generated, read from a file, or Zachary's karate club.

A graph is a set of NumPy arrays (`Graph`); `normalised_adjacency` computes the sparse matrix that a
graph convolution multiplies by. Importing this package imports only NumPy. Users make graphs here,
``umem graph cut`` partitions them, and chainer's parallel graphs read the parts.

    csr.py                has the graph, and the matrix that a graph convolution multiplies by
    generator.py          generates graphs with power-law degrees
    planted_partition.py  generates graphs of communities
    karate.py             loads the karate club
    labelled.py           gives a graph labels that cannot be learned from features alone
    npz.py                reads and writes .npz files, without pickle
    draws.py              draws random numbers that are the same on every NumPy
    partition.py          assigns nodes to parts by METIS
    cutting.py            writes the parts to a folder
    cut_folder.py         reads that folder
    part_file.py          reads and writes the file of a part: arrays with checksums
    verified_files.py     remembers verified files, so that a large one is not read at each opening
    halo.py               plans the rows that ranks send to each other
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
