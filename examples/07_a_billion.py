"""Say what training 1.1 billion parameters takes on a GPU of 16 GB; they are never allocated.

python examples/07_a_billion.py [--hidden 1920] [--layers 24] [--batch 16]

A small network of the same depth takes a few steps at several widths and batches; what its arrays
and operations would be at the width asked for is computed from that, and a model of the GPU says
what fits, with which technique, and how long a step takes: all of it simulated.
"""

import argparse
from functools import cache

import umem.chainer  # isort: skip  (before Chainer, which it makes ready for today's NumPy)
import chainer
import numpy as np
from masked_lm.network import MaskedLanguageModel

LENGTH, VOCABULARY = 128, 8192


@cache
def made(hidden):
    """A network of a width, and its optimizer."""
    model = MaskedLanguageModel(VOCABULARY, hidden, asked.layers, LENGTH)
    return model, chainer.optimizers.Adam(1e-4).setup(model)


def step(batch, hidden):
    model, optimizer = made(hidden)
    words = np.zeros((batch, LENGTH), np.int32)
    optimizer.update(model, words, words)


def parameters(hidden):
    """How many parameters a width has: it is a polynomial of degree two."""
    found = {width: made(width)[0].count_params() for width in (64, 128, 192)}
    return round(np.polyval(np.polyfit(list(found), list(found.values()), 2), hidden))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", default="v100-16gb")
    parser.add_argument("--hidden", type=int, default=1920)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batch", type=int, default=16)
    asked = parser.parse_args()
    trace = umem.record_at(step, {"batch": (2, 4), "hidden": (128, 192)})
    choice = umem.choose(trace, asked.gpu, {"batch": asked.batch, "hidden": asked.hidden})
    print(f"{parameters(asked.hidden) / 1e9:.2f} billion parameters on a simulated {choice.title}:")
    for option in choice.options:
        print(f"  {option.seconds:7.2f} s  {option.peak_bytes / 2**30:5.1f} GiB  {option.name}")
    for option in choice.dropped:
        print(f"  does not fit: {option.name} ({option.reason})")
