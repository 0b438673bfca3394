"""Offload on a GPU: arrays go to pinned memory and come back, and not a bit changes."""

from __future__ import annotations

import gc
import os
import signal
import threading
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
from gpu_fixtures import OnGpu

import umem
import umem.chainer
from umem._common import host
from umem.chainer.offload import mover, offloaded_pass
from umem.chainer.saved.tiers import pinned
from umem.errors import OffloadWarning, StateError

import chainer  # isort: skip
import chainer.functions as F  # isort: skip
import chainer.links as L  # isort: skip

pytestmark = pytest.mark.gpu
MIB = 1 << 20
either = pytest.mark.parametrize(
    "block",
    [
        pytest.param(umem.chainer.Offload, id="Offload"),
        pytest.param(lambda: umem.chainer.Recompute("min", offload=True), id="Recompute"),
    ],
)
ROWS = 1 << 11
"""An activation has 128 KiB; a test takes less than 100 MiB."""


def steps(cupy, count=3):
    """Train a small network; return the bits of its parameters and losses."""
    rng = np.random.default_rng(0)
    np.random.seed(0)
    cupy.random.seed(0)
    layers = [layer for _ in range(6) for layer in (L.Linear(16, 16), F.relu, L.Linear(16, 16))]
    model = chainer.Sequential(*layers, L.Linear(16, 4))
    model.to_device("@cupy:0")
    x = cupy.asarray(rng.standard_normal((ROWS, 16)).astype("f4"))
    t = cupy.asarray(rng.integers(0, 4, ROWS).astype("i4"))
    optimizer = chainer.optimizers.MomentumSGD().setup(model)
    found = []
    for _ in range(count):
        loss = F.softmax_cross_entropy(F.dropout(model(x), 0.1), t)
        model.cleargrads()
        loss.backward()
        optimizer.update()
        found.append(loss.array)
    arrays = [*found, *(parameter.array for parameter in model.params())]
    return b"".join(cupy.asnumpy(array).tobytes() for array in arrays)


def sent_of(tier, array):
    sent = tier.send(array)
    assert sent is not None
    return sent


class TestPinnedMemory(OnGpu):
    """The tier itself."""

    @pytest.fixture
    def tier(self, cupy):
        tier = pinned.PinnedTier()
        yield tier
        tier.close()

    def test_what_was_sent_comes_back_as_it_was(self, tier, cupy):
        for array in (
            cupy.arange(1 << 16, dtype="f4").reshape(4, -1),
            cupy.asfortranarray(cupy.arange(1 << 16).reshape(16, -1)),
            cupy.arange(1 << 17, dtype="f2").reshape(4, 8, -1).transpose(2, 0, 1),
            cupy.arange(1 << 17) % 3 == 0,
        ):
            shape, strides, dtype = array.shape, array.strides, array.dtype
            before = cupy.asnumpy(array)
            sent = sent_of(tier, array)
            del array
            sent.release()
            found = sent.array()
            assert (found.shape, found.strides, found.dtype) == (shape, strides, dtype)
            np.testing.assert_array_equal(cupy.asnumpy(found), before)
            again = sent.array()
            assert again.data.ptr != found.data.ptr
            np.testing.assert_array_equal(cupy.asnumpy(again), before)
            sent.forget()
            sent.forget()
            with pytest.raises(StateError, match="forgotten"):
                sent.array()
        assert tier.fetched_bytes == 2 * tier.sent_bytes > 0

    def test_it_is_gone_when_its_copy_has_ended_and_then_holds_nothing(self, tier, cupy):
        sent = sent_of(tier, cupy.zeros(MIB, "i1"))
        cupy.cuda.Device().synchronize()
        assert sent.is_gone()
        pool = cupy.get_default_memory_pool()
        gc.collect()
        before = pool.used_bytes()
        sent.release()
        assert sent.is_gone() and pool.used_bytes() == before - MIB

    def test_what_was_not_let_go_is_the_array_itself(self, tier, cupy):
        array = cupy.ones(MIB, "i1")
        sent = sent_of(tier, array)
        sent.fetch()
        assert sent.array() is array
        assert tier.fetched_bytes == 0

    def test_memory_is_pinned_in_few_pieces_and_used_again(self, tier, cupy, monkeypatch):
        monkeypatch.setattr(pinned, "FIRST_BYTES", 2 * MIB)
        made = []

        class Counted(cupy.cuda.PinnedMemory):
            def __init__(self, nbytes):
                made.append(nbytes)
                super().__init__(nbytes)

        monkeypatch.setattr(cupy.cuda, "PinnedMemory", Counted)
        for _ in range(3):
            sent = [sent_of(tier, cupy.full(MIB, number, "i1")) for number in range(9)]
            for one in sent:
                one.release()
            assert [int(one.array()[-1]) for one in sent] == list(range(9))
            for one in sent:
                one.forget()
        assert made == [2 * MIB, 2 * MIB, 4 * MIB, 8 * MIB]

    def test_what_the_limit_has_no_room_for_stays_without_a_word(self, cupy):
        tier = pinned.PinnedTier(2 * MIB)
        sent = [tier.send(cupy.zeros(MIB, "i1")) for _ in range(3)]
        assert [one is None for one in sent] == [False, False, True]
        sent[0].forget()
        assert tier.send(cupy.zeros(MIB, "i1")) is not None
        tier.close()

    def test_memory_that_the_host_refuses_is_said_once_and_arrays_stay(
        self, tier, cupy, monkeypatch
    ):
        asked = []

        def refuse(nbytes):
            asked.append(nbytes)
            raise cupy.cuda.runtime.CUDARuntimeError(2)

        monkeypatch.setattr(cupy.cuda, "PinnedMemory", refuse)
        with pytest.warns(OffloadWarning, match=r"gives no 1\.0 MiB more .*stay on the GPU"):
            assert tier.send(cupy.zeros(MIB, "i1")) is None
        count = len(asked)
        assert asked[0] == pinned.FIRST_BYTES and asked[-1] == MIB
        assert tier.send(cupy.zeros(MIB, "i1")) is None
        assert len(asked) == count

    def test_a_fault_of_an_earlier_kernel_is_no_want_of_pinned_memory(
        self, tier, cupy, monkeypatch
    ):
        def fault(nbytes):
            raise cupy.cuda.runtime.CUDARuntimeError(700)

        monkeypatch.setattr(cupy.cuda, "PinnedMemory", fault)
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="cudaErrorIllegalAddress"):
            tier.send(cupy.zeros(MIB, "i1"))

    def test_no_more_is_pinned_than_the_host_can_spare(self, tier, cupy, monkeypatch):
        left = [10 * MIB]
        for module in (pinned, host):
            monkeypatch.setattr(module, "available_bytes", lambda: left[0])
        first = sent_of(tier, cupy.zeros(4 * MIB, "i1"))
        left[0] -= 5 * MIB  # half of it, in one slab
        rest = sent_of(tier, cupy.zeros(MIB, "i1"))
        with pytest.warns(OffloadWarning, match=r"of 5\.0 MiB that are available; 5\.0 MiB are"):
            assert tier.send(cupy.zeros(MIB, "i1")) is None
        assert first.nbytes == 4 * rest.nbytes

    def test_what_is_dropped_in_the_middle_of_its_copies_does_no_harm(self, tier, cupy):
        for turn in range(8):
            sent = sent_of(tier, cupy.full(MIB, turn, "i1"))
            sent.release()
            sent.fetch()
            del sent
            new = cupy.full(MIB, 50 + turn, "i1")
            assert int(new.sum()) == (50 + turn) * MIB

    def test_nothing_is_sent_and_nothing_comes_back_during_a_capture(self, tier, cupy):
        before = sent_of(tier, cupy.ones(MIB, "i1"))
        before.release()
        x = cupy.zeros(MIB, "i1")
        stream = cupy.cuda.Stream(non_blocking=True)
        x += 1
        cupy.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            x += 1
            assert tier.send(x) is None
            with pytest.raises(StateError, match="while the stream is captured"):
                before.array()
            stream.end_capture()
        assert int(before.array().sum()) == MIB

    def test_a_forward_is_captured_after_one_whose_tensors_are_being_sent(self, cupy):
        layers = [layer for _ in range(6) for layer in (L.Linear(16, 16), F.relu)]
        model = chainer.Sequential(*layers)
        model.to_device("@cupy:0")
        x = cupy.ones((8 * ROWS, 16), "f4")
        stream = cupy.cuda.Stream(non_blocking=True)

        def gradient(y):
            model.cleargrads()
            F.sum(y).backward()
            return cupy.asnumpy(model[0].W.grad).tobytes()

        cupy.cuda.Device().synchronize()
        with stream:
            plain = gradient(model(x))
        with stream, umem.chainer.Offload() as offload:
            warm = model(x)
            before = offload.tiers()[0].sent_bytes
            stream.begin_capture()
            captured = model(x)
            gc.collect()
            stream.end_capture()
            assert before and offload.tiers()[0].sent_bytes == before
            assert gradient(warm) == plain
        del captured

    def test_another_threads_default_stream_is_another_stream(self, tier, cupy, monkeypatch):
        """The handle of the per-thread default stream is 2 in every thread."""
        waits = []

        class Event(cupy.cuda.Event):
            def synchronize(self):
                waits.append("host")
                super().synchronize()

        monkeypatch.setattr(cupy.cuda, "Event", Event)
        with cupy.cuda.Stream.ptds:
            one, other = (sent_of(tier, cupy.full(MIB, 7, "i1")) for _ in range(2))
            one.release()
            assert not waits

        def work():
            with cupy.cuda.Stream.ptds:
                other.release()
                back = one.array()
                waits.append(int(back.sum()) // MIB)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert waits == ["host", 7]

    def test_a_forked_process_is_told_and_waits_for_nothing(self, tier, cupy):
        kept, gone = (sent_of(tier, cupy.ones(MIB, "i1")) for _ in range(2))
        gone.release()
        other = cupy.ones(MIB, "i1")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # threads and fork
            child = os.fork()
        if not child:
            signal.alarm(30)
            try:
                assert tier.send(other) is None
                assert not kept.is_gone()
                kept.release()
                for sent in (kept, gone):
                    with pytest.raises(StateError, match="before this process was forked"):
                        sent.array()
                    sent.forget()
                tier.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert int(gone.array().sum()) == int(kept.array().sum()) == MIB

    def test_closing_leaves_what_was_sent_to_whoever_holds_it(self, cupy):
        tier = pinned.PinnedTier()
        sent = sent_of(tier, cupy.arange(MIB // 4, dtype="f4"))
        sent.release()
        tier.close()
        tier.close()
        assert float(sent.array()[-1]) == MIB // 4 - 1
        sent.forget()


class TestOffload(OnGpu):
    """Chainer's training with it: a few copies at a time, so that somebody has to wait."""

    @pytest.fixture(autouse=True)
    def little_at_a_time(self, monkeypatch):
        monkeypatch.setattr(mover, "IN_FLIGHT_BYTES", 256 << 10)
        monkeypatch.setattr(offloaded_pass, "AHEAD_BYTES", 256 << 10)

    def test_not_a_bit_changes(self, cupy):
        plain = steps(cupy)
        with umem.chainer.Offload() as moves:
            assert steps(cupy) == plain
            (tier,) = moves.tiers()
        assert tier.fetched_bytes > 3 * MIB, moves.summary()

    def test_on_a_stream_of_the_programs_own(self, cupy):
        plain = steps(cupy)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream, umem.chainer.Offload():
            found = steps(cupy)
        stream.synchronize()
        assert found == plain

    def test_in_managed_memory(self, cupy):
        plain = steps(cupy)
        with umem.managed(), umem.chainer.Offload():
            assert steps(cupy) == plain

    def test_less_is_held_at_most(self, cupy):
        peaks = []
        for block in (nullcontext(), umem.chainer.Offload()):
            with block, umem.statistics() as counted:
                steps(cupy, 2)
            peaks.append(counted.peak_bytes)
        assert peaks[1] < 0.7 * peaks[0], peaks

    @either
    @pytest.mark.parametrize("piece_count", [0, 1])
    def test_without_pinned_memory_it_trains_all_the_same(
        self, cupy, monkeypatch, block, piece_count
    ):
        plain = steps(cupy, 5)
        pin, left = cupy.cuda.PinnedMemory, [True] * piece_count

        def refuse(nbytes):
            if left:
                left.pop()
                return pin(nbytes)
            raise cupy.cuda.runtime.CUDARuntimeError(2)

        monkeypatch.setattr(pinned, "FIRST_BYTES", 128 << 10)
        monkeypatch.setattr(cupy.cuda, "PinnedMemory", refuse)
        with warnings.catch_warnings(record=True) as said, block():
            warnings.simplefilter("always")
            assert steps(cupy, 5) == plain
        assert [each.category for each in said].count(OffloadWarning) == 1

    @either
    @pytest.mark.parametrize("when", ["forward", "backward"])
    def test_an_exception_in_the_middle_of_a_step_leaves_the_next_one_right(
        self, cupy, when, block
    ):
        class Stop(chainer.FunctionHook):
            def __init__(self):
                self.count = 0

            def check(self, function, *arrays):
                self.count += 1
                if self.count == 12:
                    raise KeyError(function.label)

        setattr(Stop, f"{when}_preprocess", Stop.check)
        plain = steps(cupy, 5)
        with block():
            assert steps(cupy, 5) == plain
            with pytest.raises(KeyError), Stop():
                steps(cupy)
            assert steps(cupy, 5) == plain

    def test_a_recorder_sees_what_goes_and_what_comes(self, cupy):
        with umem.chainer.Offload() as moves, umem.record() as recorder:
            steps(cupy, 2)
            (tier,) = moves.tiers()
        hints = [event for event in recorder.trace.events if isinstance(event, umem.trace.Hint)]
        actions = [hint.action for hint in hints]
        assert actions.count("send") * 128 << 10 == tier.sent_bytes
        assert actions.count("fetch") * 128 << 10 == tier.fetched_bytes
        copies = [op for op in recorder.trace.ops if op.name in ("get", "memcpy")]
        assert all(op.traffic_bytes < 64 << 10 for op in copies), "parameters, at the end"

    @pytest.mark.parametrize("way", ["as_strided", "address"])
    def test_what_the_program_holds_by_its_address_is_seen_as_it_is(self, cupy, way):
        def gradient():
            x = chainer.Variable(cupy.ones((ROWS, 16), "f4"))
            y = F.tanh(x)
            if way == "address":
                alias = cupy.ndarray(y.shape, "f4", y.array.data + 0)
            else:
                alias = cupy.lib.stride_tricks.as_strided(y.array, y.shape, y.array.strides)
            for _ in range(6):
                y = F.tanh(y)
            alias[...] = 0.5  # the first tanh's output, on which its gradient depends
            y.grad = cupy.ones_like(y.array)
            y.backward()
            return cupy.asnumpy(x.grad)

        plain = gradient()
        with umem.chainer.Offload() as offload:
            assert np.array_equal(gradient(), plain)
        assert offload.tiers()[0].sent_bytes > 0


class TestPassesWithoutAPlan(OnGpu):
    """Graphs that never come back, under a budget that they do not fit."""

    def test_with_offload_what_they_recompute_is_the_same_to_the_bit(self, cupy):
        def train(block):
            np.random.seed(0)
            layers = chainer.ChainList(*(L.Linear(64, 64) for _ in range(4)))
            layers.to_device("@cupy:0")
            optimizer = chainer.optimizers.SGD().setup(layers)
            rng, losses = np.random.default_rng(0), []
            with block:
                for length in (9, 13, 11, 24, 21, 26):
                    h = chainer.Variable(cupy.asarray(rng.standard_normal((512, 64), "f4")))
                    for place in range(length):
                        h = F.tanh(layers[place % 4](h))
                    loss = F.mean(h**2)
                    layers.cleargrads()
                    loss.backward()
                    optimizer.update()
                    losses.append(loss.array)
                    del h, loss
            arrays = [*losses, *(parameter.array for parameter in layers.params())]
            return b"".join(cupy.asnumpy(array).tobytes() for array in arrays)

        memory = umem.chainer.Recompute("2MiB", offload=True)  # a value has 128 KiB
        assert train(memory) == train(nullcontext())
        assert "call by call" in memory.report()
