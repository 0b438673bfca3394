"""Zachary's karate club."""

from __future__ import annotations

from importlib import resources

import numpy as np

from umem.graphs.csr import GraphData, symmetric_csr


def karate_club() -> GraphData:
    """Return Zachary's karate club: 34 members, 78 edges, labels by the faction after the split.

    Features are the identity (34, 34). The two leaders, nodes 0 and 33, are the only training
    nodes; all others are for testing.

    Zachary, "An Information Flow Model for Conflict and Fission in Small Groups", Journal of
    Anthropological Research 33 (1977), 452-473. A member's label is the club it joined. Edges are
    unweighted.
    """
    text = (resources.files("umem") / "data" / "karate.csv").read_text("utf-8")
    rows = [line.split(",") for line in text.splitlines()[1:]]
    ties = [(int(member), int(other)) for member, _, others in rows for other in others.split()]
    nodes = len(rows)
    keys = np.array([(low - 1) * nodes + high - 1 for low, high in ties], np.int64)
    train = np.zeros(nodes, np.bool_)
    train[[0, nodes - 1]] = True
    return GraphData(
        *symmetric_csr(keys, nodes),
        np.eye(nodes, dtype=np.float32),
        np.array([int(faction) for _, faction, _ in rows], np.int32),
        train,
        np.zeros(nodes, np.bool_),
        ~train,
    )
