"""Two devices and more on the software GPU: each has its own memory, streams and simulated time."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from processes import python
from software_programs import START, needs_compiler, needs_cupy, run

import umem
from umem.cli import main
from umem.errors import DeviceError
from umem.host_cuda import check_count

TWO = START.replace('"64MiB"', '"64MiB", devices=2').replace(
    "import numpy as np", "import threading\nimport warnings\nimport numpy as np"
)
TWO += """
runtime, driver = cp.cuda.runtime, cp.cuda.driver
MIB = 1 << 20
warnings.simplefilter("ignore", cp._util.PerformanceWarning)

def status(function, *given):
    try:
        function(*given)
    except (runtime.CUDARuntimeError, driver.CUDADriverError) as error:
        return error.status
    return 0
"""
pytestmark = [needs_cupy, needs_compiler]


@pytest.mark.parametrize("count", [0, 9, -1, "two", "2", 1.0, True, None])
def test_a_number_of_devices_that_cannot_be_is_refused(count: object) -> None:
    with pytest.raises(DeviceError, match=r"a whole number from 1 to 8; got "):
        umem.software_gpu("t4", devices=count)  # type: ignore[arg-type]
    check_count(8)


def test_each_device_has_its_own_memory_and_counts(kernel_cache: Path) -> None:
    program = """
one, other = gpu.devices
assert runtime.getDeviceCount() == 2 and gpu is one
held = [cp.zeros(40 * MIB, "u1")]
assert status(cp.cuda.Device(2).use) == 101 == status(runtime.getDeviceProperties, -1)
with cp.cuda.Device(1):
    assert runtime.memGetInfo()[0] == 64 * MIB
    held.append(cp.zeros(40 * MIB, "u1"))  # there is no room for both on one
    assert held[1].device.id == 1 and held[0].device.id == 0
    assert runtime.memGetInfo()[0] == 24 * MIB
    try:
        cp.zeros(40 * MIB, "u1")
    except cp.cuda.memory.OutOfMemoryError:
        print("full")
    assert cp.get_default_memory_pool().total_bytes() == 40 * MIB
assert runtime.getDevice() == 0
assert [each.figures.peak_bytes for each in gpu.devices] == [40 * MIB, 40 * MIB]
assert (one.resident_bytes, other.resident_bytes) == (40 * MIB, 40 * MIB)
assert one.calls.allocation_count == 1 and other.calls.allocation_count >= 1
attributes = [runtime.pointerGetAttributes(x.data.ptr + 5).device for x in held]
assert attributes == [0, 1], attributes
del held[1]
with cp.cuda.Device(0):
    cp.get_default_memory_pool().free_all_blocks()  # that of device 0
assert other.resident_bytes == 40 * MIB
with cp.cuda.Device(1):
    cp.get_default_memory_pool().free_all_blocks()
assert other.resident_bytes == 0 and one.resident_bytes == 40 * MIB
gpu.restart()
assert [each.figures.seconds for each in gpu.devices] == [0, 0]
assert other.calls.allocation_count == 0
buses = [runtime.deviceGetPCIBusId(n) for n in range(2)]
assert len({*buses}) == 2 and [runtime.deviceGetByPCIBusId(bus) for bus in buses] == [0, 1]
assert status(runtime.deviceGetByPCIBusId, "0000:07:00.0") == 101
assert status(runtime.deviceGetByPCIBusId, "one") == 1
runtime.deviceSetLimit(0, 4096)
with cp.cuda.Device(1):
    assert runtime.deviceGetLimit(0) == 1024
    pool = runtime.deviceGetDefaultMemPool(1)
    asynchronous = cp.cuda.memory.malloc_async(MIB)
    assert runtime.memPoolGetAttribute(pool, runtime.cudaMemPoolAttrUsedMemCurrent) == MIB
    assert runtime.memPoolGetAttribute(
        runtime.deviceGetDefaultMemPool(0), runtime.cudaMemPoolAttrUsedMemCurrent
    ) == 0
"""
    assert run(program, kernel_cache, start=TWO) == "full\n"


def test_the_current_device_is_each_thread_s_own(kernel_cache: Path) -> None:
    program = """
cp.cuda.Device(1).use()
found = []
def work():
    found.append((driver.ctxGetCurrent(), runtime.getDevice()))
    found.append(cp.arange(3).device.id)
thread = threading.Thread(target=work)
thread.start()
thread.join()
assert found == [(0, 0), 0], found
assert driver.ctxGetDevice() == 1 and cp.arange(3).device.id == 1
context = driver.ctxGetCurrent()
stream = cp.cuda.Stream()
with cp.cuda.Device(0):
    other = driver.ctxGetCurrent()
    assert driver.streamGetCtx(stream.ptr) == context != other
    driver.ctxSetCurrent(context)
    assert runtime.getDevice() == 1
    driver.ctxSetCurrent(other)
assert status(driver.ctxSetCurrent, 99) == 201
"""
    run(program, kernel_cache, start=TWO)


def test_arrays_go_from_one_device_to_the_other(kernel_cache: Path) -> None:
    program = """
x = cp.arange(MIB, dtype="f4")
assert [runtime.deviceCanAccessPeer(0, n) for n in range(2)] == [0, 1]
with cp.cuda.Device(1):
    y = cp.arange(MIB, dtype="f4") * 2
    copy = cp.asarray(x)
    assert copy.device.id == 1 and (copy == y / 2).all()
    assert float((x + y)[-1]) == 3 * (MIB - 1)  # CuPy makes device 0 a peer
    z = cp.empty_like(y)
    z.data.copy_from(x.data, x.nbytes)
    assert bool((z == copy).all())
    runtime.memcpyPeer(z.data.ptr, 1, (x + 1).data.ptr, 0, 16)
    runtime.memcpyPeerAsync(z.data.ptr + 16, 1, x.data.ptr, 0, 16, 0)
    assert z[:8].tolist() == [1, 2, 3, 4, 0, 1, 2, 3]
    assert cp.asnumpy(x[:4]).tolist() == [0, 1, 2, 3]  # a copy to the host needs no peer
    x.fill(7)
    assert float(x.sum()) == 7 * MIB
assert float(x.sum()) == 7 * MIB
"""
    run(program, kernel_cache, start=TWO)


def test_memory_of_a_device_that_is_no_peer_is_an_illegal_address(kernel_cache: Path) -> None:
    program = """
from cupy_backends.cuda.libs import cublas

kernel = cp.RawKernel('extern "C" __global__ void one(float* x) { x[0] = 1; }', "one")
x = cp.zeros(4, "f4")
two = np.full(1, 2, "f4")
kernel((1,), (1,), (x,))
with cp.cuda.Device(1):
    assert status(kernel, (1,), (1,), (x,)) == 700
    scaled = cp.cuda.Device().cublas_handle, 4, two.ctypes.data, x.data.ptr, 1
    assert status(cublas.sscal, *scaled) == 700
    assert status(runtime.deviceDisablePeerAccess, 0) == 705
    assert status(runtime.deviceEnablePeerAccess, 1) == 101  # itself
    assert status(runtime.deviceEnablePeerAccess, 2) == 101
    runtime.deviceEnablePeerAccess(0)
    assert status(runtime.deviceEnablePeerAccess, 0) == 704
    kernel((1,), (1,), (x,))
    runtime.deviceDisablePeerAccess(0)
    assert status(kernel, (1,), (1,), (x,)) == 700
    managed = cp.ndarray(4, "f4", cp.cuda.malloc_managed(16))
    managed.fill(0)
kernel((1,), (1,), (managed,))  # which is nobody's
assert x.tolist() == managed.tolist() == [1, 0, 0, 0]
"""
    run(program, kernel_cache, start=TWO.replace("force=True", "force=True, sticky=False"))


def test_streams_events_and_kernels_are_of_one_device(kernel_cache: Path) -> None:
    program = """
module = cp.RawModule(code='extern "C" __global__ void one(float* x) { x[0] = 1; }')
kernel, x = module.get_function("one"), cp.zeros(4, "f4")
stream, event = cp.cuda.Stream(), cp.cuda.Event()
event.record(stream)
with cp.cuda.Device(1):
    mine, end, y = cp.cuda.Stream(), cp.cuda.Event(), cp.zeros(4, "f4")
    kernel((1,), (1,), (y,))  # CuPy compiles it again, for this device
    assert y[0] == 1
    assert status(event.record, mine) == 400  # of another device
    assert status(end.record, stream) == 400
    end.record(mine)
    assert status(cp.cuda.get_elapsed_time, event, end) == 400
    mine.wait_event(event)  # any device may wait for any other
    event.synchronize()
    stream.synchronize()
    assert stream.done and event.done
    runtime.memcpyAsync(x.data.ptr, y.data.ptr, 16, 3, stream.ptr)  # a copy takes any stream
    runtime.memsetAsync(y.data.ptr, 0, 16, stream.ptr)
    try:
        stream.use()
    except RuntimeError as error:
        assert "does not match" in str(error)
    mine.use()
    assert status(runtime.streamDestroy, stream.ptr) == 0
    stream.ptr = 0
assert x.tolist() == [1, 0, 0, 0] and y.tolist() == [0] * 4
"""
    run(program, kernel_cache, start=TWO)


def test_a_launch_takes_a_kernel_and_a_stream_of_the_current_device(kernel_cache: Path) -> None:
    program = """
code = 'extern "C" __global__ void one(float* x) { x[0] = 1; }'
x = cp.zeros(4, "f4")
kernel = cp.RawKernel(code, "one")
kernel.compile()
function = kernel.kernel
stream = cp.cuda.Stream()
address = np.array([x.data.ptr], "u8")
given = np.array([address.ctypes.data], "u8")

def launch(stream):
    return status(
        driver.launchKernel, function.ptr, 1, 1, 1, 1, 1, 1, 0, stream, given.ctypes.data, 0
    )

assert launch(stream.ptr) == 0 and x[0] == 1
with cp.cuda.Device(1):
    assert launch(0) == 400  # the kernel was loaded on the other device
    strange = cp.cuda.Stream()
assert launch(strange.ptr) == 400
"""
    run(program, kernel_cache, start=TWO)


def test_time_passes_on_each_device_and_once_for_the_host(kernel_cache: Path) -> None:
    program = """
one, other = gpu.devices
x = cp.zeros(4 * MIB, "f4")
with cp.cuda.Device(1):
    y = cp.zeros(4 * MIB, "f4")
for n in range(2):
    with cp.cuda.Device(n):
        (x, y)[n][:] += 1  # compiled, and loaded
gpu.restart()
for _ in range(20):
    for n in range(2):
        with cp.cuda.Device(n):
            (x, y)[n][:] += 1
for n in range(2):
    cp.cuda.Device(n).synchronize()
both = [each.figures for each in gpu.devices]
gpu.restart()
for _ in range(40):
    x[:] += 1
cp.cuda.Device().synchronize()
alone = one.figures
assert np.allclose([each.compute_seconds for each in both], alone.compute_seconds / 2)
assert max(f.seconds for f in both) < 0.6 * alone.seconds, (both, alone)  # side by side

gpu.restart()
with cp.cuda.Device(1):
    y[:] = cp.asarray(x)  # 16 MiB over the bus
seconds = [each.figures.stall_seconds for each in gpu.devices]
link = min(gpu.spec.host_in_bandwidth, gpu.spec.host_out_bandwidth)
assert all(abs(s - 16 * MIB / link) < 1e-4 for s in seconds), seconds

gpu.restart()
with cp.cuda.Device(1):
    y += x  # reads a peer's memory in place
assert other.figures.remote_bytes == 16 * MIB and one.figures.remote_bytes == 0
assert other.figures.stall_seconds > 0 and one.figures.stall_seconds == 0

gpu.restart()
start, end = cp.cuda.Event(), cp.cuda.Event()
start.record()
with cp.cuda.Device(1):
    there = cp.cuda.Event()
    for _ in range(40):
        y += 1
    there.record()
cp.cuda.Stream.null.wait_event(there)
end.record()
assert cp.cuda.get_elapsed_time(start, end) >= 1000 * other.figures.compute_seconds > 0
"""
    run(program, kernel_cache, start=TWO)


def test_managed_memory_moves_to_the_device_that_uses_it(kernel_cache: Path) -> None:
    program = """
one, other = gpu.devices
with umem.managed():
    x = cp.zeros(32 * MIB, "u1")
assert (one.resident_bytes, other.resident_bytes) == (32 * MIB, 0)
add = cp.RawKernel('extern "C" __global__ void add(unsigned char* x) { x[0] += 1; }', "add")
with cp.cuda.Device(1):
    add((1,), (1,), (x,))
assert (one.resident_bytes, other.resident_bytes) == (0, 32 * MIB)
assert one.figures.migrated_out_bytes == other.figures.migrated_in_bytes == 32 * MIB
assert other.figures.populated_bytes == 0 and other.figures.fault_count == 16
add((1,), (1,), (x,))
assert (one.resident_bytes, other.resident_bytes) == (32 * MIB, 0)
assert one.figures.migrated_in_bytes == 32 * MIB and int(x[0]) == 2

gpu.restart()
assert umem.prefetch(x, to=1) == x.nbytes
assert umem.location(x).last_prefetch == 1
assert (one.resident_bytes, other.resident_bytes) == (0, 32 * MIB)
with cp.cuda.Device(1):
    add((1,), (1,), (x,))
    assert other.figures.fault_count == 0
assert umem.prefetch(x, to="cpu") == x.nbytes
assert (one.resident_bytes, other.resident_bytes) == (0, 0)
umem.prefetch(x)
assert (one.resident_bytes, other.resident_bytes) == (32 * MIB, 0)

umem.advise(x, "accessed_by", 1)
umem.advise(x, "accessed_by", 0)
umem.advise(x, "preferred_location", 1)
place = umem.location(x)
assert place.accessed_by == (0, 1) and place.preferred == 1, place
umem.advise(x, "accessed_by", 0, unset=True)
assert umem.location(x).accessed_by == (1,)
try:
    umem.prefetch(x, to=2)
except umem.errors.DeviceError as error:
    print("refused")

gpu.restart()
memory = cp.cuda.malloc_managed(8 * MIB)
y = cp.ndarray(8 * MIB, "u1", memory)
held = [one.resident_bytes, other.resident_bytes]
y.fill(1)
with cp.cuda.Device(1):
    y[: 4 * MIB] += 1  # the first half is there, the other one here
assert one.resident_bytes == held[0] + 4 * MIB and other.resident_bytes == held[1] + 4 * MIB
del y, memory
assert [one.resident_bytes, other.resident_bytes] == held
"""
    assert run(program, kernel_cache, start=TWO) == "refused\n"


def test_umem_serves_the_current_device(kernel_cache: Path) -> None:
    program = """
one, other = gpu.devices
with umem.hybrid():
    held = []
    for n in (0, 1):
        with cp.cuda.Device(n):
            held += [cp.zeros(16 * MIB, "u1") for _ in range(5)]  # spills on each
            print(n, umem.status().device, gpu.devices[n].resident_bytes <= 64 * MIB)
    kinds = [runtime.pointerGetAttributes(x.data.ptr).type for x in held]
    assert kinds.count(3) >= 2, kinds
    assert [x.device.id for x in held] == [0] * 5 + [1] * 5
del held
with umem.enable("managed", limit="48MiB"), cp.cuda.Device(1):
    x = cp.ones(32 * MIB, "u1")
    assert runtime.pointerGetAttributes(x.data.ptr).type == 3
    with umem.statistics() as seen, umem.track() as tracked:
        y = cp.ones(MIB, "u1")
    assert seen.total_bytes == MIB
    assert int(umem.as_numpy(x)[-1]) == 1
    assert umem.status().resident_bytes == other.resident_bytes
try:
    umem.prefetch(x)
except umem.errors.DeviceError as error:
    print(error)
with umem.managed(), umem.record() as recorder:
    z = cp.ones(MIB, "f4")
    with cp.cuda.Device(1):
        z = cp.asarray(z) + 1
names = [event.name for event in recorder.trace.events if hasattr(event, "writes")]
assert "memcpy" in names, names
"""
    said = run(program, kernel_cache, start=TWO).splitlines()
    assert said[0] == "0 T4 True" and said[1] == "1 T4 True"
    assert said[2].startswith("the array is on GPU 1, and this is GPU 0")


def test_libraries_and_random_numbers_work_on_every_device(kernel_cache: Path) -> None:
    program = """
a = np.random.default_rng(0).standard_normal((16, 16)).astype("f4")
for n in range(2):
    with cp.cuda.Device(n):
        x = cp.asarray(a)
        found = x @ x, cp.linalg.inv(x), cp.fft.fft(x), cp.sort(x, axis=0)
        wanted = a @ a, np.linalg.inv(a), np.fft.fft(a), np.sort(a, axis=0)
        for ours, theirs in zip(found, wanted):
            assert ours.device.id == n and np.allclose(ours.get(), theirs, atol=1e-3)
        cp.random.seed(0)
        assert cp.random.rand(5).device.id == n
        with cp.cuda.Stream() as stream:
            assert np.allclose((x @ x).get(), wanted[0], atol=1e-3)
"""
    run(program, kernel_cache, start=TWO)


@pytest.mark.parametrize("late", ["", ", stream_seed=0"])
def test_a_transform_goes_over_several_devices(late: str, kernel_cache: Path) -> None:
    program = """
warnings.simplefilter("ignore", FutureWarning)  # CuPy says that it is experimental
from cupy.cuda import cufft

a = np.random.default_rng(0).standard_normal((5, 64)) + 1j
cp.fft.config.use_multi_gpus = True
cp.fft.config.set_cufft_gpus([0, 1])
for dtype, kind in (("c8", cufft.CUFFT_C2C), ("c16", cufft.CUFFT_Z2Z)):
    for given in (a.astype(dtype), a[0].astype(dtype)):  # several transforms, and one
        for there, back in ((np.fft.fft, cp.fft.fft), (np.fft.ifft, cp.fft.ifft)):
            found = back(cp.asarray(given))
            assert found.dtype == dtype and np.allclose(found.get(), there(given), atol=1e-4)
        plan = cufft.Plan1d(64, kind, given.size // 64, devices=[1, 0])
        out = np.empty_like(given)
        plan.fft(given, out, cufft.CUFFT_FORWARD)
        assert np.allclose(out, np.fft.fft(given), atol=1e-4)
assert all(each.figures.compute_seconds > 0 for each in gpu.devices)
try:
    cufft.Plan1d(64, cufft.CUFFT_C2C, 2, devices=[0, 2])
except cufft.CuFFTError as error:
    print(error)
"""
    start = TWO.replace("devices=2", f"devices=2{late}")
    assert run(program, kernel_cache, start=start) == "CUFFT_INVALID_DEVICE\n"


# -- streams that run late -----------------------------------------------------------------------


def test_a_wait_that_was_left_out_between_two_devices_is_seen(kernel_cache: Path) -> None:
    start = TWO.replace("devices=2", "devices=2, stream_seed=0")
    program = """
def last(is_right):
    with cp.cuda.Device(1):
        y = cp.zeros(1024, "f4")
        other = cp.cuda.Stream(non_blocking=True)
    x = cp.zeros(1024, "f4")
    for n in range(2):
        cp.cuda.Device(n).synchronize()
    x += 1
    done = cp.cuda.Event()
    done.record()
    with cp.cuda.Device(1), other:
        if is_right:
            other.wait_event(done)
        runtime.memcpyAsync(y.data.ptr, x.data.ptr, 4096, 3, other.ptr)
        y += 1
        other.synchronize()
        z = float(y[0])
    cp.cuda.Device(0).synchronize()
    return z

wrong, right = set(), set()
for seed in range(30):
    gpu.reseed(seed)
    wrong.add(last(False))
    right.add(last(True))
print(sorted(wrong), sorted(right))
for seed in range(10):  # the default stream copies between devices once both are done
    gpu.reseed(seed)
    x = cp.ones(1024, "f4")
    with cp.cuda.Device(1):
        mine = cp.cuda.Stream(non_blocking=True)
        with mine:
            y = cp.full(1024, 2, "f4")
    x.data.copy_from_device(y.data, 4096)
    assert float(x.sum()) == 2048
    product = x.reshape(32, 32) @ x.reshape(32, 32)
    with cp.cuda.Device(1):
        there = cp.full((32, 32), 2, "f4")
        assert float((there @ there).sum()) == 128 * 1024
    assert float(product.sum()) == 128 * 1024
"""
    assert run(program, kernel_cache, start=start) == "[1.0, 2.0] [2.0]\n"


# -- how it is asked for -------------------------------------------------------------------------

COUNT = "import cupy; print(cupy.cuda.runtime.getDeviceCount(), cupy.arange(3).device.id)"


def _started(*words: str, cache: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return python(*words, XDG_CACHE_HOME=cache, CUPY_CACHE_DIR=cache, **variables)


def test_a_command_has_several_devices_and_so_have_its_children(
    tmp_path: Path, kernel_cache: Path
) -> None:
    script = tmp_path / "two.py"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {COUNT!r}], check=True)"
    script.write_text(f"{COUNT}\nimport sys\nsys.stdout.flush()\n{child}\n", encoding="utf-8")
    command = ("-m", "umem", "run", "--software", "t4", "--devices", "3", str(script))
    done = _started(*command, cache=kernel_cache)
    assert done.stdout.split() == ["3", "0", "3", "0"], done.stderr
    refused = CliRunner().invoke(main, ["run", "--devices", "3", str(script)])
    assert refused.exit_code == 2 and "--devices needs --software GPU" in refused.output
    much = CliRunner().invoke(main, ["run", "--software", "t4", "--devices", "9", str(script)])
    assert much.exit_code == 2 and "9 is not in the range 1<=x<=8" in much.output


def test_pytest_refuses_a_number_of_devices_by_a_sentence(tmp_path: Path) -> None:
    given = "--software-gpu=t4,devices=9,force"
    plugin = ("-p", "umem_software_gpu.plugin", "-p", "no:cacheprovider")
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = _started("-m", "pytest", *plugin, given, str(tmp_path), cache=tmp_path, **environment)
    assert done.returncode == 4, done.stdout
    assert "devices must be a whole number from 1 to 8; got 9" in done.stderr
