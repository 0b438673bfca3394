"""The tier below a virtual GPU: what comes back is what went, and the model says what it took."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import umem
import umem.chainer
from umem.chainer.offload import mover, offloaded_pass
from umem.chainer.saved.tiers.simulated import SimulatedTier
from umem.cli import main as umem_command
from umem.errors import OutOfMemoryError, StateError
from umem.trace import Alloc, Free, Hint
from umem.units import MIB

import chainer  # isort: skip
import chainer.functions as F  # isort: skip
import chainer.links as L  # isort: skip


def made(memory: Any, value: int = 0) -> Any:
    return memory.xp.arange(4 * MIB // 4, dtype="f4") + value


def bits(array: Any) -> bytes:
    return np.ascontiguousarray(array.view(np.ndarray)).tobytes()


def test_what_was_sent_comes_back_as_it_was() -> None:
    with umem.virtual_gpu("t4", vram="64MiB") as gpu:
        tier = SimulatedTier()
        for array in (
            np.arange(1 << 20, dtype="f4").reshape(4, -1),
            np.asfortranarray(np.arange(1 << 20).reshape(16, -1)),
            np.arange(1 << 20, dtype="f2").reshape(4, 8, -1).transpose(2, 0, 1),
            made(gpu),
        ):
            kind, shape, strides, before = type(array), array.shape, array.strides, bits(array)
            sent = tier.send(array)
            assert sent is not None and sent.nbytes == array.nbytes
            del array
            sent.release()
            found = sent.array()
            assert type(found) is kind and bits(found) == before
            assert (found.shape, found.strides) == (shape, strides)
            sent.forget()
            sent.forget()
        assert tier.held_bytes == 0 and tier.sent_bytes == tier.fetched_bytes > 0


def test_the_model_has_the_room_back_and_the_bytes_on_their_way() -> None:
    with umem.virtual_gpu("t4", vram="10MiB") as gpu:
        tier, sent = SimulatedTier(), []
        for value in range(6):
            array = made(gpu, value)
            one = tier.send(array)
            assert one is not None
            del array
            one.release()
            sent.append(one)
        figures = gpu.figures
        assert figures.sent_bytes == 24 * MIB and figures.fetched_bytes == 0
        assert figures.peak_bytes <= 10 * MIB, "six arrays of 4 MiB, never more than two at once"
        for value, one in enumerate(sent):
            found = one.array()
            assert bits(found) == bits(np.arange(MIB, dtype="f4") + value)
            del found
        assert gpu.figures.fetched_bytes == 24 * MIB
        bound = 24 * MIB / gpu.spec.host_in_bandwidth + 24 * MIB / gpu.spec.host_out_bandwidth
        assert gpu.figures.seconds >= bound


def test_an_array_on_its_way_is_gone_once_the_host_has_come_that_far() -> None:
    with umem.virtual_gpu("t4", vram="64MiB") as gpu:
        sent = SimulatedTier().send(made(gpu))
        assert sent is not None and not sent.is_gone()
        gpu.synchronize()
        assert sent.is_gone()


def test_an_array_that_was_not_let_go_is_still_the_same() -> None:
    with umem.virtual_gpu("t4", vram="64MiB") as gpu:
        array = made(gpu)
        sent = SimulatedTier().send(array)
        assert sent is not None
        sent.fetch()
        assert sent.array() is array
        assert gpu.figures.fetched_bytes == 0


def test_recorders_hear_the_array_come_again_as_what_it_was() -> None:
    with umem.virtual_gpu("t4", vram="64MiB") as gpu, umem.record() as recorder:
        array = made(gpu)
        sent = SimulatedTier().send(array)
        assert sent is not None
        del array
        sent.release()
        found = sent.array()
        gpu.xp.sqrt(found)
    events = recorder.trace.events
    actions = [e.action for e in events if isinstance(e, Hint)]
    assert actions == ["send", "fetch"]
    send, fetch = (e for e in events if isinstance(e, Hint))
    allocs = {e.tensor: e for e in events if isinstance(e, Alloc)}
    old, new = allocs[send.accesses[0].tensor], allocs[fetch.accesses[0].tensor]
    assert old[1:] == new[1:] and not new.uploaded
    assert events.index(send) < events.index(Free(old.tensor)) < events.index(new)
    assert umem.replay(recorder.trace, "t4").figures.sent_bytes == 4 * MIB


def test_an_array_for_which_there_is_no_room_still_lies_below() -> None:
    with umem.virtual_gpu("t4", vram="10MiB") as gpu:
        array = made(gpu)
        before = bits(array)
        sent = SimulatedTier().send(array)
        assert sent is not None
        del array
        sent.release()
        full = gpu.xp.zeros(9 * MIB, "i1")
        with pytest.raises(OutOfMemoryError):
            sent.fetch()
        del full
        assert bits(sent.array()) == before


def test_what_the_limit_has_no_room_for_stays() -> None:
    with umem.virtual_gpu("t4", vram="64MiB") as gpu:
        tier = SimulatedTier(6 * MIB)
        first = tier.send(made(gpu))
        assert first is not None and tier.send(made(gpu)) is None
        first.forget()
        assert tier.send(made(gpu)) is not None


def test_there_is_no_such_tier_outside_of_a_virtual_gpu() -> None:
    with pytest.raises(StateError, match=r"inside umem\.virtual_gpu"):
        SimulatedTier()


# -- training on a virtual GPU, and what is made of its trace ------------------------------------


def trained(block: Any, vram: str, rows: int = 1 << 14) -> tuple[bytes, Any]:
    """The bits of three steps of a small network, and what the virtual GPU counted."""
    np.random.seed(0)
    layers = [layer for _ in range(8) for layer in (L.Linear(64, 64), F.relu)]
    model = chainer.Sequential(*layers, L.Linear(64, 4))
    rng = np.random.default_rng(0)
    x, t = rng.standard_normal((rows, 64)).astype("f4"), rng.integers(0, 4, rows).astype("i4")
    optimizer = chainer.optimizers.MomentumSGD().setup(model)
    losses = []
    with umem.virtual_gpu("t4", vram=vram) as gpu, block:
        for _ in range(3):
            loss = F.softmax_cross_entropy(model(x), t)
            model.cleargrads()
            loss.backward()
            optimizer.update()
            losses.append(loss.array.copy())
    arrays = [*losses, *(parameter.array for parameter in model.params())]
    return b"".join(array.tobytes() for array in arrays), gpu.figures


@pytest.fixture
def little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover, "IN_FLIGHT_BYTES", 2 * MIB)
    monkeypatch.setattr(offloaded_pass, "AHEAD_BYTES", 2 * MIB)


def test_a_step_that_does_not_fit_fits_with_offload_and_has_the_same_bits(
    little_at_a_time: None,
) -> None:
    plain, whole = trained(nullcontext(), "96MiB")
    with pytest.raises(OutOfMemoryError):
        trained(nullcontext(), "48MiB")
    moved, figures = trained(umem.chainer.Offload(), "48MiB")
    assert moved == plain
    assert figures.resident_peak_bytes <= 48 * MIB < whole.resident_peak_bytes
    assert figures.fetched_bytes > 0 and figures.migrated_bytes == 0
    out = figures.sent_bytes / umem._common.specs.gpu_spec("t4").host_out_bandwidth
    assert figures.seconds >= max(figures.compute_seconds, out)
    assert figures.stall_seconds > whole.stall_seconds


def test_a_trace_with_copies_can_be_reported_and_replayed(
    little_at_a_time: None, tmp_path: Path
) -> None:
    recorder = umem.record()

    @contextmanager
    def both() -> Iterator[None]:
        with umem.chainer.Offload(), recorder:
            yield

    trained(both(), "96MiB", 1 << 12)
    trace = recorder.trace
    assert {event.action for event in trace.events if isinstance(event, Hint)} == {"send", "fetch"}
    path = str(trace.save(tmp_path / "step.gz"))
    run = CliRunner().invoke
    outputs = ("--html", "page.html"), ("--export", "perfetto", "trace.json"), ("--json",)
    for options in ((), *outputs):
        given = [str(tmp_path / each) if "." in each else each for each in options]
        assert run(umem_command, ["report", path, *given]).exit_code == 0
    assert run(umem_command, ["report", path, path]).exit_code == 0
    replay = umem.replay(trace, "t4")
    assert replay.fits and replay.figures.sent_bytes
