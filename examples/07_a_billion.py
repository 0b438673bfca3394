"""Train a language model whose width and depth are given; 1920 and 24 make 1.1 billion parameters.

python examples/07_a_billion.py [--device @cupy:0] [--hidden 1920] [--layers 24] [--batch 16]
umem choose --gpu v100-16gb examples/07_a_billion.py --device @cupy:0 --hidden 1920 --layers 24

The last one needs no GPU: the program runs without its arithmetic, and what it says is simulated.
"""

import argparse

import umem.chainer  # noqa: F401  # isort: skip  (before Chainer, which it makes ready)
import chainer
from masked_lm.network import MaskedLanguageModel

LENGTH, VOCABULARY = 128, 8192
SIZES = {"device": "@numpy", "hidden": 64, "layers": 2, "batch": 2, "steps": 4}


def train(asked):
    """Some steps on words that are all the same; returns the last loss."""
    device = chainer.get_device(asked.device)
    model = MaskedLanguageModel(VOCABULARY, asked.hidden, asked.layers, LENGTH).to_device(device)
    print(f"{model.count_params():,} parameters")
    optimizer = chainer.optimizers.Adam(1e-4).setup(model)
    words = device.xp.zeros((asked.batch, LENGTH), "i")
    for _ in range(asked.steps):
        optimizer.update(model, words, words)
    return float(model(words, words).array)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    asked = parser.parse_args()
    print(f"loss {train(asked):.2f} after {asked.steps} steps")
