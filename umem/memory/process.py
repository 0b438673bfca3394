"""Modes for the whole process, and virtual GPUs.

`umem.memory.mode_blocks` has the modes of a block, which take precedence over the process's mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from umem._common.locks import safe_lock
from umem._common.scopes import Scope, Scoped, inside
from umem._common.stacks import end_at_user
from umem.devices import Device, Policy, current_device, device_kind, entered_device, policy_here
from umem.errors import StateError, UmemError
from umem.memory.environment import (
    MODE,
    limit_of_environment,
    mode_of_environment,
    prefetch_of_environment,
)
from umem.memory.limits import Size
from umem.memory.mode_blocks import Decorator, Request, checked_request, devices_served
from umem.units import parse_bytes

if TYPE_CHECKING:
    from umem._common.specs import GpuSpec
    from umem.devices.virtual import VirtualGPU  # noqa: F401 (a base class names it)

_Device = TypeVar("_Device", bound=Device, covariant=True)
_lock = safe_lock()
_enabled: Handle | None = None


class Handle(Scoped["Handle"]):
    """The handle of `enable`, also a context manager.

    ``policy`` is None if UMEM_MODE keeps umem off.
    """

    title = "umem.enable()"

    def __init__(
        self, device: Device | None, request: Request | None, policy: Policy | None
    ) -> None:
        self._device, self._request, self.policy = device, request, policy
        self._installed = Scope(self.title)

    @property
    def device(self) -> Device:
        """Return the device; if UMEM_MODE keeps umem off, the current one."""
        return current_device() if self._device is None else self._device

    @property
    def xp(self) -> Any:
        """Return CuPy, or the virtual GPU's array functions."""
        return self.device.xp

    def _answers(self, device: Device | None, request: Request | None) -> bool:
        return self._device is device and self._request == request

    def __str__(self) -> str:
        if self.policy is None or self._device is None:
            return f"umem.enable() was called before while {MODE} was off,"
        return f"{self.policy.mode} memory is enabled on {self._device.name}"

    def _open(self, scope: Scope) -> Handle:
        scope.at_close(self._disable)
        return self

    def _disable(self) -> None:
        if _enabled is self:
            self._installed.close()


def enable(
    mode: Literal["managed", "hybrid", "unmanaged"] | None = None,
    *,
    limit: Size | None = None,
    prefetch: bool | None = None,
    upstream: Callable[[int], Any] | None = None,
) -> Handle:
    """Serve every allocation of the process by ``mode``, until `disable`.

    Call it before you make arrays; existing arrays stay where they are. Calling it again with the
    same arguments changes nothing. `cupy.get_default_memory_pool` then returns a pool that
    measures, frees and limits umem's memory.

    The call reads the environment variables; `umem.memory.environment` lists their values. Each
    argument takes precedence over its variable, and a variable over the default.

    Args:
        mode: None means UMEM_MODE, or ``"managed"`` if it is not set. If UMEM_MODE is off, umem
            stays off and the returned handle has no effect.
        limit: as in `managed`, resolved now; None means UMEM_LIMIT, or no limit if it is not set.
        prefetch: as in `managed`; None means UMEM_PREFETCH, or False if it is not set.
        upstream: as in `managed`.

    Raises:
        DeviceNotFoundError, DeviceError, SizeError: see `managed`; umem stays off.
        StateError: another mode is on, or the thread is inside a block; the current mode stays on.
            Or UMEM_MODE or UMEM_PREFETCH has an invalid value.
    """
    made: list[Handle] = []
    try:
        with _lock:
            request = _requested(mode, limit, prefetch)
            request = request if request is None else request.over(upstream)
            handle = _enabled_by(request, made)
        return handle
    except BaseException:  # a signal may arrive even after the last step
        for handle in made:
            handle._installed.close()
        raise


def _enabled_by(request: Request | None, made: list[Handle]) -> Handle:
    """Return the current handle, or turn a new one on and add it to ``made``."""
    global _enabled
    device = entered_device() if request is None else current_device()
    if _enabled is not None:
        if _enabled._answers(device, request):
            return _enabled
        raise StateError(f"{_enabled} with other arguments; call umem.disable() first")
    policy = None
    if request is not None and device is not None:
        _outside_blocks(device, "enable")
        policy = request.on(device)
    handle = Handle(device, request if policy else None, policy)
    made.append(handle)
    handle._installed.at_close(lambda: _forget(handle))
    if policy is not None and device is not None:
        device.serve_all(handle._installed, policy)
    _enabled = handle
    return handle


def _forget(handle: Handle) -> None:
    global _enabled
    if _enabled is handle:
        _enabled = None


def _requested(mode: str | None, limit: Size | None, prefetch: bool | None) -> Request | None:
    """Return the request from arguments or environment; None if the environment turns it off."""
    chosen = mode_of_environment() if mode is None else mode
    if chosen == "off" and mode is None:
        return None
    on = prefetch_of_environment() if prefetch is None else prefetch
    request = checked_request("managed" if chosen is None else chosen, limit, bool(on))
    return request if limit is not None else request._replace(limit=limit_of_environment())


def disable() -> None:
    """Restore CuPy's allocator as it was before `enable`. Arrays keep their memory.

    Raises:
        StateError: umem is not enabled, or the thread is inside a block.
    """
    with _lock:
        handle = _enabled
        if handle is None:
            raise StateError("umem is not enabled; call umem.enable() first")
        if handle._device is not None:
            _outside_blocks(handle._device, "disable")
            handle._device.leave_all(handle._installed)
        handle._installed.close()


def enabled() -> Handle | None:
    """Return the handle of `enable` while it is on, otherwise None."""
    return _enabled


def _outside_blocks(device: Device | None, what: str) -> None:
    if device in devices_served():
        raise StateError(f"umem.{what}() inside a block of umem memory; leave the block first")


class DeviceBlock(Decorator, Scoped[_Device]):
    """A block or function that runs on a device of its own, opened at each entry.

    Args:
        kind: the name of a row of `umem.devices.open`.
        gpu: the GPU to model.
        vram: its VRAM, as an int or text ("256MiB"); None is the table's figure.
    """

    def __init__(self, kind: str, gpu: str | GpuSpec, vram: Size | None = None) -> None:
        self._kind, self._gpu = device_kind(kind), gpu
        self._vram_bytes = None if vram is None else parse_bytes(vram, "vram")
        self.title = f"umem.{kind}_gpu()"

    def _recreate_cm(self) -> DeviceBlock[_Device]:
        return DeviceBlock(self._kind.name, self._gpu, self._vram_bytes)

    def _open(self, scope: Scope) -> _Device:
        device: Any = self._kind.open(self._gpu, self._vram_bytes)
        held = device.enter(scope)
        scope.at_close(lambda: _end_all_on(device))
        scope.open(device, *held)
        return device  # type: ignore[no-any-return]

    def _seen(self, error: BaseException) -> None:
        if isinstance(error, UmemError):
            end_at_user(error)  # its message is sufficient


class virtual_gpu(DeviceBlock["VirtualGPU"]):
    """Run a block on the model of a GPU: real arithmetic, simulated pages and time.

    ``with`` gives the `VirtualGPU`, whose ``figures`` stay readable after the block. The end of the
    block ends the effect of `enable` calls inside it, and closes blocks that are still open. Arrays
    freed after the end are still subtracted from the figures. If an error of umem leaves the block,
    its traceback ends at the program's own line.

    Thread-safety: affects only the calling thread; among asyncio tasks, the task that enters it and
    its child tasks.

    Args:
        gpu: a name of the table, such as ``"v100-16gb"``.
        vram: usable VRAM instead of the table's figure, as an int or text ("256MiB").

    Raises:
        UnknownGpuError: no such GPU; the message offers the nearest names.
        SizeError: ``vram`` is not a size, or less than one block of 2 MiB.
    """

    def __init__(self, gpu: str | GpuSpec, vram: Size | None = None) -> None:
        from umem._common.specs import gpu_spec

        super().__init__("virtual", gpu_spec(gpu), vram)
        self._kind.open(self._gpu, self._vram_bytes)  # refuses too little VRAM


def _end_all_on(device: Device) -> None:
    """End all blocks of the calling code on a device, and the mode enabled on it."""
    for scope in inside():
        if device in [getattr(part, "device", None) for part in scope.payload]:
            scope.close()
    if _enabled is not None and _enabled._device is device:
        _enabled._installed.close()


def active_policy(device: Device) -> Policy | None:
    """Return the allocation policy of this thread on a device, or None."""
    policy = policy_here(device)
    if policy is not None:
        return policy
    handle = _enabled
    return None if handle is None or handle._device is not device else handle.policy


def why_on(device: Device) -> str:
    """Tell why umem is on or off on this device in this thread."""
    if device in devices_served():
        return "a block of this thread"
    handle = _enabled
    if handle is not None and handle.policy is None:
        return f"umem.enable() was called, and {MODE} keeps it off"
    if handle is None or handle._device is not device:
        return "umem.enable() was not called, and this thread is in no block"
    return "umem.enable() was called, for the whole process"
