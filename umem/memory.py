"""Modes of allocation: for the whole process, for a block, and on a virtual GPU.

Blocks concern the calling thread, nest in any order, work as decorators, and restore exactly
what was there when they end, also by an exception. Arrays may outlive them.
"""

from __future__ import annotations

import inspect
import threading
from contextlib import ContextDecorator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NamedTuple, SupportsIndex

from umem.devices.base import MODES, Device, Policy, Restore
from umem.devices.presets import Preset, check_preset
from umem.devices.specs import GpuSpec, gpu_spec
from umem.devices.virtual import VirtualGPU
from umem.errors import DeviceError, DeviceNotFoundError, StateError, UnsupportedError
from umem.recorder import Recorder
from umem.units import format_bytes, parse_bytes

Size = str | SupportsIndex


class _Entered(NamedTuple):
    """A block that this thread is inside of."""

    block: Block
    device: Device
    policy: Policy
    restore: Restore


class _Local(threading.local):
    def __init__(self) -> None:
        self.virtual: list[VirtualGPU] = []
        self.blocks: list[_Entered] = []


_local = _Local()
_lock = threading.RLock()
_enabled: Handle | None = None


def current_device() -> Device:
    """The innermost virtual GPU of the calling thread, otherwise the current CUDA device.

    Raises:
        DeviceNotFoundError: there is neither; the message names both ways out.
    """
    if _local.virtual:
        return _local.virtual[-1]
    from umem.devices.cuda import open_cuda

    return open_cuda()


def _policy(
    mode: str, limit: Size | None, prefetch: bool, spill: str, preset: Preset | None = None
) -> Policy:
    if mode not in MODES:
        raise StateError(f"mode must be one of {', '.join(MODES)}; got {mode!r}")
    if spill not in ("host", "migrate"):
        raise StateError(f"spill must be 'host' or 'migrate'; got {spill!r}")
    if preset is not None:
        check_preset(preset)
    limit_bytes = None if limit is None else parse_bytes(limit, "limit")
    return Policy(mode, limit_bytes, bool(prefetch), spill, preset)  # type: ignore[arg-type]


def _install(device: Device, policy: Policy, *, everywhere: bool) -> Restore:
    reason = device.why_not(policy.mode)
    if reason is not None:
        raise DeviceError(f"{device.name} cannot serve {policy.mode} memory: {reason}")
    return device.install(policy, everywhere=everywhere)


class Memory:
    """What a block gives: its device, mode and array module."""

    def __init__(self, device: Device, policy: Policy) -> None:
        self.device = device
        self.mode = policy.mode

    @property
    def xp(self) -> Any:
        """CuPy, or the virtual GPU's array functions."""
        return self.device.xp

    def __repr__(self) -> str:
        simulated = " (simulated)" if self.device.simulated else ""
        return f"<{self.mode} memory on {self.device.name}{simulated}>"


class _Decorator(ContextDecorator):
    """A block that also wraps functions, but none whose body runs after the call returned."""

    def __call__(self, func: Any) -> Any:
        if any(check(func) for check in _RUN_LATER):
            raise UnsupportedError(
                f"{func.__name__} runs after the call that makes it has returned, when the block "
                "around that call is over: write the block inside it, as a with statement"
            )
        return super().__call__(func)


_RUN_LATER = (
    inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction,
)  # fmt: skip


class Block(_Decorator):
    """A block, or a function, whose allocations in this thread come from one mode."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def _recreate_cm(self) -> Block:
        return Block(self._policy)

    def __enter__(self) -> Memory:
        device = current_device()
        restore = _install(device, self._policy, everywhere=False)
        _local.blocks.append(_Entered(self, device, self._policy, restore))
        return Memory(device, self._policy)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not _local.blocks or _local.blocks[-1].block is not self:
            raise StateError(
                "blocks of memory are left in the reverse order of entering them, in the thread "
                "that entered them"
            )
        _local.blocks.pop().restore()


def managed(
    limit: Size | None = None, *, prefetch: bool = False, preset: Preset | None = None
) -> Block:
    """Allocate managed memory in this block: arrays may be larger than VRAM.

    Args:
        limit: the most bytes that managed memory may reserve, as an int or text ("24GiB").
        prefetch: make memory resident as it is handed out. Saves most of the cost of a first
            touch by fault; costs a call for each allocation.
        preset: ``"streaming"``, ``"random"``, ``"read_mostly"`` or ``"optimizer_state"``: memory
            that has this advice (`umem.preset`) from its first byte, from a pool of its own, so
            that no other array gets it.

    Raises:
        HintError: there is no such preset.
        DeviceNotFoundError: on entering, when there is no CUDA device and no virtual GPU.
        DeviceError: on entering, when the device cannot oversubscribe; the message says why.
        SizeError: the limit is not a size, or below what managed memory has in use.

    >>> import umem
    >>> with umem.virtual_gpu("v100-16gb", vram="64MiB"), umem.managed() as memory:
    ...     total = memory.xp.ones((4096, 4096), "float32").sum()
    """
    return Block(_policy("managed", limit, prefetch, "host", preset))


def hybrid(
    limit: Size | None = None,
    *,
    spill: Literal["host", "migrate"] = "host",
    prefetch: bool = False,
) -> Block:
    """Allocate unmanaged memory until it is full, then managed memory.

    Args:
        limit: the most bytes of unmanaged memory; None is all of VRAM.
        spill: ``"host"``: spilled memory stays on the host and is read over the bus;
            ``"migrate"``: it moves, so leave it room by a ``limit``.
        prefetch: as in `managed`, for what is spilled.

    Raises:
        see `managed`.
    """
    return Block(_policy("hybrid", limit, prefetch, spill))


def unmanaged(limit: Size | None = None) -> Block:
    """Allocate plain device memory in this block, for instance hot buffers inside `managed`.

    Args:
        limit: the most bytes of it.

    Raises:
        DeviceNotFoundError, SizeError: see `managed`.
    """
    return Block(_policy("unmanaged", limit, False, "host"))


class Handle:
    """What `enable` returns: leave it as a context manager, or call `umem.disable`."""

    def __init__(self, device: Device, policy: Policy, restore: Restore) -> None:
        self.device, self.policy = device, policy
        self._restore = restore

    @property
    def xp(self) -> Any:
        """CuPy, or the virtual GPU's array functions."""
        return self.device.xp

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if _enabled is self:
            disable()


def enable(
    mode: Literal["managed", "hybrid", "unmanaged"] = "managed",
    *,
    limit: Size | None = None,
    prefetch: bool = False,
) -> Handle:
    """Serve every allocation of the process by ``mode``, until `disable`.

    Call it before arrays are made; arrays that exist stay where they are. Calling it again with
    the same arguments changes nothing.

    Raises:
        DeviceNotFoundError, DeviceError, SizeError: see `managed`; nothing is on then.
        StateError: another mode is on, or the thread is inside a block; what is on stays on.
    """
    global _enabled
    policy = _policy(mode, limit, prefetch, "host")
    with _lock:
        device = current_device()
        if _enabled is not None:
            if (_enabled.device, _enabled.policy) == (device, policy):
                return _enabled
            raise StateError(
                f"{_enabled.policy.mode} memory is enabled on {_enabled.device.name} with other "
                "arguments; call umem.disable() first"
            )
        _outside_blocks(device, "enable")
        _enabled = Handle(device, policy, _install(device, policy, everywhere=True))
        return _enabled


def disable() -> None:
    """Restore exactly what was there before `enable`. Arrays keep their memory.

    Raises:
        StateError: nothing is enabled, or the thread is inside a block.
    """
    global _enabled
    with _lock:
        if _enabled is None:
            raise StateError("nothing is enabled; umem.enable() comes first")
        _outside_blocks(_enabled.device, "disable")
        _enabled._restore()
        _enabled = None


def follow_chainer() -> None:
    """Chainer was imported just now; what was enabled before concerns it too."""
    if _enabled is not None:
        _enabled.device.follow_chainer()


def _outside_blocks(device: Device, what: str) -> None:
    if any(entered.device is device for entered in _local.blocks):
        raise StateError(f"umem.{what}() inside a block of umem memory; leave the block first")


class virtual_gpu(_Decorator):
    """Run a block against the model of a GPU: the arithmetic is real, pages and time simulated.

    Args:
        gpu: a name of the table, such as ``"v100-16gb"``.
        vram: usable VRAM instead of the table's figure, as an int or text ("256MiB").

    Entering it gives the `VirtualGPU`, whose ``figures`` stay readable afterwards. What
    `enable` switched on inside is switched off at the end, and blocks left open are over.

    Raises:
        UnknownGpuError: no such GPU; the message offers the nearest names.
        SizeError: ``vram`` is not a size, or less than one block of 2 MiB.

    Thread-safety: follows the calling thread only.
    """

    def __init__(self, gpu: str | GpuSpec, vram: Size | None = None) -> None:
        self._spec = gpu_spec(gpu)
        self._vram_bytes = None if vram is None else parse_bytes(vram, "vram")
        VirtualGPU(self._spec, vram_bytes=self._vram_bytes)  # refuses what is too small
        self._entered: list[tuple[VirtualGPU, Recorder]] = []

    def _recreate_cm(self) -> virtual_gpu:
        return virtual_gpu(self._spec, self._vram_bytes)

    def __enter__(self) -> VirtualGPU:
        gpu = VirtualGPU(self._spec, vram_bytes=self._vram_bytes)
        recorder = Recorder(gpu.on_event, keep=False)
        recorder.__enter__()
        gpu.recorder = recorder
        _local.virtual.append(gpu)
        self._entered.append((gpu, recorder))
        return gpu

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        inside = {id(gpu) for gpu in _local.virtual}
        if not self._entered or id(self._entered[-1][0]) not in inside:
            raise StateError("a virtual GPU is left once, in the thread that entered it")
        gpu, recorder = self._entered[-1]
        _local.blocks = [entered for entered in _local.blocks if entered.device is not gpu]
        if _enabled is not None and _enabled.device is gpu:
            disable()
        self._entered.pop()
        _local.virtual.remove(gpu)
        recorder.__exit__(kind, error, traceback)


@dataclass(frozen=True)
class Status:
    """What is on, and what it holds. ``str()`` of it is a table for a person.

    ``factor`` is managed and unmanaged bytes reserved over VRAM. None is "unknown".
    """

    on: bool
    mode: str
    device: str | None
    simulated: bool
    why_not: str | None
    limit_bytes: int | None
    vram_bytes: int | None
    reserved_bytes: int | None
    peak_bytes: int | None
    managed_bytes: int | None
    factor: float | None
    resident_bytes: int | None
    paging: str

    def __str__(self) -> str:
        return "\n".join(f"{name:<14}{text}" for name, text in self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        if self.device is None:
            return [("umem", "off"), ("device", "none"), ("why", self.why_not or "unknown")]
        simulated = " (simulated)" if self.simulated else ""
        limit = f", limit {format_bytes(self.limit_bytes)}" if self.limit_bytes else ""
        return [
            ("umem", "on" if self.on else "off"),
            ("mode", f"{self.mode}{limit}"),
            ("device", f"{self.device}{simulated}"),
            ("managed", f"refused: {self.why_not}" if self.why_not else "supported"),
            ("VRAM", format_bytes(self.vram_bytes)),
            ("reserved", f"{format_bytes(self.reserved_bytes)}, at most "
                         f"{format_bytes(self.peak_bytes)}"),
            ("factor", "unknown" if self.factor is None else f"{self.factor:.2f}"),
            ("resident", f"{format_bytes(self.resident_bytes)}{simulated}"),
            ("paging", self.paging),
        ]  # fmt: skip


def status() -> Status:
    """What is on in this thread, on which device, and how much it holds. Never raises."""
    try:
        device = current_device()
    except DeviceNotFoundError as error:
        return Status(
            on=False, mode="none", device=None, simulated=False, why_not=str(error),
            limit_bytes=None, vram_bytes=None, reserved_bytes=None, peak_bytes=None,
            managed_bytes=None, factor=None, resident_bytes=None, paging="unknown",
        )  # fmt: skip
    policy = _active_policy(device)
    usage = device.usage()
    return Status(
        on=policy is not None,
        mode="unmanaged" if policy is None else policy.mode,
        device=device.name,
        simulated=device.simulated,
        why_not=device.why_not("managed"),
        limit_bytes=None if policy is None else policy.limit_bytes,
        vram_bytes=device.vram_bytes,
        reserved_bytes=usage.reserved_bytes,
        peak_bytes=usage.peak_bytes,
        managed_bytes=usage.managed_bytes,
        factor=usage.reserved_bytes / device.vram_bytes,
        resident_bytes=usage.resident_bytes,
        paging=usage.paging,
    )


def _active_policy(device: Device) -> Policy | None:
    for entered in reversed(_local.blocks):
        if entered.device is device:
            return entered.policy
    return _enabled.policy if _enabled is not None and _enabled.device is device else None
