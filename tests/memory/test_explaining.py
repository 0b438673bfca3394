"""`umem.explain`: who holds the memory that ran out, and what would fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import python
from software_programs import START, lines, needs_software_gpu

import umem
from umem._common.specs import DRIVER_NAMES, GPUS, spec_of_driver
from umem.compat import find_package
from umem.errors import DeviceError, DeviceNotFoundError

PROGRAM = """
import sys
weights = [cp.empty(4 << 20, "u1") for _ in range(8)]
same = weights[0][:100]
def step(x):
    y = x + 1
    twice = {"a": y, "b": [y, None]}
    circle = [x]
    circle.append(circle)
    return cp.empty(40 << 20, "u1")
def failing():
    try:
        step(cp.empty(6 << 20, "u1"))
    except cp.cuda.memory.OutOfMemoryError as error:
        return error
"""


@needs_software_gpu
def test_variables_and_what_would_fit_are_named(kernel_cache: Path) -> None:
    program = """
found = umem.explain(failing())
for one in found.held:
    print(one.nbytes >> 20, one.array_count, one.place)
print(found.asked_bytes >> 20, found.free_bytes >> 20, found.used_bytes >> 20, found.other_bytes)
print([remedy.line for remedy in found.remedies])
print(found)
try:
    failing() and step(cp.empty(6 << 20, "u1"))
except MemoryError:
    print(umem.explain() .asked_bytes == found.asked_bytes)
"""
    found = lines(program, kernel_cache, start=START + PROGRAM)
    assert found[:5] == [
        "32 8 weights, of the module <string>",
        "6 1 x, in step of <string>",
        "6 1 y, in step of <string>",
        "40 20 44 0",
        "['umem.enable(\"hybrid\")', 'umem.enable()', 'for block in umem.blocks(x):', "
        "'umem.on_out_of_memory(callback)']",
    ]
    assert "40.0 MiB were asked for; 20.0 MiB of 64.0 MiB of VRAM are free" in found[5]
    assert any("40.0 MiB, 3.5 ms a pass" in line and "(simulated)" in line for line in found)
    assert found[-1] == "True"


@needs_software_gpu
def test_values_of_an_expression_that_has_ended_are_counted(kernel_cache: Path) -> None:
    program = """
try:
    arrays = [cp.ones(2 << 20, "f4") for _ in range(10)]
except MemoryError:
    found = umem.explain()
print(found.used_bytes, found.past_bytes >> 20, found.free_bytes >> 20)
print(found)
"""
    figures, told, past, *more = lines(program, kernel_cache)
    assert figures == "0 64 0"
    assert told.endswith("are free, and arrays used up to 64.0 MiB until the error freed them:")
    assert past.split()[:2] == ["64.0", "MiB"] and "an unfinished list" in past
    assert not any("is in pieces" in line for line in more)


@needs_software_gpu
@pytest.mark.skipif(find_package() is None, reason="no Chainer")
def test_for_the_columns_of_a_convolution_a_cap_is_named_first(kernel_cache: Path) -> None:
    program = """
import umem.chainer
import chainer.functions as F
x, w = cp.ones((4, 32, 96, 96), "f4"), cp.ones((8, 32, 3, 3), "f4")
try:
    F.convolution_2d(x, w, pad=1)
except MemoryError:
    cap = umem.explain().remedies[0].line.split()[3]
    print(cap)
with umem.chainer.workspace(cap):
    print(F.convolution_2d(x, w, pad=1).shape)
"""
    assert lines(program, kernel_cache) == ["4MiB", "(4, 8, 96, 96)"]


@needs_software_gpu
def test_without_an_error_the_callers_variables_are_named(kernel_cache: Path) -> None:
    program = """
def look():
    mine = cp.empty(10 << 20, "u1")
    return umem.explain(), umem.explain(ValueError("another error"))
for found in look():
    print(found.asked_bytes, found.remedies, [one.place for one in found.held])
    print("Ways to make it fit" in str(found))
"""
    assert lines(program, kernel_cache, start=START + PROGRAM) == [
        "None () ['weights, of the module <string>', 'mine, in look of <string>']", "False",
        "None () ['weights, of the module <string>', 'mine, in look of <string>']", "False",
    ]  # fmt: skip


@needs_software_gpu
def test_a_tracker_names_lines(kernel_cache: Path) -> None:
    program = """
with umem.track() as tracker:
    kept = [cp.empty(8 << 20, "u1") for _ in range(2)]
    found = umem.explain(by=tracker)
    print([(one.nbytes >> 20, one.array_count) for one in found.held], found.other_bytes >> 20)
    print(all("<string>:" in one.place for one in found.held))
"""
    assert lines(program, kernel_cache, start=START + PROGRAM) == ["[(16, 2)] 32", "True"]


@needs_software_gpu
def test_errors_and_memory_of_umem(kernel_cache: Path) -> None:
    program = """
with umem.managed(limit="20MiB"):
    found = umem.explain(failing())
    print(found.asked_bytes >> 20, found.held[1].place)
import gc
del weights, same
gc.collect()
pieces = [cp.empty(1 << 20, "u1") for _ in range(40)]
with umem.managed():
    big = cp.empty(12 << 20, "u1")
print(umem.explain().used_bytes >> 20)
"""
    assert lines(program, kernel_cache, start=START + PROGRAM) == [
        "40 x, in step of <string>",
        "52",
    ]


@needs_software_gpu
def test_an_error_without_sizes_is_explained_by_the_one_that_it_came_from(
    kernel_cache: Path,
) -> None:
    program = """
from umem.devices.cuda import CudaOutOfMemoryError
def explained(error):
    try:
        raise CudaOutOfMemoryError("not even after arrays were dropped") from error
    except MemoryError as last:
        found = umem.explain(last)
        print(found.asked_bytes, *(one.line.partition("(")[0] for one in found.remedies[:1]))
explained(failing())
with umem.managed(limit="20MiB"):
    explained(failing())
explained(None)
"""
    assert lines(program, kernel_cache, start=START + PROGRAM) == [
        "41943040 umem.enable",
        "41943040 a higher limit= in umem.managed, hybrid, unmanaged or enable, or UMEM_LIMIT",
        "None",
    ]


@needs_software_gpu
def test_objects_that_raise_when_they_are_looked_at_are_passed_over(kernel_cache: Path) -> None:
    program = """
class Shy:
    def __getattr__(self, name):
        raise RuntimeError("do not look")
shy, deep = Shy(), []
for _ in range(5000):
    deep = [deep]
class Odd(dict):
    def values(self):
        raise KeyError("no values")
odd = Odd(a=weights)
print([one.place for one in umem.explain().held])
"""
    assert lines(program, kernel_cache, start=START + PROGRAM) == [
        "['weights, of the module <string>']"
    ]


@needs_software_gpu
def test_arrays_in_objects_and_mixed_containers_are_found(kernel_cache: Path) -> None:
    program = """
from collections import deque
def f():
    layers = [cp.empty(4 << 20, "u1"), "relu", cp.empty(4 << 20, "u1")]
    config = {"name": "net", "w": cp.empty(8 << 20, "u1")}
    class Net: pass
    net = Net()
    net.parts = deque([cp.empty(3 << 20, "u1"), net])
    found = umem.explain()
    print([(one.nbytes >> 20, one.place.partition(",")[0]) for one in found.held])
    print(found.other_bytes)
    try:
        umem.explain(umem.track())
    except TypeError as error:
        print(error)
f()
"""
    assert lines(program, kernel_cache) == [
        "[(8, 'layers'), (8, 'config'), (3, 'net')]", "0",
        "explain takes an error, or by=tracker; got Tracker",
    ]  # fmt: skip


@needs_software_gpu
def test_no_object_is_asked_and_every_array_found(kernel_cache: Path) -> None:
    """Slots, doubly linked entries that lead far from where they are held, and proxies."""
    program = """
from dataclasses import dataclass
class Entry:
    def __init__(self, before):
        self.value, self.before, self.after = cp.zeros(1 << 16, "f4"), before, None
        if before:
            before.after = self
class Proxy:
    asked = 0
    @property
    def __class__(self):
        Proxy.asked += 1
        raise RuntimeError("outside of a request")
@dataclass
class State:
    __slots__ = ("weights",)
    weights: object
def f():
    cache, last = {}, None
    for key in range(100):
        cache[key] = last = Entry(last)
    proxy, state = Proxy(), State(cp.zeros(1 << 20, "f4"))
    found = umem.explain()
    print([(one.nbytes >> 20, one.array_count, one.place) for one in found.held])
    print(found.other_bytes, Proxy.asked)
f()
"""
    assert lines(program, kernel_cache) == [
        "[(25, 100, 'cache, in f of <string>'), (4, 1, 'state, in f of <string>')]", "0 0"
    ]  # fmt: skip


@needs_software_gpu
def test_what_it_has_looked_at_can_be_freed(kernel_cache: Path) -> None:
    """Reading a frame's variables leaves a copy there up to Python 3.12, as ``locals()`` does."""
    program = """
def train(keep):
    kept = locals() if keep else None
    x = cp.empty(40 << 20, "u1")
    try:
        cp.empty(41 << 20, "u1")
    except Exception:
        umem.explain()
    x = None
    print(sorted(kept)[:1] if keep else cp.empty(42 << 20, "u1").nbytes >> 20)
train(False)
train(True)
"""
    assert lines(program, kernel_cache) == ["42", "['keep']"]


@needs_software_gpu
def test_cached_managed_memory_is_no_free_vram_and_a_limit_is_named(kernel_cache: Path) -> None:
    program = """
with umem.managed():
    cp.empty(100 << 20, "u1")
def failed(nbytes):
    try:
        cp.empty(nbytes, "u1")
    except Exception:
        found = umem.explain()
        print(found.free_bytes >> 20, found.remedies[0].line)
x = cp.empty(50 << 20, "u1")
failed(30 << 20)
pool = cp.get_default_memory_pool()
pool.set_limit(size=56 << 20)
failed(10 << 20)
pool.set_limit(size=1 << 30)
failed(30 << 20)
with umem.managed(limit="120MiB"):
    failed(130 << 20)
umem.enable()
cp.get_default_memory_pool().set_limit(size=10 << 20)
failed(20 << 20)
umem.disable()
theirs = cp.cuda.MemoryPool(cp.cuda.malloc_managed)
theirs.set_limit(size=10 << 20)
with umem.managed(upstream=theirs.malloc):
    failed(20 << 20)
"""
    assert lines(program, kernel_cache) == [
        '14 umem.enable("hybrid")',
        "14 cupy.get_default_memory_pool().set_limit(size=0)",
        '14 umem.enable("hybrid")',
        "14 a higher limit= in umem.managed, hybrid, unmanaged or enable, or UMEM_LIMIT",
        "14 cupy.get_default_memory_pool().set_limit(size=0)",
        '14 umem.enable("hybrid")',
    ]


@pytest.mark.thorough
@needs_software_gpu
def test_umem_run_explains_an_error_that_ends_the_script(tmp_path: Path) -> None:
    script = tmp_path / "big.py"
    script.write_text(
        'import cupy\nheld = cupy.empty(30 << 20, "u1")\nmore = cupy.empty(60 << 20, "u1")\n'
    )
    command = ("-m", "umem", "run", "--software", "t4", "--vram", "64MiB")
    done = python(*command, script)
    assert done.returncode == 1
    assert "held, of the module big.py" in done.stderr
    assert "umem run --mode hybrid" in done.stderr
    done = python(*command, "--mode", "unmanaged", "--limit", "50MiB", script)
    assert done.returncode == 1 and "held, of the module big.py" in done.stderr
    assert "umem replay" in done.stderr


def test_without_a_gpu_of_cupy_it_is_refused() -> None:
    with pytest.raises(DeviceNotFoundError):
        umem.explain()
    with umem.virtual_gpu("t4"), pytest.raises(DeviceError, match="virtual"):
        umem.explain()


@needs_software_gpu
def test_where_free_memory_lies_in_pieces_modes_are_named(kernel_cache: Path) -> None:
    program = """
import umem
umem.software_gpu("t4", "64MiB", force=True)
import cupy as cp
whole = cp.empty(60 << 20, "u1")
del whole
pieces = [cp.empty(mib << 20, "u1") for mib in (1, 28, 1)]
del pieces[1]
try:
    cp.argsort(cp.empty(5 << 20, "u1"))
except MemoryError as error:
    found = umem.explain(error)
print(found.asked_bytes <= found.free_bytes, [one.line for one in found.remedies][:2])
print("free memory is in pieces" in found.remedies[0].why)
print([one.place for one in found.held])
"""
    assert lines(program, kernel_cache, start="") == [
        "True ['umem.enable(\"hybrid\")', 'umem.enable()']",
        "True",
        "['pieces, of the module <string>']",
    ]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("Tesla V100-PCIE-32GB", "v100-32gb"),
        ("Tesla P100-PCIE-16GB", "p100-16gb"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("NVIDIA GH200 480GB", "gh200-96gb"),
        ("NVIDIA GH200 144G HBM3e", "gh200-144gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla K80", None),
        ("", None),
    ],
)
def test_times_are_of_the_gpu_that_the_driver_names(name: str, row: str | None) -> None:
    found = spec_of_driver(name)
    assert (found and found.name) == row


def test_every_gpu_of_the_table_is_known_by_its_title() -> None:
    assert all(spec_of_driver(spec.title) is spec for spec in GPUS.values())
    assert set(DRIVER_NAMES.values()) <= GPUS.keys()
