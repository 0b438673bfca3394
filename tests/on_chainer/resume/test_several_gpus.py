"""Snapshots where several GPUs are visible: a stand-in for CuPy notes those that are touched."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from umem.chainer.resume import collecting, random_states
from umem.chainer.resume.collecting import Collector, Distributor
from umem.chainer.resume.random_states import serialize_global


class OnGpu:
    """An array of a GPU."""

    def __init__(self, ordinal: int) -> None:
        self.device, self.dtype, self.shape = SimpleNamespace(id=ordinal), np.dtype("f4"), (1,)

    def set(self, values: Any) -> None:
        pass


class Generator:
    """A generator that was seeded with ``seed``, and draws numbers that tell which it is."""

    def __init__(self, ordinal: int) -> None:
        self.seeded: int | None = None
        self.ordinal = ordinal

    def tomaxint(self) -> int:
        return 100 + self.ordinal

    def seed(self, seed: int) -> None:
        self.seeded = seed


class TwoGpus:
    """What of CuPy is asked, with the GPUs that were made current, each with a context then."""

    def __init__(self) -> None:
        self.touched: set[int] = set()
        self.generators: dict[int, Generator] = {}
        self.cuda = SimpleNamespace(
            Device=self.device, runtime=SimpleNamespace(getDeviceCount=lambda: 2)
        )
        self.random = SimpleNamespace(
            get_random_state=lambda: self.generators.setdefault(self.now, Generator(self.now)),
            _generator=SimpleNamespace(_random_states=self.generators),
        )

    @contextlib.contextmanager
    def device(self, ordinal: int) -> Iterator[None]:
        self.touched.add(ordinal)
        self.now = ordinal
        yield


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> TwoGpus:
    found = TwoGpus()
    cuda = SimpleNamespace(cupy=found, available=True, ndarray=OnGpu)
    monkeypatch.setattr(random_states, "cuda", cuda)
    monkeypatch.setattr(collecting, "cuda", cuda)
    monkeypatch.setattr(collecting, "upload", OnGpu.set)
    return found


def saved(*arrays: OnGpu) -> dict[str, Any]:
    collector = Collector()
    for number, array in enumerate(arrays):
        collector(f"array{number}", array)
    serialize_global(collector["random"])
    return collector.values


def resumed(values: dict[str, Any], *arrays: OnGpu) -> None:
    stored = {f"array{number}": array for number, array in enumerate(arrays)}
    distributor = Distributor(stored, values, ())
    for name, array in stored.items():
        distributor(name, array)
    serialize_global(distributor["random"])


def test_a_snapshot_touches_the_gpus_of_the_run_alone(gpus: TwoGpus) -> None:
    values = saved(OnGpu(1))
    assert gpus.touched == {1} and "random/cupy/0" not in values
    resumed(values, OnGpu(1))
    assert gpus.touched == {1} and gpus.generators[1].seeded == 101


def test_a_snapshot_of_a_run_on_numpy_touches_no_gpu(gpus: TwoGpus) -> None:
    resumed(saved())
    assert gpus.touched == set()


def test_a_gpu_whose_generator_was_drawn_from_is_in_use(gpus: TwoGpus) -> None:
    gpus.generators[0] = Generator(0)
    saved(OnGpu(1))
    assert gpus.touched == {0, 1}


def test_a_run_of_two_gpus_goes_on_with_two_generators(gpus: TwoGpus) -> None:
    values = saved(OnGpu(0), OnGpu(1))
    gpus.generators.clear()
    resumed(values, OnGpu(0), OnGpu(1))
    assert [gpus.generators[n].seeded for n in (0, 1)] == [100, 101]


def test_a_run_of_one_gpu_goes_on_on_another(gpus: TwoGpus) -> None:
    values = saved(OnGpu(0))
    gpus.touched.clear()
    gpus.generators.clear()
    resumed(values, OnGpu(1))
    assert gpus.touched == {1} and gpus.generators[1].seeded == 100
