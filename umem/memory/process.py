"""Modes for the whole process, and the model of a GPU in the place of one.

`umem.memory.mode_blocks` has the modes of a block, which go before what is enabled for the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from umem._common.locks import safe_lock
from umem._common.scopes import Scope, Scoped, inside
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
from umem.trace import end_at_user
from umem.units import parse_bytes

if TYPE_CHECKING:
    from umem._common.specs import GpuSpec
    from umem.devices.virtual import VirtualGPU  # noqa: F401 (a base class names it)

_Device = TypeVar("_Device", bound=Device, covariant=True)
_lock = safe_lock()
_enabled: Handle | None = None


class Handle(Scoped["Handle"]):
    """The handle of `enable`, also a context manager.

    ``policy`` is None where UMEM_MODE keeps everything off.
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
            return f"umem.enable() was called before, {MODE} being off,"
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

    Call it before arrays are made; arrays that exist stay where they are. Calling it again with
    the same arguments changes nothing. `cupy.get_default_memory_pool` then returns a pool that
    measures, frees and limits the memory that is in use.

    Args:
        mode: None is what UMEM_MODE says, otherwise ``"managed"``. Where UMEM_MODE is off,
            nothing changes: the handle that is returned does nothing, until `disable`.
        limit: as in `managed`, resolved now; None is what UMEM_LIMIT says, otherwise no limit.
        prefetch: as in `managed`; None is what UMEM_PREFETCH says, otherwise False.
        upstream: as in `managed`.

    An argument takes precedence over its variable, also when the others are not given, and a
    variable before the default. The variables are read by this call: `environment` has their
    values.

    Raises:
        DeviceNotFoundError, DeviceError, SizeError: see `managed`; nothing is on then.
        StateError: another mode is on, or the thread is inside a block, and what is on stays on;
            or UMEM_MODE or UMEM_PREFETCH has a value that says nothing.
    """
    made: list[Handle] = []
    try:
        with _lock:
            request = _requested(mode, limit, prefetch)
            request = request if request is None else request.over(upstream)
            handle = _enabled_by(request, made)
        return handle
    except BaseException:  # a signal may come after everything is done, too
        for handle in made:
            handle._installed.close()
        raise


def _enabled_by(request: Request | None, made: list[Handle]) -> Handle:
    """Return the handle that is on, or turn a new one on and add it to ``made``."""
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
    """Return the request by arguments or environment; None for neither."""
    chosen = mode_of_environment() if mode is None else mode
    if chosen == "off" and mode is None:
        return None
    on = prefetch_of_environment() if prefetch is None else prefetch
    request = checked_request("managed" if chosen is None else chosen, limit, bool(on))
    return request if limit is not None else request._replace(limit=limit_of_environment())


def disable() -> None:
    """Restore exactly what was there before `enable`. Arrays keep their memory.

    Raises:
        StateError: nothing is enabled, or the thread is inside a block.
    """
    with _lock:
        handle = _enabled
        if handle is None:
            raise StateError("nothing is enabled; umem.enable() comes first")
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
        vram: its VRAM, as an int or text ("256MiB"); None is what the table says.
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
            end_at_user(error)  # its text says all


class virtual_gpu(DeviceBlock["VirtualGPU"]):
    """Run a block on the model of a GPU: real arithmetic, simulated pages and time.

    Args:
        gpu: a name of the table, such as ``"v100-16gb"``.
        vram: usable VRAM instead of the table's figure, as an int or text ("256MiB").

    Entering it gives the `VirtualGPU`, whose ``figures`` stay readable afterwards. What `enable`
    switched on inside is switched off at the end, and blocks left open are over. Arrays that die
    after the end are still counted off. The traceback of an error of umem's that leaves the block
    ends at the program's own line.

    Raises:
        UnknownGpuError: no such GPU; the message offers the nearest names.
        SizeError: ``vram`` is not a size, or less than one block of 2 MiB.

    Thread-safety: follows the calling thread only, and there the asyncio task that enters it, with
    those that it makes.
    """

    def __init__(self, gpu: str | GpuSpec, vram: Size | None = None) -> None:
        from umem._common.specs import gpu_spec

        super().__init__("virtual", gpu_spec(gpu), vram)
        self._kind.open(self._gpu, self._vram_bytes)  # refuses too little VRAM


def _end_all_on(device: Device) -> None:
    """End all blocks of the calling code on a device, and what is enabled on it."""
    for scope in inside():
        if device in [getattr(part, "device", None) for part in scope.payload]:
            scope.close()
    if _enabled is not None and _enabled._device is device:
        _enabled._installed.close()


def active_policy(device: Device) -> Policy | None:
    """Return the allocation policy of this thread on a device; None without one."""
    policy = policy_here(device)
    if policy is not None:
        return policy
    handle = _enabled
    return None if handle is None or handle._device is not device else handle.policy


def why_on(device: Device) -> str:
    """Describe why umem is on or off on this device in this thread."""
    if device in devices_served():
        return "a block of this thread"
    handle = _enabled
    if handle is not None and handle.policy is None:
        return f"umem.enable() was called, and {MODE} keeps it off"
    if handle is None or handle._device is not device:
        return "umem.enable() was not called, and this thread is in no block"
    return "umem.enable() was called, for the whole process"
