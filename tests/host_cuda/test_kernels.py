"""Kernels of CuPy's, and of its users, that need more than plain loops; one process for many."""

from __future__ import annotations

from pathlib import Path

import pytest
from software_programs import GOES_ON, START, needs_software_gpu, run

from umem.host_cuda.dialect import uncommented
from umem.host_cuda.kernels import for_host, parts_of


def test_comments_among_parameters_are_no_parameters() -> None:
    source = "__global__ void f(int* x,  // of (n, m), in rows\n float y) {}"
    assert len(parts_of(for_host(source).kernels["f"])) == 2


@needs_software_gpu
def test_a_grid_has_a_barrier_where_it_is_one_block(kernel_cache: Path) -> None:
    run(
        r"""
code = '''#include <cooperative_groups.h>
extern "C" __global__ void f(int* x) {
  auto grid = cooperative_groups::this_grid();
  x[grid.thread_rank()] = grid.size();
  if (grid.size() > 8) return;
  grid.sync();
  const int other = x[grid.size() - 1 - grid.thread_rank()];
  grid.sync();
  x[grid.thread_rank()] += other + threadIdx.x;
}'''
kernel = cp.RawKernel(code, "f", enable_cooperative_groups=True)
x = cp.zeros(12, "i4")
kernel((3,), (4,), (x,))
assert x.tolist() == [12] * 12
kernel((1,), (4,), (x,))
assert x[:4].tolist() == [8, 9, 10, 11]
try:
    kernel((2,), (4,), (x,))
except umem.errors.DeviceError as error:
    assert "no barrier of a whole grid of several blocks" in str(error)
else:
    raise SystemExit("not refused")
""",
        kernel_cache,
    )


def test_what_the_compiler_does_not_see_is_no_kernel() -> None:
    source = """// __global__ void a() {}
/* __global__ void b() {} */ const char* c = "/* // ";
#if 0
__global__ void d() {}
#ifdef E
#else
__global__ void e() {}
#endif
#else
__global__ void f(int* x /* of (n,) */) {}
#endif
__global__ void g() {}"""
    assert list(for_host(source).kernels) == ["f", "g"]
    assert len(uncommented(source)) == len(source)


def test_threads_may_wait_in_a_header_of_others() -> None:
    kernel = "__global__ void f(int* x) {}"
    assert "(f, 1, f)" in for_host(f"#include <cmath>\n#include <cupy/complex.cuh>\n{kernel}").text
    assert "(f, 2, f)" in for_host(f"#include <cub/cub.cuh>\n{kernel}").text
    assert "(f, 2, f)" in for_host(f'#include "sums.cuh"\n{kernel}').text


@needs_software_gpu
def test_threads_wait_for_one_another(kernel_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "sum.h").write_text("""
__device__ inline int sum(int x) {
  __shared__ int all[32];
  all[threadIdx.x] = x;
  __syncthreads();
  int found = 0;
  for (int i = 0; i < 32; i++) found += all[i];
  return found;
}""")
    hardened = tmp_path / "hardened"  # as some distributions have it
    hardened.write_text('#!/bin/sh\nexec g++ -D_FORTIFY_SOURCE=2 "$@"\n')
    hardened.chmod(0o755)
    said = run(
        r"""
module = cp.RawModule(options=("-Isum.h's folder",), code='''
#include "sum.h"
extern __shared__ int all[];  // at file scope
extern "C" {
__global__ void in_a_header(int* out) { out[threadIdx.x] = sum(threadIdx.x); }
__global__ void turned(int* out) {
  all[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = all[blockDim.x - 1 - threadIdx.x];
}
__global__ void counts(int* out) {
  const int i = threadIdx.x;
  int found = __syncthreads_count(1) == 64 && __syncthreads_count(i < 5) == 5;
  found &= __syncthreads_or(i == 3);
  found &= !__syncthreads_or(0);
  found &= !__syncthreads_and(i != 3);
  for (int k = 0; k < 20; k++) found &= __syncthreads_count(i < k) == k;
  out[i] = __syncthreads_and(found);
}
__global__ void deep(int* out) {
  volatile int mine[50000];
  for (int i = 0; i < 50000; i++) mine[i] = threadIdx.x;
  __syncthreads();
  int found = 0;
  for (int i = 0; i < 50000; i += 1000) found += mine[i];
  out[threadIdx.x] = found;
}
__global__ void masks(int* out) {
  const int lane = threadIdx.x;
  if (lane & 1) out[lane] = __shfl_sync(0xaaaaaaaau, lane, 31);
  else out[lane] = __shfl_sync(0x55555555u, lane, 30) + __all_sync(0x55555555u, lane != 1);
}
__global__ void kept(const int* x, int* count, int* out) {
  const int lane = threadIdx.x;
  for (int i = lane; i < 96; i += 32) {
    if (x[i] <= 0) continue;
    const unsigned int mask = __activemask();
    int start;
    if (lane == __ffs(mask) - 1) start = atomicAdd(count, __popc(mask));
    start = __shfl_sync(mask, start, __ffs(mask) - 1);
    out[start + __popc(mask & ((1u << lane) - 1))] = x[i];
  }
}
}''')

def called(name, n, shared_mem=0):
    out = cp.full(n, -1, "i4")
    module.get_function(name)((1,), (n,), (out,), shared_mem=shared_mem)
    return out.tolist()

assert called("in_a_header", 32) == [sum(range(32))] * 32
for n in (32, 1024):
    assert called("turned", n, shared_mem=4 * n) == list(range(n))[::-1]
assert called("counts", 64) == [1] * 64
assert called("deep", 64) == [50 * i for i in range(64)]
assert called("masks", 32) == [31] * 32
x, count = cp.arange(96, dtype="i4") % 5, cp.zeros(1, "i4")
found = cp.zeros(96, "i4")
module.get_function("kept")((1,), (32,), (x, count, found))
wanted = sorted(i for i in x.tolist() if i)
assert int(count[0]) == len(wanted) and sorted(found[: len(wanted)].tolist()) == wanted

# Stacks are the process's: another module takes no more of them.
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

before = resident()
out = cp.zeros(1024, "i4")
for i in range(8):
    code = 'extern "C" __global__ void f(int* x) { __syncthreads(); x[threadIdx.x] = %d; }' % i
    cp.RawKernel(code, "f")((1,), (1024,), (out,))
assert resident() - before < 16 << 20
print("done")
""".replace("sum.h's folder", str(tmp_path)),
        kernel_cache,
        start=f"import os\nos.environ['CXX'] = '{hardened}'\n{START}",
    )
    assert said.strip() == "done"


@needs_software_gpu
def test_what_would_end_the_process_does_not(kernel_cache: Path) -> None:
    said = run(
        r"""
code = '''
extern "C" __global__ void f(int* x) {
  x[1] = 3;
  if (x[2]) __syncthreads();
  assert(x[0] == 1);
  x[1] = 5;
}'''
kernel, x = cp.RawKernel(code, "f"), cp.zeros(3, "i4")
for waits in (0, 1):
    x[2] = waits
    try:
        kernel((1,), (2,), (x,))
    except umem.errors.DeviceError as error:
        assert "kernel f" in str(error) and "x[0] == 1" in str(error), error
        error_type = error.status, isinstance(error, cp.cuda.runtime.CUDARuntimeError)
    else:
        raise SystemExit("nothing said")
assert x[1] == 3
x[0] = 1
kernel((1,), (2,), (x,))
assert x[1] == 5 and error_type == (710, True)

for kind in ("i1", "i2", "i4", "i8"):
    least = np.iinfo(kind).min
    x, y = cp.array([least, 7, -7], kind), cp.array([-1, 0, 2], kind)
    for wanted, found in zip(([least, 0, -4], [0, 0, 1]), cp.divmod(x, y)):
        assert found.tolist() == wanted, (kind, found)
    assert (x // y).tolist() == [least, 0, -4] and cp.remainder(x, y).tolist() == [0, 0, 1]
    assert cp.fmod(x, y).tolist()[::2] == [0, -1]
    assert abs(int(cp.gcd(x, y)[0])) == 1 and cp.lcm(x, y).tolist()[1:] == [0, 14]
for kind in ("uint8", "int32", "uint32", "int64", "uint64"):
    of = f"{kind} x, {kind} y", f"{kind} q, {kind} r"
    divided = cp.ElementwiseKernel(*of, "q = x / y; r = x % y", f"divided_{kind}")
    q, r = divided(cp.array([9, 9], kind), cp.array([0, 2], kind))
    every = -1 if kind[0] == "i" else np.iinfo(kind).max
    every = 2**32 - 1 if "64" in kind else every  # divided as numbers of 32 bits
    assert q.tolist() == [every, 4] and r.tolist() == [9, 1], (kind, q, r)
print("done")
""",
        kernel_cache,
        start=GOES_ON,
    )
    assert said.strip() == "done"


@needs_software_gpu
def test_kernels_compute_what_they_say(kernel_cache: Path) -> None:
    said = run(
        r"""
# A return ends an element, not all that follow it; also from a macro.
code = "if (x < 2) { for (int k = 0; k < 3; k++) { if (k == 1) return; y = k; } } y = 5"
stop = cp.ElementwiseKernel("float64 x", "float64 y", code, "stop")
assert stop(cp.arange(5.0), cp.zeros(5)).tolist() == [0, 0, 5, 5, 5]
assert cp.isin(cp.arange(1, 7), cp.array([1, 2])).tolist() == [True, True] + [False] * 4
assert cp.searchsorted(cp.array([1, 2]), cp.arange(4)).tolist() == [0, 0, 1, 2]

# A kernel may have the name of another function; a global variable has a place.
if hasattr(cp.ndarray, "byteswap"):  # not in CuPy 13
    assert cp.arange(3).byteswap().tolist() == np.arange(3).byteswap().tolist()
module = cp.RawModule(code='''
extern "C" { __constant__ float some[4];
__global__ void f(float* x) { x[threadIdx.x] *= some[threadIdx.x]; } }''')
some = cp.ndarray((4,), "f4", module.get_global("some"))
some[...] = cp.arange(4, dtype="f4")
x = cp.ones(4, "f4")
module.get_function("f")((1,), (4,), (x,))
assert x.tolist() == [0, 1, 2, 3]
try:
    module.get_function("g")
except cp.cuda.driver.CUDADriverError as error:
    assert "named symbol not found" in str(error)

# Groups of threads, halves, vectors, CUDA's functions.
code = r'''
#include <cooperative_groups.h>
#include <cuda_fp16.h>
namespace cg = cooperative_groups;
extern "C" __global__ void g(float* x, half* h, float4* q, short a, int b) {
  __shared__ float s[64];
  cg::thread_block block = cg::this_thread_block();
  auto warp = cg::tiled_partition<32>(block);
  const int i = block.thread_rank();
  s[i] = x[i];
  block.sync();
  float v = s[63 - i];
  for (int by = 16; by; by /= 2) v += warp.shfl_down(v, by);
  x[i] = v;
  h[i] = __hadd(h[i], __float2half(1.f));
  h[i] += 2;
  if (!i) q[0] = make_float4(max(a, b), __float2int_rn(2.5f), sinpif(1e3f), erfcinvf(.5f));
}'''
x, h, q = cp.arange(64, dtype="f4"), cp.ones(64, "f2"), cp.zeros(4, "f4")
cp.RawKernel(code, "g")((1,), (64,), (x, h, q, np.int16(3), np.int32(4)))
assert x[[0, 32]].tolist() == [sum(range(32, 64)), sum(range(32))] and set(h.tolist()) == {4}
assert q[:3].tolist() == [4, 2, 0] and abs(float(q[3]) - 0.4769363) < 1e-6

# What fusion writes between barriers of the grid, and passes on without looking at it.
from cupy._core import new_fusion

def twice(x, z):
    x += z
    x += z

x = cp.arange(16.0).reshape(4, 4)
new_fusion.Fusion(twice, None)(x, x.T)
assert x.tolist() == [[10 * (i + j) for j in range(4)] for i in range(4)]

@cp.fuse()
def turned(x):
    return x[::-1]

assert turned(cp.arange(3, dtype="f2")).tolist() == [2, 1, 0]
assert cp.cuda.get_local_runtime_version() == cp.cuda.runtime.runtimeGetVersion()

# CuPy's log of a compilation, and its cache: nothing is compiled twice.
import io
import os
log = io.StringIO()
kernel = cp.RawKernel('extern "C" __global__ void f(float* x) { int j; x[0] = 1; }', "f")
kernel.compile(log_stream=log)
assert "warning" in log.getvalue() and kernel.num_regs > 0
print(len([name for name in os.listdir(os.environ["CUPY_CACHE_DIR"]) if name.endswith(".cubin")]))
""",
        kernel_cache,
    )
    assert int(said) > 5


@needs_software_gpu
def test_functions_of_cupyx_that_bring_headers(kernel_cache: Path) -> None:
    pytest.importorskip("scipy")
    said = run(
        r"""
import warnings
import scipy.special
import scipy.signal
import scipy.ndimage
warnings.simplefilter("ignore")
import cupyx.scipy.special as special
import cupyx.scipy.signal as signal
import cupyx.scipy.ndimage as ndimage
import cupyx.scipy.interpolate as interpolate

def same(found, wanted, tolerance=1e-12):
    assert np.allclose(found.get(), wanted, rtol=tolerance, atol=tolerance), (found, wanted)

z, v = np.array([1 + 1j, 2 - 0.5j]), np.linspace(-0.9, 0.9, 7)
if not cp.__version__.startswith("13."):  # which has no such functions of complex numbers
    for name in ("digamma", "lambertw"):
        same(getattr(special, name)(cp.asarray(z)), getattr(scipy.special, name)(z))
    same(special.sici(cp.asarray(z))[0], scipy.special.sici(z)[0])
for name in ("erfinv", "erfcx", "i0", "j1", "ndtri"):
    wanted = getattr(scipy.special, name)(np.abs(v) if name == "ndtri" else v)
    same(getattr(special, name)(cp.asarray(np.abs(v) if name == "ndtri" else v)), wanted)
large = cp.array([700.0, -800.0, 2.0**62, np.inf])  # beyond the largest double from 714 on
for name, sign in (("i0", 1), ("i1", -1)):
    found = getattr(special, name)(large).get()
    same(cp.asarray(found[:1]), getattr(scipy.special, name)(700.0), 1e-11)
    assert found[1:].tolist() == [sign * np.inf, np.inf, np.inf], found
same(special.erfcinv(cp.logspace(-300, 0.3, 40)), scipy.special.erfcinv(np.logspace(-300, 0.3, 40)))
same(special.ellipj(cp.asarray(v), cp.asarray(np.abs(v)))[0], scipy.special.ellipj(v, np.abs(v))[0])
m = np.random.default_rng(0).random((8, 8))
same(ndimage.shift(cp.asarray(m), 1.5), scipy.ndimage.shift(m, 1.5))
same(ndimage.binary_erosion(cp.asarray(v > 0)), scipy.ndimage.binary_erosion(v > 0))
same(ndimage.histogram(cp.asarray(m), 0, 4, 5), scipy.ndimage.histogram(m, 0, 4, 5))
edt = scipy.ndimage.distance_transform_edt(m > 0.5)
same(ndimage.distance_transform_edt(cp.asarray(m > 0.5)), edt)
same(signal.max_len_seq(5)[0], scipy.signal.max_len_seq(5)[0])
for seed in range(20):  # threads of a warp that are taken to be in step; 14 has found one
    line = np.random.default_rng(seed).integers(0, 100, 1500)
    least = line[cp.argpartition(cp.asarray(line), 50)[:51].get()]
    same(cp.asarray(np.sort(least)), np.sort(line)[:51])
sos = np.array([[1.0, 0.5, 0.2, 1.0, 0.3, 0.1]])
same(signal.sosfilt(cp.asarray(sos), cp.asarray(m[0])), scipy.signal.sosfilt(sos, m[0]))
same(signal.upfirdn(cp.asarray(v), cp.asarray(m[0])), scipy.signal.upfirdn(v, m[0]))
same(signal.find_peaks(cp.asarray(m.ravel()))[0], scipy.signal.find_peaks(m.ravel())[0])
print("done")
""",
        kernel_cache,
    )
    assert said.strip() == "done"


@needs_software_gpu
def test_bfloat16(kernel_cache: Path) -> None:
    pytest.importorskip("ml_dtypes")
    said = run(
        r"""
import ml_dtypes
x = np.linspace(-3, 3, 12).astype(ml_dtypes.bfloat16)
y = cp.asarray(x)
assert (cp.exp(y).get() == np.exp(x)).all() and (y + y).dtype == ml_dtypes.bfloat16
assert np.allclose(y.sum().get().astype("f4"), 0, atol=0.05)
product = (y.reshape(3, 4) @ y.reshape(4, 3)).get()
wanted = x.reshape(3, 4).astype("f4") @ x.reshape(4, 3).astype("f4")
assert (product == wanted.astype(ml_dtypes.bfloat16)).all()
print("done")
""",
        kernel_cache,
    )
    assert said.strip() == "done"


@needs_software_gpu
def test_pools_limits_and_what_the_device_says(kernel_cache: Path) -> None:
    said = run(
        r"""
import warnings
runtime = cp.cuda.runtime
assert runtime.deviceGetByPCIBusId(runtime.deviceGetPCIBusId(0)) == 0
assert runtime.deviceCanAccessPeer(0, 0) == 0 and runtime.deviceGetLimit(0) == 1024
assert cp.cuda.get_local_runtime_version() == runtime.runtimeGetVersion()
warnings.simplefilter("ignore", FutureWarning)  # of CuPy 13: it may change
pool = cp.cuda.MemoryAsyncPool()
with cp.cuda.using_allocator(pool.malloc):
    x = cp.zeros(1024)
assert pool.used_bytes() == pool.total_bytes() == 8192
del x
assert pool.used_bytes() == 0
x, y = cp.arange(12, dtype="i4"), cp.zeros(12, "i4")
runtime.memcpy2D(y.data.ptr, 16, x.data.ptr, 16, 8, 3, 3)
assert y.tolist() == [0, 1, 0, 0, 4, 5, 0, 0, 8, 9, 0, 0]
for call in (runtime.deviceGetPCIBusId, runtime.deviceGetDefaultMemPool):
    try:
        call(1)
    except runtime.CUDARuntimeError as error:
        assert "cudaErrorInvalidDevice" in str(error)
try:
    runtime.mallocArray(0, 1, 1, 0)
except NotImplementedError as error:
    print(error)
""",
        kernel_cache,
    )
    assert "mallocArray" in said


def test_a_program_may_give_std_the_short_name_of_a_trait(kernel_cache: Path) -> None:
    program = r"""
code = '''#include <cupy/cuda_workaround.h>
namespace std {
template< class T, class U >
inline constexpr bool is_same_v = is_same<T, U>::value;
}
extern "C" __global__ void f(int* x) { x[0] = std::is_same_v<int, int>; x[1] = __LINE__; }
'''
found = cp.zeros(2, "i4")
cp.RawKernel(code, "f", options=("-std=c++17",))((1,), (1,), (found,))
print(found)
"""
    assert run(program, kernel_cache) == "[1 6]\n"


def test_floats_that_no_integer_holds_become_the_nearest(kernel_cache: Path) -> None:
    """As CuPy's documentation has it of a GPU, under "Differences between CuPy and NumPy"."""
    program = """
given = [-1.0, -0.4, 3.7, 1e20, -1e20, np.inf, -np.inf, np.nan, 300.0, -200.0]
x = cp.asarray(given)
for t in "bBhHiIlL":
    wide = np.dtype(t if t in "lL" else "i" if t in "bhi" else "I")
    low, high = np.iinfo(wide).min, np.iinfo(wide).max
    for char in "fd":
        # NaN, as PTX has it: 0 in 32 bits of a float32, and the highest bit alone otherwise
        nan = 0 if char == "f" and wide.itemsize == 4 else 1 << (8 * wide.itemsize - 1)
        wanted = [min(max(int(v), low), high) if abs(v) < np.inf else high if v > 0 else low
                  for v in given if v == v]
        wanted.insert(7, nan)
        wanted = np.array([v % 2 ** (8 * np.dtype(t).itemsize) for v in wanted], "O")
        wanted = wanted.astype(np.dtype(t).str.replace("i", "u")).view(t)
        floats = x.astype(char)
        for found in (floats.astype(t), cp.stack([floats, floats]).T.astype(t)[:, 1]):
            if (found.get() != wanted).any():
                print(char, t, found, wanted)
kernel = cp.ElementwiseKernel("float64 x", "uint8 y", "y = (unsigned char)rint(x)")
print(kernel(cp.asarray([-3.0, 254.6])), cp.asarray([-5, 2], "e").astype("B"))
print(cp.asarray([0.5, np.nan, 0]).astype("?"), cp.asarray([-1, 300], "l").astype("B"))
"""
    assert run(program, kernel_cache) == "[  0 255] [0 2]\n[ True  True False] [255  44]\n"


def test_the_place_of_the_least_number_beside_nan_is_numpy_s(kernel_cache: Path) -> None:
    program = """
rng = np.random.default_rng(0)
for shape in ((7,), (1000,), (5, 2000), (2000, 5), (40, 30, 20)):
    for share in (0, 0.01, 0.5, 0.99):
        x = rng.integers(-50, 50, shape).astype("f")
        x[rng.random(shape) < share] = np.nan
        for axis in range(len(shape)):
            x.swapaxes(0, axis)[0] = 4  # no slice is all NaN
        x[..., -1][x[..., -1] > 40] = np.inf
        for name in ("nanargmin", "nanargmax", "nanmin", "nanmax"):
            for axis in (None, *range(len(shape))):
                found = getattr(cp, name)(cp.asarray(x), axis=axis).get()
                if (found != getattr(np, name)(x, axis=axis)).any():
                    print(name, shape, share, axis)
print(cp.nanargmax(cp.asarray([np.nan, -np.inf])))
print(cp.nanargmin(cp.asarray([[np.nan, 3], [2, 1]]), 0))
"""
    assert run(program, kernel_cache) == "1\n[1 1]\n"
