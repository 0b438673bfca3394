"""Programs for dry runs, and how to run one."""

from __future__ import annotations

import json
import subprocess
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

from processes import python

TRAINER = """
import argparse
import chainer
import numpy as np
from chainer import functions as F, links as L, training
from chainer.training import extensions

parser = argparse.ArgumentParser()
parser.add_argument("--gpu", type=int, default=-1)
parser.add_argument("--iterations", type=int, default=0)
args = parser.parse_args()

model = L.Classifier(chainer.Sequential(L.Linear(784, 1024), F.relu, L.Linear(1024, 10)))
if args.gpu >= 0:
    model.to_device(f"@cupy:{args.gpu}")
optimizer = chainer.optimizers.Adam().setup(model)
random = np.random.RandomState(0)
data = [
    chainer.datasets.TupleDataset(
        random.rand(n, 784).astype("f"), random.randint(0, 10, n).astype("i")
    )
    for n in (2000, 1000)
]
train = chainer.iterators.SerialIterator(data[0], 128)
test = chainer.iterators.SerialIterator(data[1], 128, repeat=False, shuffle=False)
updater = training.StandardUpdater(train, optimizer, device=args.gpu)
stop = (args.iterations, "iteration") if args.iterations else (3, "epoch")
trainer = training.Trainer(updater, stop, out="result")
trainer.extend(extensions.Evaluator(test, model, device=args.gpu))
trainer.extend(extensions.snapshot(), trigger=(1, "epoch"))
trainer.extend(extensions.LogReport())
trainer.extend(extensions.PrintReport(["epoch", "main/loss", "validation/main/loss"]))
trainer.run()
if args.iterations:
    from umem.devices import cuda_model
    figures = cuda_model().figures
    print("figures", figures.reserved_peak_bytes, figures.moved_bytes, round(1e9 * figures.seconds))
"""
KMEANS = """
import cupy

x = cupy.random.rand(100_000, 16, dtype="f")
centres = x[:8].copy()
for _ in range(3):
    nearest = ((x[:, None] - centres) ** 2).sum(2).argmin(1)
    for k in range(8):
        mask = nearest == k
        n = int(mask.sum())
        centres[k] = cupy.where(mask[:, None], x, 0).sum(0) / n
"""
CONVERGENCE = """
import cupy

x = cupy.ones((1000, 1000), "f")
y = x @ x
while float((y - x).sum()) < 1:
    y = y + 1
print("done")
"""


class Done(NamedTuple):
    """A program's run: exit status, output and errors, and what ``--json`` wrote."""

    status: int
    output: str
    errors: str
    json: dict[str, Any]


def run_dry(
    program: str, folder: Path, *options: str, arguments: tuple[str, ...] = (), gpu: str = "t4"
) -> Done:
    """Run a program dry, as ``script.py`` of a folder."""
    (folder / "script.py").write_text(textwrap.dedent(program))
    result = folder / "dry.json"
    words = ("--dry", gpu, "--json", str(result), *options, "script.py", *arguments)
    done = umem_run(*words, cwd=folder)
    found = json.loads(result.read_text()) if result.exists() else {}
    return Done(done.returncode, done.stdout, done.stderr, found)


def umem_run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run ``umem run`` in a folder."""
    return python("-m", "umem", "run", *words, cwd=cwd, timeout=300, NO_COLOR="1")


EIGHT_LAYERS = """
import sys
import chainer
import chainer.functions as F
import chainer.links as L

class Net(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            for number in range(8):
                setattr(self, f"l{number}", L.Linear(WIDTH, WIDTH))

    def forward(self, x):
        for number in range(8):
            x = F.relu(getattr(self, f"l{number}")(x))
        return F.mean(x * x)
"""
"""A class `Net` of a script, whose ``WIDTH`` is to be replaced."""
