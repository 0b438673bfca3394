"""CuPy's generators of random numbers on the software GPU are CuPy's own classes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from software_programs import needs_compiler, needs_cupy, run

from umem.errors import DeviceError
from umem.host_cuda.libraries.distributions import C_FUNCTIONS, KIND
from umem.host_cuda.overrides import Overrides
from umem.host_cuda.toolchain import Toolchain

pytestmark = [needs_cupy, needs_compiler]


def test_generators_are_cupys_own_with_its_seeds_and_errors(kernel_cache: Path) -> None:
    program = """
import copy
import pickle

def error(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__

r = cp.random
rng = r.default_rng(0)
print(type(rng).__module__, type(rng).__qualname__, type(rng.bit_generator).__module__)
assert r.Generator is r._generator_api.Generator is type(rng) and r.default_rng(rng) is rng
for kind in (r.XORWOW, r.MRG32k3a, r.Philox4x3210):
    assert kind.__module__ == "cupy.random._bit_generator" and issubclass(kind, r.BitGenerator)
    for seed in (7, [1, 2, 3], np.random.SeedSequence(5), cp.arange(3)):
        one, same = kind(seed, size=512), kind(seed, size=512)
        assert isinstance(one._seed_seq, np.random.SeedSequence) and one._state_size() == 512
        drawn = one.random_raw((2, 9))
        assert drawn.dtype == "i4" and (drawn == same.random_raw((2, 9))).all()
    assert kind(size=512)._seed_seq.entropy != kind(size=512)._seed_seq.entropy
    children = [kind(seed, size=512) for seed in np.random.SeedSequence(7).spawn(2)]
    assert (children[0].random_raw(9) != children[1].random_raw(9)).any()
raws = [kind(7, size=512).random_raw(99) for kind in (r.XORWOW, r.MRG32k3a, r.Philox4x3210)]
assert (raws[0] != raws[1]).any() and (raws[1] != raws[2]).any()
print(*(error(lambda seed=seed: r.default_rng(seed)) for seed in (-1, "seed", 1.5)))
print(error(lambda: pickle.dumps(rng)), error(lambda: copy.deepcopy(rng)))
print(error(lambda: rng.dirichlet([1, 2])), error(lambda: rng.integers(5, 5)))
"""
    assert run(program, kernel_cache) == (
        "cupy.random._generator_api Generator cupy.random._bit_generator\n"
        "ValueError TypeError TypeError\nTypeError TypeError\nTypeError ValueError\n"
    )


def test_the_state_is_in_device_memory_so_that_a_copy_of_it_goes_on_alike(
    kernel_cache: Path,
) -> None:
    program = """
bits = cp.random.XORWOW(3, size=1)
rng = cp.random.Generator(bits)
rng.standard_normal(5, "f4")
kept = bits._state.copy()
first = rng.random(9), rng.integers(0, 1 << 40, 9), rng.poisson(4.0, 9)
bits._state[...] = kept
again = rng.random(9), rng.integers(0, 1 << 40, 9), rng.poisson(4.0, 9)
assert all((a == b).all() for a, b in zip(first, again))
with umem.record() as recording:
    rng.random(1 << 16)
print([(op.name, op.writes[0].stop - op.writes[0].start) for op in recording.trace.ops])
"""
    assert run(program, kernel_cache) == "[('curand', 524288)]\n"


def test_late_streams_draw_in_their_order_whatever_the_seed(kernel_cache: Path) -> None:
    start = """
import numpy as np
import umem
gpu = umem.software_gpu("t4", "256MiB", force=True, stream_seed=0)
import cupy as cp
"""
    program = """
def drawn(seed):
    gpu.reseed(seed)
    with cp.cuda.Stream(non_blocking=True) as stream:
        rng = cp.random.Generator(cp.random.XORWOW(3, size=512))
        made = [rng.poisson(cp.arange(9.0), (4, 9)), rng.random(99), rng.binomial(9, 0.5, 9)]
        stream.synchronize()
    return [x.get().tolist() for x in made]

assert all(drawn(seed) == drawn(None) for seed in range(5))
"""
    assert run(program, kernel_cache, start=start) == ""


def test_parameters_out_of_range_are_as_in_cupys_kernels_or_an_error(kernel_cache: Path) -> None:
    program = """
rng = cp.random.default_rng(0)
few = cp.asarray([-1.0, 0.0, float("nan")])
print(rng.poisson(few), rng.standard_gamma(few[:2]), rng.logseries(few[:2]))
counts = rng.binomial(cp.asarray([[3], [40]]), cp.asarray([0.0, 1.0]), (2, 2))
print(counts.tolist(), rng.hypergeometric(3, 4, cp.asarray([-1, 7])).tolist())
for call in (
    lambda: rng.beta(-1.0, 2.0, 3),
    lambda: rng.geometric(0.0, 3),
    lambda: cp.random.Generator(cp.random.XORWOW(1, size=0)).random(3),
):
    try:
        call()
    except ValueError as error:
        print(error)
for dtype, most in (("u4", (1 << 32) - 1), ("i8", (1 << 63) - 1), ("u8", (1 << 64) - 1)):
    drawn = rng.integers(0, most, 999, dtype, endpoint=True)
    assert drawn.dtype == dtype and float(drawn.max()) > 0.98 * most
"""
    assert run(program, kernel_cache) == (
        "[0 0 0] [0. 0.] [1 1]\n[[0, 3], [0, 40]] [0, 3]\na <= 0\n"
        "p <= 0, p > 1 or p contains NaNs\na generator of size 0 cannot draw numbers\n"
    )


def test_a_version_of_cupy_with_other_functions_than_are_known_is_refused(tmp_path: Path) -> None:
    module = tmp_path / "generators.so"
    names = {f"_Z{len(n)}{n}{letters[0]}" for n, letters in C_FUNCTIONS.items()}

    def overridden(*others: str) -> Overrides:
        text = "".join(f"void {name}() {{}}" for name in (*names, *others, "_Z6loggamd"))
        asked = ["gcc", "-x", "c", "-shared", "-fPIC", "-o", str(module), "-"]
        subprocess.run(asked, input=text, text=True, check=True)
        return Overrides(module, C_FUNCTIONS, KIND, Toolchain(tmp_path))

    with pytest.raises(DeviceError, match=r"generators.so has .*: \['_Z3newilllll'\]"):
        overridden("_Z3newilllll")
    names.remove("_Z21init_curand_generatorilmll")
    with pytest.raises(DeviceError, match=r"generators.so has .*: \['init_curand_generator'\]"):
        overridden("_Z21init_curand_generatorlll")
