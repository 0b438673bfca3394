"""The real CuPy on host memory: right numbers, simulated VRAM; a process of its own for each."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import python
from software_programs import START, needs_compiler, needs_software_gpu, run

from umem.errors import DeviceError, MissingDependencyError
from umem.host_cuda.kernels import for_host
from umem.host_cuda.linking import parsed, source_of
from umem.host_cuda.toolchain import Toolchain

# -- without CuPy ------------------------------------------------------------------------------


def test_signatures_are_read() -> None:
    found = parsed("intptr_t (size_t, unsigned int, int __pyx_skip_dispatch)")
    assert found is not None and [a.text for a in found.arguments] == ["size_t", "unsigned int"]
    assert found.result.error == "0" and not found.has_optional
    more = parsed(
        "intptr_t (size_t, int __pyx_skip_dispatch, struct __pyx_opt_args_f *__pyx_optional_args)"
    )
    assert more is not None and more.has_optional and len(more.arguments) == 1
    assert parsed("int") is None  # a variable
    assert parsed("cudaExtent (size_t, size_t, size_t)") is None  # a struct by value


@needs_compiler
def test_made_functions_compile(tmp_path: Path) -> None:
    texts = ("PyObject *(void)", "float (intptr_t, double)", "int (PyObject *, PY_LONG_LONG)")
    functions = {text: (text, found) for text in texts if (found := parsed(text)) is not None}
    assert len(functions) == 3
    assert Toolchain(tmp_path).shared_object(source_of(functions), "c").exists()


@needs_compiler
def test_what_was_compiled_once_is_found_again(tmp_path: Path) -> None:
    tools = Toolchain(tmp_path)
    path = tools.shared_object("int one(void) { return 1; }", "c")
    before = path.stat().st_mtime_ns
    assert Toolchain(tmp_path).shared_object("int one(void) { return 1; }", "c") == path
    assert path.stat().st_mtime_ns == before
    assert tools.shared_object("int two(void) { return 2; }", "c") != path
    assert not [left for left in tmp_path.iterdir() if left.suffix != ".so"]


@needs_compiler
def test_a_source_that_does_not_compile_says_why(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="nonsense"):
        Toolchain(tmp_path).shared_object("int f(void) { return nonsense; }", "c")
    assert not list(tmp_path.iterdir())


def test_no_compiler_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(MissingDependencyError, match=r"install g\+\+"):
        Toolchain(tmp_path).shared_object("int x;", "c")


@needs_compiler
def test_a_folder_that_cannot_be_written_is_replaced_for_the_process(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    tools = Toolchain(file / "below")
    assert tools.shared_object("int x;", "c").exists() and tools.folder != file / "below"


def test_kernels_are_found_with_their_parameters() -> None:
    source = 'extern "C" __global__ void f(const CArray<float, 1> x, CArray<int, 2, true> y) {}'
    found = for_host(source)
    assert found.kernels == {"f": "const CArray<float, 1> x, CArray<int, 2, true> y"}
    assert "UMEM_KERNEL(f, 1, f)" in found.text
    waits = for_host("__global__ void g(float* y) { __syncthreads(); }")
    assert "UMEM_KERNEL(g, 2, g)" in waits.text
    template = "template <class T, int n> __global__ void h(T* y) {}"
    assert for_host(template).kernels == {}
    named = for_host(template, ["h<float, 3>"])
    assert "UMEM_KERNEL(expression_0, 1, h<float, 3>)" in named.text
    with pytest.raises(DeviceError, match="no kernel 'other<int>'"):
        for_host(template, ["other<int>"])


# -- the real CuPy -----------------------------------------------------------------------------


@needs_software_gpu
class TestCupy:
    @pytest.mark.thorough
    def test_arrays_hold_what_numpy_s_hold(self, kernel_cache: Path) -> None:
        program = """
a = np.random.default_rng(0).standard_normal((37, 53)).astype("f4")
x = cp.asarray(a)
for name, ours, theirs in (
    ("elementwise", x * 2 + cp.exp(x), a * 2 + np.exp(a)),
    ("transposed", x.T.copy(), a.T),
    ("sum", x.sum(), a.sum(dtype="f8")),
    ("columns", x.sum(axis=0), a.sum(axis=0, dtype="f8")),
    ("rows", x.sum(axis=1), a.sum(axis=1, dtype="f8")),
    ("largest", x.argmax(axis=1), a.argmax(axis=1)),
    ("gather", x[cp.asarray([3, 1, 3])], a[[3, 1, 3]]),
    ("condition", cp.where(x > 0, x, 0).sum(axis=0), np.where(a > 0, a, 0).sum(axis=0)),
    ("half", (x.astype("f2") + 1).astype("f4"), (a.astype("f2") + np.float16(1)).astype("f4")),
    ("product", x @ x.T, a @ a.T),
    ("in columns", cp.asfortranarray(x), a),
):
    difference = np.abs(cp.asnumpy(ours).astype("f8") - theirs).max()
    assert difference < 1e-4, (name, difference)
print("same")
"""
        assert run(program, kernel_cache) == "same\n"

    @pytest.mark.thorough
    def test_sums_are_added_up_as_on_a_gpu_in_blocks(self, kernel_cache: Path) -> None:
        program = """
x = cp.full((1000, 1000), 1000, "f4")
print(float(x.sum()))
"""
        assert run(program, kernel_cache) == "1000000000.0\n"

    @pytest.mark.thorough
    def test_raw_kernels_run_with_shared_memory_barriers_and_atomics(
        self, kernel_cache: Path
    ) -> None:
        program = r'''
source = """
extern "C" __global__ void turn(float* y, int n) {
    __shared__ float held[64];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    held[threadIdx.x] = y[i];
    __syncthreads();
    y[i] = held[63 - threadIdx.x];
}
extern "C" __global__ void count(const float* y, int* found, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && y[i] > 10) atomicAdd(found, 1);
}
"""
module = cp.RawModule(code=source)
y = cp.arange(128, dtype="f4")
module.get_function("turn")((2,), (64,), (y, np.int32(128)))
found = cp.zeros(1, "i4")
module.get_function("count")((2,), (64,), (y, found, np.int32(100)))
print(cp.asnumpy(y[:2]), cp.asnumpy(y[64:66]), int(found[0]))
'''
        assert run(program, kernel_cache) == "[63. 62.] [127. 126.] 89\n"

    @pytest.mark.thorough
    def test_warps_vote_and_hand_values_on_and_launches_give_shared_memory(
        self, kernel_cache: Path
    ) -> None:
        program = r'''
source = """
extern "C" __global__ void warps(const int* x, int* y) {
    int i = threadIdx.x;
    int v = x[i];
    for (int by = 16; by; by >>= 1) v += __shfl_down_sync(0xffffffffu, v, by);
    y[i] = __shfl_sync(0xffffffffu, v, 0);
    y[64 + i] = __ballot_sync(0xffffffffu, x[i] % 2);
    y[128 + i] = __shfl_xor_sync(0xffffffffu, x[i], 1);
    y[192 + i] = __any_sync(0xffffffffu, x[i] == 40) + 2 * __all_sync(0xffffffffu, x[i] < 32);
}
extern "C" __global__ void uneven(int* y) {
    extern __shared__ int held[];
    if (threadIdx.x >= 40) return;
    held[threadIdx.x] = threadIdx.x;
    if (threadIdx.x < 8) __syncwarp(0xffu);
    __syncthreads();
    y[threadIdx.x] = held[39 - threadIdx.x];
}
"""
module = cp.RawModule(
    code="template <class T, int n> __global__ void add(T* x) { x[threadIdx.x] += n; }",
    name_expressions=["add<int, 5>"],
)
x = cp.arange(4, dtype="i4")
module.get_function("add<int, 5>")((1,), (4,), (x,))
print(x.tolist())
module = cp.RawModule(code=source)
x, y = cp.arange(64, dtype="i4"), cp.zeros(256, "i4")
module.get_function("warps")((1,), (64,), (x, y))
y = cp.asnumpy(y)
print(set(y[:32].tolist()), set(y[32:64].tolist()), hex(int(np.uint32(y[64]))))
print(y[128:132].tolist(), y[192], y[192 + 32])
z = cp.zeros(40, "i4")
module.get_function("uneven")((1,), (64,), (z,), shared_mem=160)
print((cp.asnumpy(z) == np.arange(40)[::-1]).all())
'''
        assert run(program, kernel_cache).splitlines() == [
            "[5, 6, 7, 8]",
            "{496} {1520} 0xaaaaaaaa",
            "[1, 0, 3, 2] 2 1",
            "True",
        ]

    @pytest.mark.thorough
    def test_plain_memory_is_full_and_managed_memory_is_not(self, kernel_cache: Path) -> None:
        program = """
try:
    held = [cp.ones(4 << 20, "f4") for _ in range(8)]
except cp.cuda.memory.OutOfMemoryError as error:
    print("Out of memory" in str(error))
held = None
cp.get_default_memory_pool().free_all_blocks()
assert gpu.figures.migrated_in_bytes == 0
with umem.managed():
    held = [cp.ones(4 << 20, "f4") for _ in range(8)]
    print(sum(float(x.sum()) for x in held) == 8 * (4 << 20))
print(gpu.figures.migrated_in_bytes > 64 << 20, gpu.figures.migrated_out_bytes > 64 << 20)
print(umem.status().device, umem.status().simulated, gpu)
"""
        lines = run(program, kernel_cache).splitlines()
        assert lines[:3] == ["True", "True", "True True"]
        assert lines[3] == "T4 True <T4 with 64.0 MiB of VRAM (simulated), under the real CuPy>"

    @pytest.mark.thorough
    def test_threads_take_turns(self, kernel_cache: Path) -> None:
        program = """
import threading
wrong = []

def work(number):
    for turn in range(5):
        x = cp.full((1500, 700), number + turn, "f4")
        if not (cp.asnumpy(x.sum(axis=1)) == 700 * (number + turn)).all():
            wrong.append((number, turn))

threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(wrong)
"""
        start = START.replace("64MiB", "1GiB")
        assert run(program, kernel_cache, start=start) == "[]\n"

    @pytest.mark.thorough
    def test_events_tell_simulated_time(self, kernel_cache: Path) -> None:
        program = """
start, end, never = cp.cuda.Event(), cp.cuda.Event(), cp.cuda.Event()
x = cp.ones(4 << 20, "f4")
before = gpu.figures.seconds
start.record()
x += 1
end.record()
elapsed = cp.cuda.get_elapsed_time(start, end)
print(abs(elapsed / 1000 - (gpu.figures.seconds - before)) < 1e-6, elapsed > 0.05)
try:
    cp.cuda.get_elapsed_time(start, never)
except cp.cuda.runtime.CUDARuntimeError as error:
    print(error.status)
"""
        assert run(program, kernel_cache) == "True True\n400\n"

    @pytest.mark.thorough
    def test_hints_reach_the_model_and_are_read_back(self, kernel_cache: Path) -> None:
        program = """
with umem.managed():
    x = cp.ones(4 << 20, "f4")
umem.prefetch(x, "cpu")
print(umem.location(x).last_prefetch)
before = gpu.figures.migrated_in_bytes
umem.prefetch(x)
print(umem.location(x).last_prefetch, gpu.figures.fault_count)
umem.advise(x, "read_mostly")
umem.advise(x[: 1 << 20], "preferred_location", "cpu")
print(umem.location(x).read_mostly, umem.location(x).preferred, umem.location(x[:9]).preferred)
"""
        if find_spec("cuda") is None or find_spec("cuda.core") is None:
            pytest.skip("no cuda.core")
        lines = run(program, kernel_cache).splitlines()
        assert lines[0] == "cpu" and lines[1].startswith("0 ")
        assert lines[2] == "True None cpu"

    def test_free_memory_is_what_the_model_has_left(self, kernel_cache: Path) -> None:
        program = """
free, total = cp.cuda.runtime.memGetInfo()
x = cp.ones(4 << 20, "f4")
print(total >> 20, (free - cp.cuda.runtime.memGetInfo()[0]) >> 20)
"""
        assert run(program, kernel_cache) == "64 16\n"

    def test_cupy_that_is_there_already_is_refused(self, kernel_cache: Path) -> None:
        start = "import cupy, umem\n"
        program = """
try:
    umem.software_gpu("t4")
except umem.errors.StateError as error:
    print(str(error).split(":")[0])
"""
        assert run(program, kernel_cache, start=start) == "CuPy is imported already\n"

    def test_what_cannot_be_is_refused_before_anything_changes(self, kernel_cache: Path) -> None:
        program = """
import sys
for gpu, vram in (("t5", None), ("t4", "much"), ("t4", "1KiB")):
    try:
        umem.software_gpu(gpu, vram, force=True)
    except umem.UmemError as error:
        print(type(error).__name__)
print("cupy" in sys.modules or "cupy_backends" in sys.modules)
"""
        start = "import umem\n"
        assert (
            run(program, kernel_cache, start=start)
            == "UnknownGpuError\nSizeError\nSizeError\nFalse\n"
        )

    @pytest.mark.thorough
    def test_libraries_give_what_scipy_gives(self, kernel_cache: Path) -> None:
        program = """
import scipy.sparse as sp
import cupyx.scipy.sparse as csp
a = np.random.default_rng(0).standard_normal((30, 20))
x = cp.asarray(a)
m = sp.random(50, 40, 0.2, "csr", dtype="f4", random_state=0)
b = np.random.default_rng(1).random((40, 7), "f4")
g, d = csp.csr_matrix(m), cp.asarray(b)
cp.random.seed(1)
drawn = cp.random.randn(100_000)
for name, ours, theirs in (
    ("sort", cp.sort(x, axis=1), np.sort(a, axis=1)),
    ("argsort", cp.argsort(x, axis=0), np.argsort(a, axis=0)),
    ("unique", cp.unique(cp.asarray([3, 1, 3, 2])), [1, 2, 3]),
    ("sparse times dense", g @ d, m @ b),
    ("sparse times vector", g @ d[:, 0].copy(), m @ b[:, 0]),
    ("transposed", g.T @ cp.ones((50, 3), "f4"), m.T @ np.ones((50, 3), "f4")),
    ("in columns", g.tocsc().toarray(), m.toarray()),
    ("as coordinates", g.tocoo().tocsr().toarray(), m.toarray()),
    ("mean", drawn.mean() / 100, 0),
    ("deviation", drawn.std() / 100, 0.01),
):
    difference = np.abs(cp.asnumpy(ours) - theirs).max()
    assert difference < 1e-4, (name, difference)
print("same")
"""
        if find_spec("scipy") is None:
            pytest.skip("no SciPy")
        assert run(program, kernel_cache) == "same\n"

    def test_a_kernel_that_does_not_compile_is_cupy_s_own_error(self, kernel_cache: Path) -> None:
        program = r"""
import re
source = 'extern "C" __global__ void f(float* x)\n{\n __no_such_intrinsic(3); }'
try:
    cp.RawKernel(source, "f")((1,), (1,), (cp.ones(1, "f4"),))
except cp.cuda.compiler.CompileException as error:
    place = re.search(r"\w+[.]cu:3:\d+: error", str(error))  # the program's, as NVRTC has it
    print("__no_such_intrinsic" in str(error), place is not None)
"""
        assert run(program, kernel_cache) == "True True\n"

    def test_umem_run_puts_it_under_a_script(self, kernel_cache: Path, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text("import cupy\nprint(int(cupy.arange(10).sum()))\n")
        words = ("-m", "umem", "run", "--software", "t4", script)
        done = python(*words, XDG_CACHE_HOME=kernel_cache)
        assert (done.stdout, done.stderr, done.returncode) == ("45\n", "", 0)

    @pytest.mark.thorough
    def test_umem_run_says_what_to_do_where_vram_is_full(
        self, kernel_cache: Path, tmp_path: Path
    ) -> None:
        script = tmp_path / "script.py"
        script.write_text("import cupy\nprint(float(cupy.ones(4 << 20).sum()))\n")
        asked = [sys.executable, "-m", "umem", "run", "--software", "t4", "--vram", "16MiB"]
        how = {"env": {**os.environ, "XDG_CACHE_HOME": str(kernel_cache)}, "text": True}
        done = subprocess.run([*asked, script], capture_output=True, check=False, **how)
        assert done.returncode == 1 and "OutOfMemoryError" in done.stderr
        assert "umem run --mode managed" in done.stderr
        more = ["--mode", "managed", "--report"]
        done = subprocess.run([*asked, *more, script], capture_output=True, check=False, **how)
        assert (done.stdout, done.returncode) == ("4194304.0\n", 0), done.stderr
        assert "faults (simulated)" in done.stderr

    @pytest.mark.thorough
    def test_chainer_trains_on_it_as_on_numpy(self, kernel_cache: Path) -> None:
        program = """
import warnings
warnings.simplefilter("ignore")
import umem.chainer
import chainer, chainer.functions as F, chainer.links as L

def losses(on_gpu):
    np.random.seed(0)
    model = chainer.Sequential(L.Linear(20, 30), F.relu, L.Linear(30, 10))
    x = np.random.rand(16, 20).astype("f4")
    t = np.arange(16).astype("i4") % 10
    if on_gpu:
        model.to_gpu()
        x, t = cp.asarray(x), cp.asarray(t)
    optimizer = chainer.optimizers.Adam().setup(model)
    found = []
    for _ in range(4):
        loss = F.softmax_cross_entropy(model(x), t)
        model.cleargrads()
        loss.backward()
        optimizer.update()
        found.append(float(loss.array))
    return np.array(found)

print(chainer.backends.cuda.available, np.abs(losses(True) - losses(False)).max() < 1e-5)
"""
        if find_spec("chainer") is None:
            pytest.skip("no Chainer")
        assert run(program, kernel_cache) == "True True\n"
