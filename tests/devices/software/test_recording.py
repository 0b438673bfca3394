"""What umem.record sees of CuPy on the software GPU, and what status and its model tell."""

from __future__ import annotations

from pathlib import Path

import pytest
from software_programs import needs_compiler, needs_cupy, run

from umem.compat import find_package

pytestmark = [needs_compiler, needs_cupy]


def test_operations_of_cupy_are_recorded(kernel_cache: Path) -> None:
    program = """
a = cp.asarray(np.ones((256, 256), "f4"))
before = cp.zeros((64, 64), "f4")
with umem.record() as recorder:
    b = cp.asarray(np.ones((256, 256), "f4"))
    c = a + b
    d = c[:128] @ a
    del c
    e = before.sum(axis=0)
    before += 1
    f = cp.take(d, cp.asarray([3, 1]), axis=0)
    g = f.get()
for event in recorder.trace.events:
    kind = type(event).__name__
    if kind == "Op":
        accesses = [[a.tensor, a.stop - a.start] for a in (*event.reads, *event.writes)]
        print(event.name, accesses, len(event.writes), event.pattern, event.workspace_bytes)
    elif kind == "Alloc":
        print("alloc", event.tensor, event.nbytes, event.uploaded)
    else:
        print(event)
print(recorder.trace.backend, float(g.sum()), float(e.sum()))
"""
    found = run(program, kernel_cache).splitlines()
    assert found == [
        "alloc 0 262144 True",  # b
        "alloc 1 262144 True",  # a, which was there before
        "alloc 2 262144 False",
        "add [[1, 262144], [0, 262144], [2, 262144]] 1 stream 0",
        "alloc 3 131072 False",
        "gemm [[1, 262144], [2, 131072], [3, 131072]] 1 stream 0",
        "Free(tensor=2)",
        "alloc 4 16384 True",  # before
        "alloc 5 256 False",
        "sum [[4, 16384], [5, 256]] 1 stream 0",
        "add [[4, 16384], [4, 16384]] 1 stream 0",
        "alloc 6 16 True",
        "alloc 7 2048 False",
        "take [[3, 131072], [6, 16], [7, 2048]] 1 random 0",
        "Free(tensor=6)",
        "get [[7, 2048]] 0 stream 0",
        "software 262144.0 0.0",
    ]


def test_memory_that_is_handed_out_again_is_another_tensor(kernel_cache: Path) -> None:
    program = """
with umem.record() as recorder:
    for _ in range(3):
        x = cp.zeros(1 << 20, "f4")
        x += 1
        del x
kinds = [type(event).__name__ for event in recorder.trace.events]
print(kinds.count("Alloc"), kinds.count("Free"), recorder.trace.peak_bytes)
other = umem.replay(recorder.trace, "t4", "managed", "2MiB")
print(other.fits, other.figures.migrated_out_bytes > 0)
"""
    # The last free comes after the last operation, and no event follows it.
    assert run(program, kernel_cache).splitlines() == ["3 3 4194304", "True True"]


def test_a_forked_child_records_numpy(kernel_cache: Path) -> None:
    if find_package() is None:
        pytest.skip("no Chainer")
    program = """
import os, warnings
import umem.chainer
import chainer.functions as F
warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
def recorded(xp):
    with umem.record() as recorder:
        F.relu(xp.ones((4, 4), "f4"))
    return [(op.name, op.workspace_bytes) for op in recorder.trace.ops if op.name == "ReLU"]
print(float(cp.ones(4).sum()), flush=True)
child = os.fork()
if not child:
    print(recorded(np), flush=True)
    os._exit(0)
print(os.waitpid(child, 0)[1], recorded(cp))
"""
    found = run(program, kernel_cache).splitlines()
    assert found == ["4.0", "[('ReLU', None)]", "0 [('ReLU', 0)]"]


def test_a_command_keeps_marked_steps_and_names_the_lines(
    kernel_cache: Path, tmp_path: Path
) -> None:
    script, trace = tmp_path / "loop.py", tmp_path / "a.umem.gz"
    script.write_text(
        "import cupy as cp, umem\n"
        "def step(x):\n"
        "    y = x * 2\n"
        "    z = cp.sqrt(y) + 1\n"
        "    return float(z[:10].sum())\n"
        "x = cp.ones(1 << 18, 'f4')\n"
        "for _ in range(4):\n"
        "    step(x)\n"
        "    umem.mark('step')\n"
    )
    program = f"""
import contextlib, io, runpy, sys
sys.argv = ["umem", "run", "--record", {str(trace)!r}, "--stacks", {str(script)!r}]
said = io.StringIO()
with contextlib.suppress(SystemExit), contextlib.redirect_stderr(said):
    runpy.run_module("umem", run_name="__main__")
print("unknown" in said.getvalue(), "--sizes" in said.getvalue())
from umem.cli import main
with contextlib.suppress(SystemExit):
    main(["report", {str(trace)!r}])
"""
    found = run(program, kernel_cache)
    assert found.startswith("False False")
    assert "steps 2-3, recorded on software" in found
    assert "No later operation uses 1.0 MiB of it, made at loop.py:3 (1.0 MiB)." in found


def test_a_framework_gives_tensors_their_kinds_and_operations_their_workspace(
    kernel_cache: Path,
) -> None:
    if find_package() is None:
        pytest.skip("no Chainer")
    program = """
import umem.chainer
import chainer
import chainer.functions as F
import chainer.links as L

with umem.record() as recorder:
    model = L.Linear(64, 32).to_device("@cupy:0")
    optimizer = chainer.optimizers.SGD().setup(model)
    x = cp.ones((128, 64), "f4")
    h = F.dropout(model(x))
    loss = F.softmax_cross_entropy(h, cp.zeros(128, "i4"))
    model.cleargrads()
    loss.backward()
    optimizer.update()
trace = recorder.trace
events = [event for event in trace.events if type(event).__name__ == "Alloc"]
print(sorted(e.nbytes for e in events if e.kind == "parameter"))
print([e.kind for e in events if e.nbytes == 128 * 64 * 4])
ops = {op.name: op for op in trace.ops}
print(ops["Dropout"].workspace_bytes)
print(ops["_SoftmaxCrossEntropyGrad_NoDoubleBackprop"].workspace_bytes)
print(ops["SGD"].phase, trace.backend, umem.replay(trace, "t4", vram="4MiB").fits)
"""
    assert run(program, kernel_cache).splitlines() == [
        "[128, 8192]",
        "['input']",
        "16384",  # the random numbers that a mask is made of
        "0",  # a fused kernel
        "update software True",
    ]


def test_status_and_figures_are_the_models(kernel_cache: Path) -> None:
    program = """
with umem.managed():
    x = cp.ones(8 << 20, "f4")
status = umem.status()
print(status.device, status.simulated, status.resident_bytes, status.paging)
print(status.feature("resident bytes").why)
host = np.ones(1 << 20, "f4")
before = gpu.figures.uploaded_bytes
y = cp.asarray(host)
print(gpu.figures.uploaded_bytes - before)
with umem.track() as tracker:
    z = cp.ones(1 << 20, "f4")
print(tracker)
"""
    found = run(program, kernel_cache).splitlines()
    assert found[0].startswith(f"T4 True {32 << 20} ") and found[0].endswith("faults (simulated)")
    assert found[1] == "counted by the model (simulated)"
    assert found[2] == str(4 << 20)
    assert "4.0 MiB held" in found[3]


def test_without_the_model_nothing_is_counted_and_nothing_is_full(kernel_cache: Path) -> None:
    start = """
import umem
gpu = umem.software_gpu("t4", "4MiB", model=False, force=True)
import cupy as cp
"""
    program = """
x = cp.ones(4 << 20, "f4")
print(float(x.sum()), gpu.figures.seconds, gpu.figures.peak_bytes, gpu.resident_bytes)
print(umem.status().resident_bytes)
"""
    found = run(program, kernel_cache, start=start).splitlines()
    assert found == [f"{float(4 << 20)} None None None", "None"]
