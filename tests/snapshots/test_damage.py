"""A snapshot whose values were damaged and signed again loads, or is refused with all as it was."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from umem.compat import find_package

if find_package() is None:
    pytest.skip("no Chainer", allow_module_level=True)

import umem.chainer  # isort: skip  (before Chainer, which it mends)
import chainer
import resume_cases
from snapshot_damage import damages, fingerprint, read, write

import umem.data
from umem.errors import SnapshotError

Parts = dict[str, Any]
Case = Callable[[Path, ExitStack], Parts]


def with_trainer(out: Path, stack: ExitStack) -> Parts:
    """Everything in a trainer, with a learning rate that moves."""
    trainer = resume_cases.trainer(out, 40, every=100)
    out.mkdir(exist_ok=True)
    for entry in trainer._extensions.values():
        if not isinstance(entry.extension, umem.chainer.Snapshot):
            entry.extension.initialize(trainer)
    trainer._start_at = 0.0  # as if it ran: Chainer saves no trainer that does not
    return {"trainer": trainer, "note": "kept", "scale": 1.5}


class Recurrent(chainer.Chain):  # type: ignore[misc]
    """An LSTM that goes on from its last state."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.lstm = chainer.links.LSTM(20, 6)
            self.out = chainer.links.Linear(6, 5)

    def forward(self, x: Any) -> Any:
        return self.out(self.lstm(x))


def with_everything(out: Path, stack: ExitStack) -> Parts:
    """Generators of every kind, an order known ahead, a recurrent link, a loss scale."""
    np.random.seed(0)
    random.seed(0)
    model = Recurrent()
    optimizer = chainer.optimizers.MomentumSGD().setup(model)
    optimizer.loss_scaling()
    return {
        "model": model,
        "optimizer": optimizer,
        "data": chainer.iterators.SerialIterator(
            resume_cases.dataset(), 10, order_sampler=umem.data.known_order(3)
        ),
        "more": chainer.iterators.MultithreadIterator(resume_cases.dataset(), 10, n_threads=1),
        "old": np.random.RandomState(1),
        "new": np.random.default_rng(2),
        "philox": np.random.Generator(np.random.Philox(3)),
        "python": random.Random(4),
    }


def with_small_states(out: Path, stack: ExitStack) -> Parts:
    """States of 8 bits."""
    np.random.seed(0)
    model = chainer.links.Classifier(chainer.links.Linear(20, 300))
    optimizer = umem.chainer.optimizers.Adam8bit().setup(model)
    return {"model": model, "optimizer": optimizer}


def with_halves(out: Path, stack: ExitStack) -> Parts:
    """Half precision, with masters and a loss scale."""
    np.random.seed(0)
    model = chainer.links.Classifier(chainer.links.Linear(20, 5))
    optimizer = chainer.optimizers.Adam().setup(model)
    stack.enter_context(umem.chainer.half_precision(model, optimizer))
    return {"model": model, "optimizer": optimizer}


CASES: dict[str, Case] = {
    "halves": with_halves,
    "trainer": with_trainer,
    "everything": with_everything,
    "bits": with_small_states,
}


def go_on(parts: Parts, updates: int) -> None:
    """Train a little further, with all that was put back."""
    if "trainer" in parts:
        trainer = parts["trainer"]
        for _ in range(updates):
            trainer.updater.update()
            for _, entry in trainer._extensions.items():
                is_snapshot = isinstance(entry.extension, umem.chainer.Snapshot)
                if entry.trigger(trainer) and not is_snapshot:
                    entry.extension(trainer)
        return
    model, optimizer = parts["model"], parts["optimizer"]
    for _ in range(updates):
        batch = parts["data"].next() if "data" in parts else resume_cases.dataset()[:10]
        x, t = chainer.dataset.concat_examples(batch)
        if isinstance(model, Recurrent):
            loss = chainer.functions.softmax_cross_entropy(model(x), t)
        else:
            loss = model(x, t)
        model.cleargrads()
        loss.backward()
        loss.unchain_backward()
        optimizer.update()
        for name in ("old", "new", "philox"):
            if name in parts:
                parts[name].normal()
                parts[name].random(700)
        if "python" in parts:
            parts["python"].gauss(0, 1)
            parts["more"].next()
    np.random.normal()
    np.random.rand(700)
    random.gauss(0, 1)


def outcome(case: Case, tmp_path: Path) -> str:
    """Resume from a damaged snapshot; see that the run is what it was where that is refused.

    Values that no run has are loaded if nothing in loading trips over them: whoever can sign a
    snapshot can write into it what they like. The next update may then raise whatever it does, but
    not read or write beyond any memory.
    """
    with ExitStack() as stack:
        fresh = case(tmp_path / "out", stack)
        before = fingerprint(fresh)
        try:
            umem.chainer.resume_run(tmp_path / "run", **fresh)
        except SnapshotError as error:
            assert len(str(error)) < 1500
            assert fingerprint(fresh) == before
            return "refused"
        with suppress(Exception):
            go_on(fresh, 3)
        return "loaded"


@pytest.mark.filterwarnings("ignore")  # of NumPy and Chainer, on NaN and values that are missing
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", [12, pytest.param(None, marks=pytest.mark.slow)])
def test_a_damaged_snapshot_loads_or_is_refused_with_everything_as_it_was(
    case: str, count: int | None, tmp_path: Path
) -> None:
    np.random.seed(0)
    with ExitStack() as stack:
        parts = CASES[case](tmp_path / "out", stack)
        go_on(parts, 7)
        umem.chainer.save_run(tmp_path / "run", step=7, wait=True, **parts)
    folder = tmp_path / "run" / "step-7"
    assert outcome(CASES[case], tmp_path) == "loaded"
    every = list(damages(*read(folder)))
    found: Counter[str] = Counter()
    for what, values, arrays in every if count is None else random.Random(1).sample(every, count):
        write(folder, values, arrays)
        try:
            found[outcome(CASES[case], tmp_path)] += 1
        except Exception as error:
            raise AssertionError(what) from error
    assert found["refused"] and found["loaded"]
