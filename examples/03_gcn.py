"""Train a GCN on Zachary's karate club, where two of 34 labels are known, or on your own graph.

python examples/03_gcn.py [--device virtual:v100-16gb | cuda | cpu] [--data FILE.npz]

FILE.npz has indptr (N + 1), indices (the adjacency as CSR), features (N, F; floats), labels (N;
integers from 0), train_mask, val_mask, test_mask (N; booleans). See docs/reference/graphs.md.
"""

import argparse
from contextlib import ExitStack

import umem.chainer  # isort: skip  (before Chainer, which it makes ready for today's NumPy)
import chainer
import chainer.functions as F
import numpy as np

from umem.chainer import GCN, Adjacency
from umem.graphs import karate_club, load_npz, normalised_adjacency


def open_device(stack, name):
    """The Chainer device of that name, its memory managed until `stack` is closed."""
    if name == "cpu":
        return chainer.get_device("@numpy")
    if name.startswith("virtual:"):
        print(f"The GPU is simulated ({name}); the training is real, and runs on the CPU.")
        stack.enter_context(umem.virtual_gpu(name.removeprefix("virtual:")))
    elif name != "cuda":
        raise SystemExit(f"--device must be virtual:NAME, cuda or cpu; got {name}")
    stack.enter_context(umem.managed())
    return umem.chainer.device()


def train(graph, device, steps=100, seed=0):
    """The share of test nodes whose label is found after training on the training nodes'."""
    np.random.seed(seed)
    adjacency = Adjacency(normalised_adjacency(graph)).to_device(device)
    features, labels = device.send((graph.features, graph.labels_where(graph.train_mask)))
    model = GCN(graph.features.shape[1], hidden=16, classes=graph.class_count, layers=2)
    optimizer = chainer.optimizers.Adam(0.01).setup(model.to_device(device))
    for _ in range(steps):
        optimizer.update(lambda: F.softmax_cross_entropy(model(adjacency, features), labels))
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        scores = chainer.get_device("@numpy").send(model(adjacency, features).array)
    return float((scores.argmax(axis=1) == graph.labels)[graph.test_mask].mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="default: cuda if there is one, else a virtual V100")
    parser.add_argument("--data", help="a graph as .npz (default: the karate club)")
    options = parser.parse_args()
    device = options.device or ("cuda" if chainer.backends.cuda.available else "virtual:v100-16gb")
    graph = load_npz(options.data) if options.data else karate_club()
    if not graph.test_mask.any():
        parser.error(f"{options.data}: test_mask: no node is for testing")
    with ExitStack() as stack:
        share = train(graph, open_device(stack, device))
    print(f"{share:.1%} of the test nodes' labels found")
