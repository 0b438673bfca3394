"""`umem.lookahead`: a loop tells what it uses, and managed arrays are moved before that."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from software_programs import needs_software_gpu, run

import umem
from umem.errors import DeviceNotFoundError, HintError, LookaheadWarning
from umem.memory.pager import Pager

MIB = 1 << 20


@pytest.fixture(name="xp")
def xp_fixture() -> Iterator[Any]:
    """Managed memory on a virtual GPU that has room for four chunks of 4 MiB."""
    with umem.virtual_gpu("v100-16gb", "16MiB"), umem.managed() as memory:
        yield memory.xp


def six(xp: Any, mib: int = 4) -> list[Any]:
    return [xp.ones(mib * MIB // 4, np.float32) for _ in range(6)]


def go(look: Any, chunks: list[Any], rounds: int) -> None:
    for _ in range(rounds):
        for one in chunks:
            look.uses(one)
        look.step()


def test_chunks_are_yielded_in_order_and_move_from_the_first_round_on(xp: Any) -> None:
    chunks = six(xp)
    look = umem.lookahead(chunks)
    seen = [one for _ in range(3) for one in look]
    assert all(one is other for one, other in zip(seen, chunks * 3, strict=True))
    assert (look.round_count, look.followed_count) == (3, 3)
    assert look.sent_bytes and look.fetched_bytes
    text = str(look)
    assert text.startswith("3 of 3 rounds in a known order") and "(simulated)" in text


def test_an_order_that_is_told_is_followed_from_the_second_round_on(xp: Any) -> None:
    chunks, look = six(xp), umem.lookahead()
    go(look, chunks, 1)
    assert (look.followed_count, look.sent_bytes) == (0, 0)
    go(look, chunks, 2)
    assert look.followed_count == 2
    moved = look.sent_bytes
    assert moved
    go(look, chunks[::-1], 1)  # another order is not helped, but for what was begun
    assert (look.followed_count, look.sent_bytes) == (2, moved)
    go(look, chunks[::-1], 1)
    assert look.followed_count == 3


def test_a_loop_within_a_loop_over_chunks_tells_more_uses(xp: Any) -> None:
    chunks, other = six(xp), xp.ones(MIB, np.float32)
    look = umem.lookahead(chunks)
    for _ in range(3):
        for one in look:
            look.uses(one, other)
    assert (look.round_count, look.followed_count) == (3, 2)


def test_nothing_moves_while_all_has_room(xp: Any) -> None:
    chunks = six(xp, 1)
    look = umem.lookahead(chunks)
    for _ in range(3):
        list(look)
    assert look.followed_count == 3
    assert not look.sent_bytes + look.fetched_bytes


def test_parts_of_one_array_are_chunks(xp: Any) -> None:
    whole = xp.ones((6, MIB), np.float32)
    look = umem.lookahead([whole[i : i + 1] for i in range(6)])
    for _ in range(3):
        list(look)
    assert 0 < look.sent_bytes <= 3 * whole.nbytes
    assert look.sent_bytes % (2 * MIB) == 0


def test_arrays_that_share_memory_are_counted_once(xp: Any) -> None:
    """As often as they are told, no more than VRAM has room is planned with."""
    whole, look = xp.ones((6, MIB), np.float32), umem.lookahead()
    for _ in range(3):
        for i in range(5):
            look.uses(whole[i : i + 2], whole[i : i + 1])
        look.step()
    assert look.followed_count == 2
    assert look.sent_bytes
    assert look.fetched_bytes


def test_temporary_arrays_have_room_beside_arrays_that_share_blocks_with_free_memory() -> None:
    """Arrays of 2.5 MiB touch blocks of 4 MiB; no more than their own bytes are theirs."""
    moved = []
    for is_told in (False, True):
        with umem.virtual_gpu("v100-16gb", "32MiB") as gpu, umem.managed() as memory:
            chunks = [memory.xp.ones(5 * MIB // 8, np.float32) for _ in range(14)]
            look = umem.lookahead()
            learned = 0
            for number in range(4):
                learned = gpu.figures.migrated_in_bytes if number == 2 else learned
                for chunk in chunks:
                    if is_told:
                        look.uses(chunk)
                    (memory.xp.ones(2 * MIB, np.float32) + chunk[0]).sum()
                    (chunk + chunk).sum()
                look.step()
            moved.append(gpu.figures.migrated_in_bytes - learned)
    assert moved[1] < 0.5 * moved[0]


def test_a_loop_that_is_left_early_ends_no_round(xp: Any) -> None:
    chunks = six(xp)
    look = umem.lookahead(chunks)
    list(look)
    for number, _ in enumerate(look):
        if number == 2:
            break
    assert look.round_count == 1
    list(look)
    assert look.followed_count == look.round_count == 2


def test_arrays_that_are_told_may_die(xp: Any) -> None:
    chunks, look = six(xp), umem.lookahead()
    go(look, chunks, 2)
    kept = chunks.pop()
    chunks.clear()
    gc.collect()
    look.uses(kept)
    look.step()
    look.step()  # without a use it does nothing
    assert look.round_count == 3


def test_a_driver_that_refuses_ends_prefetch_and_not_the_program(
    xp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks, look = six(xp), umem.lookahead()
    go(look, chunks, 1)

    def refuse(*moves: Any) -> None:
        raise RuntimeError("no stream")

    monkeypatch.setattr(Pager, "move", refuse)
    with pytest.warns(LookaheadWarning, match="lookahead has stopped: no stream"):
        go(look, chunks, 2)
    assert look.off == "no stream"
    assert str(look).endswith("off: no stream")


def test_arrays_with_gaps_and_things_without_arrays_are_refused(xp: Any) -> None:
    look = umem.lookahead()
    whole = xp.ones((64, 64), np.float32)
    with pytest.raises(HintError, match="has gaps"):
        look.uses(whole[:, :3])
    with pytest.raises(HintError, match="has gaps"):
        umem.lookahead([whole[::2]])
    with pytest.raises(HintError, match="holds no arrays"):
        look.uses("x")
    look.uses(whole.T, np.ones(0), [whole, {"again": whole}], None)
    look.step()
    assert look.round_count == 1


def test_one_array_is_no_loop_of_chunks(xp: Any) -> None:
    with pytest.raises(HintError, match=r"got one array: pass \[x\] to use the array as one chunk"):
        umem.lookahead(xp.ones((4, MIB), np.float32))


@pytest.mark.parametrize("depth", [0, -1, True, 1.5, "2"])
def test_a_depth_that_is_none_is_refused(depth: Any) -> None:
    with pytest.raises(ValueError, match="depth must be an int from 1 up"):
        umem.lookahead(depth=depth)


def test_without_a_device_there_is_nothing_to_look_ahead_on() -> None:
    with pytest.raises(DeviceNotFoundError):
        umem.lookahead()


@needs_software_gpu
def test_cupy_s_loops_take_less_simulated_time_and_have_the_same_bits(kernel_cache: Path) -> None:
    program = """
import json
from umem.devices import current_device
def smooth(told):
    current_device().give_back()
    with umem.managed():
        parts = [cp.arange(1 << 20, dtype=cp.float32) + i for i in range(24)]
        look = umem.lookahead()
        begin = gpu.figures.seconds
        for _ in range(4):
            for i in range(24):
                if told:
                    look.uses(parts[i - 1], parts[i])
                parts[i] *= cp.float32(0.5)
                parts[i] += parts[i - 1]
            look.step()
        return gpu.figures.seconds - begin, float(sum(part.sum() for part in parts)), look
plain, total, _ = smooth(False)
told, same, look = smooth(True)
print(json.dumps([told / plain, total == same, look.followed_count]))
try:
    look.uses(np.ones(3))
except umem.UmemError as error:
    print(error)
with umem.unmanaged():
    look.uses(cp.ones(3))
with umem.managed():  # parts of an array that has gaps itself are left to the driver
    whole = cp.ones((4, 12, 1 << 19), cp.float32).transpose(1, 0, 2)
    other = cp.copy(whole, order="K")
    assert other.base is None and not other.flags.c_contiguous
    gone = umem.lookahead()
    for _ in range(3):
        for i in range(12):
            gone.uses(whole[i, 0], other[i, 0])
        gone.step()
    print(gone.followed_count, gone.off, gone.sent_bytes > 0)
"""
    first, second, third = run(program, kernel_cache).splitlines()
    assert third == "2 None True"
    ratio, same, followed = json.loads(first)
    assert ratio < 0.8
    assert same
    assert followed == 3
    assert "not on the current device" in second


@needs_software_gpu
def test_arrays_that_have_room_in_bytes_and_none_in_blocks_are_moved(kernel_cache: Path) -> None:
    program = """
with umem.managed():
    look = umem.lookahead([cp.ones(((6 << 20) + 4096) // 4, "f4") for _ in range(9)])
    for _ in range(6):
        for x in look:
            x += 1
print(umem.status().reserved_bytes < 64 << 20, gpu.figures.migrated_in_bytes < 150 << 20)
"""
    assert run(program, kernel_cache).splitlines() == ["True True"]
