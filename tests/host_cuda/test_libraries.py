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
    if hasattr(cp.linalg, "eig"):  # not in CuPy 13
        w, v = cp.linalg.eig(x)
        check(f"{t} eig", lambda m: m.asarray(plain(x @ v if m is cp else v * w)))
    import cupyx.scipy.linalg
    import scipy.linalg
    from itertools import product as each
    for lower, trans, unit in each((False, True), (0, 1, 2), (False, True)):
        how = {"lower": lower, "trans": trans, "unit_diagonal": unit}
        found = cupyx.scipy.linalg.solve_triangular(cp.asarray(definite), cp.asarray(b), **how)
        wanted = scipy.linalg.solve_triangular(definite, b, **how)
        assert np.allclose(found.get(), wanted, rtol=1e-3, atol=1e-4), (t, how)
with cupyx.errstate(linalg="raise"):
    singular, wrong = cp.zeros((3, 3)), np.linalg.LinAlgError
    fails(wrong, "devInfo = [1]", lambda: cp.linalg.solve(singular, cp.ones(3)))
    fails(wrong, "dpotrf in cuSOLVER. devInfo = [2]",
          lambda: cp.linalg.cholesky(cp.asarray([[1.0, 2], [2, 1]])))
    fails(wrong, "dgetrfBatched", lambda: cp.linalg.inv(cp.zeros((2, 3, 3))))
some = cp.stack([cp.zeros((3, 3)), cp.eye(3), cp.ones((3, 3))])  # the second alone has an inverse
assert cp.isnan(cp.linalg.inv(some)).any((1, 2)).tolist() == [True, False, True]
assert cp.linalg.cond(some, 1).tolist() == [np.inf, 1, np.inf]
from cupy import cublas
hollow = cp.asarray(np.tri(3, dtype="f4") - np.diag([0, 1, 0]).astype("f4"))
edge = cupyx.scipy.linalg.solve_triangular(hollow, cp.ones((3, 1), "f4"), lower=True)
assert not np.isfinite(edge.get()).all()  # as on a GPU, where nothing is checked
assert float(cublas.nrm2(cp.asarray([3e20, 4e20], "f4"))) == np.float32(5e20)
print(float(cp.linalg.det(cp.ones((3, 3)))))
"""
    assert run(program, kernel_cache) == "0.0\n"


def test_a_band_times_a_vector_is_scipy_s(kernel_cache: Path) -> None:
    program = """
from cupy import cublas
from scipy.linalg import blas

for t, letter in zip("fd", "sd"):
    for lower in (False, True):
        for beta in (0, 2):
            band, x = np.asfortranarray(random(t, 3, 7)), random(t, 7)
            y = random(t, 7) if beta else np.full(7, np.nan, t)
            wanted = getattr(blas, letter + "sbmv")(
                2, -3, band, x, beta=beta, y=y if beta else np.zeros(7, t), lower=lower)
            found = cublas.sbmv(2, -3, cp.asarray(band, order="F"), cp.asarray(x), beta,
                                cp.asarray(y), lower)
            check(f"{t} {lower} {beta}", lambda m: found if m is cp else wanted)
    ones = cp.ones(3, t)
    cublas.sbmv(1, 0, cp.full((2, 3), np.nan, t, order="F"), cp.full(3, np.nan, t), 2, ones)
    check(f"{t} nothing", lambda m: ones if m is cp else np.full(3, 2, t))
"""
    assert run(program, kernel_cache) == ""


def test_a_factor_of_zero_reads_nothing(kernel_cache: Path) -> None:
    program = """
from cupy import cublas
from cupyx.scipy.sparse import csr_matrix
from cupyx.scipy.sparse.linalg import eigsh

for t in TYPES:
    nothing, ones, square = cp.full(3, np.nan, t), cp.ones(3, t), cp.ones((3, 3), t)
    unread = cp.full((3, 3), np.nan, t)
    found = ones.copy()
    cublas.axpy(0, nothing, found)
    check(f"{t} axpy", lambda m: found if m is cp else np.ones(3, t))
    found_product = ones.copy()
    cublas.gemv("N", 0, unread, nothing, 2, found_product)
    check(f"{t} gemv", lambda m: found_product if m is cp else np.full(3, 2, t))
    check(f"{t} gemm", lambda m: cublas.gemm("N", "N", unread, unread, square.copy("F"), 0, 2)
          if m is cp else np.full((3, 3), 2, t))
    found_outer = square.copy("F")
    (cublas.ger if t in "fd" else cublas.geru)(0, nothing, nothing, found_outer)
    check(f"{t} ger", lambda m: found_outer if m is cp else np.ones((3, 3), t))
    check(f"{t} syrk", lambda m: cp.tril(
        cublas.syrk("N", unread, square.copy("F"), 0, 2, lower=True))
          if m is cp else np.tril(np.full((3, 3), 2, t)))

    # CuPy's eigsh multiplies a vector by zero that it has not written
    matrix = rng.standard_normal((20, 20))
    matrix = (matrix @ matrix.T).astype(t)
    for size in (19 * 20, 20, 19, 1):
        cp.full(size, np.nan, t)  # freed at once: the pool gives its bytes to the next
    check(f"{t} eigsh", lambda m: cp.sort(eigsh(csr_matrix(cp.asarray(matrix)), 3,
                                                return_eigenvectors=False))
          if m is cp else np.linalg.eigvalsh(matrix)[-3:].astype(t.lower()), 1e-3)
"""
    assert run(program, kernel_cache) == ""


def test_transforms_are_scipy_s_in_the_precision_that_is_given(kernel_cache: Path) -> None:
    program = """
import cupyx.scipy.fft
import scipy.fft

for t in TYPES:
    x, odd = random(t, 4, 6, 5), random(t, 3, 7)
    real = x.real.copy()
    for name, function in {
        "fft": lambda m: m.fft.fft(m.asarray(x)),
        "fft of an axis": lambda m: m.fft.fft(m.asarray(x), axis=0),
        "longer fft": lambda m: m.fft.fft(m.asarray(x), n=9, axis=1),
        "shorter fft": lambda m: m.fft.fft(m.asarray(x), n=3, axis=1),
        "orthonormal ifft": lambda m: m.fft.ifft(m.asarray(x), norm="ortho"),
        "undivided ifft": lambda m: m.fft.ifft(m.asarray(x), norm="forward"),
        "fft2 of axes": lambda m: m.fft.fft2(m.asarray(x), axes=(0, 2)),
        "fftn": lambda m: m.fft.fftn(m.asarray(x)),
        "fftn in columns": lambda m: m.fft.fftn(m.asfortranarray(m.asarray(x))),
        "fftn of a view": lambda m: m.fft.fftn(m.asarray(x)[::-1, :, ::2]),
        "ifftn": lambda m: m.fft.ifftn(m.asarray(odd)),
        "rfft": lambda m: m.fft.rfft(m.asarray(real), axis=1),
        "irfft": lambda m: m.fft.irfft(m.asarray(x)),
        "odd irfft": lambda m: m.fft.irfft(m.asarray(x), 7, axis=0),
        "rfftn": lambda m: m.fft.rfftn(m.asarray(real)),
        "irfftn": lambda m: m.fft.irfftn(m.fft.rfftn(m.asarray(real))),
        "hfft": lambda m: m.fft.hfft(m.asarray(x)),
        "ihfft": lambda m: m.fft.ihfft(m.asarray(real)),
    }.items():
        check(f"{t} {name}", function)
    for name in ("fft2", "irfft", "dct", "dstn", "hfftn", "ihfft2"):
        given = real if name in ("dct", "dstn", "ihfft2") else x
        ours, theirs = getattr(cupyx.scipy.fft, name), getattr(scipy.fft, name)
        check(f"{t} {name} of SciPy", lambda f: f(cp.asarray(given) if f is ours else given),
              on_cupy=ours, on_numpy=theirs)
with cupyx.scipy.fft.get_fft_plan(cp.asarray(odd)):
    check("planned", lambda m: m.fft.fftn(m.asarray(odd)))
fails(NotImplementedError, "callbacks of cuFFT",
      lambda: cp.fft.config.set_cufft_callbacks(cb_load="x", cb_ver="jit"))
cp.cuda.cufft.XtPlanNd(
    (8,), (8,), 1, 8, "F", (8,), 1, 8, "F", 1, "F", order="C", last_axis=-1, last_size=None)
fails(cp.cuda.cufft.CuFFTError, "NOT_SUPPORTED", lambda: cp.cuda.cufft.XtPlanNd(
    (8,), (8,), 1, 8, "E", (8,), 1, 8, "E", 1, "E", order="C", last_axis=-1, last_size=None))
"""
    assert run(program, kernel_cache) == ""


# The kernels of each type are compiled for seconds.
@pytest.mark.parametrize("types", ["?blefD", pytest.param("HdF", marks=pytest.mark.slow)])
def test_sorting_searching_and_running_sums(types: str, kernel_cache: Path) -> None:
    program = f"types = {types!r}"
    program += """
for t in types:
    a = rng.integers(0, 2 if t == "?" else 100, (5, 300)).astype(t)
    if t in "FD":
        a.imag = rng.integers(-3, 3, (5, 300))
    holes = a.copy()
    if t in "efdFD":
        holes.flat[::7] = np.nan
    line, few = a.ravel(), a[:2, :3].copy()
    small = (line % 97 if t in "bHl" else line != 0).astype(t)
    for name, function in {
        "cumsum": lambda m: m.cumsum(m.asarray(line), dtype="D" if t in "FD" else "d"),
        "cumsum along": lambda m: m.cumsum(m.asarray(few), axis=1),
        "cumprod": lambda m: m.cumprod(m.asarray(small[:3])),
        "sort": lambda m: m.sort(m.asarray(holes), axis=1),
        "sort columns": lambda m: m.sort(m.asarray(holes), axis=0),
        "argsort": lambda m: m.argsort(m.asarray(holes), axis=1, kind="stable"),
        "lexsort": lambda m: m.lexsort(m.asarray(a)),
        "partition": lambda m: m.sort(m.partition(m.asarray(line), 50)[:50]),
        "argpartition": lambda m: m.sort(
            m.asarray(line)[m.argpartition(m.asarray(line), 50)[:50]]),
        "unique": lambda m: m.unique(
            m.asarray(line), return_index=True, return_inverse=True, return_counts=True),
        "searchsorted": lambda m: m.searchsorted(m.sort(m.asarray(line)), m.asarray(few)),
        "after": lambda m: m.searchsorted(m.sort(m.asarray(line)), m.asarray(few), "right"),
        "isin": lambda m: m.isin(m.asarray(a), m.asarray(few)),
        "intersect1d": lambda m: m.intersect1d(m.asarray(line), m.asarray(few)),
        "nonzero": lambda m: m.nonzero(m.asarray(a)),
        "masked": lambda m: m.asarray(a)[m.asarray(a) != 0],
    }.items():
        check(f"{t} {name}", function)
for name, function in {
    "bincount": lambda m: m.bincount(m.asarray([1, 3, 3]), m.asarray([1.0, 2, 4]), 6),
    "histogram": lambda m: m.histogram(m.asarray([1.0, 3, 3, 9]), m.asarray([0.0, 2, 5, 9])),
    "even histogram": lambda m: m.histogram(m.asarray([1.0, 3, 3, 9]), 4),
    "digitize": lambda m: m.digitize(m.asarray([50.0, -3, 3, 0]), m.arange(0, 10, 2)),
    "holes last": lambda m: m.searchsorted(
        m.asarray([1, 2, np.nan]), m.asarray([np.nan, 3, 0])),
    "percentile": lambda m: m.percentile(m.arange(10.0), m.asarray([10, 50])),
}.items():
    check(name, function)
"""
    assert run(program, kernel_cache) == ""


def test_sparse_matrices_are_scipy_s(kernel_cache: Path) -> None:
    program = """
import warnings
import cupyx.scipy.sparse
import cupyx.scipy.sparse.linalg
import scipy.sparse
import scipy.sparse.linalg

warnings.simplefilter("ignore")  # CuPy's and SciPy's, of matrices that are not in the best form

def sparse(name, function, tolerance=None):
    check(name, lambda s: function(s, s.linalg, cp if s is cupyx.scipy.sparse else np), tolerance,
          on_cupy=cupyx.scipy.sparse, on_numpy=scipy.sparse)

for t in TYPES:
    a, b = (scipy.sparse.random(20, 30, 0.2, "csr", random_state=i).astype(t) for i in (1, 2))
    c = scipy.sparse.random(30, 15, 0.2, "csr", random_state=3).astype(t)
    square = (scipy.sparse.random(20, 20, 0.2, random_state=4) + 5 * scipy.sparse.eye(20))
    square = square.tocsr().astype(t)
    if t in "FD":
        a.data *= 1 + 2j
        square.data *= 2 - 1j
    definite = (square @ square.conj().T).tocsr()
    many, one, right = random(t, 30, 4), random(t, 30), random(t, 20)

    def at(s, m, form="csr"):
        return getattr(s, f"{form}_matrix")(
            m if s is scipy.sparse else s.csr_matrix(m))

    for name, function in {
        "csc": lambda s, l, m: at(s, a, "csc"),
        "from csc": lambda s, l, m: at(s, a, "csc").tocsr(),
        "coo": lambda s, l, m: at(s, a, "coo"),
        "from coo": lambda s, l, m: at(s, a, "coo").tocsc(),
        "from dense": lambda s, l, m: s.csr_matrix(m.asarray(a.toarray())),
        "csc from dense": lambda s, l, m: s.csc_matrix(m.asarray(a.toarray())),
        "sum": lambda s, l, m: at(s, a) + at(s, b),
        "difference": lambda s, l, m: at(s, a, "csc") - at(s, b, "csc"),
        "elementwise": lambda s, l, m: at(s, a).multiply(at(s, b)),
        "product": lambda s, l, m: at(s, a) @ at(s, c),
        "product of columns": lambda s, l, m: at(s, a, "csc") @ at(s, c, "csc"),
        "with its own": lambda s, l, m: at(s, a) @ at(s, a).T,
        "power": lambda s, l, m: at(s, square) ** 2,
        "times dense": lambda s, l, m: at(s, a) @ m.asarray(many),
        "columns times dense": lambda s, l, m: at(s, a, "csc") @ m.asarray(many),
        "times vector": lambda s, l, m: at(s, a) @ m.asarray(one),
        "transposed times vector": lambda s, l, m: at(s, a).T @ m.asarray(right),
        "conjugated": lambda s, l, m: at(s, a).conj().T,
        "slice": lambda s, l, m: at(s, a)[2:9, 3:20],
        "rows": lambda s, l, m: at(s, a)[[1, 5, 3]],
        "columns": lambda s, l, m: at(s, a)[:, [1, 5, 3]],
        "sums": lambda s, l, m: [m.asarray(at(s, a).sum(axis=axis)) for axis in (0, 1)],
        "diagonal": lambda s, l, m: at(s, square).diagonal(),
        "stacked": lambda s, l, m: s.vstack([at(s, a), at(s, b)]),
        "tril": lambda s, l, m: s.tril(at(s, square)),
        "spsolve": lambda s, l, m: l.spsolve(at(s, square), m.asarray(right)),
        "triangular": lambda s, l, m: l.spsolve_triangular(
            s.triu(at(s, square)).tocsr(), m.asarray(right), lower=False).astype(t),
        "cg": lambda s, l, m: l.cg(at(s, definite), m.asarray(right), rtol=1e-9)[0],
        "gmres": lambda s, l, m: l.gmres(at(s, square), m.asarray(right), rtol=1e-9)[0],
        "eigsh": lambda s, l, m: m.sort(l.eigsh(at(s, definite), 3, return_eigenvectors=False)),
        "svds": lambda s, l, m: m.sort(l.svds(at(s, a), 3, return_singular_vectors=False)),
        "norm": lambda s, l, m: m.asarray(l.norm(at(s, a))),
    }.items():
        sparse(f"{t} {name}", function, 1e-4 if name in ("cg", "gmres", "eigsh", "svds") else None)

    def unsorted(s, m):
        values = m.asarray([1, 0, 3, 4], t)
        places = m.asarray([2, 1, 0, 0], "i"), m.asarray([0, 2, 4, 4], "i")
        return s.csr_matrix((values, *places), (3, 3))

    for name in ("eliminate_zeros", "sort_indices", "sum_duplicates"):
        def cleaned(s, l, m):
            found = unsorted(s, m)
            getattr(found, name)()
            return found.data, found.indices, found.indptr
        sparse(f"{t} {name}", cleaned)

    # factors without fill give the matrix where it has elements
    held = cupyx.scipy.sparse.csr_matrix(square)
    cupyx.cusparse.csrilu02(held)
    factors = held.get()
    lower = scipy.sparse.tril(factors, -1) + scipy.sparse.eye(20)
    left = (lower @ scipy.sparse.triu(factors) - square).multiply(square != 0)
    if abs(left).max() > 1e-4:
        print(t, "incomplete factors", abs(left).max())

from cupyx.scipy.sparse import csr_matrix
fails(ValueError, "u(1,1) is zero",
      lambda: cupyx.cusparse.csrilu02(csr_matrix(cp.asarray([[1.0, 1], [1, 1]]))))
singular = csr_matrix(cp.asarray([[1.0, 1], [1, 1]]))
print(cupyx.scipy.sparse.linalg.spsolve(singular, cp.ones(2)))
"""
    assert run(program, kernel_cache) == "[nan nan]\n"


def test_random_numbers_have_the_distributions_that_are_asked_for(kernel_cache: Path) -> None:
    program = """
import warnings

warnings.simplefilter("ignore")  # CuPy's, of what is experimental
SIZE = 20_000
given = {
    "beta": (2, 3), "binomial": (10, 0.3), "chisquare": (3,), "dirichlet": ([1, 2, 3],),
    "exponential": (2,), "f": (5, 9), "gamma": (2, 3), "geometric": (0.3,),
    "hypergeometric": (10, 20, 5), "laplace": (1, 2), "logistic": (1, 2), "lognormal": (0.1, 0.2),
    "logseries": (0.4,), "multivariate_normal": ([0, 1], [[2, 0.3], [0.3, 1]]),
    "negative_binomial": (5, 0.4), "normal": (1, 2), "pareto": (5,),
    "noncentral_chisquare": (3, 2), "noncentral_f": (5, 9, 1), "poisson": (4,), "power": (2,),
    "random_sample": (), "rayleigh": (2,), "standard_exponential": (), "standard_gamma": (2,),
    "standard_normal": (), "standard_t": (6,), "triangular": (0, 1, 3), "uniform": (1, 3),
    "vonmises": (0.5, 2), "wald": (2, 3), "weibull": (2,), "zipf": (4,), "gumbel": (0, 1),
    "tomaxint": (), "randint": (3, 9),
}

def compare(kind, name, ours, theirs):
    ours = cp.asnumpy(ours)
    near = 0.1 * theirs.std(axis=0)
    if (abs(ours.mean(axis=0) - theirs.mean(axis=0)) > near).any() or ours.shape != theirs.shape:
        print(kind, name, ours.mean(axis=0), theirs.mean(axis=0))

state, host = cp.random.RandomState(3), np.random.RandomState(3)
for name, arguments in given.items():
    drawn = getattr(state, name)(*arguments, size=SIZE)
    compare("RandomState", name, drawn, getattr(host, name)(*arguments, size=SIZE))
rng, host = cp.random.default_rng(3), np.random.default_rng(3)
methods = [name for name in dir(cp.random.Generator) if not name.startswith("_")]
for name in methods:
    arguments = {"integers": (3, 9), "random": ()}.get(name) or given.get(name, ())
    ours = [cp.asarray(x) if isinstance(x, list) else x for x in arguments]
    drawn = getattr(rng, name)(*ours, size=SIZE)
    compare("Generator", name, drawn, getattr(host, name)(*arguments, size=SIZE))
print(len(methods), sorted(cp.random.permutation(5).tolist()))
for kind in (cp.random.XORWOW, cp.random.MRG32k3a, cp.random.Philox4x3210):
    one, same = (cp.random.Generator(kind(7)) for _ in range(2))
    assert (one.random(9) == same.random(9)).all() and kind(7).random_raw(4).dtype == "i4"
assert cp.random.default_rng(rng) is rng and isinstance(rng, cp.random.Generator)
out = cp.empty(3, "f4")
assert rng.standard_normal(3, "f4", out) is out and rng.beta(2, 3, 4, "f4").dtype == "f4"
"""
    assert run(program, kernel_cache) == "18 [0, 1, 2, 3, 4]\n"


def test_libraries_move_the_pages_that_they_read(kernel_cache: Path) -> None:
    program = """
import cupyx.scipy.sparse
from cupy import cublas

with umem.managed():
    band, x, y = cp.ones((64, 8192), order="F"), cp.ones(8192), cp.ones(8192)
    square, line = cp.eye(512), cp.ones(1 << 18, "D")
    rows = cupyx.scipy.sparse.csr_matrix(cp.eye(512))
    for name, read, call in (
        ("cuFFT", line, lambda: cp.fft.fft(line)),
        ("cuBLAS", band, lambda: cublas.sbmv(63, 1, band, x, 0, y)),
        ("cuSOLVER", square, lambda: cp.linalg.qr(square)),
        ("cuSPARSE", square, lambda: rows @ square),
        ("sort", line, lambda: cp.sort(line)),
    ):
        umem.prefetch(read, "cpu")
        before = gpu.figures.migrated_in_bytes
        call()
        moved = gpu.figures.migrated_in_bytes - before
        if not read.nbytes <= moved <= read.nbytes + (8 << 20):
            print(name, moved, read.nbytes)
"""
    assert run(program, kernel_cache) == ""


def test_what_is_not_there_is_an_error_by_name(kernel_cache: Path) -> None:
    program = """
import cupyx.profiler

def texture():
    from cupy.cuda import runtime, texture
    form = texture.ChannelFormatDescriptor(32, 0, 0, 0, runtime.cudaChannelFormatKindFloat)
    texture.CUDAarray(form, 8)

source = 'extern "C" __global__ void f() {}'
for words, call in {
    "cub": lambda: cp._core.set_reduction_accelerators(["cub"]),
    "device_reduce": lambda: cp.cuda.cub.device_reduce(cp.ones(3), 0, (0,), ()),
    "malloc3DArray": texture,
    "jitify": lambda: cp.cuda.jitify.jitify(source, ()),
    "nvcc": lambda: cp.RawKernel(source, "f", backend="nvcc")((1,), (1,), ()),
    "dgebrd": lambda: cp.cuda.cusolver.dgebrd(*[0] * 12),
    "ipcGetMemHandle": lambda: cp.cuda.runtime.ipcGetMemHandle(cp.ones(3).data.ptr),
}.items():
    fails(NotImplementedError, words, call)
cp._core.set_reduction_accelerators([])
assert float(cp.ones(100).sum()) == 100
with cupyx.profiler.profile(), cupyx.profiler.time_range("nothing to see"):
    cp.cuda.nvtx.Mark("here")
print("configuration:")
cp.show_config()
"""
    before, _, configuration = run(program, kernel_cache).partition("configuration:\n")
    assert before == "" and "T4 (simulated)" in configuration
