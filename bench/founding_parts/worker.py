"""Trains the network of examples/masked_lm under some techniques, a step a line on standard input.

`measuring.py` starts it, in a process of its own, with a JSON of `Settings` and writes lines:
each is answered by a line of JSON. Where ``traced`` is set, tracemalloc is on from before the
network is built, so that its peak has parameters, gradients and state; times mean nothing then.
"""

from __future__ import annotations

import json
import os
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import numpy as np

import umem.chainer

# isort: split
import chainer  # after the compatibility layer
from masked_lm.network import MaskedLanguageModel
from masked_lm.text import Lines, read


@dataclass(frozen=True)
class Settings:
    """The network, its batch, and what is switched on.

    Attributes:
        budget: of `umem.chainer.Recompute`; None: not used.
        micro_batch: lines in a part of the batch; None: the batch is whole.
    """

    layers: int
    hidden: int
    length: int
    vocabulary: int
    batch: int
    budget: str | None = None
    micro_batch: int | None = None
    small_states: bool = False
    half: bool = False
    traced: bool = False


class Training:
    """A network with its optimizer and data, under some techniques until ``stack`` is closed."""

    def __init__(self, settings: Settings, stack: ExitStack) -> None:
        np.random.seed(0)
        self.settings = settings
        self._lines = Lines(read(), settings.vocabulary, settings.length)
        self.model = MaskedLanguageModel(
            settings.vocabulary, settings.hidden, settings.layers, settings.length
        )
        self._optimizer = chainer.optimizers.Adam(1e-4).setup(self.model)
        self._batches = self._endless()
        if settings.half:
            umem.chainer.half_precision(self.model, self._optimizer)
        if settings.small_states:
            umem.chainer.optimizers.quantize_states(self._optimizer)
        if settings.micro_batch is not None:
            stack.enter_context(
                umem.chainer.accumulate(self._optimizer, micro_batch=settings.micro_batch)
            )
        if settings.budget is not None:
            stack.enter_context(umem.chainer.Recompute(settings.budget))

    def _endless(self) -> Iterator[Any]:
        iterator = chainer.iterators.SerialIterator(self._lines, self.settings.batch)
        while True:
            yield chainer.dataset.concat_examples(next(iterator))

    def step(self) -> dict[str, float]:
        batch = next(self._batches)
        start = time.process_time()
        self._optimizer.update(self.model, *batch)
        return {"seconds": time.process_time() - start}


def process_bytes(field: str) -> int:
    """A figure of the process's memory, as the system counts it."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {field}")


def main() -> None:
    """Run a step for each line of standard input, and print its figures."""
    settings = Settings(**json.loads(sys.argv[1]))
    before = process_bytes("VmRSS")
    if settings.traced:
        tracemalloc.start(1)
    with ExitStack() as stack:
        training = Training(settings, stack)
        for _ in sys.stdin:
            done: dict[str, float] = training.step()
            if settings.traced:
                done["tensor_bytes"] = tracemalloc.get_traced_memory()[1]
                tracemalloc.reset_peak()
            done["process_bytes"] = process_bytes("VmHWM") - before
            print(json.dumps(done), flush=True)


if __name__ == "__main__":
    main()
