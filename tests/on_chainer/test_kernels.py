"""What is said of the kernels of Chainer's functions is what CuPy launches on the software GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from software_programs import needs_compiler, needs_cupy, run

from umem.compat import find_package

pytestmark = [
    needs_compiler,
    needs_cupy,
    pytest.mark.skipif(find_package() is None, reason="Chainer is not installed"),
]
COUNTED = """
import umem.chainer
import chainer
import chainer.functions as F
import chainer.links as L
from umem.devices.software.cupy_source import CupySource
from umem.trace import ONE_KERNEL
from umem.trace.recording import Recorder

inside, said = [], []
heard, emit = CupySource.operation, Recorder.emit_op

def operation(self, op, addresses):
    inside.append((op.flops, op.traffic_bytes))
    return heard(self, op, addresses)

def emit_op(self, name, *rest, kernels=None, **more):
    found = kernels or (rest[8] if len(rest) > 8 else None) or ONE_KERNEL
    traffic = rest[4]
    if traffic is None:
        traffic = sum(reach[2] - reach[1] for reach in (*rest[1], *rest[2]) if reach)
    said.append((name, len(inside), sum(t for _, t in inside), found, traffic))
    inside.clear()
    return emit(self, name, *rest, kernels=kernels, **more) if kernels else emit(self, name, *rest)

CupySource.operation, Recorder.emit_op = operation, emit_op

def check(make, *shapes):
    xs = [chainer.Variable(cp.random.rand(*shape, dtype="f4")) for shape in shapes]
    F.sum(F.square(make(*xs))).backward()  # makes what a first call makes
    with umem.record():
        inside.clear()
        said.clear()
        F.sum(F.square(make(*xs))).backward()
    for name, count, moved, kernels, traffic in said:
        if name == "fill":
            continue
        print(name, count, kernels.launch_count)
        if kernels.copied_bytes and moved > 1 << 20:
            assert abs(traffic + kernels.copied_bytes - moved) < 0.1 * moved, (
            name, traffic, kernels, moved
        )
"""


def test_convolutions(kernel_cache: Path) -> None:
    program = (
        COUNTED
        + """
link = L.Convolution2D(8, 16, 3, pad=1).to_device("@cupy:0")
for batch in 1, 4:
    check(link, (batch, 8, 64, 64))
check(L.Deconvolution2D(8, 4, 3, stride=2).to_device("@cupy:0"), (4, 8, 32, 32))
"""
    )
    found = [line.rsplit(None, 2) for line in run(program, kernel_cache).splitlines()]
    names = {name for name, *_ in found}
    assert {"Convolution2DFunction", "Convolution2DGradW", "Deconvolution2DFunction"} <= names
    for name, live, said in found:
        assert live == said, (name, live, said)


def test_other_functions(kernel_cache: Path) -> None:
    program = (
        COUNTED
        + """
t = cp.zeros(512, "i4")
check(L.Linear(64, 64).to_device("@cupy:0"), (4096, 64))
check(L.BatchNormalization(64).to_device("@cupy:0"), (4096, 64))
check(F.softmax, (4096, 64))
check(F.dropout, (4096, 64))
check(lambda x: F.softmax_cross_entropy(x, t), (512, 512))
check(lambda x, y: F.matmul(x, y, transb=True), (8, 64, 64), (8, 64, 64))
check(lambda x, y: F.concat([x, F.transpose(F.reshape(y, (64, 64)))]), (64, 64), (4096,))
"""
    )
    found = [line.rsplit(None, 2) for line in run(program, kernel_cache).splitlines()]
    assert {"LinearFunction", "BatchNormalizationGrad", "Dropout", "MatMul"} <= {
        n for n, *_ in found
    }
    for name, live, said in found:
        if name not in ("Sum", "BroadcastTo"):
            assert live == said, (name, live, said)


def test_python_of_chainer_takes_time_on_the_software_gpu(kernel_cache: Path) -> None:
    program = """
import umem.chainer
import chainer.functions as F
from umem._common.specs import COSTS
x = cp.ones((4, 4), "f4")
F.relu(x)
before = gpu.figures.seconds
for _ in range(100):
    F.relu(x)
print((gpu.figures.seconds - before) / 100 / (COSTS.launch + COSTS.python_forward))
before = gpu.figures.seconds
for _ in range(100):
    x + x
print((gpu.figures.seconds - before) / 100 / COSTS.launch)
"""
    chainers, cupys = map(float, run(program, kernel_cache).split())
    assert chainers == pytest.approx(1, rel=0.02) and cupys == pytest.approx(1, rel=0.02)


def test_a_sparse_product_moves_a_row_for_each_entry(kernel_cache: Path) -> None:
    program = """
import cupyx
sparse = cupyx.scipy.sparse.random(256, 256, 0.25, "csr", dtype="f4")
dense = cp.ones((256, 32), "f4", order="F")
with umem.record() as recorder:
    sparse @ dense
print(sum(op.traffic_bytes for op in recorder.trace.ops if "mm" in op.name), sparse.nnz)
"""
    moved, entries = map(int, run(program, kernel_cache).split())
    assert moved >= entries * 32 * 4
