"""A fault of a kernel: whose error it is, what it ends, and what goes on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from processes import python
from software_programs import GOES_ON, START, is_installed, needs_software_gpu, run

from umem._common.specs import gpu_spec
from umem.errors import SizeError
from umem.host_cuda import faults
from umem.host_cuda.allocations import HostMemory
from umem.host_cuda.faults import Contexts, Fault, KernelFault, RedirectedModule
from umem.host_cuda.memory_ranges import DEVICE
from umem.host_cuda.options import check_seconds

CHECKED = START.replace("force=True", "force=True, checked=True")
KERNELS = r'''
import ctypes, pickle, sys, threading
from umem.host_cuda.faults import revive
module = cp.RawModule(code="""
extern "C" __global__ void shift(float* y, const float* x) { y[threadIdx.x] = x[threadIdx.x + 1]; }
extern "C" __global__ void claim(float* x) { assert(x[0] > 100); }
""")
shift, claim = module.get_function("shift"), module.get_function("claim")
runtime, driver = cp.cuda.runtime, cp.cuda.driver
x, y = cp.arange(10, dtype="f4"), cp.zeros(10, "f4")

def fault():
    shift((1,), (10,), (y, x))
    cp.cuda.Device().synchronize()

def said(call, *given):
    try:
        return call(*given)
    except (runtime.CUDARuntimeError, driver.CUDADriverError) as error:
        kept = error.status, str(error)
    return kept

def status(call, *given):
    found = said(call, *given)
    return found[0] if isinstance(found, tuple) else found
'''


# -- contexts ------------------------------------------------------------------------------------


class Module:
    """Functions that are redirected, as those of CuPy's modules."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.functions: dict[str, Any] = {}
        self.redirect(self.original)

    def original(self, name: str) -> Any:
        return lambda *given: self.calls.append(name) or len(given)  # type: ignore[func-returns-value]

    def redirect(self, handler: Any) -> None:
        names = ("malloc", "free", "streamDestroy", "getDevice", "setDevice")
        self.functions = {name: handler(name) for name in names}


def test_only_the_context_of_the_fault_ends_and_is_revived() -> None:
    memory, module = HostMemory(gpu_spec("t4"), count=2), Module()

    def failed(fault: Fault) -> None:
        raise KernelFault(fault.status, fault.reminder)

    memory.fault_type = KernelFault
    contexts = Contexts(memory, [RedirectedModule(module.redirect, module.original, failed)])
    memory.context_ends = contexts.end
    with pytest.raises(KernelFault, match=r"^it leaves its array$"):
        memory.end_context(700, "it leaves its array")
    with pytest.raises(KernelFault, match=r"it leaves its array\. It ended .*sticky=off$"):
        module.functions["malloc"](8)
    for name in ("free", "streamDestroy", "getDevice", "setDevice"):
        module.functions[name](1)
    assert module.calls == ["free", "streamDestroy", "getDevice", "setDevice"]
    memory.current.ordinal = 1
    assert module.functions["malloc"](8) == 1
    memory.current.ordinal = 0
    assert contexts.revive() == (Fault(700, "it leaves its array"),)
    assert module.functions["malloc"](8) == 1 and contexts.revive() == ()


def test_a_fault_ends_nothing_where_the_option_says_so() -> None:
    memory = HostMemory(gpu_spec("t4"))
    memory.is_sticky = False
    with pytest.raises(KernelFault):
        memory.end_context(710, "no")
    assert memory.devices[0].fault is None and memory.allocate(8, DEVICE)


def test_without_a_software_gpu_there_is_nothing_to_revive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "contexts", [])
    assert faults.revive() == ()


def test_a_free_that_fails_after_a_fault_says_nothing() -> None:
    memory = HostMemory(gpu_spec("t4"))
    freed = threading.Event()

    def free() -> None:
        freed.set()
        raise KernelFault(700, "no")

    redirected = RedirectedModule(
        lambda handler: vars(memory).update(freed=handler("free")), lambda name: free, None
    )
    memory.context_ends = Contexts(memory, [redirected]).end
    with pytest.raises(KernelFault):
        memory.end_context(700, "no")
    vars(memory)["freed"]()
    assert freed.is_set()


# -- the real CuPy -------------------------------------------------------------------------------


@needs_software_gpu
class TestFaultsOfCupy:
    @pytest.mark.parametrize("more", ["", ", stream_seed=0", ", stream_seed=3"])
    def test_each_later_call_has_the_status_until_the_device_is_revived(
        self, kernel_cache: Path, more: str
    ) -> None:
        program = """
sentence = ("the kernel shift reads 0 bytes behind the end of argument 1 (const float* x), "
            "which has 40 bytes")
number, first = said(fault)
assert first == "cudaErrorIllegalAddress: an illegal memory access was encountered: " + sentence
try:
    x + 1
except umem.errors.DeviceError as error:
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, runtime.CUDARuntimeError) and str(again) == str(error)
    assert again.status == error.status == 700 and error.sentence.startswith(sentence)
    del error
stream = None
for call in (
    lambda: cp.zeros(3), lambda: x + 1, lambda: y.get(), cp.cuda.Device().synchronize, fault,
    runtime.memGetInfo, runtime.eventCreate, lambda: cp.dot(x, x), lambda: cp.fft.fft(x),
    lambda: cp.sort(x), lambda: cp.random.default_rng(0).random(3), lambda: umem.prefetch(x),
    lambda: runtime.streamBeginCapture(4711),
):
    number, text = said(call)
    assert number == 700 and sentence in text and "sticky=off" in text, (number, text)
assert ctypes.CDLL("libcuda.so.1").cuStreamSynchronize(ctypes.c_void_p(0)) == 700
assert runtime.getDeviceCount() == 1 and cp.cuda.Device(0).compute_capability
kept = gpu.resident_bytes
z = x
del x, z  # a free says nothing
assert [each.sentence for each in revive()] == [sentence] and revive() == ()
assert gpu.resident_bytes <= kept
assert (y + 1).tolist()[:3] == [2, 3, 4]  # what the kernel had written
number, text = said(lambda: (claim((1,), (1,), (y,)), y.get()))
assert number == 710 and "the assertion x[0] > 100 failed" in text, text
assert status(lambda: y + 1) == 710
assert len(revive()) == 1 and float(y[0]) == 1
x = cp.arange(10, dtype="f4")
print(said(fault)[0])
"""
        start = CHECKED.replace("checked=True", f"checked=True{more}") + KERNELS
        assert run(program, kernel_cache, start=start) == "700\n"  # and it ends in silence

    def test_a_fault_in_a_thread_or_during_a_capture_ends_the_device_for_all(
        self, kernel_cache: Path
    ) -> None:
        program = """
found = []
thread = threading.Thread(target=lambda: found.append(status(fault)))
thread.start()
thread.join()
print(found, status(lambda: x + 1))
revive()
stream = cp.cuda.Stream(non_blocking=True)
stream.begin_capture()
print(status(fault), status(stream.end_capture))
revive()
print(runtime.streamIsCapturing(stream.ptr), status(stream.end_capture))
with stream:
    print((y + 1).tolist()[0])
"""
        expected = "[700] 700\n700 700\n0 401\n2.0\n"
        assert run(program, kernel_cache, start=CHECKED + KERNELS) == expected

    @pytest.mark.parametrize("more", ["", ", stream_seed=1"])
    def test_the_other_device_goes_on(self, kernel_cache: Path, more: str) -> None:
        program = """
with cp.cuda.Device(1):
    z = cp.arange(4)
print(status(fault), status(lambda: x + 1))
with cp.cuda.Device(1):
    print((z + 1).tolist())
    cp.cuda.Device().synchronize()
print(status(lambda: y.get()), [each.status for each in revive()])
"""
        start = CHECKED.replace("checked=True", f"checked=True, devices=2{more}") + KERNELS
        assert run(program, kernel_cache, start=start) == "700 700\n[1, 2, 3, 4]\n700 [700]\n"

    def test_late_work_of_an_ended_context_is_dropped(self, kernel_cache: Path) -> None:
        program = """
found = set()
for seed in range(20):
    gpu.reseed(seed)
    a, stream = cp.zeros(4), cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    try:
        shift((1,), (10,), (y, x))
        a += 1  # behind it
        del stream
        cp.cuda.Device().synchronize()
        found.add("lost")
    except runtime.CUDARuntimeError as error:
        found.add(error.status)
    assert len(revive()) == 1
    found.add(float(a.sum()))
    del a
print(sorted(found))
"""
        start = CHECKED.replace("checked=True", "checked=True, stream_seed=0") + KERNELS
        assert run(program, kernel_cache, start=start) == "[0.0, 700]\n"

    def test_a_script_that_ends_by_a_fault_says_it_once(
        self, kernel_cache: Path, tmp_path: Path
    ) -> None:
        script = tmp_path / "script.py"
        script.write_text(
            "import cupy as cp\n"
            "k = cp.ElementwiseKernel('raw int32 x', 'int32 y', 'y = x[i + 1]', 'beyond')\n"
            "held, stream, event = cp.zeros(99), cp.cuda.Stream(), cp.cuda.Event()\n"
            "pinned = cp.cuda.alloc_pinned_memory(99)\n"
            "k(cp.arange(4, dtype='i4'), cp.zeros(4, 'i4'))\n"
        )
        command = ("-m", "umem", "run", "--software", "t4", "--checked", "--report", script)
        done = python(*command, XDG_CACHE_HOME=kernel_cache, CUPY_CACHE_DIR=kernel_cache)
        assert done.returncode == 1 and done.stderr.count("cudaErrorIllegalAddress") == 1
        assert "ignored" not in done.stderr, done.stderr

    def test_with_sticky_off_the_process_goes_on(self, kernel_cache: Path) -> None:
        program = """
print(status(fault), (x + 1).tolist()[:2], revive())
"""
        start = GOES_ON.replace("force=True", "force=True, checked=True") + KERNELS
        assert run(program, kernel_cache, start=start) == "700 [1.0, 2.0] ()\n"


@is_installed
@needs_software_gpu
def test_pytest_revives_the_device_behind_the_test_that_made_the_fault(
    kernel_cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "test_it.py").write_text(
        "import cupy as cp, pytest\n"
        "kernel = cp.ElementwiseKernel('raw int32 x', 'int32 y', 'y = x[i + 1]', 'beyond')\n"
        "def fault(): kernel(cp.arange(4, dtype='i4'), cp.zeros(4, 'i4'))\n"
        "@pytest.fixture\n"
        "def held():\n"
        "    x = cp.ones(3)\n"
        "    yield x\n"
        "    assert float(x.sum()) == 3\n"
        "@pytest.fixture\n"
        "def faulty(): fault()\n"
        "def test_fault(held): fault()\n"
        "def test_next(held): held.sum()\n"
        "def test_in_fixture(faulty): pass\n"
        "def test_expected(held):\n"
        "    with pytest.raises(cp.cuda.runtime.CUDARuntimeError, match='beyond'):\n"
        "        fault()\n"
        "    with pytest.raises(cp.cuda.runtime.CUDARuntimeError):\n"
        "        cp.cuda.Device().synchronize()\n"
        "def test_last(held): held.sum()\n"
    )
    # At once, so that it is the fixture that fails: late, its test may be the first that waits.
    gpu = ("--software-gpu", "t4,checked,seed=off")
    words = ("-q", "-p", "no:cacheprovider", *gpu, "-W", "error")
    given = {"XDG_CACHE_HOME": kernel_cache, "CUPY_CACHE_DIR": kernel_cache}
    done = python("-m", "pytest", *words, "--rootdir", tmp_path, tmp_path, **given)
    assert done.stdout.startswith("F.E.. "), done.stdout
    assert "1 failed, 3 passed, 1 error" in done.stdout


# -- kernels that never end --------------------------------------------------------------------

ENDLESS = r'''
code = """
extern "C" __global__ void apart(int* x, int n) { while (n) x[0] += 1; x[1] = 7; }
extern "C" __global__ void together(volatile int* x, int n) {
  __shared__ int held[64];
  held[threadIdx.x] = n;
  __syncthreads();
  while (held[threadIdx.x]) { __syncthreads(); x[0] += 1; }
  x[1] = 7;
}"""
x = cp.zeros(64, "i4")
forever = cp.ElementwiseKernel("int32 n", "int32 y", "while (n) y += 1; y = 7", "forever")
wait = cp.cuda.Device().synchronize
kernels = {name: cp.RawKernel(code, name) for name in ("apart", "together")}
calls = {name: lambda n, k=k: k((2,), (64,), (x, n)) for name, k in kernels.items()}
calls["forever"] = lambda n: forever(n, x)
for name, call in calls.items():
    for _ in range(2):
        try:
            call(1)
            wait()
        except cp.cuda.runtime.CUDARuntimeError as error:
            print(name, error.status, error)
        call(0)
        wait()
        assert x[1] == 7
        x[...] = 0
print(cp.cuda.runtime.getDeviceProperties(0)["kernelExecTimeoutEnabled"])
'''


@needs_software_gpu
@pytest.mark.parametrize("more", ["", ", checked=True", ", stream_seed=0"])
def test_a_kernel_that_never_ends_is_ended_and_named(kernel_cache: Path, more: str) -> None:
    start = START.replace("force=True", f"force=True, kernel_seconds=0.1, sticky=False{more}")
    *said, is_limited = run(ENDLESS, kernel_cache, start=start).splitlines()
    expected = [
        f"{name} 702 cudaErrorLaunchTimeout: the launch timed out and was terminated: the kernel "
        f"{name} has taken more than 0.1 s of the processor: it may never end; if it does, raise "
        "kernel_seconds="
        for name in ("apart", "apart", "together", "together", "forever", "forever")
    ]
    assert said == expected and is_limited == "1"


@pytest.mark.parametrize("seconds", [0, -1, 1e-9, 1e9, float("nan"), True, "1"])
def test_a_limit_that_is_no_time_is_refused(seconds: Any) -> None:
    with pytest.raises(SizeError, match=r"kernel_seconds=.*: the processor time that a kernel may"):
        check_seconds(seconds)
