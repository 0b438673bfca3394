"""What was said of ranks beforehand, and what their traces say afterwards, is what they sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from mpi_programs import needs_ranks, run_ranks

import umem
from umem.cli import main
from umem.graphs import Graph, PlannedCut, communities, cut, normalised_adjacency

pytestmark = needs_ranks
TRAIN = """
import json, sys, tracemalloc
from pathlib import Path
import umem.chainer
import chainer
import numpy as np
import umem
from mpi4py import MPI

folder, out = Path(sys.argv[1]), Path(sys.argv[2])
comm = MPI.COMM_WORLD
graph = umem.chainer.ParallelGraph(folder, comm)
model = umem.chainer.ParallelGCN(comm, graph.feature_count, 12, graph.class_count)
optimizer = chainer.optimizers.Adam(0.01).setup(model)
features, labels = graph.load_features(), graph.labels_where(graph.train_mask)

def step():
    optimizer.update(lambda: graph.cross_entropy(model(graph, features), labels))

step()
before = graph.ranks.sent_bytes["halo"]
with umem.record() as recorder:
    step()
sent = graph.ranks.sent_bytes["halo"] - before
recorder.trace.save(out / f"run.rank{comm.rank}.umem.gz")
(out / f"{comm.rank}.json").write_text(json.dumps(sent))
"""


@pytest.fixture(scope="module")
def graph() -> Graph:
    return communities(600, 6, 3000, across=0.1, seed=2, features=9, classes=4)


@pytest.fixture(scope="module")
def folder(graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cuts") / "seven"
    cut(graph, 7, path)
    return path


def in_parts(folder: Path) -> umem.Trace:
    import umem.chainer  # isort: skip
    import chainer

    graph = umem.chainer.ParallelGraph(folder)
    model = umem.chainer.ParallelGCN(None, graph.feature_count, 12, graph.class_count)
    features, labels = graph.load_features(), graph.labels_where(graph.train_mask)
    optimizer = chainer.optimizers.Adam(0.01).setup(model)
    return recorded(optimizer, lambda: graph.cross_entropy(model(graph, features), labels))


def whole(graph: Graph) -> umem.Trace:
    import chainer
    import chainer.functions as F

    from umem.chainer.gcn import GCN, Adjacency

    adjacency = Adjacency(normalised_adjacency(graph))
    model = GCN(9, 12, 4)
    labels = np.where(graph.train_mask, graph.labels, -1).astype(np.int32)
    optimizer = chainer.optimizers.Adam(0.01).setup(model)
    return recorded(
        optimizer, lambda: F.softmax_cross_entropy(model(adjacency, graph.features), labels)
    )


def recorded(optimizer: Any, loss: Any) -> umem.Trace:
    optimizer.update(loss)
    with umem.record() as recorder:
        optimizer.update(loss)
    return recorder.trace


@pytest.mark.thorough
def test_what_is_sent_is_what_was_said_and_what_traces_say(
    graph: Graph, folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    done = run_ranks(3, TRAIN, folder, out)
    assert done.returncode == 0, done.stderr
    sent = [json.loads((out / f"{rank}.json").read_text()) for rank in range(3)]
    for trace in (in_parts(folder), whole(graph)):
        choice = umem.choose_ranks(trace, (3,), "t4", "pcie4", cut=PlannedCut(folder))
        assert list(choice.steps[0].sent_bytes) == sent and min(sent) > 0
    said = CliRunner().invoke(main, ["report", str(out), "--json"])
    found = json.loads(said.output)
    assert [row["sent_bytes"] for row in found["ranks"]] == sent
    shown = CliRunner().invoke(main, ["report", str(out)]).output
    assert "PartAggregation" in shown and "PartLinear" in shown
