"""A run that was stopped goes on to the bit."""

from __future__ import annotations

import os
import random
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from resume_cases import ITERATORS, dataset, network, train, trainer

import umem.chainer  # isort: skip
import chainer
import chainer.links as L

from umem.chainer.resume import collecting
from umem.errors import (
    FileError,
    SizeError,
    SnapshotError,
    SnapshotWarning,
    StateError,
    UnsupportedError,
)
from umem.snapshots import FileOperations


@pytest.mark.parametrize("iterator", ITERATORS)
def test_a_stopped_trainer_goes_on_to_the_bit(iterator: str, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 30, iterator)
    train(tmp_path / "parts", 13, iterator)
    assert train(tmp_path / "parts", 30, iterator) == whole
    assert len(whole) == 30 and len(set(whole)) > 20


@pytest.mark.filterwarnings("ignore:invalid value")  # MSVAG divides 0 by 0 where no unit is on
@pytest.mark.parametrize(
    "optimizer", ["SGD", "MomentumSGD", "AdaGrad", "AdaDelta", "RMSprop", "AMSGrad", "MSVAG"]
)
def test_every_kind_of_optimizer_goes_on(optimizer: str, tmp_path: Path) -> None:
    kind = getattr(chainer.optimizers, optimizer)
    whole = train(tmp_path / "whole", 12, optimizer=kind)
    train(tmp_path / "parts", 7, optimizer=kind)
    assert train(tmp_path / "parts", 12, optimizer=kind) == whole


def scaled() -> Any:
    """An optimizer that scales losses dynamically."""
    optimizer = chainer.optimizers.MomentumSGD()
    optimizer.loss_scaling(interval=4)
    return optimizer


def test_the_loss_scale_goes_on(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 14, optimizer=scaled)
    train(tmp_path / "parts", 7, optimizer=scaled)
    assert train(tmp_path / "parts", 14, optimizer=scaled) == whole


def test_it_says_what_it_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, 6)
    assert capsys.readouterr().err == ""
    train(tmp_path, 8)
    assert f"umem: resumed from {tmp_path}/snapshots/step-5" in capsys.readouterr().err


def loop(folder: Path, steps: int, every: int = 4) -> list[float]:
    """A hand-written loop; returns the losses of the steps that it made."""
    np.random.seed(0)
    own = np.random.default_rng(7)
    model, found = network(), []
    optimizer = chainer.optimizers.Adam().setup(model)
    batches = chainer.iterators.SerialIterator(dataset(), 16)
    parts = {"model": model, "optimizer": optimizer, "batches": batches, "own": own}
    done = umem.chainer.resume_run(folder, **parts)
    assert done.values == ({} if done.path is None else {"seen": 16 * done.step})
    for step in range(done.step, steps):
        x, t = chainer.dataset.concat_examples(batches.next())
        optimizer.update(model, x + own.random(x.shape, np.float32), t)
        found.append(float(model.loss.array))
        if (step + 1) % every == 0:
            umem.chainer.save_run(folder, wait=True, seen=16 * (step + 1), **parts)
    return found


def test_a_loop_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole = loop(tmp_path / "whole", 20)
    first = loop(tmp_path / "parts", 10)
    assert first[:8] + loop(tmp_path / "parts", 20) == whole


def test_a_torn_newest_one_is_passed_over(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 18)
    train(tmp_path / "parts", 11)
    arrays = tmp_path / "parts/snapshots/step-10/arrays.safetensors"
    data = bytearray(arrays.read_bytes())
    data[-9] ^= 1
    arrays.write_bytes(data)
    with pytest.warns(SnapshotWarning, match="step-10.*another SHA-256.*taking step-5"):
        assert train(tmp_path / "parts", 18) == whole


def test_another_model_is_refused_by_name_and_shape_and_nothing_is_changed(tmp_path: Path) -> None:
    umem.chainer.save_run(tmp_path, step=1, model=run_once(network()))
    other = run_once(network(31))
    before = [p.array.copy() for p in other.params()]
    with pytest.raises(SnapshotError, match=r"0/W.*\(30, 20\) there and .*\(31, 20\) here"):
        umem.chainer.resume_run(tmp_path, model=other)
    for parameter, array in zip(other.params(), before, strict=True):
        np.testing.assert_array_equal(parameter.array, array)


def run_once(model: Any) -> Any:
    """A model whose lazy parameters are there."""
    model(*chainer.dataset.concat_examples(dataset()[:2]))
    return model


def test_two_runs_in_one_folder_are_told(tmp_path: Path) -> None:
    umem.chainer.resume_run(tmp_path / "snapshots", model=network())
    with pytest.raises(StateError, match="another run of this process writes"):
        train(tmp_path, 3)


# -- what goes wrong ---------------------------------------------------------------------------


def test_a_part_that_cannot_be_put_back_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    np.random.seed(0)
    model = run_once(network())
    optimizer = chainer.optimizers.Adam().setup(model)
    umem.chainer.save_run(tmp_path, model=model, optimizer=optimizer, wait=True)
    np.random.seed(1)
    other = run_once(network())
    theirs = chainer.optimizers.Adam().setup(other)
    before = [p.array.copy() for p in other.params()]
    state = np.random.get_state()
    with pytest.raises(SnapshotError, match=r"it has no 'parts/more/lacking'"):
        umem.chainer.resume_run(tmp_path, model=other, optimizer=theirs, more=Needing())
    for parameter, array in zip(other.params(), before, strict=True):
        np.testing.assert_array_equal(parameter.array, array)
        assert parameter.update_rule.state is None and parameter.update_rule.t == 0
    np.testing.assert_array_equal(np.random.get_state()[1], state[1])


def test_loading_takes_no_second_copy_of_the_run(tmp_path: Path) -> None:
    model = L.Linear(1000, 2000)
    optimizer = chainer.optimizers.Adam().setup(model)
    optimizer.update(lambda: chainer.functions.sum(model(np.ones((1, 1000), "f"))))
    umem.chainer.save_run(tmp_path, model=model, optimizer=optimizer, wait=True)
    tracemalloc.start()
    try:
        umem.chainer.resume_run(tmp_path, model=model, optimizer=optimizer)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    live_bytes = 3 * model.W.array.nbytes
    assert most < 10 << 20 < live_bytes  # two pieces of 4 MiB are held while sums are compared


class Doubling(L.Linear):
    """A link that computes from its weight when that is loaded."""

    def serialize(self, serializer: Any) -> None:
        super().serialize(serializer)
        self.double = 2 * self.W.array


def test_a_link_that_computes_from_what_it_loads_finds_it_in_place(tmp_path: Path) -> None:
    first, second = Doubling(3, 2), Doubling(3, 2)
    umem.chainer.save_run(tmp_path, step=1, model=first)
    before = second.W.array.copy()
    with pytest.raises(SnapshotError, match="it has no 'parts/more/lacking'"):
        umem.chainer.resume_run(tmp_path, model=second, more=Needing())
    np.testing.assert_array_equal(second.W.array, before)
    umem.chainer.resume_run(tmp_path, model=second)
    np.testing.assert_array_equal(second.double, 2 * first.W.array)


def test_generators_of_iterators_are_put_back_where_a_snapshot_is_refused(tmp_path: Path) -> None:
    def batches() -> Any:
        sampler = chainer.iterators.ShuffleOrderSampler(np.random.RandomState(5))
        return chainer.iterators.SerialIterator(dataset(), 16, order_sampler=sampler)

    first = batches()
    for _ in range(20):
        first.next()
    umem.chainer.save_run(tmp_path, step=1, data=first)
    second, wanted = batches(), batches()
    with pytest.raises(SnapshotError, match="it has no 'parts/more/lacking'"):
        umem.chainer.resume_run(tmp_path, data=second, more=Needing())
    for _ in range(20):
        for (x, t), (y, u) in zip(second.next(), wanted.next(), strict=True):
            assert x.tobytes() == y.tobytes() and t == u


class Needing:
    """A part that asks for something."""

    def serialize(self, serializer: Any) -> None:
        serializer("lacking", 1)


def test_a_value_that_json_cannot_say_is_named_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"'values/odd' is a set, which .* no pickle"):
        umem.chainer.save_run(tmp_path, step=1, model=network(), odd={1})
    assert list(tmp_path.glob("step-*")) == []


def test_without_an_optimizer_the_step_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(SizeError, match="give step="):
        umem.chainer.save_run(tmp_path, model=network())
    with pytest.raises(SizeError, match="whole number from 0 on, got -1"):
        umem.chainer.save_run(tmp_path, step=-1, model=network())


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep": 1.5}, {"on_error": "ignore"}])
def test_options_that_are_none_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SizeError, match="must be"):
        umem.chainer.save_run(tmp_path, step=1, **options)
    with pytest.raises(SizeError, match="must be"):
        umem.chainer.Snapshot(**options)
    with pytest.raises(SizeError, match="every must be a whole number from 1 on"):
        umem.chainer.Snapshot(every=0)


class FullDisk(FileOperations):
    """A disk with no room."""

    def free_bytes(self, path: Path) -> int:
        return 100


class FailingDisk(FileOperations):
    """A disk that fails once it is written to."""

    def write(self, handle: int, data: memoryview) -> None:
        raise OSError(28, "No space left on device")


def test_a_full_disk_ends_the_training_at_once_with_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umem.chainer.resume.saver.FileOperations", FullDisk)
    run = trainer(tmp_path, 12)
    with pytest.raises(FileError, match=r"the disk is full; it needs [\d.]+ KiB, 100 B free"):
        run.run(show_loop_exception_msg=False)
    assert run.updater.iteration == 5


def test_what_fails_while_it_is_written_reaches_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umem.chainer.resume.saver.FileOperations", FailingDisk)
    run = trainer(tmp_path, 12)
    with pytest.raises(FileError, match="no space left on device"):
        run.run(show_loop_exception_msg=False)
    assert run.updater.iteration == 10
    with pytest.raises(FileError, match="no space left"):  # by the last one too
        trainer(tmp_path / "last", 6).run()


@pytest.mark.parametrize("disk", [FullDisk, FailingDisk])
def test_by_option_training_goes_on_with_a_warning(
    disk: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(tmp_path / "whole", 12)
    monkeypatch.setattr("umem.chainer.resume.saver.FileOperations", disk)
    with pytest.warns(SnapshotWarning, match="training continues") as told:
        assert train(tmp_path / "warned", 12, on_error="warn") == whole
    assert len([one for one in told if one.category is SnapshotWarning]) == 2


def test_an_error_of_the_training_is_not_hidden_by_one_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umem.chainer.resume.saver.FileOperations", FailingDisk)
    run = trainer(tmp_path, 12)

    def fail(trainer: Any) -> None:
        raise KeyError("mine")

    run.extend(fail, trigger=(7, "iteration"), name="fail")
    with pytest.warns(SnapshotWarning, match="no space left"), pytest.raises(KeyError):
        run.run(show_loop_exception_msg=False)


def test_the_copy_is_made_before_the_next_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is slow until the training is over writes what the arrays were."""
    go_on = threading.Event()

    class SlowDisk(FileOperations):
        def write(self, handle: int, data: memoryview) -> None:
            assert go_on.wait(20)
            super().write(handle, data)

    monkeypatch.setattr("umem.chainer.resume.saver.FileOperations", SlowDisk)
    model = run_once(network())
    wanted = {name: p.array.copy() for name, p in model.namedparams()}
    umem.chainer.save_run(tmp_path / "run", step=1, model=model)
    for parameter in model.params():
        parameter.array[...] = 0
    go_on.set()
    umem.chainer.resume_run(tmp_path / "run", model=model)
    for name, parameter in model.namedparams():
        np.testing.assert_array_equal(parameter.array, wanted[name])


def test_a_disk_that_goes_away_is_told_at_the_next_snapshot(tmp_path: Path) -> None:
    run = trainer(tmp_path, 12)

    def take_away(trainer: Any) -> None:
        (tmp_path / "snapshots").rename(tmp_path / "gone")  # at once, whoever writes to it

    run.extend(take_away, trigger=(7, "iteration"), name="take away")
    # Where the writer is just then removing an old one, it says that of it.
    with pytest.raises(FileError, match=r"there is no such file or folder(; it needs .* KiB)?"):
        run.run(show_loop_exception_msg=False)
    assert run.updater.iteration == 10


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"no snapshots can be written to .*/file/run: .*director"):
        umem.chainer.resume_run(tmp_path / "file/run", model=network())


# -- what else is kept -------------------------------------------------------------------------


class Recurrent(chainer.Chain):
    """An LSTM that goes on from its last state, as in truncated backpropagation through time."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.lstm = chainer.links.LSTM(4, 6)
            self.out = chainer.links.Linear(6, 4)

    def forward(self, x: Any) -> Any:
        return self.out(self.lstm(x))


def unroll(folder: Path, steps: int) -> list[float]:
    np.random.seed(0)
    model = Recurrent()
    optimizer = chainer.optimizers.Adam().setup(model)
    x = np.random.rand(30, 2, 4).astype(np.float32)
    done, found = umem.chainer.resume_run(folder, model=model, optimizer=optimizer), []
    for step in range(done.step, steps):
        loss = chainer.functions.mean_squared_error(model(x[step]), x[step + 1])
        model.cleargrads()
        loss.backward()
        loss.unchain_backward()
        optimizer.update()
        found.append(float(loss.array))
        if step % 4 == 3:
            umem.chainer.save_run(folder, model=model, optimizer=optimizer)
    return found


def test_the_state_of_a_recurrent_link_goes_on(tmp_path: Path) -> None:
    whole = unroll(tmp_path / "whole", 14)
    first = unroll(tmp_path / "parts", 10)
    assert first[:8] + unroll(tmp_path / "parts", 14) == whole


def test_a_graph_behind_the_state_is_warned_of(tmp_path: Path) -> None:
    model = Recurrent()
    model(np.ones((2, 4), np.float32))
    with pytest.warns(SnapshotWarning, match="/lstm keeps c, h with a graph, which"):
        umem.chainer.save_run(tmp_path, step=1, model=model)


def test_generators_of_every_kind_go_on(tmp_path: Path) -> None:
    def generators() -> dict[str, Any]:
        return {
            "old": np.random.RandomState(1),
            "new": np.random.default_rng(2),
            "philox": np.random.Generator(np.random.Philox(3)),
            "python": random.Random(4),
        }

    def draw(them: dict[str, Any]) -> list[float]:
        return [them["old"].randn(), them["new"].random(), them["philox"].normal(),
                them["python"].gauss(0, 1), np.random.rand(), random.random()]  # fmt: skip

    first = generators()
    draw(first)
    umem.chainer.save_run(tmp_path, step=1, **first)
    wanted = [draw(first) for _ in range(3)]
    second = generators()
    umem.chainer.resume_run(tmp_path, **second)
    assert [draw(second) for _ in range(3)] == wanted


def test_values_come_back_as_they_were(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "best": 0.1, "none": None, "inf": float("-inf"), "names": ["a", ("b", 2)],
        "found": {"x": np.float32(0.1), "n": np.int64(3)}, "yes": True,
    }  # fmt: skip
    umem.chainer.save_run(tmp_path, step=4, **values)
    done = umem.chainer.resume_run(tmp_path)
    assert done.step == 4 and done.values == values
    assert type(done.values["found"]["x"]) is np.float32
    assert np.isnan(umem.chainer.resume_run(save_nan(tmp_path)).values["nan"])


def save_nan(folder: Path) -> Path:
    umem.chainer.save_run(folder, step=5, nan=float("nan"))
    return folder


def test_what_an_optimizer_trains_is_saved_with_it(tmp_path: Path) -> None:
    model = run_once(network())
    optimizer = chainer.optimizers.SGD().setup(model)
    wanted = [p.array.copy() for p in model.params()]
    umem.chainer.save_run(tmp_path, optimizer=optimizer)
    for parameter in model.params():
        parameter.array[...] = 0
    umem.chainer.resume_run(tmp_path, optimizer=optimizer)
    for parameter, array in zip(model.params(), wanted, strict=True):
        np.testing.assert_array_equal(parameter.array, array)


def test_no_thread_and_no_file_stays_open(tmp_path: Path) -> None:
    train(tmp_path, 10)
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    train(tmp_path, 60, every=2)
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


def test_the_hyperparameters_that_a_schedule_left_go_on(tmp_path: Path) -> None:
    def rate(updates: int, folder: str) -> float:
        run = trainer(tmp_path / folder, updates)
        run.run()
        return float(run.updater.get_optimizer("main").alpha)

    whole = rate(14, "whole")
    rate(8, "parts")
    assert rate(14, "parts") == whole < 0.001


def test_a_parameter_that_never_got_its_shape_is_none_of_ours(tmp_path: Path) -> None:
    def train_some(updates: int) -> list[float]:
        np.random.seed(0)
        model, found = network(), []
        model.add_link("unused", chainer.links.Linear(None, 3))
        optimizer = chainer.optimizers.Adam().setup(model)
        done = umem.chainer.resume_run(tmp_path, model=model, optimizer=optimizer)
        for _ in range(done.step, updates):
            optimizer.update(model, *chainer.dataset.concat_examples(dataset()[:16]))
            found.append(float(model.loss.array))
        umem.chainer.save_run(tmp_path, model=model, optimizer=optimizer, wait=True)
        return found

    train_some(3)
    assert len(train_some(5)) == 2


@pytest.mark.parametrize("other", ["MomentumSGD", "SGD", "AdaDelta"])
def test_states_of_another_rule_are_refused(other: str, tmp_path: Path) -> None:
    train(tmp_path, 6)
    with pytest.raises(SnapshotError, match=r"/W' is updated by AdamRule there and by .*Rule here"):
        train(tmp_path, 8, optimizer=getattr(chainer.optimizers, other))


def test_a_rule_of_8_bits_takes_what_its_plain_one_left(tmp_path: Path) -> None:
    train(tmp_path, 6)
    assert len(train(tmp_path, 8, optimizer=umem.chainer.optimizers.Adam8bit)) == 8


def save(folder: Path, updates: int) -> None:
    umem.chainer.save_run(folder, step=updates, wait=True, model=run_once(network()))


def test_a_run_that_was_not_resumed_leaves_a_later_one_alone(tmp_path: Path) -> None:
    save(tmp_path, 30)
    with pytest.raises(StateError, match=r"step 5 cannot be saved: .* has step 30 of a run"):
        save(tmp_path, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.lock", "step-30"]
    umem.chainer.resume_run(tmp_path, model=run_once(network()))
    save(tmp_path, 30)
    save(tmp_path, 31)


def test_after_a_torn_one_that_was_passed_over_earlier_steps_are_saved(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 15)
    (tmp_path / "step-15/values.json").unlink()
    with pytest.warns(SnapshotWarning, match="taking step-10"):
        umem.chainer.resume_run(tmp_path, model=run_once(network()))
    save(tmp_path, 12)
    assert (tmp_path / "step-12").is_dir()


def test_parts_that_would_overwrite_each_other_are_refused(tmp_path: Path) -> None:
    first, second = L.Linear(2, 2), L.Linear(2, 2)
    parts = {"a": chainer.Sequential(first), "a/0": second}
    with pytest.raises(UnsupportedError, match="two values would be saved as 'parts/a/0/"):
        umem.chainer.save_run(tmp_path, step=1, **parts)
    with pytest.raises(UnsupportedError, match="two values would be saved as 'values/x'"):
        umem.chainer.save_run(tmp_path, step=1, **{"x": 1, "/x": 2})


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_data_set_of_another_length_is_refused(shuffle: bool, tmp_path: Path) -> None:
    def batches(count: int) -> Any:
        return chainer.iterators.SerialIterator(dataset(count), 16, shuffle=shuffle)

    umem.chainer.save_run(tmp_path, step=1, data=batches(100))
    with pytest.raises(SnapshotError, match=r"100.* there and .*30"):
        umem.chainer.resume_run(tmp_path, data=batches(30))


@pytest.mark.parametrize(
    "every", [2.5, "3", None, (0, "epoch"), (5,), (1, "x"), (float("nan"), "epoch")]
)
def test_triggers_that_are_none_are_refused(every: Any) -> None:
    with pytest.raises(SizeError, match="every must be a whole number from 1 on, or a trigger"):
        umem.chainer.Snapshot(every=every)


def test_a_whole_number_of_numpy_is_one() -> None:
    assert umem.chainer.Snapshot(every=np.int64(4)).trigger == (4, "iteration")


def test_an_interrupt_in_the_last_arrays_waits_until_all_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [L.Linear(3, 4), L.Linear(3, 4)]
    umem.chainer.save_run(tmp_path, step=1, wait=True, model=models[0])
    writes = iter(range(100))

    def interrupted(array: Any, content: Any) -> None:
        if next(writes) == 1:
            raise KeyboardInterrupt
        np.copyto(array, content)

    monkeypatch.setattr(collecting, "upload", interrupted)
    with pytest.raises(KeyboardInterrupt):
        umem.chainer.resume_run(tmp_path, model=models[1])
    assert next(writes) == 4  # one, the interrupt, and then both
    for one, other in zip(*(model.params() for model in models), strict=True):
        assert (one.array == other.array).all()
