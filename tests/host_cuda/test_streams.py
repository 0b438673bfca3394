"""Streams of the software GPU: late work keeps CUDA's order, and nothing else is kept."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from bench_scripts import run as run_bench
from software_programs import START, needs_software_gpu, run

from umem._common.specs import gpu_spec
from umem.compat import find_package
from umem.host_cuda.stream_order import DEPTH, LEGACY, PER_THREAD_HANDLE, StreamOrder, Work
from umem.host_cuda.streams import HostStreams

SEEDS = range(200)
ONE, OTHER = 100, 101
"""Two streams that block with the default one."""
LATE = START.replace("force=True", "force=True, stream_seed=0")


# -- the order -----------------------------------------------------------------------------------


def orders(give: Callable[[StreamOrder, Callable[[str], Callable[[], None]]], None]) -> set[str]:
    """Every order in which what a program gives to streams is done, under many seeds."""
    found = set()
    for seed in SEEDS:
        done: list[str] = []
        order = StreamOrder(seed)
        give(order, lambda name, done=done: lambda: done.append(name))  # type: ignore[misc]
        order.finish_all()
        found.add("".join(done))
    return found


def test_a_stream_keeps_its_order_and_streams_do_not_wait_for_each_other() -> None:
    def give(order: StreamOrder, does: Any) -> None:
        for name in "ab":
            order.issue(ONE, does(name))
        order.issue(OTHER, does("x"))

    assert orders(give) == {"abx", "axb", "xab"}


def test_an_event_is_waited_for() -> None:
    def give(order: StreamOrder, does: Any) -> None:
        event = order.issue(ONE, does("a"))
        order.issue(ONE, does("b"))
        order.issue(OTHER, None, [event])
        order.issue(OTHER, does("x"))

    assert orders(give) == {"abx", "axb"}


def test_the_default_stream_waits_for_blocking_streams_and_they_for_it() -> None:
    def give(order: StreamOrder, does: Any) -> None:
        order.add_non_blocking(7)
        order.issue(ONE, does("a"))
        order.issue(7, does("n"))
        order.issue(LEGACY, does("0"))
        order.issue(PER_THREAD_HANDLE, does("p"))
        order.issue(OTHER, does("x"))

    found = orders(give)
    assert {order.replace("n", "") for order in found} == {"a0px", "a0xp"}
    assert {order.index("n") for order in found} == set(range(5))


def test_waiting_does_what_must_be_done_and_some_seeds_do_no_more() -> None:
    left = set()
    for seed in SEEDS:
        done: list[str] = []
        order = StreamOrder(seed)
        order.issue(ONE, lambda done=done: done.append("a"))  # type: ignore[misc]
        order.issue(OTHER, lambda done=done: done.append("x"))  # type: ignore[misc]
        order.finish_stream(OTHER)
        assert "x" in done
        left.add("a" in done)
    assert left == {True, False}


def test_without_a_seed_everything_is_done_at_once() -> None:
    order, done = StreamOrder(None), list[int]()
    for number in range(5):
        order.issue(ONE + number % 2, lambda number=number: done.append(number))  # type: ignore[misc]
        assert done == list(range(number + 1))


def test_who_asks_again_and_again_sees_work_done() -> None:
    for seed in SEEDS:
        order = StreamOrder(seed)
        work = order.issue(ONE, None)
        assert any(order.query(work) for _ in range(1000))
        assert order.query(None)


class FreesWhileDrawing(random.Random):
    """Draws after Python has collected garbage: memory was freed, for which work has run."""

    order: StreamOrder | None = None

    def _collect(self) -> None:
        order, self.order = self.order, None
        if order is not None:
            order.run_all()
            self.order = order

    def choices(self, *given: Any, **more: Any) -> Any:
        self._collect()
        return super().choices(*given, **more)

    def choice(self, *given: Any) -> Any:
        self._collect()
        return super().choice(*given)

    def random(self) -> float:
        self._collect()
        return super().random()


def test_garbage_may_be_collected_while_the_next_work_is_drawn() -> None:
    for seed in SEEDS:
        order, done = StreamOrder(seed), list[int]()
        drawing = FreesWhileDrawing(seed)
        order._random, drawing.order = drawing, order
        before: list[Work] = []
        for number in range(10):
            before = [order.issue(ONE + number % 3, partial(done.append, number), before)]
        order.finish_all()
        assert done == [*range(10)]


def test_a_stream_holds_so_much_and_no_more() -> None:
    lazy = next(seed for seed in SEEDS if held(seed, 10) == 10)
    assert held(lazy, DEPTH + 10) == DEPTH


def held(seed: int, count: int) -> int:
    order, done = StreamOrder(seed), list[int]()
    for number in range(count):
        order.issue(ONE, lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == sorted(done)
    return count - len(done)


def test_work_that_fails_is_done_and_the_rest_goes_on_and_the_first_error_is_raised_once() -> None:
    def fail(text: str) -> None:
        raise ValueError(text)

    for seed in (None, *SEEDS):
        order, done = StreamOrder(seed), list[str]()
        order.issue(ONE, lambda: fail("first"))
        order.issue(ONE, lambda: fail("second"))
        work = order.issue(ONE, lambda done=done: done.append("b"))  # type: ignore[misc]
        order.do(order.issue_after_all(lambda done=done: done.append("f")))  # type: ignore[misc]
        assert work.is_done and done == ["b", "f"]
        with pytest.raises(ValueError, match="first"):
            (order.finish_all if seed else order.raise_error)()
        order.raise_error()
        order.finish_all()
        assert order.query(None)


def test_what_is_freed_comes_after_everything_given_before() -> None:
    def give(order: StreamOrder, does: Any) -> None:
        order.issue(ONE, does("a"))
        order.issue(OTHER, does("b"))
        order.issue_after_all(does("f"))
        order.issue(ONE, does("c"))

    for found in orders(give):
        assert found.index("f") > max(found.index("a"), found.index("b"))
    assert {"bacf", "bafc"} <= orders(give)


# -- captures ------------------------------------------------------------------------------------


class StatusError(Exception):
    """A status of CUDA's."""


class Streams(HostStreams):
    def fail(self, status: int) -> Any:
        raise StatusError(status)


@pytest.fixture
def streams() -> Streams:
    return Streams(gpu_spec("t4"))


def status(call: Callable[..., Any], *arguments: Any) -> int:
    """The status that a call fails with."""
    with pytest.raises(StatusError) as caught:
        call(*arguments)
    return int(caught.value.args[0])


def test_a_capture_takes_its_stream_s_work_and_leaves_others_alone(streams: Streams) -> None:
    stream, other = streams.streamCreateWithFlags(1), streams.streamCreateWithFlags(1)
    streams.streamBeginCapture(stream)
    assert streams.is_captured(stream) and not streams.is_captured(other)
    assert not streams.is_captured(LEGACY)
    assert (streams.streamIsCapturing(stream), streams.streamIsCapturing(other)) == (1, 0)
    assert status(streams.streamBeginCapture, stream) == 401
    streams.streamEndCapture(stream)
    assert not streams.is_captured(stream) and status(streams.streamEndCapture, stream) == 401


def test_an_event_brings_another_stream_into_the_capture(streams: Streams) -> None:
    stream, other = streams.streamCreateWithFlags(1), streams.streamCreateWithFlags(1)
    event, outside = streams.eventCreate(), streams.eventCreate()
    streams.eventRecord(outside, other)
    streams.streamBeginCapture(stream)
    streams.eventRecord(event, stream)
    streams.streamWaitEvent(other, event)
    assert streams.is_captured(other) and status(streams.streamEndCapture, other) == 903
    assert status(streams.eventQuery, event) == 907
    assert status(streams.streamEndCapture, stream) == 901  # asking of it has ended the capture
    streams.streamBeginCapture(stream)
    assert status(streams.streamWaitEvent, stream, outside) == 905


def test_waiting_for_what_is_captured_ends_the_capture(streams: Streams) -> None:
    stream = streams.streamCreateWithFlags(1)
    for wait in (lambda: streams.streamSynchronize(stream), streams.deviceSynchronize):
        streams.streamBeginCapture(stream)
        assert status(wait) == 900
        assert streams.streamIsCapturing(stream) == 2
        assert status(streams.is_captured, stream) == 901
        assert status(streams.streamEndCapture, stream) == 901


def test_the_default_stream_would_wait_for_a_blocking_stream_that_is_captured(
    streams: Streams,
) -> None:
    stream = streams.streamCreate()
    streams.streamBeginCapture(stream)
    assert status(streams.streamIsCapturing, LEGACY) == 906
    assert status(streams.is_captured, LEGACY) == 906
    assert status(streams.streamEndCapture, stream) == 901


@pytest.mark.parametrize(("mode", "is_refused"), [(0, True), (2, False)])
def test_only_a_relaxed_capture_allows_allocations(
    streams: Streams, mode: int, is_refused: bool
) -> None:
    stream = streams.streamCreateWithFlags(1)
    streams.streamBeginCapture(stream, mode)
    if is_refused:
        assert status(streams.refuse_unsafe) == 900
    else:
        streams.refuse_unsafe()
        streams.streamEndCapture(stream)


# -- the real CuPy -------------------------------------------------------------------------------


@needs_software_gpu
class TestCupyStreams:
    @pytest.mark.parametrize(
        ("count", "options"),
        [(6, ["--quick"]), pytest.param(20, ["--seeds", "20"], marks=pytest.mark.slow)],
    )
    def test_programs_agree_under_every_seed_and_planted_faults_are_found(
        self,
        count: int,
        options: list[str],
        kernel_cache: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        if find_package() is None:
            pytest.skip("no Chainer")
        monkeypatch.setenv("XDG_CACHE_HOME", str(kernel_cache))
        monkeypatch.setenv("CUPY_CACHE_DIR", str(kernel_cache))
        path = tmp_path / "streams.json"
        done = run_bench("software_gpu_streams.py", *options, "--json", str(path), timeout=3600)
        assert done.returncode == 0, done.stdout + done.stderr
        rows = json.loads(path.read_text())["rows"]
        right = [row for row in rows if not row["planted"]]
        assert len(right) == 16 and all(row["same_count"] == count for row in right)
        planted = [row for row in rows if row["planted"]]
        assert len(planted) == 10 and all(row["same_count"] < row["seed_count"] for row in planted)

    def test_events_and_streams_say_whether_their_work_is_done(self, kernel_cache: Path) -> None:
        program = """
stream, other = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)
seen = set()
for seed in range(40):
    gpu.reseed(seed)
    event = cp.cuda.Event()
    with stream:
        x = cp.ones(8)
        event.record()
    seen.add((event.done, stream.done))
    while not event.done:
        pass
    gpu.reseed(seed)
    with stream:
        x += 1
    event.record(stream)
    try:
        cp.cuda.get_elapsed_time(event, event)
    except cp.cuda.runtime.CUDARuntimeError as error:
        seen.add(error.status)
    event.synchronize()
    assert cp.cuda.get_elapsed_time(event, event) == 0
    assert event.done
print((False, False) in seen, 600 in seen)
gpu.reseed(None)
with stream:
    x += 1
    event.record()
print(event.done, stream.done)
"""
        assert run(program, kernel_cache, start=LATE) == "True True\nTrue True\n"

    def test_arguments_are_those_of_the_launch(self, kernel_cache: Path) -> None:
        program = r"""
from ctypes import addressof, c_int, c_void_p
kernel = cp.RawKernel(
    'extern "C" __global__ void put(int* x, int n) { x[threadIdx.x] = n; }', "put"
)
x = cp.zeros(4, "i4")
for seed in range(30):
    gpu.reseed(seed)
    stream = cp.cuda.Stream(non_blocking=True)
    number, place = c_int(seed), c_void_p(x.data.ptr)
    given = (c_void_p * 2)(addressof(place), addressof(number))
    cp.cuda.driver.launchKernel(
        kernel.kernel.ptr, 1, 1, 1, 4, 1, 1, 0, stream.ptr, addressof(given), 0
    )
    number.value, place.value = -1, 0
    stream.synchronize()
    assert cp.asnumpy(x).tolist() == [seed] * 4, (seed, x)
print("captured")
"""
        assert run(program, kernel_cache, start=LATE) == "captured\n"

    @pytest.mark.skipif(find_package() is None, reason="needs Chainer")
    def test_what_a_rank_or_a_snapshot_uploads_may_change_at_once(self, kernel_cache: Path) -> None:
        program = """
import cupyx
import umem.chainer
from umem.chainer.parallel.shard_layout import FlatVector
from umem.chainer.resume.collecting import Distributor
import chainer

link = chainer.Link()
with link.init_scope():
    link.p = chainer.Parameter(np.zeros(4, "f4"))
link.to_device("@cupy:0")
chainer.optimizers.SGD().setup(link)
values = cupyx.zeros_pinned(4, "f4")  # which a GPU reads itself, as Grace Hopper reads all memory
vector = FlatVector([("/p", link.p)], 0, 1)
for seed in range(20):
    gpu.reseed(seed)
    for write in (
        lambda: vector.write(0, 4, values),
        lambda: Distributor({"p": values}, {}, ())("p", link.p.array),
    ):
        values[:] = seed
        write()
        values[:] = -1
        assert link.p.array.get().tolist() == [seed] * 4, seed
print("kept")
"""
        assert run(program, kernel_cache, start=LATE) == "kept\n"

    def test_callbacks_of_the_host_come_in_the_order_of_their_stream(
        self, kernel_cache: Path
    ) -> None:
        program = """
for seed in range(20):
    gpu.reseed(seed)
    stream, said = cp.cuda.Stream(non_blocking=True), []
    with stream:
        x = cp.zeros(4)
        stream.launch_host_func(lambda _: said.append(1), None)
        x += 1
        stream.launch_host_func(lambda _: said.append(2), None)
    stream.synchronize()
    assert said == [1, 2]
print("in order")
"""
        assert run(program, kernel_cache, start=LATE) == "in order\n"

    @pytest.mark.skipif(find_package() is None, reason="needs Chainer")
    @pytest.mark.parametrize("start", [START, LATE])
    def test_copies_of_pinned_memory_run_beside_operations_in_simulated_time(
        self, start: str, kernel_cache: Path
    ) -> None:
        program = """
import umem.chainer
from umem.chainer.saved.tiers.pinned import PinnedTier

tier, x, y = PinnedTier(), cp.ones(2 << 20, "f4"), cp.ones(2 << 20, "f4")
stream = cp.cuda.Stream(non_blocking=True)
y *= 2
for count in (0, 40):
    cp.cuda.Device().synchronize()
    gpu.restart()
    sent = tier.send(x)
    for _ in range(count):
        y *= 2
    sent.release()
    y *= 2
    figures, way = gpu.figures, x.nbytes / gpu.spec.host_out_bandwidth
    print(figures.sent_bytes == x.nbytes, round(figures.stall_seconds / way, 1))
    gpu.restart()
    sent.fetch()
    for _ in range(count):
        y *= 2
    z = sent.array() + 1
    figures, way = gpu.figures, x.nbytes / gpu.spec.host_in_bandwidth
    print(figures.fetched_bytes == x.nbytes, round(figures.stall_seconds / way, 1))
"""
        said = "True 1.0\nTrue 1.0\nTrue 0.0\nTrue 0.0\n"
        assert run(program, kernel_cache, start=start) == said

    def test_a_seed_that_is_none_changes_nothing(self, kernel_cache: Path) -> None:
        program = """
for seed in ("x", 1.5, -1, True):
    try:
        gpu.reseed(seed)
    except umem.errors.SizeError as error:
        print(error)
print(int(cp.arange(4).sum()))
"""
        *said, end = run(program, kernel_cache, start=LATE).splitlines()
        what = "stream_seed must be a whole number of at least 0; got"
        assert [line.removeprefix(what) for line in said] == [" 'x'", " 1.5", " -1", " True"]
        assert end == "6"

    def test_reseeding_needs_a_seed_from_the_start(self, kernel_cache: Path) -> None:
        program = """
try:
    gpu.reseed(1)
except umem.errors.StateError as error:
    print(error)
"""
        said = run(program, kernel_cache)
        assert "stream_seed" in said

    def test_a_capture_is_followed_and_its_graph_cannot_be_launched(
        self, kernel_cache: Path
    ) -> None:
        program = """
stream = cp.cuda.Stream(non_blocking=True)
x, y, z = cp.zeros(4), cp.ones((8, 8)), cp.zeros((8, 8))
cp.matmul(y, y, out=z)
z[...] = 0
cp.cuda.Device().synchronize()
with stream:
    x += 1
    stream.synchronize()
    stream.begin_capture()
    x += 1
    cp.matmul(y, y, out=z)
    print(stream.is_capturing())
    graph = stream.end_capture()
    print(stream.is_capturing())
try:
    graph.launch(stream)
except NotImplementedError as error:
    print("graphs" in str(error))
stream.synchronize()
print(x, float(z.sum()))
"""
        said = "True\nFalse\nTrue\n[1. 1. 1. 1.] 0.0\n"
        for start in (START, LATE):
            assert run(program, kernel_cache, start=start) == said


@pytest.mark.parametrize("seed", range(30))
def test_default_streams_of_two_devices_do_not_wait_for_one_another(seed: int) -> None:
    homes = {10: 0, 11: 1}
    here = [0]
    order = StreamOrder(seed, lambda stream: homes.get(stream, here[0]))
    done: list[str] = []
    chance = random.Random(seed)
    for number in range(6):
        here[0] = chance.randrange(2)
        order.issue(10 + here[0], lambda n=number, d=here[0]: done.append(f"{d} stream {n}"))
        order.issue(0, lambda n=number, d=here[0]: done.append(f"{d} legacy {n}"))
    order.finish_all(1)
    for device in "01":
        mine = [word for word in done if word[0] == device]
        numbers = [int(word.split()[-1]) for word in mine]
        assert numbers == sorted(numbers)  # each after the other, on its own device
        assert [word.split()[1] for word in mine[:2]] in ([], ["stream"], ["stream", "legacy"])
    wanted = sum(1 for word in done if word[0] == "1")
    order.finish_all(0)
    assert len(done) == 12 and sum(1 for word in done if word[0] == "1") == wanted
