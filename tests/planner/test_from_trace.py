"""A graph from a trace: calls, edges, views, stashes, and what is saved."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from umem.errors import GraphError
from umem.planner import Graph, plan, simulate
from umem.trace import Access, Alloc, Free, Op, Trace


def read(tensor: int, nbytes: int, start: int = 0) -> Access:
    return Access(tensor, start, nbytes)


def step() -> Trace:
    """x, w -> convolution -> (freed) normalisation -> relu with a mask -> view -> loss."""
    return Trace(
        [
            Alloc(0, 8, "input", "x", True),
            Alloc(1, 4, "parameter", "w", True),
            Alloc(2, 100, "activation", "Convolution2DFunction"),
            Op(
                "Convolution2DFunction",
                "forward",
                (read(0, 8), read(1, 4)),
                (read(2, 100),),
                50,
                host_seconds=0.5,
                workspace_bytes=7,
            ),
            Alloc(3, 90, "activation", "BatchNormalization"),
            Op(
                "BatchNormalization",
                "forward",
                (read(2, 100),),
                (read(3, 90),),
                9,
                host_seconds=0.1,
            ),
            Alloc(4, 80, "activation", "ReLU"),
            Alloc(5, 20, "stash", "ReLU.mask"),
            Op("ReLU", "forward", (read(3, 90),), (read(4, 80), read(5, 20)), 8, host_seconds=0.1),
            Free(3),
            Op("Reshape", "forward", (read(4, 80),), (read(4, 80),), 0, host_seconds=0.0),
            Alloc(6, 4, "activation", "Zoneout"),
            Op(
                "Zoneout",
                "forward",
                (read(4, 80), read(2, 100)),
                (read(6, 4),),
                1,
                host_seconds=0.2,
            ),
            Alloc(7, 4, "gradient", "Zoneout"),
            Op("Zoneout", "backward", (read(6, 4),), (read(7, 4),)),
            Free(7),
            Free(6),
            Free(5),
            Free(4),
            Free(2),
            Op("ReLU", "forward", (), ()),
        ]
    )


def test_calls_become_nodes_and_what_they_read_edges():
    graph = Graph.from_trace(step())
    names = ("Convolution2DFunction#0", "BatchNormalization#1", "ReLU#2", "Reshape#3", "Zoneout#4")
    assert graph.names == names
    assert set(graph.edges) == {
        (names[0], names[1]),
        (names[1], names[2]),
        (names[2], names[3]),
        (names[3], names[4]),
        (names[0], names[4]),
    }
    conv, norm, relu, view, loss = graph.nodes
    assert [n.nbytes for n in graph.nodes] == [100, 90, 80, 0, 4]
    assert [n.saved for n in graph.nodes] == [True, False, True, True, True]
    assert [n.cost for n in graph.nodes] == [10, 1, 1, 1, 1]
    assert (relu.stash_bytes, view.alias_of, conv.workspace_bytes) == (20, names[2], 7)
    assert (norm.recomputable, loss.recomputable) == (True, False)


def test_costs_are_those_asked_for():
    assert [n.cost for n in Graph.from_trace(step(), "flops").nodes] == [50, 9, 8, 0, 1]
    assert Graph.from_trace(step(), "seconds").nodes[0].cost == 0.5
    with pytest.raises(GraphError, match="cost must be"):
        Graph.from_trace(step(), "time")
    events = [e._replace(host_seconds=None) if isinstance(e, Op) else e for e in step().events]
    with pytest.raises(GraphError, match="has no time"):
        Graph.from_trace(Trace(events), "seconds")


def test_a_call_that_makes_several_views_is_a_view_of_what_it_reads():
    halves = read(1, 50), Access(1, 50, 100)
    trace = Trace(
        [
            Alloc(0, 8, "input", "x", True),
            Alloc(1, 100, "activation", "f"),
            Op("f", "forward", (read(0, 8),), (read(1, 100),)),
            Op("Separate", "forward", (read(1, 100),), halves),
            Alloc(2, 50, "activation", "g"),
            Op("g", "forward", halves[1:], (read(2, 50),)),
            Op("g", "backward", (read(2, 50),), ()),
        ]
    )
    graph = Graph.from_trace(trace)
    assert set(graph.edges) == {("f#0", "Separate#1"), ("Separate#1", "g#2")}
    assert [node.alias_of for node in graph.nodes] == [None, "f#0", None]


def test_a_trace_without_forward_is_refused():
    with pytest.raises(GraphError, match="no forward call"):
        Graph.from_trace(Trace([]))


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("chainer") is None, reason="Chainer is not installed")
def test_a_recorded_network_is_planned():
    import umem.chainer  # isort: skip  (before Chainer, which it makes ready)
    import chainer.functions as F
    import chainer.links as L
    import numpy as np

    layers = [L.Convolution2D(4, 4, 3, pad=1) for _ in range(12)]
    norms = [L.BatchNormalization(4) for _ in layers]
    h = np.ones((2, 4, 16, 16), np.float32)
    with umem.record() as recorder:
        for conv, norm in zip(layers, norms, strict=True):
            h = F.relu(norm(conv(h)))
        loss = F.mean(F.expand_dims(h, 0))
    graph = Graph.from_trace(recorder.trace)
    assert len(graph) >= 38
    by_kind = {name.partition("#")[0]: node for name, node in zip(graph.names, graph.nodes)}  # noqa: B905
    assert by_kind["Convolution2DFunction"].saved and by_kind["ReLU"].saved
    assert not by_kind["BatchNormalization"].saved
    assert by_kind["ExpandDims"].alias_of is not None
    assert loss.array.size == 1
    keep = plan(graph, method="store_all", model="saved").peak_bytes
    least = plan(graph, model="saved")
    assert least.peak_bytes < keep / 2
    assert simulate(graph, least).peak_bytes == least.peak_bytes
