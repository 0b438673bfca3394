"""What programs bring along in CUDA C++: headers, typedefs, forms of a declaration, PTX's ways."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from software_programs import START, needs_compiler, needs_cupy, run

from umem.host_cuda.dialect import with_registers
from umem.host_cuda.included import folders_of, with_headers
from umem.host_cuda.shifts import clamped

pytestmark = [needs_cupy, needs_compiler]
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
#ifdef __CUDACC_RTC__
typedef unsigned long long uint64_t;
#define GPUKERN extern "C" __global__
#else
#include <stdint.h>
#define GPUKERN __kernel
#endif
#endif
''')
write("sub/once.h", '#pragma once\n#include "beside.h"\n__device__ int one() { return ONE; }\n')
write("sub/beside.h", '''#define ONE 1
extern "C" __global__ void g(int* x) { extern __shared__ int s[]; s[0] = 5; x[0] = s[0]; }
''')
body = '''#include "common.h"
#include <sub/once.h>
GPUKERN void f(int* x) { uint64_t counted = 0; atomicAdd(&counted, 1); x[0] = counted * one(); }
'''
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
assert "bad.h:3:10: error: " in said[1] and "nothing" in said[1], said
write("endless.h", '#include "endless.h"\n')
assert "endless.h" in refused('#include "endless.h"\n')
assert "nowhere.h" in refused('#include "nowhere.h"\n')
try:
    cp.RawKernel('extern "C" __global__ void f(int* x) { x[0] = nothing; }', "f").compile()
except cp.cuda.compiler.CompileException as error:
    assert str(error).splitlines()[1].endswith("was not declared in this scope")
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
         "uint_fast16_t": "unsigned short", "intptr_t": "signed long",
         "uint64_t": "unsigned long long"}
code = "".join(f"typedef {kind} {name};\n" for name, kind in types.items())
code += '''extern "C" __global__ void f(int* x) {
  x[0] = sizeof(int_fast16_t) + sizeof(int_fast32_t);
}'''
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
    "extern __shared__ int other[], s[];",
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
code = '''template <class T> __device__ void divided(T* x, T n) {
  x[1] = x[0] / n; x[2] = x[0] % n; }
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
import sys, warnings
write("lanes.py", '''
from cupyx import jit
@jit.rawkernel()
def lanes(y):
    y[jit.threadIdx.x + 16 * jit.threadIdx.y] = jit.laneid()
''')
sys.path.append(str(folder))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lanes import lanes
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


HALVES = Path(__file__).with_name("half_functions.txt")


def half_functions(type_name: str, word: str) -> list[tuple[str, str, list[str]]]:
    """Return result, name and parameters of the functions of a 16-bit float's header."""
    found = []
    for line in HALVES.read_text(encoding="utf-8").splitlines():
        if match := re.fullmatch(r"([\w ]+) (\w+)\((.*)\)", line):
            result, name, parameters = match.groups()
            types = [re.sub(r"\b__half", type_name, each) for each in parameters.split(", ")]
            name = name.replace("half", word)
            found.append((re.sub(r"\b__half", type_name, result), name, types))
    return found


@pytest.mark.parametrize(
    ("header", "type_name", "word"),
    [("cuda_fp16.h", "__half", "half"), ("cuda_bf16.h", "__nv_bfloat16", "bfloat16")],
)
def test_all_functions_of_16_bit_floats_are_there(
    kernel_cache: Path, header: str, type_name: str, word: str
) -> None:
    functions = half_functions(type_name, word)
    assert len(functions) == 231
    checks = [f"#include <{header}>\ntemplate <class T> T value();\n"]
    for result, name, types in functions:
        given = ", ".join(f"value<{each}>()" for each in types)
        checks.append(
            f"static_assert(std::is_convertible_v<decltype({name}({given})), {result}>);\n"
        )
    checks.append('extern "C" __global__ void f(int* x) { x[0] = 7; }')
    run(f"{FILES}\nassert called(module({''.join(checks)!r}))[0] == 7\n", kernel_cache)


def test_halves_are_rounded_as_numpy_rounds_them(kernel_cache: Path) -> None:
    run(
        r"""
code = '''#include <cuda_fp16.h>
extern "C" __global__
void f(const __half* a, const __half* b, __half* y, int* w, const int* n, const double* d) {
  const int i = threadIdx.x;
  const __half2 p = __halves2half2(a[i], b[i]), q = __lowhigh2highlow(p);
  __half* at = y + 16 * i;
  at[0] = __hadd(a[i], b[i]); at[1] = a[i] - b[i]; at[2] = a[i] * b[i]; at[3] = __hdiv(a[i], b[i]);
  at[4] = __high2half(__hadd2(p, q)); at[5] = (p * q).x; at[6] = __low2half(__hneg2(p));
  at[7] = __hadd_sat(a[i], b[i]); at[8] = __int2half_rn(n[i]); at[9] = __double2half(d[i]);
  at[10] = __int2half_rz(n[i]);
  at[11] = __float2half_ru((float)d[i]); at[12] = __float2half_rd((float)d[i]);
  at[13] = __hfma(a[i], b[i], a[i]); at[14] = htrunc(a[i]); at[15] = __low2half(h2sqrt(__habs2(p)));
  int* to = w + 8 * i;
  to[0] = __hbgt2(p, q); to[1] = __hgt2_mask(p, q);
  to[2] = __half2int_rd(a[i]); to[3] = __half2short_rn(a[i]);
  to[4] = __hltu(a[i], b[i]); to[5] = __hne(a[i], b[i]);
  to[6] = __half2uint_ru(a[i]); to[7] = __heq(a[i], b[i]);
}
extern "C" __global__ void g(__half2* x) { atomicAdd(x, __floats2half2_rn(1.f, 2.f)); }'''
rng = np.random.default_rng(0)
a, b = (rng.standard_normal(64) * 100).astype("f2"), rng.standard_normal(64).astype("f2")
a[:4] = [np.nan, np.inf, 0, 65504]
b[60:] = a[60:]
n, d = rng.integers(-(2**16), 2**16, 64).astype("i4"), rng.standard_normal(64) * 1e-6
module = cp.RawModule(code=code, options=("-std=c++17",))
y, w = cp.zeros((64, 16), "f2"), cp.zeros((64, 8), "i4")
module.get_function("f")((1,), (64,), (*map(cp.asarray, (a, b)), y, w, *map(cp.asarray, (n, d))))
y, w = y.get(), w.get()
with np.errstate(all="ignore"):
    up, down = (np.nextafter(d.astype("f2"), np.float16(s * np.inf)) for s in (1, -1))
    near, single = d.astype("f2"), d.astype("f4")
    whole = n.astype("f2")
    toward = np.where(abs(whole.astype("f8")) > abs(n), np.nextafter(whole, np.float16(0)), whole)
    wide = a.astype("f8") * b.astype("f8") + a.astype("f8")
    wanted = [a + b, a - b, a * b, a / b, a + b, a * b, -a,
              np.where(np.isnan(a + b), 0, np.clip(a + b, 0, 1)), whole, near, toward,
              np.where(near < single, up, near), np.where(near > single, down, near),
              wide.astype("f2"), np.trunc(a), np.sqrt(abs(a))]
    for k, each in enumerate(wanted):
        assert np.array_equal(y[:, k], each.astype("f2"), equal_nan=True), k
    both = (a > b) & (b > a)
    mask = np.where(a > b, 0xFFFF, 0) | np.where(b > a, 0xFFFF0000, 0)
    finite = np.isfinite(a)
    tests = [both, mask.astype("u4").view("i4"), np.floor(a), np.rint(a), ~(a >= b),
             (a < b) | (a > b), np.ceil(np.maximum(a, 0)), a == b]
    for k, each in enumerate(tests):
        keep = finite & (abs(a) < 32768) if k in (2, 3, 6) else slice(None)
        assert np.array_equal(w[keep, k], each[keep].astype("i4")), k
assert w[0, 2] == 0 and w[1, 3] == 32767 and w[1, 2] == 2**31 - 1  # of NaN, and of infinity
x = cp.zeros(2, "f2")
module.get_function("g")((1,), (64,), (x,))
assert x.tolist() == [64, 128]
code = '''#include <cuda_bf16.h>
extern "C" __global__ void f(float* x) {
  const __nv_bfloat16 a = 1.0f, b(3), tiny = __float2bfloat16(0.001953125f);
  x[0] = a + tiny; x[1] = a / b; x[2] = __bfloat162float(__float2bfloat16_rd(3.999f));
  x[3] = __low2float(__bfloat162bfloat162(b) * __floats2bfloat162_rn(2.f, 1.f));
  x[4] = __bfloat16_as_ushort(__float2bfloat16(__int_as_float(0x7fc00001)));
  x[5] = __bfloat162float(__ll2bfloat16_rn((1ll << 40) + (1ll << 32) + 1));
}'''
x = cp.zeros(6, "f4")
cp.RawKernel(code, "f")((1,), (1,), (x,))
assert x.tolist() == [1, 0.333984375, 3.984375, 6, 0x7FFF, 2**40 + 2**33], x.tolist()
""",
        kernel_cache,
    )


def test_scans_along_rows_are_loops(kernel_cache: Path) -> None:
    run(
        r"""
for kind in "d?":
    for shape in ((3, 5), (2, 513), (3, 1024), (5, 1500)):
        x = np.random.default_rng(0).integers(0, 3, shape).astype(kind)
        for axis in (0, 1):
            found = cp.cumsum(cp.asarray(x), axis=axis)
            assert np.allclose(found.get(), np.cumsum(x, axis=axis)), (kind, shape, axis)
x = np.random.default_rng(0).random((3, 1300)) + 0.5
assert np.allclose(cp.cumprod(cp.asarray(x), axis=1).get(), np.cumprod(x, axis=1))
""",
        kernel_cache,
    )


def test_memory_of_numpy_is_pinned_in_place(kernel_cache: Path) -> None:
    run(
        r"""
runtime, x = cp.cuda.runtime, np.arange(4096, dtype="f4")
address = x.ctypes.data
def refused(name, function, *given):
    try:
        function(*given)
    except cp.cuda.runtime.CUDARuntimeError as error:
        assert name in str(error), error
    else:
        raise SystemExit("not refused")
refused("HostMemoryNotRegistered", runtime.hostUnregister, address)
runtime.hostRegister(address, x.nbytes, 0)
refused("AlreadyRegistered", runtime.hostRegister, address + 16, 8, 0)
refused("AlreadyRegistered", runtime.hostRegister, address - 16, 32, 0)
refused("InvalidValue", runtime.hostRegister, cp.zeros(8).data.ptr, 8, 0)
refused("InvalidValue", runtime.hostRegister, 1 << 20, 0, 0)
refused("InvalidValue", runtime.freeHost, address)
assert runtime.pointerGetAttributes(address + 8).type == 1
memory = cp.cuda.UnownedMemory(address, x.nbytes, x, 0)
y = cp.ndarray(x.shape, x.dtype, cp.cuda.MemoryPointer(memory, 0))
y += 1
cp.cuda.Device().synchronize()
assert x[0] == 1
runtime.hostUnregister(address)
assert runtime.pointerGetAttributes(address).type == 0 and x[1] == 2
""",
        kernel_cache,
    )


@pytest.mark.parametrize("first", ["cupy", "numba"])
def test_numba_says_itself_that_there_is_no_gpu(kernel_cache: Path, first: str) -> None:
    pytest.importorskip("numba")
    run(
        """
import numba.cuda
assert not numba.cuda.is_available()
from cuda.bindings import runtime
assert runtime.getLocalRuntimeVersion()[1] == cp.cuda.runtime.runtimeGetVersion()
""",
        kernel_cache,
        start=("import numba\n" if first == "numba" else "") + START,
    )
