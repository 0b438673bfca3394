"""First light of what needs no Chainer: each public function once, on small arrays."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

import umem
from gpu_run_parts.calls import Calls, Given
from umem.devices import PRESETS

CALLS = call = Calls()
SIZE = 1 << 18
MANAGED = 3  # cudaMemoryTypeManaged


def kind(given: Given, array: Any) -> int:
    """Ask the driver of which type the memory of an array is."""
    return int(given.xp.cuda.runtime.pointerGetAttributes(array.data.ptr).type)


def some(given: Given, size: int = SIZE) -> Any:
    """Make an array whose sums are exact."""
    return given.xp.arange(size, dtype="f4") % 8


def computed(given: Given) -> Any:
    """Compute with fresh arrays, as NumPy does; returns the one that stays."""
    x = some(given)
    y = x * 2 + 1
    assert np.array_equal(y.get(), (np.arange(SIZE, dtype="f4") % 8) * 2 + 1)
    assert float(y.sum()) == 8.0 * SIZE
    return y


@call("umem.status", "umem.Status")
def status(given: Given) -> Any:
    found = umem.status()
    assert isinstance(found, umem.Status) and str(found) and found.device
    return found.to_json()


@call("umem.managed")
def managed(given: Given) -> None:
    with umem.managed() as memory:
        assert memory.xp is given.xp
        assert kind(given, computed(given)) == MANAGED
    assert kind(given, computed(given)) != MANAGED


@call("umem.managed")
def managed_with_prefetch(given: Given) -> None:
    with umem.managed(prefetch=True):
        assert kind(given, computed(given)) == MANAGED


@call("umem.prefetch")
def prefetch(given: Given) -> Any:
    with umem.managed():
        x = some(given, 1 << 20)
        moved = [umem.prefetch(x, "cpu"), umem.prefetch(x), umem.prefetch([x], "cpu", strict=True)]
        assert moved == [x.nbytes] * 3 and float(x.sum()) == 3.5 * x.size
    return {"bytes": moved[0]}


@call("umem.hybrid")
def hybrid(given: Given) -> Any:
    with umem.hybrid() as memory:
        assert memory.xp is given.xp
        assert kind(given, computed(given)) != MANAGED
    return umem.status().to_json().get("features")


@call("umem.unmanaged")
def unmanaged(given: Given) -> None:
    with umem.managed(), umem.unmanaged():
        assert kind(given, computed(given)) != MANAGED


@call("umem.enable", "umem.disable")
def enable(given: Given) -> None:
    handle = umem.enable()
    try:
        assert umem.status().on and kind(given, computed(given)) == MANAGED, handle
    finally:
        umem.disable()
    assert not umem.status().on and kind(given, computed(given)) != MANAGED


@call("umem.enable")
def default_pool_under_enable(given: Given) -> Any:
    umem.enable("hybrid")
    pool = given.xp.get_default_memory_pool()
    x = some(given)
    used, total = pool.used_bytes(), pool.total_bytes()
    assert total >= used >= x.nbytes
    del x
    pool.free_all_blocks()
    assert pool.used_bytes() < used
    umem.disable()
    return {"used": used, "total": total}


@call("umem.advise", "umem.location")
def advise(given: Given) -> Any:
    with umem.managed():
        x = some(given, 1 << 20)
        umem.advise(x, "preferred_location", "cpu", strict=True)
        there = umem.location(x)
        assert there.managed, there
        umem.advise(x, "preferred_location", unset=True)
        umem.advise(x, "read_mostly")
        umem.advise(x, "read_mostly", unset=True)
        assert float(x.sum()) == 3.5 * x.size
    return str(there)


@call("umem.preset")
def preset(given: Given) -> None:
    with umem.managed():
        x = some(given, 1 << 20)
        for name in PRESETS:
            umem.preset(x, name)
            assert float(x.sum()) == 3.5 * x.size
            umem.preset(x, name, unset=True)


@call("umem.as_numpy")
def as_numpy(given: Given) -> None:
    with umem.managed():
        x = some(given)
        seen = umem.as_numpy(x)
        assert float(seen.sum()) == 3.5 * SIZE
        seen[0] = 1
        assert float(x[0]) == 1.0


@call("umem.managed")
def capture(given: Given) -> None:
    """A graph of managed arrays is captured; a card launches it as well."""
    xp = given.xp
    stream = xp.cuda.Stream(non_blocking=True)
    with umem.managed(), stream:
        x = some(given)
        y = xp.empty_like(x)
        xp.multiply(x, 2, out=y)
        stream.synchronize()
        stream.begin_capture()
        xp.multiply(x, 3, out=y)
        graph = stream.end_capture()
        if not given.device.simulated:  # the software GPU launches no graphs
            graph.launch(stream)
            stream.synchronize()
            assert np.array_equal(y.get(), x.get() * 3)


@call("umem.managed")
def second_thread(given: Given) -> None:
    """A thread that has used no GPU allocates, computes and moves."""
    found: list[Any] = []

    def work() -> None:
        try:
            with umem.managed():
                y = computed(given)
                umem.prefetch(y, "cpu")
                found.append((kind(given, y), float(y.sum())))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=work)
    with umem.unmanaged():
        thread.start()
        mine = computed(given)
        thread.join()
    assert found == [(MANAGED, 8.0 * SIZE)] and kind(given, mine) != MANAGED, found


@call("umem.OutOfMemoryError", "umem.UmemError")
def out_of_memory(given: Given) -> str:
    with umem.managed(limit="8MiB"):
        try:
            given.xp.empty(16 << 20, "u1")
        except umem.UmemError as error:
            assert isinstance(error, umem.OutOfMemoryError) and isinstance(error, MemoryError)
            return str(error)
    raise AssertionError("a limit of 8 MiB has let 16 MiB pass")


@call("umem.explain")
def explain(given: Given) -> str:
    weights = given.xp.zeros(4 << 20, "u1")
    with umem.managed(limit="8MiB"):
        try:
            given.xp.empty(16 << 20, "u1")
        except umem.OutOfMemoryError as error:
            message = str(umem.explain(error))
    assert "16.0 MiB" in message and weights is not None, message
    return message


@call("umem.on_out_of_memory")
def on_out_of_memory(given: Given) -> None:
    """The pool's limit is what runs out."""
    pool = given.xp.get_default_memory_pool()
    pool.free_all_blocks()
    pool.set_limit(size=pool.total_bytes() + (12 << 20))
    cache = [given.xp.zeros(4 << 20, "u1") for _ in range(2)]
    with umem.on_out_of_memory(lambda nbytes: bool(cache) and cache.pop() is not None) as asked:
        assert given.xp.zeros(8 << 20, "u1").size == 8 << 20
    pool.set_limit(size=0)
    assert asked.count >= 1 and len(cache) < 2


@call("umem.DeviceNotFoundError")
def device_not_found(given: Given) -> str:
    from umem.devices.cuda import open_cuda

    try:
        open_cuda(99)
    except umem.DeviceNotFoundError as error:
        return str(error)
    raise AssertionError("there is a GPU 99")


@call("umem.blocks")
def blocks(given: Given) -> None:
    x = np.arange(6 << 20, dtype="f4").reshape(-1, 1024) % 16
    y = np.empty_like(x)
    for block, to in umem.blocks(x, out=y):
        to[...] = block * 2
    assert np.array_equal(y, x * 2)


@call("umem.lookahead")
def lookahead(given: Given) -> str:
    with umem.managed():
        look = umem.lookahead([some(given, 1 << 20) for _ in range(4)])
        sums = [sum(float(chunk.sum()) for chunk in look) for _ in range(3)]
    assert sums == [4 * 3.5 * (1 << 20)] * 3 and look.off is None
    return str(look)


@call("umem.paging", simulated="counts of the model in the place of CUPTI's")
def paging(given: Given) -> Any:
    with umem.managed():
        x = some(given, 1 << 20)
        umem.prefetch(x, "cpu")
        given.device.synchronize()
        with umem.paging() as pages:
            assert float((x + 1).sum()) == 4.5 * x.size
    return pages.to_json()


@call("umem.statistics")
def statistics(given: Given) -> Any:
    with umem.managed(), umem.statistics() as counts:
        kept = computed(given)
    assert counts.current_bytes == kept.nbytes and counts.peak_bytes >= 2 * kept.nbytes
    return counts.summary()


@call("umem.track")
def track(given: Given) -> str:
    with umem.track() as tracker:
        kept = computed(given)
    held = tracker.outstanding()
    assert sum(one.nbytes for one in held) == kept.nbytes, held
    return str(tracker)


def recorded(given: Given) -> Any:
    """Record two steps."""
    with umem.record() as recorder:
        for _ in range(2):
            computed(given)
            umem.mark()
    return recorder.trace


@call("umem.record", "umem.mark", "umem.Trace")
def record(given: Given) -> Any:
    trace = recorded(given)
    assert isinstance(trace, umem.Trace) and trace.peak_bytes >= 4 * SIZE
    return {"events": len(trace.events), "peak_bytes": trace.peak_bytes}


@call("umem.replay", "umem.Replay")
def replay(given: Given) -> Any:
    found = umem.replay(recorded(given), "t4")
    assert isinstance(found, umem.Replay) and found.fits
    return {"seconds": found.figures.seconds}


@call("umem.managed")
def upstream(given: Given) -> None:
    """CuPy's pool over cudaMallocManaged stands for another library's allocator."""
    pool = given.xp.cuda.MemoryPool(given.xp.cuda.malloc_managed)
    with umem.managed(upstream=pool.malloc):
        x = computed(given)
        assert kind(given, x) == MANAGED and pool.used_bytes() >= x.nbytes


class Stream:
    """RMM's stream, by NVIDIA's protocol."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.stream.ptr


@call("umem.memory_resource", stand_in="RMM's classes")
def memory_resource(given: Given) -> None:
    names = ("rmm", "rmm.mr", "rmm.pylibrmm", "rmm.pylibrmm.stream")
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    modules["rmm.mr"].CallbackMemoryResource = lambda take, give: SimpleNamespace(
        take=take, give=give
    )
    modules["rmm.pylibrmm.stream"].Stream = Stream
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(modules)
    try:
        umem.enable()
        resource: Any = umem.memory_resource()
        stream = Stream(given.xp.cuda.Stream.null)
        address = resource.take(4 * SIZE, stream)
        memory = given.xp.cuda.UnownedMemory(address, 4 * SIZE, resource)
        array = given.xp.ndarray(SIZE, "f4", memptr=given.xp.cuda.MemoryPointer(memory, 0))
        array.fill(2)
        assert float(array.sum()) == 2.0 * SIZE and kind(given, array) == MANAGED
        resource.give(address, 4 * SIZE, stream)
    finally:
        umem.disable()
        for name, module in before.items():
            sys.modules.pop(name) if module is None else sys.modules.update({name: module})


@call("umem.dask.Plugin", needs=("distributed",), stand_in="a worker of dask")
def dask_plugin(given: Given) -> None:
    import umem.dask

    worker = SimpleNamespace(metrics={}, address="tcp://nowhere", data={})
    plugin = umem.dask.Plugin("managed")
    plugin.setup(worker)
    assert kind(given, computed(given)) == MANAGED
    assert worker.metrics["umem"](None)["managed_bytes"] > 0
    plugin.teardown(worker)
    assert not umem.status().on


@call("umem.dask.serialize_by_host_copies", needs=("distributed",))
def dask_copies(given: Given) -> None:
    from distributed.protocol import deserialize, serialize

    import umem.dask

    umem.dask.serialize_by_host_copies()
    x = some(given)
    assert np.array_equal(deserialize(*serialize(x, serializers=("dask",))).get(), x.get())
