"""What CuPy calls of NVIDIA's libraries gives on the software GPU what NumPy and SciPy give.

Each program runs in a process of its own, prints what differs, and nothing else.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import software_programs as programs
from software_programs import needs_compiler, needs_cupy

pytestmark = [
    needs_cupy,
    needs_compiler,
    pytest.mark.skipif(find_spec("scipy") is None, reason="no SciPy"),
]
START = """
import numpy as np
import umem
gpu = umem.software_gpu("t4", "1GiB", force=True)
import cupy as cp

TYPES = "fdFD"
rng = np.random.default_rng(0)

def random(dtype, *shape):
    made = rng.standard_normal(shape)
    return (made + 1j * rng.standard_normal(shape) if dtype in "FD" else made).astype(dtype)

def plain(found):
    if hasattr(found, "toarray"):
        found = found.toarray()
    return cp.asnumpy(found) if isinstance(found, cp.ndarray) else np.asarray(found)

def check(name, function, tolerance=None, on_cupy=cp, on_numpy=np):
    "Compare what a function of the module gives: types and shapes exactly, numbers nearly."
    try:
        ours, theirs = function(on_cupy), function(on_numpy)
        if not isinstance(ours, (tuple, list)):
            ours, theirs = (ours,), (theirs,)
        for one, other in zip(map(plain, ours), map(plain, theirs), strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape), (one.dtype, one.shape)
            close = tolerance or (1e-3 if one.dtype.char in "efF" else 1e-9)
            same = np.allclose(one, other, rtol=close, atol=close, equal_nan=True)
            assert same, (one.ravel()[:4], other.ravel()[:4])
    except Exception as error:
        print(name, type(error).__name__, error)

def fails(kind, words, function):
    try:
        function()
        print(words, "did not fail")
    except Exception as error:
        if not isinstance(error, kind) or words not in str(error):
            print(words, type(error).__name__, error)
"""


def run(program: str, cache: Path) -> str:
    return programs.run(program, cache, start=START)


def test_dense_matrices_have_lapack_s_factors(kernel_cache: Path) -> None:
    program = """
import cupyx

def product(factors):
    return factors[0] @ factors[1]

def from_values(u, s, v):
    return (u[..., : s.shape[-1]] * s[..., None, :]) @ v[..., : s.shape[-1], :], s

def from_eigenvalues(w, v):
    return w, (v * w) @ v.conj().T

for t in TYPES:
    a, b, many, right = random(t, 6, 6), random(t, 6, 3), random(t, 3, 5, 5), random(t, 3, 5, 2)
    definite = a @ a.conj().T + 6 * np.eye(6, dtype=t)
    tall, stack = random(t, 7, 4), random(t, 3, 7, 4)
    definites = (many @ many.conj().swapaxes(-1, -2) + 5 * np.eye(5)).astype(t)
    for name, function in {
        "inv": lambda m: m.linalg.inv(m.asarray(a)),
        "inv of many": lambda m: m.linalg.inv(m.asarray(many)),
        "solve": lambda m: m.linalg.solve(m.asarray(a), m.asarray(b)),
        "solve many": lambda m: m.linalg.solve(m.asarray(many), m.asarray(right)),
        "det": lambda m: m.linalg.det(m.asarray(many)),
        "slogdet": lambda m: tuple(m.linalg.slogdet(m.asarray(a))),
        "cholesky": lambda m: m.linalg.cholesky(m.asarray(definite)),
        "cholesky of many": lambda m: m.linalg.cholesky(m.asarray(definites)),
        "qr": lambda m: product(m.linalg.qr(m.asarray(tall))),
        "whole qr": lambda m: product(m.linalg.qr(m.asarray(tall), "complete")),
        "wide qr": lambda m: product(m.linalg.qr(m.asarray(tall.T))),
        "qr of many": lambda m: product(m.linalg.qr(m.asarray(stack))),
        "r": lambda m: abs(m.linalg.qr(m.asarray(tall), "r")),
        "svd": lambda m: from_values(*m.linalg.svd(m.asarray(tall))),
        "wide svd": lambda m: from_values(*m.linalg.svd(m.asarray(tall.T), full_matrices=False)),
        "svd of many": lambda m: from_values(*m.linalg.svd(m.asarray(stack))),
        "short svd of many": lambda m: from_values(*m.linalg.svd(m.asarray(stack), False)),
        "singular values": lambda m: m.linalg.svd(m.asarray(stack), compute_uv=False),
        "eigh": lambda m: from_eigenvalues(*m.linalg.eigh(m.asarray(definite))),
        "upper eigvalsh": lambda m: m.linalg.eigvalsh(m.asarray(a), "U"),
        "eigvalsh of many": lambda m: m.linalg.eigvalsh(m.asarray(definites)),
        "lstsq": lambda m: m.linalg.lstsq(m.asarray(tall), m.ones((7, 2), t), rcond=None)[0],
        "pinv": lambda m: m.linalg.pinv(m.asarray(stack)),
        "norms": lambda m: [m.linalg.norm(m.asarray(tall), kind) for kind in (2, "nuc", "fro")],
        "rank": lambda m: m.asarray(m.linalg.matrix_rank(m.asarray(tall))),
        "power": lambda m: m.linalg.matrix_power(m.asarray(a), -2),
    }.items():
        check(f"{t} {name}", function)
    x = cp.asarray(a)
    w, v = cp.linalg.eig(x)
    check(f"{t} eig", lambda m: m.asarray(plain(x @ v if m is cp else v * w)))
with cupyx.errstate(linalg="raise"):
    singular, wrong = cp.zeros((3, 3)), np.linalg.LinAlgError
    fails(wrong, "devInfo = [1]", lambda: cp.linalg.solve(singular, cp.ones(3)))
    fails(wrong, "dpotrf in cuSOLVER. devInfo = [2]",
          lambda: cp.linalg.cholesky(cp.asarray([[1.0, 2], [2, 1]])))
    fails(wrong, "dgetrfBatched", lambda: cp.linalg.inv(cp.zeros((2, 3, 3))))
print(float(cp.linalg.det(cp.ones((3, 3)))))
"""
    assert run(program, kernel_cache) == "0.0\n"
