"""`Recompute` with offload where something goes wrong: what is said, and what is left."""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_programs import FailingHook
from recompute_cases import train
from tiers import MemoryTier

from umem.planner import Link

import umem.chainer  # isort: skip

from umem.chainer.offload import mover
from umem.chainer.recompute import offloaded
from umem.chainer.recompute.offloaded import OffloadTarget
from umem.chainer.saved.tiers import file_tier
from umem.errors import FileError, OffloadWarning, RecomputeError, StateError

import chainer  # isort: skip
import chainer.functions as F  # isort: skip
import chainer.links as L  # isort: skip

pytestmark = pytest.mark.thorough

PASSES = 6
"""The first two learn, the third measures its peak."""
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
Blocks = Callable[[Any], Any]
either = pytest.mark.parametrize(
    "block",
    [
        pytest.param(umem.chainer.Offload, id="Offload"),
        pytest.param(lambda to: umem.chainer.Recompute("min", offload=to), id="Recompute"),
    ],
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on a fast link, whatever it is on."""
    monkeypatch.setattr("umem._common.files.IN_MEMORY", ())
    monkeypatch.setattr(offloaded, "link_of", lambda tier, array: Link(1e12, 1e12))
    return tmp_path


class Training:
    """A network, of which at the least of its memory something is moved."""

    def __init__(self) -> None:
        np.random.seed(0)
        self.x, self.t = np.random.rand(64, 512).astype("f"), np.zeros(64, "i")
        layers = [one for _ in range(6) for one in (L.Linear(512, 512), F.sigmoid)]
        self.model = chainer.Sequential(*layers, L.Linear(512, 4))
        self.plain = self.gradients()

    def loss(self, watch: Callable[[int, Any], None] = lambda number, h: None) -> Any:
        """Go forward; somebody may watch what each layer makes."""
        h = self.x
        for number, layer in enumerate(self.model):
            h = layer(h)
            watch(number, h)
        return F.softmax_cross_entropy(h, self.t)

    def gradients(self, loss: Any = None) -> list[bytes]:
        loss = self.loss() if loss is None else loss
        self.model.cleargrads()
        loss.backward()
        return [parameter.grad.tobytes() for parameter in self.model.params()]

    def is_exact(self) -> bool:
        return self.gradients() == self.plain


def moves(memory: Any) -> bool:
    return any(row.fate == "offloaded" for row in memory.fates())


# -- the folder ----------------------------------------------------------------------------------


def unwritable(*args: Any, **kwargs: Any) -> Any:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@either
@pytest.mark.parametrize(
    "name, said",
    [
        ("none", "is not a folder: create it, or name another"),
        ("file", "is not a folder"),
        ("nul\0", "is not a folder"),
        ("tmpfs", "is tmpfs, which is in memory"),
        ("unwritable", "cannot write to .*ermission denied; name another folder"),
    ],
)
def test_a_bad_folder_is_refused_on_entering(
    name: str, said: str, block: Blocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for folder in ("tmpfs", "unwritable"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr("umem._common.files.file_system", lambda path: path.name)
    if name == "unwritable":
        monkeypatch.setattr("tempfile.TemporaryFile", unwritable)
    before = sorted(tmp_path.rglob("*"))
    bad = block(tmp_path / name)
    for _ in range(2):
        with pytest.raises(FileError, match=said):
            bad.__enter__()
    assert sorted(tmp_path.rglob("*")) == before
    with umem.chainer.Recompute("min"):  # nothing is on
        assert train("mlp", steps=3)


@either
def test_numpy_needs_a_folder(block: Blocks) -> None:
    where: Any = None if block is umem.chainer.Offload else True
    with pytest.raises(StateError, match="name a folder on a disk"):
        block(where).__enter__()
    with umem.chainer.Recompute("min"):
        pass


def test_on_a_virtual_gpu_that_is_entered_later_nothing_goes_to_the_folder(folder: Path) -> None:
    training = Training()
    with umem.chainer.Recompute("min", offload=folder) as memory, umem.virtual_gpu("t4") as gpu:
        for _ in range(PASSES):
            assert training.is_exact()
        assert moves(memory)
        assert gpu.figures.sent_bytes > 0


def test_a_folder_that_vanishes_does_not_matter_to_what_is_open(folder: Path) -> None:
    training, scratch = Training(), folder / "scratch"
    scratch.mkdir()
    memory = umem.chainer.Recompute("min", offload=scratch)
    with memory:
        for number in range(PASSES):
            if number == 3:
                scratch.rmdir()  # it is empty: the file has no name
            assert training.is_exact()
        assert moves(memory)
    with pytest.raises(FileError, match="is not a folder"):
        memory.__enter__()
    assert training.is_exact()


def refuse(*args: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("how", ["room", "write"])
def test_a_folder_that_fills_up_is_said_once_and_the_rest_stays(
    how: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, left, write = Training(), [1 << 40] * 2, os.pwrite
    if how == "room":
        monkeypatch.setattr(file_tier, "free_bytes", lambda handle: left.pop() if left else 0)
    else:
        monkeypatch.setattr(
            file_tier.os, "pwrite", lambda *args: (write if left.pop() else refuse)(*args)
        )
        left[:0] = [0] * 1000
    with pytest.warns(OffloadWarning, match="stays in memory") as said:
        with umem.chainer.Recompute("min", offload=folder) as memory:
            for _ in range(PASSES):
                assert training.is_exact()
            assert moves(memory)
    assert [each.category for each in said].count(OffloadWarning) == 1


# -- the program ---------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("count", [0, 3, 7, 13])
def test_after_an_exception_in_a_step_the_next_is_exact_and_nothing_stays_below(
    backward: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, training = MemoryTier(), Training()
    monkeypatch.setattr(offloaded, "open_tier", lambda array, where: tier)
    monkeypatch.setattr(offloaded, "link_of", lambda tier, array: Link(1e12, 1e12))
    with umem.chainer.Recompute("min", offload=True) as memory:
        for _ in range(PASSES):
            assert training.is_exact()
        assert moves(memory)
        for _ in range(2):
            with pytest.raises(ArithmeticError), FailingHook(count, backward):
                training.gradients()
            gc.collect()
            assert training.is_exact()
            gc.collect()
            assert not tier.below
    assert tier.is_closed


def test_an_array_that_is_edited_is_found_in_debug_mode(folder: Path) -> None:
    training = Training()
    held: list[Any] = []

    def hold(number: int, h: Any) -> None:
        if number % 2:
            held.append(h)

    with umem.chainer.Recompute("min", offload=folder, debug=True) as memory:
        for _ in range(PASSES):
            assert training.is_exact()
        assert moves(memory)
        loss = training.loss(hold)
        held[1].array[...] = 0
        with pytest.raises(RecomputeError, match="was edited in place between forward and back"):
            training.gradients(loss)
        held.clear()
        del loss  # the block brings back what graphs that are alive need
        assert training.is_exact()


def test_what_was_moved_comes_back_as_forward_made_it(folder: Path) -> None:
    training = Training()
    held: list[Any] = []
    with umem.chainer.Recompute("min", offload=folder) as memory:
        for _ in range(PASSES):
            assert training.is_exact()
        values = [row for row in memory.fates() if row.what == "value"]
        number = next(i for i, row in enumerate(values) if row.fate == "offloaded")
        loss = training.loss(lambda layer, h: held.append(h.array))
        held[number][...] = 0
        assert training.gradients(loss) == training.plain


# -- processes -----------------------------------------------------------------------------------


def fork_with_time_limit() -> int:
    """Fork; the child may take half a minute."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # threads and fork
        child = os.fork()
    if not child:
        signal.alarm(30)
    return child


def ended_well(child: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def in_child(run: Callable[[], bool]) -> bool:
    """Run in a process that is forked."""
    child = fork_with_time_limit()
    if not child:
        try:
            os._exit(0 if run() else 1)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(2)
    return ended_well(child)


@needs_fork
def test_a_forked_process_that_goes_backward_in_the_block_is_told(folder: Path) -> None:
    training = Training()

    def is_told() -> bool:
        with pytest.raises(StateError, match="before this process was forked, and are its parent"):
            training.gradients(loss)
        return training.is_exact()

    with umem.chainer.Recompute("min", offload=folder) as memory:
        for _ in range(PASSES):
            assert training.is_exact()
        assert moves(memory)
        loss = training.loss()
        assert in_child(is_told)
        assert training.gradients(loss) == training.plain


class Writer:
    """Writes that wait until they are let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.write, self.begun, self.may_end = os.pwrite, threading.Event(), threading.Event()
        self.may_end.set()
        monkeypatch.setattr(file_tier.os, "pwrite", self)

    def __call__(self, *args: Any) -> int:
        self.begun.set()
        self.may_end.wait()
        return self.write(*args)

    def block(self) -> None:
        self.begun.clear()
        self.may_end.clear()


@needs_fork
def test_a_forked_process_never_waits_for_a_write_of_its_parents(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, tier = Writer(monkeypatch), file_tier.FileTier(folder)
    before = tier.send(np.arange(1000.0))
    assert before is not None
    before.release()
    writer.block()
    sent, other = tier.send(np.ones(1000)), tier.send(np.zeros(1000))
    assert sent is not None and other is not None
    writer.begun.wait()

    def is_free() -> bool:
        nonlocal other
        assert not sent.is_gone() and not before.is_gone()
        sent.release()
        assert sent.array().min() == 1  # it was not let go
        with pytest.raises(StateError, match="before this process was forked"):
            before.array()
        other = None
        sent.forget()
        tier.close()
        return True

    assert in_child(is_free)
    writer.may_end.set()
    sent.release()
    assert np.array_equal(sent.array(), np.ones(1000))
    assert np.array_equal(before.array(), np.arange(1000.0))
    tier.close()


@needs_fork
@either
def test_a_fork_during_a_write_leaves_both_processes_exact(
    block: Blocks, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes as the program is about to wait for the write: the child must not."""
    training, writer = Training(), Writer(monkeypatch)
    release, children = file_tier.SentToFile.release, list[int]()

    def fork(sent: Any) -> None:
        if not writer.may_end.is_set() and not children:
            writer.begun.wait()
            children.append(fork_with_time_limit())
            if children[0]:
                writer.may_end.set()
        release(sent)

    monkeypatch.setattr(mover, "IN_FLIGHT_BYTES", 0)
    monkeypatch.setattr(file_tier.SentToFile, "release", fork)
    with block(folder):
        for _ in range(PASSES):
            assert training.is_exact()
        writer.block()
        try:
            loss = training.loss()
            exact = training.gradients(loss) == training.plain
        finally:
            if children == [0]:
                os._exit(0 if exact else 1)
        assert ended_well(children[0])
        assert exact and training.is_exact()


def test_an_error_in_the_block_is_not_hidden_by_memory_that_lacks_at_its_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = OffloadTarget.close

    def full(target: OffloadTarget, calls: Any) -> None:
        close(target, calls)
        raise MemoryError("nothing comes back")

    monkeypatch.setattr(OffloadTarget, "close", full)
    with pytest.raises(ValueError, match="mine"):
        with umem.chainer.Recompute("min", offload=folder):
            assert train("mlp", steps=1)
            raise ValueError("mine")
    with pytest.raises(MemoryError, match="nothing comes back"):
        with umem.chainer.Recompute("min", offload=folder):
            assert train("mlp", steps=1)
    monkeypatch.undo()
    with umem.chainer.Recompute("min"):  # nothing is on
        assert train("mlp", steps=3)
