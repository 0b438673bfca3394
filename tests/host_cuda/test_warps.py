"""Threads of a warp in step on the software GPU, and races of shared memory in checked mode."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from software_programs import GOES_ON, needs_software_gpu, run
from warp_kernels import CHECKS, PROGRAM

from umem.host_cuda.kernels import for_host
from umem.host_cuda.races import with_names
from umem.host_cuda.warps import can_step

NAMES = re.findall(r'^check\("([^"]+)"', CHECKS, re.MULTILINE)
CHECKED = GOES_ON.replace("force=True", "force=True, checked=True")


def test_only_kernels_in_which_a_step_can_tell_are_compiled_for_steps() -> None:
    def in_step(body: str, first: str = "") -> bool:
        return for_host(f"{first}__global__ void f(int* x) {{ {body} }}").steps != ()

    assert in_step("__shared__ int s;")
    assert in_step("volatile int* y = x;")
    assert in_step("", '#include "sums.cuh"\n')
    assert not in_step('// __shared__ int s;\n asm volatile("" ::: "memory");')
    assert in_step("for (;;) x[i] = x[(i + 1) % n];") and in_step("x[j] ++; y = x [k];")
    assert not in_step("x[i] = 2 * x[i] + y[i + 1]; x[i] += 1; z[0] = 1; z[1] = 2;")
    assert not in_step("int a[3]; a[0] = a[1] + a[2]; if (x[i] == x[j]) return;")
    assert not in_step("__syncwarp();", "#include <cooperative_groups.h>\n")


def test_steps_need_a_compiler_that_can_be_told_what_not_to_look_at() -> None:
    assert can_step("g++ (Debian 12.2.0-14+deb12u1) 12.2.0\nCopyright (C) 2022")
    assert can_step("x86_64-conda-linux-gnu-c++ (conda-forge gcc 14.2.0-1) 14.2.0\n")
    assert not can_step("g++ (Ubuntu 11.4.0-1ubuntu1~22.04) 11.4.0\nCopyright (C) 2021")
    assert not can_step("Debian clang version 14.0.6\nTarget: x86_64-pc-linux-gnu")


def test_a_place_that_nobody_knows_is_said_to_be_unknown(tmp_path: Path) -> None:
    said = with_names("<variable 10> in <line 20>", tmp_path / "none.so")
    assert said == "shared memory at 0x10 in an unknown line (code at 0x20)"


@pytest.fixture(scope="module")
def results(kernel_cache: Path) -> dict[str, str]:
    """What each kernel gave that trusts warps to run in step."""
    lines = run(PROGRAM, kernel_cache).splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if line.endswith(("True", "False"))) | {
        line.split(" is ")[0]: line for line in lines if " is " in line
    }


@needs_software_gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_that_trusts_warps_to_run_in_step_is_right(
    name: str, results: dict[str, str]
) -> None:
    assert results[name] == "True"


RACES = r'''
module = cp.RawModule(code=r"""
extern "C" __global__ void shift(const float* x, float* y) {
    __shared__ float held[64];
    int t = threadIdx.x;
    held[t] = x[t];
    y[t] = held[(t + 40) % 64];  // line 6
}
extern "C" __global__ void first(const float* x, float* y) {
    extern __shared__ float all[];
    int t = threadIdx.x;
    all[t] = x[t];
    __syncthreads();
    if (t == 33) all[2] = 5;
    y[t] = all[2];  // line 14
}
extern "C" __global__ void last(const float* x, float* y) {
    __shared__ int place;
    place = threadIdx.x / 32;
    __syncthreads();
    y[threadIdx.x] = place;
}
extern "C" __global__ void counts(const float* x, float* y) {
    __shared__ int count;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    atomicAdd(&count, 1);
    y[threadIdx.x] = count;
}
template <int n> __device__ void put(int* s) { s[threadIdx.x % n] = threadIdx.x; }
extern "C" __global__ void called(const float* x, float* y) {
    __shared__ int into[48];
    put<48>(into);
    y[threadIdx.x] = 0;
}
""")
x = cp.arange(64, dtype="f4")

def said(name, block=64, shared=0):
    try:
        module.get_function(name)((1,), (block,), (x, cp.zeros(64, "f4")), shared_mem=shared)
        cp.cuda.Device().synchronize()
        print("nothing")
    except umem.errors.DeviceError as error:
        print(error.sentence, end="\n" if error.status == 719 else str(error.status))
'''


@needs_software_gpu
def test_a_race_of_shared_memory_is_named_with_kernel_variable_and_line(kernel_cache: Path) -> None:
    program = """
said("shift")
said("first", shared=256)
said("last")
said("counts")
said("called")
for name in ("shift", "first", "last", "counts", "called"):
    said(name, block=32, shared=256)
"""
    end = ", and no barrier is between them"
    lines = run(program, kernel_cache, start=CHECKED + RACES).splitlines()
    assert lines[:5] == [
        "the kernel shift: block (0, 0, 0): thread (40, 0, 0) writes byte 160 of held in line 5, "
        f"which thread (0, 0, 0) reads in line 6{end}",
        "the kernel first: block (0, 0, 0): thread (0, 0, 0) reads byte 8 of all in line 14, "
        f"which thread (33, 0, 0) writes in line 13{end}",
        "the kernel last: block (0, 0, 0): thread (32, 0, 0) writes place in line 18, "
        f"which thread (31, 0, 0) writes in line 18{end}",
        "the kernel counts: block (0, 0, 0): thread (0, 0, 0) changes count in line 26, "
        f"which thread (62, 0, 0) reads in line 27{end}",
        "the kernel called: block (0, 0, 0): thread (48, 0, 0) writes into in line 29, "
        f"which thread (0, 0, 0) writes in line 29{end}",
    ]
    assert lines[5:] == ["nothing"] * 5  # one warp is in step


@needs_software_gpu
def test_kernels_without_races_are_none_in_checked_mode(kernel_cache: Path) -> None:
    program = r'''
module = cp.RawModule(code=r"""
extern "C" __global__ void product(const float* a, const float* b, float* c, int n) {
    __shared__ float left[16][16], right[16][16];
    int i = blockIdx.y * 16 + threadIdx.y, j = blockIdx.x * 16 + threadIdx.x;
    float sum = 0;
    for (int k = 0; k < n; k += 16) {
        left[threadIdx.y][threadIdx.x] = a[i * n + k + threadIdx.x];
        right[threadIdx.y][threadIdx.x] = b[(k + threadIdx.y) * n + j];
        __syncthreads();
        for (int l = 0; l < 16; l++) sum += left[threadIdx.y][l] * right[l][threadIdx.x];
        __syncthreads();
    }
    c[i * n + j] = sum;
}
extern "C" __global__ void scan(const int* x, int* y) {
    extern __shared__ int s[];
    int t = threadIdx.x;
    s[t] = x[t];
    __syncthreads();
    for (int by = 1; by < blockDim.x; by *= 2) {
        int before = t >= by ? s[t - by] : 0;
        __syncthreads();
        s[t] += before;
        __syncthreads();
    }
    y[t] = s[t];
}
extern "C" __global__ void sum(const int* x, int* y) {
    __shared__ int of_warp[32];
    int v = x[threadIdx.x];
    for (int by = 16; by > 0; by /= 2) v += __shfl_down_sync(0xffffffffu, v, by);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x < 32) {
        v = threadIdx.x < blockDim.x / 32 ? of_warp[threadIdx.x] : 0;
        for (int by = 16; by > 0; by /= 2) v += __shfl_down_sync(0xffffffffu, v, by);
        if (threadIdx.x == 0) *y = v;
    }
}
extern "C" __global__ void histogram(const int* x, int n, int* y) {
    __shared__ int bins[10];
    __shared__ bool is_any;
    if (threadIdx.x < 10) bins[threadIdx.x] = 0;
    is_any = true;  // all write the same
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) atomicAdd(&bins[x[i] % 10], 1);
    __syncthreads();
    if (threadIdx.x < 10 && is_any) y[threadIdx.x] = bins[threadIdx.x];
}
extern "C" __global__ void largest(const float* x, float* y) {  // by the loop of the CUDA guide
    __shared__ int bits;
    if (threadIdx.x == 0) bits = __float_as_int(-1.0f);
    __syncthreads();
    int old = bits, assumed;
    do {
        assumed = old;
        float next = fmaxf(x[threadIdx.x], __int_as_float(assumed));
        old = atomicCAS(&bits, assumed, __float_as_int(next));
    } while (assumed != old);
    __syncthreads();
    *y = __int_as_float(bits);
}
""")
rng = np.random.default_rng(0)
a, b = rng.random((2, 64, 64)).astype("f4")
c = cp.zeros((64, 64), "f4")
module.get_function("product")((4, 4), (16, 16), (cp.asarray(a), cp.asarray(b), c, np.int32(64)))
print(np.allclose(c.get(), a @ b))
x = rng.integers(0, 100, 256).astype("i4")
y = cp.zeros(256, "i4")
module.get_function("scan")((1,), (256,), (cp.asarray(x), y), shared_mem=1024)
print(np.array_equal(y.get(), x.cumsum()))
module.get_function("sum")((1,), (256,), (cp.asarray(x), y))
print(int(y[0]) == x.sum())
module.get_function("histogram")((1,), (96,), (cp.asarray(x), np.int32(256), y))
print(np.array_equal(y.get()[:10], np.bincount(x % 10, minlength=10)))
z = cp.zeros(1, "f4")
module.get_function("largest")((1,), (128,), (cp.asarray(a), z))
print(float(z[0]) == a.ravel()[:128].max())
'''
    assert run(program, kernel_cache, start=CHECKED).split() == ["True"] * 5
