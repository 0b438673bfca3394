"""Will a convolutional network train on a GPU that you do not have, at which batch, how fast?

python examples/04_before_renting.py [--gpu t4] [--vram 64MiB] [--batches 8,32]

The steps run here, on NumPy; the recordings are replayed, and what is said of a GPU is simulated.
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


def record(batch, pixels=32):
    """The second training step: the first one makes parameters and states."""
    model = network()
    optimizer = chainer.optimizers.Adam().setup(model)
    x, t = np.ones((batch, 3, pixels, pixels), np.float32), np.zeros(batch, np.int32)
    optimizer.update(lambda: F.softmax_cross_entropy(model(x), t))
    with umem.record() as recorder:
        optimizer.update(lambda: F.softmax_cross_entropy(model(x), t))
    return recorder.trace


def tell(trace, gpu, vram):
    """One line for a trace: what it needs, and its time in the first mode in which it fits."""
    for mode in ("unmanaged", "managed"):
        found = umem.replay(trace, gpu, mode, vram)
        line = f"{found.needed_bytes / 2**20:,.0f} MiB"
        if found.fits:
            ms = [1e3 * seconds for seconds in (found.seconds_low, found.seconds_high)]
            return f"{line}, fits {mode}, {ms[0]:.0f} to {ms[1]:.0f} ms"
    return f"{line}, does not fit"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", default="t4")
    parser.add_argument("--vram")
    parser.add_argument("--batches", default="8,32")
    options = parser.parse_args()
    print(f"simulated {options.gpu}, from steps on this machine")
    for batch in map(int, options.batches.split(",")):
        print(f"batch {batch}: {tell(record(batch), options.gpu, options.vram)}")
