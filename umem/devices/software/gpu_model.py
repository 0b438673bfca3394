"""The observer of a software GPU: VRAM, pages and simulated time of one or several devices.

Each device has its own `Model`, whose tensors are the allocations by number; all share one host.

Models: a copy between two devices uses their link, NVLink if the GPU has it and the host's bus
otherwise, and both wait for it; a kernel that uses a peer's memory waits for its bytes over that
link. Managed memory is on the device that touched it last, in whole blocks, which move between
devices through the host. Does not model: copies between devices concurrent with operations, links
of more than two devices at a time, pages that several devices read (``read_mostly``) or that one
device uses on another (``accessed_by``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from umem._common.specs import COSTS, GpuSpec
from umem.devices.base import Policy
from umem.devices.software.copy_streams import CopyStreams
from umem.devices.software.recording_observer import RecordingObserver, accesses_of, event_of
from umem.devices.virtual.driver import covered
from umem.devices.virtual.model import Model
from umem.errors import OutOfMemoryError
from umem.host_cuda import DEVICE, HOST, MANAGED, Allocation, DeviceCopy, Launch, MemoryRange
from umem.trace import Access, Alloc, Event, Free, Hint, Op
from umem.units import BLOCK_BYTES

_POLICIES = {DEVICE: Policy("unmanaged"), MANAGED: Policy("managed")}


class ModelledDevice:
    """A device's VRAM, pages and time.

    Attributes:
        model: the model of them.
        beside: its copy-only streams.
    """

    def __init__(self, spec: GpuSpec, policy: Callable[[], Policy]) -> None:
        self.model = Model(spec, COSTS, "plain", "numpy", policy)
        self.beside = CopyStreams(self.model)

    def knows(self, number: int) -> bool:
        """Tell whether an allocation is known here; managed memory may be on several devices."""
        return number in self.model.tensors

    def has_any(self, access: Access) -> bool:
        """Tell whether any block of managed memory has contents here, in VRAM or on the host."""
        start, stop = self.blocks(access)
        residency = self.model.driver.residency
        places = residency.resident, residency.host
        return any(place.find(1, start, stop) >= 0 for place in places)

    def blocks(self, access: Access) -> tuple[int, int]:
        """Return the blocks ``(start, stop)`` of a part of an allocation."""
        return covered(self.model.tensors[access.tensor].part(access.start, access.stop))

    def restart(self) -> None:
        """Restart time and counts at zero, and peaks at the current levels."""
        model = self.model
        with model.lock:
            model.clocks.restart()
            model.counters.restart()
            model.copies.restart()
            model.counters.restart_peaks(model.driver.reserved_bytes, model.driver.resident_count)
        self.beside.restart()


class GpuModel(RecordingObserver):
    """Updates VRAM, pages and time with events of the devices, and notifies recorders.

    Args:
        spec, count: see `Observer`.

    Attributes:
        devices: the model of each device.
        addresses: the addresses of allocations, by number.
    """

    follows_work = True

    def __init__(self, spec: GpuSpec, count: int = 1) -> None:
        super().__init__(spec, count)
        self._kind = DEVICE
        self.devices = [ModelledDevice(spec, lambda: _POLICIES[self._kind]) for _ in range(count)]
        self.addresses: dict[int, int] = {}
        self._turn = self.devices[0]
        self._freed: list[int] = []
        self._is_telling = False

    def turn_to(self, device: ModelledDevice) -> Model:
        """Return a device's model, with its clock advanced to the program's: all share one host."""
        if device is not self._turn:
            before, self._turn = self._turn.model.clock, device
            clock = device.model.clock
            clock.host_seconds = max(clock.host_seconds, before.host_seconds)
        return device.model

    def _tell(
        self, event: Event | None, device: ModelledDevice, step: Callable[[], None] | None = None
    ) -> None:
        """Apply an event or a step to a model, and frees by the garbage collector.

        The collector may run in the middle of the model, which would mistake it for a signal.
        """
        with self.lock:
            self._is_telling = True
            try:
                while self._freed:
                    self._tell_free(Free(self._freed.pop()))
                model = self.turn_to(device)
                if event is not None:
                    model.on_event(event)
                if step is not None:
                    step()
            finally:
                self._is_telling = False

    def _tell_free(self, event: Free) -> None:
        """Free in every model that knows the memory; managed memory may be in several."""
        for device in self.devices:
            if device.knows(event.tensor):
                self.turn_to(device).on_event(event)

    # -- memory ----------------------------------------------------------------------------

    def may_allocate(self, memory: Allocation) -> bool:
        try:
            self._tell_alloc(memory, self.devices[memory.device])
        except OutOfMemoryError:
            return False
        return True

    def _tell_alloc(self, memory: Allocation, device: ModelledDevice) -> None:
        with self.lock:
            self._kind = memory.kind
            name = "cudaMallocManaged" if memory.is_managed else "cudaMalloc"
            self._tell(Alloc(memory.number, memory.nbytes, "array", name), device)

    def allocated(self, memory: Allocation) -> None:
        self.addresses[memory.number] = memory.address

    def freed(self, memory: Allocation) -> None:
        self.addresses.pop(memory.number, None)
        super().freed(memory)
        if memory.kind != HOST:
            self._freed.append(memory.number)
            if not self._is_telling:
                self._tell(None, self.devices[memory.device])

    def free_bytes(self, device: int) -> int:
        pinned = self.devices[device].model.driver.pinned_count * BLOCK_BYTES
        return max(0, self.spec.usable_bytes - pinned)

    # -- work ------------------------------------------------------------------------------

    def launched(self, launch: Launch) -> None:
        stream, beside = launch.stream, self.devices[launch.device].beside
        if stream is not None and beside.may_take(stream):
            with self.lock:
                beside.compute(stream)
        op = event_of(launch)
        self._tell_operation(op, launch)
        if self.listener is not None:
            self.listener.operation(op, launch)

    def _tell_operation(self, op: Op, launch: Launch) -> None:
        """Run an operation on a device; its accesses to a peer's memory use their link."""
        device = self.devices[launch.device]
        if len(self.devices) == 1:
            self._tell(op, device)
            return
        peer_bytes = 0
        for each in (*launch.reads, *launch.writes):
            self._take_from_others(device, each)
            if not device.knows(each.memory.number):
                peer_bytes += each.nbytes
        own_reads, own_writes = (
            tuple(access for access in accesses if device.knows(access.tensor))
            for accesses in (op.reads, op.writes)
        )
        traffic = max(0, op.traffic_bytes - peer_bytes)
        self._tell(op._replace(reads=own_reads, writes=own_writes, traffic_bytes=traffic), device)
        if peer_bytes:
            self._tell(None, device, partial(_use_peers, device.model, peer_bytes))

    def copied(self, copy: DeviceCopy) -> None:
        if copy.read is not None and copy.write is not None:
            self._tell_copy_on_devices(copy.device, copy.read, copy.write)
        else:
            self._tell_copy_over_bus(copy)
        super().copied(copy)

    def _tell_copy_over_bus(self, copy: DeviceCopy) -> None:
        """Copy from or to the host, concurrently with operations if the stream only copies."""
        found, to_host = copy.write or copy.read, copy.read is not None
        assert found is not None
        number = copy.device if found.memory.is_managed else found.memory.device
        home, (access,) = self.devices[number], accesses_of((found,))
        self._take_from_others(home, found)
        if copy.is_pinned and number == copy.device and home.beside.may_take(copy.stream):
            self._tell(None, home, lambda: home.beside.copy(copy.stream, access, to_host))
        else:
            self._tell(None, home, lambda: home.model.copy(access, to_host=to_host))

    def _tell_copy_on_devices(self, number: int, read: MemoryRange, write: MemoryRange) -> None:
        """Copy on a device's stream: an operation, or a transfer between devices."""
        numbers = [memory.device for memory, _, _ in (read, write) if not memory.is_managed]
        if len(set(numbers)) < 2:
            launch = Launch("memcpy", numbers[0] if numbers else number, (read,), (write,))
            self._tell_operation(event_of(launch), launch)
            return
        device, homes = self.devices[number], [self.devices[each] for each in numbers]
        self._tell(None, device, lambda: device.model.clocks.launch(None))
        for each in homes:
            self._tell(None, each)
        self._tell(None, device, lambda: _copy(homes[0].model, homes[1].model, write.nbytes))

    # -- managed memory --------------------------------------------------------------------

    def _take_from_others(self, device: ModelledDevice, found: MemoryRange) -> None:
        """Move other devices' blocks of managed memory to the host, for this device.

        Other memory does not move.
        """
        if len(self.devices) == 1 or not found.memory.is_managed:
            return
        self._introduce(device, found.memory)
        (access,) = accesses_of((found,))
        for other in self._knowing(access):
            if other is not device and other.has_any(access):
                self._tell(Hint("prefetch", (access,), "cpu", overlap=True), other)
                self._tell(None, device, partial(_hand_over, other, device, access))

    def _introduce(self, device: ModelledDevice, memory: Allocation) -> None:
        """Add managed memory of another device to a device's model."""
        if not device.knows(memory.number):
            self._tell_alloc(memory, device)

    def _knowing(self, access: Access) -> list[ModelledDevice]:
        """Return the devices whose models know an allocation."""
        return [device for device in self.devices if device.knows(access.tensor)]

    def prefetched(
        self, ranges: Sequence[MemoryRange], device: int | None, *, overlap: bool
    ) -> None:
        """Move managed memory to a device, or to the host from every device that has part of it."""
        for each, access in zip(ranges, accesses_of(ranges), strict=True):
            if device is None:  # else the device that allocated it hears of it
                holding = [own for own in self._knowing(access) if own.has_any(access)]
                targets = holding or [self.devices[each.memory.device]]
            else:
                targets = [self.devices[device]]
                self._take_from_others(targets[0], each)
            place = "cpu" if device is None else 0
            for target in targets:
                self._tell(Hint("prefetch", (access,), place, overlap=overlap), target)

    def discarded(self, ranges: Sequence[MemoryRange]) -> None:
        for device in self.devices:
            known = tuple(each for each in accesses_of(ranges) if device.knows(each.tensor))
            if known:
                self._tell(Hint("discard", known), device)

    def advised(
        self, ranges: Sequence[MemoryRange], advice: str, device: int | None, *, unset: bool
    ) -> None:
        """Advise the given device, or else all devices that know the memory."""
        for each, access in zip(ranges, accesses_of(ranges), strict=True):
            targets = self._knowing(access)
            if device is not None:
                targets = [self.devices[device]]
                self._introduce(targets[0], each.memory)
            place = "cpu" if device is None else 0
            for target in targets:
                self._tell(Hint(advice, (access,), place, unset), target)

    # -- time ------------------------------------------------------------------------------

    def host_worked(self, device: int, phase: str) -> None:
        """Advance the host by the time of Chainer's Python for an operation of a phase."""
        own = self.devices[device]
        with self.lock, own.model.lock:
            self.turn_to(own).clocks.launch(None, phase, 0)

    def seconds_of(self, stream: int, device: int) -> float:
        with self.lock:
            own = self.devices[device]
            return own.beside.over(stream, self.turn_to(own).clock.seconds)

    def host_waited(self, device: int) -> None:
        own = self.devices[device]
        with self.lock, own.model.lock:
            self.turn_to(own).synchronize()

    def host_waited_until(self, device: int, seconds: float) -> None:
        own = self.devices[device]
        with self.lock, own.model.lock:
            clock = self.turn_to(own).clock
            clock.host_seconds = max(clock.host_seconds, seconds)

    def stream_waited(self, stream: int, device: int, seconds: float) -> None:
        own = self.devices[device]
        with self.lock, own.model.lock:
            self.turn_to(own)
            own.beside.wait(stream, seconds)


def _link_bandwidth(spec: GpuSpec) -> float:
    """Return the bandwidth between two devices, in bytes a second."""
    found = spec.nvlink_bandwidth
    if found is None and spec.host_in_bandwidth and spec.host_out_bandwidth:
        found = min(spec.host_in_bandwidth, spec.host_out_bandwidth)
    return found or spec.memory_bandwidth


def _use_peers(model: Model, nbytes: int) -> None:
    """Make a device wait for bytes of a peer's memory."""
    model.counters.remote_bytes += nbytes
    clock = model.clock
    begun = max(clock.device_seconds, clock.host_seconds)
    clock.wait(begun + nbytes / _link_bandwidth(model.spec))


def _copy(source: Model, target: Model, nbytes: int) -> None:
    """Make both devices wait for a transfer between them, and for its use of the bus."""
    clocks, spec = (source.clock, target.clock), source.spec
    begun = max(max(c.device_seconds, c.host_seconds, c.link_seconds) for c in clocks)
    over = begun + nbytes / _link_bandwidth(spec)
    for clock in clocks:
        clock.wait(over)
        if spec.nvlink_bandwidth is None:
            clock.link_seconds = over


def _hand_over(before: ModelledDevice, now: ModelledDevice, access: Access) -> None:
    """Mark blocks that one model has sent to the host as found there by another."""
    before.model.driver.residency.discard(*before.blocks(access))
    now.model.driver.residency.find_on_host(*now.blocks(access))
    now.model.clock.wait(before.model.clock.link_seconds)
