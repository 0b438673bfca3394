"""Macros and headers of kernels that users write, on the software GPU."""

from __future__ import annotations

from pathlib import Path

from software_programs import needs_compiler, needs_cupy, run

pytestmark = [needs_cupy, needs_compiler]
CALL = """
def call(code, size, dtype="f4", threads=1, options=()):
    kernel = cp.RawKernel(code, "k", options=("-std=c++17", *options))
    out = cp.zeros(size, dtype)
    kernel((1,), (threads,), (out,))
    return out.tolist()
"""


def test_macros_of_a_program_are_its_own(kernel_cache: Path) -> None:
    run(
        CALL
        + r"""
letters = "ABCFHINTUKabcdefghijlmnopqrstuvwyz"
body = 'extern "C" __global__ void k(float* X) { X[threadIdx.x] = N; }'
code = "".join(f"#define {letter} 7\n" for letter in letters) + body
assert call(code, 1) == [7]
options = [f"-D{letter}=7" for letter in letters if letter != "N"]
assert call(body, 2, threads=2, options=(*options, "-DN=3")) == [3, 3]
assert call(body, 1, options=("-DN",)) == [1]
body = 'extern "C" __global__ void k(float* X) { X[0] = M_PI < 4; }  // M_PI = 3.14159'
assert call(body, 1) == [1]
""",
        kernel_cache,
    )


def test_a_source_sees_the_gpus_compiler(kernel_cache: Path) -> None:
    run(
        CALL
        + r"""
code = '''
#if __CUDA_ARCH__ < 600
__device__ double atomicAdd(double* place, double x) { return x; }
#endif
#if defined(__CUDACC__) && defined(__CUDACC_RTC__)
extern "C" __global__ void k(int* x) {
  double sum = 1;
  atomicAdd(&sum, 2.);
  x[0] = sum; x[1] = __CUDA_ARCH__;
}
#endif'''
major, minor = (int(digit) for digit in cp.cuda.Device().compute_capability)
assert call(code, 2, "i4") == [3, 100 * major + 10 * minor]
code = '''
#include <cuda/std/complex>
#ifdef __CUDA_ARCH__
extern "C" __global__ void k(float* x) { x[0] = (cuda::std::complex<float>(0, 1) * 2.f).imag(); }
#endif'''
assert call(code, 1) == [2]
""",
        kernel_cache,
    )


def test_functions_and_headers_of_cuda_are_there(kernel_cache: Path) -> None:
    run(
        CALL
        + r"""
code = '''
#include <cuComplex.h>
#include <cuda_fp16.h>
#include <math_constants.h>
extern "C" __global__ void k(float* x) {
  __nanosleep(1);
  dim3 some(2, 3), here = threadIdx;
  uint3 there = dim3(4);
  x[0] = some.x * some.y * some.z + here.x + there.x;
  x[1] = umax(umin(3u, 4u), 2u) + llmax(llmin(-1, 1), -2) + ullmin(~0ull, 5);
  x[2] = __double2float_ru(1 + 1e-12) > 1 && __double2float_rd(1 + 1e-12) == 1
      && __double2float_rz(-1 - 1e-12) == -1 && __double2float_rd(-1 - 1e-12) < -1
      && __double2float_ru(1.5) == 1.5f;
  x[3] = CUDART_PI_F > 3.14f && CUDART_LN2 < 0.7 && CUDART_INF_F > 1;
  cuFloatComplex a = make_cuFloatComplex(1, 2), b = cuCdivf(cuCmulf(a, a), a);
  cuDoubleComplex c = cuCsub(cuComplexFloatToDouble(cuConjf(b)), make_cuDoubleComplex(1, 0));
  x[4] = cuCrealf(b) == 1 && cuCimag(c) == -2 && cuCabs(c) == 2 && cuCimagf(cuCfmaf(a, a, a)) == 6;
  __half h = 1;
  const float old = atomicAdd(&h, __half(2));
  x[5] = old + __half2float(h);
  int n = 1;
  atomicMax_system(&n, 4); atomicAdd_block(&n, 2); atomicCAS_block(&n, 6, 8);
  x[6] = n;
  x[7] = erfcinv(1.) == 0 && normcdfinvf(0.5f) == 0 && isless(1., 2.) && isnormal(1.f);
}'''
assert call(code, 8) == [10, 7, 1, 1, 1, 4, 8, 1]
code = 'extern "C" __global__ void k(float* x) { x[0] = 1; if (x[0]) __trap(); x[0] = 2; }'
try:
    call(code, 1)
except Exception as error:
    assert "__trap" in str(error), error
else:
    raise SystemExit("it went on")
""",
        kernel_cache,
    )
