"""Train a convolutional network on images; before a GPU is rented, umem says what it would do.

python examples/04_before_renting.py [--device @cupy:0] [--batch 32] [--channels 32] [--pixels 32]
umem choose --gpu t4 examples/04_before_renting.py --device @cupy:0 --batch 4096
umem batch --gpu t4 --argument=--batch examples/04_before_renting.py --device @cupy:0 --batch 256

The last two need no GPU: the program runs without its arithmetic, and what they say is simulated.
"""

import argparse

import umem.chainer  # noqa: F401  # isort: skip  (before Chainer, which it makes ready)
import chainer
import chainer.functions as F
import chainer.links as L

SIZES = {"device": "@numpy", "batch": 32, "channels": 32, "pixels": 32, "steps": 4}


def network(channels, depth=6):
    """Convolutions with batch normalisation, and a classifier."""
    parts = []
    for number in range(depth):
        into = channels if number else 3
        parts += [L.Convolution2D(into, channels, 3, pad=1), L.BatchNormalization(channels), F.relu]
    return chainer.Sequential(*parts, lambda h: F.mean(h, axis=(2, 3)), L.Linear(channels, 10))


def train(asked):
    """The losses of some steps on images that are all the same."""
    device = chainer.get_device(asked.device)
    model = network(asked.channels).to_device(device)
    optimizer = chainer.optimizers.Adam().setup(model)
    x = device.xp.ones((asked.batch, 3, asked.pixels, asked.pixels), "f")
    t = device.xp.zeros(asked.batch, "i")
    for step in range(asked.steps):
        loss = F.softmax_cross_entropy(model(x), t)
        model.cleargrads()
        loss.backward()
        optimizer.update()
        print(f"step {step}: loss {float(loss.array):.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    train(parser.parse_args())
