"""What a device can do.

Two implementations share this interface and one contract test: ``cuda`` (a real GPU through
CuPy) and ``virtual`` (the model of one). Public functions check arguments and word the errors;
a device only does the work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from umem.errors import StateError
from umem.scopes import Scope, derived

if TYPE_CHECKING:
    from umem.devices.virtual.figures import Figures

Mode = Literal["unmanaged", "managed", "hybrid"]
Advice = Literal["read_mostly", "preferred_location", "accessed_by"]
Place = int | Literal["cpu"]
"""A GPU's ordinal, or the host."""

MODES: tuple[Mode, ...] = ("unmanaged", "managed", "hybrid")
ADVICE: tuple[Advice, ...] = ("read_mostly", "preferred_location", "accessed_by")


class Span(NamedTuple):
    """A range of the device's address space."""

    address: int
    nbytes: int


@dataclass(frozen=True)
class Policy:
    """Where allocations come from.

    ``limit_bytes`` bounds what the mode's pool may reserve; under ``hybrid`` it bounds the
    unmanaged part. ``prefetch`` makes memory resident as it is handed out. ``spill`` says where
    hybrid's spilled memory lives: ``"host"`` (read over the bus) or ``"migrate"``. ``preset``, of
    managed memory, names the pool whose memory has that advice (`umem.devices.presets`).
    """

    mode: Mode
    limit_bytes: int | None = None
    prefetch: bool = False
    spill: Literal["host", "migrate"] = "host"
    preset: str | None = None


@dataclass(frozen=True)
class Location:
    """Where managed memory is advised to be, and where it is.

    ``resident_bytes`` (in VRAM) is None where the device cannot tell. A range whose parts
    differ reports None for what they differ in.
    """

    managed: bool
    preferred: Place | None = None
    accessed_by: tuple[Place, ...] = ()
    last_prefetch: Place | None = None
    read_mostly: bool = False
    resident_bytes: int | None = None


@dataclass(frozen=True)
class Usage:
    """Bytes that a device's pools have reserved from the driver, now and at most."""

    reserved_bytes: int
    peak_bytes: int
    managed_bytes: int
    resident_bytes: int | None
    paging: str


@dataclass(frozen=True)
class Feature:
    """Something that a device has or lacks, and why; ``on`` is None where nobody can tell."""

    name: str
    on: bool | None
    why: str


Restore = Callable[[], None]


class Watcher(Protocol):
    """Is told of allocations, and of what became of them."""

    def allocated(self, nbytes: int, label: str) -> Any:
        """Memory was handed out; what is returned comes back with `freed`."""

    def freed(self, ticket: Any) -> None:
        """That memory is free again.

        Any thread may call this, at any moment, the garbage collector in the middle of
        `allocated` included: so it must take no lock.
        """


class Served(NamedTuple):
    """What a scope holds whose allocations on a device follow a policy, ``how`` being its own."""

    device: Device
    policy: Policy
    how: Any


class Watched(NamedTuple):
    """What a scope holds in which a watcher is told of a device's allocations."""

    device: Device
    watcher: Watcher
    how: Any


def policy_here(device: Device) -> Policy | None:
    """The policy of the innermost block that the calling code is inside of on a device."""
    return derived(_policies).get(id(device))


def _policies(payload: tuple[Any, ...]) -> dict[int, Policy]:
    return {id(part.device): part.policy for part in payload if isinstance(part, Served)}


class Device(ABC):
    """A place for arrays, with modes of allocation and hints.

    Thread-safety: `serve`, `tell` and ``install(everywhere=False)`` concern who is inside of the
    scope (`umem.scopes`); the rest may be called from any thread.
    """

    simulated: ClassVar[bool]
    """Residency and time are a model's."""
    backend: ClassVar[Literal["numpy", "cupy"]]
    """The library whose arrays live here."""
    name: str
    ordinal: int

    @property
    @abstractmethod
    def vram_bytes(self) -> int:
        """Bytes of VRAM."""

    @property
    @abstractmethod
    def xp(self) -> Any:
        """The array module whose arrays live on this device."""

    @property
    def figures(self) -> Figures | None:
        """What a model has counted so far; None where there is no model."""
        return None

    def enter(self, scope: Scope) -> tuple[Any, ...]:
        """Get ready to be the current device while ``scope`` is open.

        Returns what the scope has to hold beside the device.
        """
        return ()

    @abstractmethod
    def why_not(self, mode: Mode) -> str | None:
        """Why this device cannot serve ``mode``, or None when it can."""

    def serve(self, scope: Scope, policy: Policy) -> None:
        """Open ``scope``: inside of it, allocations follow ``policy``.

        Raises:
            SizeError: the limit is below what the mode's pool has in use; nothing was opened.
        """
        how = self._prepared(policy)
        scope.at_close(lambda: self._left(scope))
        scope.open(Served(self, policy, how))
        self._entered(scope)

    def tell(self, scope: Scope, watcher: Watcher) -> None:
        """Open ``scope``: inside of it, ``watcher`` is told of every allocation but empty ones.

        Memory that is freed later may still be told of.
        """
        how = self._watch(watcher)
        scope.at_close(lambda: self._left(scope))
        scope.at_close(lambda: self._unwatch(how))
        scope.open(Watched(self, watcher, how))
        self._entered(scope)

    @abstractmethod
    def serve_all(self, scope: Scope, policy: Policy) -> None:
        """Serve the allocations of the whole process by ``policy`` until ``scope`` is closed.

        It is not opened: nobody is inside of it. Blocks go before it.

        Raises:
            SizeError: the limit is below what the mode's pool has in use.
            StateError: another allocator of the thread stands in the way. Nothing has changed.
        """

    def leave_all(self, scope: Scope) -> None:
        """Close the scope that `serve_all` was given.

        Raises:
            StateError: something of this thread stands in the way; nothing has changed.
        """
        scope.close()

    def install(self, policy: Policy, *, everywhere: bool) -> Restore:
        """As `serve` and `serve_all`; returns what ends it, to be called once.

        Raises:
            StateError: by what is returned, when it is called a second time.
        """
        scope = Scope(f"{policy.mode} memory on {self.name}")
        serve, leave = (self.serve_all, self.leave_all) if everywhere else (self.serve, Scope.close)
        return _opened(scope, lambda: serve(scope, policy), leave)

    def watch(self, watcher: Watcher) -> Restore:
        """As `tell`; returns what ends it, to be called once."""
        scope = Scope(f"a watch on {self.name}")
        return _opened(scope, lambda: self.tell(scope, watcher), Scope.close)

    @abstractmethod
    def _prepared(self, policy: Policy) -> Any:
        """What serves a policy that can be served; nothing has changed by then."""

    def _watch(self, watcher: Watcher) -> Any:  # noqa: B027 (not every device needs something)
        """What tells a watcher; nothing has changed by then."""

    def _unwatch(self, how: Any) -> None:  # noqa: B027 (most devices have nothing to do)
        """That is not needed any more."""

    def _entered(self, scope: Scope) -> None:  # noqa: B027
        """The calling thread is inside ``scope`` now."""

    def _left(self, scope: Scope) -> None:  # noqa: B027
        """Nobody is inside ``scope`` any more; a second time changes nothing."""

    def settle(self) -> None:  # noqa: B027 (most devices tell at once)
        """Tell watchers of everything that was freed so far."""

    @abstractmethod
    def usage(self) -> Usage:
        """What is reserved now, and at most."""

    def features(self) -> tuple[Feature, ...]:
        """What is on and off here, and why; in the order in which a person wants to read it."""
        return ()

    def versions(self) -> dict[str, str | None]:
        """Versions of what stands between umem and the GPU; None where they cannot be told."""
        return {}

    def host_available_bytes(self) -> int | None:
        """Host bytes that this process may still take, None where it is unknown."""
        from umem.devices import host as host_memory

        return host_memory.available_bytes()

    @abstractmethod
    def prefetch(self, array: Any, to: Place, stream: Any) -> int:
        """Move a managed array's bytes; returns how many, 0 if the array is not managed."""

    @abstractmethod
    def advise(self, array: Any, advice: Advice, place: Place | None, *, unset: bool) -> int:
        """Give or take back advice on a managed array's bytes; returns how many, or 0."""

    @abstractmethod
    def location(self, array: Any) -> Location:
        """What is known of where an array's bytes are."""

    @abstractmethod
    def host_view(self, array: Any) -> np.ndarray[Any, Any]:
        """A managed array's memory as a NumPy array, after waiting for the GPU.

        Raises:
            HintError: the array is not managed; DeviceError: the host cannot reach it now.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything that was asked for has happened."""


def _opened(scope: Scope, opening: Callable[[], None], leave: Callable[[Scope], None]) -> Restore:
    try:
        opening()
    except BaseException:
        scope.close()
        raise
    return lambda: _leave_once(scope, leave)


def _leave_once(scope: Scope, leave: Callable[[Scope], None]) -> None:
    if scope.is_over:
        raise StateError(f"{scope.title}: restored before")
    leave(scope)


def byte_ranges(
    address: int, shape: Iterable[int], strides: Iterable[int], itemsize: int, page: int = 4096
) -> list[Span]:
    """The address ranges that a strided array covers, in ascending order.

    Exact for any strides, negative and zero included, except that gaps smaller than ``page``
    are covered too: the driver works in pages, so hints round to them anyway.

    >>> byte_ranges(0, (2, 4), (8192, 4), 4)
    [Span(address=0, nbytes=16), Span(address=8192, nbytes=16)]
    """
    dims = sorted((abs(st), n, st) for n, st in zip(shape, strides, strict=True) if n != 1)
    if any(n == 0 for _, n, _ in dims):
        return []
    address += sum((n - 1) * st for _, n, st in dims if st < 0)
    extent = itemsize
    outer: list[tuple[int, int]] = []
    for step, count, _ in dims:
        if not outer and step - extent < page:
            extent += (count - 1) * step
        elif step:
            outer.append((step, count))
    starts = np.array([address], dtype=np.int64)
    for step, count in outer:
        starts = np.add.outer(starts, np.arange(count, dtype=np.int64) * step).ravel()
    starts.sort()
    return _merge(starts, extent, page)


def _merge(starts: Any, extent: int, page: int) -> list[Span]:
    gaps = np.flatnonzero(np.diff(starts) - extent >= page)
    first = starts[np.concatenate(([0], gaps + 1))]
    last = starts[np.concatenate((gaps, [len(starts) - 1]))]
    return [Span(int(a), int(b) + extent - int(a)) for a, b in zip(first, last, strict=True)]
