"""Several simulated devices and the memory of one another: peers, copies, managed memory.

Models: a copy between two devices takes their link, NVLink where the GPU has it and the host's bus
otherwise, and both wait for it; a kernel that uses a peer's memory waits for its bytes over that
link. Managed memory is with the device that touched it last, by whole blocks, which come from
another device by way of the host.
Does not model: copies beside operations, links of more than two devices at a time, pages that
several devices read (``read_mostly``) or that one uses where another has them (``accessed_by``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from umem._common.arithmetic import FLOAT32
from umem._common.specs import GpuSpec
from umem.devices.software.allocations import HOST, HostMemory
from umem.devices.software.device_state import DeviceState
from umem.devices.software.faults import ILLEGAL_ADDRESS, Finding
from umem.devices.virtual.driver import covered
from umem.devices.virtual.model import Model
from umem.trace import Access, Hint, Op

_GATHERS = ("cupy_take", "cupy_getitem", "cupy_scatter", "cupy_cupyx_scatter")
"""CuPy's kernels that access memory at computed indexes."""


def check_peers(memory: HostMemory, device: DeviceState, accesses: Iterable[Access]) -> None:
    """Raise if a device uses another's memory without peer access."""
    for access in accesses:
        found = memory.of_number(access.tensor)
        if not (found.is_managed or found.device == device.ordinal or found.device in device.peers):
            whose = f"device {device.ordinal} uses memory of device {found.device}"
            sentence = f"{whose}, which is no peer of it"
            memory.end_context(ILLEGAL_ADDRESS, sentence, device, Finding("memcheck"))


def tell_operation(memory: HostMemory, device: DeviceState, op: Op) -> None:
    """Report an operation to a device's model; accesses to a peer's memory use their link."""
    if not memory.is_modelled:
        return
    peer_bytes = 0
    for access in (*op.reads, *op.writes):
        bring(memory, device, access)
        if access.tensor not in device.model.tensors:
            peer_bytes += access.stop - access.start
    own = [
        tuple(access for access in accesses if access.tensor in device.model.tensors)
        for accesses in (op.reads, op.writes)
    ]
    traffic = max(0, op.traffic_bytes - peer_bytes)
    memory.tell(op._replace(reads=own[0], writes=own[1], traffic_bytes=traffic), device)
    if peer_bytes:
        memory.tell(None, device, lambda: _use_peers(device.model, peer_bytes))


def _use_peers(model: Model, nbytes: int) -> None:
    model.counters.remote_bytes += nbytes
    clock = model.clock
    begun = max(clock.device_seconds, clock.host_seconds)
    clock.wait(begun + nbytes / link_bandwidth(model.spec))


def link_bandwidth(spec: GpuSpec) -> float:
    """Return bytes a second between two devices."""
    found = spec.nvlink_bandwidth
    if found is None and spec.host_in_bandwidth and spec.host_out_bandwidth:
        found = min(spec.host_in_bandwidth, spec.host_out_bandwidth)
    return found or spec.memory_bandwidth


# -- copies --------------------------------------------------------------------------------------


def home_of(memory: HostMemory, device: DeviceState, access: Access) -> DeviceState:
    """Return the device of memory; managed memory belongs to the given one."""
    found = memory.of_number(access.tensor)
    return device if found.is_managed else memory.devices[found.device]


def _tell_copy_between(
    memory: JoinedMemory, device: DeviceState, read: Access, write: Access
) -> None:
    """Report a copy on a device's stream: an operation, or a transfer between devices."""
    found = [memory.of_number(access.tensor) for access in (read, write)]
    homes = [memory.devices[each.device] for each in found if not each.is_managed]
    if len(set(homes)) < 2:
        memory.operation("memcpy", [read], [write], device=homes[0] if homes else device)
        return
    nbytes = write.stop - write.start
    memory.tell(None, device, lambda: device.model.clocks.launch(None))
    for each in homes:
        memory.tell(None, each)
    memory.tell(None, device, lambda: _copy(homes[0].model, homes[1].model, nbytes))
    memory.tell_listener(Op("memcpy", "array", (read,), (write,), 0, 2 * nbytes))


def _copy(source: Model, target: Model, nbytes: int) -> None:
    """Make both devices wait for a transfer between them, and for its use of the bus."""
    clocks, spec = (source.clock, target.clock), source.spec
    begun = max(max(c.device_seconds, c.host_seconds, c.link_seconds) for c in clocks)
    over = begun + nbytes / link_bandwidth(spec)
    for clock in clocks:
        clock.wait(over)
        if spec.nvlink_bandwidth is None:
            clock.link_seconds = over


# -- managed memory ------------------------------------------------------------------------------


def bring(memory: HostMemory, device: DeviceState, access: Access) -> None:
    """Make a part of managed memory resident on a device; other devices' copies move to the host.

    Memory of another kind stays where it is.
    """
    if len(memory.devices) == 1 or not memory.is_modelled:
        return
    found = memory.of_number(access.tensor)
    if not found.is_managed:
        return
    introduce(memory, device, access)
    for other in knowing(memory, access):
        if other is not device and _has_any(other.model, access):
            memory.tell(Hint("prefetch", (access,), "cpu", overlap=True), other)
            memory.tell(None, device, partial(_hand_over, other.model, device.model, access))


def introduce(memory: HostMemory, device: DeviceState, access: Access) -> None:
    """Tell a device's model of managed memory that another one allocated."""
    if access.tensor not in device.model.tensors and memory.is_modelled:
        memory.tell_managed(memory.of_number(access.tensor), device)


def knowing(memory: HostMemory, access: Access) -> list[DeviceState]:
    """Return the devices whose models know some memory."""
    return [device for device in memory.devices if access.tensor in device.model.tensors]


def holding(memory: HostMemory, access: Access) -> list[DeviceState]:
    """Return the devices on which managed memory is resident, or else the one that allocated it."""
    found = [device for device in knowing(memory, access) if _has_any(device.model, access)]
    return found or [memory.devices[memory.of_number(access.tensor).device]]


def _blocks(model: Model, access: Access) -> tuple[int, int]:
    return covered(model.tensors[access.tensor].part(access.start, access.stop))


def _has_any(model: Model, access: Access) -> bool:
    """Tell whether a model has contents of blocks, in VRAM or on the host."""
    start, stop = _blocks(model, access)
    residency = model.driver.residency
    return max(residency.resident.find(1, start, stop), residency.host.find(1, start, stop)) >= 0


def _hand_over(before: Model, now: Model, access: Access) -> None:
    """Mark blocks that one model has sent to the host as found there by another."""
    before.driver.residency.discard(*_blocks(before, access))
    now.driver.residency.find_on_host(*_blocks(now, access))
    now.clock.wait(before.clock.link_seconds)


class JoinedMemory(HostMemory):
    """Memory of one or several devices that reports operations and copies to models and
    recorders.
    """

    def operation(
        self,
        name: str,
        reads: Sequence[Access],
        writes: Sequence[Access],
        flops: int = 0,
        device: DeviceState | None = None,
        gathered_bytes: int = 0,
        arithmetic: str = FLOAT32,
        decisive: Sequence[Access] | None = None,
        is_whole: bool = False,
    ) -> None:
        """Report an operation that accesses each byte once, or gathers what it writes.

        It runs on the current device, unless another is given. ``gathered_bytes`` is what it reads
        besides, where it reads rows of its last operand several times; ``arithmetic`` the kind of
        its flops. Dry runs ask for ``decisive``, the part of what it reads that its results' sizes
        follow from, and whether it writes whole numbers and flags alone.
        """
        device = device or self.here
        if len(self.devices) > 1:
            check_peers(self, device, (*reads, *writes))
        if not self.is_modelled and self.listener is None:
            return
        sizes = [access.stop - access.start for access in reads]
        written = sum(access.stop - access.start for access in writes)
        traffic, pattern = sum(sizes) + written, "stream"
        if name.startswith(_GATHERS) and sizes:
            traffic, pattern = min(traffic, traffic - max(sizes) + written), "random"
        if gathered_bytes:
            traffic, pattern = traffic + gathered_bytes, "random"
        op = Op(
            name, "array", tuple(reads), tuple(writes), flops, traffic, pattern,
            arithmetic=arithmetic,
        )  # fmt: skip
        if len(self.devices) > 1:
            tell_operation(self, device, op)
        else:
            self.tell(op)
        self.tell_listener(op)

    def is_pinned(self, ptr: int) -> bool:
        """Tell whether memory of the host is pinned, so that copies run beside kernels."""
        found = self.allocation_of(ptr)
        return found is not None and found.kind == HOST

    def tell_copy(self, dst: int, src: int, size: int, device: DeviceState, stream: int) -> None:
        """Report a copy on a device's stream before it runs."""
        reads, writes = self.access(src, size), self.access(dst, size)
        if reads and writes:
            _tell_copy_between(self, device, reads[0], writes[0])
        elif reads or writes:
            access, to_host = (reads or writes)[0], bool(reads)
            home = home_of(self, device, access)
            bring(self, home, access)
            is_beside = home is device and self.is_pinned(dst if to_host else src)
            if is_beside and device.beside.may_take(stream):
                self.tell(None, home, lambda: home.beside.copy(stream, access, to_host))
            else:
                self.tell(None, home, lambda: home.model.copy(access, to_host=to_host))
            if self.listener is not None and writes:
                self.listener.uploaded(writes[0], self._addresses)
            elif self.listener is not None:
                self.tell_listener(Op("get", "array", tuple(reads), (), 0, size))
