"""Train within a budget of memory: the same numbers, to the bit, from less memory.

python examples/05_budget.py [--budget min]     "12GiB", "60%" of a plain step, or "min"
"""

import argparse

import umem.chainer  # isort: skip  (before Chainer, which it makes ready for today's NumPy)
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np


class Block(chainer.Chain):
    """A residual block."""

    def __init__(self, channels):
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(channels, channels, 3, pad=1)
            self.norm = L.BatchNormalization(channels)

    def forward(self, x):
        return x + F.relu(self.norm(self.conv(x)))


def train(budget=None, steps=6, depth=8, channels=8):
    """Losses of some steps, and what the budget came to."""
    np.random.seed(0)
    model = chainer.Sequential(*[Block(channels) for _ in range(depth)])
    optimizer = chainer.optimizers.MomentumSGD(1e-3).setup(model)
    x = np.random.standard_normal((8, channels, 32, 32)).astype(np.float32)
    memory = umem.chainer.Recompute(budget or "100%")
    losses = []
    with memory:
        for _ in range(steps):
            loss = F.mean(model(x) ** 2)
            model.cleargrads()
            loss.backward()
            optimizer.update()
            losses.append(float(loss.array))
            del loss
    return losses, memory


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="min")
    whole, _ = train()
    within, memory = train(parser.parse_args().budget)
    print(memory.report())
    print("losses are the same to the bit:", whole == within)
