"""Kernels that CUDA refuses, each case refused by default and accepted under strict=False."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from software_programs import START, needs_software_gpu, run

from umem.host_cuda import capabilities
from umem.host_cuda.dialect import has_long_double, without_long_double
from umem.host_cuda.kernel_limits import launch_bounds
from umem.host_cuda.strictness import hint
from umem.host_cuda.toolchain import errors_in

LOOSE = START.replace("force=True", "force=True, strict=False")
CASES = r"""
import json
def kernel(body, head="", bounds=""):
    return cp.RawKernel(f'{head}\nextern "C" __global__ void {bounds} k(int* x) {{ {body} }}', "k")
def launch(body, head="", bounds="", threads=1, shared=0):
    kernel(body, head, bounds)((1,), (threads,), (cp.zeros(64, "i4"),), shared_mem=shared)
beside = '''extern __shared__ int d[]; __shared__ int s[5000];
d[0] = x[1]; s[x[2]] = 2; __syncthreads(); x[0] = s[x[3]] + d[0];'''
own = '''#if __CUDA_ARCH__ < 800
__device__ int __reduce_max_sync(unsigned mask, int value) { return value; }
#endif'''
part = "template <int n> __device__ int part(int i) { __shared__ int s[n]; s[i] = i; return s[0]; }"
CASES = {
    "static shared memory": lambda: launch("__shared__ int s[12289]; s[x[1]] = 1; x[0] = s[x[2]];"),
    "of a function": lambda: launch("x[0] = part<12289>(x[1]);", part),
    "48 KiB": lambda: launch("__shared__ int s[12288]; s[x[1]] = 1; x[0] = s[x[2]];"),
    "of a function that is not called": lambda: launch("x[0] = part<8>(x[1]);",
        part + " __device__ int other(int i) { return part<12289>(i); }"),
    "constant memory": lambda: launch("x[0] = c[x[1]];", "__constant__ int c[16385];"),
    "64 KiB": lambda: launch("x[0] = c[x[1]];", "__constant__ int c[16384];"),
    "launch bounds": lambda: launch("x[0] = 1;", bounds="__launch_bounds__(64)", threads=65),
    "within bounds": lambda: launch("x[0] = 1;", bounds="__launch_bounds__(64)", threads=64),
    "static beside dynamic": lambda: launch(beside, shared=29200),
    "both in 48 KiB": lambda: launch(beside, shared=29152),
    "capability": lambda: launch("x[0] = __reduce_add_sync(~0u, 1);", threads=32),
    "an intrinsic of its own": lambda: launch("x[0] = __reduce_max_sync(~0u, 1);", own),
    "variable length": lambda: launch("int a[x[0] + 5]; a[x[1]] = 1; x[0] = a[x[2]];"),
}
said = {}
for name, case in CASES.items():
    try:
        case()
        said[name] = ["", ""]
    except Exception as error:
        said[name] = [type(error).__name__, str(error)]
print(json.dumps(said))
"""
REFUSED = {
    "static shared memory": ("CompileException", "uses too much shared data (0xc004 bytes, 0xc000"),
    "of a function": ("CompileException", "uses too much shared data (0xc004 bytes, 0xc000 max)"),
    "constant memory": ("CompileException", "too much global constant data (0x10004 bytes, 0x100"),
    "launch bounds": ("CUDADriverError", "CUDA_ERROR_INVALID_VALUE: invalid argument: 65 threads"),
    "static beside dynamic": (
        "CUDADriverError",
        "20,000 bytes of static shared memory, and 29,200",
    ),
    "capability": ("CompileException", 'error: identifier "__reduce_add_sync" is undefined: it'),
    "variable length": ("CompileException", "error: variable length array"),
}
RIGHT = (
    "48 KiB", "of a function that is not called", "64 KiB", "within bounds", "both in 48 KiB",
    "an intrinsic of its own",
)  # fmt: skip
_said: dict[str, dict[str, list[str]]] = {}


def said(start: str, cache: Path) -> dict[str, list[str]]:
    """The errors of all cases, by name: type and message, empty without one."""
    if start not in _said:
        _said[start] = json.loads(run(CASES, cache, start=start))
    return _said[start]


@needs_software_gpu
@pytest.mark.parametrize("name", REFUSED)
def test_what_cuda_refuses_is_refused(name: str, kernel_cache: Path) -> None:
    kind, text = said(START, kernel_cache)[name]
    wanted, part = REFUSED[name]
    assert kind == wanted and part in text
    assert hint() in text


@needs_software_gpu
@pytest.mark.parametrize("name", RIGHT)
def test_what_cuda_accepts_is_accepted(name: str, kernel_cache: Path) -> None:
    assert said(START, kernel_cache)[name] == ["", ""]


@needs_software_gpu
@pytest.mark.parametrize("name", REFUSED)
def test_nothing_of_it_is_refused_where_a_program_says_so(name: str, kernel_cache: Path) -> None:
    assert said(LOOSE, kernel_cache)[name] == ["", ""]


@needs_software_gpu
def test_cupy_is_told_of_bounds_and_static_memory_and_long_double_is_double(
    kernel_cache: Path,
) -> None:
    program = r"""
import io, os
code = '''#define TIMES(n) 2 * n
#define WIDTH 32
template <int n, typename T> __global__ void __launch_bounds__(n * WIDTH) f(T* x) {
  __shared__ T held[n];
  held[threadIdx.x % n] = x[0]; __syncthreads();
  long double y = 1.5L; // a long double
  x[0] = sizeof(y) + sizeof(2.5L) + held[0];
} // ''' + str(os.getpid())  # CuPy keeps no log
names = ("f<4, int>", "f<2, int>")
module, log = cp.RawModule(code=code, name_expressions=names), io.StringIO()
module.compile(log_stream=log)
for name in names:
    kernel = module.get_function(name)
    print(kernel.attributes["max_threads_per_block"], kernel.shared_size_bytes)
x = cp.zeros(1, "i4")
module.get_function(names[0])((1,), (32,), (x,))
print(x.item(), [line.split(".cu")[-1] for line in log.getvalue().splitlines() if "20208" in line])
"""
    # Of several instances the least counts.
    assert run(program, kernel_cache).splitlines() == [
        "128 8",
        "64 8",
        """16 ["(6): warning #20208-D: 'long double' is treated as 'double' in device code"]""",
    ]


def test_long_double_in_comments_and_texts_stays() -> None:
    source = '/* long double */ long  double x = 1.L; f("long double", 1e3l, 5L); // 2.0L'
    made = '/* long double */ double x = 1.; f("long double", 1e3, 5L); // 2.0L'
    assert without_long_double(source) == made
    assert has_long_double(source) and not has_long_double("/* long double */")


@pytest.mark.parametrize(
    ("bounds", "most"),
    [
        ("64", 64),
        ("2 * N, 3", 64),
        ("(W << 1)", 16),
        ("16u", 16),
        ("OPTION", 5),
        ("E", 7),
        ("TWICE", None),
        ("unknown", None),
        ("sizeof(int)", None),
        ("CIRCLE", None),
        ("1 / 0", None),
    ],
)
def test_bounds_are_evaluated_where_that_can_be_done(bounds: str, most: int | None) -> None:
    source = f"""
#define N 32
#define TWICE 1
#define TWICE 2
#define CIRCLE CIRCLE + 1
constexpr unsigned int W = 8;
enum {{ D, E = 7 }};
extern "C" __global__ void __launch_bounds__({bounds}) f(int* x) {{}}
__launch_bounds__({bounds}) __global__ void g(int* x) {{}}
__global__ void h(int* x) {{}}
"""
    found = launch_bounds(source, ["-DOPTION=5"], [])
    assert found == ({} if most is None else {"f": most, "g": most})


def test_a_source_differs_by_capability_only_where_it_names_such_an_intrinsic() -> None:
    assert capabilities.absent("__reduce_add_sync", ["-arch=sm_75"]) == ["__reduce_add_sync"]
    assert capabilities.absent("__reduce_add_sync", ["--gpu-architecture=compute_80"]) == []
    assert capabilities.absent("__reduce_add_sync", []) == []
    assert capabilities.absent("__shfl_sync", ["-arch=sm_52"]) == []


def test_errors_are_said_without_warnings() -> None:
    text = (
        "a.h:1:2: warning: old\n  1 | x\nIn file included from b.h:1:\nc.h:3:4: error: wrong\n"
        "    | ^\nc.h:3:5: note: here\nc.h:5:1: warning: other\nc.h:5:1: note: of that\n"
    )
    wanted = "In file included from b.h:1:\nc.h:3:4: error: wrong\n    | ^\nc.h:3:5: note: here\n"
    assert errors_in(text) == wanted
