"""CUDA C++ as users write it, compiled for the host: many kernels in one process."""

from __future__ import annotations

from pathlib import Path

from software_programs import START, needs_compiler, needs_cupy, run

from umem.host_cuda.kernels import for_host

pytestmark = [needs_cupy, needs_compiler]
CALL = """
def call(code, name="f", dtype="i4", size=32, threads=32, given=(), options=(), blocks=1):
    kernel = cp.RawKernel(code, name, options=("-std=c++17", *options))
    out = cp.zeros(size, dtype)
    kernel((blocks,), (threads,), (out, *given))
    return out

def refused(code, name="f"):
    try:
        cp.RawKernel(code, name).compile()
    except cp.cuda.compiler.CompileException as error:
        return str(error)
    raise SystemExit("not refused")
"""


def test_of_a_number_and_nan_min_and_max_give_the_number(kernel_cache: Path) -> None:
    run(
        CALL
        + r"""
nan = cp.nan
for kind in ("e", "f", "d"):
    a = cp.asarray([[4, nan, 1], [2, 3, nan]], kind)
    for order in (a, a[::-1]):
        assert cp.nanmin(order, axis=0).tolist() == [2, 3, 1], kind
        assert cp.nanmax(order, axis=0).tolist() == [4, 3, 1], kind
        assert cp.fmin(*order).tolist() == [2, 3, 1] and cp.fmax(*order).tolist() == [4, 3, 1]
        for f in (cp.minimum, cp.maximum):
            assert cp.isnan(f(*order)).tolist() == [False, True, True]
        for f in (cp.amin, cp.amax):
            assert cp.isnan(f(order, axis=0)).tolist() == [False, True, True]
    for f in ("min", "max", "fmin", "fmax"):
        k = cp.ElementwiseKernel("T x, T y", "T z", f"z = {f}(x, y)", f"one_{f}")
        x, y = cp.asarray([nan, 3, nan], kind), cp.asarray([3, nan, nan], kind)
        found = k(x, y)
        assert found[:2].tolist() == [3, 3] and cp.isnan(found[2])
code = '''#include <cuda_fp16.h>
#include <cuda_bf16.h>
extern "C" __global__ void f(float* x, float n, double d) {
  x[0] = min(n, 3.f); x[1] = min(3.f, n); x[2] = fminf(n, 3.f); x[3] = min(d, 3.);
  x[4] = max(n, 3.f); x[5] = fmaxf(3.f, n); x[6] = max(3.f, d);
  x[7] = __half2float(__hmin(__float2half(n), __float2half(3.f)));
  x[8] = __half2float(__hmax(__float2half(3.f), __float2half(n)));
  x[9] = __hmax(__float2bfloat16(n), __float2bfloat16(3.f));
  x[10] = isnan(__half2float(__hmin_nan(__float2half(3.f), __float2half(n)))) ? 3 : 0;
}'''
given = np.float32("nan"), np.float64("nan")
assert call(code, dtype="f4", size=11, threads=1, given=given).tolist() == [3] * 11
a = cp.asarray([5.0, nan], "f4")
cp.ElementwiseKernel("T v", "raw T x", "atomicMin(&x[0], v); atomicMax(&x[1], v)", "both")(
    cp.asarray([nan, 2, nan, 4], "f4"), a)
assert a.tolist() == [2, 4], a
""",
        kernel_cache,
    )


def test_min_and_max_take_the_types_that_arithmetic_gives(kernel_cache: Path) -> None:
    run(
        CALL
        + r"""
code = '''
template <class A, class B> __device__ int same(A a, B b) { return 0; }
template <class A> __device__ int same(A, A) { return 1; }
enum Size { SMALL = 2 };
extern "C" __global__ void f(int* x) {
  const short s = -1; const char c = -1; const unsigned int u = 1; const long long l = -1;
  x[0] = same(min(s, s), 1) && same(min(c, c), 1) && same(min(-1, u), u) && same(min(l, 1), l);
  x[1] = min(-1, u) == 1u && max(-1, u) == 0xffffffffu;  // as unsigned
  x[2] = min(l, 1) == -1 && min(1, l) == -1 && max(l, 1u) == 1;
  x[3] = min(1ull, l) == 1 && same(min(1ull, l), 1ull) && same(min(1.f, 2.), 1.);
  x[4] = min(SMALL, 3) == 2 && max(blockDim.x, 5) == 5 && max(2, 1.5f) == 2.f;
  x[5] = c < 0 && sizeof(long) == 8 && sizeof(size_t) == 8 && (char)200 < 0;
}'''
assert call(code, size=6, threads=1).tolist() == [1] * 6
code = '''
template <class T> __device__ T max(T a, T b) { return 7; }  // a program's own
extern "C" __global__ void f(int* x) { x[0] = max(1, 2); }'''
assert call(code, size=1, threads=1).tolist() == [7]
""",
        kernel_cache,
    )


def test_a_kernel_is_found_wherever_its_words_stand() -> None:
    source = """void __global__ one(int* x) {}
__global__ static void __launch_bounds__(64, 2) two(int* x) {}
void __launch_bounds__(f(2)) __global__ three(int* x) {}
__global__ __maxnreg__(32) void four(int* x) {}
extern "C" { extern "C" __global__ void five(int* x, cudaTextureObject_t) {} }
template <class T> void __global__ no(T* x) {}"""
    assert list(for_host(source).kernels) == ["one", "two", "three", "four", "five"]


def test_kernels_are_written_as_users_write_them(kernel_cache: Path) -> None:
    run(
        CALL
        + r"""
body = "{ x[threadIdx.x] += 1; }"
begin = 'extern "C" __global__ void '
one = [1] * 32
for code, options in (
    ('extern "C" void __global__ f(int* x) ' + body, ()),
    ('#define KERNEL(n) extern "C" __global__ \\\n void n(int* x) ' + body + '\nKERNEL(f)', ()),
    ('#define KERNEL extern "C" __global__ void\nKERNEL f(int* x) ' + body, ()),
    (f'#define NAME f\n{begin}NAME(int* x) {body}', ()),
    (f'#include <cuda_fp16.h>\n{begin}NAME(ARGUMENTS) {body}', ("-DNAME=f", "-DARGUMENTS=int* x")),
    (f'#define ARGUMENTS int* x, const int n\n{begin}f(ARGUMENTS) {body}', ()),
    (f'typedef int Kind; typedef Kind* Pointer; {begin}f(Pointer x) {body}', ()),
    (f'{begin}f(int* x, cudaTextureObject_t t, cudaSurfaceObject_t s) {body}', ()),
    (begin + 'f(int* x) { asm volatile("" ::: "memory"); x[threadIdx.x] = 1; }', ()),
    (f'#ifdef OFF\nvoid p() {{ asm("trap;"); }}\n#endif\n{begin}f(int* x) {body}', ()),
):
    given = [np.int32(1)] * ("const int n" in code) + [np.uint64(1)] * 2 * ("cudaTexture" in code)
    assert call(code, given=given, options=options).tolist() == one, code

names = "index", "y0", "gamma", "div", "remove", "signal", "read", "exp", "jn", "time", "abs"
code = "".join(f"{begin}{name}(int* x) {body}\n" for name in names)
plain = "".join(f"__global__ void {name}(int* x) {body}\n" for name in names)
for module in cp.RawModule(code=code), cp.RawModule(code=plain, name_expressions=names):
    for name in names:
        x = cp.zeros(32, "i4")
        module.get_function(name)((1,), (32,), (x,))
        assert x.tolist() == one, name
code = '''
typedef unsigned long long uint64_t; typedef long long int64_t; typedef unsigned int uint32_t;
typedef char int8_t; using uintptr_t = unsigned long long;
__device__ int index(int a) { return a; }
__device__ float y1;
__constant__ int signal = 3;
static __device__ double gamma(double x) { return x; }
extern "C" __global__ void f(uint64_t* x, uint64_t y) {
  y1 = 1; x[threadIdx.x] = index(y) * y1 * gamma(1) * (signal - 2) + uint32_t(0);
}
extern "C" __global__ void g(int64_t* x) { x[0] = int8_t(200) + (uintptr_t)300; }'''
assert call(code, dtype="u8", given=[np.uint64(1)]).tolist() == one
assert call(code, "g", dtype="i8", size=1, threads=1).tolist() == [244]
code += '__global__ void h(float* x) { x[0] = y1; }'
module, x = cp.RawModule(code=code, name_expressions=["h"]), cp.zeros(1, "f4")
cp.ndarray((1,), "f4", module.get_global("y1"))[:] = 5
module.get_function("h")((1,), (1,), (x,))
assert x.tolist() == [5]
code = '#define PTX(x) asm(x)\nextern "C" __global__ void f(int* x) { unsigned l; %s x[0] = l; }'
for text in ('asm volatile("mov.u32 %0, %%smid;" : "=r"(l));', 'asm("trap;");', 'PTX("exit;");'):
    assert "inline PTX" in refused(code.replace("%s", text)), text
""",
        kernel_cache,
    )


def test_threads_of_a_warp_match_reduce_and_exchange(kernel_cache: Path) -> None:
    run(
        CALL
        + r"""
code = '''
extern "C" __global__ void f(int* x) {
  const int lane = threadIdx.x;
  const unsigned int all = 0xffffffffu, third = __match_any_sync(all, lane % 3);
  int same, other, good = third == 0x49249249u << lane % 3 % 3 || lane % 3;
  good &= __popc(third) == (lane % 3 == 2 ? 10 : 11) && (third >> lane & 1);
  good &= __match_all_sync(all, 2.5, &same) == all && same;
  good &= __match_all_sync(all, lane, &other) == 0 && !other;
  good &= __reduce_add_sync(all, lane) == 496 && __reduce_add_sync(all, 1u) == 32u;
  good &= __reduce_min_sync(all, lane - 5) == -5 && __reduce_min_sync(all, lane - 5u) == 0u;
  good &= __reduce_max_sync(all, -lane) == 0 && __reduce_max_sync(all, 0u - lane) == 0xffffffffu;
  good &= __reduce_and_sync(all, lane | 64u) == 64u && __reduce_or_sync(all, (unsigned)lane) == 31u;
  good &= __reduce_xor_sync(all, 1u << lane) == all;
  if (lane & 1) good &= __reduce_add_sync(0xaaaaaaaau, 1) == 16 && __activemask() == 0xaaaaaaaau;
  const double d = lane + 0.5; const long long l = lane + (1ll << 40);
  for (int width = 2; width <= 32; width *= 2) {
    const int first = lane / width * width, place = lane % width;
    good &= __shfl_sync(all, d, 1, width) == first + 1.5;
    good &= __shfl_sync(all, l, -1, width) == first + width - 1 + (1ll << 40);
    good &= __shfl_up_sync(all, l, 1, width) == l - (place > 0);
    good &= __shfl_down_sync(all, d, 1, width) == d + (place < width - 1);
    good &= __shfl_xor_sync(all, l, width - 1, width) == first + width - 1 - place + (1ll << 40);
  }
  x[lane] = good;
}'''
assert call(code).tolist() == [1] * 32
""",
        kernel_cache,
        start=START.replace("t4", "a100-40gb"),  # reductions need compute capability 8.0
    )


def test_groups_of_threads(kernel_cache: Path) -> None:
    run(
        CALL
        + r"""
code = '''#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;
template <int n> __device__ bool tile_of() {
  cg::thread_block block = cg::this_thread_block();
  cg::thread_block_tile<n> tile = cg::tiled_partition<n>(block);
  const int rank = threadIdx.x % n, first = threadIdx.x - rank;
  bool good = tile.thread_rank() == rank && tile.size() == n && tile.num_threads() == n;
  good &= tile.meta_group_rank() == threadIdx.x / n && tile.meta_group_size() == blockDim.x / n;
  good &= tile.shfl((int)threadIdx.x, n - 1) == first + n - 1;
  good &= tile.shfl_up((double)rank, 1) == (rank ? rank - 1 : 0);
  good &= tile.shfl_down(rank, 1) == min(rank + 1, n - 1);
  good &= tile.shfl_xor((long long)rank, n - 1) == n - 1 - rank;
  good &= tile.any(rank == n - 1) && tile.all(rank < n) && !tile.all(rank && n > 1);
  good &= tile.ballot(rank == n - 1) == 1u << (n - 1);
  good &= cg::reduce(tile, rank, cg::plus<int>()) == n * (n - 1) / 2;
  good &= cg::reduce(tile, 1.5f + rank, cg::less<float>()) == 1.5f;
  good &= cg::reduce(tile, rank, cg::greater<int>()) == n - 1;
  good &= cg::inclusive_scan(tile, 1) == rank + 1 && cg::exclusive_scan(tile, 1) == rank;
  tile.sync();
  return good;
}
extern "C" __global__ void f(int* x) {
  bool good = tile_of<1>() & tile_of<2>() & tile_of<4>() & tile_of<8>() & tile_of<32>();
  auto warp = cg::tiled_partition<32>(cg::this_thread_block());
  auto part = cg::tiled_partition<4>(warp);
  good &= part.meta_group_size() == 8 && part.meta_group_rank() == threadIdx.x % 32 / 4;
  auto odd = cg::binary_partition(warp, threadIdx.x & 1);
  good &= odd.size() == 16 && odd.thread_rank() == threadIdx.x % 32 / 2;
  struct Large { double a[4]; } large = {{(double)threadIdx.x, 0, 0, 0}};
  good &= warp.shfl(large, 3).a[0] == threadIdx.x / 32 * 32 + 3;
  if (threadIdx.x % 3 == 0) {
    cg::coalesced_group active = cg::coalesced_threads();
    const int count = active.size(), rank = active.thread_rank();
    good &= count == 11 && active.shfl((int)threadIdx.x, 0) % 32 < 3;
    good &= active.ballot(rank == 1) == 2 && active.all(1) && !active.any(0);
    good &= cg::reduce(active, 1, cg::plus<int>()) == count;
    good &= active.shfl_down(rank, 1) == min(rank + 1, count - 1);
  } else {
    good &= cg::coalesced_threads().size() == 21;
  }
  cg::sync(cg::this_thread_block());
  x[threadIdx.x] = good;
}'''
assert call(code, size=64, threads=64).tolist() == [1] * 64
assert "tiles of" in refused(code.replace("tile_of<1>()", "tile_of<64>()"))
""",
        kernel_cache,
    )


def test_collectives_of_blocks_and_warps(kernel_cache: Path) -> None:
    run(
        CALL
        + r"""
code = '''#include <cub/cub.cuh>
#include <cub/block/block_reduce.cuh>
struct Longest { __device__ int operator()(int a, int b) const { return a > b ? a : b; } };
extern "C" __global__ void f(int* x, const int* in, int* stored) {
  typedef cub::BlockReduce<int, 64> Reduce;
  typedef cub::BlockScan<int, 64, cub::BLOCK_SCAN_WARP_SCANS> Scan;
  typedef cub::WarpReduce<int, 8> Warp;
  typedef cub::WarpScan<double> Scanned;
  typedef cub::BlockLoad<int, 64, 2, cub::BLOCK_LOAD_WARP_TRANSPOSE> Load;
  typedef cub::BlockStore<int, 64, 2, cub::BLOCK_STORE_STRIPED> Store;
  __shared__ union {
    typename Reduce::TempStorage reduce; Scan::TempStorage scan; Load::TempStorage load;
  } shared;
  __shared__ Warp::TempStorage warps[8];
  __shared__ typename Scanned::TempStorage scanned[2];
  const int t = threadIdx.x, place = t % 8;
  int items[2], sums[2], total, sum, all;
  Load(shared.load).Load(in, items);
  bool good = items[0] == 2 * t && items[1] == 2 * t + 1;
  __syncthreads();
  sum = Reduce(shared.reduce).Sum(t);
  good &= t ? sum == t : sum == 2016;
  sum = Reduce(shared.reduce).Reduce(t, Longest(), 40);
  good &= t || sum == 39;
  sum = Reduce(shared.reduce).Sum(items);
  good &= t || sum == 127 * 64;
  good &= t || Reduce().Reduce(-t, cub::Min()) == -63;
  if (t) Reduce().Reduce(-t, cub::Min());
  Scan(shared.scan).ExclusiveSum(t, sum, all);
  good &= sum == t * (t - 1) / 2 && all == 2016;
  Scan(shared.scan).InclusiveSum(1, sum);
  good &= sum == t + 1;
  Scan(shared.scan).InclusiveSum(items, sums);
  good &= sums[0] == t * (2 * t + 1) && sums[1] == (2 * t + 1) * (t + 1);
  Scan(shared.scan).ExclusiveSum(items, items, all);
  good &= items[0] == t * (2 * t - 1) && items[1] == t * (2 * t + 1) && all == 127 * 64;
  Scan(shared.scan).ExclusiveScan(t, sum, 5, cub::Max(), total);
  good &= sum == max(5, t - 1) && total == 63;
  Scan(shared.scan).InclusiveScan(64 - t, sum, Longest());
  good &= sum == 64;
  sum = Warp(warps[t / 8]).Sum(t);
  good &= place ? sum == t : sum == 8 * t + 28;
  sum = Warp(warps[t / 8]).Reduce(t, cub::Max(), 3);
  good &= place || sum == t + 2;
  double d;
  Scanned(scanned[t / 32]).InclusiveSum(0.5, d);
  good &= d == (t % 32 + 1) / 2.;
  Scanned(scanned[t / 32]).ExclusiveSum(0.5, d);
  good &= d == t % 32 / 2. && Scanned(scanned[t / 32]).Broadcast(d, 3) == 1.5;
  cub::KeyValuePair<int, float> pair{t, (float)(t % 7)};
  typedef cub::BlockReduce<cub::KeyValuePair<int, float>, 64> ReducePairs;
  __shared__ typename ReducePairs::TempStorage pairs;
  pair = ReducePairs(pairs).Reduce(pair, cub::ArgMax());
  good &= t || (pair.key == 6 && pair.value == 6);
  items[0] = t, items[1] = 100 + t;
  Store().Store(stored, items, 100);
  x[t] = good;
}'''
stored = cp.full(128, -1, "i4")
out = call(code, size=64, threads=64, given=(cp.arange(128, dtype="i4"), stored))
assert out.tolist() == [1] * 64, out
assert stored.tolist() == [*range(64), *range(100, 136), *[-1] * 28]
for word in "DeviceReduce", "BlockHistogram", "WarpMergeSort":
    wrong = '#include <cub/cub.cuh>\nextern "C" __global__ void f(int* x) { cub::%s<int, 4>(); }'
    assert word in refused(wrong.replace("%s", word))
""",
        kernel_cache,
    )


def test_a_block_sorts(kernel_cache: Path) -> None:
    run(
        CALL
        + r"""
code = '''#include <cub/block/block_radix_sort.cuh>
template <class K> __global__
void sorted(K* keys, int* values, int descending, int begin, int end) {
  typedef cub::BlockRadixSort<K, 32, 4, int> Sort;
  typedef cub::BlockRadixSort<K, 32, 4> Keys;
  __shared__ typename Sort::TempStorage shared;
  __shared__ typename Keys::TempStorage alone;
  K mine[4], only[4];
  int with[4];
  for (int i = 0; i < 4; i++) {
    only[i] = mine[i] = keys[threadIdx.x * 4 + i];
    with[i] = values[threadIdx.x * 4 + i];
  }
  if (descending) Sort(shared).SortDescending(mine, with, begin, end);
  else Sort(shared).Sort(mine, with, begin, end);
  if (descending) Keys(alone).SortDescendingBlockedToStriped(only, begin, end);
  else Keys(alone).SortBlockedToStriped(only, begin, end);
  for (int i = 0; i < 4; i++) {
    keys[threadIdx.x * 4 + i] = mine[i];
    keys[128 + threadIdx.x + 32 * i] = only[i];
    values[threadIdx.x * 4 + i] = with[i];
  }
}'''
types = {"i1": "signed char", "i4": "int", "u4": "unsigned int", "i8": "long long"}
types |= {"f4": "float", "f8": "double"}
names = [f"sorted<{name}>" for name in types.values()]
module = cp.RawModule(code=code, options=("-std=c++17",), name_expressions=names)
rng = np.random.default_rng(0)
for kind, name in zip(types, names):
    bits = 8 * np.dtype(kind).itemsize
    x = (rng.standard_normal(128) * 50).astype("i8").astype(kind)
    for descending in (0, 1):
        order = np.argsort(x, kind="stable")
        if descending:  # equal keys keep their order here too
            order = (127 - np.argsort(x[::-1], kind="stable"))[::-1]
        keys, values = cp.concatenate([cp.asarray(x)] * 2), cp.arange(128, dtype="i4")
        numbers = np.int32(descending), np.int32(0), np.int32(bits)
        module.get_function(name)((1,), (32,), (keys, values, *numbers))
        assert keys[:128].tolist() == x[order].tolist() == keys[128:].tolist(), (kind, descending)
        assert values.tolist() == order.tolist(), (kind, descending)
x = rng.permutation(128).astype("u4")
keys, values = cp.concatenate([cp.asarray(x)] * 2), cp.arange(128, dtype="i4")
module.get_function(names[2])((1,), (32,), (keys, values, np.int32(0), np.int32(4), np.int32(7)))
assert values.tolist() == np.argsort(x >> 4 & 7, kind="stable").tolist()
""",
        kernel_cache,
    )


def test_random_numbers_of_a_thread(kernel_cache: Path) -> None:
    run(
        CALL
        + r"""
code = '''#include <curand_kernel.h>
extern "C" __global__ void known(unsigned int* x, const unsigned int* given) {
  const uint4 found = umem_philox({given[0], given[1], given[2], given[3]}, {given[4], given[5]});
  x[0] = found.x; x[1] = found.y; x[2] = found.z; x[3] = found.w;
}
template <class State> __global__ void numbers(unsigned int* x, unsigned long long* at) {
  State s;
  curand_init(at[0], at[1], at[2], &s);
  skipahead(at[3], &s);
  skipahead_sequence(at[4], &s);
  for (int i = 0; i < 16; i++) x[i] = curand(&s);
}
template <class State> __global__ void drawn(double* x, int n) {
  State s;
  curand_init(7, threadIdx.x, 0, &s);
  for (int i = 0; i < n; i++) {
    double* at = x + 4 * (i + n * threadIdx.x);
    at[0] = curand_uniform(&s);
    at[1] = curand_uniform_double(&s);
    at[2] = curand_normal(&s);
    at[3] = curand_normal_double(&s);
  }
}
extern "C" __global__ void far(unsigned int* x) {
  curandState s;
  curand_init(3, 0, 0, &s);
  for (int i = 0; i < 16; i++) skipahead(1ull << 63, &s);
  for (int i = 0; i < 16; i++) x[i] = curand(&s);
}
extern "C" __global__ void fours(float* x) {
  curandStatePhilox4_32_10_t s, t;
  curand_init(5, 1, 3, &s);
  t = s;
  const float4 u = curand_uniform4(&s), z = curand_normal4(&s);
  for (int i = 0; i < 4; i++) x[i] = curand_uniform(&t);
  x[0] -= u.x; x[1] -= u.y; x[2] -= u.z; x[3] -= u.w;
  x[4] = z.x; x[5] = z.y; x[6] = z.z; x[7] = z.w;
}'''
states = "curandState", "curandStatePhilox4_32_10_t"
names = [f"{f}<{s}>" for f in ("numbers", "drawn") for s in states]
module = cp.RawModule(code=code, options=("-std=c++17",), name_expressions=names)
called = lambda name, *given: module.get_function(name)((1,), (1,), given)

# The known answers that the Random123 distribution has for philox4x32 of 10 rounds.
every = 0xFFFFFFFF
for given, wanted in (
    ([0] * 6, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([every] * 6, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0],
     [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
):
    x = cp.zeros(4, "u4")
    called("known", x, cp.asarray(given, "u4"))
    assert x.tolist() == wanted, [hex(i) for i in x.tolist()]

def numbers(state, *at):
    x = cp.zeros(16, "u4")
    called(f"numbers<{state}>", x, cp.asarray([*at, *[0] * (5 - len(at))], "u8"))
    return x.tolist()

def marsaglia(n):  # xorwow, from the paper's own start
    x, y, z, w, v, d = 123456789, 362436069, 521288629, 88675123, 5783321, 6615241
    for _ in range(n):
        t = x ^ x >> 2
        x, y, z, w, v = y, z, w, v, (v ^ v << 4) & every ^ t ^ t << 1 & every
        d = d + 362437 & every
        yield d + v & every

assert numbers(states[0], 0) == list(marsaglia(16))
assert numbers(states[0], 0, 0, 1003) == list(marsaglia(1019))[1003:]
assert numbers(states[1], 0)[:4] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
for state in states:
    first = numbers(state, 11)
    for at in range(9):
        assert numbers(state, 11, 0, at)[:7] == first[at : at + 7]
        assert numbers(state, 11, 0, 0, at)[:7] == first[at : at + 7]
    assert numbers(state, 11, 0, 5, 4)[:7] == first[9:]
    big = 3 << 40
    assert numbers(state, 11, 2, big + 5) == numbers(state, 11, 0, 5, big, 2)
    others = [numbers(state, 12), numbers(state, 11, 1), numbers(state, 11, 1 << 40), first]
    assert len({tuple(found) for found in others}) == 4
# A subsequence of XORWOW has 2^67 numbers: eight times 2^64.
s, far = numbers(states[0], 3, 1), cp.zeros(16, "u4")
called("far", far)
assert far.tolist() == s

n = 4000
for state in states:
    x = cp.zeros((4, n, 4))
    module.get_function(f"drawn<{state}>")((1,), (4,), (x, np.int32(n)))
    found = x.get().reshape(-1, 4)
    assert (found[:, :2] > 0).all() and (found[:, :2] <= 1).all()
    assert abs(found.mean(0) - [0.5, 0.5, 0, 0]).max() < 0.03
    assert abs(found.std(0) - [12**-0.5, 12**-0.5, 1, 1]).max() < 0.03
    assert abs(np.corrcoef(found.T) - np.eye(4)).max() < 0.05
    assert len(np.unique(found[:, 1])) == len(found)
x = cp.zeros(8, "f4")
called("fours", x)
assert not x[:4].any() and x[4:].all()
assert "curandStateMRG32k3a" in refused(
    '#include <curand_kernel.h>\nextern "C" __global__ void f(int* x) { curandStateMRG32k3a s; }')
""",
        kernel_cache,
    )
