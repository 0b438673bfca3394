"""What a GPU could not do, in checked mode: misaligned addresses, memory of the host, barriers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from software_programs import START, needs_software_gpu, run

from umem.host_cuda.strictness import hint

CHECKED = START.replace("force=True", "force=True, checked=True, sticky=False")
LOOSE = CHECKED.replace("checked=True", "checked=True, strict=False")
CASES = r"""
import json
def launch(body, threads=1, x=None, **more):
    code = f'extern "C" __global__ void k(int* x) {{\n{body}\n}}'
    x = cp.zeros(8, "i4") if x is None else x
    cp.RawKernel(code, "k")((1,), (threads,), (x,), **more)
host = np.zeros(8, "i4")
pinned = cp.cuda.alloc_pinned_memory(64)
managed = cp.cuda.malloc_managed(64)
array = cp.zeros(8, "i4")
module = cp.RawModule(code='''__device__ int d[4];
extern "C" __global__ void k(int* x) { d[0] = x[1]; }''')
shared = "__shared__ float s[32]; s[threadIdx.x] = 1; __syncthreads();\n"
CASES = {
    "a constant behind a pointer": lambda: launch("x[0] = *(float*)((char*)x + 1);"),
    "a variable behind a pointer": lambda: launch("int i = x[0];\n*(double*)(x + 1 + i) = 2;"),
    "shared memory": lambda: launch(shared + "x[0] = *(double*)(s + 1);", 32),
    "an atomic": lambda: launch("atomicAdd((int*)((char*)x + 2), 1);"),
    "sixteen bytes": lambda: launch("float4 a = ((float4*)(x + 1))[x[0]]; x[2] = a.x;"),
    "memory of the host": lambda: launch("x[0] = 1;", x=host.ctypes.data),
    "two barriers": lambda: launch(
        "if (threadIdx.x < 3) __syncthreads();\nelse { x[1] = 2; __syncthreads(); }", 64),
    "a vote and a barrier": lambda: launch(
        "if (threadIdx.x < 3) x[1] = __syncthreads_or(1);\nelse __syncthreads();", 64),
    "aligned": lambda: launch("x[0] = *(double*)(x + 2) + *(short*)((char*)x + 2);"),
    "sixteen bytes of 40": lambda: launch(
        "float4 a = ((float4*)x)[x[0] + 1]; x[1] = a.x;", x=cp.zeros(10, "i4")),
    "threads that have returned": lambda: launch(
        "if (threadIdx.x < 3) return; __syncthreads();", 64),
    "one barrier in a loop": lambda: launch("for (int i = 0; i < 3; i++) __syncthreads();", 64),
    "pinned memory": lambda: launch("x[0] = 1;", x=pinned.ptr),
    "managed memory": lambda: launch("x[0] = 1;", x=managed.ptr),
    "null": lambda: launch("", x=0),
    "an empty array": lambda: launch("", x=cp.zeros(0, "i4")),
    "the end of an array": lambda: launch("", x=array.data.ptr + array.nbytes),
    "a number": lambda: launch("", x=12345),
    "a variable of a module": lambda: launch("x[0] = 1;", x=module.get_global("d").ptr),
    "CuPy's own": lambda: (
        cp.sort(cp.arange(7)[::-1]), cp.ones(3, "c16").sum(), cp.ones(5, "i1").cumsum()),
}
said = {}
for name, case in CASES.items():
    try:
        case()
        said[name] = ""
    except umem.errors.DeviceError as error:
        said[name] = str(error)
print(json.dumps(said))
"""
REFUSED = {
    "a constant behind a pointer": "k reads byte 1 of argument 0 (int* x) in line 2, a misaligned",
    "a variable behind a pointer": "k writes byte 4 of argument 0 (int* x) in line 3, a misaligned "
    "address: a multiple of 8 is needed",
    "shared memory": "in line 3, a misaligned address: a multiple of 8",
    "an atomic": "k reads byte 2 of argument 0 (int* x) in line 2, a misaligned address",
    "sixteen bytes": "k reads byte 4 of argument 0 (int* x) in line 2, a misaligned address: a "
    "multiple of 16 is needed",
    "memory of the host": "k gets argument 0 (int* x), which points to host memory",
    "two barriers": "thread (0, 0, 0) waits at the barrier in line 2, and thread (3, 0, 0) at "
    "another one, in line 3",
    "a vote and a barrier": "in line 2, and thread (3, 0, 0) at another one, in line 3",
}
RIGHT = (
    "aligned", "sixteen bytes of 40", "threads that have returned", "one barrier in a loop",
    "pinned memory", "managed memory", "null", "an empty array", "the end of an array", "a number",
    "a variable of a module", "CuPy's own",
)  # fmt: skip
_said: dict[str, dict[str, str]] = {}


def said(start: str, cache: Path) -> dict[str, str]:
    """The errors of all cases, by name; empty without one."""
    if start not in _said:
        _said[start] = json.loads(run(CASES, cache, start=start))
    return _said[start]


@needs_software_gpu
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_gpu_could_do_is_an_error_in_checked_mode(name: str, kernel_cache: Path) -> None:
    text = said(CHECKED, kernel_cache)[name]
    assert REFUSED[name] in text
    assert text.endswith(hint())


@needs_software_gpu
@pytest.mark.parametrize("name", RIGHT)
def test_what_a_gpu_does_is_none(name: str, kernel_cache: Path) -> None:
    assert said(CHECKED, kernel_cache)[name] == ""


@needs_software_gpu
@pytest.mark.parametrize("name", REFUSED)
def test_it_is_none_where_a_program_says_so(name: str, kernel_cache: Path) -> None:
    assert said(LOOSE, kernel_cache)[name] == ""


@needs_software_gpu
def test_a_gpu_with_the_hosts_page_tables_reaches_its_memory(kernel_cache: Path) -> None:
    program = r"""
from umem.host_cuda.runtime import HostRuntime
known = HostRuntime.deviceGetAttribute
HostRuntime.deviceGetAttribute = lambda self, which, n: which == 88 or known(self, which, n)
host = np.zeros(8, "i4")
code = 'extern "C" __global__ void k(int* x) { x[1] = 5; }'
cp.RawKernel(code, "k")((1,), (1,), (host.ctypes.data,))
print(host[1])
"""
    assert run(program, kernel_cache, start=CHECKED) == "5\n"
