"""Recordings on a real GPU, as far as they go without one: on a software GPU that hides kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
from software_programs import needs_compiler, needs_cupy, run

from umem.compat import find_package

pytestmark = [needs_compiler, needs_cupy]
HIDDEN = """
from umem.devices.cuda.cupy_blocks import CupyBlocks
from umem.trace.recording import sources
[kernels] = [s for s in sources.added if type(s).__name__ == "CupySource"]
sources.remove_source(kernels)
sources.add_source(CupyBlocks())
at_first = set(cp.cuda.memory_hook.get_memory_hooks())  # of the software GPU itself
def hooks(): return len(set(cp.cuda.memory_hook.get_memory_hooks()) - at_first)
def told(trace):
    return [(type(e).__name__, getattr(e, "nbytes", "")) for e in trace.events]
"""


def said(program: str, cache: Path) -> list[str]:
    return run(HIDDEN + program, cache).splitlines()


def test_arrays_are_recorded_with_their_lines_and_marks(kernel_cache: Path) -> None:
    program = """
from umem.trace.analysis import analyse
old = cp.empty(1 << 20, "f4")
kept = []
with umem.record(stacks=True) as recorder:
    for _ in range(3):
        x = old + 1
        y = x * 2
        kept.append(cp.zeros(1000, "i1"))
        del x, y
        umem.mark("step")
trace = recorder.trace
print(trace, trace.peak_bytes - (12 << 20))
print(told(trace)[:8])
print({e.stack[0].rpartition(":")[2] for e in trace.events if getattr(e, "stack", ())})
found = analyse(trace)
print(found.peak.idle_bytes, [leak.total_bytes for leak in found.leaks])
print(found.caveat)
umem.mark("step")
print(len(trace.events))
for wrong in ("start", "", 3):
    try:
        umem.mark(wrong)
    except umem.UmemError as error:
        print(error)
"""
    first, events, lines, leaks, caveat, count, *wrong = said(program, kernel_cache)
    assert first.startswith("<Trace of cupy:") and first.endswith("3 steps> 3000")
    assert events == str(
        [
            *[("Alloc", 4 << 20)] * 3,  # the first one was there before
            ("Alloc", 1000),
            *[("Free", "")] * 2,
            ("Mark", ""),
            ("Alloc", 4 << 20),
        ]
    )
    assert lines.count("<module>") == 3
    assert leaks == "0 [2000]"
    assert "CuPy reports allocations but no kernels" in caveat
    assert int(count) == 1 + 3 * 6
    assert len(wrong) == 3 and all("a mark must be text" in line for line in wrong)


@pytest.mark.skipif(find_package() is None, reason="Chainer is not installed")
def test_a_framework_s_functions_have_the_same_workspace_as_with_kernels(
    kernel_cache: Path,
) -> None:
    program = """
import gc
import umem.chainer
import chainer, chainer.functions as F, chainer.links as L
class Net(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.a, self.b = L.Convolution2D(3, 8, 3, pad=1), L.Linear(None, 10)
    def __call__(self, x):
        return F.sum(self.b(F.relu(self.a(x))))
def recorded():
    model = Net().to_device("@cupy:0")
    optimizer = chainer.optimizers.Adam().setup(model)
    x = cp.ones((8, 3, 24, 24), "f4")
    optimizer.update(lambda: model(x))
    gc.collect()  # a free of older memory in a function counts as its workspace
    with umem.record() as recorder:
        optimizer.update(lambda: model(x))
    return [(op.name, op.workspace_bytes, op.host_seconds) for op in recorder.trace.ops
            if op.phase == "forward"]
hidden = recorded()
[ours] = [s for s in sources.added if type(s).__name__ == "CupyBlocks"]
sources.remove_source(ours)
sources.add_source(kernels)
print(hidden == recorded())
print([op[1:] for op in hidden if "Convolution" in op[0]])
"""
    same, convolution = said(program, kernel_cache)
    assert same == "True"
    columns = 8 * 27 * 24 * 24 * 4
    [(workspace, seconds)] = eval(convolution)
    assert columns <= workspace < 3 * columns and seconds is None


@pytest.mark.skipif(find_package() is None, reason="Chainer is not installed")
def test_numpy_is_measured_as_numpy_and_a_silent_allocator_not_at_all(kernel_cache: Path) -> None:
    program = """
import tracemalloc
import umem.chainer
import chainer.functions as F
def relu(xp, **how):
    with umem.record(**how) as recorder:
        F.relu(xp.ones((256, 256), "f4"))
        traced.append(tracemalloc.is_tracing())
    [op] = [op for op in recorder.trace.ops if op.name == "ReLU"]
    return op.workspace_bytes, op.host_seconds is None
traced = []
print(relu(np), relu(np, measure="workspace"), traced)
traced.clear()
print(relu(cp), relu(cp, measure="workspace"), traced)
plain = cp.cuda.get_allocator()
cp.cuda.set_allocator(cp.cuda.PythonFunctionAllocator(
    lambda size, device: cp.cuda.runtime.malloc(size),
    lambda pointer, device: cp.cuda.runtime.free(pointer)).malloc)
print(relu(cp))
with umem.record() as recorder:
    F.relu(cp.ones(8, "f4"))
    cp.cuda.set_allocator(plain)
    F.relu(cp.ones(8, "f4"))
print([op.workspace_bytes for op in recorder.trace.ops if op.name == "ReLU"])
"""
    host, gpu, silent, changed = said(program, kernel_cache)
    assert host.startswith("(None, False) (") and host.endswith("True) [False, True]")
    assert gpu == "(0, True) (0, True) [False, False]"
    assert silent == "(None, True)"
    assert changed == "[None, 0]"


def test_another_thread_s_recording_follows_its_own_arrays(kernel_cache: Path) -> None:
    program = """
import threading
def other():
    with umem.record() as recorder:
        x = cp.empty(2000, "i1")
        del x
        y = cp.empty(3000, "i1")
    found.append(told(recorder.trace))
found = []
with umem.record() as recorder:
    thread = threading.Thread(target=other)
    thread.start(); thread.join()
    z = cp.empty(1000, "i1")
print(found[0])
print(told(recorder.trace))
print(hooks())
"""
    theirs, ours, hooks = said(program, kernel_cache)
    assert theirs == "[('Alloc', 2000), ('Free', ''), ('Alloc', 3000)]"
    assert ours == "[('Alloc', 1000)]"
    assert hooks == "0"


def test_a_program_that_is_recorded_by_the_command_needs_no_chainer(
    kernel_cache: Path, tmp_path: Path
) -> None:
    script = tmp_path / "loop.py"
    script.write_text(
        "import cupy as cp, umem\n"
        "for _ in range(4):\n    x = cp.zeros(1 << 20)\n    umem.mark('step')\n"
    )
    program = f"""
import contextlib, io, runpy, sys
sys.argv = ["umem", "run", "--record", {str(tmp_path / "a.umem.gz")!r}, {str(script)!r}]
with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
    runpy.run_module("umem", run_name="__main__")
print(umem.Trace.load({str(tmp_path / "a.umem.gz")!r}))
"""
    assert said(program, kernel_cache)[-1].endswith("0 operations, 2 steps>")
