"""Kernels of the software GPU that several cores share compute what one core computes, to the bit.

Each program runs in a process of its own, with compiled kernels shared by the session.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from software_programs import needs_software_gpu, run

from umem.host_cuda.kernels import for_host
from umem.host_cuda.sharing import usable_cores

START = """\
import os
import numpy as np, umem
gpu = umem.software_gpu("v100-32gb", %s)
from umem.host_cuda.kernels import share_kernels
from umem.errors import DeviceError
import cupy as cp

def threads():
    return len(os.listdir("/proc/self/task"))

def same_bits(compute):
    found = []
    for cores in (1, 2, 5):
        share_kernels(cores)
        array = cp.asnumpy(compute())
        found.append((array.dtype, array.shape, array.tobytes()))
    assert found[0] == found[1] == found[2], compute
"""
ON, OFF = START % "", START % "model=False"
KERNEL = """\
#include <cupy/carray.cuh>
%s
extern "C" __global__ void f(const CArray<float, 1, 1, 1> _raw_x, %s \
CArray<float, 1, 1, 1> _raw_y, CIndexer<1, 1> _ind) {
  CUPY_FOR(i, _ind.size()) {
    _ind.set(i);
    const float x(_raw_x[_ind.get()]);
    %s
    _raw_y[_ind.get()] = x;
  }
}
"""
SHARED, ALONE = "UMEM_KERNEL(f, 3, f)", "UMEM_KERNEL(f, 0, f)"


@pytest.mark.parametrize("cores", ["1", "1,2", " 1 "])
def test_OMP_NUM_THREADS_says_how_many_cores(cores: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", cores)
    assert usable_cores() == 1


@pytest.mark.parametrize("cores", ["", "0", "many", "100000"])
def test_no_more_cores_than_the_process_may_run_on(
    cores: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", cores)
    assert usable_cores() == len(os.sched_getaffinity(0))


def test_cores_share_a_kernel_whose_elements_are_their_own() -> None:
    assert SHARED in for_host(KERNEL % ("", "", "")).text
    assert SHARED in for_host(KERNEL % ("", "const CArray<float, 1, 1, 1> z,", "z[0];")).text
    assert SHARED in for_host(KERNEL % ("", "", "assert(x > 0); float v[2]; v[0] = x;")).text


@pytest.mark.parametrize(
    ("before", "parameter", "inside"),
    [
        ("", "CArray<float, 1, 1, 1> z,", "z[0] = x;"),
        ("", "float* z,", "z[0] = x;"),
        ("", "", "_raw_y[0] = x;"),
        ("", "const CArray<float, 1, 1, 1> z,", "atomicAdd(&z[0], x);"),
        ("", "const CArray<float, 1, 1, 1> z,", "*(float*)&z[0] = x;"),
        ("", "", 'printf("%f", x);'),
        ("", "", "static int count = 0; count++;"),
        ("__device__ int count = 0;", "", "count++;"),
    ],
)
def test_one_core_runs_a_kernel_that_may_do_more(before: str, parameter: str, inside: str) -> None:
    assert ALONE in for_host(KERNEL % (before, parameter, inside)).text


@needs_software_gpu
class TestCupy:
    def test_small_arrays_start_no_thread_and_large_ones_do(self, kernel_cache: Path) -> None:
        program = """
share_kernels(2)
small, large = (cp.asarray(np.ones(n, "f4")) for n in ((1 << 18) - 1, 1 << 20))
before = threads()
assert float((small + 1)[-1]) == 2 and threads() == before
assert float((large + 1)[-1]) == 2 and threads() == before + 1
large + large, large.sum()
assert threads() == before + 1
blocked = [line for task in os.listdir("/proc/self/task")
           for line in open(f"/proc/self/task/{task}/status") if line.startswith("SigBlk")]
assert any(int(line.split()[1], 16) & 2 for line in blocked)  # Ctrl-C is the program's
print("same")
"""
        assert run(program, kernel_cache, start=OFF) == "same\n"

    def test_arrays_about_the_smallest_that_are_shared(self, kernel_cache: Path) -> None:
        program = """
for size in (1 << 18) - 1, 1 << 18, (1 << 18) + 1:
    x = cp.arange(size, dtype="f4")
    same_bits(lambda: x + x)
    same_bits(lambda: x.sum())
print("same")
"""
        assert run(program, kernel_cache, start=OFF) == "same\n"

    @pytest.mark.parametrize("kind", ["f4", "c8", "?"])
    def test_any_number_of_cores_gives_the_same_bits(self, kernel_cache: Path, kind: str) -> None:
        program = f"""
kind = {kind!r}
draw = np.random.default_rng(0)
shapes = ((1 << 21,), (1021, 2049), (33, 65, 1000))
if kind == "c8":  # slow, and large enough to be shared
    shapes = ((1 << 19,), (509, 1031), (33, 65, 250))
for shape in shapes:
    a = draw.integers(-3, 4, shape) if kind == "?" else draw.standard_normal(shape)
    if kind[0] == "f":
        a.reshape(-1)[::100003] = np.nan
    x = cp.asarray(a.astype(kind))
    for y in (x, x.T, x[..., ::-2]):
        for axis in (None, *range(y.ndim)):
            names = ("sum",) if kind == "c8" else ("sum", "argmin")
            for name in names:
                same_bits(lambda: getattr(y, name)(axis=axis))
        same_bits(lambda: y * y)
        same_bits(y.copy)
        same_bits(lambda: cp.where(y != 0, y, 1))
        same_bits(lambda: cp.cumsum(y))
    same_bits(lambda: x.take(cp.arange(len(x))[::-1], axis=0))
    same_bits(lambda: x[x != 0])
print("same")
"""
        assert run(program, kernel_cache, start=OFF) == "same\n"

    def test_ties_and_NaN_of_argmax_are_decided_as_by_one_core(self, kernel_cache: Path) -> None:
        program = """
a = np.zeros(1 << 21, "f4")
x = cp.asarray(a)
same_bits(lambda: x.argmax())
assert int(x.argmax()) == 0 and int(x.reshape(2, -1).argmax(axis=1)[1]) == 0
a[[777777, 1777777]] = np.nan
x = cp.asarray(a)
same_bits(lambda: x.argmax())
assert int(x.argmax()) == int(x.argmin()) == 777777
assert int(cp.nanargmax(x)) == 0 and int(cp.asarray(-a).argmin()) == 777777
low = cp.full(1 << 21, -np.inf, "f4")
assert int(low.argmax()) == 0 and int(cp.full(5, np.inf, "f4").argmin()) == 0
low[5] = np.nan
assert int(cp.nanargmax(low)) == 0 and float(cp.nanmax(low)) == -np.inf
print("same")
"""
        assert run(program, kernel_cache, start=OFF) == "same\n"

    def test_atomics_and_what_a_kernel_writes_elsewhere_are_one_core_s(
        self, kernel_cache: Path
    ) -> None:
        program = """
import cupyx
share_kernels(4)
x = cp.zeros(3, "f4")
cupyx.scatter_add(x, cp.asarray(np.arange(1 << 20) % 2), 1)
assert x.tolist() == [1 << 19, 1 << 19, 0]
last = cp.ElementwiseKernel("float32 x", "raw float32 y", "y[0] += x", "last")
total = cp.zeros(1, "f4")
last(cp.ones(1 << 20, "f4"), total)
assert float(total[0]) == 1 << 20
print("same")
"""
        assert run(program, kernel_cache, start=OFF) == "same\n"

    def test_an_assertion_that_fails_on_any_core_is_an_error(self, kernel_cache: Path) -> None:
        program = """
share_kernels(2)
below = cp.ElementwiseKernel("float32 x", "float32 y", "assert(x < 5); y = x", "below")
for place in (0, 1 << 20, (1 << 21) - 1):
    x = cp.ones(1 << 21, "f4")
    x[place] = 9
    try:
        below(x)
    except DeviceError as error:
        assert "below" in str(error) and "x < 5" in str(error), error
    else:
        raise SystemExit("no error")
    assert float((x + 1).sum()) == 2 * (1 << 21) + 8
print("same")
"""
        assert run(program, kernel_cache, start=START % "sticky=False") == "same\n"

    def test_a_division_by_zero_on_any_core_is_as_on_a_GPU(self, kernel_cache: Path) -> None:
        program = """
divide = cp.ElementwiseKernel("int32 x, int32 y", "int32 z", "z = x / y", "divide")
x, y = cp.full(1 << 19, 7, "i4"), cp.zeros(1 << 19, "i4")
same_bits(lambda: divide(x, y))
assert bool((divide(x, y) == -1).all())
print("same")
"""
        assert run(program, kernel_cache, start=OFF) == "same\n"

    def test_a_child_by_fork_has_its_own_threads_or_cuda_s_error(self, kernel_cache: Path) -> None:
        program = """
import warnings
warnings.simplefilter("ignore")  # of Python's, about threads and forks

def compute():
    share_kernels(2)
    return float((cp.ones(1 << 21, "f4") + 1).sum())

def in_child(wanted):
    child = os.fork()
    if not child:
        try:
            os._exit(wanted != compute())
        except cp.cuda.runtime.CUDARuntimeError as error:
            os._exit(0 if wanted == error.status else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

in_child(2 << 21)  # before the first use
assert compute() == 2 << 21
in_child(3)  # cudaErrorInitializationError
assert compute() == 2 << 21
print("same")
"""
        assert run(program, kernel_cache, start=OFF) == "same\n"

    def test_checked_mode_runs_on_one_core_and_still_names_what_left_an_array(
        self, kernel_cache: Path
    ) -> None:
        program = """
before = threads()
x = cp.ones(1 << 20, "f4")
beyond = cp.ElementwiseKernel("raw float32 x, int64 n", "float32 y", "y = x[i + n]", "beyond")
try:
    beyond(x, 1, cp.empty(1 << 20, "f4"))
except DeviceError as error:
    assert "reads 0 bytes behind the end" in str(error), error
    assert threads() == before
    print("same")
"""
        start = START % "checked=True"
        assert run(program, kernel_cache, start=start) == "same\n"

    def test_streams_that_run_late_share_kernels_too(self, kernel_cache: Path) -> None:
        program = """
share_kernels(3)
with cp.cuda.Stream(non_blocking=True) as stream:
    x = cp.ones(1 << 21, "f4")
    y = (x * 3).sum()
    stream.synchronize()
assert float(y) == 3 << 21
print("same")
"""
        assert run(program, kernel_cache, start=START % "stream_seed=0") == "same\n"
