"""umem under RMM and over another library's allocator, by stand-ins of RMM's recorded interface."""

from __future__ import annotations

from pathlib import Path

import pytest
from software_programs import START, lines, needs_software_gpu

import umem
from umem.errors import DeviceError, StateError

RMM = (
    START
    + """
import sys
from types import ModuleType
class CallbackMemoryResource:
    def __init__(self, allocate_func, deallocate_func):
        self.allocate, self.deallocate = allocate_func, deallocate_func
class Stream:
    def __init__(self, stream):
        self.stream = stream
    def __cuda_stream__(self):
        return 0, self.stream.ptr
for name in ("rmm", "rmm.mr", "rmm.pylibrmm", "rmm.pylibrmm.stream"):
    sys.modules[name] = ModuleType(name)
sys.modules["rmm.mr"].CallbackMemoryResource = CallbackMemoryResource
sys.modules["rmm.pylibrmm.stream"].Stream = Stream
null = Stream(cp.cuda.Stream.null)
own = cp.get_default_memory_pool()
def is_managed(address):
    pointer = cp.cuda.MemoryPointer(cp.cuda.UnownedMemory(address, 100, None), 0)
    return umem.location(cp.ndarray(25, "f4", memptr=pointer)).managed
"""
)


@needs_software_gpu
def test_rmm_allocates_in_umems_mode(kernel_cache: Path) -> None:
    program = """
resource = umem.memory_resource()
plain = resource.allocate(3 << 20, null)
print(is_managed(plain), own.used_bytes() >> 20)
with umem.enable(limit="40MiB"):
    managed = resource.allocate(20 << 20, null)
    print(is_managed(managed), umem.status().reserved_bytes >> 20)
    try:
        resource.allocate(30 << 20, null)
    except MemoryError as error:
        print(error)
    with umem.unmanaged():
        print(is_managed(resource.allocate(100, null)))
resource.deallocate(managed, 20 << 20, null)
resource.deallocate(plain, 3 << 20, null)
print(own.used_bytes(), resource.allocate(0, null), resource.deallocate(0, 0, null))
"""
    found = lines(program, kernel_cache, start=RMM)
    assert found[:2] == ["False 3", "True 23"]
    assert "20.0 MiB of the 40.0 MiB that the limit allows" in found[2]
    assert found[3:] == ["False", "512 0 None"]


@needs_software_gpu
def test_memory_that_another_stream_frees_is_not_used_too_early(kernel_cache: Path) -> None:
    start = RMM.replace("force=True", "force=True, stream_seed=0")
    program = """
resource = umem.memory_resource()
one, other = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)
for turn in range(40):
    gpu.reseed(turn // 20)
    address = resource.allocate(4000, Stream(one))
    memory = cp.cuda.UnownedMemory(address, 4000, None)
    array = cp.ndarray(1000, "f4", memptr=cp.cuda.MemoryPointer(memory, 0))
    with other:
        array.fill(1)
        total = array.sum()
    resource.deallocate(address, 4000, Stream(other))
    again = resource.allocate(4000, Stream(one))
    with one:
        array.fill(9)
    resource.deallocate(again, 4000, Stream(one))
    assert again == address and float(total) == 1000, (again, address, total)
print("right")
"""
    assert lines(program, kernel_cache, start=start) == ["right"]


@needs_software_gpu
def test_the_per_thread_default_stream_is_another_stream_in_each_thread(kernel_cache: Path) -> None:
    program = """
import threading
resource = umem.memory_resource()
class Handle:
    def __init__(self, ptr):
        self.ptr = ptr
def waits(first, second, other_thread):
    address = resource.allocate(4000, Stream(Handle(first)))
    before = gpu.calls.wait_count
    free = lambda: resource.deallocate(address, 4000, Stream(Handle(second)))
    if other_thread:
        thread = threading.Thread(target=free)
        thread.start()
        thread.join()
    else:
        free()
    return gpu.calls.wait_count - before
print(waits(2, 2, True), waits(2, 2, False), waits(0, 1, True), waits(0, 2, False))
"""
    assert lines(program, kernel_cache, start=RMM) == ["1 0 0 1"]


@needs_software_gpu
def test_rmm_that_is_missing_old_or_asked_by_cupy_is_refused(kernel_cache: Path) -> None:
    program = """
resource = umem.memory_resource()
def rmm_cupy_allocator(nbytes):
    memory = cp.cuda.UnownedMemory(resource.allocate(nbytes, null), nbytes, None)
    return cp.cuda.MemoryPointer(memory, 0)
def said(call):
    try:
        print(call())
    except (umem.UmemError, MemoryError) as error:
        print(type(error).__name__, error)
cp.cuda.set_allocator(rmm_cupy_allocator)
said(lambda: cp.empty(3))
cp.cuda.set_allocator(own.malloc)
del Stream.__cuda_stream__
said(umem.memory_resource)
sys.modules["rmm.mr"] = None
said(umem.memory_resource)
"""
    found = lines(program, kernel_cache, start=RMM)
    assert found[0].startswith("StateError CuPy allocates from RMM, and RMM from umem")
    assert found[1].startswith("MissingDependencyError") and "26.10" in found[1]
    assert found[2].startswith("MissingDependencyError") and "pip install rmm-cu12" in found[2]


# -- over another library's allocator ------------------------------------------------------------


@needs_software_gpu
def test_managed_memory_comes_from_upstream_counted_and_bounded(kernel_cache: Path) -> None:
    program = """
theirs = cp.cuda.MemoryPool(cp.cuda.malloc_managed)
def mib(*sizes):
    return [size >> 20 for size in sizes]
with umem.managed(limit="80MiB", upstream=theirs.malloc):
    x = cp.ones(20 << 20, "u1")
    with umem.unmanaged():
        y = cp.ones(3 << 20, "u1")
    print(umem.location(x).managed, umem.location(y).managed, mib(theirs.used_bytes()))
    print(umem.prefetch(x) >> 20, mib(umem.status().reserved_bytes))
    try:
        cp.empty(70 << 20, "u1")
    except umem.OutOfMemoryError as error:
        print(error)
    print(cp.empty(0).size, x.sum() >> 20)
with umem.managed():
    z = cp.empty(5 << 20, "u1")
print(mib(theirs.used_bytes()))
try:
    with umem.managed(limit="22MiB"):
        pass
except umem.UmemError as error:
    print(error)
del x, z
with umem.enable(upstream=theirs.malloc):
    w = cp.ones(4 << 20, "u1")
    pool = cp.get_default_memory_pool()
    print(mib(theirs.used_bytes(), pool.used_bytes()))
    print(umem.enable(upstream=theirs.malloc) is umem.enable(upstream=theirs.malloc))
del w
print(mib(theirs.used_bytes()))
"""
    found = lines(program, kernel_cache)
    assert found[:2] == ["True False [20]", "20 [23]"]
    assert "needs 70.0 MiB; 20.0 MiB of the 80.0 MiB that the limit allows" in found[2]
    assert found[3:5] == ["0 20", "[20]"]
    assert "below the 25.0 MiB of managed memory" in found[5]
    assert found[6:] == ["[4, 7]", "True", "[0]"]


@needs_software_gpu
def test_upstreams_that_cannot_serve_are_refused_by_name(kernel_cache: Path) -> None:
    program = """
def out(nbytes):
    raise MemoryError("std::bad_alloc")
def said(upstream):
    try:
        with umem.managed(upstream=upstream):
            cp.empty(1000)
    except (umem.UmemError, MemoryError) as error:
        print(type(error).__name__, error)
said(cp.cuda.MemoryPool().malloc)
said(cp.cuda.alloc)
said(out)
said(lambda nbytes: 4096)
small = cp.cuda.malloc_managed(512)
said(lambda nbytes: small)
said(lambda nbytes: cp.cuda.malloc_managed(1 << 40))
umem.enable()
kept = cp.cuda.get_allocator(), cp.get_default_memory_pool().malloc
umem.disable()
said(kept[0])
said(kept[1])
print(umem.status().reserved_bytes)
"""
    found = lines(program, kernel_cache)
    assert found[0].startswith("DeviceError upstream= returns memory that is not managed")
    assert found[1].startswith("StateError upstream= calls CuPy's allocator")
    assert (
        found[2] == "OutOfMemoryError needs 7.8 KiB; upstream= has no more memory: std::bad_alloc"
    )
    assert found[3].startswith("DeviceError upstream= returns int, not CuPy's MemoryPointer")
    assert found[4] == "DeviceError upstream= returns 512 B, but 7.8 KiB were requested"
    assert found[5].startswith("OutOfMemoryError needs 7.8 KiB; upstream= has no more memory: cuda")
    assert [line.partition(":")[0] for line in found[6:8]] == [
        "StateError upstream= is an allocator of umem itself"
    ] * 2
    assert int(found[8]) <= 8192


@needs_software_gpu
def test_an_upstreams_free_blocks_ask_the_machine_nothing(kernel_cache: Path) -> None:
    """Reading /proc takes a hundred times as long as an allocation from a pool."""
    program = """
from types import SimpleNamespace
from umem.devices.cuda import bounds, open_cuda
theirs = cp.cuda.MemoryPool(cp.cuda.malloc_managed)
driver, seconds, asked = open_cuda().driver, [0.0], []
bounds.time = SimpleNamespace(monotonic=lambda: seconds[0])
host = [1 << 30]
driver.host_available_bytes = lambda: asked.append("host") or host[0]
free_bytes = driver.free_bytes
driver.free_bytes = lambda: asked.append("VRAM") or free_bytes()
def loop(count, nbytes=1 << 20):
    asked.clear()
    for _ in range(count):
        cp.empty(nbytes, "u1")
    return asked.count("host")
for _ in range(2):
    with umem.managed(upstream=theirs.malloc):
        asked.clear()
        print(loop(100), asked.count("VRAM") < 5)
        seconds[0] += 2
        print(loop(100), loop(100), umem.status().reserved_bytes)
kept = []
with umem.managed(upstream=theirs.malloc):
    asked.clear()
    for _ in range(40):  # more than an eighth of the room
        kept.append(cp.empty(8 << 20, "u1"))
    print(1 < asked.count("host") < 10)
    host[0] = 1 << 20
    seconds[0] += 2
    try:
        cp.empty(40 << 20, "u1")
    except umem.OutOfMemoryError as error:
        print(error)
    print(umem.status().managed_bytes >> 20, umem.status().peak_bytes >> 20)
"""
    found = lines(program, kernel_cache)
    assert found[:4] == ["1 True", "1 0 0", "0 True", "1 0 0"] and found[4] == "True"
    assert "320.0 MiB of managed memory are reserved" in found[5]
    assert found[6] == "320 320"


@needs_software_gpu
def test_an_upstream_serves_a_capture_from_what_it_has_free(kernel_cache: Path) -> None:
    program = """
theirs, kept = cp.cuda.MemoryPool(cp.cuda.malloc_managed), []
stream = cp.cuda.Stream(non_blocking=True)
def captured(upstream, nbytes=4096, **limits):
    stream.begin_capture()
    try:
        with umem.managed(upstream=upstream, **limits):
            kept.append(cp.full(nbytes, 7, "u1"))
    except (umem.UmemError, MemoryError) as error:
        print(type(error).__name__, error)
    try:
        stream.end_capture()
        print("captured", len(kept))
    except Exception as error:
        print(type(error).__name__)
with stream:
    for _ in range(4):
        theirs.malloc(4096)
    with umem.managed(upstream=theirs.malloc):
        cp.full(4096, 7, "u1")
    stream.synchronize()
    captured(theirs.malloc)
    captured(theirs.malloc, limit="4KiB")
    def must_grow(nbytes):
        cp.cuda.runtime.streamSynchronize(stream.ptr)  # refused, as a growth in a strict capture
    captured(must_grow, 40 << 20)
"""
    found = lines(program, kernel_cache)
    assert found[0] == "captured 1"
    assert found[1].startswith("LimitError") and found[2] == "captured 1"
    assert found[3].startswith("DeviceError upstream= does not have 40.0 MiB free")
    assert "has ended the capture" in found[3] and found[4] == "CUDARuntimeError"


@needs_software_gpu
def test_an_upstream_is_kept_no_longer_than_it_is_in_use(kernel_cache: Path) -> None:
    program = """
import gc, weakref
class Pool(cp.cuda.MemoryPool):
    pass
class Allocator:
    __hash__ = None
    def __init__(self):
        self.pool = Pool(cp.cuda.malloc_managed)
        pools.append(weakref.ref(self.pool))
    def __call__(self, nbytes):
        return self.pool.malloc(nbytes)
pools, kept = [], []
for number in range(5):
    with umem.managed(upstream=Allocator()):
        array = cp.ones(1 << 20, "u1")
    if number == 3:
        kept.append(array)
    del array
gc.collect()
print([pool() is not None for pool in pools].index(True), sum(bool(pool()) for pool in pools))
print(umem.status().managed_bytes, int(kept[0].sum()))
kept.clear()
gc.collect()
print(sum(bool(pool()) for pool in pools), umem.status().managed_bytes)
"""
    assert lines(program, kernel_cache) == ["3 1", "1048576 1048576", "0 0"]


def test_what_is_no_upstream_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="rmm_cupy_allocator; got int"):
        umem.managed(upstream=3)  # type: ignore[arg-type]
    with pytest.raises(StateError, match="without a preset"):
        umem.managed(preset="streaming", upstream=len)
    with umem.virtual_gpu("t4"):
        with pytest.raises(DeviceError, match="leave out upstream="):
            umem.managed(upstream=len).__enter__()
        with pytest.raises(StateError, match="only with managed memory"):
            umem.enable("hybrid", upstream=len)
        with pytest.raises(DeviceError, match="a virtual GPU is current"):
            umem.memory_resource()


@needs_software_gpu
def test_hints_take_other_libraries_arrays_by_their_interface(kernel_cache: Path) -> None:
    program = """
class Theirs:
    def __init__(self, array):
        self.array = array
    @property
    def __cuda_array_interface__(self):
        return self.array.__cuda_array_interface__
with umem.managed():
    array = cp.ones((4, 1 << 20), "f4")
plain = Theirs(cp.ones(5))
print(umem.prefetch({"x": Theirs(array), "y": [plain]}) >> 20)
print(umem.prefetch(Theirs(array[::2]), "cpu") >> 20, umem.location(Theirs(array)).last_prefetch)
umem.advise(Theirs(array), "read_mostly")
print(umem.location(array).read_mostly, umem.location(plain).managed)
umem.as_numpy(Theirs(array))[0, 0] = 7
print(float(array[0, 0]))
class OnHost(Theirs):
    @property
    def __cuda_array_interface__(self):
        raise AttributeError("as PyTorch's tensors on the host")
    def __array__(self, dtype=None, copy=None):
        return self.array
for hint in (umem.prefetch, umem.location, umem.as_numpy):
    try:
        print(hint(OnHost(np.ones(5))))
    except umem.UmemError as error:
        print(error)
print(umem.prefetch(Theirs(array), strict=True) >> 20)
"""
    found = lines(program, kernel_cache)
    assert found[:4] == ["16", "8 None", "True False", "7.0"]
    assert found[4:7] == ["not an array of GPU 0: OnHost"] * 3 and found[7] == "16"
