"""Train on several ranks, each with its part of the data: plain ChainerMN, run by umem.

umem run -n 2 examples/08_ranks.py        python examples/08_ranks.py is one rank
"""

import umem.chainer  # noqa: F401  isort: skip  (before Chainer, which it makes ready)
import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
from chainer import training
from chainer.training import extensions


def digits(count=600, seed=0):
    """Noisy pictures of ten kinds."""
    random = np.random.RandomState(seed)
    kinds = np.random.RandomState(1).rand(10, 64).astype(np.float32)
    labels = random.randint(0, 10, count).astype(np.int32)
    noise = random.standard_normal((count, 64)).astype(np.float32)
    return chainer.datasets.TupleDataset(kinds[labels] + 0.3 * noise, labels)


if __name__ == "__main__":
    comm = chainermn.create_communicator("naive")
    is_first = comm.rank == 0
    np.random.seed(comm.rank)
    train = chainermn.scatter_dataset(digits() if is_first else None, comm, shuffle=True, seed=0)
    test = chainermn.scatter_dataset(digits(200, seed=2) if is_first else None, comm)

    model = L.Classifier(chainer.Sequential(L.Linear(64, 100), F.relu, L.Linear(100, 10)))
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(), comm)
    optimizer.setup(model)  # the first update gives all ranks the parameters of rank 0

    batches = chainer.iterators.SerialIterator(train, 60 // comm.size)
    updater = training.StandardUpdater(batches, optimizer)
    trainer = training.Trainer(updater, (10, "epoch"), out="result")
    once = chainer.iterators.SerialIterator(test, 50, repeat=False, shuffle=False)
    trainer.extend(chainermn.create_multi_node_evaluator(extensions.Evaluator(once, model), comm))
    if is_first:
        trainer.extend(extensions.LogReport(filename=None))
        columns = ["epoch", "main/loss", "validation/main/accuracy"]
        trainer.extend(extensions.PrintReport(columns))
    trainer.run()

    weights = comm.gather_obj([param.array.tobytes() for param in model.params()])
    if is_first:
        print("all ranks have the same weights:", all(each == weights[0] for each in weights))
