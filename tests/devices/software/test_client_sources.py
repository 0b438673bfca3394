"""What programs bring along in CUDA C++: headers, typedefs, forms of a declaration, PTX's ways."""

from __future__ import annotations

from pathlib import Path

import pytest
from software_programs import needs_software_gpu, run

from umem.devices.software.dialect import with_registers
from umem.devices.software.included import folders_of, with_headers
from umem.devices.software.shifts import clamped

pytestmark = needs_software_gpu
FILES = r"""
import pathlib, tempfile
folder = pathlib.Path(tempfile.mkdtemp())
def write(name, text):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text)
def module(code, *options):
    return cp.RawModule(code=code, options=(f"-I{folder}", *options))
def called(module, name="f", shared=64):
    x = cp.zeros(4, "i4")
    module.get_function(name)((1,), (1,), (x,), shared_mem=shared)
    return x.tolist()
def refused(code, *options):
    try:
        module(code, *options).get_function("f")
    except (cp.cuda.compiler.CompileException, umem.UmemError) as error:
        return str(error)
    raise SystemExit("not refused")
"""


def test_kernels_of_the_programs_headers_are_found(kernel_cache: Path) -> None:
    run(
        FILES
        + r"""
write("common.h", '''#ifndef COMMON
#define COMMON
#include "common.h"
#include "sub/once.h"
#define GPUKERN extern "C" __global__
#endif
''')
write("sub/once.h", '#pragma once\n#include "beside.h"\n__device__ int one() { return ONE; }\n')
write("sub/beside.h", '''#define ONE 1
extern "C" __global__ void g(int* x) { extern __shared__ int s[]; s[0] = 5; x[0] = s[0]; }
''')
body = '#include "common.h"\n#include <sub/once.h>\nGPUKERN void f(int* x) { x[0] = one(); }'
found = module(body)
assert called(found)[0] == 1 and called(found, "g")[0] == 5
named = "#include <sub/once.h>\ntemplate <class T> __global__ void t(T* x) { x[0] = one() + 1; }"
named = cp.RawModule(code=named, options=(f"-I{folder}", "-std=c++17"), name_expressions=["t<int>"])
assert called(named, "t<int>")[0] == 2
# A source with a kernel of its own: g is looked for when it is asked for.
found = module('#include "common.h"\nextern "C" __global__ void f(int* x) { x[0] = one() + 2; }')
assert called(found)[0] == 3 and called(found, "g")[0] == 5 and called(found)[0] == 3
try:
    found.get_function("h")
except cp.cuda.driver.CUDADriverError as error:
    assert "NOT_FOUND" in str(error)
else:
    raise SystemExit("found")
""",
        kernel_cache,
    )


def test_an_error_names_the_programs_header(kernel_cache: Path) -> None:
    run(
        FILES
        + r"""
write("bad.h", '#pragma once\nextern "C" __global__ void f(int* x) {\n  x[0] = nothing; }')
said = refused('#include "bad.h"\n').splitlines()
assert said[1].endswith("bad.h:3:10: error: ‘nothing’ was not declared in this scope"), said
write("endless.h", '#include "endless.h"\n')
assert "endless.h" in refused('#include "endless.h"\n')
assert "nowhere.h" in refused('#include "nowhere.h"\n')
try:
    cp.RawKernel('extern "C" __global__ void f(int* x) { x[0] = nothing; }', "f").compile()
except cp.cuda.compiler.CompileException as error:
    assert str(error).splitlines()[1].endswith("‘nothing’ was not declared in this scope")
    assert str(error.__context__) == "NVRTC_ERROR_COMPILATION (6)"
""",
        kernel_cache,
    )


def test_headers_of_cuda_that_programs_include_by_habit(kernel_cache: Path) -> None:
    run(
        FILES
        + r"""
names = ("cuda.h", "cuda_runtime.h", "cuda_runtime_api.h", "vector_types.h", "vector_functions.hpp",
         "device_launch_parameters.h", "math_functions.h", "device_functions.h", "texture_types.h")
code = "".join(f"#include <{name}>\n" for name in names)
code += 'extern "C" __global__ void f(int* x) { cudaError_t e = cudaSuccess; x[0] = 7 + e; }'
assert called(module(code))[0] == 7
""",
        kernel_cache,
    )


def test_headers_of_the_host_are_refused_as_nvrtc_refuses_them(kernel_cache: Path) -> None:
    program = (
        FILES
        + r"""
kernel = '\nextern "C" __global__ void f(int* x) { x[0] = 7; }'
write("stdint.h", "typedef long long int64_t;")
for text in ("#ifndef __CUDACC_RTC__\n#include <vector>\n#endif", "// #include <vector>",
             "#ifdef __linux__\n#include <cmath>\n#endif", "#include <stdint.h>",
             "#include <cuda/std/cstdint>\n#include <cuda/std/limits>"):
    assert called(module(text + kernel))[0] == 7, text
guarded = "\n#ifdef WITH\n#include <vector>\n#endif" + kernel
assert called(module(guarded))[0] == 7
if strict:
    said = refused(guarded, "-DWITH")
    assert '(3): catastrophic error: cannot open source file "vector"' in said, said
    assert "strict=False" in said
else:
    assert called(module(guarded, "-DWITH"))[0] == 7
"""
    )
    start = "import umem\nstrict = {0}\numem.software_gpu('t4', '64MiB', force=True, strict={0})\n"
    for strict in (True, False):
        run(program, kernel_cache, start=start.format(strict) + "import cupy as cp\n")


def test_typedefs_of_stdint_may_be_the_programs_own(kernel_cache: Path) -> None:
    run(
        FILES
        + r"""
types = {"int_fast8_t": "signed char", "int_fast16_t": "signed short", "int_fast32_t": "int",
         "int_fast64_t": "long long", "int_least8_t": "char", "int_least16_t": "short",
         "int_least64_t": "signed long long", "uint_least64_t": "unsigned long long",
         "uint_fast16_t": "unsigned short", "intptr_t": "signed long", "uint64_t": "unsigned long long"}
code = "".join(f"typedef {kind} {name};\n" for name, kind in types.items())
code += 'extern "C" __global__ void f(int* x) { x[0] = sizeof(int_fast16_t) + sizeof(int_fast32_t); }'
assert called(module(code))[0] == 6
""",
        kernel_cache,
    )


FORMS = (
    "extern __shared__ int s[];",
    "extern __shared__ __align__(16) int s[];",
    "extern __align__(16) __shared__ int s[];",
    "extern volatile __shared__ int s[];",
    "extern __shared__ volatile int s[];",
    "extern __shared__ alignas(16) int s[];",
    "__shared__ extern int s[];",
    "extern __shared__ int __align__(16) s[];",
    "extern __shared__ int t[], s[];",
    "extern __shared__ int rows[][4]; int* s = rows[0];",
)


def test_all_forms_of_dynamic_shared_memory(kernel_cache: Path) -> None:
    run(
        FILES
        + f"forms = {FORMS!r}\n"
        + r"""
kernels = "".join(f'''extern "C" __global__ void f{i}(int* y) {{
  {form} int t = threadIdx.x; s[t] = t; __syncthreads(); y[t] = s[31 - t]; }}
''' for i, form in enumerate(forms))
found = cp.RawModule(code=kernels)
for i, form in enumerate(forms):
    y = cp.zeros(32, "i4")
    found.get_function(f"f{i}")((1,), (32,), (y,), shared_mem=256)
    assert y.tolist() == [*range(31, -1, -1)], form
whole = "__align__(8) extern __shared__ int s[];" + '''
extern "C" __global__ void f(int* x) { s[0] = 3; x[0] = s[0]; }'''
assert called(module(whole))[0] == 3
""",
        kernel_cache,
    )


def test_shifts_by_the_width_and_more_are_as_ptx_has_them(kernel_cache: Path) -> None:
    run(
        FILES
        + r"""
for kind in "bBhHiIlL":
    x = np.array([1, 5, 100, np.iinfo(kind).max, np.iinfo(kind).min], kind)
    for n in (0, 3, 31, 32, 33, 63, 64, 65):
        by = np.full(5, min(n, np.iinfo(kind).max), kind)
        for name in ("left_shift", "right_shift"):
            wanted = getattr(np, name)(x.astype("i4") if x.itemsize < 4 else x, by).astype(kind)
            found = getattr(cp, name)(cp.asarray(x), cp.asarray(by)).get()
            assert (found == wanted).all(), (kind, n, name, found, wanted)
code = '''template <class T> struct Box { T of; operator int() const { return of; } };
template <class A, class B = Box<Box<int>>> struct Pair { A a; B b; };
struct Stream { int sum; };
__device__ Stream& operator<<(Stream& s, int n) { s.sum += n; return s; }
#define BIT(n) (1u << (n))
#if BIT(2) == 4 && (16 >> 2) == 4
enum { FIVE = 5, MASK = 1 << FIVE };
#endif
extern "C" __global__ void f(int* x, int n, long long big, volatile int* v) {
  Pair<int> pair = {1, {2}};
  Stream stream = {0};
  stream << n << 1;
  unsigned int u = 255;
  u >>= n;
  v[0] <<= n;
  x[0] = (int)u + (int)(BIT(n) >> 1) + MASK + stream.sum;
  x[1] = -8 >> n | 1 << n;
  x[2] = (int)((1ll << n) >> 30) + (1 << -1) + (1 << big);
  x[3] = 1 << 2 << n - 32 >> 1 + pair.a;
}'''
x, v = cp.zeros(4, "i4"), cp.ones(1, "i4")
cp.RawKernel(code, "f", options=("-std=c++17",))(
    (1,), (1,), (x, np.int32(32), np.int64(2**32 + 1), v))
assert x.tolist() == [32 + 33, -1, 4 + 0 + 2, 1], x
assert v.tolist() == [0]
""",
        kernel_cache,
    )


@pytest.mark.parametrize(
    "text", ["x << 3", "x >> 0x1Fu", "A<B<int>> x;", "a<b<1>>(x)", "f<<<g, b>>>(x)"]
)
def test_a_shift_by_a_small_number_and_what_is_none_stay(text: str) -> None:
    assert clamped(text) == (text, False)


def test_a_shift_by_more_asks_an_object() -> None:
    assert clamped('x << n; "a << b"; y >>= 3 + n; i < n >> m') == (
        'x << umem_shift << n; "a << b"; y >>= umem_shift >>= 3 + n; i < n >> umem_shift >> m',
        True,
    )


def test_a_clock_that_threads_wait_by_goes_ahead(kernel_cache: Path) -> None:
    run(
        FILES
        + r"""
code = '''__device__ void wait(clock_t clocks) {
  clock_t start = clock();
  while (clock() - start < clocks) ;
}
extern "C" __global__ void f(long long* x) {
  long long before = clock64();
  wait(1000000000000ll);
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  x[2 * i] = before;
  x[2 * i + 1] = clock64();
}'''
x = cp.zeros((64, 2), "i8")
cp.RawKernel(code, "f")((2,), (32,), (x,))
times = x.get()
assert (np.diff(times.ravel()) > 0).all()  # one clock, which never goes back
assert (times[:, 1] - times[:, 0] >= 10**12).all()  # 64 threads of a quarter of an hour each
""",
        kernel_cache,
    )


def test_divisions_by_zero_are_as_nvidias_compiler_divides(kernel_cache: Path) -> None:
    run(
        FILES
        + r"""
code = '''template <class T> __device__ void divided(T* x, T n) { x[1] = x[0] / n; x[2] = x[0] % n; }
#define KERNEL(name, T) extern "C" __global__ void name(T* x, T n) { divided(x, n); }
KERNEL(i, int) KERNEL(I, unsigned int) KERNEL(l, long long) KERNEL(L, unsigned long long)
KERNEL(h, short) KERNEL(B, unsigned char)
extern "C" __global__ void known(int* x) { int zero = 0; x[1] = x[0] / zero; x[2] = x[0] % zero; }
'''
found = cp.RawModule(code=code)
for kind in "iIlLhB":
    for value in (7, 2**40 + 7) if kind in "lL" else (7,):
        x = cp.full(3, value, kind)
        found.get_function(kind)((1,), (1,), (x, np.array(0, kind)[()]))
        wanted = 2**32 - 1 if kind in "lL" and value == 7 else 2**64 - 1 if kind == "L" else -1
        assert x.tolist() == [value, np.array(wanted).astype(kind), value], (kind, x)
x = cp.full(3, 7, "i4")
found.get_function("known")((1,), (1,), (x,))  # it has no result, and ends nothing
""",
        kernel_cache,
    )


def test_special_registers(kernel_cache: Path) -> None:
    run(
        FILES
        + r"""
import warnings
from cupyx import jit
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    @jit.rawkernel()
    def lanes(y):
        y[jit.threadIdx.x + 16 * jit.threadIdx.y] = jit.laneid()
y = cp.zeros(64, "u4")
lanes((1,), (16, 4), (y,))
assert y.tolist() == [*range(32)] * 2
code = '''extern "C" __global__ void f(unsigned* x) {
  unsigned mask, warp;
  asm volatile("mov.u32 %0, %lanemask_lt;" : "=r"(mask));
  asm("mov.u32 %0, %%warpid;" : "=r"(warp));
  x[threadIdx.x] = __popc(mask) + 100 * warp;
}'''
cp.RawKernel(code, "f")((1,), (64,), (y,))
assert y.tolist() == [*range(32), *range(100, 132)]
""",
        kernel_cache,
    )


def test_other_assembly_stays() -> None:
    code = 'asm("mov.u32 %0, %smid;" : "=r"(x));'
    assert with_registers(code) == code


def test_headers_are_put_where_they_are_included(tmp_path: Path) -> None:
    (tmp_path / "a.h").write_text('#pragma once\n#include "b.h"\n')
    (tmp_path / "b.h").write_text("int b;\n")
    (tmp_path / "driver_types.h").touch()
    text = '// #include "a.h"\n#include "a.h"\n#include <a.h>\n#include <b.h>\n#include <c.h>\n'
    assert with_headers(text, []) == text
    found = with_headers(text, [tmp_path])
    assert found.count("int b;") == 1
    assert f'#include "{tmp_path / "b.h"}"' in found and "#include <c.h>" in found
    assert '#line 3 "<stdin>"' not in found and '#line 2 "<stdin>"\n' in found
    assert folders_of([f"-I{tmp_path}"], []) == []  # CUDA's own
