"""Kernels that trust the threads of a warp to run in step, as they were published and are used.

Each is written anew from its algorithm, without a ``__syncwarp``; one process runs them all and
compares with NumPy. A line of output is the kernel's name, and whether its result was right.
"""

from __future__ import annotations

SOURCE = r"""
extern "C" {
// Harris, "Optimizing parallel reduction in CUDA": the last warp without barriers.
__device__ void last_warp(volatile int* s, int t) {
    s[t] += s[t + 32]; s[t] += s[t + 16]; s[t] += s[t + 8];
    s[t] += s[t + 4]; s[t] += s[t + 2]; s[t] += s[t + 1];
}
__global__ void reduction(const int* x, int* y) {
    __shared__ int s[256];
    int t = threadIdx.x;
    s[t] = x[blockIdx.x * 256 + t];
    __syncthreads();
    for (int half = 128; half > 32; half >>= 1) {
        if (t < half) s[t] += s[t + half];
        __syncthreads();
    }
    if (t < 32) last_warp(s, t);
    if (t == 0) y[blockIdx.x] = s[0];
}
__global__ void plain_reduction(const int* x, int* y) {  // of dynamic memory that is not volatile
    extern __shared__ int all[];
    int t = threadIdx.x;
    all[t] = x[t]; all[t + 32] = x[t + 32];
    all[t] += all[t + 32];
    if (t < 16) {
        all[t] += all[t + 16]; all[t] += all[t + 8]; all[t] += all[t + 4];
        all[t] += all[t + 2]; all[t] += all[t + 1];
    }
    y[t] = all[0];
}
// Hillis and Steele's scan, padded with zeros so that no thread needs a condition.
__global__ void scan(const int* x, int* y) {
    __shared__ volatile int s[4][48];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    volatile int* mine = s[warp] + 16;
    if (lane < 16) s[warp][lane] = 0;
    mine[lane] = x[threadIdx.x];
    mine[lane] += mine[lane - 1]; mine[lane] += mine[lane - 2]; mine[lane] += mine[lane - 4];
    mine[lane] += mine[lane - 8]; mine[lane] += mine[lane - 16];
    y[threadIdx.x] = mine[lane];
}
__global__ void scan_with_conditions(const int* x, int* y) {
    __shared__ int s[32];
    int lane = threadIdx.x;
    s[lane] = x[lane];
    for (int by = 1; by < 32; by *= 2)
        if (lane >= by) s[lane] += s[lane - by];
    y[lane] = s[lane];
}
__global__ void each_tells_all(const int* x, int* y) {
    __shared__ volatile int told;
    int sum = 0;
    for (int i = 0; i < 32; i++) {
        if (threadIdx.x == i) told = x[i] + sum;
        sum = told;
    }
    y[threadIdx.x] = sum;
}
// Aggregated atomics: one thread counts for its warp, and tells where its places begin.
__global__ void compaction(const int* x, int n, int* count, int* y) {
    __shared__ volatile int base[4], before[4][33];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, i = blockIdx.x * 128 + threadIdx.x;
    int keeps = i < n && x[i] % 3 == 0;
    before[warp][lane + 1] = keeps;
    if (lane == 0) before[warp][0] = 0;
    for (int by = 1; by < 32; by *= 2)
        if (lane + 1 > by) before[warp][lane + 1] += before[warp][lane + 1 - by];
    if (lane == 31) base[warp] = atomicAdd(count, before[warp][32]);
    if (keeps) y[base[warp] + before[warp][lane]] = x[i];
}
__global__ void odd_even_sort(const int* x, int* y) {
    __shared__ int s[33];
    int t = threadIdx.x;
    s[t] = x[t];
    for (int round = 0; round < 32; round++) {
        if (t % 2 == round % 2 && t < 31 && s[t] > s[t + 1]) {
            int kept = s[t];
            s[t] = s[t + 1];
            s[t + 1] = kept;
        }
    }
    y[t] = s[t];
}
__global__ void rank_sort(const int* x, int* y) {  // in place: all have read before any writes
    __shared__ int s[32];
    int t = threadIdx.x, rank = 0;
    s[t] = x[t];
    for (int i = 0; i < 32; i++) rank += s[i] < s[t] || (s[i] == s[t] && i < t);
    s[rank] = s[t];
    y[t] = s[t];
}
// Podlozhnyuk's histogram for GPUs without atomics in shared memory: who wrote last has counted.
__global__ void tagged_histogram(const unsigned char* x, int n, int* y) {
    __shared__ volatile unsigned int s[256];
    unsigned int lane = threadIdx.x, tag = lane << 27;
    for (int i = lane; i < 256; i += 32) s[i] = 0;
    for (int i = lane; i < n; i += 32) {
        unsigned int count;
        do {
            count = tag | ((s[x[i]] & 0x07ffffffu) + 1);
            s[x[i]] = count;
        } while (s[x[i]] != count);
    }
    for (int i = lane; i < 256; i += 32) y[i] = s[i] & 0x07ffffffu;
}
// Bell and Garland's product of a matrix in CSR and a vector: a warp a row.
__global__ void csr_product(const int* starts, const int* columns, const float* values,
                            const float* x, int rows, float* y) {
    __shared__ volatile float sums[144];
    int lane = threadIdx.x % 32, row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= rows) return;
    float sum = 0;
    for (int i = starts[row] + lane; i < starts[row + 1]; i += 32) sum += values[i] * x[columns[i]];
    sums[threadIdx.x] = sum;
    if (lane < 16) sums[threadIdx.x] = sum += sums[threadIdx.x + 16];
    if (lane < 8) sums[threadIdx.x] = sum += sums[threadIdx.x + 8];
    if (lane < 4) sums[threadIdx.x] = sum += sums[threadIdx.x + 4];
    if (lane < 2) sums[threadIdx.x] = sum += sums[threadIdx.x + 2];
    if (lane < 1) y[row] = sums[threadIdx.x] + sums[threadIdx.x + 1];
}
__global__ void ballot(const int* x, unsigned int* y) {
    __shared__ unsigned int votes;
    if (threadIdx.x == 0) votes = 0;
    if (x[threadIdx.x] > 0) atomicOr(&votes, 1u << threadIdx.x);
    y[threadIdx.x] = votes;
}
__global__ void carry(const int* x, int* y) {  // each goes on where the one before it has stopped
    __shared__ int s[33];
    int t = threadIdx.x;
    if (t == 0) s[0] = 1;
    for (int i = 0; i < 32; i++) {
        int so_far = s[i];
        if (t != i) continue;
        s[i + 1] = so_far * 3 + x[t];
    }
    y[t] = s[t + 1];
}
__global__ void rotation(const int* x, int* y, int times) {
    __shared__ volatile int s[32];
    int t = threadIdx.x;
    s[t] = x[t];
    while (times--) s[t] = s[(t + 1) % 32];
    y[t] = s[t];
}
// Aila and Laine's persistent threads: a warp takes the next rows when it is done with some.
__global__ void persistent(const int* x, int n, int* next, int* y) {
    __shared__ volatile int taken[2];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (;;) {
        if (lane == 0) taken[warp] = atomicAdd(next, 32);
        int i = taken[warp] + lane;
        if (i - lane >= n) return;
        if (i < n) {
            int steps = 0;
            for (int v = x[i]; v != 1; steps++) v = v % 2 ? 3 * v + 1 : v / 2;
            y[i] = steps;
        }
    }
}
__global__ void locked(int* y) {  // one after another, in the form that does not hang
    __shared__ int lock;
    __shared__ volatile int total, order[64];
    if (threadIdx.x == 0) { lock = 0; total = 0; }
    __syncthreads();
    for (bool is_done = false; !is_done;)
        if (atomicCAS(&lock, 0, 1) == 0) {
            int old = total;
            order[old] = threadIdx.x;
            total = old + 1;
            atomicExch(&lock, 0);
            is_done = true;
        }
    __syncthreads();
    y[threadIdx.x] = order[threadIdx.x];
}
__global__ void spinning(int* y) {  // in the form that needs threads to go on by themselves
    __shared__ int lock, total;
    if (threadIdx.x == 0) lock = total = 0;
    __syncthreads();
    while (atomicCAS(&lock, 0, 1) != 0) {}
    y[threadIdx.x] = total++;
    atomicExch(&lock, 0);
}
__global__ void flagged(const int* x, int* y) {  // the second warp waits for the first
    __shared__ volatile int value, flag;
    if (threadIdx.x == 0) flag = 0;
    __syncthreads();
    if (threadIdx.x == 40) { while (!flag) {} *y = value; }
    if (threadIdx.x == 63) { value = x[3]; __threadfence_block(); flag = 1; }
}
__device__ int ways(volatile int* s, int lane, int depth) {  // recursion
    if (depth == 0) return 1;
    s[lane] = ways(s, lane, depth - 1);
    int other = s[lane ^ 1];
    return other + (lane & 1);
}
__global__ void recursion(int* y) {
    __shared__ int s[32];
    y[threadIdx.x] = ways(s, threadIdx.x, 3 + (threadIdx.x & 16) / 16);
}
}
// Templates, and the memory that they have each for itself.
template <class T, int n> __global__ void of_type(const T* x, T* y) {
    __shared__ T s[n];
    int t = threadIdx.x;
    s[t] = x[t];
    for (int by = n / 2; by > 0; by /= 2)
        if (t < by) s[t] += s[t + by];
    y[t] = s[0];
}
"""
GLOBAL = r"""
extern "C" __global__ void in_global_memory(volatile int* s, int* y) {  // no shared memory at all
    int t = threadIdx.x + blockIdx.x * 32;
    s[t] = t * t;
    if (threadIdx.x < 16) {
        s[t] += s[t + 16]; s[t] += s[t + 8]; s[t] += s[t + 4]; s[t] += s[t + 2]; s[t] += s[t + 1];
    }
    y[t] = s[blockIdx.x * 32];
}
extern "C" __global__ void shift_register(int* s, int n, int* y) {  // as CuPy's max_len_seq
    int t = threadIdx.x;
    for (int i = 0; i < n; i++) {
        int next = s[(t + 1) % 32];
        if (t == 31) { y[i] = s[0]; next ^= s[3]; }
        s[t] = next;
    }
}
"""
CHECKS = r"""
names = ("of_type<float, 32>", "of_type<short, 16>")
module = cp.RawModule(code=SOURCE, options=("-std=c++17",), name_expressions=names)
rng = np.random.default_rng(0)
ints = rng.integers(0, 100, 4096).astype("i4")
x = cp.asarray(ints)

def call(name, grid, block, *arguments, shared=0):
    module.get_function(name)((grid,), (block,), arguments, shared_mem=shared)

def of(name, count, grid, block, *arguments, dtype="i4", shared=0):
    y = cp.zeros(count, dtype)
    call(name, grid, block, *arguments, y, shared=shared)
    return y.get()

def check(name, found, wanted):
    print(name, np.array_equal(found, wanted) or f"is {found}, not {wanted}")

check("reduction", of("reduction", 16, 16, 256, x), ints.reshape(16, 256).sum(1))
found = of("plain_reduction", 32, 1, 32, x, shared=256)
check("plain_reduction", found, np.full(32, ints[:64].sum()))
check("scan", of("scan", 128, 1, 128, x), ints[:128].reshape(4, 32).cumsum(1).ravel())
check("scan_with_conditions", of("scan_with_conditions", 32, 1, 32, x), ints[:32].cumsum())
check("each_tells_all", of("each_tells_all", 32, 1, 32, x), np.full(32, ints[:32].sum()))
count, kept = cp.zeros(1, "i4"), cp.zeros(4096, "i4")
call("compaction", 8, 128, x, np.int32(1000), count, kept)
check("compaction", kept.get()[: int(count[0])], ints[:1000][ints[:1000] % 3 == 0])
check("odd_even_sort", of("odd_even_sort", 32, 1, 32, x), np.sort(ints[:32]))
check("rank_sort", of("rank_sort", 32, 1, 32, x), np.sort(ints[:32]))
bytes_ = rng.integers(0, 8, 3000).astype("u1")
found = of("tagged_histogram", 256, 1, 32, cp.asarray(bytes_), np.int32(3000))
check("tagged_histogram", found, np.bincount(bytes_, minlength=256))
dense = np.where(rng.random((50, 70)) < 0.5, rng.integers(1, 9, (50, 70)), 0).astype("f4")
starts = np.concatenate([[0], (dense != 0).sum(1).cumsum()]).astype("i4")
columns, vector = np.nonzero(dense)[1].astype("i4"), ints[:70].astype("f4")
given = [cp.asarray(a) for a in (starts, columns, dense[dense != 0], vector)]
found = of("csr_product", 50, 13, 128, *given, np.int32(50), dtype="f4")
check("csr_product", found, dense @ vector)
signs = ints[:32] % 2
votes = int((signs.astype("u4") << np.arange(32, dtype="u4")).sum())
check("ballot", of("ballot", 32, 1, 32, cp.asarray(signs), dtype="u4"), np.full(32, votes))
so_far, wanted = np.int32(1), []
with np.errstate(over="ignore"):
    for value in ints[:32]:
        so_far = np.int32(so_far * np.int32(3) + value)
        wanted.append(so_far)
check("carry", of("carry", 32, 1, 32, x), np.array(wanted))
y = cp.zeros(32, "i4")
call("rotation", 1, 32, x, y, np.int32(11))
check("rotation", y.get(), np.roll(ints[:32], -11))
steps = []
for value in range(1, 301):
    steps.append(0)
    while value != 1:
        value = 3 * value + 1 if value % 2 else value // 2
        steps[-1] += 1
y = cp.zeros(300, "i4")
call("persistent", 2, 64, cp.arange(1, 301, dtype="i4"), np.int32(300), cp.zeros(1, "i4"), y)
check("persistent", y.get(), np.array(steps))
check("locked", np.sort(of("locked", 64, 1, 64)), np.arange(64))
check("spinning", np.sort(of("spinning", 64, 1, 64)), np.arange(64))
check("flagged", of("flagged", 1, 1, 64, x), ints[3:4])
lane = np.arange(32)
level = [np.ones(32, "i8")]
for _ in range(4):
    level.append(level[-1][lane ^ 1] + (lane & 1))
check("recursion", of("recursion", 32, 1, 32), np.where(lane < 16, level[3], level[4]))
found = of(names[0], 32, 1, 32, x.astype("f4"), dtype="f4")
check("of_type<float, 32>", found, np.full(32, ints[:32].sum()))
found = of(names[1], 16, 1, 16, x.astype("i2"), dtype="i2")
check("of_type<short, 16>", found, np.full(16, ints[:16].sum()))
module = cp.RawModule(code=GLOBAL)
squares = (np.arange(96) ** 2).reshape(3, 32).sum(1)
found = of("in_global_memory", 96, 3, 32, cp.zeros(96, "i4"))
check("in_global_memory", found, np.repeat(squares, 32))
state, wanted = [int(v) for v in ints[:32]], []
given, y = cp.asarray(ints[:32]), cp.zeros(100, "i4")
for _ in range(100):
    wanted.append(state[0])
    state = [*state[1:], state[0] ^ state[3]]
call("shift_register", 1, 32, given, np.int32(100), y)
check("shift_register", y.get(), np.array(wanted))
"""
PROGRAM = f"SOURCE, GLOBAL = {SOURCE!r}, {GLOBAL!r}\n{CHECKS}"
