"""Ten right CuPy programs of kernels and streams, whose sources `fault_mutations` changes.

Each asserts its result by NumPy's. Every wait, barrier, bound and first value in them is needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

N, THREADS, BLOCKS, TURNS = 1000, 128, 8, 3


def _host(number: int, *shape: int) -> Any:
    return np.random.default_rng(number).integers(-4, 5, shape or N).astype("f4")


def _pinned(cp: Any, count: int) -> Any:
    return np.frombuffer(cp.cuda.alloc_pinned_memory(4 * count), "f4", count)


def _streams(cp: Any, count: int = 2) -> Any:
    return [cp.cuda.Stream(non_blocking=True) for _ in range(count)]


def turn(cp: Any) -> None:
    """Blocks are turned round on one stream, and added up on another."""
    kernel = cp.RawKernel(
        r"""extern "C" __global__ void turn(const float* x, float* y, int n) {
            __shared__ float held[128];
            for (int first = blockIdx.x * 128; n > first; first += gridDim.x * 128) {
                int i = first + threadIdx.x;
                held[threadIdx.x] = i < n ? x[i] : 0;
                __syncthreads();
                if (i < n) y[i] += held[127 - threadIdx.x];
                __syncthreads();
            }
        }""",
        "turn",
    )
    host = _host(0)
    (one, other), made, used = _streams(cp), cp.cuda.Event(), cp.cuda.Event()
    x, total, y = cp.asarray(host), cp.zeros(N, "f4"), cp.empty(N, "f4")
    cp.cuda.Device().synchronize()
    for _ in range(TURNS):
        with one:
            y.data.memset_async(0, y.nbytes, one)
            kernel((2,), (THREADS,), (x, y, np.int32(N)))
            x += 1
            made.record()
        other.wait_event(made)
        with other:
            total += y
            used.record()
        one.wait_event(used)
    blocks = np.zeros((BLOCKS, THREADS), "f4")
    blocks.ravel()[:N] = host
    expected = np.zeros(N, "f4")
    for _ in range(TURNS):
        expected += blocks[:, ::-1].ravel()[:N]
        blocks.ravel()[:N] += 1
    assert (cp.asnumpy(total, stream=other) == expected).all()


def norms(cp: Any) -> None:
    """Rows come by way of one pinned buffer; the sums of their squares go back by another."""
    module = cp.RawModule(
        code=r"""extern "C" __global__ void square(const float* x, float* y, int n) {
            int i = blockIdx.x * 128 + threadIdx.x;
            if (i < n) y[i] = x[i] * x[i];
        }
        extern "C" __global__ void add(const float* y, float* sums, int n) {
            __shared__ float held[128];
            float own = 0;
            for (int k = blockIdx.x * 128 + threadIdx.x; k < n; k += gridDim.x * 128) own += y[k];
            held[threadIdx.x] = own;
            __syncthreads();
            for (int step = 64; step > 0; step >>= 1) {
                if (threadIdx.x < step) held[threadIdx.x] += held[threadIdx.x + step];
                __syncthreads();
            }
            if (threadIdx.x == 0) atomicAdd(sums, held[0]);
        }"""
    )
    square, add = module.get_function("square"), module.get_function("add")
    (stream, side), copied, ready = _streams(cp), cp.cuda.Event(), cp.cuda.Event()
    buffer, back = _pinned(cp, N), _pinned(cp, 2)
    hosts = [_host(number) for number in range(TURNS)]
    with stream:
        total, sums = cp.zeros(2, "f4"), cp.empty(2, "f4")
        x, y = cp.empty(N, "f4"), cp.empty(N, "f4")
        sums.data.memset_async(0, sums.nbytes, stream)
    for host in hosts:
        buffer[:] = host
        with stream:
            x.data.copy_from_host_async(buffer.ctypes.data, buffer.nbytes, stream)
            copied.record()
            square((BLOCKS,), (THREADS,), (x, y, np.int32(N)))
            add((2,), (THREADS,), (y, sums, np.int32(N)))
            total += sums
            ready.record()
        copied.synchronize()
    side.wait_event(ready)
    total.data.copy_to_host_async(back.ctypes.data, back.nbytes, side)
    side.synchronize()
    squares = np.cumsum([(host * host).sum() for host in hosts])
    found = float(back[0])
    cp.cuda.Device().synchronize()  # a wait of the end, not of the result
    assert found == squares.sum()


def stencil(cp: Any) -> None:
    """Steps of a mean of three along a line go to and fro between two arrays and two streams."""
    kernel = cp.RawKernel(
        r"""extern "C" __global__ void mean(const float* x, float* y, int n) {
            __shared__ float held[130];
            int i = blockIdx.x * 128 + threadIdx.x, t = threadIdx.x + 1;
            held[t] = i < n ? x[i] : 0;
            if (threadIdx.x == 0) held[0] = i > 0 ? x[i - 1] : 0;
            if (threadIdx.x == 127) held[129] = n > i + 1 ? x[i + 1] : 0;
            __syncthreads();
            float sum = held[t - 1] + held[t] + held[t + 1];
            __syncthreads();
            held[128 - threadIdx.x] = sum;
            __syncthreads();
            int j = blockIdx.x * 128 + 127 - threadIdx.x;
            if (j < n) y[j] += held[t];
        }""",
        "mean",
    )
    host = _host(2)
    streams, done = _streams(cp), [cp.cuda.Event() for _ in range(2)]
    x, y = cp.asarray(host), cp.zeros(N, "f4")
    cp.cuda.Device().synchronize()
    arrays = [x, y]
    for step in range(4):
        here, there = step % 2, 1 - step % 2
        if step:
            streams[here].wait_event(done[there])
        with streams[here]:
            if step:
                arrays[there].data.memset_async(0, y.nbytes, streams[here])
            kernel((BLOCKS,), (THREADS,), (arrays[here], arrays[there], np.int32(N)))
            done[here].record()
    back = _pinned(cp, N)
    arrays[0].data.copy_to_host_async(back.ctypes.data, back.nbytes, streams[1])
    streams[1].synchronize()
    for _ in range(4):
        around = np.pad(host, 1)
        host = around[:-2] + around[1:-1] + around[2:]
    found = back.copy()
    cp.cuda.Device().synchronize()  # a wait of the end, not of the result
    assert (found == host).all()


def histogram(cp: Any) -> None:
    """Blocks count in shared memory, on three streams that begin after one and end before it."""
    kernel = cp.RawKernel(
        r"""extern "C" __global__ void count(const float* x, int* found, int n, int m) {
            __shared__ int held[64];
            if (m > threadIdx.x) held[threadIdx.x] = 0;
            __syncthreads();
            int i = blockIdx.x * 128 + threadIdx.x;
            if (i < n) atomicAdd(&held[(int)x[i] + 4], 1);
            __syncthreads();
            if (threadIdx.x < m) atomicAdd(&found[threadIdx.x], held[threadIdx.x]);
        }""",
        "count",
    )
    host, back = _host(3), _pinned(cp, 9)
    first, *others = _streams(cp, 4)
    ready, done = cp.cuda.Event(), [cp.cuda.Event() for _ in others]
    with first:
        x, part = cp.asarray(host), cp.zeros((len(others), 9), "i4")
        total = cp.empty(9, "i4")
        total.data.memset_async(0, total.nbytes, first)
        ready.record()
    for row, (stream, end) in enumerate(zip(others, done, strict=True)):
        stream.wait_event(ready)
        with stream:
            kernel((BLOCKS,), (THREADS,), (x, part[row], np.int32(N), np.int32(9)))
            end.record()
    for end in done:
        first.wait_event(end)
    with first:
        total += part.sum(axis=0, dtype="i4")
        values = total.astype("f4")
        values.data.copy_to_host_async(back.ctypes.data, back.nbytes, first)
    first.synchronize()
    expected = 3 * np.bincount(host.astype(int) + 4, minlength=9)
    found = back.copy()
    cp.cuda.Device().synchronize()  # a wait of the end, not of the result
    assert (found == expected).all()


def transpose(cp: Any) -> None:
    """Tiles are turned in shared memory, while the next matrix comes."""
    kernel = cp.RawKernel(
        r"""extern "C" __global__ void tiles(const float* x, float* y, int n, int m) {
            __shared__ float held[16][17];
            for (int top = 0; n > top; top += 16) {
                int r = top + threadIdx.y, c = blockIdx.x * 16 + threadIdx.x;
                held[threadIdx.y][threadIdx.x] = r < n && c < m ? x[r * m + c] : 0;
                __syncthreads();
                r = top + threadIdx.x, c = blockIdx.x * 16 + threadIdx.y;
                if (r < n && c < m) y[c * n + r] += held[threadIdx.x][threadIdx.y];
                __syncthreads();
            }
        }""",
        "tiles",
    )
    rows, columns = 50, 40
    hosts = [_host(number, rows, columns) for number in range(TURNS)]
    (compute, copies), ready = _streams(cp), cp.cuda.Event()
    used, buffer = cp.cuda.Event(), _pinned(cp, rows * columns)
    x = cp.empty((rows, columns), "f4")
    y, total = cp.empty((columns, rows), "f4"), cp.zeros((columns, rows), "f4")
    y.data.memset_async(0, y.nbytes, cp.cuda.Stream.null)
    cp.cuda.Device().synchronize()
    for host in hosts:
        ready.synchronize()
        buffer[:] = host.ravel()
        copies.wait_event(used)
        x.data.copy_from_host_async(buffer.ctypes.data, buffer.nbytes, copies)
        ready.record(copies)
        compute.wait_event(ready)
        with compute:
            sizes = np.int32(rows), np.int32(columns)
            kernel((3,), (16, 16), (x, y, *sizes))
            total += y
            used.record()
    expected = np.cumsum(hosts, axis=0).sum(axis=0).T
    found = cp.asnumpy(total, stream=compute)
    cp.cuda.Device().synchronize()  # a wait of the end, not of the result
    assert (found == expected).all()


def product(cp: Any) -> None:
    """A product by tiles, and its own_x on a stream beside."""
    kernel = cp.RawKernel(
        r"""extern "C" __global__ void product(const float* a, const float* b, float* c, int n) {
            __shared__ float left[16][16], right[16][16];
            int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;
            float sum = 0;
            for (int k = 0; n > k; k += 16) {
                int x = k + threadIdx.x, y = k + threadIdx.y;
                left[threadIdx.y][threadIdx.x] = row < n && x < n ? a[row * n + x] : 0;
                right[threadIdx.y][threadIdx.x] = y < n && column < n ? b[y * n + column] : 0;
                __syncthreads();
                for (int i = 0; i < 16; i++) sum += left[threadIdx.y][i] * right[i][threadIdx.x];
                __syncthreads();
            }
            if (row < n && column < n) c[row * n + column] += sum;
        }""",
        "product",
    )
    n = 40
    host = _host(5, n, n)
    (one, other), made, used = _streams(cp), cp.cuda.Event(), cp.cuda.Event()
    a, c, total = cp.asarray(host), cp.empty((n, n), "f4"), cp.zeros((n, n), "f4")
    cp.cuda.Device().synchronize()
    for _ in range(TURNS):
        one.wait_event(used)
        with one:
            c.data.memset_async(0, c.nbytes, one)
            kernel((3, 3), (16, 16), (a, a, c, np.int32(n)))
            a += 1
            made.record()
        other.wait_event(made)
        with other:
            total += c
            used.record()
    expected = sum((host + k) @ (host + k) for k in range(TURNS))
    assert (cp.asnumpy(total, stream=other) == expected).all()


def scan(cp: Any) -> None:
    """Sums along blocks, whose last values a second kernel adds to the blocks behind them."""
    module = cp.RawModule(
        code=r"""extern "C" __global__ void sums(const float* x, float* y, float* ends, int n) {
            __shared__ float held[128];
            int t = threadIdx.x, i = blockIdx.x * 128 + t;
            held[t] = i < n ? x[i] : 0;
            __syncthreads();
            for (int step = 1; step < 128; step *= 2) {
                float more = t >= step ? held[t - step] : 0;
                __syncthreads();
                held[t] += more;
                __syncthreads();
            }
            if (i < n) y[i] = held[t];
            if (t == 127) ends[blockIdx.x] += held[t];
        }
        extern "C" __global__ void add(const float* ends, const float* y, float* z, int n) {
            int i = blockIdx.x * 128 + threadIdx.x;
            float before = 0;
            for (int b = 0; b < blockIdx.x; b++) before += ends[b];
            if (i < n) z[i] += before + y[i];
        }"""
    )
    host = _host(6)
    sums, add = module.get_function("sums"), module.get_function("add")
    (one, other), made, used = _streams(cp), cp.cuda.Event(), cp.cuda.Event()
    x, y, z = cp.asarray(host), cp.empty(N, "f4"), cp.zeros(N, "f4")
    ends = cp.empty(BLOCKS, "f4")
    cp.cuda.Device().synchronize()
    for _ in range(TURNS):
        with one:
            ends.data.memset_async(0, ends.nbytes, one)
            sums((BLOCKS,), (THREADS,), (x, y, ends, np.int32(N)))
            x += 1
            made.record()
        other.wait_event(made)
        with other:
            add((BLOCKS,), (THREADS,), (ends, y, z, np.int32(N)))
            used.record()
        one.wait_event(used)
    expected = sum(np.cumsum(host + k) for k in range(TURNS))
    assert (cp.asnumpy(z, stream=other) == expected).all()


def sort(cp: Any) -> None:
    """Blocks are sorted by exchanges; each result goes home while the next is computed."""
    kernel = cp.RawKernel(
        r"""extern "C" __global__ void exchange(const float* x, float* y, int n) {
            __shared__ float held[128];
            int t = threadIdx.x, i = blockIdx.x * 128 + t;
            held[t] = i < n ? x[i] : -1000;
            for (int size = 2; size <= 128; size *= 2) {
                for (int step = size / 2; step > 0; step /= 2) {
                    __syncthreads();
                    int with = t ^ step;
                    if (with > t && (held[t] > held[with]) == ((t & size) == 0)) {
                        float own = held[t];
                        held[t] = held[with];
                        held[with] = own;
                    }
                }
            }
            __syncthreads();
            if (i < n) y[i] += held[127 - t];
        }""",
        "exchange",
    )
    hosts = [_host(number) for number in range(TURNS)]
    (compute, copies), ready, copied = _streams(cp), cp.cuda.Event(), cp.cuda.Event()
    backs = [_pinned(cp, N) for _ in hosts]
    with compute:
        x, y, last = cp.empty(N, "f4"), cp.empty(N, "f4"), cp.zeros(N, "f4")
    for host, back in zip(hosts, backs, strict=True):
        with compute:
            x.set(host)
            y.data.memset_async(0, y.nbytes, compute)
            kernel((BLOCKS,), (THREADS,), (x, y, np.int32(N)))
            last += y
            ready.record()
        copies.wait_event(ready)
        last.data.copy_to_host_async(back.ctypes.data, back.nbytes, copies)
        copied.record(copies)
        compute.wait_event(copied)
    copies.synchronize()
    found = [back.copy() for back in backs]
    cp.cuda.Device().synchronize()  # a wait of the end, not of the result
    expected = np.zeros(N, "f4")
    for host, each in zip(hosts, found, strict=True):
        blocks = [np.sort(host[k : k + THREADS])[::-1] for k in range(0, N, THREADS)]
        expected = expected + np.concatenate(blocks)
        assert (each == expected).all()


def weights(cp: Any) -> None:
    """Blocks load weights into shared memory; three streams compute parts of one array."""
    kernel = cp.RawKernel(
        r"""extern "C" __global__ void weigh(
            const float* x, const float* given, float* y, int n, int m
        ) {
            __shared__ float held[128], own_x[128];
            if (threadIdx.x < m) held[threadIdx.x] = given[threadIdx.x];
            int i = blockIdx.x * 128 + threadIdx.x;
            own_x[127 - threadIdx.x] = i < n ? x[i] : 0;
            __syncthreads();
            float own = own_x[127 - threadIdx.x], sum = 0;
            for (int k = 99; k >= 0; k--) sum += held[k] * own;
            __syncthreads();
            own_x[threadIdx.x] = sum;
            __syncthreads();
            int j = blockIdx.x * 128 + 127 - threadIdx.x;
            if (j < n) y[j] += own_x[127 - threadIdx.x];
        }""",
        "weigh",
    )
    host, given = _host(8), _host(9, 100)
    streams, ready = _streams(cp, 3), cp.cuda.Event()
    main, done = cp.cuda.Stream(non_blocking=True), [cp.cuda.Event() for _ in streams]
    with main:
        x, coefficients = cp.asarray(host), cp.asarray(given)
        y, total = cp.empty(3 * N, "f4"), cp.zeros(N, "f4")
        y.data.memset_async(0, y.nbytes, main)
        ready.record()
    for number, stream in enumerate(streams):
        stream.wait_event(ready)
        with stream:
            part = y[number * N : (number + 1) * N]
            sizes = np.int32(N), np.int32(100)
            kernel((BLOCKS,), (THREADS,), (x, coefficients, part, *sizes))
            done[number].record()
    for end in done:
        main.wait_event(end)
    with main:
        for number in range(3):
            total += y[number * N : (number + 1) * N]
    main.synchronize()
    assert (cp.asnumpy(total) == 3 * given.sum() * host).all()


def softmax(cp: Any) -> None:
    """Rows by their largest value and their sum; one thread's stream makes what another's uses."""
    kernel = cp.RawKernel(
        r"""extern "C" __global__ void rows(const float* x, float* y, int n) {
            __shared__ float held[128];
            int t = threadIdx.x;
            held[t] = t < n ? x[blockIdx.x * n + t] : -1000;
            __syncthreads();
            for (int step = 64; step > 0; step /= 2) {
                if (t < step) held[t] = fmaxf(held[t], held[t + step]);
                __syncthreads();
            }
            float most = held[0];
            if (t < n) y[blockIdx.x * n + t] += x[blockIdx.x * n + t] - most;
        }""",
        "rows",
    )
    rows, columns = 20, 100
    host = _host(10, rows, columns)
    (one, other), made, used = _streams(cp), cp.cuda.Event(), cp.cuda.Event()
    x, y = cp.asarray(host), cp.empty((rows, columns), "f4")
    total = cp.zeros((rows, columns), "f4")
    cp.cuda.Device().synchronize()
    for _ in range(TURNS):
        with one:
            y.data.memset_async(0, y.nbytes, one)
            kernel((rows,), (THREADS,), (x, y, np.int32(columns)))
            x *= 2
            made.record()
        other.wait_event(made)
        with other:
            total += y
            used.record()
        one.wait_event(used)
    expected = 7 * (host - host.max(axis=1, keepdims=True))
    assert (cp.asnumpy(total, stream=other) == expected).all()


PROGRAMS = (
    turn, norms, stencil, histogram, transpose, product, scan, sort, weights, softmax
)  # fmt: skip
