"""Small programs whose work overlaps on streams: what they compute must not depend on when it runs.

Each returns what it computed, as bytes. Those in `PLANTED` lack a wait, and do depend on it. They
import CuPy when they run, which is the software GPU's by then.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

Program = Callable[[], bytes]
SIZE = 4096


def _cupy() -> Any:
    import cupy

    return cupy


def _host(number: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(number).standard_normal(SIZE).astype("f4")


def _side(cp: Any, blocking: bool = False) -> Any:
    return cp.cuda.Stream(non_blocking=not blocking)


def _pinned(cp: Any, count: int = SIZE) -> np.ndarray[Any, Any]:
    return np.frombuffer(cp.cuda.alloc_pinned_memory(4 * count), "f4", count)


# -- right ---------------------------------------------------------------------------------------


def handed_on(waits: bool = True) -> bytes:
    """One stream computes on what another makes, and hands it back."""
    cp = _cupy()
    one, other, made, used = _side(cp), _side(cp), cp.cuda.Event(), cp.cuda.Event()
    x, total = cp.asarray(_host(0)), cp.zeros(SIZE, "f4")
    cp.cuda.Device().synchronize()
    for _ in range(4):
        with one:
            x *= 1.5
            x += 1
            made.record()
        with other:
            if waits:
                other.wait_event(made)
            total += x
            used.record()
        if waits:
            one.wait_event(used)
    other.synchronize()
    one.synchronize()
    return cp.asnumpy(total).tobytes()


def uploaded_by_turns(waits: bool = True) -> bytes:
    """Two pinned buffers are filled by turns while the other is copied."""
    cp = _cupy()
    stream = _side(cp)
    buffers = [(_pinned(cp), cp.cuda.Event()) for _ in range(2)]
    with stream:
        x, total = cp.empty(SIZE, "f4"), cp.zeros(SIZE, "f4")
        for turn in range(6):
            buffer, copied = buffers[turn % 2]
            if waits and turn >= 2:
                copied.synchronize()
            buffer[:] = _host(turn)
            x.set(buffer)
            copied.record()
            total += x * turn
    stream.synchronize()
    return cp.asnumpy(total).tobytes()


def pageable_memory_changed() -> bytes:
    """Pageable memory is changed as soon as the copy from it has returned."""
    cp = _cupy()
    stream, host = _side(cp), np.empty(SIZE, "f4")
    with stream:
        parts = []
        for turn in range(4):
            host[:] = _host(turn)
            part = cp.empty(SIZE, "f4")
            part.data.copy_from_host_async(host.ctypes.data, host.nbytes, stream)
            parts.append(part)
            host[:] = 0
        total = sum(parts)
    return cp.asnumpy(total, stream=stream).tobytes()


def brought_home(waits: bool = True) -> bytes:
    """Results are copied to pinned memory beside the next operation."""
    cp = _cupy()
    compute, copies = _side(cp), _side(cp)
    places, ready = [_pinned(cp) for _ in range(4)], cp.cuda.Event()
    x = cp.asarray(_host(1))
    cp.cuda.Device().synchronize()
    kept = []
    for place in places:
        with compute:
            kept.append(x * 2 + len(kept))
            ready.record()
        copies.wait_event(ready)
        kept[-1].data.copy_to_host_async(place.ctypes.data, place.nbytes, copies)
    if waits:
        copies.synchronize()
    found = np.concatenate(places)
    cp.cuda.Device().synchronize()
    return found.tobytes()


def implicit_order(blocking: bool = True) -> bytes:
    """Blocking streams and the default stream take turns, without an event."""
    cp = _cupy()
    streams = [_side(cp, blocking) for _ in range(2)]
    x = cp.asarray(_host(2))
    cp.cuda.Device().synchronize()
    for turn in range(4):
        with streams[turn % 2]:
            x += turn
        x *= 2
    found = cp.asnumpy(x)
    cp.cuda.Device().synchronize()
    return found.tobytes()


def memory_reused() -> bytes:
    """Arrays die while their stream still uses them, and the pool hands their memory on."""
    cp = _cupy()
    streams = [_side(cp) for _ in range(3)]
    totals = []
    for number, stream in enumerate(streams):
        with stream:
            total = cp.zeros(SIZE, "f4")
            for turn in range(5):
                total += cp.full(SIZE, turn + number, "f4") * 2
            totals.append(total)
    for stream in streams:
        stream.synchronize()
    return b"".join(cp.asnumpy(total).tobytes() for total in totals)


def products() -> bytes:
    """Library calls: products, sorting and random numbers, on a stream beside another."""
    cp = _cupy()
    stream, other, made = _side(cp), _side(cp), cp.cuda.Event()
    with stream:
        cp.random.seed(7)
        a = cp.asarray(_host(3)).reshape(64, 64) + cp.random.random((64, 64), dtype="f4")
        b = cp.sort(a @ a.T, axis=1)
        made.record()
    with other:
        other.wait_event(made)
        c = (b @ a)[:, ::2].copy()
        norm = float(cp.linalg.norm(c.ravel()))
        c /= norm
        return cp.asnumpy(c, stream=other).tobytes()


def transforms() -> bytes:
    """Library calls with plans, descriptors and workspaces, which are gone when they run."""
    import cupyx.scipy.sparse as sparse

    cp = _cupy()
    stream, other, made = _side(cp), _side(cp), cp.cuda.Event()
    with stream:
        a = cp.asarray(_host(5)).reshape(64, 64)
        spectrum = cp.fft.irfft(cp.fft.rfft(a, axis=1) * 2, axis=1)
        made.record()
    with other:
        other.wait_event(made)
        solved = cp.linalg.solve(spectrum + 64 * cp.eye(64, dtype="f4"), a)
        matrix = sparse.csr_matrix(cp.where(solved > 0, solved, 0).astype("f4"))
        found = matrix @ spectrum.astype("f4") + cp.linalg.qr(a)[0]
        del a, spectrum, matrix
        return cp.asnumpy(found, stream=other).tobytes()


def managed_and_prefetched() -> bytes:
    """Managed memory moves on a stream beside, and the host sees it after umem's own wait."""
    import umem

    cp = _cupy()
    side = _side(cp)
    with umem.managed():
        arrays = [cp.asarray(np.tile(_host(n), 64)) for n in range(3)]
        for turn in range(3):
            for array in arrays:
                umem.prefetch(array, stream=side)
                array *= 1.25
                array += turn
                if array is not arrays[turn]:
                    umem.prefetch(array, "cpu", stream=side)
        return b"".join(umem.as_numpy(array)[:SIZE].tobytes() for array in arrays)


def threads() -> bytes:
    """Threads work on their own streams, and one takes what all have made."""
    cp = _cupy()
    found: dict[int, Any] = {}

    def work(number: int) -> None:
        stream, done = _side(cp), cp.cuda.Event()
        with stream:
            x = cp.asarray(_host(number)) * number
            done.record()
        found[number] = x, done, stream

    started = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    with _side(cp) as stream:
        for _, done, _ in found.values():
            stream.wait_event(done)
        total = sum(found[number][0] for number in range(3))
        return cp.asnumpy(total, stream=stream).tobytes()


def lookahead() -> bytes:
    """Chainer trains beyond VRAM with LookaheadPrefetch, which discards: a small network."""
    import umem.chainer

    with umem.managed(), umem.chainer.LookaheadPrefetch(depth=2) as moves:
        trained = _trained(LOOKAHEAD_ROWS, steps=5)
    report = moves.report()
    assert report.fetched_bytes > 0 and report.discarded_bytes > 0, report
    return trained


def offload() -> bytes:
    """Chainer trains with Offload, of which little may be on its way at a time."""
    from unittest.mock import patch

    import umem.chainer
    from umem.chainer.offload import mover, offloaded_pass

    with (
        patch.object(mover, "IN_FLIGHT_BYTES", OFFLOAD_BYTES),
        patch.object(offloaded_pass, "AHEAD_BYTES", OFFLOAD_BYTES),
        umem.chainer.Offload() as moves,
    ):
        trained = _trained(OFFLOAD_ROWS)
        (tier,) = moves.tiers()
    assert tier.fetched_bytes > 0, moves.summary()
    return trained


def recompute_with_offload() -> bytes:
    """Chainer trains under a budget for which values have to go and come back."""
    import umem.chainer

    under = umem.chainer.Recompute("min", offload=True)
    with under:
        trained = _trained(OFFLOAD_ROWS)
    assert {"offloaded"} <= {value.fate for value in under.fates()}, under.fates()
    return trained


def _trained(rows: int, steps: int = 3) -> bytes:
    """The parameters of a small network after some steps."""
    import chainer
    import chainer.functions as F
    import chainer.links as L

    cp = _cupy()
    np.random.seed(0)
    layers = [layer for _ in range(6) for layer in (L.Linear(16, 16), F.relu)]
    model = chainer.Sequential(*layers, L.Linear(16, 4)).to_gpu()
    rng = np.random.default_rng(0)
    x = cp.asarray(rng.standard_normal((rows, 16)).astype("f4"))
    t = cp.asarray(rng.integers(0, 4, rows).astype("i4"))
    optimizer = chainer.optimizers.MomentumSGD().setup(model)
    for _ in range(steps):
        loss = F.softmax_cross_entropy(model(x), t)
        model.cleargrads()
        loss.backward()
        optimizer.update()
    del loss
    return b"".join(cp.asnumpy(parameter.array).tobytes() for parameter in model.params())


def sent_to_pinned_memory() -> bytes:
    """Arrays go to pinned memory and come back, while others take their memory at once."""
    import umem.chainer  # noqa: F401 (before Chainer)
    from umem.chainer.saved.tiers.pinned import PinnedTier

    cp, tier = _cupy(), PinnedTier(4 * PINNED_COUNT)
    sent, found = [], []
    for turn in range(3):
        for number in range(4):
            one = tier.send(cp.full(PINNED_COUNT // 4, number, "f4") * 1.5 + turn)
            assert one is not None
            one.release()
            sent.append(one)
            found.append(cp.zeros(PINNED_COUNT // 4, "f4") - number)  # where it was
        while sent:
            if len(sent) > 1:
                sent[-2].fetch()
            last = sent.pop()
            array = last.array()
            found.append(cp.sqrt(array))
            array *= -1
            last.forget()
            del array
    total = sum(each * (place + 1) for place, each in enumerate(found))
    tier.close()
    return cp.asnumpy(total).tobytes()


def moved_and_discarded(waits: bool = True) -> bytes:
    """Managed memory goes, is discarded, comes and is used again, on three streams."""
    from contextlib import nullcontext
    from unittest.mock import patch

    import umem
    from umem._common.scopes import Scope
    from umem.devices.cuda import OrderedDiscards, open_cuda

    def prefetch(_: Any, hints: Any, spans: Any, to: Any, stream: int) -> Any:
        return hints.prefetch(spans, to, stream)

    cp, device, scope = _cupy(), open_cuda(), Scope("places")
    side, found = _side(cp), []
    unseen = patch.object(OrderedDiscards, "prefetch", prefetch)
    with umem.managed(), nullcontext() if waits else unseen:
        device.repeat_places(scope)
        for turn in range(4):
            x = cp.arange(BLOCKS_COUNT, dtype="f4") + turn
            found.append(x.sum())
            umem.prefetch(x, "cpu", stream=side)
            blocks = range(x.data.ptr // BLOCK_BYTES, (x.data.ptr + x.nbytes) // BLOCK_BYTES)
            del x
            assert device.discard_free(blocks) == len(blocks) * BLOCK_BYTES
            device.make_ready(blocks, side)
            y = cp.arange(BLOCKS_COUNT, dtype="f4") * (turn + 1)
            umem.prefetch(y, stream=side)
            found.append(cp.sqrt(y).sum())
            found.append(y[::3].sum())
            del y
        scope.close()
    return cp.asnumpy(cp.stack(found)).tobytes()


def given_back(waits: bool = True) -> bytes:
    """Memory that operations and copies still use goes back to the driver, managed and pinned."""
    from contextlib import nullcontext
    from unittest.mock import patch

    import umem
    from umem.chainer.saved.tiers import pinned
    from umem.devices.cuda import Driver, open_cuda

    cp, device, found = _cupy(), open_cuda(), []
    bare = patch.object(Driver, "synchronize", lambda self: None)
    dropped = patch.object(
        pinned.PinnedUntilCopied, "__del__", lambda self: pinned.held_memory.pop(self.ptr)
    )
    small = patch.object(pinned, "FIRST_BYTES", 4 * PINNED_COUNT)
    with small, nullcontext() if waits else bare, nullcontext() if waits else dropped:
        for turn in range(2):
            with umem.managed():
                x = cp.arange(BLOCKS_COUNT, dtype="f4") + turn
            found.append(x * 3)
            del x
            device.pools.give_back("managed")
            tier = pinned.PinnedTier()
            sent = tier.send(cp.arange(PINNED_COUNT, dtype="f4") * turn)
            assert sent is not None
            sent.release()
            tier.close()
            found.append(sent.array())
            del sent, tier
            gc.collect()
    return b"".join(cp.asnumpy(array).tobytes() for array in found)


BLOCK_BYTES = 2 << 20
BLOCKS_COUNT = 1 << 20
"""Numbers of four bytes in two blocks."""
LOOKAHEAD_ROWS = 3 << 15
"""Each activation has 6 MiB."""
OFFLOAD_ROWS, OFFLOAD_BYTES = 1 << 11, 1 << 18
"""Each activation has 128 KiB, of which two may be on their way."""
PINNED_COUNT = 1 << 16
"""Bytes of an array; four of them have room."""
RIGHT: tuple[Program, ...] = (
    handed_on, uploaded_by_turns, pageable_memory_changed, brought_home, implicit_order,
    memory_reused, products, transforms, managed_and_prefetched, threads, lookahead, offload,
    recompute_with_offload, sent_to_pinned_memory, moved_and_discarded, given_back,
)  # fmt: skip


# -- planted -------------------------------------------------------------------------------------


def discarded_out_of_order() -> bytes:
    """As `lookahead`, whose discards no stream's order holds back."""
    from unittest.mock import patch

    from umem.devices.cuda import CoreHints

    aside = _cupy().cuda.Stream(non_blocking=True)
    discard = CoreHints.discard

    def out_of_order(hints: CoreHints, spans: Any, stream: int) -> int:
        return discard(hints, spans, aside.ptr)

    with patch.object(CoreHints, "discard", out_of_order):
        return lookahead()


def discarded_beside_a_move() -> bytes:
    """As `moved_and_discarded`, with prefetches of the same memory that nothing waits for."""
    return moved_and_discarded(waits=False)


def freed_without_a_wait() -> bytes:
    """As `given_back`, with nobody waiting for what still uses the memory."""
    return given_back(waits=False)


def missing_event() -> bytes:
    """As `handed_on`, without a wait between the streams."""
    return handed_on(waits=False)


def buffer_filled_too_early() -> bytes:
    """As `uploaded_by_turns`, without a wait for the copy before."""
    return uploaded_by_turns(waits=False)


def read_too_early() -> bytes:
    """As `brought_home`, without a wait for the copies."""
    return brought_home(waits=False)


def order_that_is_none() -> bytes:
    """As `implicit_order`, with streams that the default stream does not wait for."""
    return implicit_order(blocking=False)


def wait_on_the_wrong_stream() -> bytes:
    """As `offload`, with the current stream asked for while that is the one that copies."""
    from umem.chainer.saved.tiers.pinned import PinnedSent

    def release(self: PinnedSent) -> None:
        if self._here is not None:
            with self._lane.down:
                _cupy().cuda.get_current_stream().wait_event(self._last)
            self._here = None

    return _planted("PinnedSent", "release", release, offload)


def memory_let_go_too_early() -> bytes:
    """As `sent_to_pinned_memory`, with the memory of an array free before its copy has ended."""
    from umem.chainer.saved.tiers.pinned import PinnedSent

    def release(self: PinnedSent) -> None:
        if self._here is not None and self._last is self._came:
            self._stream.wait_event(self._last)
        self._here = None

    return _planted("PinnedSent", "release", release, sent_to_pinned_memory)


def memory_still_in_use() -> bytes:
    """As `sent_to_pinned_memory`, with copies back to memory that operations may still use."""
    from umem.chainer.saved.tiers.pinned import Lane

    right = Lane.order

    def order(self: Lane, first: Any, then: Any) -> None:
        if then is not self.up:
            right(self, first, then)

    return _planted("Lane", "order", order, sent_to_pinned_memory)


def _planted(owner: str, name: str, wrong: Callable[..., None], program: Program) -> bytes:
    from unittest.mock import patch

    from umem.chainer.saved.tiers import pinned

    with patch.object(getattr(pinned, owner), name, wrong):
        return program()


PLANTED: tuple[Program, ...] = (
    missing_event, buffer_filled_too_early, read_too_early, order_that_is_none,
    wait_on_the_wrong_stream, memory_let_go_too_early, memory_still_in_use, discarded_out_of_order,
    discarded_beside_a_move, freed_without_a_wait,
)  # fmt: skip
