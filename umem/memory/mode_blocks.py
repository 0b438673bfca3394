"""Modes of allocation for a block: `managed`, `hybrid`, `unmanaged`.

Blocks concern the code that enters them: the calling thread, and there the asyncio task that
enters, with the tasks which that one makes until the block ends. They nest, may overlap, work as
decorators, and restore exactly what was there when they end, also by an exception or a signal. One
that ends out of order (a generator that is given up) ends alone. Arrays may outlive them.
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
    """List the devices of the blocks that the calling code is in, one entry for each block."""
    return [part.device for scope in inside() for part in scope.payload if isinstance(part, Served)]


class Request(NamedTuple):
    """A requested mode with options; `on` makes it a policy for a device."""

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
            SizeError: the limit is not valid on this device, or headroom leaves nothing of its
                VRAM.
        """
        limit_bytes = None if self.limit is None else self.limit.resolve(device)
        headroom = self.headroom_bytes
        if self.mode == "hybrid" and headroom is None:
            headroom = device.headroom_bytes
        if headroom and headroom >= device.vram_bytes:
            raise SizeError(
                f"headroom of {format_bytes(headroom)} leaves nothing of the "
                f"{format_bytes(device.vram_bytes)} of VRAM of {device.name}: give less, by "
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
        """Return the request with memory of another allocator; see `managed`.

        Raises:
            TypeError: it is no allocator by CuPy's interface.
            StateError: beside a preset, or another mode than managed.
        """
        if upstream is None:
            return self
        if not callable(upstream):
            raise TypeError(
                "upstream is a function of the bytes that returns CuPy's memory, such as "
                f"rmm.allocators.cupy.rmm_cupy_allocator; got {type(upstream).__name__}"
            )
        if self.mode != "managed" or self.preset is not None:
            raise StateError("upstream= is for managed memory, without a preset")
        return self._replace(upstream=upstream)


def checked_request(
    mode: str, limit: Size | None, prefetch: bool, spill: str = "host", preset: Preset | None = None
) -> Request:
    """Check a mode and its options as far as no device is needed.

    Raises:
        StateError, SizeError, HintError: unknown mode or spill; no limit; unknown preset.
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
    """A block that also wraps functions, except those whose body runs after the call returns."""

    def __call__(self, func: Any) -> Any:
        if any(check(func) for check in _RUN_LATER):
            raise UnsupportedError(
                f"{func.__name__} runs after the call that makes it has returned, when the block "
                "around that call is over: write the block inside it, as a with statement"
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
        limit: the most that managed memory may reserve: bytes as an int, or text such as
            "24GiB", "1.5x" (of the device's VRAM) or "90%" (of the host memory that is available
            when the block is entered, in this process's control groups; on a virtual GPU too that
            is this machine's).
        prefetch: make memory resident as it is handed out. Saves most of the cost of a first
            touch by fault; costs a call for each allocation.
        preset: ``"streaming"``, ``"random"``, ``"read_mostly"`` or ``"optimizer_state"``: memory
            that has this advice (`umem.preset`) from its first byte, from a pool of its own, so
            that no other array gets it.
        upstream: an allocator to take managed memory from in the place of the driver, which keeps
            free blocks itself: by CuPy's interface, such as ``rmm_cupy_allocator`` of RMM, or the
            ``malloc`` of a pool. Limits and hints work on it. RMM's was never run.

    Raises:
        HintError: there is no such preset.
        TypeError, StateError: ``upstream`` is no allocator; beside a preset. In the block,
            DeviceError and StateError if it returns plain memory, or asks umem itself.
        DeviceNotFoundError: on entering, when there is no CUDA device and no virtual GPU.
        DeviceError: on entering, when the device cannot oversubscribe; the message says why.
        SizeError: the limit is not valid, at once; or, on entering, it is below what managed memory
            has in use, or a share of what is not known.

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

    The allocation that finds no room is spilled, and stays so: arrays keep their addresses.

    Args:
        limit: the most of the unmanaged part, as in `managed`; None is all of VRAM.
        spill: ``"host"``: spilled memory stays on the host and is read over the bus;
            ``"migrate"``: it moves, so leave it room by a ``limit``.
        prefetch: as in `managed`, for what is spilled.
        headroom: VRAM to leave free for what does not come from CuPy's allocator and cannot be
            spilled: modules that are loaded at their first launch, and what libraries such as
            cuBLAS take themselves. Bytes as an int, or text such as "1GiB"; 0 leaves none. None:
            512 MiB or 3% of VRAM, whichever is more, and at most half of it; on a simulated GPU,
            which loads nothing there, 0.

    Raises:
        DeviceNotFoundError, SizeError: see `managed`; headroom that leaves no VRAM is a SizeError.
    """
    request = checked_request("hybrid", limit, prefetch, spill)
    return Block(request._replace(headroom_bytes=_headroom_bytes(headroom)))


def _headroom_bytes(headroom: Size | None) -> int | None:
    if headroom is None or (headroom == 0 and not isinstance(headroom, bool)):
        return headroom
    return parse_bytes(headroom, "headroom")


def unmanaged(limit: Size | None = None) -> Block:
    """Allocate plain device memory in this block, for instance hot buffers inside `managed`.

    Without a limit that is memory of the allocator that the program had set before umem's, else of
    CuPy's default pool; with one, of a pool of umem.

    Args:
        limit: the most of it, as in `managed`: "0.9x" is nine tenths of VRAM, and "90%" is of
            host memory here too. CUPY_GPU_MEMORY_LIMIT is CuPy's own limit on the same memory,
            and holds beside this one.

    Raises:
        DeviceNotFoundError, SizeError: see `managed`.
    """
    return Block(checked_request("unmanaged", limit, False))
