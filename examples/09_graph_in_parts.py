"""Train a GCN on a graph in parts, on one process or on several ranks, to the same bits.

python examples/09_graph_in_parts.py CUT [--steps 200]
umem run -n 2 examples/09_graph_in_parts.py CUT

`umem graph cut GRAPH.npz --parts 12 CUT` makes the CUT; where it is missing, a small graph of
communities is cut.
"""

import argparse
import hashlib
from pathlib import Path

import umem.chainer  # isort: skip  (before Chainer, which it makes ready for today's NumPy)
import chainer
import numpy as np
from mpi4py import MPI

from umem.graphs import communities, cut


def train(graph, comm, steps, patience=20, seed=0):
    """The losses, the best share of validation nodes that is right, and the weights' hash."""
    np.random.seed(seed)
    features = graph.load_features()  # graph.features leaves them in their files
    model = umem.chainer.ParallelGCN(
        comm, graph.feature_count, hidden=16, classes=graph.class_count, layers=2, dropout=0.5
    )
    optimizer = chainer.optimizers.Adam(0.02).setup(model)
    training, validation = map(graph.labels_where, (graph.train_mask, graph.val_mask))
    losses, best, waited = [], 0.0, 0
    while len(losses) < steps and waited < patience:
        optimizer.update(lambda: graph.cross_entropy(model(graph, features), training))
        with chainer.using_config("train", False), chainer.no_backprop_mode():
            scores = model(graph, features)
            losses.append(float(graph.cross_entropy(scores, training).array))
            share = graph.accuracy(scores, validation)  # every rank gets the same
        best, waited = (share, 0) if share > best else (best, waited + 1)
    weights = b"".join(p.array.tobytes() for p in model.params())
    return losses, best, hashlib.sha256(weights).hexdigest()[:16]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cut", type=Path, help="a folder that `umem graph cut` wrote")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    if comm.rank == 0 and not options.cut.exists():
        cut(communities(600, 6, 6000, across=0.1, features=24, classes=6), 12, options.cut)
    comm.Barrier()
    graph = umem.chainer.ParallelGraph(options.cut, comm)
    losses, best, weights = train(graph, comm, options.steps)
    if comm.rank == 0:
        print(f"{comm.size} ranks; {len(losses)} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}")
        print(f"{best:.1%} of the validation nodes' labels found; weights {weights}")
