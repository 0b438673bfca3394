"""Programs of plain CuPy of bench/dry_runs.py: each makes its data and returns a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy as cp
import cupyx
import cupyx.scipy.ndimage as ndimage
import cupyx.scipy.sparse as sparse
import cupyx.scipy.sparse.linalg
import numpy as np
import scipy.sparse

Step = Callable[[], None]


def _random(*shape: int, dtype: str = "f", seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def transforms() -> Step:
    """A low-pass filter of images in the frequencies."""
    x = cp.asarray(_random(8, 512, 512))

    def step() -> None:
        found = cp.fft.rfft2(x)
        found[:, 60:-60] = 0
        y = cp.fft.irfft2(found)
        cp.asnumpy(cp.abs(cp.fft.fftn(y[:2].astype("F"))).mean())

    return step


def factors() -> Step:
    """SVD, QR and solve."""
    x, a = cp.asarray(_random(600, 200, dtype="d")), cp.asarray(_random(400, 400, dtype="d"))

    def step() -> None:
        u, s, v = cp.linalg.svd(x, full_matrices=False)
        q, r = cp.linalg.qr((u * s) @ v)
        y = cp.linalg.solve(a, q.T[:, :400].T)
        float(cp.linalg.norm(y) + r[0, 0])

    return step


def images() -> Step:
    """Filters of `cupyx.scipy.ndimage`, one after another."""
    x = cp.asarray(_random(1000, 800))

    def step() -> None:
        y = ndimage.gaussian_filter(x, 2)
        y = ndimage.median_filter(y, 3)
        y = ndimage.zoom(ndimage.rotate(y, 15, order=1), 0.5, order=1)
        edges = cp.hypot(ndimage.sobel(y, 0), ndimage.sobel(y, 1))
        ndimage.binary_dilation(edges > edges.mean(), iterations=3, brute_force=True)

    return step


BODIES = r"""
extern "C" __global__ void forces(const float4* x, float3* f, int n) {
    __shared__ float4 tile[128];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float4 own = i < n ? x[i] : make_float4(0, 0, 0, 0);
    float3 sum = make_float3(0, 0, 0);
    for (int first = 0; first < n; first += 128) {
        tile[threadIdx.x] = first + threadIdx.x < n ? x[first + threadIdx.x]
                                                    : make_float4(0, 0, 0, 0);
        __syncthreads();
        for (int j = 0; j < 128; ++j) {
            float dx = tile[j].x - own.x, dy = tile[j].y - own.y, dz = tile[j].z - own.z;
            float r = rsqrtf(dx * dx + dy * dy + dz * dz + 1e-3f);
            float s = tile[j].w * r * r * r;
            sum.x += s * dx; sum.y += s * dy; sum.z += s * dz;
        }
        __syncthreads();
    }
    if (i < n) f[i] = sum;
}
"""


def bodies() -> Step:
    """Bodies that attract each other, by a RawKernel with shared memory."""
    n = 2048
    x, v = cp.asarray(_random(n, 4)), cp.zeros((n, 3), "f")
    kernel = cp.RawKernel(BODIES, "forces")

    def step() -> None:
        f = cp.empty((n, 3), "f")
        for _ in range(2):
            kernel(((n + 127) // 128,), (128,), (x, f, np.int32(n)))
            v[:] += 0.01 * f
            x[:, :3] += 0.01 * v

    return step


def generated() -> Step:
    """A random walk drawn by `cupy.random.Generator`."""
    generator = cp.random.default_rng(1)

    def step() -> None:
        walk = cp.cumsum(generator.standard_normal((200, 5000), "f"), axis=1)
        times = generator.exponential(2.0, (200, 5000)) + generator.gamma(2.0, size=(200, 5000))
        cp.asnumpy(cp.percentile(walk[:, -1], [5, 50, 95]))
        cp.asnumpy(times.mean(axis=1))

    return step


def sparse_products() -> Step:
    """The square of a sparse matrix, and its sum with the transposed one."""
    host = scipy.sparse.random(20_000, 20_000, 5e-4, "csr", "f", np.random.default_rng(0))
    a = sparse.csr_matrix(host)

    def step() -> None:
        square = a @ a
        both = square + square.T.tocsr()
        both.multiply(0.5).sum(axis=0)

    return step


def clusters() -> Step:
    """Ten rounds of k-means, or until no label changes."""
    x = cp.asarray(_random(40_000, 16))

    def step() -> None:
        """Run the program once."""
        centres, labels = x[:20].copy(), None
        for _ in range(10):
            far = (x**2).sum(1)[:, None] - 2 * x @ centres.T + (centres**2).sum(1)
            new = far.argmin(axis=1)
            if labels is not None and bool((new == labels).all()):
                break
            labels = new
            sums = cp.zeros_like(centres)
            cupyx.scatter_add(sums, labels, x)
            counts = cp.bincount(labels, minlength=len(centres))
            centres = sums / cp.maximum(counts, 1)[:, None]

    return step


def _poisson(side: int) -> Any:
    line = scipy.sparse.diags(
        [-np.ones(side - 1), 2 * np.ones(side), -np.ones(side - 1)], [-1, 0, 1]
    )
    one = scipy.sparse.eye(side)
    return (scipy.sparse.kron(line, one) + scipy.sparse.kron(one, line)).tocsr().astype("d")


def conjugate_gradients() -> Step:
    """Poisson's equation by `cg`, which ends when the residual is small."""
    a = sparse.csr_matrix(_poisson(300))
    b = cp.asarray(_random(a.shape[0], dtype="d"))
    return lambda: cupyx.scipy.sparse.linalg.cg(a, b, rtol=1e-2, maxiter=30) and None


def distinct() -> Step:
    """Distinct keys, orders and masks of numbers that are computed on the device."""
    x = cp.asarray(_random(400_000))

    def step() -> None:
        keys = (cp.abs(x) * 1000).astype("i")
        values, counts = cp.unique(keys, return_counts=True)
        order = cp.argsort(x)
        x[order][keys > 500].sum()
        cp.negative(values[counts > 100])

    return step


def kalman() -> Step:
    """Kalman filters of many objects at once, each with a state of six numbers."""
    n, size, seen = 4000, 6, 3
    f = cp.asarray((np.eye(size) + 0.1 * np.eye(size, k=3)).astype("f"))
    h = cp.asarray(np.eye(seen, size, dtype="f"))
    measured = cp.asarray(_random(10, n, seen))

    def step() -> None:
        x, p = cp.zeros((n, size), "f"), cp.tile(cp.eye(size, dtype="f"), (n, 1, 1))
        for z in measured:
            x, p = x @ f.T, f @ p @ f.T + 0.01 * cp.eye(size, dtype="f")
            s = h @ p @ h.T + 0.1 * cp.eye(seen, dtype="f")
            gain = p @ h.T @ cp.linalg.inv(s)
            x = x + (gain @ (z - x @ h.T)[..., None])[..., 0]
            p = (cp.eye(size, dtype="f") - gain @ h) @ p
        float(x.mean())

    return step


def waves() -> Step:
    """The wave equation by finite differences in time, with a kernel fused from an expression."""
    now, before = (cp.asarray(_random(1000, 1200)) for _ in range(2))
    speed = cp.full(now.shape, 0.3, "f")

    @cp.fuse()
    def advanced(now: Any, before: Any, around: Any, speed: Any) -> Any:
        return 2 * now - before + speed * (around - 4 * now)

    def step() -> None:
        nonlocal now, before
        for _ in range(10):
            around = cp.zeros_like(now)
            around[1:-1, 1:-1] = now[2:, 1:-1] + now[:-2, 1:-1] + now[1:-1, 2:] + now[1:-1, :-2]
            now, before = advanced(now, before, around, speed), now
        float(cp.abs(now).max())

    return step


OPTIONS = r"""
extern "C" __global__ void asian(const float* normals, float* payoff, int paths, int steps) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= paths) return;
    float s = 100, sum = 0;
    for (int t = 0; t < steps; ++t) {
        s *= expf(-2e-4f + 0.02f * normals[(long long)t * paths + i]);
        sum += s;
    }
    payoff[i] = fmaxf(sum / steps - 100, 0.0f);
}
"""


def options() -> Step:
    """The price of an Asian option by Monte Carlo: a RawKernel over drawn paths."""
    kernel, paths, steps = cp.RawKernel(OPTIONS, "asian"), 20_000, 100
    cp.random.seed(3)

    def step() -> None:
        normals = cp.random.standard_normal((steps, paths), dtype="f")
        payoff = cp.empty(paths, "f")
        kernel(((paths + 255) // 256,), (256,), (normals, payoff, np.int32(paths), np.int32(steps)))
        float(payoff.mean()), float(payoff.std() / paths**0.5)

    return step


def ranks() -> Step:
    """PageRank of a random graph, twenty rounds."""
    n, draw = 50_000, np.random.default_rng(2)
    links = scipy.sparse.csr_matrix(
        (np.ones(8 * n), (draw.integers(0, n, 8 * n), draw.integers(0, n, 8 * n))), (n, n)
    )
    a = sparse.csr_matrix(links)

    def step() -> None:
        """Run the program once."""
        degree = cp.maximum(a.sum(axis=1).ravel(), 1)
        moves = (sparse.diags(1 / degree) @ a).T.tocsr()
        x = cp.full(n, 1 / n)
        for _ in range(20):
            new = 0.85 * (moves @ x) + 0.15 / n
            far = cp.abs(new - x).sum()
            x = new
        float(far)
        cp.argsort(-x)[:10].get()

    return step


PROGRAMS: dict[str, Callable[[], Step]] = {
    "FFT": transforms,
    "SVD, QR, solve": factors,
    "ndimage": images,
    "n bodies": bodies,
    "Generator": generated,
    "sparse x sparse": sparse_products,
    "k-means": clusters,
    "conjugate gradients": conjugate_gradients,
    "unique, argsort, masks": distinct,
    "Kalman filters": kalman,
    "wave equation": waves,
    "option prices": options,
    "PageRank": ranks,
}
