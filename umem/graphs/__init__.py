"""Graphs to train on: generated, read from a file, or Zachary's karate club.

A graph is a plain set of NumPy arrays (`Graph`); `normalised_adjacency` turns it into the sparse
matrix that a graph convolution multiplies by. Only NumPy is imported with this package.
"""

from umem.graphs.csr import GraphData as Graph
from umem.graphs.csr import normalised_adjacency
from umem.graphs.generator import rmat
from umem.graphs.karate import karate_club
from umem.graphs.npz import load_npz, save_npz

__all__ = ["Graph", "karate_club", "load_npz", "normalised_adjacency", "rmat", "save_npz"]
