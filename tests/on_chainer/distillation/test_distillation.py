"""Distillation: the loss is the paper's, the teacher leaves no trace, bad input is refused."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L
from chainer import training
from chainer.datasets import TupleDataset
from chainer.iterators import MultiprocessIterator, SerialIterator
from chainer.training import extensions, updaters

from umem.errors import (
    DeviceNotFoundError,
    DistillationError,
    SizeError,
    StateError,
    UmemError,
    UnsupportedError,
)

CLASSES, WIDE = 5, 12


class Net(chainer.Chain):
    """Two layers, with dropout between them, and batch normalisation in front."""

    def __init__(self, width: int, seed: int, ratio: float = 0.0) -> None:
        super().__init__()
        self.ratio = ratio
        np.random.seed(seed)
        with self.init_scope():
            self.norm = L.BatchNormalization(WIDE)
            self.first, self.score = L.Linear(WIDE, width), L.Linear(width, CLASSES)

    def forward(self, x: Any) -> Any:
        return self.score(F.dropout(F.relu(self.first(self.norm(x))), self.ratio))


class Loud(Net):
    """A network that draws at random, reports and counts its calls."""

    calls = 0

    def forward(self, x: Any) -> Any:
        np.random.rand(3)
        self.calls += 1
        chainer.report({"noise": 1.0}, self)
        return super().forward(x)


def some(rows: int = 40, seed: int = 0) -> tuple[Any, Any]:
    draw = np.random.RandomState(seed)
    x = draw.randn(rows, WIDE).astype("f")
    return x, (x[:, :CLASSES].argmax(axis=1)).astype("i")


def parameters(link: Any) -> Any:
    return np.concatenate([p.array.ravel() for _, p in sorted(link.namedparams())])


def softmax(z: Any, warmth: float = 1.0) -> Any:
    e = np.exp(z.astype("d") / warmth - (z.astype("d") / warmth).max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


class Given(chainer.Chain):
    """A network that gives the scores that it was made with, whatever it is asked."""

    def __init__(self, scores: Any) -> None:
        super().__init__()
        with self.init_scope():
            self.scores = chainer.Parameter(np.array(scores))

    def forward(self, x: Any) -> Any:
        return self.scores + 0


def loss_of(student: Any, teacher: Any, **options: Any) -> Any:
    return umem.chainer.DistillingLoss(
        chainer.optimizers.SGD(0.1).setup(student), teacher, **options
    )


# -- the loss ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f", "d"])
@pytest.mark.parametrize(("warmth", "weight"), [(1, 0.5), (4, 0.3), (0.5, 1), (20, 0.9)])
def test_loss_and_gradient_are_those_of_the_paper(dtype: str, warmth: float, weight: float) -> None:
    draw = np.random.RandomState(3)
    z, v = (3 * draw.randn(7, CLASSES).astype(dtype) for _ in range(2))
    t = np.array([0, 4, -1, 2, 2, -1, 1], "i")
    student = Given(z)
    loss = loss_of(student, Given(v), temperature=warmth, weight=weight)(z, t)
    loss.backward()
    p, q, labelled = softmax(v, warmth), softmax(z, warmth), t >= 0
    kl = (p * (np.log(p) - np.log(q))).sum(axis=1).mean()
    entropy = -np.log(softmax(z)[labelled, t[labelled]]).mean()
    assert np.allclose(
        float(loss.array), (1 - weight) * entropy + weight * warmth**2 * kl, rtol=1e-4
    )
    hard = (softmax(z) - np.eye(CLASSES)[t]) * labelled[:, None] / labelled.sum()
    wanted = (1 - weight) * hard + weight * warmth * (q - p) / len(z)
    assert student.scores.grad.dtype == dtype
    assert np.allclose(student.scores.grad, wanted, rtol=0, atol=1e-6 if dtype == "f" else 1e-13)


def test_places_in_an_image_are_rows_too() -> None:
    draw = np.random.RandomState(3)
    z, v = (draw.randn(2, CLASSES, 3, 4) for _ in range(2))
    found = loss_of(Given(z), Given(v), temperature=2, weight=1, label_key=None)(z)
    p, q = softmax(v, 2), softmax(z, 2)
    assert np.isclose(float(found.array), 4 * (p * np.log(p / q)).sum(axis=1).mean())


def test_a_batch_without_any_label_has_the_teachers_share_alone() -> None:
    z, v = np.eye(3, CLASSES, dtype="d"), np.ones((3, CLASSES))
    student = Given(z)
    loss_of(student, Given(v), temperature=1, weight=0.25)(z, np.full(3, -1, "i")).backward()
    assert np.allclose(student.scores.grad, 0.25 * (softmax(z) - 1 / CLASSES) / 3)


def test_a_distance_of_ones_own_is_given_both_outputs() -> None:
    z, v = np.ones((3, 1), "f"), np.full((3, 1), 3, "f")
    loss = loss_of(
        Given(z), Given(v), weight=0.5, lossfun=F.mean_squared_error,
        distance=F.mean_absolute_error,
    )  # fmt: skip
    assert float(loss(z, np.zeros((3, 1), "f")).array) == 0.5 * 1 + 0.5 * 2


# -- a run ---------------------------------------------------------------------------------------


def run(
    updater: Callable[[Any, Any], Any],
    *,
    epochs: int = 2,
    around: Callable[[Any, Any], AbstractContextManager[Any]] = lambda net, opt: nullcontext(),
) -> tuple[Any, Any]:
    """Parameters and what was logged after some epochs of a network with dropout."""
    model = L.Classifier(Net(8, 1, ratio=0.4))
    optimizer = chainer.optimizers.Adam().setup(model)
    data = TupleDataset(*some())
    np.random.seed(5)
    made = updater(SerialIterator(data, 8), optimizer)
    log = extensions.LogReport(trigger=(1, "iteration"), filename=None)
    asked = SerialIterator(data, 8, repeat=False, shuffle=False)
    with TemporaryDirectory() as folder, around(model, optimizer):
        trainer = training.Trainer(made, (epochs, "epoch"), folder)
        trainer.extend(log)
        trainer.extend(extensions.Evaluator(asked, model))
        trainer.run()
    for entry in log.log:
        entry.pop("elapsed_time")
    return parameters(model), log.log


def distilling(teacher: Any, **options: Any) -> Callable[[Any, Any], Any]:
    def make(iterator: Any, optimizer: Any) -> Any:
        return umem.chainer.DistillingUpdater(iterator, optimizer, teacher, **options)

    return make


def test_with_a_weight_of_0_it_is_plain_training_to_the_bit() -> None:
    teacher = Loud(20, 2)
    unlabelled = SerialIterator(some()[0], 4)
    plain, log = run(updaters.StandardUpdater)
    found, same = run(distilling(teacher, weight=0, unlabelled=unlabelled))
    assert np.array_equal(plain, found) and teacher.calls == 0 and unlabelled.epoch_detail == 0
    assert [e["main/loss"] for e in log] == [e["main/loss"] for e in same]
    assert np.allclose([e["main/accuracy"] for e in log], [e["main/accuracy"] for e in same])


def test_what_a_teacher_draws_reports_and_normalises_is_not_seen() -> None:
    teacher, loud = Net(20, 2), Loud(20, 2)
    before = parameters(loud), loud.norm.avg_mean.copy()
    quiet, _ = run(distilling(teacher))
    found, log = run(distilling(loud))
    assert np.array_equal(quiet, found) and loud.calls == 10
    assert np.array_equal(before[0], parameters(loud))
    assert np.array_equal(before[1], loud.norm.avg_mean)
    assert {"main/loss", "main/label_loss", "main/teacher_loss", "main/accuracy"} <= {*log[0]}
    assert "validation/main/accuracy" in log[-1] and not any("noise" in key for key in log[0])


def test_a_teacher_may_be_a_classifier() -> None:
    bare, _ = run(distilling(Net(20, 2)))
    wrapped, _ = run(distilling(L.Classifier(Net(20, 2))))
    assert np.array_equal(bare, wrapped)


def test_a_classifier_that_computes_no_accuracy_reports_none() -> None:
    for computes in (True, False):
        model = L.Classifier(Net(8, 1))
        model.compute_accuracy = computes
        reporter = chainer.Reporter()
        reporter.add_observer("main", model)
        with reporter:
            loss_of(model, Net(20, 2))(*some())
        assert ("main/accuracy" in reporter.observation) is computes


def test_dictionaries_of_inputs_do_as_well() -> None:
    x, t = some()
    wide = [{"x": a, "t": b} for a, b in zip(x, t, strict=True)]
    found = []
    for items, key in ((TupleDataset(x, t), -1), (wide, "t")):
        model = Net(8, 1)
        optimizer = chainer.optimizers.Adam().setup(model)
        bare = SerialIterator([{"x": a} for a in x] if key == "t" else x, 3, shuffle=False)
        updater = umem.chainer.DistillingUpdater(
            SerialIterator(items, 8, shuffle=False), optimizer, Net(20, 2), label_key=key,
            unlabelled=bare,
        )  # fmt: skip
        updater.update()
        assert bare.current_position == 3
        found.append(parameters(model))
    assert np.array_equal(*found)


def test_batches_without_labels_go_along() -> None:
    x, t = some(6)
    more = some(4, seed=9)[0]
    found = []
    for labels in (False, True):
        model = Net(8, 1)
        optimizer = chainer.optimizers.SGD(0.1).setup(model)
        if labels:  # by hand
            loss = umem.chainer.DistillingLoss(optimizer, Net(20, 2))
            marked = np.concatenate([t, np.full(4, -1, "i")])
            optimizer.update(loss, np.concatenate([x, more]), marked)
        else:
            umem.chainer.DistillingUpdater(
                SerialIterator(TupleDataset(x, t), 6, shuffle=False), optimizer, Net(20, 2),
                unlabelled=SerialIterator(more, 4, shuffle=False),
            ).update()  # fmt: skip
        found.append(parameters(model))
    assert np.array_equal(*found)


def test_items_of_a_process_are_as_those_of_the_loop() -> None:
    found = []
    for kind in (SerialIterator, MultiprocessIterator):
        model = Net(8, 1)
        optimizer = chainer.optimizers.Adam().setup(model)
        options = {"n_processes": 1} if kind is MultiprocessIterator else {}
        iterator = kind(TupleDataset(*some()), 8, shuffle=False, **options)
        updater = umem.chainer.DistillingUpdater(iterator, optimizer, Net(20, 2))
        for _ in range(3):
            updater.update()
        updater.finalize()
        found.append(parameters(model))
    assert np.array_equal(*found)


def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def trained(folder: str, *ends: int) -> tuple[Any, list[float]]:
        for end in ends:
            model = L.Classifier(Net(8, 1, ratio=0.4))
            optimizer = chainer.optimizers.Adam().setup(model)
            np.random.seed(5)
            updater = umem.chainer.DistillingUpdater(
                SerialIterator(TupleDataset(*some()), 8), optimizer, Loud(20, 2),
                unlabelled=SerialIterator(some(30, 7)[0], 4),
            )  # fmt: skip
            trainer = training.Trainer(updater, (end, "iteration"), tmp_path / folder)
            log = extensions.LogReport(trigger=(1, "iteration"), filename=None)
            trainer.extend(log)
            trainer.extend(umem.chainer.Snapshot(every=1))
            trainer.run()
        return parameters(model), [entry["main/loss"] for entry in log.log]

    whole, losses = trained("whole", 11)
    found, same = trained("parts", 4, 11)
    assert np.array_equal(whole, found) and losses == same and len(same) == 11


# -- with the rest of umem -----------------------------------------------------------------------

EXACT: dict[str, Callable[[Any, Any], AbstractContextManager[Any]]] = {
    "Recompute, least": lambda net, optimizer: umem.chainer.Recompute("min"),
    "chunked updates": lambda net, optimizer: umem.chainer.chunked_updates(),
    "workspace": lambda net, optimizer: umem.chainer.workspace("64KiB"),
}


@pytest.mark.filterwarnings("ignore::umem.errors.RecomputeWarning")
@pytest.mark.parametrize("name", EXACT)
def test_what_saves_memory_changes_no_bit(name: str) -> None:
    plain, _ = run(distilling(Loud(20, 2)))
    found, _ = run(distilling(Loud(20, 2)), around=EXACT[name])
    assert np.array_equal(plain, found)


def test_micro_batches_have_the_gradient_of_the_whole() -> None:
    x, t = some(24)
    t[[1, 5, 6, 20]] = -1
    found = []
    for parts in (None, 8):
        model = chainer.Sequential(L.Linear(WIDE, 8), F.relu, L.Linear(8, CLASSES))
        for at, (_, p) in enumerate(sorted(model.namedparams())):
            p.array[...] = np.random.RandomState(at).randn(*p.shape)
        optimizer = chainer.optimizers.SGD(0.1).setup(model)
        loss = umem.chainer.DistillingLoss(optimizer, Net(20, 2), temperature=2)
        whole: Any = nullcontext()
        if parts is not None:
            whole = umem.chainer.accumulate(optimizer, micro_batch=parts)
        with whole:
            optimizer.update(loss, x, t)
        found.append(parameters(model))
    assert np.allclose(*found, rtol=0, atol=1e-6)


def test_a_student_in_halves_learns_from_a_teacher_in_float32() -> None:
    plain, _ = run(distilling(Net(20, 2)), epochs=1)
    found, _ = run(
        distilling(Net(20, 2)), epochs=1,
        around=lambda net, optimizer: umem.chainer.half_precision(net, optimizer),
    )  # fmt: skip
    assert found.dtype == np.float32 and 0 < np.abs(plain - found).max() < 0.02


# -- the teacher ---------------------------------------------------------------------------------


def test_a_student_made_in_float16_learns_from_a_copy_in_halves() -> None:
    x, t = some(8)
    with chainer.using_config("dtype", np.float16):
        student = chainer.Sequential(L.Linear(WIDE, CLASSES))
    whole = student.copy("copy")
    whole[0].W.array, whole[0].b.array = (p.array.astype("f") for p in (student[0].W, student[0].b))
    teacher = Net(20, 2)
    found = loss_of(student, teacher, teacher_precision="float16")(x.astype("e"), t)
    expected = loss_of(whole, teacher)(x, t)
    assert float(found.array) == pytest.approx(float(expected.array), rel=5e-3)


def test_a_teacher_holds_one_layer_while_it_runs() -> None:
    rows, width, layers = 512, 128, 16
    one = rows * width * 4
    teacher = chainer.Sequential(
        *(L.Linear(width, width) for _ in range(layers)), L.Linear(None, 3)
    )
    x = np.ones((rows, width), "f")
    teacher(x)
    loss = loss_of(L.Linear(width, 3), teacher)
    peaks = {}
    for name, ask in (("asked", lambda: loss.teacher(0, x)), ("plain", lambda: teacher(x))):
        tracemalloc.start()
        ask()
        peaks[name] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks["asked"] < 2 * one + (64 << 10)  # what a layer reads, and what it makes
    assert peaks["plain"] > layers * one


def test_a_teacher_in_halves_takes_half_and_says_about_the_same() -> None:
    teacher = Net(200, 2)
    x = some(30)[0]
    before = parameters(teacher).copy()
    whole = loss_of(Net(8, 1), teacher)
    half = loss_of(Net(8, 1), teacher, teacher_precision="float16")
    singles = sum(p.array.nbytes for p in teacher.norm.params())
    assert half.teacher.parameter_bytes == (whole.teacher.parameter_bytes + singles) // 2
    assert np.array_equal(before, parameters(teacher)) and parameters(teacher).dtype == "f"
    one, two = (chainer.as_array(loss.teacher(0, x)).astype("f") for loss in (whole, half))
    assert 0 < np.abs(one - two).max() < 5e-3
    assert float(half(x, some(30)[1]).array) == pytest.approx(
        float(whole(x, some(30)[1]).array), rel=1e-2
    )


def test_what_a_teacher_shares_stays_shared_in_its_copy() -> None:
    teacher = chainer.Sequential(L.Linear(WIDE, WIDE), F.relu, L.Linear(WIDE, WIDE))
    teacher[2].W = teacher[0].W
    whole = loss_of(Net(8, 1), teacher)
    half = loss_of(Net(8, 1), teacher, teacher_precision="float16")
    assert 2 * half.teacher.parameter_bytes == whole.teacher.parameter_bytes
    assert whole.teacher.parameter_bytes == 4 * (WIDE * WIDE + 2 * WIDE)


def test_what_a_teacher_has_tied_stays_tied_in_its_copy() -> None:
    teacher = chainer.Sequential(L.Linear(WIDE, WIDE), F.relu, L.Linear(WIDE, WIDE))
    umem.chainer.tie(teacher, "/0/W", "/1/W")
    half = loss_of(Net(8, 1), teacher, teacher_precision="float16").teacher.link
    assert half[2].W is half[0].W and half[0].W.dtype == np.float16
    assert teacher[2].W is teacher[0].W and teacher[0].W.dtype == np.float32


def test_a_sequence_that_lists_its_links_in_another_order_than_its_copy_teaches() -> None:
    teacher = chainer.Sequential(L.Linear(WIDE, 7), F.relu, L.Linear(9, CLASSES))
    teacher.insert(1, L.Linear(7, 9))
    x = some(4)[0]
    half = loss_of(Net(8, 1), teacher, teacher_precision="float16").teacher
    np.testing.assert_allclose(half(0, x).array, teacher(x).array, atol=5e-3)


# -- what is refused -----------------------------------------------------------------------------


def lazy() -> Any:
    return L.Linear(None, CLASSES)


class Scaled(L.Classifier):
    """A classifier whose loss is another than Classifier's."""

    def forward(self, *args: Any) -> Any:
        return 2 * super().forward(*args)


def sharing_arrays(student: Any) -> Any:
    return student.copy()  # by default Chainer shares the arrays


def with_its_statistics(student: Any) -> Any:
    """A teacher with parameters of its own, and the running statistics of the student."""
    norm = L.BatchNormalization(WIDE, use_gamma=False, use_beta=False)
    norm.avg_mean = student.norm.avg_mean
    return chainer.Sequential(norm, L.Linear(WIDE, CLASSES))


REFUSED: dict[str, tuple[Callable[[Any], dict[str, Any]], type[UmemError], str]] = {
    "temperature 0": (
        lambda s: {"temperature": 0},
        SizeError,
        "temperature must be a number from 0.001 to 1000",
    ),
    "temperature NaN": (lambda s: {"temperature": float("nan")}, SizeError, "temperature"),
    "temperature inf": (lambda s: {"temperature": float("inf")}, SizeError, "temperature"),
    "weight": (lambda s: {"weight": 1.5}, SizeError, "weight must be a number from 0 to 1"),
    "weight NaN": (lambda s: {"weight": float("nan")}, SizeError, "weight"),
    "weight text": (lambda s: {"weight": "half"}, SizeError, "'half'"),
    "precision": (lambda s: {"teacher_precision": "int8"}, UnsupportedError, "int8"),
    "memory": (lambda s: {"teacher_memory": "host"}, UnsupportedError, "host"),
    "managed": (lambda s: {"teacher_memory": "managed"}, DeviceNotFoundError, "virtual_gpu"),
    "no values": (lambda s: {"teacher": lazy()}, StateError, "/W has no values"),
    "temperature above": (
        lambda s: {"temperature": 1e4},
        SizeError,
        "to 1000: float32 has no digits beyond",
    ),
    "temperature below": (lambda s: {"temperature": 1e-4}, SizeError, "0.001 to"),
    "no link": (lambda s: {"teacher": print}, StateError, "chainer.Link; got builtin_function"),
    "no network": (lambda s: {"teacher": None}, StateError, "chainer.Link; got NoneType"),
    "same arrays": (lambda s: {"teacher": sharing_arrays(s)}, StateError, "mode='copy'"),
    "same statistics": (lambda s: {"teacher": with_its_statistics(s)}, StateError, "/0/avg_mean"),
    "itself": (lambda s: {"teacher": s}, StateError, "is also the student's"),
    "no labels": (lambda s: {"label_key": None}, StateError, "give weight=1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_before_anything_changes(name: str) -> None:
    options, error, said = REFUSED[name]
    student = Net(8, 1)
    before = parameters(student)
    given = {"teacher": Net(20, 2), **options(student)}
    with pytest.raises(error, match=said):
        loss_of(student, given.pop("teacher"), **given)
    assert np.array_equal(before, parameters(student))


def spoiled(teacher: Any) -> Any:
    teacher.first.W.array[0, 0] = np.nan
    return teacher


TEACHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "of other classes": (lambda: L.Linear(WIDE, CLASSES + 1), r"\(8, 6\) and .*\(8, 5\)"),
    "with NaN": (lambda: spoiled(Net(20, 2)), "for 8 of 8 rows is not finite"),
}


@pytest.mark.parametrize("name", TEACHERS)
def test_a_teacher_that_cannot_teach_stops_the_update(name: str) -> None:
    make, said = TEACHERS[name]
    model = Net(8, 1)
    optimizer = chainer.optimizers.Adam().setup(model)
    updater = umem.chainer.DistillingUpdater(
        SerialIterator(TupleDataset(*some()), 8), optimizer, make()
    )
    before, state = parameters(model), np.random.get_state()[1].copy()
    with pytest.raises(DistillationError, match=said):
        updater.update()
    assert np.array_equal(before, parameters(model)) and optimizer.t == 0
    assert np.array_equal(state, np.random.get_state()[1])


def test_an_input_with_nan_stops_the_update_and_says_how_many() -> None:
    x, t = some(8)
    x[3, 0] = np.nan
    model = Net(8, 1)
    optimizer = chainer.optimizers.Adam().setup(model)
    with pytest.raises(DistillationError, match="for 1 of 8 rows"):
        optimizer.update(umem.chainer.DistillingLoss(optimizer, Net(20, 2)), x, t)
    assert optimizer.t == 0


def test_items_that_do_not_go_together_are_refused() -> None:
    x, t = some()
    optimizer = chainer.optimizers.Adam().setup(Net(8, 1))
    cases = (
        (TupleDataset(x, t), TupleDataset(x, t), "without the label"),
        (TupleDataset(x, t.astype("u4")), x, "signed"),
        (x, None, "label_key"),
    )
    for items, more, said in cases:
        extra = None if more is None else SerialIterator(more, 4)
        updater = umem.chainer.DistillingUpdater(
            SerialIterator(items, 8), optimizer, Net(20, 2), unlabelled=extra
        )
        with pytest.raises(StateError, match=said):
            updater.update()


def test_an_iterator_that_has_ended_is_said_before_a_batch_is_taken() -> None:
    x, t = some()
    model = Net(8, 1)
    main, few = SerialIterator(TupleDataset(x, t), 8), SerialIterator(x[:6], 4, repeat=False)
    updater = umem.chainer.DistillingUpdater(
        main, chainer.optimizers.Adam().setup(model), Net(20, 2), unlabelled=few
    )
    updater.update(), updater.update()
    before = parameters(model), main.current_position, updater.iteration
    with pytest.raises(StateError, match=r"unlabelled iterator has ended.*repeat=True"):
        updater.update()
    assert np.array_equal(before[0], parameters(model))
    assert before[1:] == (main.current_position, updater.iteration)


def test_a_classifier_with_a_loss_of_its_own_is_refused_unless_told_another() -> None:
    student = Scaled(Net(8, 1))
    with pytest.raises(UnsupportedError, match=r"Scaled has its own forward.*lossfun="):
        loss_of(student, Net(20, 2))
    x, t = some(8)
    found = loss_of(student, Net(20, 2), weight=0, lossfun=F.softmax_cross_entropy)(x, t)
    assert found.array == L.Classifier(student.predictor)(x, t).array


def test_accuracy_is_what_the_classifier_takes_for_it() -> None:
    x, t = some(8)

    def reported(model: Any) -> Any:
        reporter, found = chainer.Reporter(), {}
        reporter.add_observer("main", model)
        with reporter.scope(found):
            loss_of(model, Net(20, 2))(x, t)
        return found.get("main/accuracy")

    own = L.Classifier(Net(8, 1), accfun=lambda y, labels: np.float32(len(labels) + 0.5))
    assert reported(own) == 8.5
    own.compute_accuracy = False
    assert reported(own) is None


def test_items_that_are_no_tuples_are_said_to_be_so() -> None:
    x, _ = some()
    updater = umem.chainer.DistillingUpdater(
        SerialIterator(x, 8), chainer.optimizers.Adam().setup(Net(8, 1)), Net(20, 2),
        unlabelled=SerialIterator(x, 4),
    )  # fmt: skip
    with pytest.raises(StateError, match=r"items with a label must be tuples.*got an ndarray"):
        updater.update()


def test_a_loss_function_of_chainers_kind_is_refused() -> None:
    optimizer = chainer.optimizers.Adam().setup(Net(8, 1))
    with pytest.raises(TypeError, match="lossfun"):
        umem.chainer.DistillingUpdater(
            SerialIterator(TupleDataset(*some()), 8), optimizer, Net(20, 2), loss_func=print
        )


def test_an_optimizer_without_a_model_is_refused() -> None:
    with pytest.raises(StateError, match="setup"):
        umem.chainer.DistillingLoss(chainer.optimizers.SGD(), Net(20, 2))
