"""The virtual GPU: the contract of devices, and events whose cost is worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import pytest
from contracts import DeviceContract

import umem
from umem._common.specs import COSTS, GpuSpec, gpu_spec
from umem.devices.base import Device, Policy
from umem.devices.virtual import VirtualGPU
from umem.devices.virtual.model import Model
from umem.errors import OutOfMemoryError
from umem.trace import Access, Alloc, Free, Hint, Mark, Op, Trace

US, MIB = 1e-6, 1 << 20
BLOCK = 2 * MIB
BLOCK_IN, BLOCK_OUT = BLOCK / 20e9, BLOCK / 10e9
LAUNCH = 10 * US
MANAGED = Policy("managed")
SPEC = GpuSpec(
    "toy", "Toy GPU", 1 << 30, 1 << 30, 1e12, 10e12, None, 20e9, 10e9, "made up", "made up"
)


class TestVirtualGPU(DeviceContract):
    @pytest.fixture
    def device(self) -> Iterator[Device]:
        with umem.virtual_gpu("v100-16gb", vram="64MiB") as gpu:
            yield gpu


class Machine:
    """A model with a few blocks of VRAM, and short ways to feed it."""

    def __init__(
        self,
        blocks: int,
        policy: Policy = MANAGED,
        *,
        allocator: str = "caching",
        backend: str = "numpy",
    ) -> None:
        self.policy = policy
        spec = SPEC.with_vram(blocks * BLOCK)
        self.model = Model(spec, COSTS, allocator, backend, lambda: self.policy)

    def alloc(self, tensor: int, nbytes: int, *, uploaded: bool = False) -> None:
        self.model.on_event(Alloc(tensor, nbytes, "activation", f"t{tensor}", uploaded))

    def free(self, tensor: int) -> None:
        self.model.on_event(Free(tensor))

    def op(
        self,
        reads: tuple[int, ...] = (),
        writes: tuple[int, ...] = (),
        flops: int = 0,
        traffic: int = 0,
        pattern: str = "stream",
        host: float | None = None,
        workspace: int | None = None,
    ) -> float:
        """Run one; returns how long it took from launch to end, on an idle GPU."""
        accesses = tuple(self.whole(t) for t in reads), tuple(self.whole(t) for t in writes)
        before = self.seconds
        self.model.on_event(Op("f", "array", *accesses, flops, traffic, pattern, host, workspace))
        return self.seconds - before

    def hint(self, action: str, tensor: int, place: int | str | None = 0, **more: bool) -> None:
        self.model.on_event(Hint(action, (self.whole(tensor),), place, **more))

    def whole(self, tensor: int) -> Access:
        return Access(tensor, 0, self.model.tensors[tensor].nbytes)

    @property
    def seconds(self) -> float:
        return self.model.clock.seconds

    @property
    def figures(self) -> object:
        return self.model.figures


def near(value: float) -> object:
    return pytest.approx(value, rel=1e-9, abs=1e-12)


def synchronized(machine: Machine) -> None:
    """Start the next operation from an idle GPU and an idle host."""
    machine.model.clock.host_seconds = machine.model.clock.device_seconds = machine.seconds
    machine.model.clock.link_seconds = machine.seconds


def test_a_tensor_is_populated_then_hit_then_streamed() -> None:
    machine = Machine(8)
    machine.alloc(0, 8 * BLOCK)
    assert machine.op(writes=(0,)) == near(LAUNCH + 8 * 137 * US)
    synchronized(machine)
    assert machine.op(reads=(0,)) == near(LAUNCH)
    machine.alloc(1, 8 * BLOCK)
    synchronized(machine)
    assert machine.op(writes=(1,)) == near(LAUNCH + 8 * (137 * US + BLOCK_OUT))
    synchronized(machine)
    assert machine.op(reads=(0,)) == near(LAUNCH + 8 * (200 * US + BLOCK_IN + BLOCK_OUT))
    figures = machine.model.figures
    assert figures.fault_count == 24
    assert figures.migrated_in_bytes == 8 * BLOCK and figures.migrated_out_bytes == 16 * BLOCK
    assert figures.populated_bytes == 16 * BLOCK and figures.peak_bytes == 16 * BLOCK
    assert figures.resident_peak_bytes == 8 * BLOCK


def test_an_operation_larger_than_vram_pays_at_every_pass() -> None:
    machine = Machine(8)
    machine.alloc(0, 9 * BLOCK)
    machine.op(writes=(0,))
    for _ in range(3):
        synchronized(machine)
        assert machine.op(reads=(0,)) == near(LAUNCH + 9 * (200 * US + BLOCK_IN + BLOCK_OUT))


def test_prefetch_on_allocation_saves_the_first_touch() -> None:
    machine = Machine(8, Policy("managed", prefetch=True))
    machine.alloc(0, 4 * BLOCK)
    assert machine.seconds == near(4 * 15 * US)
    synchronized(machine)
    assert machine.op(writes=(0,)) == near(LAUNCH)
    assert machine.model.figures.fault_count == 0


def test_a_prefetch_beside_the_work_hides_and_its_user_waits_for_it() -> None:
    machine = Machine(8)
    machine.alloc(0, 4 * BLOCK)
    machine.alloc(1, 2 * BLOCK)
    machine.op(writes=(0, 1))
    machine.hint("prefetch", 0, "cpu")
    synchronized(machine)
    start = machine.seconds
    machine.hint("prefetch", 0, 0, overlap=True)
    arrives = start + LAUNCH + 4 * (BLOCK_IN + 10 * US)
    machine.op(reads=(1,), flops=600_000_000)  # 0.1 ms: is done before the prefetch is
    assert machine.model.clock.device_seconds == near(start + 2 * LAUNCH + 100 * US)
    machine.op(reads=(0,), flops=600_000_000)
    assert machine.model.clock.device_seconds == near(arrives + 100 * US)
    machine.op(reads=(0,), flops=600_000_000)
    assert machine.model.clock.device_seconds == near(arrives + 200 * US)


def test_writing_waits_for_a_prefetch_too() -> None:
    machine = Machine(8)
    machine.alloc(0, 4 * BLOCK)
    machine.op(writes=(0,))
    machine.hint("prefetch", 0, "cpu")
    synchronized(machine)
    start = machine.seconds
    machine.hint("prefetch", 0, 0, overlap=True)
    machine.op(writes=(0,))
    assert machine.seconds == near(start + LAUNCH + 4 * (BLOCK_IN + 10 * US))


def test_memory_that_prefers_the_host_is_read_over_the_bus() -> None:
    machine = Machine(8)
    machine.alloc(0, 4 * BLOCK)
    machine.hint("preferred_location", 0, "cpu")
    synchronized(machine)
    nbytes = 4 * BLOCK
    assert machine.op(writes=(0,)) == near(LAUNCH + nbytes / (0.9 * 10e9))
    synchronized(machine)
    assert machine.op(reads=(0,)) == near(LAUNCH + nbytes / (0.9 * 20e9))
    assert machine.model.figures.remote_bytes == 2 * nbytes
    assert machine.model.driver.resident_count == 0 and machine.model.figures.fault_count == 0


def test_memory_on_the_host_that_is_read_and_written_crosses_the_bus_twice() -> None:
    machine = Machine(8)
    machine.alloc(0, 4 * BLOCK)
    machine.alloc(1, 2 * BLOCK)
    for tensor in (0, 1):
        machine.hint("preferred_location", tensor, "cpu")
    synchronized(machine)
    expected = LAUNCH + (4 + 2) * BLOCK / (0.9 * 20e9) + 4 * BLOCK / (0.9 * 10e9)
    assert machine.op(reads=(1, 0), writes=(0,)) == near(expected)
    assert machine.model.figures.remote_bytes == 10 * BLOCK


def test_a_part_of_a_block_costs_its_bytes_over_the_bus_and_a_block_in_vram() -> None:
    machine = Machine(8)
    machine.alloc(0, 4 * BLOCK)
    machine.hint("preferred_location", 0, "cpu")
    synchronized(machine)
    before = machine.seconds
    machine.model.on_event(Op("f", "array", (Access(0, 100, 100 + MIB),), ()))
    assert machine.seconds - before == near(LAUNCH + MIB / (0.9 * 20e9))
    machine.hint("preferred_location", 0, unset=True)
    synchronized(machine)
    before = machine.seconds
    machine.model.on_event(Op("f", "array", (Access(0, BLOCK - 1, BLOCK + 1),), ()))
    # one byte of each: the first block is on the host, the second was never written
    assert machine.seconds - before == near(LAUNCH + BLOCK_IN + 200 * US + 137 * US)


def test_read_mostly_saves_the_way_back() -> None:
    machine = Machine(4)
    machine.alloc(0, 4 * BLOCK)
    machine.alloc(1, 4 * BLOCK)
    machine.op(writes=(0,))
    machine.hint("read_mostly", 0, None)
    machine.hint("prefetch", 0, "cpu")
    machine.op(reads=(0,))
    synchronized(machine)
    assert machine.op(writes=(1,)) == near(LAUNCH + 4 * 137 * US)


def test_discarded_memory_is_not_copied_back() -> None:
    machine = Machine(4)
    machine.alloc(0, 4 * BLOCK)
    machine.alloc(1, 4 * BLOCK)
    machine.op(writes=(0,))
    machine.hint("discard", 0)
    synchronized(machine)
    assert machine.op(writes=(1,)) == near(LAUNCH + 4 * 137 * US)


def test_an_upload_costs_its_bytes_and_no_faults() -> None:
    managed, plain = Machine(8), Machine(8, Policy("unmanaged"))
    managed.alloc(0, 4 * BLOCK, uploaded=True)
    plain.alloc(0, 4 * BLOCK, uploaded=True)
    assert plain.seconds == near(LAUNCH + 4 * BLOCK_IN)
    assert managed.seconds == near(LAUNCH + 4 * (BLOCK_IN + 15 * US))
    for machine in (managed, plain):
        assert machine.model.figures.uploaded_bytes == 4 * BLOCK
        assert machine.model.figures.fault_count == 0


def test_cudamalloc_pays_for_what_it_pushes_out() -> None:
    machine = Machine(8)
    machine.alloc(0, 8 * BLOCK)
    machine.op(writes=(0,))
    synchronized(machine)
    before = machine.seconds
    machine.policy = Policy("unmanaged")
    machine.alloc(1, 3 * BLOCK)
    assert machine.seconds - before == near(3 * BLOCK_OUT)


def test_workspace_counts_while_the_operation_runs() -> None:
    for allocator in ("caching", "plain"):
        machine = Machine(8, Policy("unmanaged"), allocator=allocator)
        machine.alloc(0, 2 * BLOCK)
        machine.op(writes=(0,), workspace=5 * BLOCK)
        figures = machine.model.figures
        assert figures.peak_bytes == figures.resident_peak_bytes == 7 * BLOCK
        assert machine.model.counters.live_bytes == 2 * BLOCK
        with pytest.raises(OutOfMemoryError, match="'f' workspace"):
            machine.op(writes=(0,), workspace=7 * BLOCK)
        machine.op(writes=(0,), workspace=6 * BLOCK)


def test_managed_workspace_is_touched() -> None:
    machine = Machine(8)
    machine.alloc(0, 2 * BLOCK)
    synchronized(machine)
    assert machine.op(writes=(0,), workspace=3 * BLOCK) == near(LAUNCH + 5 * 137 * US)


def test_workspace_on_the_host_is_written_and_read_over_the_bus() -> None:
    machine = Machine(8, Policy("hybrid"))
    machine.alloc(0, 6 * BLOCK)
    machine.op(writes=(0,))
    synchronized(machine)
    with_room = machine.op(reads=(0,), workspace=2 * BLOCK)
    on_host = machine.op(reads=(0,), workspace=4 * BLOCK)
    bus = machine.model.spec.host_in_bandwidth, machine.model.spec.host_out_bandwidth
    least = sum(4 * BLOCK / bandwidth for bandwidth in bus)
    assert on_host - with_room > least
    assert machine.model.figures.remote_bytes == 8 * BLOCK


def test_without_a_cache_every_tensor_is_populated_again() -> None:
    populated = {}
    for allocator in ("caching", "plain"):
        machine = Machine(8, allocator=allocator)
        for tensor in range(10):
            machine.alloc(tensor, 2 * BLOCK)
            machine.op(writes=(tensor,))
            machine.free(tensor)
        populated[allocator] = machine.model.figures.populated_bytes // BLOCK
    assert populated == {"caching": 2, "plain": 20}


def test_host_time_counts_on_cupy_where_it_is_less_than_a_launch() -> None:
    times = {}
    for backend in ("numpy", "cupy"):
        for host in (1e-6, 1e-3):  # the second has waited for the GPU that recorded it
            machine = Machine(8, Policy("unmanaged"), backend=backend)
            for _ in range(10):
                machine.op(host=host)
            times[backend, host] = machine.seconds
    assert times.pop(("cupy", 1e-6)) == near(10e-6)
    assert list(times.values()) == [near(10 * LAUNCH)] * 3


def test_steps_are_timed_between_their_marks() -> None:
    machine = Machine(8, Policy("unmanaged"))
    for flops in (6_000_000_000, 12_000_000_000):
        machine.op(flops=flops)
        machine.model.on_event(Mark("step"))
    machine.op(flops=6_000_000_000)
    assert machine.model.figures.step_seconds == (near(LAUNCH + 1e-3), near(2e-3))


def test_vram_is_the_tables_usable_figure_or_what_was_asked_for() -> None:
    assert VirtualGPU("rtx-5090").vram_bytes == gpu_spec("rtx-5090").usable_bytes
    assert VirtualGPU("rtx-5090", vram_bytes=5 * BLOCK + 7).vram_bytes == 5 * BLOCK + 7
    assert VirtualGPU("rtx-5090", vram_bytes=5 * BLOCK + 7).model.driver.block_count == 5


def test_synchronize_lets_the_host_wait() -> None:
    gpu = VirtualGPU(SPEC, vram_bytes=8 * BLOCK)
    gpu.on_event(Op("f", "array", (), (), flops=6_000_000_000))
    assert gpu.model.clock.host_seconds == near(LAUNCH)
    gpu.synchronize()
    assert gpu.model.clock.host_seconds == near(LAUNCH + 1e-3)


def test_the_timeline_is_thinned_out_and_keeps_its_order() -> None:
    machine = Machine(8, Policy("unmanaged"))
    machine.alloc(0, BLOCK)
    for _ in range(50_000):
        machine.model.on_event(Mark("x"))
    machine.free(0)
    timeline = machine.model.counters.timeline
    assert 5_000 <= len(timeline) <= 20_000
    assert [sample.seconds for sample in timeline] == sorted(s.seconds for s in timeline)
    assert machine.model.figures.resident_peak_bytes == BLOCK


def test_a_live_run_and_a_replay_of_its_trace_agree_in_every_figure() -> None:
    with umem.virtual_gpu("v100-16gb", vram="12MiB") as gpu, umem.managed() as memory:
        with umem.record() as recorder:
            xp = memory.xp
            arrays = [xp.full((BLOCK // 2,), value, "float32") for value in range(3)]
            umem.advise(arrays[0], "read_mostly")
            umem.prefetch(arrays[2], stream=object())
            for _ in range(3):
                total = arrays[0] + arrays[1]
                total *= arrays[2]
                del total
            umem.prefetch(arrays[1], "cpu")
            del arrays
    replayed = umem.replay(recorder.trace, "v100-16gb", "managed", "12MiB")
    assert replayed.fits
    assert asdict(replayed.figures) == asdict(gpu.figures)
    assert replayed.figures.migrated_in_bytes > 0


def test_a_replay_that_does_not_fit_says_why() -> None:
    trace = Trace([Alloc(0, 100 * BLOCK, "parameter", "W")])
    replayed = umem.replay(trace, "t4", "unmanaged", vram="32MiB")
    assert not replayed.fits and "'W' parameter" in str(replayed.reason)
    assert umem.replay(trace, "t4", "managed", vram="32MiB").fits
