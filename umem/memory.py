"""Modes of allocation: for the whole process, for a block, and on a virtual GPU.

Blocks concern the calling thread, nest in any order, work as decorators, and restore exactly
what was there when they end, also by an exception. Arrays may outlive them.
"""

from __future__ import annotations

import inspect
import threading
from contextlib import ContextDecorator
from types import TracebackType
from typing import Any, Literal, NamedTuple

from umem import environment
from umem.devices.base import MODES, Device, Mode, Policy, Restore
from umem.devices.presets import Preset, check_preset
from umem.devices.specs import GpuSpec, gpu_spec
from umem.devices.virtual import VirtualGPU
from umem.errors import DeviceError, StateError, UnsupportedError
from umem.forking import safe_lock
from umem.limits import Limit, Size, parse_limit
from umem.recorder import Recorder
from umem.units import parse_bytes


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
_lock = safe_lock()
_enabled: Handle | None = None


def current_device() -> Device:
    """The innermost virtual GPU of the calling thread, otherwise the current CUDA device.

    Raises:
        DeviceNotFoundError: there is neither; the message names both ways out.
    """
    virtual = _virtual()
    if virtual is not None:
        return virtual
    from umem.devices.cuda import open_cuda

    return open_cuda()


def _virtual() -> VirtualGPU | None:
    return _local.virtual[-1] if _local.virtual else None


class _Request(NamedTuple):
    """What was asked for; on a device it becomes a policy."""

    mode: Mode
    limit: Limit | None = None
    prefetch: bool = False
    spill: Literal["host", "migrate"] = "host"
    preset: Preset | None = None

    def on(self, device: Device) -> Policy:
        """The policy on this device, with the limit in bytes."""
        limit_bytes = None if self.limit is None else self.limit.resolve(device)
        return Policy(self.mode, limit_bytes, self.prefetch, self.spill, self.preset)


def _request(
    mode: str, limit: Size | None, prefetch: bool, spill: str = "host",
    preset: Preset | None = None,
) -> _Request:  # fmt: skip
    if mode not in MODES:
        raise StateError(f"mode must be one of {', '.join(MODES)}; got {mode!r}")
    if spill not in ("host", "migrate"):
        raise StateError(f"spill must be 'host' or 'migrate'; got {spill!r}")
    if preset is not None:
        check_preset(preset)
    checked = None if limit is None else parse_limit(limit)
    return _Request(mode, checked, bool(prefetch), spill, preset)  # type: ignore[arg-type]


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

    def __init__(self, request: _Request) -> None:
        self._request = request

    def _recreate_cm(self) -> Block:
        return Block(self._request)

    def __enter__(self) -> Memory:
        device = current_device()
        policy = self._request.on(device)
        restore = _install(device, policy, everywhere=False)
        _local.blocks.append(_Entered(self, device, policy, restore))
        return Memory(device, policy)

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
        _local.blocks[-1].restore()  # first: where it is refused, the block is still there
        _local.blocks.pop()


def managed(
    limit: Size | None = None, *, prefetch: bool = False, preset: Preset | None = None
) -> Block:
    """Allocate managed memory in this block: arrays may be larger than VRAM.

    Args:
        limit: the most that managed memory may reserve: bytes as an int, or text such as
            "24GiB", "1.5x" (of the device's VRAM) or "90%" (of the host memory that is available
            when the block is entered, in this process's control groups; on a virtual GPU too that
            is this machine's).
        prefetch: make memory resident as it is handed out. Saves most of the cost of a first
            touch by fault; costs a call for each allocation.
        preset: ``"streaming"``, ``"random"``, ``"read_mostly"`` or ``"optimizer_state"``: memory
            that has this advice (`umem.preset`) from its first byte, from a pool of its own, so
            that no other array gets it.

    Raises:
        HintError: there is no such preset.
        DeviceNotFoundError: on entering, when there is no CUDA device and no virtual GPU.
        DeviceError: on entering, when the device cannot oversubscribe; the message says why.
        SizeError: the limit is none, at once; or, on entering, it is below what managed memory
            has in use, or a share of what is not known.

    >>> import umem
    >>> with umem.virtual_gpu("v100-16gb", vram="64MiB"), umem.managed() as memory:
    ...     total = memory.xp.ones((4096, 4096), "float32").sum()
    """
    return Block(_request("managed", limit, prefetch, preset=preset))


def hybrid(
    limit: Size | None = None,
    *,
    spill: Literal["host", "migrate"] = "host",
    prefetch: bool = False,
) -> Block:
    """Allocate unmanaged memory until it is full, then managed memory.

    Args:
        limit: the most of the unmanaged part, as in `managed`; None is all of VRAM.
        spill: ``"host"``: spilled memory stays on the host and is read over the bus;
            ``"migrate"``: it moves, so leave it room by a ``limit``.
        prefetch: as in `managed`, for what is spilled.

    Raises:
        see `managed`.
    """
    return Block(_request("hybrid", limit, prefetch, spill))


def unmanaged(limit: Size | None = None) -> Block:
    """Allocate plain device memory in this block, for instance hot buffers inside `managed`.

    Args:
        limit: the most of it, as in `managed`: "0.9x" is nine tenths of VRAM, and "90%" is of
            host memory here too. CUPY_GPU_MEMORY_LIMIT is CuPy's own limit on the same memory,
            and holds beside this one.

    Raises:
        DeviceNotFoundError, SizeError: see `managed`.
    """
    return Block(_request("unmanaged", limit, False))


class Handle:
    """What `enable` returns: leave it as a context manager, or call `umem.disable`.

    ``policy`` is None where UMEM_MODE keeps everything off.
    """

    def __init__(
        self, device: Device | None, request: _Request | None, policy: Policy | None,
        restore: Restore,
    ) -> None:  # fmt: skip
        self._device, self._request, self.policy = device, request, policy
        self._restore = restore

    @property
    def device(self) -> Device:
        """The device; where UMEM_MODE keeps everything off, the current one."""
        return current_device() if self._device is None else self._device

    @property
    def xp(self) -> Any:
        """CuPy, or the virtual GPU's array functions."""
        return self.device.xp

    def _answers(self, device: Device | None, request: _Request | None) -> bool:
        return self._device is device and self._request == request

    def __str__(self) -> str:
        if self.policy is None or self._device is None:
            return f"umem.enable() was called before, {environment.MODE} being off,"
        return f"{self.policy.mode} memory is enabled on {self._device.name}"

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
    mode: Literal["managed", "hybrid", "unmanaged"] | None = None,
    *,
    limit: Size | None = None,
    prefetch: bool | None = None,
) -> Handle:
    """Serve every allocation of the process by ``mode``, until `disable`.

    Call it before arrays are made; arrays that exist stay where they are. Calling it again with
    the same arguments changes nothing.

    Args:
        mode: None is what UMEM_MODE says, otherwise ``"managed"``. Where UMEM_MODE is off,
            nothing changes: the handle that is returned stands for nothing, until `disable`.
        limit: as in `managed`, resolved now; None is what UMEM_LIMIT says, otherwise no limit.
        prefetch: as in `managed`; None is what UMEM_PREFETCH says, otherwise False.

    An argument goes before its variable, also when the others are not given, and a variable
    before the default. The variables are read by this call: `umem.environment` has their values.

    Raises:
        DeviceNotFoundError, DeviceError, SizeError: see `managed`; nothing is on then.
        StateError: another mode is on, or the thread is inside a block, and what is on stays on;
            or UMEM_MODE or UMEM_PREFETCH has a value that says nothing.
    """
    global _enabled
    with _lock:
        request = _requested(mode, limit, prefetch)
        device = _virtual() if request is None else current_device()
        if _enabled is not None:
            if _enabled._answers(device, request):
                return _enabled
            raise StateError(f"{_enabled} with other arguments; call umem.disable() first")
        if request is None or device is None:
            _enabled = Handle(device, None, None, lambda: None)
            return _enabled
        _outside_blocks(device, "enable")
        policy = request.on(device)
        _enabled = Handle(device, request, policy, _install(device, policy, everywhere=True))
        return _enabled


def _requested(mode: str | None, limit: Size | None, prefetch: bool | None) -> _Request | None:
    """What is asked of `enable`, by its arguments or the environment; None is nothing."""
    chosen = environment.mode() if mode is None else mode
    if chosen == "off" and mode is None:
        return None
    on = environment.prefetch() if prefetch is None else prefetch
    request = _request("managed" if chosen is None else chosen, limit, bool(on))
    return request if limit is not None else request._replace(limit=environment.limit())


def disable() -> None:
    """Restore exactly what was there before `enable`. Arrays keep their memory.

    Raises:
        StateError: nothing is enabled, or the thread is inside a block.
    """
    global _enabled
    with _lock:
        if _enabled is None:
            raise StateError("nothing is enabled; umem.enable() comes first")
        _outside_blocks(_enabled._device, "disable")
        _enabled._restore()
        _enabled = None


def follow_chainer() -> None:
    """Chainer was imported just now; what was enabled before concerns it too."""
    if _enabled is not None and _enabled._device is not None:
        _enabled._device.follow_chainer()


def _outside_blocks(device: Device | None, what: str) -> None:
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
        if _enabled is not None and _enabled._device is gpu:
            disable()
        self._entered.pop()
        _local.virtual.remove(gpu)
        recorder.__exit__(kind, error, traceback)


def active_policy(device: Device) -> Policy | None:
    """What this thread's allocations on a device follow, or None where umem leaves them alone."""
    for entered in reversed(_local.blocks):
        if entered.device is device:
            return entered.policy
    handle = _enabled
    return None if handle is None or handle._device is not device else handle.policy


def why_on(device: Device) -> str:
    """Why umem is on or off on this device in this thread, in words."""
    if any(entered.device is device for entered in _local.blocks):
        return "a block of this thread"
    handle = _enabled
    if handle is not None and handle.policy is None:
        return f"umem.enable() was called, and {environment.MODE} keeps it off"
    if handle is None or handle._device is not device:
        return "umem.enable() was not called, and this thread is in no block"
    return "umem.enable() was called, for the whole process"
