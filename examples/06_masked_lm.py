"""Train a masked language model, with any of the techniques that make it need less.

python examples/06_masked_lm.py [--micro-batch 16] [--recompute min] [--adam8bit] [--half]
umem run --budget 60MiB examples/06_masked_lm.py --device @cupy:0     chooses by itself
"""

import argparse
from contextlib import nullcontext
from functools import partial

import umem.chainer  # isort: skip  (before Chainer, which it makes ready for today's NumPy)
import chainer
import numpy as np
from chainer.training import extensions
from masked_lm.network import MaskedLanguageModel
from masked_lm.text import Lines, read

SIZES = {"hidden": 128, "layers": 2, "length": 64, "vocabulary": 2048, "batch": 64, "steps": 30}


def options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"device": "@numpy", **SIZES}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--text", help="a file, or a folder of .txt and .md; default: umem's docs")
    parser.add_argument("--micro-batch", type=int, help="lines computed at once")
    parser.add_argument("--recompute", help='"400MiB", "60%%" of a plain step, or "min"')
    parser.add_argument("--adam8bit", action="store_true", help="Adam's state in 8 bits")
    parser.add_argument("--half", action="store_true", help="parameters of 16 bits")
    parser.add_argument("--snapshot", help="save there every 10 steps, and go on from there")
    parser.add_argument("--out", default="out/masked_lm", help="folder for the log")
    return parser.parse_args()


def train(asked):
    np.random.seed(0)
    model = MaskedLanguageModel(asked.vocabulary, asked.hidden, asked.layers, asked.length)
    optimizer = chainer.optimizers.Adam(1e-3).setup(model.to_device(asked.device))
    lines = Lines(read(asked.text), asked.vocabulary, asked.length)
    iterator = chainer.iterators.SerialIterator(lines, asked.batch)
    if asked.half:
        umem.chainer.half_precision(model, optimizer)
    if asked.adam8bit:
        umem.chainer.optimizers.quantize_states(optimizer)
    kind = chainer.training.StandardUpdater
    if asked.micro_batch:
        kind = partial(umem.chainer.AccumulatingUpdater, micro_batch=asked.micro_batch)
    updater = kind(iterator, optimizer, device=asked.device)
    with umem.chainer.Recompute(asked.recompute) if asked.recompute else nullcontext():
        trainer = chainer.training.Trainer(updater, (asked.steps, "iteration"), asked.out)
        trainer.extend(extensions.LogReport(trigger=(10, "iteration")))
        trainer.extend(extensions.PrintReport(["iteration", "main/loss", "elapsed_time"]))
        if asked.snapshot:
            trainer.extend(umem.chainer.Snapshot(every=10, folder=asked.snapshot))
        trainer.run()


if __name__ == "__main__":
    train(options())
