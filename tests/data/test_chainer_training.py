"""Training on a cached dataset: the same bits, also where a run is killed and goes on."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from umem.compat import find_package

if find_package() is None:
    pytest.skip("Chainer is not installed", allow_module_level=True)

import umem.chainer
import umem.data
import umem.errors
from umem.cli import main

# isort: split
import chainer
import resume_cases
from chainer import training
from chainer.training import extensions

COUNT = 60


class Killed(Exception):
    pass


def trainer(out: Path, kind: str, updates: int = 20, *, cache: bool = True, dies: int = 0) -> Any:
    """A trainer whose iterator has a known order, with a cache or without; it may be killed."""
    np.random.seed(0)
    data, order = resume_cases.dataset(COUNT), umem.data.known_order(11)
    if cache:
        one = 80 + 250  # a row of 20 numbers, its class, and what says so
        data = umem.data.cached(data, 24 * one, "1MiB", order=order)
    processes = {"n_processes": 1} if kind == "processes" else {}
    batches = resume_cases.ITERATORS[kind](data, 7, order_sampler=order, **processes)
    optimizer = chainer.optimizers.Adam().setup(resume_cases.network())
    updater = training.StandardUpdater(batches, optimizer)
    made = training.Trainer(updater, (updates, "iteration"), out=str(out))
    made.extend(extensions.LogReport(trigger=(1, "iteration")))
    made.extend(umem.chainer.Snapshot(every=5))

    def die(trainer: Any) -> None:
        if trainer.updater.iteration == dies:
            raise Killed

    made.extend(die, trigger=(1, "iteration"))
    made.batches, made.data = batches, data
    return made


def run(made: Any) -> Any:
    try:
        made.run()
    finally:
        made.batches.finalize()
    return made


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["serial", "threads", "processes"])
def test_a_curve_has_the_same_bits_with_a_cache_after_a_kill_too(kind: str, tmp_path: Path) -> None:
    run(trainer(tmp_path / "plain", kind, cache=False))
    plain = resume_cases.losses(tmp_path / "plain")
    made = run(trainer(tmp_path / "cached", kind))
    assert resume_cases.losses(tmp_path / "cached") == plain and len(plain) == 20
    assert made.data.counters.hit_count > 20

    with pytest.raises(Killed):  # epochs are of 60: the kill and the snapshot are in the second
        run(trainer(tmp_path / "killed", kind, dies=14))
    made = run(trainer(tmp_path / "killed", kind))
    assert resume_cases.losses(tmp_path / "killed") == plain
    assert made.data.counters.hit_count > 10


def test_chainers_own_resume_is_followed_from_the_next_epoch_on() -> None:
    data, order = resume_cases.dataset(COUNT), umem.data.known_order(11)
    one = chainer.iterators.SerialIterator(data, 7, order_sampler=order)
    for _ in range(12):
        one.next()
    saved: dict[str, Any] = {}
    one.serialize(lambda key, value: saved.setdefault(key, np.array(value)))

    class Loading(chainer.Deserializer):
        def __call__(self, key: str, value: Any) -> Any:
            if isinstance(value, np.ndarray):
                value[:] = saved[key]
                return value
            return saved[key].item()

    again = umem.data.known_order(11)
    with umem.data.cached(data, "1MiB", order=again) as kept:
        other = chainer.iterators.SerialIterator(kept, 7, order_sampler=again)
        other.serialize(Loading())
        with pytest.warns(umem.errors.DataWarning, match="was requested, but") as caught:
            for _ in range(30):
                for (x, t), (y, u) in zip(one.next(), other.next(), strict=True):
                    assert x.tobytes() == y.tobytes() and t == u
        assert len(caught) == 1 and again.epoch == order.epoch


def test_a_memory_report_has_what_caches_did(tmp_path: Path) -> None:
    gc.collect()  # the caches of tests before
    made = trainer(tmp_path, "serial")
    made.extend(umem.chainer.MemoryReport(trigger=(20, "iteration")))
    made.extend(extensions.LogReport(trigger=(20, "iteration"), filename="once"), name="once")
    run(made)
    (entry,) = json.loads((tmp_path / "once").read_text())
    counters = made.data.counters
    assert entry["data/hit_rate"] > 0.2 and entry["data/waited_s"] > 0
    assert abs(entry["data/raw_MiB"] - counters.raw_bytes / 2**20) < 0.01
    assert entry["data/memory_MiB"] <= counters.peak_memory_bytes / 2**20


def report(path: Path) -> str:
    done = CliRunner().invoke(main, ["report", str(path)])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_report_and_the_status_say_what_caches_did_where_there_are_any(tmp_path: Path) -> None:
    gc.collect()
    for cache in (True, False):
        made = trainer(tmp_path / f"{cache}", "serial", 6, cache=cache)
        path = tmp_path / f"{cache}.umem.gz"
        made.extend(umem.chainer.MemoryReport(trigger=(3, "iteration"), record=path))
        run(made)
        written = report(path)
        said = umem.status().feature("data cache")
        assert ("Data that was cached" in written) is cache is (said is not None)
        if cache:  # the third batch of 7 is the last of the step, or the fourth, which measures it
            assert " of 28 items from memory" in written or " of 21 items from memory" in written
            assert said is not None and said.why == str(made.data.counters)
            made.data.close()
        del made, said
        gc.collect()


def test_counters_of_several_caches_add_up() -> None:
    one, other = umem.data.DataCounters(5, 3, hit_bytes=7), umem.data.DataCounters(2, 1)
    total = umem.data.DataCounters.total([one, other])
    assert total == umem.data.DataCounters(7, 4, hit_bytes=7)
