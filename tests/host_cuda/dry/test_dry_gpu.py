"""Programs on a dry software GPU, beside the same with arithmetic."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from software_programs import lines, needs_compiler, needs_cupy

pytestmark = [needs_compiler, needs_cupy]
START = """
import gc, os
import numpy as np
import umem
gc.disable()
gpu = umem.software_gpu("t4", "256MiB", dry=DRY, force=True)
import cupy as cp
import cupyx
def figures():
    f = gpu.figures
    print(f.peak_bytes, f.reserved_peak_bytes, f"{f.seconds:.9f}", f.moved_bytes)
def asked():
    return sorted({(line.rpartition(":")[2], name) for line, name in gpu._runtime.reads})
"""
DRY, REAL = START.replace("DRY", "True"), START.replace("DRY", "False")


@pytest.mark.parametrize(
    "program",
    [
        "x = cp.random.rand(900, 900); y = cp.linalg.solve(x, x @ x); z = cp.fft.fft2(y)",
        "x = cp.ones((600, 600), 'c16'); y = x.conj().T @ x; z = cp.linalg.svd(x[:300, :300])",
        "x = cp.random.rand(1 << 20); y = cp.sort(x), cp.exp(x).sum(), x.reshape(64, -1).T",
        "x = [cp.random.rand(1 << 18) for _ in range(9)]; y = cp.concatenate(x); z = cp.stack(x)",
        """
k = cp.RawKernel('extern "C" __global__ void f(const float* x, float* y) {'
                 ' int i = blockIdx.x * blockDim.x + threadIdx.x; y[i] = 2 * x[i]; }', "f")
x = cp.random.rand(1 << 20, dtype="f4")
k((4096,), (256,), (x, cp.empty_like(x)))""",
        """
with umem.managed():
    x = [cp.ones(32 << 20, "f4") for _ in range(3)]
    umem.prefetch(x[0]); umem.advise(x[1], "read_mostly")
    y = [each.sum() for each in x]""",
        """
with umem.hybrid():
    x = [cp.ones(16 << 20, "f4") for _ in range(5)]
    y = [each.sum() for each in x]""",
        """
try:
    x = [cp.ones(60 << 20, "u1") for _ in range(9)]
except cp.cuda.memory.OutOfMemoryError as error:
    print(error)""",
        """
for block in umem.blocks(np.ones((64, 1 << 18)), room="32MiB"):
    block.sum()""",
        """
from cupyx.scipy import sparse
cp.random.seed(1)
a, b = (sparse.random(900, 900, 0.01, "csr", random_state=n) for n in (1, 2))
print((a @ b).nnz, (a + b).nnz, a.tocsc().nnz, a.tocoo().tocsr().nnz)""",
        """
x = np.zeros((64, 1 << 18), "f")
with cp.cuda.Stream(non_blocking=True) as s:
    y = [cp.asarray(each) for each in (x, x[0], x[::2], x.T[:1000])]
    y[0] @ y[0].T; y[0].get(out=x)
s.synchronize()""",
        """
s, t = (cp.cuda.Stream(non_blocking=True) for _ in "ab")
with s:
    x = cp.random.rand(2000, 500); done = s.record()
t.wait_event(done)
with t:
    y = x @ x.T
    z = cp.cuda.alloc_pinned_memory(80)
    y[0, :10].get(out=np.frombuffer(z, "f8", 10))""",
    ],
)  # fmt: skip
def test_figures_are_those_with_arithmetic(program: str, kernel_cache: Path) -> None:
    program += "\nfigures()\n"
    assert lines(program, kernel_cache, start=DRY) == lines(program, kernel_cache, start=REAL)


def test_what_is_small_and_known_is_computed(kernel_cache: Path) -> None:
    program = """
labels = cp.asarray(np.arange(100000) % 7)
print((labels == 3).sum(), cp.unique(labels).tolist(), cp.bincount(labels).tolist()[:2])
small = cp.arange(12.0).reshape(3, 4)
print((small @ small.T).tolist()[0], cp.linalg.norm(small[0]).item())
print(cp.zeros(1 << 27, "u1")[5], int(cp.concatenate([labels[:3], labels[4:6]]).sum()))
print(asked())
"""
    assert lines(program, kernel_cache, start=DRY) == [
        "14286 [0, 1, 2, 3, 4, 5, 6] [14286, 14286]",
        "[14.0, 38.0, 62.0] 3.7416573867739413",
        "0 12",
        "[]",
    ]


def test_flags_are_set_and_what_the_host_asks_is_counted_by_line(kernel_cache: Path) -> None:
    """A mask of unknown values selects all, and each part of one of several is no larger."""
    program = """
x = cp.random.rand(1 << 20)
y = x[x > 0.5]
print(len(y), len(cp.nonzero(x > 2)[0]), int((x > 2).sum()))
print(bool(cp.isfinite(x).all()), bool(cp.isnan(x).any()), float(x.sum()))
print([name for _, name in asked()])
"""
    found = lines(program, kernel_cache, start=DRY)
    assert found[:2] == ["1048576 1048576 1048576", "True False 0.0"]
    assert "cupy_all" in found[2] and "cupy_sum" in found[2]


def test_unknown_arrays_differ_so_that_a_loop_until_nothing_changes_runs_to_its_limit(
    kernel_cache: Path,
) -> None:
    program = """
x = cp.random.rand(1 << 20)
old, new = (x * 9).astype("i"), (x * 8).astype("i")
print(bool((new == old).all()), bool((new != old).any()), bool(cp.array_equal(old, new)))
print(bool((x[:4] == 2).all()), bool((x != 5).any()), bool((x >= 0).all()))
for turn in range(5):
    labels = (x * (turn + 1)).astype("i")
    if turn and bool((labels == before).all()):
        break
    before = labels
print(turn, len({line for line, _ in asked()}))
"""
    assert lines(program, kernel_cache, start=DRY) == [
        "False True False",
        "False False True",
        "4 3",
    ]


def test_an_answer_fills_what_is_read_on_its_line(kernel_cache: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "def ask(x):\n    return int(x.argmax()), x[:3].get().tolist()\n", encoding="utf-8"
    )
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import train
gpu._runtime.answers["train.py:2"] = 41
print(*train.ask(cp.random.rand(1 << 20)))
"""
    assert lines(program, kernel_cache, start=DRY) == ["41 [41.0, 41.0, 41.0]"]


def test_arrays_of_numpy_are_copied_without_pinned_memory_between(kernel_cache: Path) -> None:
    program = """
x = np.arange(60.0).reshape(5, 12)
for y in (x, x[::2], x.T, x[:, 3], x[::-1, ::5], np.asfortranarray(x)):
    assert (cp.asarray(y).get() == y).all() and (cp.array(y, order="F").get() == y).all()
large = cp.asarray(np.zeros(1 << 24))
print(gpu._runtime.source.given_bytes)
"""
    assert int(lines(program, kernel_cache, start=DRY)[0]) < 1.1 * (8 << 24)


def test_the_memory_of_the_host_that_it_runs_on_does_not_limit_a_dry_run(
    kernel_cache: Path,
) -> None:
    program = """
umem.enable("managed")
print(sum(cp.empty(1 << 38, "u1").nbytes for _ in range(8)) >> 40)
kept = [cp.empty(1 << 38, "u1") for _ in range(8)]
import umem._common.host as host
print(host.available_bytes(), host.pinned_room())
"""
    assert lines(program, kernel_cache, start=DRY) == ["2", "None None"]


def test_results_of_pointers_in_memory_are_as_unknown_as_what_they_lead_to(
    kernel_cache: Path,
) -> None:
    program = """
x = [cp.random.rand(1 << 18)[:8] for _ in range(6)]
cp.concatenate(x).get()
print(len(asked()))
"""
    assert lines(program, kernel_cache, start=DRY) == ["1"]


def test_hardly_any_memory_of_the_host_is_used(kernel_cache: Path) -> None:
    program = """
import resource, umem.errors
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
x = [cp.random.rand(4 << 20) for _ in range(4)]
x[0][...] = x[1] + x[2]
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10 < 30)
"""
    assert lines(program, kernel_cache, start=DRY) == ["True"]


@pytest.mark.parametrize("option", ["checked=True", "stream_seed=0", "model=False"])
def test_what_a_dry_run_does_not_go_with_is_refused(option: str) -> None:
    program = f"import umem; umem.software_gpu('t4', dry=True, force=True, {option})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "DeviceError: a dry run has no arithmetic to check" in done.stderr.splitlines()[-1]


def test_address_space_that_is_limited_is_no_out_of_memory_of_the_gpu(kernel_cache: Path) -> None:
    program = """
import resource, umem.errors
cp.zeros(8)
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
with umem.managed():
    try:
        cp.zeros(8 << 30, "u1")
    except umem.errors.DeviceError as error:
        print(error)
"""
    (said,) = lines(program, kernel_cache, start=DRY)
    assert said.startswith("this machine gives no address space for 8.0 GiB")


def test_modules_are_compiled_when_a_kernel_runs(kernel_cache: Path) -> None:
    program = """
code = 'extern "C" { __device__ float scale = 3; __global__ void f(float* x) { x[0] *= scale; } }'
module = cp.RawModule(code=code)
f = module.get_function("f")
x = cp.ones(2, "f4")
f((1,), (1,), (x,))
print(x.tolist())
large = cp.random.rand(1 << 20, dtype="f4")
f((1,), (1,), (large,))
print(gpu._runtime.counts["compiled"])
print(cp.ndarray((1,), "f4", module.get_global("scale")).tolist())
"""
    assert lines(program, kernel_cache, start=DRY) == ["[3.0, 1.0]", "1", "[3.0]"]


def test_a_dry_gpu_says_that_what_is_written_is_real_once(kernel_cache: Path) -> None:
    program = """
import os, subprocess, sys, umem
umem.software_gpu("t4", dry=True, force=True)
assert os.environ["UMEM_DRY"] == "1"
if len(sys.argv) < 2:
    subprocess.run([sys.executable, "-c", sys.orig_argv[2], "child"], check=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        env={name: value for name, value in os.environ.items() if name != "UMEM_DRY"},
    )  # fmt: skip
    assert done.stderr == "umem: a dry GPU: values are zeros, but files are really written\n"
