"""Functions of CuPy's with drawn arguments, for a dry run beside one with arithmetic.

Shapes and types are drawn from a seed: a few megabytes of which a dry run knows nothing, or some
tens of elements of which it knows all. `dry_function_calls.py` calls them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import cupy as cp
import cupyx
import cupyx.scipy.fft
import cupyx.scipy.linalg
import cupyx.scipy.ndimage as ndimage
import cupyx.scipy.signal as signal
import cupyx.scipy.sparse as sparse
import cupyx.scipy.sparse.linalg
import cupyx.scipy.special as special
import cupyx.scipy.stats
import numpy as np
import scipy.sparse

SHAPE, BOUND, VALUES, ASKED = "shape", "bound", "values", "asked"
"""What a dry run has to say of a large call: all shapes and figures; sizes that are no smaller,
because they follow from values; shapes, where values decide how much work there is; or types alone,
where a size is a value that a dry run has to be told (``--answer``)."""


class Draw:
    """Draws arguments; the same ones for the same seed.

    Args:
        seed: of shapes, types and values.
        large: a few megabytes instead of some tens of elements.
    """

    def __init__(self, seed: str, large: bool) -> None:
        self.large = large
        self._choose = random.Random(seed)
        self._values = np.random.default_rng(self._choose.randrange(1 << 30))

    def dtype(self, kinds: str) -> Any:
        return np.dtype(self._choose.choice(kinds))

    def number(self, low: int, high: int) -> int:
        return self._choose.randint(low, high)

    def shape(self, count: int, itemsize: int) -> tuple[int, ...]:
        """Draw edges that make 1.3 to 2.5 MiB, or 12 to 60 elements."""
        low, high = (1_400_000 // itemsize, 2_600_000 // itemsize) if self.large else (12, 60)
        size = self._choose.randint(low, high)
        edges = []
        for left in range(count, 1, -1):
            edge = max(2, round(size ** (1 / left) * self._choose.uniform(0.8, 1.2)))
            edges.append(edge)
            size = max(2, size // edge)
        return (*edges, max(2, size))

    def side(self, itemsize: int) -> int:
        """Draw the edge of a square of as much."""
        return round(self.shape(1, itemsize)[0] ** 0.5) if self.large else self.number(3, 8)

    def host(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Draw values on the host: of either sign, or whole numbers below 100."""
        dtype = np.dtype(dtype)
        if dtype.kind in "iu":
            return self._values.integers(0, 100, shape).astype(dtype)
        if dtype.kind == "b":
            return self._values.random(shape) < 0.5
        found = self._values.standard_normal(shape)
        if dtype.kind == "c":
            found = found + 1j * self._values.standard_normal(shape)
        return found.astype(dtype)

    def give(self, host: Any) -> Any:
        """Send values to the device; a large array's are unknown to a dry run."""
        array = cp.asarray(host)
        if not self.large or array.dtype.kind in "biu":
            return array
        return array * array.dtype.type(1)

    def of(self, shape: tuple[int, ...], kinds: str = "fd") -> Any:
        return self.give(self.host(shape, self.dtype(kinds)))

    def vector(self, kinds: str = "fd") -> Any:
        dtype = self.dtype(kinds)
        return self.give(self.host(self.shape(1, dtype.itemsize), dtype))

    def matrix(self, kinds: str = "fd") -> Any:
        dtype = self.dtype(kinds)
        return self.give(self.host(self.shape(2, dtype.itemsize), dtype))

    def cube(self, kinds: str = "fd") -> Any:
        dtype = self.dtype(kinds)
        return self.give(self.host(self.shape(3, dtype.itemsize), dtype))

    def square(self, kinds: str = "fd") -> Any:
        dtype = self.dtype(kinds)
        side = self.side(dtype.itemsize)
        return self.give(self.host((side, side), dtype))

    def pair(self, ndim: int = 2, kinds: str = "fd") -> tuple[Any, Any]:
        """Draw two arrays of one shape and type."""
        dtype = self.dtype(kinds)
        shape = self.shape(ndim, dtype.itemsize)
        return self.give(self.host(shape, dtype)), self.give(self.host(shape, dtype))

    def definite(self, kinds: str = "fd") -> Any:
        """Draw a positive definite matrix."""
        dtype = self.dtype(kinds)
        a = self.host((side := self.side(dtype.itemsize), side), dtype)
        return self.give((a @ a.conj().T + side * np.eye(side)).astype(dtype))

    def whole(self, kinds: str = "iqBHl") -> Any:
        """Draw whole numbers that came from the host."""
        return self.vector(kinds)

    def found(self, kinds: str = "iq") -> Any:
        """Draw whole numbers that were computed on the device."""
        return (abs(self.vector("f")) * 20).astype(self.dtype(kinds))

    def indices(self, below: int, count: int | None = None) -> Any:
        count = self.number(5, 40) if count is None else count
        return cp.asarray(self._values.integers(0, below, count))

    def mask(self, x: Any) -> Any:
        """Compare on the device: about half of the flags are set."""
        return x > 0

    def host_sparse(self, kinds: str = "fd", square: bool = True) -> Any:
        dtype = self.dtype(kinds)
        rows = self.number(9_000, 14_000) if self.large else self.number(6, 12)
        columns = rows if square else rows - self.number(1, 3)
        made = scipy.sparse.random(
            rows, columns, 30 / rows if self.large else 0.3, "csr", dtype, self._values
        )
        return (made + scipy.sparse.eye(rows, columns) * 40).tocsr().astype(dtype)

    def sparse(self, kinds: str = "fd", square: bool = True) -> Any:
        """Draw a CSR matrix: its structure came from the host, its values are computed."""
        found = sparse.csr_matrix(self.host_sparse(kinds, square))
        if self.large:
            found.data = found.data * found.dtype.type(1)
        return found

    def banded(self) -> Any:
        """Draw a matrix of three diagonals."""
        size = self.number(60_000, 90_000) if self.large else self.number(6, 12)
        diagonals = [np.full(size, value) for value in (-1.0, 4.0, -1.5)]
        made = scipy.sparse.spdiags(diagonals, (-1, 0, 1), size, size).tocsr()
        found = sparse.csr_matrix(made)
        found.data = found.data * 1.0
        return found

    def columns(self, matrix: Any, count: int = 4) -> Any:
        return self.of((matrix.shape[1], count), matrix.dtype.char)


class Case(NamedTuple):
    """A function with its arguments, and what a dry run has to say of it; see `SHAPE`."""

    call: Callable[[Draw], Any]
    kind: str = SHAPE


def _in_place(function: Callable[[Any], Any], x: Any) -> Any:
    function(x)
    return x


def _scatter(name: str, d: Draw) -> Any:
    target, count = d.vector("f"), 5000 if d.large else 20
    where = d.indices(len(target), count)
    return _in_place(lambda x: getattr(cupyx, name)(x, where, d.of((count,), "f")), target)


def _scatter_rows(d: Draw) -> Any:
    target = d.matrix("fd")
    rows = d.indices(len(target), 3 * len(target))
    cupyx.scatter_add(target, rows, d.of((len(rows), target.shape[1]), target.dtype.char))
    return target


def _fused(d: Draw) -> Any:
    @cp.fuse()
    def fused(x: Any, y: Any) -> Any:
        return cp.exp(-x * x) + cp.tanh(y) / 2

    return fused(*d.pair())


def _fused_sum(d: Draw) -> Any:
    @cp.fuse()
    def fused(x: Any, y: Any) -> Any:
        return cp.sum(x * y + 1, axis=0)

    return fused(*d.pair())


def _elementwise(d: Draw) -> Any:
    kernel = cp.ElementwiseKernel("T x, T y", "T z, bool big", "z = x * y + 2; big = z > x", "mine")
    return kernel(*d.pair())


def _elementwise_indexed(d: Draw) -> Any:
    kernel = cp.ElementwiseKernel("raw T x, int64 n", "T y", "y = x[(i * 7) % n]", "strided")
    x = d.vector()
    return kernel(x, x.size, size=x.size // 2)


def _reduction(d: Draw) -> Any:
    kernel = cp.ReductionKernel(
        "T x, T y", "T z", "x * y", "a + b", "z = sqrt(abs(a))", "0", "norm_of_product"
    )
    return kernel(*d.pair(), axis=1), kernel(*d.pair())


RAW = r"""
extern "C" __global__ void saxpy(const float* x, const float* y, float* out, float a, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = a * x[i] + y[i];
}
extern "C" __global__ void block_sums(const float* x, float* out, long long n) {
    __shared__ float part[128];
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    part[threadIdx.x] = i < n ? x[i] : 0;
    __syncthreads();
    for (int half = 64; half > 0; half /= 2) {
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[blockIdx.x] = part[0];
}
"""


def _raw(d: Draw) -> Any:
    x, y = d.pair(1, "f")
    out = cp.empty_like(x)
    blocks = (len(x) + 127) // 128
    cp.RawKernel(RAW, "saxpy")((blocks,), (128,), (x, y, out, np.float32(2), np.int64(len(x))))
    return out


def _raw_module(d: Draw) -> Any:
    x = d.vector("f")
    blocks = (len(x) + 127) // 128
    out = cp.empty(blocks, "f")
    module = cp.RawModule(code=RAW)
    module.get_function("block_sums")((blocks,), (128,), (x, out, np.int64(len(x))))
    return out, out.sum()


TEMPLATE = r"""
template<typename T> __global__ void twice(T* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= 2;
}
"""


def _raw_template(d: Draw) -> Any:
    x = d.vector("fd")
    name = f"twice<{'float' if x.dtype.char == 'f' else 'double'}>"
    module = cp.RawModule(code=TEMPLATE, options=("-std=c++11",), name_expressions=[name])
    module.get_function(name)(((len(x) + 255) // 256,), (256,), (x, np.int32(len(x))))
    return x


def _graph_of_sums(d: Draw) -> Any:
    """Sum a graph's messages by target, and divide by the degrees."""
    x = d.matrix("f")
    edges = 4 * len(x)
    source, target = d.indices(len(x), edges), d.indices(len(x), edges)
    sums = cp.zeros_like(x)
    cupyx.scatter_add(sums, target, x[source])
    return sums / cp.maximum(cp.bincount(target, minlength=len(x)), 1)[:, None]


def _masked_assignment(d: Draw) -> Any:
    x = d.matrix()
    x[x < 0] = 0
    return x


def _indexed_assignment(d: Draw) -> Any:
    x = d.matrix()
    x[d.indices(len(x))] = 1
    return x


def _slices(d: Draw) -> Any:
    x = d.cube()
    return x[::2, 1:], x[..., ::-1].copy(), x[:, None, 0]


def _random(name: str, *arguments: Any) -> Callable[[Draw], Any]:
    def call(d: Draw) -> Any:
        cp.random.seed(d.number(0, 1000))
        return getattr(cp.random, name)(*arguments, size=d.shape(2, 8))

    return call


def _generator(name: str, *arguments: Any) -> Callable[[Draw], Any]:
    def call(d: Draw) -> Any:
        made = cp.random.Generator(cp.random.XORWOW(d.number(0, 1000)))
        return getattr(made, name)(*arguments, size=d.shape(2, 8))

    return call


def _permutation(d: Draw) -> Any:
    cp.random.seed(1)
    return cp.random.permutation(d.shape(1, 8)[0])


def _shuffle(d: Draw) -> Any:
    cp.random.seed(1)
    return _in_place(cp.random.shuffle, d.vector())


def _choice(d: Draw) -> Any:
    cp.random.seed(1)
    return cp.random.choice(d.shape(1, 8)[0], 50)


def _unary(name: str, kinds: str = "efd", module: Any = cp) -> Callable[[Draw], Any]:
    return lambda d: getattr(module, name)(abs(d.matrix(kinds)))


def _binary(name: str, kinds: str = "efd") -> Callable[[Draw], Any]:
    return lambda d: getattr(cp, name)(*d.pair(2, kinds))


def _reduced(name: str, kinds: str = "efd", **more: Any) -> Callable[[Draw], Any]:
    def call(d: Draw) -> Any:
        function, x = getattr(cp, name), d.cube(kinds)
        return function(x, **more), function(x, axis=d.number(0, 2), **more)

    return call


def _special(name: str, count: int = 1) -> Callable[[Draw], Any]:
    def call(d: Draw) -> Any:
        given = d.pair() if count == 2 else (d.matrix(),)
        return getattr(special, name)(*(abs(x) + 0.5 for x in given))

    return call


def _filtered(name: str, **more: Any) -> Callable[[Draw], Any]:
    return lambda d: getattr(ndimage, name)(d.matrix(), **more)


def _morphology(name: str, **more: Any) -> Callable[[Draw], Any]:
    return lambda d: getattr(ndimage, name)(d.mask(d.matrix("f")), **more)


def _labelled(d: Draw) -> Any:
    x = d.matrix("f")
    labels, count = ndimage.label(x > 1)
    return labels, type(count)


def _label_sums(name: str) -> Callable[[Draw], Any]:
    def call(d: Draw) -> Any:
        x = d.matrix("f")
        labels = cp.asarray(d.host(x.shape, "i") % 7)
        return getattr(ndimage, name)(x, labels, cp.arange(7))

    return call


def _two_sparse(d: Draw) -> tuple[Any, Any]:
    a = d.host_sparse("d")
    b = a.copy()
    b.data = b.data[::-1].copy()
    return sparse.csr_matrix(a), sparse.csr_matrix(b.T.tocsr())


def _computed_sparse(d: Draw) -> Any:
    """Make a matrix of which a dry run knows no structure."""
    x = d.square("f")
    x[x < 1.5] = 0
    return sparse.csr_matrix(x)


def _solved(name: str) -> Callable[[Draw], Any]:
    def call(d: Draw) -> Any:
        a = d.sparse("d")
        a = a + a.T
        b = d.of((a.shape[0],), "d")
        return getattr(cupyx.scipy.sparse.linalg, name)(a, b, maxiter=5)[0]

    return call


def _windowed(d: Draw) -> Any:
    return cp.lib.stride_tricks.sliding_window_view(d.vector(), 5).sum(axis=1)


def _vectorized(d: Draw) -> Any:
    @cp.vectorize
    def larger(x: Any, y: Any) -> Any:
        return x + y if x > y else y

    return larger(*d.pair())


def _streams(d: Draw) -> Any:
    x, stream = d.vector(), cp.cuda.Stream()
    with stream:
        y = x * 2
    stream.synchronize()
    return y + 1


def _pinned(d: Draw) -> Any:
    x = d.vector()
    host = cupyx.empty_pinned(x.shape, x.dtype)
    x.get(out=host)
    y = cp.empty_like(x)
    y.set(host)
    return y


CASES: dict[str, Case] = {
    # arithmetic
    **{name: Case(_unary(name)) for name in ("sqrt", "exp", "log1p", "tanh", "rint", "isfinite")},
    **{name: Case(_binary(name)) for name in ("add", "multiply", "maximum", "arctan2", "less")},
    "power": Case(lambda d: abs(d.matrix()) ** 1.5),
    "divmod": Case(lambda d: cp.divmod(*(x + 1 for x in d.pair(2, "iq")))),
    "bitwise_xor": Case(lambda d: cp.bitwise_xor(*d.pair(1, "iqB"))),
    "where of three": Case(lambda d: cp.where((x := d.matrix()) > 0, x, 0)),
    "clip": Case(lambda d: cp.clip(d.matrix("efd"), -1, 1)),
    "broadcast": Case(lambda d: (x := d.matrix()) - x.mean(axis=1, keepdims=True)),
    "astype": Case(lambda d: [d.matrix("efd").astype(t) for t in "efdi"]),
    "complex parts": Case(
        lambda d: [(x := d.matrix("FD")).real.copy(), x.imag, abs(x), cp.angle(x)]
    ),
    "conj": Case(lambda d: d.matrix("FD").conj().T),
    "nan_to_num": Case(lambda d: cp.nan_to_num(1 / d.matrix())),
    "in place": Case(lambda d: _in_place(lambda x: x.__iadd__(1), d.matrix("efd"))),
    "interp": Case(lambda d: cp.interp(d.vector(), cp.arange(9.0), cp.arange(9.0) ** 2)),
    "polyval": Case(lambda d: cp.polyval(cp.asarray([1.0, 2, 3]), d.vector())),
    "gradient": Case(lambda d: cp.gradient(d.matrix())),
    "diff": Case(lambda d: cp.diff(d.matrix(), axis=d.number(0, 1))),
    "trapezoid": Case(lambda d: cp.trapezoid(d.matrix())),
    "convolve": Case(lambda d: cp.convolve(d.vector(), cp.ones(5), "same")),
    "correlate": Case(lambda d: cp.correlate(d.vector("d"), cp.ones(7), "valid")),
    # reductions
    **{n: Case(_reduced(n)) for n in ("sum", "mean", "var", "std", "max", "argmin", "any", "all")},
    **{n: Case(_reduced(n)) for n in ("prod", "nansum", "nanmax", "count_nonzero", "ptp")},
    "logsumexp": Case(lambda d: special.logsumexp(d.matrix(), axis=1), VALUES),
    "softmax": Case(lambda d: special.softmax(d.matrix(), axis=1)),
    "median": Case(lambda d: (cp.median(x := d.matrix()), cp.median(x, axis=0))),
    "percentile": Case(lambda d: cp.percentile(d.matrix(), [10, 50, 90], axis=d.number(0, 1))),
    "quantile": Case(lambda d: cp.quantile(d.vector(), 0.3)),
    "nanmedian": Case(lambda d: cp.nanmedian(d.matrix(), axis=1)),
    "average": Case(lambda d: cp.average(d.matrix("d"), axis=0)),
    "weighted average": Case(lambda d: cp.average(x := d.matrix("d"), axis=0, weights=abs(x))),
    "cumsum": Case(lambda d: (cp.cumsum(x := d.matrix()), cp.cumsum(x, axis=d.number(0, 1)))),
    "cumprod": Case(lambda d: cp.cumprod(d.vector())),
    "add.reduce": Case(lambda d: cp.add.reduce(d.matrix(), axis=1)),
    "cov": Case(lambda d: cp.cov(d.matrix("d")[:200])),
    "corrcoef": Case(lambda d: cp.corrcoef(d.matrix("d")[:200])),
    "histogram": Case(lambda d: cp.histogram(d.vector(), 20), VALUES),
    "histogram2d": Case(lambda d: cp.histogram2d(*d.pair(1, "d"), bins=6), VALUES),
    "histogram of edges": Case(lambda d: cp.histogram(d.vector(), cp.linspace(-3, 3, 13))),
    "bincount of the host's": Case(lambda d: cp.bincount(d.whole("iq"))),
    "bincount": Case(lambda d: cp.bincount(d.found()), ASKED),
    "bincount, at least": Case(lambda d: cp.bincount(d.whole("i"), minlength=200)),
    "digitize": Case(lambda d: cp.digitize(d.vector(), cp.linspace(-2, 2, 9))),
    "allclose": Case(lambda d: [type(bool(cp.allclose(*d.pair())))], SHAPE),
    "array_equal": Case(lambda d: [type(bool(cp.array_equal(*d.pair())))], SHAPE),
    # shapes
    "transpose": Case(lambda d: cp.ascontiguousarray(d.cube("efd").transpose(2, 0, 1))),
    "reshape": Case(lambda d: d.cube().swapaxes(0, 2).reshape(-1)),
    "concatenate": Case(lambda d: cp.concatenate(d.pair(), axis=d.number(0, 1))),
    "stack": Case(lambda d: cp.stack(d.pair(), axis=d.number(0, 2))),
    "split": Case(lambda d: [part.copy() for part in cp.array_split(d.matrix(), 3, axis=1)]),
    "pad": Case(lambda d: [cp.pad(d.matrix(), 2, m) for m in ("constant", "edge", "reflect")]),
    "roll": Case(lambda d: cp.roll(d.matrix(), 3, axis=d.number(0, 1))),
    "flip": Case(lambda d: cp.flip(d.matrix(), axis=d.number(0, 1)).copy()),
    "rot90": Case(lambda d: cp.rot90(d.matrix()).copy()),
    "tile": Case(lambda d: cp.tile(d.matrix(), (2, 2))),
    "repeat": Case(lambda d: cp.repeat(d.matrix(), 3, axis=1)),
    "kron": Case(lambda d: cp.kron(d.matrix(), cp.ones((2, 2)))),
    "meshgrid": Case(lambda d: cp.meshgrid(cp.arange(d.side(8)), cp.arange(d.side(8)))),
    "tril": Case(lambda d: cp.tril(d.square(), 1)),
    "diag": Case(lambda d: (cp.diag(d.square()).copy(), cp.diag(d.of((d.side(8),), "d")))),
    "slices": Case(_slices),
    "sliding_window_view": Case(_windowed),
    "insert": Case(lambda d: cp.append(d.vector(), cp.ones(3))),
    "delete": Case(lambda d: cp.delete(d.matrix(), cp.asarray([1, 2]), axis=0)),
    "delete by a number": Case(lambda d: cp.delete(d.vector(), 3)),
    "ones and full": Case(
        lambda d: [cp.ones(s := d.shape(2, 4), "f"), cp.full(s, 3.0), cp.zeros(s)]
    ),
    "linspace": Case(lambda d: cp.linspace(0, 1, d.shape(1, 8)[0])),
    "arange": Case(lambda d: cp.arange(d.shape(1, 8)[0]) * 2),
    "eye": Case(lambda d: cp.eye(d.side(8))),
    # indices and orders
    "take": Case(lambda d: (x := d.matrix()).take(d.indices(len(x)), axis=0)),
    "rows by indices": Case(lambda d: (x := d.matrix())[d.indices(len(x))]),
    "points by indices": Case(lambda d: d.matrix()[(i := d.indices(2)), i]),
    "take_along_axis": Case(lambda d: cp.take_along_axis(x := d.matrix(), cp.argsort(x, 1), 1)),
    "indexed assignment": Case(_indexed_assignment),
    "masked assignment": Case(_masked_assignment),
    "putmask": Case(lambda d: _in_place(lambda x: cp.putmask(x, x > 0, 1 - x), d.matrix()), BOUND),
    "choose": Case(lambda d: cp.choose((x := d.whole("i")) % 2, cp.stack([x, -x]))),
    "select": Case(lambda d: cp.select([(x := d.matrix()) > 1, x < -1], [x, -x], 0)),
    "mask": Case(lambda d: (x := d.matrix("efd"))[x > 0], BOUND),
    "mask of rows": Case(lambda d: (x := d.matrix())[x.sum(axis=1) > 0], BOUND),
    "nonzero": Case(lambda d: cp.nonzero(d.matrix() > 0.5), BOUND),
    "flatnonzero": Case(lambda d: cp.flatnonzero(d.vector() > 1), BOUND),
    "argwhere": Case(lambda d: cp.argwhere(d.cube() > 0), BOUND),
    "where of one": Case(lambda d: cp.where(d.vector("efd") < 0), BOUND),
    "compress": Case(lambda d: cp.compress((x := d.matrix())[:, 0] > 0, x, axis=0), BOUND),
    "extract": Case(lambda d: cp.extract((x := d.vector()) > 0, x), BOUND),
    "nonzero of the host's": Case(lambda d: cp.nonzero(cp.asarray(d.host(d.shape(1, 1), "?")))),
    "mask of the host's": Case(lambda d: (x := d.vector())[cp.asarray(d.host(x.shape, "?"))]),
    "unique": Case(lambda d: cp.unique(d.found()), BOUND),
    "unique of the host's": Case(lambda d: cp.unique(d.whole("iq"))),
    "unique with all": Case(lambda d: cp.unique(d.found(), True, True, True), BOUND),
    "unique of numbers": Case(lambda d: cp.unique(cp.round(d.vector(), 1)), BOUND),
    "intersect1d": Case(lambda d: cp.intersect1d(d.found("q"), d.found("q")), BOUND),
    "setdiff1d": Case(lambda d: cp.setdiff1d(d.found("q"), cp.arange(5)), BOUND),
    "union1d": Case(lambda d: cp.union1d(d.found("q"), d.found("q")), BOUND),
    "isin": Case(lambda d: cp.isin(d.whole("i"), cp.arange(4))),
    "sort": Case(lambda d: (cp.sort(d.vector("efd")), cp.sort(d.matrix(), axis=d.number(0, 1)))),
    "argsort": Case(
        lambda d: (cp.argsort(d.vector()), cp.argsort(d.matrix(), axis=d.number(0, 1)))
    ),
    "sort of the host's": Case(lambda d: cp.sort(d.whole())),
    "lexsort": Case(lambda d: cp.lexsort(cp.stack(d.pair(1, "d")))),
    "partition": Case(lambda d: cp.partition(d.matrix(), 1, axis=1)),
    "argpartition": Case(lambda d: cp.argpartition(d.vector(), 5)[:5].copy()),
    "searchsorted": Case(lambda d: cp.searchsorted(cp.arange(50.0), d.vector("d"))),
    "packbits": Case(lambda d: cp.unpackbits(cp.packbits(d.vector() > 0))),
    "ravel_multi_index": Case(lambda d: cp.unravel_index(d.whole("q"), (10, 10))),
    # products and linear algebra
    "matmul": Case(lambda d: (x := d.matrix("efdFD")) @ x.T),
    "matmul of many": Case(lambda d: (x := d.cube("efd")) @ x.transpose(0, 2, 1)),
    "dot of vectors": Case(lambda d: cp.dot(*d.pair(1, "fdD"))),
    "dot of a vector": Case(lambda d: (x := d.matrix()) @ x[0]),
    "outer": Case(lambda d: cp.outer(x := d.of((d.side(8),), "d"), x)),
    "tensordot": Case(lambda d: cp.tensordot(x := d.cube(), x, axes=([0, 1], [0, 1]))),
    "einsum": Case(lambda d: cp.einsum("ij,kj->ik", *d.pair())),
    "einsum of many": Case(lambda d: cp.einsum("bij,bkj->bik", *d.pair(3))),
    "inner": Case(lambda d: cp.inner(*d.pair(2, "fd"))),
    "linalg.svd": Case(lambda d: cp.linalg.svd(d.matrix("fdD"), full_matrices=False)),
    "linalg.svd of many": Case(lambda d: cp.linalg.svd(d.of((30 if d.large else 2, 90, 80)))),
    "linalg.qr": Case(lambda d: cp.linalg.qr(d.matrix("fdFD"))),
    "linalg.eigh": Case(lambda d: cp.linalg.eigh(d.definite("fdD"))),
    "linalg.eigvalsh": Case(lambda d: cp.linalg.eigvalsh(d.definite("fd"))),
    "linalg.cholesky": Case(lambda d: cp.linalg.cholesky(d.definite("fdFD"))),
    "linalg.inv": Case(lambda d: cp.linalg.inv(d.definite("fdFD"))),
    "linalg.pinv": Case(lambda d: cp.linalg.pinv(d.matrix()), VALUES),
    "linalg.solve": Case(lambda d: cp.linalg.solve(a := d.definite("fdFD"), a[:, :3].copy())),
    "linalg.solve of many": Case(
        lambda d: cp.linalg.solve(
            d.of((200 if d.large else 3, 40, 40)), d.of((200 if d.large else 3, 40, 2), "d")
        )
    ),
    "linalg.lstsq": Case(
        lambda d: cp.linalg.lstsq((a := d.matrix("d")), a[:, 0].copy(), None), VALUES
    ),
    "linalg.det": Case(lambda d: (cp.linalg.det(a := d.definite()), cp.linalg.slogdet(a))),
    "linalg.norm": Case(lambda d: [cp.linalg.norm(x := d.matrix()), cp.linalg.norm(x, axis=1)]),
    "linalg.norm by values": Case(lambda d: cp.linalg.norm(d.square(), "nuc")),
    "linalg.matrix_power": Case(lambda d: cp.linalg.matrix_power(d.square(), 3)),
    "linalg.matrix_rank": Case(lambda d: cp.linalg.matrix_rank(d.matrix())),
    "linalg.eig": Case(lambda d: cp.linalg.eigvals(d.of((150 if d.large else 6,) * 2, "d"))),
    "linalg.lu_factor": Case(lambda d: cupyx.scipy.linalg.lu_factor(d.square("fdD"))),
    "linalg.lu_solve": Case(
        lambda d: cupyx.scipy.linalg.lu_solve(
            cupyx.scipy.linalg.lu_factor(a := d.definite()), a[:, 0].copy()
        )
    ),
    "linalg.lu": Case(lambda d: cupyx.scipy.linalg.lu(d.square())),
    "linalg.solve_triangular": Case(
        lambda d: cupyx.scipy.linalg.solve_triangular(a := d.definite(), a[:, :2].copy())
    ),
    "linalg.expm": Case(lambda d: cupyx.scipy.linalg.expm(d.square("d") / 1000)),
    "linalg.toeplitz": Case(lambda d: cupyx.scipy.linalg.toeplitz(d.of((d.side(8),), "d"))),
    "linalg.block_diag": Case(lambda d: cupyx.scipy.linalg.block_diag(*d.pair())),
    "polyfit": Case(lambda d: cp.polyfit(*d.pair(1, "d"), 3), ASKED),
    "vander": Case(lambda d: cp.vander(d.vector(), 3)),
    # transforms
    "fft": Case(lambda d: cp.fft.fft(d.matrix("fdFD"), axis=d.number(0, 1))),
    "ifft": Case(lambda d: cp.fft.ifft(d.matrix("FD"))),
    "rfft": Case(lambda d: cp.fft.irfft(cp.fft.rfft(d.matrix()))),
    "fft2": Case(lambda d: cp.fft.ifft2(cp.fft.fft2(d.matrix("fF")))),
    "fftn": Case(lambda d: cp.fft.fftn(d.cube("fdD"))),
    "rfftn": Case(lambda d: cp.fft.irfftn(cp.fft.rfftn(d.cube()))),
    "fftshift": Case(lambda d: cp.fft.fftshift(d.matrix())),
    "fftfreq": Case(lambda d: cp.fft.fftfreq(d.shape(1, 8)[0])),
    "hfft": Case(lambda d: cp.fft.hfft(d.vector("FD"))),
    "scipy.fft": Case(lambda d: cupyx.scipy.fft.fft(d.vector("FD"), overwrite_x=True)),
    "dct": Case(lambda d: cupyx.scipy.fft.dct(d.matrix("d"))),
    "fft plan": Case(
        lambda d: cupyx.scipy.fft.fft(
            x := d.matrix("F"), plan=cupyx.scipy.fft.get_fft_plan(x, axes=1), axis=1
        )
    ),
    # random
    "random.rand": Case(_random("random_sample")),
    "random.normal": Case(_random("normal", 0, 1)),
    "random.standard_normal": Case(_random("standard_normal")),
    "random.randint": Case(_random("randint", 0, 9), BOUND),
    "random.uniform": Case(_random("uniform", -1, 1)),
    "random.gamma": Case(_random("gamma", 2.0)),
    "random.poisson": Case(_random("poisson", 3.0)),
    "random.binomial": Case(_random("binomial", 9, 0.5)),
    "random.permutation": Case(_permutation),
    "random.shuffle": Case(_shuffle),
    "random.choice": Case(_choice),
    "Generator.random": Case(_generator("random")),
    "Generator.integers": Case(_generator("integers", 0, 9)),
    "Generator.standard_normal": Case(_generator("standard_normal")),
    "Generator.exponential": Case(_generator("exponential")),
    "Generator.beta": Case(_generator("beta", 2.0, 3.0)),
    # ndimage
    "gaussian_filter": Case(lambda d: ndimage.gaussian_filter(d.matrix(), 1.5)),
    "uniform_filter": Case(_filtered("uniform_filter", size=3)),
    "median_filter": Case(_filtered("median_filter", size=3)),
    "maximum_filter": Case(_filtered("maximum_filter", size=3)),
    "sobel": Case(_filtered("sobel")),
    "laplace": Case(_filtered("laplace")),
    "ndimage.convolve": Case(lambda d: ndimage.convolve(d.matrix(), cp.ones((3, 3)))),
    "ndimage.correlate1d": Case(lambda d: ndimage.correlate1d(d.matrix(), cp.ones(3), axis=0)),
    "rotate": Case(_filtered("rotate", angle=30.0, order=1)),
    "zoom": Case(_filtered("zoom", zoom=1.5, order=1)),
    "shift": Case(_filtered("shift", shift=1.5)),
    "affine_transform": Case(
        lambda d: ndimage.affine_transform(d.matrix("d"), cp.asarray([[1.0, 0.1], [0.1, 1.0]]))
    ),
    "map_coordinates": Case(
        lambda d: ndimage.map_coordinates(x := d.matrix(), abs(cp.stack([x, x])), order=1)
    ),
    "spline_filter": Case(_filtered("spline_filter")),
    "binary_erosion": Case(_morphology("binary_erosion")),
    "binary_dilation": Case(_morphology("binary_dilation", iterations=2, brute_force=True)),
    "binary_closing": Case(_morphology("binary_closing")),
    "grey_erosion": Case(_filtered("grey_erosion", size=3)),
    "distance_transform_edt": Case(_morphology("distance_transform_edt")),
    "label": Case(_labelled, VALUES),
    "sum_labels": Case(_label_sums("sum_labels")),
    "ndimage.mean": Case(_label_sums("mean")),
    "ndimage.maximum": Case(_label_sums("maximum"), VALUES),
    "center_of_mass": Case(lambda d: ndimage.center_of_mass(abs(d.matrix()))),
    "fourier_gaussian": Case(lambda d: ndimage.fourier_gaussian(d.matrix("D"), 2.0)),
    # signal
    "signal.convolve2d": Case(lambda d: signal.convolve2d(d.matrix(), cp.ones((3, 3)), "same")),
    "signal.fftconvolve": Case(lambda d: signal.fftconvolve(*d.pair(1), "same")),
    "signal.oaconvolve": Case(lambda d: signal.oaconvolve(d.vector(), cp.ones(7))),
    "signal.wiener": Case(lambda d: signal.wiener(d.matrix(), 3)),
    "signal.lfilter": Case(
        lambda d: signal.lfilter(cp.asarray([1.0, 0.5]), cp.asarray([1.0, 0.3]), d.vector("d"))
    ),
    "signal.sosfilt": Case(
        lambda d: signal.sosfilt(cp.asarray([[1.0, 0.5, 0.2, 1.0, 0.3, 0.1]]), d.vector("d"))
    ),
    "signal.resample": Case(lambda d: signal.resample(d.matrix("d"), 50)),
    "signal.hilbert": Case(lambda d: signal.hilbert(d.matrix("d"))),
    "signal.stft": Case(lambda d: signal.stft(d.of((200_000 if d.large else 60,)), nperseg=16)),
    "signal.welch": Case(lambda d: signal.welch(d.of((200_000 if d.large else 60,)), nperseg=16)),
    "signal.detrend": Case(lambda d: signal.detrend(d.matrix("d"))),
    "signal.medfilt2d": Case(lambda d: signal.medfilt2d(d.matrix("f"), 3)),
    "signal.find_peaks": Case(lambda d: signal.find_peaks(d.vector("d"))[0], BOUND),
    "signal.hann": Case(lambda d: signal.windows.hann(d.shape(1, 8)[0])),
    # sparse matrices
    "csr_matrix": Case(lambda d: d.sparse()),
    "csr @ dense": Case(lambda d: (a := d.sparse("fdD")) @ d.columns(a)),
    "csr @ vector": Case(lambda d: (a := d.sparse()) @ d.of((a.shape[1],), a.dtype.char)),
    "csr.T @ dense": Case(lambda d: (a := d.sparse()).T @ d.columns(a)),
    "csr @ csr": Case(lambda d: (p := _two_sparse(d))[0] @ p[1]),
    "csr + csr": Case(lambda d: (p := _two_sparse(d))[0] + p[1]),
    "csr * csr": Case(lambda d: (p := _two_sparse(d))[0].multiply(p[1]), BOUND),
    "csr - csr": Case(lambda d: (p := _two_sparse(d))[0] - p[1]),
    "csr of computed": Case(_computed_sparse, BOUND),
    "computed csr @ csr": Case(lambda d: (a := _computed_sparse(d)) @ a, BOUND),
    "computed csr + csr": Case(lambda d: (a := _computed_sparse(d)) + a.T.tocsr(), BOUND),
    "csr to csc": Case(lambda d: d.sparse().tocsc()),
    "csr to coo": Case(lambda d: d.sparse().tocoo()),
    "coo to csr": Case(lambda d: sparse.coo_matrix(d.host_sparse().tocoo()).tocsr()),
    "coo of duplicates": Case(
        lambda d: sparse.coo_matrix((cp.ones(60), (d.indices(5, 60), d.indices(5, 60)))).tocsr()
    ),
    "csr to dense": Case(lambda d: sparse.csr_matrix(d.host_sparse()[:300]).toarray()),
    "csr rows": Case(lambda d: d.sparse()[2:5]),
    "csr by indices": Case(lambda d: (a := d.sparse())[d.indices(a.shape[0])]),
    "csr column": Case(lambda d: d.sparse()[:, 1]),
    "csr sums": Case(lambda d: ((a := d.sparse()).sum(axis=0), a.sum(axis=1), a.sum())),
    "csr mean and max": Case(lambda d: ((a := d.sparse()).mean(axis=0), a.max())),
    "csr max of rows": Case(lambda d: d.sparse().max(axis=1), BOUND),
    "csr functions": Case(lambda d: (abs(d.sparse()).sqrt(), d.sparse().power(2))),
    "csr diagonal": Case(lambda d: d.sparse().diagonal()),
    "csr transposed": Case(lambda d: d.sparse().T.tocsr()),
    "eliminate_zeros": Case(lambda d: _in_place(lambda a: a.eliminate_zeros(), d.sparse()), BOUND),
    "sparse.eye": Case(lambda d: sparse.eye(d.shape(1, 8)[0], format="csr") * 2),
    "sparse.diags": Case(
        lambda d: sparse.diags([x := d.vector("d"), x[1:]], [0, 1]).tocsr(), BOUND
    ),
    "sparse.kron": Case(lambda d: sparse.kron(d.sparse(), sparse.eye(2)).tocsr()),
    "sparse.vstack": Case(lambda d: sparse.vstack([a := d.sparse(), a]).tocsr()),
    "sparse.bmat": Case(lambda d: sparse.bmat([[a := d.sparse(), None], [None, a]]).tocsr()),
    "sparse.find": Case(lambda d: sparse.find(d.sparse()), BOUND),
    "sparse.tril": Case(lambda d: sparse.tril(d.sparse()).tocsr(), BOUND),
    "spsolve": Case(
        lambda d: cupyx.scipy.sparse.linalg.spsolve(a := d.banded(), cp.ones(a.shape[0]))
    ),
    "spsolve_triangular": Case(
        lambda d: cupyx.scipy.sparse.linalg.spsolve_triangular(
            a := sparse.csr_matrix(scipy.sparse.tril(d.host_sparse("d"), format="csr")),
            cp.ones(a.shape[0]),
        )
    ),
    "cg": Case(_solved("cg"), VALUES),
    "gmres": Case(_solved("gmres"), VALUES),
    "eigsh": Case(
        lambda d: cupyx.scipy.sparse.linalg.eigsh((a := d.sparse("d")) + a.T, 2, maxiter=20), VALUES
    ),
    "svds": Case(lambda d: cupyx.scipy.sparse.linalg.svds(d.sparse("d"), 2, maxiter=20), VALUES),
    "norm of csr": Case(lambda d: cupyx.scipy.sparse.linalg.norm(d.sparse())),
    # special and stats
    **{
        f"special.{name}": Case(_special(name))
        for name in ("gammaln", "erf", "digamma", "j0", "expit")
    },
    **{f"special.{name}": Case(_special(name, 2)) for name in ("xlogy", "gammainc", "rel_entr")},
    "stats.zscore": Case(lambda d: cupyx.scipy.stats.zscore(d.matrix("d")), VALUES),
    "stats.entropy": Case(lambda d: cupyx.scipy.stats.entropy(abs(d.matrix("d")))),
    "stats.trim_mean": Case(lambda d: cupyx.scipy.stats.trim_mean(d.matrix("d"), 0.1)),
    "stats.boxcox_llf": Case(
        lambda d: cupyx.scipy.stats.boxcox_llf(0.5, abs(d.vector("d"))), VALUES
    ),
    # kernels of one's own, scatters, copies
    "scatter_add": Case(lambda d: _scatter("scatter_add", d)),
    "scatter_max": Case(lambda d: _scatter("scatter_max", d)),
    "scatter_add of rows": Case(_scatter_rows),
    "graph of sums": Case(_graph_of_sums),
    "cp.add.at": Case(
        lambda d: _in_place(lambda x: cp.add.at(x, d.indices(len(x)), 1.0), d.vector())
    ),
    "fuse": Case(_fused),
    "fuse with a sum": Case(_fused_sum),
    "ElementwiseKernel": Case(_elementwise),
    "ElementwiseKernel with raw": Case(_elementwise_indexed),
    "ReductionKernel": Case(_reduction),
    "RawKernel": Case(_raw),
    "RawModule": Case(_raw_module),
    "RawModule of a template": Case(_raw_template),
    "streams": Case(_streams),
    "pinned memory": Case(_pinned),
    "get": Case(lambda d: cp.asarray(d.matrix().get() + 1)),
    "copy": Case(lambda d: d.cube("efdFDiqB").copy(order="F")),
    "item": Case(lambda d: [type(float(d.vector().sum())), type(int(d.whole("q").max()))]),
    "views": Case(lambda d: d.vector("F").view("f") + 1),
    "apply_along_axis": Case(
        lambda d: cp.apply_along_axis(cp.sum, 0, d.of((200 if d.large else 4, 3)))
    ),
    "vectorize": Case(_vectorized),
    "piecewise": Case(lambda d: cp.piecewise(x := d.vector("d"), [x > 0], [2.0, 1.0])),
    "unwrap": Case(lambda d: cp.unwrap(d.matrix("d"))),
    "signbit": Case(lambda d: cp.signbit(d.matrix())),
    "spatial distances": Case(
        lambda d: ((x := d.of((500 if d.large else 5, 6), "d"))[:, None] - x) ** 2
    ),
}
