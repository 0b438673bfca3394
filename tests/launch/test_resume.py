"""`umem run -n N --resume` of a graph in parts: any number of ranks goes on, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import needs_ranks, run

from umem.compat import find_package

pytest.importorskip("pymetis", reason="a graph is cut by pymetis (umem's extra: mpi)")
pytestmark = [
    needs_ranks,
    pytest.mark.skipif(find_package() is None, reason="Chainer is not installed"),
]

SCRIPT = """
    import hashlib, sys

    import umem.chainer
    import chainer
    import numpy as np
    from chainer import training
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    np.random.seed(3)
    graph = umem.chainer.ParallelGraph("../cut", comm)
    features, labels = graph.load_features(), graph.labels_where(graph.train_mask)
    model = umem.chainer.ParallelGCN(comm, 9, 6, graph.class_count, layers=2, dropout=0.3)
    optimizer = chainer.optimizers.Adam(0.02).setup(model)

    class WholeGraph(training.updaters.StandardUpdater):
        def update_core(self):
            optimizer.update(lambda: graph.cross_entropy(model(graph, features), labels))
            weights = b"".join(p.array.tobytes() for p in model.params())
            if comm.rank == 0:
                print(self.iteration, hashlib.sha256(weights).hexdigest(), flush=True)

    updater = WholeGraph(chainer.iterators.SerialIterator([0], 1), optimizer)
    training.Trainer(updater, (int(sys.argv[1]), "iteration"), out="out").run()
"""


@pytest.mark.slow
def test_a_graph_in_parts_goes_on_by_the_option_on_any_number_of_ranks(tmp_path: Path) -> None:
    from umem.graphs import communities, cut

    cut(communities(200, 6, 1000, across=0.1, seed=2, features=9, classes=4), 5, tmp_path / "cut")

    def lines(folder: str, ranks: int, steps: int, *options: str) -> list[str]:
        place = tmp_path / folder
        place.mkdir(exist_ok=True)
        ended = run(place, SCRIPT, *options, n=ranks, arguments=(str(steps),))
        assert ended.status == 0 and ended.left == set(), ended.err
        return ended.of(0)

    whole = lines("whole", 1, 9)
    assert len(whole) == len(set(whole)) == 9
    resume = "--resume", "every=2"
    parts = [lines("parts", ranks, steps, *resume) for ranks, steps in ((2, 4), (3, 7), (1, 9))]
    # The second goes on from step 4, the third from the last one that was saved, which is 6.
    assert parts == [whole[:4], whole[4:7], whole[6:]]
