"""Limits of the memory that CUDA pools reserve: the user's limit, and the machine's memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from umem._common.host import HOST_SHARE
from umem.devices.base import Policy
from umem.devices.cuda.driver import Driver
from umem.devices.cuda.ledger import Kind
from umem.devices.cuda.out_of_memory import CudaLimitError, CudaOutOfMemoryError
from umem.units import format_bytes

COVERED_SHARE, COVERED_SECONDS = 1 / 8, 1.0
"""One check of the host's free memory is valid for this share of it, and for so many seconds. Under
``upstream=`` umem sees each allocation, and a check reads /proc: 0.8 ms beside the 9 us of an
allocation, when this was written. So allocations pass without another check for a second, up to an
eighth of the free memory found: in a second other programs can take little of the other seven
eighths. Both numbers are choices that no measurement supports.
"""


class Bounds:
    """The limits on reserved bytes: the policy's limit, a cap, and the host's memory.

    ``cap_bytes`` limits all managed memory together, under any policy. ``program_limit`` limits one
    kind; the program sets it through CuPy's interface. Costs a few file reads a growth. Thread-safe
    while the ledger's lock is held.
    """

    def __init__(self, driver: Driver, policy: Callable[[], Policy | None]) -> None:
        self._driver, self._policy = driver, policy
        self._host_reference: int | None = None
        self._covered_bytes, self._covered_until = 0, 0.0
        self.cap_bytes: int | None = None
        self.program_limit: tuple[Kind, int] | None = None

    def covered_bytes(self, limit: int | None) -> int:
        """Return the managed memory that may be reserved without checking the machine.

        The last check is valid for `COVERED_SECONDS`; limits apply.
        """
        if time.monotonic() >= self._covered_until:
            return 0
        most = self._covered_bytes
        is_limited = limit is not None or self.program_limit is not None
        return self.limited(most, limit) if is_limited else most

    def limited(self, nbytes: int, limit: int | None) -> int:
        """Return the least of some bytes of managed memory, a limit and the program's own limit."""
        if limit is not None and limit < nbytes:
            nbytes = limit
        if self.program_limit is not None and self.program_limit[0] == "managed":
            nbytes = min(nbytes, self.program_limit[1])
        return nbytes

    def refusal(self, kind: Kind, nbytes: int, after: dict[Kind, int]) -> Exception | None:
        """Return the error for reserving ``nbytes`` more; None if they fit."""
        error = self._over_limit(kind, nbytes, after) or self._over_headroom(kind, nbytes)
        if error is None and kind != "unmanaged":
            error = self._over_cap(nbytes, after) or self._over_host(kind, nbytes, after)
        return error

    def _over_limit(self, kind: Kind, nbytes: int, after: dict[Kind, int]) -> Exception | None:
        """Return the error if a kind would exceed the lower of its limits; None otherwise."""
        limit, is_cupys = limit_of(self._policy(), kind), False
        if self.program_limit is not None and self.program_limit[0] == kind:
            set_by_program = self.program_limit[1]
            if limit is None or set_by_program < limit:
                limit, is_cupys = set_by_program, True
        if limit is None or after[kind] <= limit:
            return None
        name = "set_limit() of CuPy's default pool" if is_cupys else "the limit"
        error = CudaLimitError(
            f"needs {format_bytes(nbytes)}; {format_bytes(after[kind] - nbytes)} of the "
            f"{format_bytes(limit)} that {name} allows are reserved as {kind} memory. "
            "Raise the limit, or free arrays first.",
            needed_bytes=nbytes,
        )
        error.is_cupys_limit = is_cupys
        return error

    @property
    def headroom(self) -> int:
        """Return the bytes of VRAM that the active policy leaves free."""
        policy = self._policy()
        return 0 if policy is None else policy.headroom_bytes

    def _over_headroom(self, kind: Kind, nbytes: int) -> Exception | None:
        """Return the error if an unmanaged allocation would use the headroom; None otherwise."""
        if kind != "unmanaged" or not self.headroom:
            return None
        free = self._driver.free_bytes()
        if nbytes + self.headroom <= free:
            return None
        return CudaOutOfMemoryError(
            f"needs {format_bytes(nbytes)}; {format_bytes(free)} of VRAM are free, of which "
            f"{format_bytes(self.headroom)} stay free for modules and libraries, by headroom=.",
            needed_bytes=nbytes,
        )

    def _over_cap(self, nbytes: int, after: dict[Kind, int]) -> Exception | None:
        total = after["managed"] + after["spill"] + after["pinned"]
        if self.cap_bytes is None or total <= self.cap_bytes:
            return None
        return CudaLimitError(
            f"needs {format_bytes(nbytes)}; {format_bytes(total - nbytes)} of managed memory are "
            f"reserved, and this process may have {format_bytes(self.cap_bytes)} in all.",
            needed_bytes=nbytes,
        )

    def _over_host(self, kind: Kind, nbytes: int, after: dict[Kind, int]) -> Exception | None:
        """Return the error if VRAM and host together could not hold it; None otherwise."""
        on_host = after["spill"] + after["pinned"]
        total = after["managed"] + on_host
        host = self._host_bytes(total - nbytes)
        if host is None:
            self._cover(after, sys.maxsize)
            return None
        if kind != "managed" and on_host > host:
            return _host_error(nbytes, on_host - nbytes, host, 0)
        vram = self._vram_bytes(after["unmanaged"], total - nbytes)
        self._cover(after, host + vram - total)
        return _host_error(nbytes, total - nbytes, host, vram) if total > host + vram else None

    def _cover(self, after: dict[Kind, int], room: int) -> None:
        """Remember that managed memory may grow for a while, by a share of the free memory."""
        if self.cap_bytes is not None:
            room = min(room, self.cap_bytes - after["managed"] - after["spill"] - after["pinned"])
        self._covered_bytes = after["managed"] + max(0, int(COVERED_SHARE * room))
        self._covered_until = time.monotonic() + COVERED_SECONDS

    def _host_bytes(self, reserved: int) -> int | None:
        """Return the host bytes that managed memory may use; None if unknown."""
        # What is available falls as our own pages land on the host, and nobody says how many
        # did. So a fall of up to what we have reserved is taken for our own; more is others'.
        now = self._driver.host_available_bytes()
        if now is None:
            return None
        if not reserved or self._host_reference is None:
            self._host_reference = now
        self._host_reference = max(self._host_reference, now)
        return int(min(self._host_reference, now + reserved) * HOST_SHARE)

    def _vram_bytes(self, unmanaged: int, managed: int) -> int:
        if self._driver.integrated:
            return 0  # its VRAM is the host's memory
        # Other programs may have some; what is free falls as our own pages come in: as above.
        taken = unmanaged + self._driver.default_pool_bytes()
        return max(0, min(self._driver.vram_bytes - taken, self._driver.free_bytes() + managed))


def _host_error(nbytes: int, reserved: int, host: int, vram: int) -> Exception:
    vram_text = f" and {format_bytes(vram)} of VRAM" if vram else ""
    return CudaOutOfMemoryError(
        f"needs {format_bytes(nbytes)}; {format_bytes(reserved)} of managed memory are reserved, "
        f"and it may use {format_bytes(host)} of host memory{vram_text}. More would get the "
        "process killed when the pages are written. Free arrays, or make the step need less.",
        needed_bytes=nbytes,
    )


def limit_of(policy: Policy | None, kind: Kind) -> int | None:
    """Return a policy's limit for a pool; hybrid's limit applies to its unmanaged part."""
    if policy is None:
        return None
    bounded: Kind = "managed" if policy.mode == "managed" else "unmanaged"
    return policy.limit_bytes if kind == bounded else None
