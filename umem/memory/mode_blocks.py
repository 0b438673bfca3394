"""Modes of allocation for a block: `managed`, `hybrid`, `unmanaged`.

A block affects the thread that enters it; among asyncio tasks, the task that enters it and the
child tasks it creates until the block ends. Blocks nest, may overlap, and work as decorators. At
its end, also by an exception or a signal, a block restores the previous mode. A block that ends out
of order (in an abandoned generator) ends alone. Arrays may outlive their block.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any, Literal, NamedTuple

from umem._common.scopes import Scope, Scoped, inside
from umem.devices import MODES, Device, Mode, Policy, Preset, Served, check_preset, current_device
from umem.errors import SizeError, StateError, UnsupportedError
from umem.memory.limits import Limit, Size, parse_limit
from umem.units import format_bytes, parse_bytes


def devices_served() -> list[Device]:
    """List the devices of the blocks around the calling code, one entry for each block."""
    return [part.device for scope in inside() for part in scope.payload if isinstance(part, Served)]


class Request(NamedTuple):
    """A requested mode with options; `on` turns it into a policy for a device."""

    mode: Mode
    limit: Limit | None = None
    prefetch: bool = False
    spill: Literal["host", "migrate"] = "host"
    preset: Preset | None = None
    headroom_bytes: int | None = None
    upstream: Callable[[int], Any] | None = None

    def on(self, device: Device) -> Policy:
        """Make the policy on this device, with the limit in bytes.

        Raises:
            SizeError: the limit is invalid on this device, or headroom leaves no VRAM.
        """
        limit_bytes = None if self.limit is None else self.limit.resolve(device)
        headroom = self.headroom_bytes
        if self.mode == "hybrid" and headroom is None:
            headroom = device.headroom_bytes
        if headroom and headroom >= device.vram_bytes:
            raise SizeError(
                f"headroom of {format_bytes(headroom)} leaves nothing of the "
                f"{format_bytes(device.vram_bytes)} of VRAM of {device.name}: pass a smaller "
                "umem.hybrid(headroom=...)"
            )
        return Policy(
            self.mode,
            limit_bytes,
            self.prefetch,
            self.spill,
            self.preset,
            headroom or 0,
            self.upstream,
        )

    def over(self, upstream: Callable[[int], Any] | None) -> Request:
        """Return the request with another allocator's memory; see `managed`.

        Raises:
            TypeError: ``upstream`` is not callable, so not an allocator.
            StateError: the mode is not managed, or there is a preset.
        """
        if upstream is None:
            return self
        if not callable(upstream):
            raise TypeError(
                "upstream must be a function from bytes to CuPy's memory, such as "
                f"rmm.allocators.cupy.rmm_cupy_allocator; got {type(upstream).__name__}"
            )
        if self.mode != "managed" or self.preset is not None:
            raise StateError("upstream= works only with managed memory and without a preset")
        return self._replace(upstream=upstream)


def checked_request(
    mode: str, limit: Size | None, prefetch: bool, spill: str = "host", preset: Preset | None = None
) -> Request:
    """Check a mode and its options as far as possible without a device.

    Raises:
        StateError, SizeError, HintError: unknown mode or spill; invalid limit; unknown preset.
    """
    if mode not in MODES:
        raise StateError(f"mode must be one of {', '.join(MODES)}; got {mode!r}")
    if spill not in ("host", "migrate"):
        raise StateError(f"spill must be 'host' or 'migrate'; got {spill!r}")
    if preset is not None:
        check_preset(preset)
    checked = None if limit is None else parse_limit(limit)
    return Request(mode, checked, bool(prefetch), spill, preset)  # type: ignore[arg-type]


class Memory:
    """The device, mode and array module of a block."""

    def __init__(self, device: Device, policy: Policy) -> None:
        self.device = device
        self.mode = policy.mode

    @property
    def xp(self) -> Any:
        """Return CuPy, or the virtual GPU's array functions."""
        return self.device.xp

    def __repr__(self) -> str:
        simulated = " (simulated)" if self.device.simulated else ""
        return f"<{self.mode} memory on {self.device.name}{simulated}>"


class Decorator(ContextDecorator):
    """A block that also decorates functions, unless their body runs after the call returns."""

    def __call__(self, func: Any) -> Any:
        if any(check(func) for check in _RUN_LATER):
            raise UnsupportedError(
                f"{func.__name__} runs after the call that creates it has returned, when the block "
                "around the call has ended: use a with statement inside the function instead"
            )
        return super().__call__(func)


_RUN_LATER = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


class Block(Decorator, Scoped[Memory]):
    """A block, or a function, whose allocations come from one mode."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.title = f"umem.{request.mode}()"

    def _recreate_cm(self) -> Block:
        return Block(self._request)

    def _open(self, scope: Scope) -> Memory:
        device = current_device()
        policy = self._request.on(device)
        device.serve(scope, policy)
        return Memory(device, policy)


def managed(
    limit: Size | None = None,
    *,
    prefetch: bool = False,
    preset: Preset | None = None,
    upstream: Callable[[int], Any] | None = None,
) -> Block:
    """Allocate managed memory in this block: arrays may be larger than VRAM.

    Args:
        limit: the most bytes that managed memory may reserve: an int, or text such as "24GiB",
            "1.5x" (of the device's VRAM) or "90%" (of the host memory available to this process
            and its control groups when the block is entered; this machine's, also on a virtual
            GPU).
        prefetch: make memory resident when it is allocated. Saves most of the page faults of the
            first use; costs a driver call for each allocation.
        preset: ``"streaming"``, ``"random"``, ``"read_mostly"`` or ``"optimizer_state"``: give
            memory this advice (`umem.preset`) from its first byte. It comes from a separate pool,
            so no other array gets it.
        upstream: an allocator of managed memory to use instead of the driver, such as RMM's
            ``rmm_cupy_allocator`` or the ``malloc`` of a CuPy pool. It keeps free blocks itself.
            Limits and hints apply to its memory. Never run with RMM.

    Raises:
        HintError: unknown preset.
        TypeError, StateError: ``upstream`` is not an allocator, or is given with a preset. In the
            block, DeviceError if it returns plain memory, and StateError if it allocates from umem.
        DeviceNotFoundError: on entering, if there is no CUDA device and no virtual GPU.
        DeviceError: on entering, if the device cannot oversubscribe; the message gives the reason.
        SizeError: the limit is invalid; or, on entering, it is below the managed memory in use, or
            a share of an unknown amount.

    >>> import umem
    >>> with umem.virtual_gpu("v100-16gb", vram="64MiB"), umem.managed() as memory:
    ...     total = memory.xp.ones((4096, 4096), "float32").sum()
    """
    return Block(checked_request("managed", limit, prefetch, preset=preset).over(upstream))


def hybrid(
    limit: Size | None = None,
    *,
    spill: Literal["host", "migrate"] = "host",
    prefetch: bool = False,
    headroom: Size | None = None,
) -> Block:
    """Allocate unmanaged memory until it is full, then managed memory.

    An allocation that does not fit in VRAM is spilled, and stays spilled: arrays keep their
    addresses.

    Args:
        limit: the most bytes of the unmanaged part, as in `managed`; None is all of VRAM.
        spill: ``"host"`` keeps spilled memory on the host, where the GPU reads it over the bus.
            ``"migrate"`` lets it move to VRAM; leave it room there with ``limit``.
        prefetch: as in `managed`, for spilled memory.
        headroom: VRAM to leave free for memory that bypasses CuPy's allocator and cannot be
            spilled: modules, which load at their first launch, and the memory of libraries such as
            cuBLAS. Bytes as an int, or text such as "1GiB"; 0 leaves none. None is the larger of
            512 MiB and 3% of VRAM, at most half of VRAM; on a simulated GPU, which needs none, 0.

    Raises:
        DeviceNotFoundError, SizeError: see `managed`. SizeError also if headroom leaves no VRAM.
    """
    request = checked_request("hybrid", limit, prefetch, spill)
    return Block(request._replace(headroom_bytes=_headroom_bytes(headroom)))


def _headroom_bytes(headroom: Size | None) -> int | None:
    if headroom is None or (headroom == 0 and not isinstance(headroom, bool)):
        return headroom
    return parse_bytes(headroom, "headroom")


def unmanaged(limit: Size | None = None) -> Block:
    """Allocate plain device memory in this block, for instance hot buffers inside `managed`.

    Without a limit the memory comes from the allocator that the program set before umem's, or else
    from CuPy's default pool. With a limit it comes from a pool of umem.

    Args:
        limit: the most bytes, as in `managed`: "0.9x" is nine tenths of VRAM, but "90%" is a share
            of host memory here too. CuPy's own limit on this memory, CUPY_GPU_MEMORY_LIMIT,
            applies as well.

    Raises:
        DeviceNotFoundError, SizeError: see `managed`.
    """
    return Block(checked_request("unmanaged", limit, False))
