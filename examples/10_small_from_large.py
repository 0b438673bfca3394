"""Make a small model of a large one: teach it, cut its rank, keep it in 8 bits.

python examples/10_small_from_large.py     on scikit-learn's digits, 300 of them with labels
"""

import umem.chainer  # isort: skip  (before Chainer, which it makes ready for today's NumPy)
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer.datasets import TupleDataset
from chainer.iterators import SerialIterator
from sklearn.datasets import load_digits

from umem.chainer.layers import LowRank


def network(width):
    layers = L.Linear(64, width), F.relu, L.Linear(width, width), F.relu, L.Linear(width, 10)
    return chainer.Sequential(*layers)


def train(model, labelled, unlabelled, teacher=None):
    updater = umem.chainer.DistillingUpdater(
        SerialIterator(TupleDataset(*labelled), 64),
        chainer.optimizers.Adam().setup(model),
        teacher or network(1),
        weight=0 if teacher is None else 1,  # 0: plain training
        temperature=1,
        unlabelled=SerialIterator(unlabelled, 64),
    )
    for _ in range(300):
        updater.update()


def say(name, model, asked, nbytes=None):
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        right = (model(asked[0]).array.argmax(axis=1) == asked[1]).mean()
    nbytes = nbytes or sum(p.array.nbytes for p in model.params())
    print(f"{name:20} {nbytes / 1024:6.1f} KiB  reads {right:.1%}")


if __name__ == "__main__":
    np.random.seed(0)
    x, t = load_digits(return_X_y=True)
    x, t = (x / 16).astype(np.float32), t.astype(np.int32)
    seen, asked = ((x[:300], t[:300]), x[300:1400]), (x[1400:], t[1400:])
    large, small = network(256), network(112)
    train(large, *seen)
    say("large", large, asked)
    train(small, *seen, large)
    say("small, taught", small, asked)
    umem.chainer.slimmer(small, {L.Linear: LowRank(energy=0.9)}, x[:64], quiet=True)
    train(small, *seen, large)
    say("of lower rank, too", small, asked)
    small = umem.chainer.quantize(small, seen[1])
    say("in 8 bits", small, asked, small.quantization_report.quantized_bytes)
