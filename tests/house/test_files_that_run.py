"""How many files one has to read to know why an array was dropped: those whose functions run."""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if find_spec("chainer") is None:
    pytest.skip("no Chainer", allow_module_level=True)

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L

ROOT = Path(umem.__file__).parent


class Dropped(Exception):
    pass


def files_until_dropped(*, planned: bool) -> set[str]:
    """The files of umem from the line of the block to the first array that is let go."""
    layers = [L.Linear(64, 64), *[F.tanh] * 20]
    model = chainer.Sequential(*layers)
    optimizer = chainer.optimizers.SGD().setup(model)
    x = np.ones((2048, 64), "f")

    def step() -> None:
        loss = F.mean(model(x) ** 2)
        model.cleargrads()
        loss.backward()
        optimizer.update()

    found: set[str] = set()
    memory: umem.chainer.Recompute | None = None

    def hook(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event != "call" or not path.is_relative_to(ROOT):
            return
        found.add(path.relative_to(ROOT).as_posix())
        if frame.f_code.co_name == "drop" and path.name == "tape.py":
            graphs = memory.graphs if planned and memory is not None else ()
            if not planned or any(seen.plan is not None for seen in graphs):
                raise Dropped

    step()
    make = umem.chainer.Recompute  # loads what is loaded on first use
    sys.setprofile(hook)
    try:
        with pytest.raises(Dropped):
            memory = make("60%")
            with memory:
                for _ in range(6):
                    step()
    finally:
        sys.setprofile(None)
    return {name for name in found if not name.startswith("compat/")}


def alone(*, planned: bool) -> set[str]:
    """The same in a process of its own: arrays of other tests are collected as this one runs."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        return executor.submit(files_until_dropped, planned=planned).result()


@pytest.mark.thorough
def test_few_files_run_until_an_array_is_dropped() -> None:
    assert len(alone(planned=False)) <= 22


@pytest.mark.thorough
def test_planning_is_much_of_what_runs_until_a_plan_drops_an_array() -> None:
    found = alone(planned=True)
    assert len(found) <= 44, found
    assert len([name for name in found if not name.startswith("planner/")]) <= 25, found
