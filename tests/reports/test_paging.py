"""`umem.paging`: moves of pages by the line that allocated, from the model and CUPTI's records."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cupti_stand_in import Cupti
from software_programs import lines, needs_software_gpu

import umem
from umem._common.stacks import places
from umem.devices import PageMove
from umem.devices.cuda import cuda_reason
from umem.errors import (
    DeviceError,
    DeviceNotFoundError,
    FileError,
    MissingDependencyError,
    StateError,
)
from umem.reports.page_owners import ELSEWHERE, OwnedRange, divided
from umem.reports.paging_report import PagedMemory, PageTracker
from umem.units import MIB

FIGURES = ("migrated_in_bytes", "migrated_out_bytes", "populated_bytes", "fault_count")


def figures(gpu: Any) -> list[int]:
    return [getattr(gpu.figures, name) for name in FIGURES]


def of(p: PageTracker) -> list[int]:
    return [p.in_bytes, p.out_bytes, p.new_bytes, p.gpu_faults]


def test_a_block_has_the_models_counts_and_the_lines_that_allocated() -> None:
    with umem.virtual_gpu("t4", vram="8MiB") as gpu, umem.managed() as memory:
        early = memory.xp.ones(MIB, "f4")
        before = figures(gpu)
        with umem.paging() as p:
            large = memory.xp.ones((4, MIB), "f4")
            small = memory.xp.zeros(100, "f4")
            for _ in range(3):
                large.sum()
            umem.prefetch(early)
            umem.prefetch(large, to="cpu")
            small += 1
        after = figures(gpu)
        large.sum()  # behind the block: not its own
    assert of(p) == [b - a for a, b in zip(before, after, strict=True)]
    assert p.evicted_bytes < p.out_bytes and p.prefetched_bytes > 0 and not p.host_faults
    rows = p.by_line()
    assert rows[0].place.endswith("_the_models_counts_and_the_lines_that_allocated")
    assert rows[0].new_bytes == large.nbytes and rows[0].in_bytes >= 2 * large.nbytes
    assert ELSEWHERE in {row.place for row in rows}
    for number, name in enumerate(("in_bytes", "out_bytes", "new_bytes", "gpu_faults")):
        assert sum(getattr(row, name) for row in rows) == of(p)[number]


def test_what_an_allocation_moves_itself_is_its_own() -> None:
    with umem.virtual_gpu("t4", vram="8MiB") as gpu:
        with umem.managed(prefetch=True), umem.paging() as p:
            gpu.xp.ones(4 * MIB, "f4")
        with umem.managed(), umem.paging() as q:
            gpu.xp.asarray(np.ones(4 * MIB, "f4"))
    for found in (p, q):
        [row] = found.by_line()
        assert row.place != ELSEWHERE and row.moved_bytes + row.new_bytes >= 16 * MIB


def test_everything_is_said_to_be_simulated(tmp_path: Path) -> None:
    with umem.virtual_gpu("t4", vram="8MiB"), umem.managed() as memory, umem.paging() as p:
        memory.xp.ones((4, MIB), "f4").sum()
    found = json.loads(json.dumps(p.to_json()))
    assert found["simulated"] is True and found["lines"][0]["new_bytes"] > 15 * MIB
    assert str(p).startswith("pages on t4 (simulated): ") and "test_paging.py" in str(p)
    assert "evicted" in repr(p)
    pytest.importorskip("matplotlib")
    p.draw(tmp_path / "pages.png")
    assert (tmp_path / "pages.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_pages_replaces_a_file_with_force_only(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    mine = tmp_path / "mine.png"
    mine.write_text("my own picture", encoding="utf-8")
    with umem.virtual_gpu("t4"), umem.paging() as p:
        pass
    with pytest.raises(FileError, match=r"mine\.png"):
        p.draw(mine)
    assert mine.read_text(encoding="utf-8") == "my own picture"
    p.draw(mine, force=True)
    assert mine.read_bytes().startswith(b"\x89PNG")


def test_a_block_without_managed_memory_has_no_moves(tmp_path: Path) -> None:
    with umem.virtual_gpu("t4") as gpu, umem.paging() as p:
        gpu.xp.ones(MIB).sum()
    assert of(p) == [0, 0, 0, 0] and p.by_line() == []
    pytest.importorskip("matplotlib")
    p.draw(tmp_path / "empty.png")


def test_one_block_at_a_time_and_each_once() -> None:
    with umem.virtual_gpu("t4"):
        with umem.paging() as p, pytest.raises(StateError, match="by another umem"):
            umem.paging().__enter__()
        with pytest.raises(StateError, match="used before"):
            p.__enter__()
        with umem.paging():
            pass


def test_without_a_gpu_it_says_so() -> None:
    if cuda_reason() is None:
        pytest.skip("there is a CUDA device")
    with pytest.raises(DeviceNotFoundError):
        umem.paging().__enter__()


# -- whose memory it was ------------------------------------------------------------------------


def parts_of(arrays: list[tuple[float, int, int]], *moves: PageMove) -> list[tuple[str, int]]:
    """The place and bytes of each part, with an array a line: its number is its place."""
    owned = [OwnedRange(*array, (number,)) for number, array in enumerate(arrays)]  # type: ignore[arg-type]
    return [(part.place, part.nbytes) for part in divided(moves, owned)]


@pytest.fixture(autouse=True)
def _numbers(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "owner" in request.node.name:
        name = "umem.reports.page_owners.Reader.read"
        monkeypatch.setattr(name, lambda self, found: found)


def move(seconds: float, low: int, high: int, nbytes: int | None = None) -> PageMove:
    return PageMove(seconds, low, high, high - low if nbytes is None else nbytes, "in", "fault", 1)


def test_the_owner_is_the_array_that_was_there_last() -> None:
    arrays = [(0.0, 100, 100), (2.0, 150, 100), (4.0, 120, 10)]
    assert parts_of(arrays, move(1.0, 0, 300)) == [("0", 300)]
    assert parts_of(arrays, move(3.0, 100, 250)) == [("0", 50), ("1", 100)]
    found = [("0", 20), ("2", 10), ("0", 20), ("1", 100)]
    assert parts_of(arrays, move(5.0, 100, 250)) == found
    assert parts_of(arrays, move(5.0, 300, 400)) == [(ELSEWHERE, 100)]
    assert parts_of(arrays, move(-1.0, 100, 200)) == [(ELSEWHERE, 100)]


def test_the_owner_of_a_pages_end_has_what_no_array_has() -> None:
    assert parts_of([(0.0, 512, 8), (0.0, 1024, 8)], move(1.0, 0, 2048)) == [("0", 8), ("1", 2040)]
    assert parts_of([(0.0, 512, 8)], move(1.0, 512, 520, 2048)) == [("0", 2048)]


# -- the software GPU -----------------------------------------------------------------------------


@needs_software_gpu
def test_cupys_arrays_are_found_in_its_pool_and_in_two_threads(kernel_cache: Path) -> None:
    program = """
import threading
def figures():
    f = gpu.figures
    return [f.migrated_in_bytes, f.migrated_out_bytes, f.populated_bytes, f.fault_count]
umem.enable()
before = figures()
with umem.paging() as p:
    x = cp.ones((6, 4, 1 << 20), "f4")
    y = cp.ones(3 << 20, "f4")
    one = cp.zeros(1, "f4")
    other = threading.Thread(target=lambda: cp.ones(1 << 20, "f4").sum())
    other.start(); other.join()
    for _ in range(2):
        x.sum(); one += 1
    umem.prefetch(y)
    y[...] = 2
found = [b - a for a, b in zip(before, figures())]
print(found == [p.in_bytes, p.out_bytes, p.new_bytes, p.gpu_faults], found[0] > 96 << 20)
print(sorted(row.new_bytes >> 20 for row in p.by_line())[-2:])
print(sum(row.moved_bytes for row in p.by_line()) == p.in_bytes + p.out_bytes)
print(p.print_report() is None, umem.status().paging)
try:
    umem.paging().__enter__().__enter__()
except umem.UmemError as error:
    print(type(error).__name__)
"""
    found = lines(program, kernel_cache)
    assert found[:3] == ["True True", "[12, 96]", "True"]
    assert found[3].startswith("pages on T4 (simulated): ")
    assert found[-1] == "StateError" and "faults (simulated)" in found[-2]


@needs_software_gpu
def test_without_its_model_the_software_gpu_has_no_pages(kernel_cache: Path) -> None:
    start = """
import umem
gpu = umem.software_gpu("t4", "64MiB", force=True, model=False)
"""
    program = """
try:
    umem.paging().__enter__()
except umem.UmemError as error:
    print(error)
"""
    assert "without its model" in lines(program, kernel_cache, start=start)[0]


# -- CUPTI, by a stand-in of the calls that umem makes --------------------------------------------


@pytest.fixture
def cupti(monkeypatch: pytest.MonkeyPatch) -> Cupti:
    pytest.importorskip("cupy")
    stand_in = Cupti()
    stand_in.install(monkeypatch)
    return stand_in


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("cupy")
    from cuda_host_driver import HostDriver

    from umem.devices.cuda import CudaDevice

    found = CudaDevice(HostDriver())
    monkeypatch.setattr("umem.memory.counts.current_device", lambda: found)
    monkeypatch.setattr("umem.memory.mode_blocks.current_device", lambda: found)
    return found


def test_cuptis_records_become_moves_when_the_block_ends(cupti: Cupti, device: Any) -> None:
    with umem.managed() as memory, umem.paging() as p:
        array = memory.xp.empty(MIB, "u1")
        at = array.data.ptr
        p.begin()
        p.allocated(MIB, "", at)  # the stand-in's pool calls none of CuPy's hooks
        cupti.add(4, 3, at)
        cupti.add(1, 65_536, at, 2)
        cupti.add(1, 131_072, at + 65_536, 1)
        cupti.add(2, 65_536, at, 4)
        cupti.add(2, 4_096, at + MIB, 2)
        cupti.add(3, 0xDEAD, at)
        assert not p.moves
    assert (p.gpu_faults, p.host_faults) == (3, 1)
    assert (p.in_bytes, p.out_bytes) == (196_608, 69_632)
    assert (p.evicted_bytes, p.prefetched_bytes, p.new_bytes) == (65_536, 131_072, 0)
    first, second = p.by_line()
    assert first.place.endswith("become_moves_when_the_block_ends")
    assert (first.gpu_faults, first.host_faults, first.in_bytes) == (3, 1, 196_608)
    assert second == PagedMemory(ELSEWHERE, out_bytes=4_096)
    assert [config.kind for config in cupti.configs] == [1, 2, 3, 4]
    assert cupti.requested() == (8 << 20, 0)
    assert cupti.calls == [("configure", 4096, 4), ("enable", 25), ("flush", 1), ("disable", 25)]
    assert "(simulated)" not in str(p)
    with umem.paging() as again:
        assert cupti.calls[-1] == ("enable", 25)
        cupti.records.clear()
    assert not again.moves and len(p.moves) == 6


def test_a_cupti_that_refuses_leaves_nothing_on(cupti: Cupti, device: Any) -> None:
    cupti.error = RuntimeError("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED")
    with pytest.raises(DeviceError, match=r"MULTIPLE_SUBSCRIBERS.* one profiler at a time"):
        umem.paging().__enter__()
    cupti.error = None
    with umem.paging(), pytest.raises(StateError, match="another umem"):
        umem.paging().__enter__()
    assert not device.watches


def test_an_error_at_the_end_of_the_block_leaves_cupti_off(
    cupti: Cupti, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("cudaErrorIllegalAddress")

    monkeypatch.setattr(device, "synchronize", fail)
    with pytest.raises(RuntimeError, match="IllegalAddress"), umem.paging():
        pass
    assert cupti.calls[-1] == ("disable", 25)


@pytest.mark.parametrize(
    ("major", "wheels"),
    [
        (12, "cupti-python==12.8.0 nvidia-cuda-cupti-cu12"),
        (13, "'cupti-python==13.*' 'nvidia-cuda-cupti==13.*' pyelftools"),
    ],
)
def test_without_cupti_it_says_what_to_install_beside_cuda_core(
    device: Any, monkeypatch: pytest.MonkeyPatch, major: int, wheels: str
) -> None:
    device.driver.cuda_major = major
    monkeypatch.setitem(sys.modules, "cupti", None)
    monkeypatch.setitem(sys.modules, "cupti.cupti", None)
    with pytest.raises(MissingDependencyError) as error:
        umem.paging().__enter__()
    assert str(error.value).endswith(f": pip install --no-deps {wheels}")
    page = Path(__file__).parents[2] / "docs" / "reference" / "watching.md"
    assert f"`pip install --no-deps {wheels}`" in page.read_text("utf-8")
    assert places() and not device.watches
