"""Half precision under a dry GPU: it waits for its check of gradients as with arithmetic."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.software_programs import needs_compiler, needs_cupy
from umem.compat import find_package

pytestmark = [
    needs_compiler,
    needs_cupy,
    pytest.mark.skipif(find_package() is None, reason="Chainer is not installed"),
]
PROGRAM = """
import sys
import numpy as np
import umem
gpu = umem.software_gpu("t4", force=True, dry="dry" in sys.argv)
import umem.chainer
import chainer
from chainer import links as L

np.random.seed(0)
model = L.Classifier(L.Linear(20, 10))
model.to_device("@cupy:0")
optimizer = chainer.optimizers.SGD(1e-3).setup(model)
umem.chainer.half_precision(model, optimizer, scale=1.0)
x, t = (model.xp.asarray(a) for a in (np.ones((8, 20), "f"), np.zeros(8, "i")))
for _ in range(3):
    optimizer.update(model, x, t)
    print(f"{gpu.figures.seconds:.9f}")
"""


@pytest.mark.thorough
def test_a_step_takes_as_long_as_with_arithmetic() -> None:
    dry, real = (
        subprocess.run(
            [sys.executable, "-c", PROGRAM, *how], capture_output=True, text=True, check=True
        ).stdout
        for how in (["dry"], [])
    )
    assert dry.split() == real.split() and len(dry.split()) == 3
