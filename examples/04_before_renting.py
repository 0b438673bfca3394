"""Will a convolutional network train on a GPU that you do not have, at which batch, how fast?

python examples/04_before_renting.py [--gpu t4] [--batches 32,128,512]

Two steps at small batches run here; the rest is computed, and what is said of a GPU is simulated.
"""

import argparse

import umem.chainer  # isort: skip  (before Chainer, which it makes ready for today's NumPy)
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np


def network(channels=32, depth=6):
    """Convolutions with batch normalisation, and a classifier."""
    parts = []
    for _ in range(depth):
        parts += [L.Convolution2D(None, channels, 3, pad=1), L.BatchNormalization(channels), F.relu]
    return chainer.Sequential(*parts, lambda h: F.mean(h, axis=(2, 3)), L.Linear(None, 10))


def record(pixels=32):
    """The training step at batches of 2 and 4."""
    model = network()
    optimizer = chainer.optimizers.Adam().setup(model)

    def step(batch):
        x, t = np.ones((batch, 3, pixels, pixels), np.float32), np.zeros(batch, np.int32)
        optimizer.update(lambda: F.softmax_cross_entropy(model(x), t))

    return umem.record_at(step, sizes=(2, 4))


def tell(trace, gpu, batch):
    """One line for a batch, and how to make it fit where it does not."""
    found = umem.replay(trace, gpu, "unmanaged", size=batch)
    line = f"batch {batch}: {found.needed_bytes / 2**20:,.0f} MiB"
    if found.fits:
        return f"{line}, {found.seconds_low * 1e3:.0f} to {found.seconds_high * 1e3:.0f} ms a step"
    options = umem.choose(trace, gpu, size=batch).options
    if not options:
        return f"{line}, does not fit"
    best = options[0]
    return f"{line}, fits with {best.name}, at {best.seconds:.1f} s a step:\n  {best.line}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", default="t4")
    parser.add_argument("--batches", default="32,1024,4096")
    options = parser.parse_args()
    trace = record()
    print(f"simulated {options.gpu}, from steps of 2 and 4 images on this machine")
    for batch in map(int, options.batches.split(",")):
        print(tell(trace, options.gpu, batch))
