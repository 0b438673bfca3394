"""`umem run -n N --dry`: what ranks hold and exchange is what they do with their arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import needs_ranks, run
from software_programs import needs_compiler, needs_cupy

pytest.importorskip("pymetis", reason="a graph is cut by pymetis (umem's extra: mpi)")
from umem.graphs import communities, cut, halo_plan, open_cut

pytestmark = [needs_ranks, needs_compiler, needs_cupy]

GRAPH = """
    import sys
    import umem.chainer
    import chainer, cupy
    from mpi4py import MPI
    world = MPI.COMM_WORLD
    graph = umem.chainer.ParallelGraph(sys.argv[1], world).to_device("@cupy:0")
    features = graph.load_features()
    model = umem.chainer.ParallelGCN(
        world, graph.feature_count, hidden=32, classes=graph.class_count, layers=2, dropout=0.0
    )
    model.to_device("@cupy:0")
    optimizer = chainer.optimizers.Adam().setup(model)
    labels = graph.labels_where(graph.train_mask)
    pool = cupy.get_default_memory_pool()
    for _ in range(3):
        before = graph.ranks.sent_bytes["halo"]
        optimizer.add_hook(
            lambda _: print(
                pool.used_bytes(), pool.total_bytes(), graph.ranks.sent_bytes["halo"] - before
            ),
            name="told",
        )
        optimizer.update(lambda: graph.cross_entropy(model(graph, features), labels))
        optimizer.remove_hook("told")
"""
NCCL = """
    import chainermn, chainer, cupy
    import chainer.links as L
    world = chainermn.create_communicator("pure_nccl")
    device = world.intra_rank
    chainer.cuda.get_device_from_id(device).use()
    model = L.Classifier(L.Linear(500, 500))
    model.to_device(f"@cupy:{device}")
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(), world).setup(model)
    x, t = cupy.zeros((8, 500), "f4"), cupy.zeros(8, "i4")
    for _ in range(4):
        optimizer.update(model, x, t)
    print(cupy.get_default_memory_pool().total_bytes())
"""


@pytest.mark.slow
def test_four_ranks_of_a_graph_in_parts_hold_and_send_what_is_planned(tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    cut(communities(400, 6, 3000, across=0.1, seed=2, features=16, classes=4), 4, folder)
    ended = [
        run(tmp_path, GRAPH, option, "v100-16gb", n=4, arguments=(str(folder),))
        for option in ("--software", "--dry")
    ]
    real, dry = ([one.of(rank) for rank in range(4)] for one in ended)
    assert [one.status for one in ended] == [0, 0], ended[1].err
    assert real == dry
    plan = halo_plan(open_cut(folder), 4)
    widths = [16, 4, 4]  # features, and scores forward and backward
    for rank in range(4):
        sent = {int(line.split()[2]) for line in dry[rank]}
        assert sent == {plan.sent_bytes(rank, widths)}
        assert f"[{rank}] fits" in ended[1].err.splitlines()
    assert "the time leaves out the communication between ranks" in ended[1].err


@pytest.mark.thorough
def test_communicators_of_nccl_hold_what_they_do(tmp_path: Path) -> None:
    ended = [
        run(tmp_path, NCCL, *options, n=2)
        for options in (("--software", "t4"), ("--dry", "t4", "--dry-steps", "all"))
    ]
    assert [one.status for one in ended] == [0, 0], ended[1].err
    assert ended[0].of(0) == ended[1].of(0) and ended[0].of(1) == ended[1].of(1)


@pytest.mark.thorough
def test_one_rank_without_room_ends_all_with_the_status_of_what_does_not_fit(
    tmp_path: Path,
) -> None:
    code = """
        import sys
        import cupy
        from mpi4py import MPI
        rank = MPI.COMM_WORLD.rank
        kept = cupy.zeros((1 + rank) << 22)
        MPI.COMM_WORLD.Barrier()
    """
    file = tmp_path / "found.json"
    options = ("--dry", "t4", "--vram", "48MiB", "--json", str(file))
    ended = run(tmp_path, code, *options, n=2)
    assert ended.status == 3, ended.err
    assert "[1] does not fit: out of memory at script.py:" in ended.err
    assert json.loads((tmp_path / "found.rank1.json").read_text())["fits"] is False


def test_all_gpus_runs_one_process(tmp_path: Path) -> None:
    ended = run(tmp_path, "pass", "--dry", "t4", "--all-gpus", n=2)
    assert ended.status == 2 and "--all-gpus runs one process. Leave out -n" in ended.err
