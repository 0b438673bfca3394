"""Parameters of Chainer's under a dry GPU: large ones are zeros that cost nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.software_programs import needs_compiler, needs_cupy
from umem.compat import find_package

pytestmark = [
    needs_compiler,
    needs_cupy,
    pytest.mark.skipif(find_package() is None, reason="Chainer is not installed"),
]

PROGRAM = """
import json, resource, sys
import numpy as np
import umem
umem.software_gpu("t4", force=True, dry="dry" in sys.argv)
import umem.chainer
from chainer import initializers, links as L
import chainer

def most():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

garbage = np.full(1 << 20, 7, "f")
found = {"small": bool(L.Linear(100, 100).W.array.any())}
W = L.Linear(1000, 1000).W
found["large"] = [bool(W.array.any()), bool(W.grad is not None and np.isnan(W.grad).any())]
lstm = L.LSTM(600, 600)
found["lstm"] = bool(lstm.lateral.W.array.any() or lstm.upward.W.array.any())
found["layers"] = [
    bool(link.W.array.any())
    for link in (
        L.EmbedID(10_000, 100), L.Linear(1000, 1000, initialW=initializers.Orthogonal()),
        L.Linear(1000, 1000, initialW=5.0),
    )
]
own = np.full((600, 600), 7, "f")
initializers.Normal()(own)
found["own array"] = float(np.abs(own).max())
class Ones(chainer.Initializer):
    def __call__(self, array):
        array[...] = 1
found["own initializer"] = float(L.Linear(1000, 1000, initialW=Ones()).W.array.mean())
try:
    initializers.generate_array(initializers.Normal(dtype="d"), (999, 999), np, "f")
except ValueError as error:
    found["refused"] = str(error)
late = L.Linear(None, 1000)
late(np.ones((1, 1000), "f"))
found["late"] = bool(late.W.array.any())
if "dry" in sys.argv:
    before = most()
    huge = L.Linear(20_000, 20_000)
    found["MiB"] = most() - before
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """What the program finds, dry and real."""
    results = {}
    for way in ("dry", "real"):
        command = [sys.executable, "-c", PROGRAM, way]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        results[way] = json.loads(done.stdout)
    return results


@pytest.mark.thorough
def test_large_parameters_are_zeros(found: dict[str, dict[str, Any]]) -> None:
    dry, real = found["dry"], found["real"]
    assert real["large"] == [True, True] and dry["large"] == [False, False]
    assert (real["lstm"], dry["lstm"]) == (True, False)
    assert real["layers"] == [True] * 3 and dry["layers"] == [False] * 3
    assert (real["late"], dry["late"]) == (True, False)
    assert 0 < real["own array"] < 1 and dry["own array"] == 0


@pytest.mark.thorough
def test_small_parameters_and_own_initializers_are_as_ever(
    found: dict[str, dict[str, Any]],
) -> None:
    for each in found.values():
        assert each["small"] and each["own initializer"] == 1
        assert each["refused"].startswith("dtype mismatch")


def test_a_huge_parameter_costs_no_memory(found: dict[str, dict[str, Any]]) -> None:
    assert found["dry"]["MiB"] < 1600 + 100  # its gradient of NaN, which Chainer makes, is dropped
