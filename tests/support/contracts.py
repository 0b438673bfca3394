"""What every device promises; a device's tests subclass `DeviceContract`.

A subclass gives the fixture ``device``: the device that umem's functions use while it is there.
It may override ``hints``, which tests that give hints ask for, to skip where hints cannot work.
No test holds more than 64 MiB.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import umem
from umem.devices import PRESETS, Device, Policy
from umem.errors import DeviceError, HintError, LimitError, OutOfMemoryError, SizeError, StateError

MIB = 1 << 20


class DeviceContract:
    """Subclass it, name the subclass ``Test...`` and give it the fixture ``device``."""

    @pytest.fixture
    def hints(self, device: Device) -> Device:
        return device

    @pytest.fixture
    def memory_block(self, device: Device) -> Any:
        blocks = {"managed": umem.managed, "hybrid": umem.hybrid, "unmanaged": umem.unmanaged}
        return lambda mode, **kwargs: blocks[mode](**kwargs)

    # -- modes -----------------------------------------------------------------------------

    @pytest.mark.parametrize("mode", ["unmanaged", "managed", "hybrid"])
    def test_arrays_compute_the_same_in_every_mode(self, memory_block: Any, mode: str) -> None:
        with memory_block(mode) as memory:
            array = memory.xp.arange(MIB, dtype="int32")
            array[::2] *= 3
            total = int((array + 1).sum())
        expected = np.arange(MIB, dtype="int64")
        expected[::2] *= 3
        assert total == int((expected + 1).sum())

    def test_blocks_nest_and_the_innermost_decides(self, memory_block: Any) -> None:
        with memory_block("managed") as memory:
            outer = memory.xp.ones(4 * MIB, "uint8")
            with memory_block("unmanaged"):
                inner = memory.xp.ones(4 * MIB, "uint8")
            after = memory.xp.ones(4 * MIB, "uint8")
            found = [umem.location(array).managed for array in (outer, inner, after)]
        assert found == [True, False, True]

    def test_what_was_there_is_back_after_an_exception(self, memory_block: Any) -> None:
        with memory_block("unmanaged") as memory:
            with pytest.raises(ZeroDivisionError), memory_block("managed", limit="8MiB"):
                raise ZeroDivisionError
            array = memory.xp.ones(16 * MIB, "uint8")
            assert not umem.location(array).managed

    def test_a_block_is_a_decorator_too(self, device: Device, memory_block: Any) -> None:
        @memory_block("managed")
        def make() -> Any:
            return device.xp.ones(4 * MIB, "uint8")

        assert [umem.location(make()).managed for _ in range(2)] == [True, True]

    def test_arrays_outlive_their_block(self, memory_block: Any) -> None:
        with memory_block("managed") as memory:
            array = memory.xp.full(4 * MIB, 7, "uint8")
        assert int(array.min()) == int(array.max()) == 7
        assert umem.location(array).managed

    def test_restoring_twice_is_an_error_and_changes_nothing(self, device: Device) -> None:
        outer = device.install(Policy("managed"), everywhere=False)
        inner = device.install(Policy("unmanaged"), everywhere=False)
        inner()
        with pytest.raises(StateError):
            inner()
        assert umem.location(device.xp.ones(4 * MIB, "uint8")).managed
        outer()

    def test_what_is_restored_out_of_order_ends_alone(self, device: Device) -> None:
        outer = device.install(Policy("unmanaged"), everywhere=False)
        inner = device.install(Policy("managed"), everywhere=False)
        outer()
        assert umem.location(device.xp.ones(4 * MIB, "uint8")).managed
        inner()
        assert not umem.status().on

    def test_enable_and_disable(self, device: Device) -> None:
        handle = umem.enable(limit="48MiB")
        try:
            assert umem.enable(limit="48MiB") is handle
            with pytest.raises(StateError):
                umem.enable(limit="40MiB")
            with pytest.raises(StateError), umem.unmanaged():
                umem.disable()
            assert umem.location(device.xp.ones(4 * MIB, "uint8")).managed
        finally:
            umem.disable()
        with pytest.raises(StateError):
            umem.disable()
        assert not umem.location(device.xp.ones(4 * MIB, "uint8")).managed

    def test_hybrid_is_unmanaged_up_to_its_limit_and_computes_beyond(
        self, hints: Device, memory_block: Any
    ) -> None:
        with memory_block("hybrid", limit="8MiB") as memory:
            arrays = [memory.xp.full(4 * MIB, value, "uint8") for value in range(4)]
            managed = [umem.location(array).managed for array in arrays]
            assert managed == [False, False, True, True]
            assert [int(array.max()) for array in arrays] == [0, 1, 2, 3]

    # -- limits ----------------------------------------------------------------------------

    @pytest.mark.parametrize("mode", ["managed", "unmanaged"])
    def test_a_limit_raises_and_leaves_everything_usable(
        self, memory_block: Any, mode: str
    ) -> None:
        with memory_block(mode, limit="8MiB") as memory:
            kept = memory.xp.full(4 * MIB, 5, "uint8")
            for kind in (LimitError, OutOfMemoryError, MemoryError):
                with pytest.raises(kind):
                    memory.xp.ones(6 * MIB, "uint8")
            small = memory.xp.full(2 * MIB, 6, "uint8")
            assert (int(kept.min()), int(small.max())) == (5, 6)
        with memory_block(mode) as memory:
            assert int(memory.xp.ones(16 * MIB, "uint8").max()) == 1

    def test_a_limit_below_what_is_in_use_is_refused_and_nothing_is_entered(
        self, memory_block: Any
    ) -> None:
        with memory_block("managed") as memory:
            array = memory.xp.ones(16 * MIB, "uint8")
            with pytest.raises(SizeError), memory_block("managed", limit="8MiB"):
                raise AssertionError("entered")
            assert int(array.max()) == 1 and umem.location(memory.xp.ones(4 * MIB, "u1")).managed

    # -- hints -----------------------------------------------------------------------------

    def test_a_prefetch_returns_the_bytes_and_is_read_back(
        self, hints: Device, memory_block: Any
    ) -> None:
        with memory_block("managed") as memory:
            array = memory.xp.ones((4, MIB), "float32")
            for place in (None, "cpu", hints.ordinal):
                assert umem.prefetch(array, place) == array.nbytes
                hints.synchronize()
                expected = hints.ordinal if place is None else place
                assert umem.location(array).last_prefetch == expected
            assert float(array.sum()) == 4 * MIB

    def test_a_prefetch_of_a_view_returns_exactly_its_bytes(
        self, hints: Device, memory_block: Any
    ) -> None:
        with memory_block("managed") as memory:
            array = memory.xp.ones((8, MIB), "float32")
            for view in (array[2:5], array[::-1][:3], array[1], array[::2], array[:, : MIB // 2]):
                assert umem.prefetch(view, "cpu") == view.nbytes
            hints.synchronize()

    def test_a_prefetch_reaches_the_view_and_not_its_neighbours(
        self, hints: Device, memory_block: Any
    ) -> None:
        with memory_block("managed") as memory:
            array = memory.xp.ones((8, MIB), "uint8").reshape(2, 4 * MIB)
            umem.prefetch(array)
            umem.prefetch(array[0], "cpu")
            hints.synchronize()
            assert umem.location(array[0]).last_prefetch == "cpu"
            assert umem.location(array[1]).last_prefetch == hints.ordinal
            assert umem.location(array).last_prefetch is None

    @pytest.mark.parametrize(
        ("advice", "place", "field", "expected", "nothing"),
        [
            ("read_mostly", None, "read_mostly", True, False),
            ("preferred_location", None, "preferred", "gpu", None),
            ("preferred_location", "cpu", "preferred", "cpu", None),
            ("accessed_by", None, "accessed_by", ("gpu",), ()),
            ("accessed_by", "cpu", "accessed_by", ("cpu",), ()),
        ],
    )
    def test_advice_is_read_back_and_taken_back(
        self,
        hints: Device,
        memory_block: Any,
        advice: Any,
        place: Any,
        field: str,
        expected: Any,
        nothing: Any,
    ) -> None:
        if expected == "gpu":
            expected = hints.ordinal
        elif expected == ("gpu",):
            expected = (hints.ordinal,)
        with memory_block("managed") as memory:
            array = memory.xp.ones(8 * MIB, "uint8")
            assert getattr(umem.location(array), field) == nothing
            assert umem.advise(array, advice, place) == array.nbytes
            assert getattr(umem.location(array), field) == expected
            assert umem.advise(array, advice, place, unset=True) == array.nbytes
            assert getattr(umem.location(array), field) == nothing

    def test_a_preferred_location_is_taken_back_without_saying_which(
        self, hints: Device, memory_block: Any
    ) -> None:
        with memory_block("managed") as memory:
            array = memory.xp.ones(8 * MIB, "uint8")
            umem.advise(array, "preferred_location", "cpu")
            umem.advise(array, "preferred_location", unset=True)
            assert umem.location(array).preferred is None

    def test_advice_reaches_the_view_and_not_its_neighbours(
        self, hints: Device, memory_block: Any
    ) -> None:
        with memory_block("managed") as memory:
            array = memory.xp.ones((2, 8 * MIB), "uint8")
            umem.advise(array[1], "read_mostly")
            found = [umem.location(part).read_mostly for part in (array[0], array[1], array)]
            assert found == [False, True, False]
            umem.advise(array, "read_mostly", unset=True)

    @pytest.mark.parametrize("name", sorted(PRESETS))
    def test_presets_are_taken_back(self, hints: Device, memory_block: Any, name: Any) -> None:
        with memory_block("managed") as memory:
            array = memory.xp.ones(8 * MIB, "uint8")
            before = umem.location(array)
            assert umem.preset(array, name) == array.nbytes
            given = umem.location(array)
            assert given.read_mostly or given.preferred is not None
            assert umem.preset(array, name, unset=True) == array.nbytes
            after = umem.location(array)
        for field in ("read_mostly", "preferred", "accessed_by"):
            assert getattr(after, field) == getattr(before, field)

    @pytest.mark.parametrize("name", sorted(PRESETS))
    def test_memory_of_a_preset_is_advised_from_the_start_and_kept_apart(
        self, hints: Device, memory_block: Any, name: Any
    ) -> None:
        with memory_block("managed") as memory:
            plain = memory.xp.ones(8 * MIB, "uint8")
            with memory_block("managed", preset=name):
                array = memory.xp.ones(8 * MIB, "uint8")
            given, other = umem.location(array), umem.location(plain)
            assert given.read_mostly or given.preferred is not None
            assert (other.read_mostly, other.preferred, other.accessed_by) == (False, None, ())
            del array
            reused = memory.xp.ones(8 * MIB, "uint8")
            found = umem.location(reused)
        assert (found.read_mostly, found.preferred, found.accessed_by) == (False, None, ())

    def test_unmanaged_memory_takes_no_hints(self, hints: Device, memory_block: Any) -> None:
        with memory_block("unmanaged") as memory:
            array = memory.xp.ones(4 * MIB, "uint8")
            assert umem.prefetch(array, "cpu") == umem.prefetch(array) == 0
            assert umem.advise(array, "read_mostly") == umem.preset(array, "streaming") == 0
            location = umem.location(array)
            assert (location.managed, location.preferred, location.read_mostly) == (
                False,
                None,
                False,
            )
            with pytest.raises(HintError, match="managed"):
                umem.prefetch(array, strict=True)
            with pytest.raises(HintError, match="managed"):
                umem.advise(array, "read_mostly", strict=True)

    def test_a_place_that_is_not_there_is_refused(self, hints: Device, memory_block: Any) -> None:
        with memory_block("managed") as memory:
            array = memory.xp.ones(8 * MIB, "uint8")
            for place in ("gpu", -1, True, 0.0):
                with pytest.raises(HintError):
                    umem.prefetch(array, place)
                with pytest.raises(HintError):
                    umem.advise(array, "preferred_location", place)
            with pytest.raises(DeviceError):
                umem.prefetch(array, 4096)
            with pytest.raises(DeviceError):
                umem.advise(array, "preferred_location", 4096)
            with pytest.raises(HintError, match="read_mostly"):
                umem.advise(array, "read_only")  # type: ignore[arg-type]
            location = umem.location(array)
            assert location.preferred is None and not location.read_mostly

    # -- views of the host -----------------------------------------------------------------

    def test_a_host_view_shares_the_memory_in_both_directions(self, memory_block: Any) -> None:
        with memory_block("managed") as memory:
            array = memory.xp.arange(MIB, dtype="int32")
            part = array[10:20][::-1]
            view = umem.as_numpy(part)
            assert view.tolist() == list(range(19, 9, -1))
            view[:] = -1
            assert int(array[:30].sum()) == sum(range(10)) - 10 + sum(range(20, 30))
            array += 1
            assert umem.as_numpy(part).max() == umem.as_numpy(part).min() == 0

    def test_a_host_view_outlives_its_array(self, memory_block: Any) -> None:
        with memory_block("managed") as memory:
            view = umem.as_numpy(memory.xp.full(4 * MIB, 7, "uint8"))
            memory.xp.full(4 * MIB, 8, "uint8")
        assert view.min() == view.max() == 7

    def test_unmanaged_memory_has_no_host_view(self, memory_block: Any) -> None:
        with memory_block("unmanaged") as memory:
            with pytest.raises(HintError, match="not managed memory"):
                umem.as_numpy(memory.xp.ones(4 * MIB, "uint8"))

    # -- sizes and books -------------------------------------------------------------------

    @pytest.mark.parametrize("mode", ["unmanaged", "managed", "hybrid"])
    def test_arrays_without_elements(self, hints: Device, memory_block: Any, mode: str) -> None:
        with memory_block(mode) as memory:
            for array in (memory.xp.zeros((0, 3), "float32"), memory.xp.ones(8)[5:5]):
                assert array.nbytes == 0 and float(array.sum()) == 0.0
                assert umem.prefetch(array, "cpu") == umem.advise(array, "read_mostly") == 0
                assert umem.prefetch(array, "cpu", strict=True) == 0
                umem.location(array)

    def test_usage_is_consistent(self, device: Device, memory_block: Any) -> None:
        before = device.usage()
        with memory_block("managed") as memory:
            array = memory.xp.ones(16 * MIB, "uint8")
            with memory_block("unmanaged"):
                other = memory.xp.ones(16 * MIB, "uint8")
            usage = device.usage()
        assert usage.managed_bytes >= max(array.nbytes, before.managed_bytes)
        assert usage.reserved_bytes >= usage.managed_bytes + other.nbytes
        assert usage.peak_bytes >= usage.reserved_bytes
        assert usage.resident_bytes is None or other.nbytes <= usage.resident_bytes
        assert usage.resident_bytes is None or usage.resident_bytes <= device.vram_bytes
        assert usage.paging

    def test_status_says_what_is_on(self, device: Device, memory_block: Any) -> None:
        assert not umem.status().on
        with memory_block("managed", limit="32MiB"):
            status = umem.status()
        assert (status.on, status.mode, status.limit_bytes) == (True, "managed", 32 * MIB)
        assert (status.device, status.simulated) == (device.name, device.simulated)
        assert not umem.status().on
        assert device.name in str(status)
