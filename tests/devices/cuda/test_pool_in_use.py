"""CuPy's default pool, as programs ask for it, acts on the memory of the mode that is on."""

from __future__ import annotations

from pathlib import Path

from software_programs import needs_compiler, needs_cupy, run

pytestmark = [needs_compiler, needs_cupy]
MODES = """
own = cp.get_default_memory_pool()
before = cp.ones(1 << 20, "f4")
def mib(*figures):
    return [int(figure) >> 20 for figure in figures]
"""


def test_it_counts_and_frees_what_is_in_use(kernel_cache: Path) -> None:
    program = """
for mode in ("managed", "hybrid"):
    umem.enable(mode)
    pool = cp.get_default_memory_pool()
    print(isinstance(pool, cp.cuda.MemoryPool), mib(pool.used_bytes(), own.used_bytes()))
    large, small = cp.empty(24 << 20, "f4"), cp.empty(1 << 20, "f4")
    print(mib(pool.used_bytes(), own.used_bytes()), pool.total_bytes() >= pool.used_bytes())
    del large
    print(mib(pool.used_bytes(), pool.free_bytes())[0], pool.free_bytes() >= 96 << 20)
    print(pool.n_free_blocks() > 0)
    pool.free_all_blocks()
    print(mib(pool.used_bytes(), pool.total_bytes()), pool.free_bytes(), pool.n_free_blocks())
    again = cp.ndarray(3, "f4", memptr=pool.malloc(12))
    again.fill(1)
    print(umem.status().mode, float(again.sum()) == 3)
    del small, again
    pool.free_all_blocks(cp.cuda.Stream.null)
    umem.disable()
    print(cp.get_default_memory_pool() is own)
"""
    found = run(MODES + program, kernel_cache).splitlines()
    same = ["True [4, 4]", "[104, 4] True", "8 True", "True", "[8, 8] 0 0"]
    assert found == [*same, "managed True", "True", *same, "hybrid True", "True"]


def test_the_lower_of_two_limits_holds(kernel_cache: Path) -> None:
    program = """
def largest():
    for mib in (48, 24, 12):
        try:
            return cp.empty(mib << 20, "u1").nbytes >> 20
        except cp.cuda.memory.OutOfMemoryError as error:
            assert "limit" in str(error)
umem.enable("managed", limit="30MiB")
pool = cp.get_default_memory_pool()
print(pool.get_limit(), largest())
pool.set_limit(size=20 << 20)
pool.free_all_blocks()
print(mib(pool.get_limit()), largest())
pool.set_limit(fraction=0.75)
print(mib(pool.get_limit()), largest())
umem.disable()
print(mib(own.get_limit()))
"""
    assert run(MODES + program, kernel_cache).splitlines() == ["0 24", "[20] 12", "[48] 24", "[0]"]


def test_the_limit_of_hybrid_is_of_its_plain_part(kernel_cache: Path) -> None:
    program = """
umem.enable("hybrid")
cp.get_default_memory_pool().set_limit(size=8 << 20)
array = cp.ones(16 << 20, "u1")
print(int(array.sum()) >> 20, umem.location(array).managed)
"""
    assert run(MODES + program, kernel_cache).splitlines() == ["16 True"]


def test_cupys_own_pool_is_back_when_the_mode_is_off(kernel_cache: Path) -> None:
    """Also where a program has put the pool's allocator in itself; blocks leave the pool alone."""
    program = """
umem.enable("unmanaged")
print(cp.get_default_memory_pool() is own)
umem.disable()
umem.enable("managed")
cp.cuda.set_allocator(cp.get_default_memory_pool().malloc)
print(umem.location(cp.ones(3)).managed)
kept = cp.get_default_memory_pool()
umem.disable()
print(cp.get_default_memory_pool() is own, umem.location(cp.ones(3)).managed)
cp.cuda.set_allocator(kept.malloc)
print(umem.location(cp.ones(3)).managed)
with umem.managed():
    print(cp.get_default_memory_pool() is own)
"""
    assert run(MODES + program, kernel_cache).splitlines() == [
        "True", "True", "True False", "False", "True"
    ]  # fmt: skip


def test_unmanaged_is_the_allocator_that_was_there(kernel_cache: Path) -> None:
    """Of the process, or of the thread; with a limit it is a pool of umem."""
    program = """
theirs, threads = cp.cuda.MemoryPool(), cp.cuda.MemoryPool()
def where():
    array = cp.empty(2 << 20, "u1")
    return mib(theirs.used_bytes(), threads.used_bytes(), own.used_bytes() - before.nbytes)
cp.cuda.set_allocator(theirs.malloc)
print(where())
umem.enable("managed")
with umem.unmanaged():
    print(where())
with umem.unmanaged("8MiB"):
    print(where())
print(where())
with cp.cuda.using_allocator(threads.malloc):
    with umem.managed(), umem.unmanaged():
        print(where())
umem.disable()
print(where(), cp.cuda.get_allocator() == theirs.malloc)
cp.cuda.set_allocator(own.malloc)
with umem.managed(), umem.unmanaged():
    print(where())
"""
    assert run(MODES + program, kernel_cache).splitlines() == [
        "[2, 0, 0]", "[2, 0, 0]", "[0, 0, 0]", "[0, 0, 0]", "[0, 2, 0]", "[2, 0, 0] True",
        "[0, 0, 2]",
    ]  # fmt: skip


def test_plain_memory_of_a_block_that_is_over_does_not_starve_cupys_pool(
    kernel_cache: Path,
) -> None:
    """A small cache stays for the next block; one that leaves no VRAM is given back."""
    program = """
def after(mode, size):
    with mode:
        array = cp.empty(size << 20, "u1")
        del array
    taken = gpu.calls.allocation_count
    with mode:
        cp.empty(size << 20, "u1")
    return gpu.calls.allocation_count - taken, cp.empty(50 << 20, "u1").nbytes >> 20
print(after(umem.hybrid(), 8))
own.free_all_blocks()
print(after(umem.hybrid(), 54), after(umem.unmanaged("60MiB"), 54))
"""
    lines = run(MODES + program, kernel_cache).splitlines()
    assert lines == ["(0, 50)", "(1, 50) (1, 50)"]


def test_a_limit_ends_with_its_mode_and_bounds_every_preset(kernel_cache: Path) -> None:
    program = """
for mode in ("managed", "hybrid"):
    umem.enable(mode)
    pool = cp.get_default_memory_pool()
    pool.set_limit(size=4 << 20)
    umem.disable()
    print(pool.get_limit(), own.get_limit())
    with umem.enable(mode):
        array = cp.empty(8 << 20, "u1")
        print(cp.get_default_memory_pool().get_limit(), umem.location(array).managed)
    del array
with umem.enable():
    pool = cp.get_default_memory_pool()
    pool.set_limit(size=10 << 20)
    array = cp.empty(8 << 20, "u1")
    try:
        with umem.managed(preset="streaming"):
            cp.empty(20 << 20, "u1")
    except umem.OutOfMemoryError as error:
        print(error)
    for wrong in (dict(size=-1), dict(size=1, fraction=0.5), dict(fraction=2)):
        try:
            pool.set_limit(**wrong)
        except ValueError as error:
            print(type(error).__name__, pool.get_limit() >> 20)
    pool.set_limit(fraction=0.5)
    print(pool.get_limit() >> 20, pool)
print(pool)
"""
    found = run(MODES + program, kernel_cache).splitlines()
    assert found[:4] == ["0 0", "0 True", "0 0", "0 False"]
    assert found[4].startswith("needs 20.0 MiB; 8.0 MiB of the 10.0 MiB that set_limit() of CuPy")
    assert found[5:8] == ["ValueError 10"] * 3
    assert found[8:] == [
        "32 <CuPy's memory in use, managed by umem>",
        "<CuPy's memory in use, unmanaged by umem>",
    ]


def test_unmanaged_is_plain_where_a_program_has_set_umems_own_allocators(
    kernel_cache: Path,
) -> None:
    program = """
def is_managed():
    return umem.location(cp.empty(1 << 20, "u1")).managed
umem.enable()
for kept in (cp.cuda.get_allocator(), cp.get_default_memory_pool().malloc):
    with cp.cuda.using_allocator(kept):
        outside = is_managed()
        with umem.unmanaged():
            print(outside, is_managed())
umem.disable()
with cp.cuda.using_allocator(kept), umem.unmanaged():
    print(is_managed())
with umem.managed():
    kept = cp.cuda.get_allocator()
cp.cuda.set_allocator(kept)  # that of a block that is over
print(is_managed())
with umem.managed():
    print(is_managed())
cp.cuda.set_allocator(own.malloc)
print(is_managed())
"""
    assert run(MODES + program, kernel_cache).splitlines() == [
        "True False", "True False", "False", "False", "True", "False"
    ]  # fmt: skip


def test_a_limit_frees_what_is_cached_beyond_it(kernel_cache: Path) -> None:
    program = """
with umem.managed():
    cp.empty(100 << 20, "u1")
try:
    with umem.managed(limit="20MiB"):
        cp.empty(30 << 20, "u1")
except umem.OutOfMemoryError as error:
    print(error)
"""
    [found] = run(MODES + program, kernel_cache).splitlines()
    assert found.startswith("needs 30.0 MiB; 0 B of the 20.0 MiB that the limit allows")


def test_status_names_an_allocator_that_was_set_over_the_mode(kernel_cache: Path) -> None:
    """As RMM's is by a program that sets it after umem, or again after it was reinitialised."""
    program = """
def rmm_cupy_allocator(nbytes):
    return theirs.malloc(nbytes)
theirs = cp.cuda.MemoryPool()
cp.cuda.set_allocator(rmm_cupy_allocator)
print(umem.status().set_over)
umem.enable()
print(umem.status().set_over)
with umem.managed():
    print(umem.status().set_over)
    with cp.cuda.using_allocator(rmm_cupy_allocator):
        print(umem.status().set_over)
cp.cuda.set_allocator(rmm_cupy_allocator)
print(umem.status().table().splitlines()[2:4], umem.location(cp.ones(3)).managed)
with umem.managed():
    print(umem.status().set_over, umem.location(cp.ones(3)).managed)
umem.disable()
print(umem.status().set_over, cp.cuda.get_allocator() is rmm_cupy_allocator)
cp.cuda.set_allocator(own.malloc)
with umem.enable("unmanaged"):
    print(umem.status().set_over)
"""
    found = run(MODES + program, kernel_cache).splitlines()
    assert found[:4] == ["None", "None", "None", "rmm_cupy_allocator"]
    assert "rmm_cupy_allocator, which the program has set since" in found[4]
    assert found[4].endswith("False") and found[5:] == ["None True", "None True", "None"]


def test_allocators_of_any_kind_may_be_set(kernel_cache: Path) -> None:
    """Without a module, and one that raises whatever it is asked."""
    program = """
names = {"own": own}
exec("def malloc(nbytes): return own.malloc(nbytes)", names)
class Odd:
    def __call__(self, nbytes):
        return own.malloc(nbytes)
    def __getattr__(self, name):
        raise RuntimeError(name)
for allocator in (names["malloc"], Odd()):
    umem.enable()
    with cp.cuda.using_allocator(allocator):
        print(umem.status().table().splitlines()[2])
    umem.disable()
    cp.cuda.set_allocator(allocator)
    with umem.managed():
        with umem.unmanaged():
            print(umem.location(cp.ones(3)).managed)
    cp.cuda.set_allocator(own.malloc)
"""
    first, plain, second, again = run(MODES + program, kernel_cache).splitlines()
    assert first.startswith("allocator     malloc") and plain == again == "False"
    assert second.startswith("allocator") and "Odd" in second


def test_what_outlives_a_block_leaves_no_vram_behind(kernel_cache: Path) -> None:
    """CuPy's own pool does not know of it, and collects garbage before it gives up."""
    program = """
import gc
import umem
umem.software_gpu("t4", "32MiB", devices=2, force=True)
import cupy as cp
for ordinal in (0, 1):
    with umem.hybrid(), cp.cuda.Device(ordinal):
        arrays = [cp.zeros(1 << 20, "f4") for _ in range(8)]
        result = arrays[0] + 1
    del arrays, result
    with cp.cuda.Device(ordinal):
        print(cp.zeros(4 << 20, "f4").nbytes >> 20)
        cp.get_default_memory_pool().free_all_blocks()
def alive_until_later():
    with umem.hybrid():
        arrays = [cp.zeros(1 << 20, "f4") for _ in range(6)]
    return None
alive_until_later()
with umem.unmanaged():
    print(cp.zeros(4 << 20, "f4").nbytes >> 20)
gc.collect()
for ordinal in (0, 1):
    with umem.hybrid(), cp.cuda.Device(ordinal):
        pass
print([one for one in gc.callbacks if "umem" in repr(one)])
"""
    assert run(program, kernel_cache, start="").splitlines() == ["16", "16", "16", "[]"]
