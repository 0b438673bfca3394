"""What saves or moves memory computes the same bits however late its streams do their work."""

from __future__ import annotations

from pathlib import Path

import pytest
from software_programs import lines, needs_compiler, needs_cupy

pytestmark = [needs_compiler, needs_cupy]
START = """
import warnings
import umem
gpu = umem.software_gpu("t4", vram="8MiB", force=True, stream_seed=0)
import umem.chainer
import chainer, cupy
import chainer.functions as F
import chainer.links as L
import numpy as np
warnings.simplefilter("ignore")

def training(technique):
    np.random.seed(0)
    layers = [f for _ in range(2) for f in (L.Linear(32, 32), F.relu)]
    model = chainer.Sequential(*layers, L.Linear(32, 4))
    model.to_device("@cupy:0")
    optimizer = chainer.optimizers.MomentumSGD().setup(model)
    x = cupy.asarray(np.random.RandomState(1).randn(4096, 32).astype("f4"))
    t = cupy.asarray(np.random.RandomState(2).randint(0, 4, 4096).astype("i4"))
    losses = []
    with technique:
        for _ in range(3):
            loss = F.softmax_cross_entropy(model(x), t)
            model.cleargrads()
            loss.backward()
            optimizer.update()
            losses.append(loss.array)
            del loss
    found = [*losses, *(param.array for param in model.params())]
    return b"".join(cupy.asnumpy(array).tobytes() for array in found)

def recompute():
    return training(umem.chainer.Recompute("60%"))

def offload():
    return training(umem.chainer.Offload())

def lookahead():
    return training(umem.chainer.LookaheadPrefetch())

def blocks():
    x = np.arange(1 << 18, dtype="f4").reshape(256, 1024)
    out, total = np.empty_like(x), cupy.zeros((), "f8")
    for source, target in umem.blocks(x, out=out, room="1MiB"):
        target[...] = cupy.sqrt(source) + source
        total += target.sum()
    for block in umem.blocks(x, write=True, room="1MiB"):
        block *= 3
    return out.tobytes() + x.tobytes() + cupy.asnumpy(total).tobytes()

def others(program, mode, seeds):
    gpu.reseed(None)
    with mode():
        expected = program()
    found = []
    for seed in seeds:
        gpu.reseed(seed)
        with mode():
            if program() != expected:
                found.append(seed)
    gpu.reseed(None)
    return found
"""


@pytest.mark.parametrize("mode", ["managed", "hybrid", "unmanaged"])
@pytest.mark.parametrize("program", ["recompute", "offload", "lookahead", "blocks"])
def test_the_bits_are_those_of_work_that_is_done_at_once(
    kernel_cache: Path, program: str, mode: str
) -> None:
    found = lines(f"print(others({program}, umem.{mode}, range(30)))", kernel_cache, start=START)
    assert found == ["[]"]
