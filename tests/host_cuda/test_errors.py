"""What a software GPU says to bad input: errors that name it, never a crash, nothing half done."""

from __future__ import annotations

import ctypes
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from processes import python
from software_programs import GOES_ON, START, needs_compiler, needs_cupy, run

from umem._common.host import has_real_gpu
from umem._common.specs import gpu_spec
from umem.cli import main
from umem.errors import DeviceError
from umem.host_cuda.allocations import HostMemory
from umem.host_cuda.memory_ranges import DEVICE
from umem.host_cuda.memory_sources import FREED_COUNT, GuardedSource, PlainSource
from umem.host_cuda.toolchain import ROOM_BYTES, Toolchain

CHECKED = GOES_ON.replace("force=True", "force=True, checked=True")
pytestmark = needs_compiler


# -- the compiler --------------------------------------------------------------------------------


def compiler(path: Path, does: str) -> str:
    """A compiler that does something else first, or instead."""
    real = shutil.which("g++")
    path.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = --version ]; then exec {real} --version; fi\n'
        f'{does}\nexec {real} "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


def test_a_compiler_that_fails_is_said_with_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path / "cxx", "echo out of order >&2; exit 3"))
    tools = Toolchain(tmp_path / "cache")
    with pytest.raises(DeviceError, match=r"(?s)cxx refuses a kernel.*out of order"):
        tools.shared_object("int x;", "c")
    assert not list(tools.folder.iterdir())


def test_a_compiler_that_says_nothing_is_said_with_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path / "cxx", "exit 3"))
    with pytest.raises(DeviceError, match="it exits with 3"):
        Toolchain(tmp_path / "cache").shared_object("int x;", "c")


def test_a_compiler_that_is_no_program_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "cxx"
    broken.write_bytes(b"\x00\x01\x02")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(DeviceError, match="cannot be run"):
        Toolchain(tmp_path / "cache").shared_object("int x;", "c")


# -- the folder ----------------------------------------------------------------------------------


def test_a_full_folder_is_left_for_one_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = tmp_path / "full"
    no_room = f'case "$*" in *{full}*) echo No space left on device >&2; exit 1;; esac'
    monkeypatch.setenv("CXX", compiler(tmp_path / "cxx", no_room))
    usage = shutil.disk_usage(tmp_path)

    def disk_usage(folder: Path) -> object:
        return usage._replace(free=0 if folder == full else usage.free)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    tools = Toolchain(full)
    path = tools.shared_object("int x;", "c")
    assert path.exists() and path.parent == tools.folder != full
    assert tools.shared_object("int y;", "c").parent == tools.folder
    assert not list(full.iterdir())


def test_a_real_file_system_that_is_full(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "umem-test", str(full)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        assert shutil.disk_usage(full).free < ROOM_BYTES
        (full / "filler").write_bytes(bytes(shutil.disk_usage(full).free))
        tools = Toolchain(full)
        assert tools.text_file("text", ".map").read_text() == "text"
        assert tools.shared_object("int x;", "c").exists()
        assert [path.name for path in full.iterdir()] in (["filler"], [])
    finally:
        subprocess.run(["umount", str(full)], check=True)


def test_a_drive_from_which_nothing_may_run_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,noexec", "umem-test", str(drive)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        tools = Toolchain(drive)
        assert ctypes.CDLL(str(tools.shared_object("int f(void) { return 7; }", "c"))).f() == 7
        assert tools.folder.parent != drive and not list(drive.iterdir())
        monkeypatch.setattr(tempfile, "tempdir", str(drive))
        with pytest.raises(DeviceError, match=r"programs cannot run in .* \(noexec\): set TMPDIR"):
            Toolchain(drive)
    finally:
        subprocess.run(["umount", str(drive)], check=True)


def test_the_folder_of_a_process_goes_with_it_and_not_with_its_child(tmp_path: Path) -> None:
    program = """
import os, sys
from pathlib import Path
from umem.host_cuda.toolchain import Toolchain
tools = Toolchain(Path(sys.argv[1]) / "below")
child = os.fork()
if child:
    os.waitpid(child, 0)
    assert tools.folder.is_dir()
    print(tools.folder)
"""
    file = tmp_path / "file"
    file.touch()
    asked = [sys.executable, "-c", program, str(file)]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert done.stdout and not Path(done.stdout.strip()).exists()


@pytest.mark.thorough
def test_ctrl_c_during_a_compile_leaves_nothing_half_done(tmp_path: Path, ctrl_c: object) -> None:
    begun, cache = tmp_path / "begun", tmp_path / "cache"
    program = """
import sys
from pathlib import Path
from umem.host_cuda.toolchain import Toolchain
print(Toolchain(Path(sys.argv[1])).shared_object("int x;", "c").exists())
"""
    slow = compiler(tmp_path / "cxx", f"touch {begun}; sleep 60")
    asked = [sys.executable, "-c", program, str(cache)]
    process = subprocess.Popen(
        asked, env={**os.environ, "CXX": slow}, stderr=subprocess.PIPE, text=True
    )
    until(begun.exists)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in said and process.returncode != 0
    assert not list(cache.iterdir())
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def until(holds: object) -> None:
    assert callable(holds)
    for _ in range(6000):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


# -- the line of progress ------------------------------------------------------------------------

COMPILES = """
import sys
from pathlib import Path
from umem.host_cuda import toolchain
toolchain.PATIENCE_SECONDS = float(sys.argv[2])
tools = toolchain.Toolchain(Path(sys.argv[1]))
for number in range(3):
    tools.shared_object(f"int x = {number};", "c")
"""


def on_a_terminal(folder: Path, patience: float) -> str:
    """What the program writes to standard error, which is a terminal."""
    here, there = pty.openpty()
    found = bytearray()

    def read() -> None:
        try:
            while part := os.read(here, 1024):
                found.extend(part)
        except OSError:  # it has ended
            pass

    reader = threading.Thread(target=read)
    reader.start()
    asked = [sys.executable, "-c", COMPILES, str(folder), str(patience)]
    subprocess.run(asked, stderr=there, check=True)
    os.close(there)
    reader.join()
    os.close(here)
    return found.decode()


def test_a_person_who_waits_is_told_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    said = on_a_terminal(tmp_path, 0.0)
    assert said == "".join(
        f"\rumem: compiling kernels for this machine, once: {number} so far\r\x1b[K"
        for number in (2, 3)
    )


@pytest.mark.thorough
def test_nothing_is_said_of_a_short_while_nor_of_what_is_there_nor_to_a_file(
    tmp_path: Path,
) -> None:
    assert on_a_terminal(tmp_path / "one", 1000.0) == ""
    assert on_a_terminal(tmp_path / "one", 0.0) == ""
    asked = [sys.executable, "-c", COMPILES, str(tmp_path / "other"), "0"]
    assert subprocess.run(asked, capture_output=True, check=True).stderr == b""


# -- memory --------------------------------------------------------------------------------------


def test_what_is_given_out_is_capped() -> None:
    source = PlainSource(cap_bytes=1 << 20)
    address = source.take(1 << 20)
    assert address is not None and source.take(1) is None
    source.give(address, 1 << 20)
    assert source.given_bytes == 0 and source.take(1) is not None


def test_memory_with_guards_ends_where_nothing_may_be_touched() -> None:
    source = GuardedSource()
    address = source.take(100)
    assert address is not None
    found = source.find(address + 100)
    assert found is not None and (found.start, found.nbytes) == (address, 100)
    assert (address + 100) % 4096 == 0 and source.find(address - 4096) is found
    source.give(address, 100)
    assert found.is_freed and source.find(address) is found
    for _ in range(FREED_COUNT):
        source.give(source.take(8) or 0, 8)
    assert source.find(address) is not found


@pytest.mark.parametrize(
    ("files", "is_there"),
    [
        ([], False),
        (["dev/nvidiactl", "dev/dxg"], False),
        (["dev/nvidia0"], True),
        (["dev/dxg", "usr/lib/wsl/lib/libcuda.so.1"], True),
    ],
)
def test_a_real_gpu_is_noticed(tmp_path: Path, files: list[str], is_there: bool) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert has_real_gpu(tmp_path) is is_there


def host_memory() -> HostMemory:
    return HostMemory(gpu_spec("t4"))


def test_memory_is_given_back_by_one_thread_at_a_time() -> None:
    memory = host_memory()
    held = memory.allocate(64, DEVICE)
    with memory.lock:
        thread = threading.Thread(target=memory.release, args=(held,))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and memory.allocation_of(held) is not None
    thread.join()
    assert memory.allocation_of(held) is None and memory.source.given_bytes == 0


def test_what_the_collector_frees_during_a_search_is_freed_after_it() -> None:
    memory = host_memory()
    held = sorted(memory.allocate(64, DEVICE) for _ in range(8))

    class Searched(int):
        def __lt__(self, other: int) -> bool:
            if other in freed and memory.allocation_of(other) is not None:
                freed.remove(other)
                memory.release(other)  # as the collector may, between any two steps
            return int(self) < other

    freed = set(held[:-1])
    assert memory.allocation_of(Searched(held[-1])) is not None
    assert len(freed) < 7
    memory.release(held[-1])
    assert {found for found in held if memory.allocation_of(found) is not None} == freed


# -- the real CuPy -------------------------------------------------------------------------------


@needs_cupy
class TestCupyErrors:
    def test_no_more_is_handed_out_than_there_is(self, kernel_cache: Path) -> None:
        program = """
from umem.host_cuda.allocations import HostMemory
from umem.host_cuda.memory_ranges import DEVICE
from umem.host_cuda.memory_sources import PlainSource
gpu._runtime.source = PlainSource(cap_bytes=256 << 20)
for make in (lambda: cp.empty(1 << 60, "u1"), lambda: cp.cuda.alloc_pinned_memory(1 << 60)):
    try:
        make()
    except (MemoryError, cp.cuda.runtime.CUDARuntimeError) as error:
        print(type(error).__name__)
held = []
try:
    with umem.managed():
        while True:
            held.append(cp.ones(16 << 20, "u1"))
except MemoryError as error:
    print(type(error).__name__, 8 < len(held) <= 16)
held.pop()
print({int(cp.asnumpy(x[-1])) for x in held})
held.clear()
with umem.managed():
    print(int(cp.ones(16 << 20, "u1").sum()) >> 20)
"""
        assert run(program, kernel_cache).splitlines() == [
            "OutOfMemoryError",
            "CUDARuntimeError",
            "OutOfMemoryError True",
            "{1}",
            "16",
        ]

    def test_there_is_no_second_device(self, kernel_cache: Path) -> None:
        program = """
try:
    cp.cuda.Device(1).use()
except cp.cuda.runtime.CUDARuntimeError as error:
    print(error.status, cp.cuda.runtime.getDeviceCount())
r = cp.cuda.runtime
event, stream = r.eventCreate(), r.streamCreate()
r.eventRecord(event, stream)
r.eventDestroy(event)
r.streamDestroy(stream)
for call in (
    lambda: r.getDeviceProperties(1), lambda: r.deviceGetAttribute(75, 1),
    lambda: cp.cuda.Device(1).compute_capability,
    lambda: r.deviceGetAttribute(99999, 0), lambda: r.deviceGetAttribute(12345, 0),
    lambda: r.eventRecord(event, 0), lambda: r.eventRecord(r.eventCreate(), stream),
    lambda: r.eventSynchronize(4711), lambda: r.streamSynchronize(4711),
    lambda: r.streamQuery(stream), lambda: r.streamWaitEvent(0, event),
):
    try:
        print(call())
    except r.CUDARuntimeError as error:
        print(error.status, end=" ")
attributes = cp.cuda.Device().attributes
print(attributes["MultiProcessorCount"], "ClockRate" in attributes, attributes["WarpSize"])
import ctypes
value, lib = ctypes.c_int(-7), ctypes.CDLL("libcuda.so.1")
for which, device in ((16, 0), (99999, 0), (16, 1)):
    print(lib.cuDeviceGetAttribute(ctypes.byref(value), which, device), value.value, end=" ")
print()
print(cp.arange(3).sum())
"""
        assert run(program, kernel_cache).splitlines() == [
            "101 1",
            "101 101 101 1 1 400 400 400 400 400 400 40 True 32",
            "0 40 1 40 101 40 ",
            "3",
        ]

    @pytest.mark.thorough
    def test_a_library_that_cannot_be_compiled_leaves_python_as_it_was(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        does = 'case "$*" in *libcuda.so.1*) echo no more >&2; exit 1;; esac'
        monkeypatch.setenv("CXX", compiler(tmp_path / "cxx", does))
        monkeypatch.delenv("CUPY_ACCELERATORS", raising=False)
        program = """
import os, sys
import cuda.pathfinder
import umem
before = cuda.pathfinder.load_nvidia_dynamic_lib
try:
    umem.software_gpu("t4", "64MiB", force=True)
except umem.errors.DeviceError as error:
    print("no more" in str(error))
print(cuda.pathfinder.load_nvidia_dynamic_lib is before, "cupy" in sys.modules)
print(os.environ.get("CUPY_ACCELERATORS"))
"""
        assert run(program, tmp_path, start="") == "True\nTrue False\nNone\n"

    def test_a_launch_that_no_gpu_takes_fails(self, kernel_cache: Path) -> None:
        program = r"""
source = '''
extern "C" __global__ void f(int* o) { o[threadIdx.x] = blockDim.x; }
extern "C" __global__ void g(int* o) { extern __shared__ int s[]; s[0] = 1; o[0] = s[0]; }
'''
f, g = (cp.RawModule(code=source).get_function(name) for name in "fg")
o = cp.zeros(4096, "i4")
def said(kernel, *sizes, shared=0):
    try:
        kernel(*sizes, (o,), shared_mem=shared)
        cp.cuda.Device().synchronize()
        return "done"
    except cp.cuda.driver.CUDADriverError as error:
        return error.status
print(*(said(f, *s) for s in [
    ((1,), (1025,)), ((1,), (32, 33)), ((1,), (1, 1, 65)), ((1, 65536), (1,)), ((1,), (1024,))]))
try:
    cp.cuda.driver.launchKernel(f.kernel.ptr, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0)  # CuPy makes it 1
except cp.cuda.driver.CUDADriverError as error:
    print(error.status)
print(*(said(g, (1,), (1,), shared=n) for n in (49153, 49152)), int(o[0]))
g.max_dynamic_shared_size_bytes = 65536
print(*(said(g, (1,), (1,), shared=n) for n in (65537, 65536)), g.max_dynamic_shared_size_bytes)
try:
    g.max_dynamic_shared_size_bytes = 65537
except cp.cuda.driver.CUDADriverError as error:
    print(error.status, g.attributes["shared_size_bytes"])
source = '''extern "C" __global__ void h(int* o) {
    __shared__ int s[9]; s[o[1]] = 1; o[0] = s[o[2]];
}'''
print(cp.RawKernel(source, "h").attributes["shared_size_bytes"])
"""
        for more in ("", ", stream_seed=0"):
            start = START.replace("force=True", f"force=True{more}")
            assert run(program, kernel_cache, start=start).splitlines() == [
                "1 1 1 1 done",
                "1",
                "1 done 1",
                "1 done 65536",
                "1 0",
                "36",
            ]

    def test_modules_of_one_source_have_variables_of_their_own(self, kernel_cache: Path) -> None:
        program = r"""
source = '''extern "C" {
__device__ int state = 5;
__global__ void f(int* o) { o[0] = state++; }
}'''
image, _ = cp.cuda.compiler.compile_using_nvrtc(source)
first, other = cp.cuda.function.Module(), cp.cuda.function.Module()
first.load(image)
other.load(image)
out = cp.zeros(1, "i4")
for module in (first, first, other, first):
    module.get_function("f")((1,), (1,), (out,))
    print(out[0], end=" ")
try:
    cp.cuda.driver.moduleGetFunction(4711, "f")
except cp.cuda.driver.CUDADriverError as error:
    print(error.status)
"""
        assert run(program, kernel_cache) == "5 6 5 7 400\n"

    def test_ctrl_c_during_a_kernel_s_compile_goes_through_cupy(
        self, kernel_cache: Path, tmp_path: Path, ctrl_c: object
    ) -> None:
        begun = tmp_path / "begun"
        does = f"if [ -e {tmp_path}/slow ]; then touch {begun}; sleep 60; fi"
        program = f"""
import os
x = cp.arange(3, dtype="i4")  # a kernel of CuPy's own, and the header that is compiled once
open({str(tmp_path / "slow")!r}, "w").close()
kernel = cp.ElementwiseKernel("int32 x", "int32 y", "y = x + 4711", "slow_to_compile")
try:
    kernel(x)
except KeyboardInterrupt:
    print("interrupted", flush=True)
os.remove({str(tmp_path / "slow")!r})
print(kernel(x))
"""
        environment = {
            **os.environ,
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "CUPY_CACHE_DIR": str(tmp_path / "cupy"),
            "CXX": compiler(tmp_path / "cxx", does),
        }
        process = subprocess.Popen(
            [sys.executable, "-c", START + program],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        until(begun.exists)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=300) == ("interrupted\n[4711 4712 4713]\n", "")

    def test_errors_and_interrupts_in_what_c_calls_get_out_of_it(
        self, kernel_cache: Path, ctrl_c: object
    ) -> None:
        program = """
import ctypes, os, signal
from umem.host_cuda.libcuda import HostHints
lib = ctypes.CDLL("libcuda.so.1")
stream = cp.cuda.Stream(non_blocking=True)
cp.cuda.runtime.streamBeginCapture(stream.ptr, 0)
print(lib.cuStreamSynchronize(ctypes.c_void_p(stream.ptr)))
try:
    cp.cuda.runtime.streamEndCapture(stream.ptr)
except cp.cuda.runtime.CUDARuntimeError as error:
    print(error.status)
x = cp.ones((8, 8), "c8")
HostHints.prefetch = lambda *_: {}["not there"]
prefetch = lambda: lib.cuMemPrefetchAsync(ctypes.c_uint64(x.data.ptr), 8, 0, None)
print(prefetch())
view = gpu._runtime.view

def interrupted(*given):
    os.kill(os.getpid(), signal.SIGINT)
    return view(*given)

cp.fft.fft2(x)  # from now on CuPy has the plan
HostHints.prefetch = gpu._runtime.view = interrupted
for call in (lambda: cp.fft.fft2(x), prefetch):
    try:
        call()
        print("not seen")
    except KeyboardInterrupt:
        print("interrupted")
gpu._runtime.view = view
print(abs(cp.fft.fft2(x)[0, 0]))
"""
        expected = "900\n901\n999\ninterrupted\ninterrupted\n64.0\n"
        assert run(program, kernel_cache) == expected

    def test_a_child_by_fork_gets_cuda_s_own_error_and_its_parent_goes_on(
        self, kernel_cache: Path
    ) -> None:
        program = """
import gc, os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)

def in_child(work):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            work()
        except cp.cuda.runtime.CUDARuntimeError as error:
            print(error.status, flush=True)
        finally:
            os._exit(0)
    os.waitpid(child, 0)

in_child(lambda: print(cp.arange(4).sum(), flush=True))  # before the first use
held = [cp.arange(4)]
for work in (
    lambda: cp.arange(4), lambda: held[0] + 1, lambda: cp.asnumpy(held[0]),
    lambda: cp.cuda.Device().synchronize(), lambda: held[0].reshape(2, 2) @ held[0].reshape(2, 2),
):
    in_child(work)
in_child(lambda: (held.clear(), gc.collect(), print("unharmed", np.arange(4).sum(), flush=True)))
print(held[0].sum(), flush=True)
if not os.fork():
    sys.exit(0)  # by way of Python's clean-up
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
        expected = "6\n3\n3\n3\n3\n3\nunharmed 6\n6\n0\n"
        assert run(program, kernel_cache) == expected


# -- checked mode --------------------------------------------------------------------------------

KERNELS = r'''
module = cp.RawModule(code="""
extern "C" __global__ void shift(float* y, const float* x, long long n) {
    long long i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = x[i + n];
}
extern "C" __global__ void wait(float* y, long long n) {  // as the C library's
    __shared__ float held[32];
    held[threadIdx.x] = threadIdx.x;
    __syncthreads();
    y[(long long)threadIdx.x + n] = held[31 - threadIdx.x];
}
""")
shift, wait = module.get_function("shift"), module.get_function("wait")

def said(call, *arguments):
    try:
        call(*arguments)
        cp.cuda.Device().synchronize()
        print("nothing")
    except umem.errors.DeviceError as error:
        print(error.sentence)

x, y, z = cp.arange(10, dtype="f4"), cp.zeros(10, "f4"), cp.zeros(32, "f4")
'''


@needs_cupy
class TestCheckedMode:
    @pytest.mark.parametrize("more", ["", ", stream_seed=0"])
    def test_a_kernel_that_leaves_an_array_is_named_with_the_argument(
        self, kernel_cache: Path, more: str
    ) -> None:
        program = """
said(shift, (1,), (10,), (y, x, 0))
said(shift, (1,), (10,), (y, x, 1))
said(shift, (1,), (11,), (y, x, -1))
said(shift, (1,), (10,), (y, x, 100_000))
said(shift, (1,), (10,), (y, x, -100_000))
said(wait, (1,), (32,), (z, 1))
said(wait, (1,), (32,), (z, -1))
said(wait, (1,), (32,), (z, 0))
print(cp.asnumpy(y)[1:3], int(z.sum()))
address = x.data.ptr
del x
said(shift, (1,), (10,), (y, np.uint64(address), 0))
"""
        start = CHECKED.replace("checked=True", f"checked=True{more}") + KERNELS
        x, y, z = (f"argument {n}" for n in ("1 (const float* x)", "0 (float* y)", "0 (float* y)"))
        assert run(program, kernel_cache, start=start).splitlines() == [
            "nothing",
            f"the kernel shift reads 0 bytes behind the end of {x}, which has 40 bytes",
            f"the kernel shift writes 0 bytes behind the end of {y}, which has 40 bytes",
            f"the kernel shift reads 399,960 bytes behind the end of {x}, which has 40 bytes",
            f"the kernel shift reads 400,000 bytes before the start of {x}, which has 40 bytes",
            f"the kernel wait writes 0 bytes behind the end of {z}, which has 128 bytes",
            f"the kernel wait writes right before the start of {z}, which has 128 bytes",
            "nothing",
            "[0. 1.] 496",
            "the kernel shift reads 0 bytes after the start of what was freed, "
            f"{x}, which has 40 bytes",
        ]

    def test_null_pointers_and_empty_arrays_are_named(self, kernel_cache: Path) -> None:
        program = """
said(shift, (1,), (10,), (y, np.uint64(0), 0))
said(shift, (1,), (10,), (cp.empty(0, "f4"), cp.empty(0, "f4"), 4))
said(shift, (1,), (10,), (y, np.uint64(0), 1 << 40))
kernel = cp.ElementwiseKernel("raw float32 x, int32 k", "float32 y", "y = x[i + k]", "shifted")
said(kernel, cp.empty(0, "f4"), 0, y)
"""
        null, both, far, own = run(program, kernel_cache, start=CHECKED + KERNELS).splitlines()
        x, y = "argument 1 (const float* x)", "argument 0 (float* y)"
        what = "where no array is; {}: a null pointer, or an empty array"
        assert null == f"the kernel shift reads address 0x0, {what.format(x)}"
        assert both == f"the kernel shift reads address 0x10, {what.format(f'{y} and {x}')}"
        assert far.endswith("where no array is")
        assert "argument 0 (const CArray<" in own and own.endswith("or an empty array")

    def test_memory_that_runs_out_is_cupys_error(self, kernel_cache: Path) -> None:
        program = """
x = cp.zeros(10, "u1")
try:
    cp.zeros(1 << 40, "u1")
except cp.cuda.memory.OutOfMemoryError as error:
    print(error)
print(int((x + 1).sum()))
"""
        told, end = run(program, kernel_cache, start=CHECKED).splitlines()
        assert told.startswith("Out of memory allocating 1,099,511,627,776 bytes")
        assert end == "10"

    def test_an_error_that_comes_up_in_a_free_is_raised_at_the_next_wait(
        self, kernel_cache: Path
    ) -> None:
        program = r"""
said(shift, (1,), (10,), (y, x, 1))
found = set()
for seed in range(12):
    gpu.reseed(seed)
    y = cp.zeros(10, "f4")
    event, stream = cp.cuda.Event(), cp.cuda.Stream(non_blocking=True)
    try:
        shift((1,), (10,), (y, x, 1))
        del y  # freed while the kernel waits: it runs now
        event.record(stream)
        cp.cuda.Device().synchronize()
        found.add("lost")
    except umem.errors.DeviceError:
        found.add("raised")
    event.record(stream)
    event.synchronize()
    try:
        cp.cuda.runtime.free(4711)
    except cp.cuda.runtime.CUDARuntimeError as error:
        found.add(error.status)
print(found == {"raised", 1})
"""
        start = CHECKED.replace("checked=True", "checked=True, stream_seed=0") + KERNELS
        assert run(program, kernel_cache, start=start).splitlines()[1:] == ["True"]

    def test_arrays_of_cupy_s_own_kernels_are_checked_in_every_mode(
        self, kernel_cache: Path
    ) -> None:
        program = """
kernel = cp.ElementwiseKernel("raw float32 x, int32 k", "float32 y", "y = x[i + k]", "shifted")
said(kernel, x, 5, y)
with umem.managed():
    a, b = cp.arange(10, dtype="f4"), cp.zeros(10, "f4")
    said(kernel, a, 1, b)
pool = cp.get_default_memory_pool()
print(pool.used_bytes() == pool.total_bytes() > 0, pool.n_free_blocks())
pool.free_all_blocks()
print((cp.ones((5, 5)) @ cp.ones((5, 5))).sum(), cp.sort(x)[-1], cp.empty(0).sum())
print(cp.linalg.eigvalsh(cp.eye(2)), isinstance(pool, cp.cuda.memory.MemoryPool))
"""
        lines = run(program, kernel_cache, start=CHECKED + KERNELS).splitlines()
        assert all("the kernel shifted reads 0 bytes behind" in line for line in lines[:2])
        assert all("argument 0" in line and "40 bytes" in line for line in lines[:2])
        assert lines[2:] == ["True 0", "125.0 9.0 0.0", "[1. 1.] True"]

    def test_umem_run_checks_a_script(self, kernel_cache: Path, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text(
            "import cupy\n"
            "k = cupy.ElementwiseKernel('raw int32 x', 'int32 y', 'y = x[i + 1]', 'beyond')\n"
            "k(cupy.arange(4, dtype='i4'), cupy.zeros(4, 'i4'))\n"
        )
        command = ("-m", "umem", "run", "--software", "t4", "--checked", script)
        done = python(*command, XDG_CACHE_HOME=kernel_cache, CUPY_CACHE_DIR=kernel_cache)
        assert done.returncode == 1
        assert "the kernel beyond reads 0 bytes behind the end of argument 0" in done.stderr

    @pytest.mark.parametrize("words", [["--checked"], ["--kernel-seconds", "3"]])
    def test_checked_needs_software(self, tmp_path: Path, words: list[str]) -> None:
        script = tmp_path / "script.py"
        script.touch()
        done = CliRunner().invoke(main, ["run", *words, str(script)])
        assert done.exit_code == 2 and f"{words[0]} needs --software GPU" in done.output
