"""Mends for ChainerMN and for workers beside MPI; test_chainermn.py has more, on ranks."""

from __future__ import annotations

import multiprocessing
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from processes import python

from tests.compat.test_shims import chainer, load, numpy_2
from umem.compat.requirement import holds
from umem.compat.support import one_message


class Told:
    """A communicator of one rank, which has been told what it will receive."""

    rank, size = 0, 1

    def __init__(self, *received: Any) -> None:
        self._received = list(received)

    def bcast(self, _: Any, root: int) -> Any:
        return self._received.pop(0)

    def gather_obj(self, obj: Any) -> list[Any]:
        return [obj]

    def bcast_obj(self, obj: Any) -> Any:
        return obj


def test_iterator_size():
    name = "chainermn.iterators.multi_node_iterator"
    size, order = np.array([6], "f"), np.arange(6, dtype="f")
    if holds("numpy>=1.25"):  # which warns; 2.4 raises
        with pytest.raises((TypeError, DeprecationWarning)):
            load(name, without="iterator-size")._MultiNodeIteratorSlave(Told(size, order), 0)
    iterator = load(name)._MultiNodeIteratorSlave(Told(size, order), 0)
    assert iterator.dataset_size == 6 and iterator.epoch_detail == 0


def test_aggregator_native():
    name = "chainermn.extensions.observation_aggregator"
    observed = chainer.functions.sum(
        chainer.Variable(np.full(2, 1.5, "f"))
    )  # of a graph, as a loss

    def aggregated(without: str | None = None) -> Any:
        trainer = SimpleNamespace(
            observation={"loss": observed}, updater=SimpleNamespace(iteration=1)
        )
        load(name, without).ObservationAggregator(Told(), "loss", "mean")(trainer)
        return trainer.observation["mean"]

    if not chainer.chainerx.is_available():
        with pytest.raises(RuntimeError, match="ChainerX is not available"):
            aggregated(without="aggregator-native")
    assert aggregated().array == 3


class Alone:
    """A communicator whose one rank's mean is everybody's."""

    def _multi_node_mean(self, send: Any, received: Any) -> None:
        pass


def test_half_variance():
    x = (1 + 0.05 * np.random.RandomState(0).randn(40, 3)).astype(np.float16)
    true_mean, true_variance = x.astype("d").mean(0), x.astype("d").var(0)

    def worst(values: Any, gamma: Any, without: str | None = None) -> float:
        module = load("chainermn.functions.batch_normalization", without)
        mean, variance = module._MpiImpl(Alone()).get_mean_and_var(0, gamma, values, np, None)
        assert mean.dtype == variance.dtype == gamma.dtype
        np.testing.assert_allclose(mean, true_mean, rtol=4e-3)
        return float(np.abs(variance / true_variance - 1).max())

    half, single = np.ones(3, np.float16), np.ones(3, np.float32)
    assert worst(x, half, without="half-variance") > 0.2  # of a variance that is 0.0025
    assert worst(x, half) < 2**-10  # half a unit in the last place of a half, and a float32's few
    assert worst(x, single) < 1e-3  # half samples, as by mixed16
    wide, name = x.astype("f"), "half-variance"
    assert worst(wide, single) == worst(wide, single, without=name)


WORKER = """
import multiprocessing
import umem.compat
umem.compat.install()
from umem.compat import support
if {unmended}:
    support.mend_fork_server = lambda: None
import chainer
multiprocessing.set_start_method("forkserver")
process = multiprocessing.Process(target=chainer.get_dtype)
process.start()
process.join()
print("ended", process.exitcode)
"""


@pytest.mark.thorough
@numpy_2
@pytest.mark.skipif(
    "forkserver" not in multiprocessing.get_all_start_methods(), reason="a Unix has it"
)
@pytest.mark.parametrize("unmended", [True, False])
def test_fork_server(unmended):
    # A program given by -c is not imported by workers, as pytest is not, which runs ChainerMN's.
    done = python("-c", WORKER.format(unmended=unmended), timeout=120)
    assert done.stdout == f"ended {int(unmended)}\n", done.stderr
    assert ("AttributeError" in done.stderr or "ImportError" in done.stderr) == unmended


class Forked(Exception):
    pass


def _forked(*_: Any, **__: Any) -> None:
    raise Forked


@pytest.mark.parametrize(
    ("method", "is_in_mpi"), [("fork", True), ("fork", False), ("forkserver", True)]
)
def test_fork_after_mpi(monkeypatch, recwarn, method, is_in_mpi):
    mpi = SimpleNamespace(Is_initialized=lambda: is_in_mpi, Is_finalized=lambda: False)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    monkeypatch.setattr(multiprocessing, "Pool", _forked)
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda: method)

    def start(without: str | None = None) -> list[str]:
        module = load("chainer.iterators.multiprocess_iterator", without)
        recwarn.clear()
        with pytest.raises(Forked):
            module.MultiprocessIterator([1, 2], 1, n_processes=1, shared_mem=8).next()
        return [str(warning.message) for warning in recwarn]

    assert start(without="fork-after-mpi") == []
    warned = start()
    assert len(warned) == (method == "fork" and is_in_mpi)
    assert all("set_start_method('forkserver')" in text for text in warned)


def test_message_size_is_counted_in_elements():
    most = np.broadcast_to(np.float32(0), (2**31 - 1,))
    assert one_message(most) is most
    with pytest.raises(OverflowError, match="2,147,483,648 elements"):
        one_message(np.broadcast_to(np.float32(0), (2**31,)))
