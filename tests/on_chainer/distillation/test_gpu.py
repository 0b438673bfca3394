"""Distillation on a GPU, as on NumPy; run on the software GPU only, never on a real one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L
from chainer.datasets import TupleDataset
from chainer.iterators import SerialIterator

pytestmark = pytest.mark.gpu
MANAGED = 3
"""CUDA's cudaMemoryTypeManaged."""


def net(width: int, seed: int) -> Any:
    np.random.seed(seed)
    return chainer.Sequential(
        L.Linear(6, width), L.BatchNormalization(width), F.relu, L.Linear(width, 4)
    )


def trained(device: str, **options: Any) -> tuple[Any, Any, Any]:
    """A student's parameters after some updates, its updater and the teacher."""
    student, teacher = net(8, 0), net(32, 1)
    draw = np.random.RandomState(2)
    x, t = draw.randn(24, 6).astype("f"), draw.randint(-1, 4, 24).astype("i")
    optimizer = chainer.optimizers.SGD(0.1).setup(student)  # Adam makes noise large
    updater = umem.chainer.DistillingUpdater(
        SerialIterator(TupleDataset(x, t), 8, shuffle=False), optimizer, teacher,
        device=device, unlabelled=SerialIterator(x, 4, shuffle=False), **options,
    )  # fmt: skip
    for _ in range(4):
        updater.update()
    student.to_device("@numpy")
    found = np.concatenate([p.array.ravel() for _, p in sorted(student.namedparams())])
    return found, updater, teacher


def test_what_is_learnt_is_what_is_learnt_on_numpy() -> None:
    found, _, teacher = trained("@cupy:0")
    np.testing.assert_allclose(found, trained("@numpy")[0], rtol=1e-3, atol=1e-5)
    assert all(isinstance(p.array, np.ndarray) for p in teacher.params())


def test_a_teacher_in_halves_teaches_about_the_same() -> None:
    whole = trained("@cupy:0")[0]
    found, updater, _ = trained("@cupy:0", teacher_precision="float16")
    assert 0 < np.abs(found - whole).max() < 5e-3
    types = {str(p.dtype) for p in updater.loss.teacher.link.params()}
    assert types == {"float16", "float32"}


def test_a_teacher_in_managed_memory_teaches_the_same() -> None:
    import cupy

    whole = trained("@cupy:0")[0]
    found, updater, _ = trained("@cupy:0", teacher_memory="managed")
    assert np.array_equal(found, whole)
    for p in updater.loss.teacher.link.params():
        kind = cupy.cuda.runtime.pointerGetAttributes(p.array.data.ptr).type
        assert kind == MANAGED
    own = cupy.zeros(8)  # and nothing else is
    assert cupy.cuda.runtime.pointerGetAttributes(own.data.ptr).type != MANAGED


def test_what_a_teacher_draws_moves_no_generator_of_the_student() -> None:
    import cupy

    class Noisy(chainer.Chain):
        def __init__(self, draws: bool) -> None:
            super().__init__()
            self.draws = draws
            with self.init_scope():
                self.inner = L.Linear(6, 4, initialW=np.ones((4, 6), "f"))

        def forward(self, x: Any) -> Any:
            if self.draws:
                cupy.random.rand(3)
            return self.inner(x)

    found = []
    for draws in (False, True):
        cupy.random.seed(7)
        student = net(8, 0)
        student.to_device("@cupy:0")
        optimizer = chainer.optimizers.SGD(0.1).setup(student)
        loss = umem.chainer.DistillingLoss(optimizer, Noisy(draws))
        optimizer.update(loss, cupy.ones((4, 6), "f"), cupy.zeros(4, "i"))
        found.append(cupy.random.rand(5).get())
    assert np.array_equal(*found)


def test_a_teacher_of_statistics_alone_is_copied_to_the_student() -> None:
    teacher = chainer.Sequential(
        L.BatchNormalization(6, use_gamma=False, use_beta=False), lambda x: x[:, :4]
    )
    quantised = umem.chainer.quantize(net(32, 1), np.random.rand(8, 6).astype("f"))
    for each in (teacher, quantised):
        student = net(8, 0)
        student.to_device("@cupy:0")
        optimizer = chainer.optimizers.SGD(0.1).setup(student)
        loss = umem.chainer.DistillingLoss(optimizer, each)
        x = student.xp.asarray(np.random.rand(8, 6).astype("f"))
        optimizer.update(loss, x, student.xp.zeros(8, "i"))
        assert optimizer.t == 1
        each(np.zeros((2, 6), "f"))  # is where it was
