"""Train a language model whose width and depth are given; 1920 and 24 make 1.1 billion parameters.

python examples/07_a_billion.py [--hidden 1920] [--layers 24] [--batch 16] [--recompute min]
"""

import argparse
from contextlib import nullcontext

import umem.chainer  # isort: skip  (before Chainer, which it makes ready for today's NumPy)
import chainer
import numpy as np
from masked_lm.network import MaskedLanguageModel

LENGTH, VOCABULARY = 128, 8192


def train(model, batch, steps):
    """Some steps on words that are all the same; returns the last loss."""
    optimizer = chainer.optimizers.Adam(1e-4).setup(model)
    words = np.zeros((batch, LENGTH), np.int32)
    for _ in range(steps):
        loss = model(words, words)
        model.cleargrads()
        loss.backward()
        optimizer.update()
    return float(loss.array)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--recompute", help="a budget for umem.chainer.Recompute")
    asked = parser.parse_args()
    model = MaskedLanguageModel(VOCABULARY, asked.hidden, asked.layers, LENGTH)
    print(f"{model.count_params():,} parameters")
    with umem.chainer.Recompute(asked.recompute) if asked.recompute else nullcontext():
        print(f"loss {train(model, asked.batch, asked.steps):.2f} after {asked.steps} steps")
