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
__global__ void blelloch_scan(const int* x, int* y) {  // exclusive, of 64 numbers
    __shared__ volatile int s[64];
    int t = threadIdx.x, by = 1;
    s[2 * t] = x[2 * t]; s[2 * t + 1] = x[2 * t + 1];
    for (int d = 32; d > 0; d >>= 1, by *= 2)
        if (t < d) s[by * (2 * t + 2) - 1] += s[by * (2 * t + 1) - 1];
    if (t == 0) s[63] = 0;
    for (int d = 1; d < 64; d *= 2) {
        by >>= 1;
        if (t < d) {
            int a = by * (2 * t + 1) - 1, b = by * (2 * t + 2) - 1, kept = s[a];
            s[a] = s[b];
            s[b] += kept;
        }
    }
    y[2 * t] = s[2 * t]; y[2 * t + 1] = s[2 * t + 1];
}
__global__ void segmented_scan(const int* x, const int* heads, int* y) {
    __shared__ volatile int s[32], flag[32];
    int lane = threadIdx.x;
    s[lane] = x[lane];
    flag[lane] = heads[lane];
    for (int by = 1; by < 32; by *= 2)
        if (lane >= by) {
            if (!flag[lane]) s[lane] += s[lane - by];
            flag[lane] |= flag[lane - by];
        }
    y[lane] = s[lane];
}
__global__ void first_tells_all(const int* x, int* y) {
    __shared__ int told[2];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane == 0) told[warp] = x[warp];
    y[threadIdx.x] = told[warp];
}
__global__ void last_tells_all(const int* x, int* y) {
    __shared__ volatile int told;
    if (threadIdx.x == 31) told = x[5];
    y[threadIdx.x] = told;
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
__global__ void bitonic_sort(const int* x, int* y) {
    __shared__ volatile int s[64];
    int t = threadIdx.x;
    s[t] = x[t]; s[t + 32] = x[t + 32];
    for (int size = 2; size <= 64; size *= 2)
        for (int by = size / 2; by > 0; by /= 2) {
            int place = 2 * t - (t & (by - 1)), a = s[place], b = s[place + by];
            if ((a > b) == ((place & size) == 0)) { s[place] = b; s[place + by] = a; }
        }
    y[t] = s[t]; y[t + 32] = s[t + 32];
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
__global__ void transpose(const int* x, int* y) {
    __shared__ volatile int tile[32][33];
    int lane = threadIdx.x;
    for (int i = 0; i < 32; i++) tile[i][lane] = x[32 * i + lane];
    for (int i = 0; i < 32; i++) y[32 * i + lane] = tile[lane][i];
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
__global__ void election(int* y) {  // by who writes last, until all were elected
    __shared__ volatile int winner;
    int round = 0;
    for (bool waits = true; waits; round++) {
        winner = threadIdx.x;
        if (winner == threadIdx.x) { waits = false; y[threadIdx.x] = round; }
    }
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
__global__ void argmax(const float* x, int* y) {
    __shared__ volatile float s[64];
    __shared__ volatile int at[64];
    int t = threadIdx.x;
    s[t] = x[t]; at[t] = t;
    __syncthreads();
    if (t < 32)
        for (int by = 32; by > 0; by /= 2)
            if (t < by && s[t + by] > s[t]) { s[t] = s[t + by]; at[t] = at[t + by]; }
    if (t == 0) *y = at[0];
}
__global__ void ballot(const int* x, unsigned int* y) {
    __shared__ unsigned int votes;
    if (threadIdx.x == 0) votes = 0;
    if (x[threadIdx.x] > 0) atomicOr(&votes, 1u << threadIdx.x);
    y[threadIdx.x] = votes;
}
__global__ void any_of_warp(const int* x, int* y) {
    __shared__ volatile int is_any[4];
    int warp = threadIdx.x / 32;
    is_any[warp] = 0;
    if (x[threadIdx.x] > 90) is_any[warp] = 1;
    y[threadIdx.x] = is_any[warp];
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
__global__ void jacobi(const double* x, double* y, int times) {
    __shared__ double s[34];
    int t = threadIdx.x + 1;
    s[t] = x[t];
    if (t == 1) { s[0] = x[0]; s[33] = x[33]; }
    for (int i = 0; i < times; i++) s[t] = (s[t - 1] + s[t + 1]) / 2;
    y[t] = s[t];
}
__global__ void list_ranks(const int* next, int* y) {  // Wyllie's pointer jumping
    __shared__ volatile int to[32], rank[32];
    int t = threadIdx.x;
    to[t] = next[t];
    rank[t] = next[t] != t;
    for (int i = 0; i < 5; i++) {
        rank[t] += rank[to[t]];
        to[t] = to[to[t]];
    }
    y[t] = rank[t];
}
__global__ void fourier(const float2* x, float2* y) {  // of 32 points, radix 2
    __shared__ volatile float re[32], im[32];
    int t = threadIdx.x, from = __brev(t) >> 27;
    re[t] = x[from].x; im[t] = x[from].y;
    for (int half = 1; half < 32; half *= 2)
        if (t < 16) {
            int a = t / half * 2 * half + t % half, b = a + half;
            float angle = -3.14159265358979f * (t % half) / half, c = cosf(angle), s = sinf(angle);
            float r = c * re[b] - s * im[b], i = c * im[b] + s * re[b];
            re[b] = re[a] - r; im[b] = im[a] - i;
            re[a] += r; im[a] += i;
        }
    y[t].x = re[t]; y[t].y = im[t];
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
check("blelloch_scan", of("blelloch_scan", 64, 1, 32, x), ints[:64].cumsum() - ints[:64])
heads = (ints[100:132] % 5 == 0).astype("i4")
parts = np.split(ints[:32], np.flatnonzero(heads))
found = of("segmented_scan", 32, 1, 32, x, cp.asarray(heads))
check("segmented_scan", found, np.concatenate([p.cumsum() for p in parts]))
check("first_tells_all", of("first_tells_all", 64, 1, 64, x), np.repeat(ints[:2], 32))
check("last_tells_all", of("last_tells_all", 32, 1, 32, x), np.full(32, ints[5]))
check("each_tells_all", of("each_tells_all", 32, 1, 32, x), np.full(32, ints[:32].sum()))
count, kept = cp.zeros(1, "i4"), cp.zeros(4096, "i4")
call("compaction", 8, 128, x, np.int32(1000), count, kept)
check("compaction", kept.get()[: int(count[0])], ints[:1000][ints[:1000] % 3 == 0])
check("bitonic_sort", of("bitonic_sort", 64, 1, 32, x), np.sort(ints[:64]))
check("odd_even_sort", of("odd_even_sort", 32, 1, 32, x), np.sort(ints[:32]))
check("rank_sort", of("rank_sort", 32, 1, 32, x), np.sort(ints[:32]))
check("transpose", of("transpose", 1024, 1, 32, x), ints[:1024].reshape(32, 32).T.ravel())
bytes_ = rng.integers(0, 8, 3000).astype("u1")
found = of("tagged_histogram", 256, 1, 32, cp.asarray(bytes_), np.int32(3000))
check("tagged_histogram", found, np.bincount(bytes_, minlength=256))
check("election", np.sort(of("election", 32, 1, 32)), np.arange(32))
dense = np.where(rng.random((50, 70)) < 0.5, rng.integers(1, 9, (50, 70)), 0).astype("f4")
starts = np.concatenate([[0], (dense != 0).sum(1).cumsum()]).astype("i4")
columns, vector = np.nonzero(dense)[1].astype("i4"), ints[:70].astype("f4")
given = [cp.asarray(a) for a in (starts, columns, dense[dense != 0], vector)]
found = of("csr_product", 50, 13, 128, *given, np.int32(50), dtype="f4")
check("csr_product", found, dense @ vector)
floats = rng.random(64).astype("f4")
check("argmax", of("argmax", 1, 1, 64, cp.asarray(floats))[0], floats.argmax())
signs = ints[:32] % 2
votes = int((signs.astype("u4") << np.arange(32, dtype="u4")).sum())
check("ballot", of("ballot", 32, 1, 32, cp.asarray(signs), dtype="u4"), np.full(32, votes))
any_ = (ints[:128].reshape(4, 32) > 90).any(1)
check("any_of_warp", of("any_of_warp", 128, 1, 128, x), np.repeat(any_, 32).astype("i4"))
so_far, wanted = np.int32(1), []
with np.errstate(over="ignore"):
    for value in ints[:32]:
        so_far = np.int32(so_far * np.int32(3) + value)
        wanted.append(so_far)
check("carry", of("carry", 32, 1, 32, x), np.array(wanted))
y = cp.zeros(32, "i4")
call("rotation", 1, 32, x, y, np.int32(11))
check("rotation", y.get(), np.roll(ints[:32], -11))
held = rng.random(34)
y = cp.zeros(34)
call("jacobi", 1, 32, cp.asarray(held), y, np.int32(9))
for _ in range(9):
    held[1:-1] = (held[:-2] + held[2:]) / 2
check("jacobi", y.get()[1:-1], held[1:-1])
order = rng.permutation(32)
following = np.empty(32, "i4")
following[order[:-1]], following[order[-1]] = order[1:], order[-1]
ranks = np.empty(32, "i4")
ranks[order] = np.arange(31, -1, -1)
check("list_ranks", of("list_ranks", 32, 1, 32, cp.asarray(following)), ranks)
points = (rng.random(32) + 1j * rng.random(32)).astype("c8")
found = of("fourier", 32, 1, 32, cp.asarray(points), dtype="c8")
check("fourier", np.allclose(found, np.fft.fft(points), atol=1e-5), True)
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
