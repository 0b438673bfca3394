"""Kernels of CuPy's, and of its users, that need more than plain loops; one process for many."""

from __future__ import annotations

from pathlib import Path

import pytest
from software_programs import needs_compiler, needs_cupy, run

from umem.devices.software.kernels import _parts, for_host
from umem.errors import DeviceError


def test_what_launch_bounds_stand_before_is_a_kernel() -> None:
    source = "__global__ __launch_bounds__(f(2) * 4, 1)\nvoid one(int* x) {}\n"
    source += "__global__ void __launch_bounds__(64) two(int* x) {}"
    assert list(for_host(source).kernels) == ["one", "two"]


def test_comments_among_parameters_are_no_parameters() -> None:
    source = "__global__ void f(int* x,  // of (n, m), in rows\n float y) {}"
    assert len(_parts(for_host(source).kernels["f"])) == 2


def test_a_barrier_of_the_grid_is_refused_where_blocks_run_one_after_another() -> None:
    source = "#include <cooperative_groups.h>\n__global__ void f(int* x) { this_grid().sync(); }"
    with pytest.raises(DeviceError, match="whole grid"):
        for_host(source)


@needs_cupy
@needs_compiler
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
assert cp.cuda.get_local_runtime_version() > 12000

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


@needs_cupy
@needs_compiler
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
for name in ("digamma", "lambertw"):
    same(getattr(special, name)(cp.asarray(z)), getattr(scipy.special, name)(z))
same(special.sici(cp.asarray(z))[0], scipy.special.sici(z)[0])
for name in ("erfinv", "erfcx", "i0", "j1", "ndtri"):
    wanted = getattr(scipy.special, name)(np.abs(v) if name == "ndtri" else v)
    same(getattr(special, name)(cp.asarray(np.abs(v) if name == "ndtri" else v)), wanted)
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


@needs_cupy
@needs_compiler
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


@needs_cupy
@needs_compiler
def test_pools_limits_and_what_the_device_says(kernel_cache: Path) -> None:
    said = run(
        r"""
runtime = cp.cuda.runtime
assert runtime.deviceGetByPCIBusId(runtime.deviceGetPCIBusId(0)) == 0
assert runtime.deviceCanAccessPeer(0, 0) == 0 and runtime.deviceGetLimit(0) == 1024
assert cp.cuda.get_local_runtime_version() == runtime.runtimeGetVersion()
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
