"""The batch that fits is found without a trial: it fits, and the next one does not."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import umem
from umem.devices.specs import gpu_spec
from umem.errors import BudgetError, ScalingError, SizeError, UnknownGpuError
from umem.predict.batches.finding import batches_of
from umem.predict.batches.probing import KNEE, BatchSearch
from umem.predict.techniques.step_variants import StepVariants
from umem.trace import Trace
from umem.trace.events import Access, Alloc, Event, Free, Mark, Op
from umem.units import BLOCK_BYTES, KIB, MIB

VRAM = 64 * MIB


def step(batch: int, lasting: int = MIB, per_sample: tuple[int, ...] = (40_000, 9_000)) -> Trace:
    """A weight that stays, and activations that grow with the batch."""
    events: list[Event] = [Alloc(0, lasting, "parameter", "W", True), Mark("start")]
    for number, nbytes in enumerate(per_sample, 1):
        whole = Access(number, 0, nbytes * batch)
        events.append(Alloc(number, nbytes * batch, "activation", f"t{number}"))
        events.append(
            Op(f"f{number}", "forward", (Access(0, 0, lasting),), (whole,), 1000 * batch,
               nbytes * batch, "stream", 1e-5, 512 + nbytes * batch // 4)
        )  # fmt: skip
    for number in range(len(per_sample), 0, -1):
        whole = Access(number, 0, per_sample[number - 1] * batch)
        events.append(Op(f"b{number}", "backward", (whole,), (), 1000 * batch, whole.stop))
        events.append(Free(number))
    update = Op("SGD", "update", (), (Access(0, 0, lasting),), 1, lasting)
    return Trace([*events, update, Mark("step")])


def recorded(**shape: Any) -> Trace:
    return Trace.join([step(4, **shape), step(8, **shape)], (4, 8))


def fits(trace: Trace, batch: int, vram: int = VRAM) -> bool:
    """The same question, asked as `umem.choose` does."""
    spec = gpu_spec("t4").with_vram(vram)
    return StepVariants(trace, [spec], batch).fits(spec)


# -- the largest -------------------------------------------------------------------------------


def test_the_largest_batch_fits_and_the_next_one_does_not() -> None:
    trace = recorded()
    found = batches_of(trace, "t4", vram=VRAM)
    assert fits(trace, found.batch)
    assert found.next_batch == found.batch + 1
    assert not fits(trace, found.batch + 1)
    assert found.replay_count <= found.batch.bit_length() + 6
    assert found.largest.peak_bytes <= found.largest.reserved_bytes <= VRAM
    assert found.size == found.batch
    assert found.simulated


@given(
    st.integers(0, 20 * MIB),
    st.lists(st.integers(200, 3_000_000), min_size=1, max_size=5),
    st.integers(8, 200),
)
@settings(deadline=None, max_examples=40)
def test_whatever_the_step_what_is_found_fits_and_the_next_does_not(
    lasting: int, per_sample: list[int], mib: int
) -> None:
    trace = recorded(lasting=lasting, per_sample=tuple(per_sample))
    try:
        found = batches_of(trace, "t4", vram=mib * MIB)
    except BudgetError:
        assert not fits(trace, 1, mib * MIB)
        return
    assert fits(trace, found.batch, mib * MIB)
    assert found.next_batch is not None
    assert not fits(trace, found.next_batch, mib * MIB)


def test_the_reason_says_what_has_no_room() -> None:
    found = batches_of(recorded(), "t4", vram=VRAM)
    assert found.next_reason is not None
    assert "needs" in found.next_reason or "tensors take" in found.next_reason


def test_a_maximum_that_fits_ends_the_search() -> None:
    found = batches_of(recorded(), "t4", vram=VRAM, maximum=100)
    assert (found.batch, found.next_batch, found.next_reason) == (100, None, None)
    assert "does not fit" not in str(found)
    assert batches_of(recorded(), "t4", vram=VRAM, maximum=1).batch == 1


def test_a_margin_is_left_free() -> None:
    plain = batches_of(recorded(), "t4", vram=VRAM)
    less = batches_of(recorded(), "t4", vram=VRAM, margin=0.25)
    assert less.vram_bytes == VRAM * 3 // 4
    assert less.batch < plain.batch
    assert less.largest.reserved_bytes <= VRAM * 3 // 4


def test_of_a_step_along_axes_the_batch_is_found_for_the_other_sizes() -> None:
    points = [(batch, length) for batch in (4, 8) for length in (2, 4)]
    traces = [step(batch, per_sample=(20_000 * length,)) for batch, length in points]
    trace = Trace.join(traces, [{"batch": b, "length": n} for b, n in points])
    short, long = (batches_of(trace, vram=VRAM, size={"length": n}) for n in (4, 8))
    assert long.size == {"batch": long.batch, "length": 8}
    assert short.batch == pytest.approx(2 * long.batch, rel=0.1)
    assert batches_of(trace, vram=VRAM).size == short.size  # the largest recorded
    with pytest.raises(SizeError, match="no axis 'width'"):
        batches_of(trace, vram=VRAM, size={"length": 4, "width": 3})
    with pytest.raises(SizeError, match="other axes"):
        batches_of(trace, vram=VRAM, size=4)
    with pytest.raises(SizeError, match="other axes"):
        batches_of(recorded(), vram=VRAM, size=4)


# -- the quickest ------------------------------------------------------------------------------


def test_the_quickest_is_a_small_batch_whose_samples_take_no_longer() -> None:
    trace = recorded(per_sample=(40_000, 40_000, 400))
    found = batches_of(trace, "t4", vram="2GiB")
    least = found.largest.seconds_per_sample
    assert found.quickest.batch <= found.batch
    assert found.quickest.seconds_per_sample <= (1 + KNEE) * least * 1.001
    search = BatchSearch(trace, gpu_spec("t4").with_vram(2 << 30), None, 1 << 30)
    below = search.probe(found.quickest.batch // 2).step
    assert below is not None
    assert below.seconds_per_sample > found.quickest.seconds_per_sample


def test_the_seconds_are_those_of_a_choice() -> None:
    trace = recorded()
    found = batches_of(trace, "t4", vram=VRAM)
    options = umem.choose(trace, "t4", found.batch, vram=VRAM).options
    (plain,) = [option for option in options if option.name == "nothing"]
    assert plain.seconds == pytest.approx(found.largest.seconds, rel=0.02)
    assert plain.peak_bytes == found.largest.peak_bytes


# -- results -----------------------------------------------------------------------------------


def test_the_result_says_that_it_is_simulated_and_is_json() -> None:
    found = batches_of(recorded(), "t4", vram=VRAM)
    text = str(found)
    assert "all figures are simulated" in text
    assert f"largest batch         {found.batch:,}: " in text
    assert "least time a sample" in text
    content = found.to_json()
    assert content["largest"]["simulated_peak_bytes"] == found.largest.peak_bytes
    assert content["next_batch"] == found.next_batch
    assert content["confirmed"] is None


def test_the_text_has_the_sizes_of_the_other_axes_and_times_that_differ() -> None:
    points = [{"batch": b, "length": n} for b in (4, 8) for n in (16, 32)]
    each = [step(p["batch"], per_sample=(1000 * p["length"],)) for p in points]
    trace = Trace.join(each, points)
    assert "of VRAM, at length 32; " in str(batches_of(trace, "t4", vram=VRAM))
    found = batches_of(trace, "t4", vram=VRAM, size={"length": 64})
    heading, *lines = str(found).splitlines()
    assert "of VRAM, at length 64; " in heading
    times = re.findall(r"([\d.]+) us a sample", "\n".join(lines))
    digits = [time.replace(".", "").lstrip("0") for time in times]
    assert list(map(len, digits)) == [4, 4] and times[0] != times[1]
    assert "of VRAM; " in str(batches_of(recorded(), "t4", vram=VRAM))


# -- bad input ---------------------------------------------------------------------------------


def test_vram_too_small_for_a_batch_of_one_says_what_it_needs_and_what_helps() -> None:
    trace = recorded(lasting=30 * MIB, per_sample=(40 * MIB,))
    with pytest.raises(BudgetError, match=r"needs \d+\.\d MiB, and 64.0 MiB of VRAM") as caught:
        batches_of(trace, "t4", vram=VRAM)
    assert "umem.choose(trace, 't4', size=1" in str(caught.value)
    assert "recomputation" in str(caught.value)
    with pytest.raises(SizeError, match="at least one block"):
        batches_of(trace, "t4", vram=BLOCK_BYTES - 1)


def test_a_trace_that_cannot_be_scaled_says_how_to_record_two_sizes() -> None:
    with pytest.raises(ScalingError, match=r"umem.record_at\(step, sizes=\(4, 8\)\)"):
        batches_of(step(4))


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "8", True])
def test_batches_that_are_none_are_refused(wrong: Any) -> None:
    with pytest.raises(SizeError, match="maximum is a whole number"):
        batches_of(recorded(), maximum=wrong)


@pytest.mark.parametrize("wrong", [-0.1, 1, 1.5, math.nan, "5%", None])
def test_margins_that_are_none_are_refused(wrong: Any) -> None:
    with pytest.raises(SizeError, match="margin is a share of VRAM"):
        batches_of(recorded(), margin=wrong)


def test_an_unknown_gpu_is_refused() -> None:
    with pytest.raises(UnknownGpuError):
        batches_of(recorded(), "t5")


def test_a_recording_of_a_file_is_searched_as_it_was(tmp_path: Path) -> None:
    trace = recorded(per_sample=(30 * KIB, 7 * KIB))
    loaded = Trace.load(trace.save(tmp_path / "x"))
    assert batches_of(loaded, vram=VRAM) == batches_of(trace, vram=VRAM)
