"""The interface of devices.

Two implementations share this interface and one contract test: ``cuda`` (a real GPU through CuPy)
and ``virtual`` (a model of one). Public functions check arguments and raise errors; a device only
does the work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from umem._common.scopes import Scope, derived
from umem.devices.blocks_of_memory import Paging
from umem.errors import DeviceError, StateError

if TYPE_CHECKING:
    from umem.devices.cost import StepCost
    from umem.devices.page_moves import MoveListener, Now

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
    """The source of allocations: a mode and its options.

    ``limit_bytes`` limits the bytes that the mode's pool may reserve, under ``hybrid`` in its
    unmanaged part. ``prefetch`` makes memory resident when it is allocated. ``spill`` is the place
    of hybrid's spilled memory: ``"host"`` (read over the bus) or ``"migrate"``. ``preset`` selects
    the pool of managed memory with that advice (`umem.devices.presets`). ``headroom_bytes`` of VRAM
    stay free under ``hybrid``. ``upstream`` is another library's allocator (by CuPy's interface)
    that provides managed memory; None is the driver.
    """

    mode: Mode
    limit_bytes: int | None = None
    prefetch: bool = False
    spill: Literal["host", "migrate"] = "host"
    preset: str | None = None
    headroom_bytes: int = 0
    upstream: Callable[[int], Any] | None = None


@dataclass(frozen=True)
class Location:
    """The advised and the actual places of managed memory.

    ``resident_bytes`` (in VRAM) is None if the device does not know it. A field in which parts of
    the range differ is None.
    """

    managed: bool
    preferred: Place | None = None
    accessed_by: tuple[Place, ...] = ()
    last_prefetch: Place | None = None
    read_mostly: bool = False
    resident_bytes: int | None = None


def common(locations: Sequence[Location]) -> Location:
    """Merge locations: keep fields in which all agree, and add up resident bytes."""
    first, *others = locations
    places = set(first.accessed_by).intersection(*(other.accessed_by for other in others))
    resident = [each.resident_bytes for each in locations if each.resident_bytes is not None]
    return Location(
        managed=all(each.managed for each in locations),
        preferred=_agreed([each.preferred for each in locations]),
        accessed_by=tuple(place for place in first.accessed_by if place in places),
        last_prefetch=_agreed([each.last_prefetch for each in locations]),
        read_mostly=all(each.read_mostly for each in locations),
        resident_bytes=sum(resident) if len(resident) == len(locations) else None,
    )


def _agreed(places: list[Place | None]) -> Place | None:
    return places[0] if len(set(places)) == 1 else None


@dataclass(frozen=True)
class Usage:
    """Bytes reserved by a device's pools, now and at their peak."""

    reserved_bytes: int
    peak_bytes: int
    managed_bytes: int
    resident_bytes: int | None
    paging: str


@dataclass(frozen=True)
class Feature:
    """A capability of a device, and why it has or lacks it; ``on`` is None if unknown."""

    name: str
    on: bool | None
    why: str


Restore = Callable[[], None]


class Watcher(Protocol):
    """Interface of objects that are notified of allocations and frees."""

    def allocated(self, nbytes: int, label: str, address: int) -> Any:
        """Record an allocation; the returned ticket is passed to `freed`.

        The address is one that `watch_pages` uses, or 0 for memory without such pages.
        """

    def begin(self) -> None:
        """Note that an allocation begins, which may move pages itself."""

    def freed(self, ticket: Any) -> None:
        """Record that the allocation of a ticket was freed.

        Any thread may call this at any moment, even the garbage collector during `allocated`, so it
        must take no lock.
        """


class Served(NamedTuple):
    """Payload of a scope with a policy for allocations on a device; ``handle`` is the device's."""

    device: Device
    policy: Policy
    handle: Any


class Watched(NamedTuple):
    """Payload of a scope in which a device notifies a watcher of allocations."""

    device: Device
    watcher: Watcher
    handle: Any


def policy_here(device: Device) -> Policy | None:
    """Return the policy of the calling code's innermost block on a device."""
    return derived(_policies).get(id(device))


def _policies(payload: tuple[Any, ...]) -> dict[int, Policy]:
    return {id(part.device): part.policy for part in payload if isinstance(part, Served)}


class Device(Paging, ABC):
    """A place for arrays, with allocation modes and hints.

    Thread-safety: `serve`, `watch` and ``install(everywhere=False)`` affect only code inside the
    scope (`umem._common.scopes`). Any thread may call the other methods.
    """

    simulated: bool
    """True if residency and time are modelled."""
    backend: ClassVar[Literal["numpy", "cupy"]]
    """The library of this device's arrays."""
    name: str
    ordinal: int

    @property
    @abstractmethod
    def vram_bytes(self) -> int:
        """Return the bytes of VRAM."""

    @property
    def headroom_bytes(self) -> int:
        """Return the bytes of VRAM that hybrid memory leaves free by default."""
        return 0

    @property
    @abstractmethod
    def xp(self) -> Any:
        """Return the array module of this device's arrays."""

    @property
    def figures(self) -> StepCost | None:
        """Return a model's counts so far; None on a real device."""
        return None

    def enter(self, scope: Scope) -> tuple[Any, ...]:
        """Prepare to be the current device while ``scope`` is open.

        Returns further payload that the scope must hold.
        """
        return ()

    @abstractmethod
    def why_not(self, mode: Mode) -> str | None:
        """Return why this device cannot serve ``mode``; None if it can."""

    def serve(self, scope: Scope, policy: Policy) -> None:
        """Open ``scope``, in which allocations follow ``policy``; an error changes nothing.

        A change to managed or hybrid mode, here or in `serve_all`, may free unused memory of other
        pools.

        Raises:
            DeviceError: the device cannot serve the mode.
            SizeError: the mode's pool already uses more than the limit.
            MissingDependencyError: the mode needs a library that is not installed.
        """
        self._check(policy.mode)
        handle = self._prepared(policy)
        scope.at_close(lambda: self._left(scope))
        scope.open(Served(self, policy, handle))
        self._entered(scope)

    def watch(self, scope: Scope, watcher: Watcher) -> None:
        """Open ``scope``, in which ``watcher`` is notified of every non-empty allocation.

        It may still be notified of frees after the scope.
        """
        handle = self._watch(watcher)
        scope.at_close(lambda: self._left(scope))
        scope.at_close(lambda: self._unwatch(handle))
        scope.open(Watched(self, watcher, handle))
        self._entered(scope)

    def serve_all(self, scope: Scope, policy: Policy) -> None:
        """Serve all allocations of the process by ``policy`` until ``scope`` is closed.

        The scope is not opened. Blocks take precedence.

        Raises:
            StateError: another allocator of the thread prevents it.
            DeviceError, SizeError, MissingDependencyError: see `serve`. Nothing has changed.
        """
        self._check(policy.mode)
        self._serve_all(scope, policy, self._prepared(policy))

    def _check(self, mode: Mode) -> None:
        reason = self.why_not(mode)
        if reason is not None:
            raise DeviceError(f"{self.name} cannot serve {mode} memory: {reason}")

    def leave_all(self, scope: Scope) -> None:
        """Close the scope of `serve_all`.

        Raises:
            StateError: another allocator or block of this thread prevents it; nothing has changed.
        """
        scope.close()

    def install(self, policy: Policy, *, everywhere: bool) -> Restore:
        """Serve as `serve` or `serve_all`; returns a function that ends it, which you call once.

        Raises:
            StateError: from the returned function, when it is called a second time.
        """
        scope = Scope(f"{policy.mode} memory on {self.name}")
        serve, leave = (self.serve_all, self.leave_all) if everywhere else (self.serve, Scope.close)
        try:
            serve(scope, policy)
        except BaseException:
            scope.close()
            raise

        def restore() -> None:
            if scope.is_over:
                raise StateError(f"{scope.title}: restored before")
            leave(scope)

        return restore

    @abstractmethod
    def _prepared(self, policy: Policy) -> Any:
        """Make the allocator of a policy; raises the same errors as `serve`."""

    @abstractmethod
    def _serve_all(self, scope: Scope, policy: Policy, handle: Any) -> None:
        """Serve all code outside of blocks by the result of `_prepared`."""

    def _watch(self, watcher: Watcher) -> Any:
        """Make an object that notifies a watcher; change nothing yet."""

    def _unwatch(self, handle: Any) -> None:
        """Undo `_watch`."""

    def _entered(self, scope: Scope) -> None:
        """Prepare the calling thread, which is inside ``scope`` now."""

    def _left(self, scope: Scope) -> None:
        """Undo `_entered` once no code is inside ``scope``; a second call does nothing."""

    def report_frees(self) -> None:
        """Notify watchers of all frees so far."""

    def give_back(self) -> None:
        """Return free blocks of managed memory to the device, if a pool keeps any."""

    @abstractmethod
    def usage(self) -> Usage:
        """Return the bytes reserved, now and at their peak."""

    def own_array(self, array: Any) -> Any:
        """Return an array as one of this device's library; raises DeviceError for another's."""
        return array

    def follow(self, scope: Scope, watcher: Watcher) -> None:
        """Notify ``watcher`` of allocations until a scope is closed, as `watch` does.

        CUDA devices use memory hooks for this, so that the program may set allocators meanwhile.
        """
        self.watch(scope, watcher)

    def watch_pages(self, listener: MoveListener, scope: Scope) -> Now:
        """Report every move of managed memory's pages until a scope is closed.

        All earlier moves have been reported by then. Any thread may call the listener, with locks
        held, so it must not allocate on this device. Returns the clock of the moves.

        Raises:
            StateError: moves are already being reported.
            DeviceError: this device, or its profiler, cannot report them.
            MissingDependencyError: the profiler's library is missing.
        """
        raise DeviceError(f"{self.name} has no pages to watch")

    def set_over(self) -> str | None:
        """Name the allocator that the program has set over the calling code's mode."""
        return None

    def features(self) -> tuple[Feature, ...]:
        """List the enabled and missing features with reasons, in reading order."""
        return ()

    def versions(self) -> dict[str, str | None]:
        """Return the versions of the libraries between umem and the GPU; None where unknown."""
        return {}

    def host_available_bytes(self) -> int | None:
        """Return the host bytes that this process may still allocate; None if unknown."""
        from umem._common import host as host_memory

        return host_memory.available_bytes()

    @abstractmethod
    def prefetch(self, array: Any, to: Place, stream: Any) -> int:
        """Move a managed array; returns its bytes, 0 if it is not managed."""

    @abstractmethod
    def advise(self, array: Any, advice: Advice, place: Place | None, *, unset: bool) -> int:
        """Set or unset advice on a managed array; returns its bytes, 0 if it is not managed."""

    @abstractmethod
    def location(self, array: Any) -> Location:
        """Return the known places of an array's bytes."""

    @abstractmethod
    def host_view(self, array: Any) -> np.ndarray[Any, Any]:
        """Wait for the GPU, and return a managed array's memory as a NumPy array.

        Raises:
            HintError: the array is not managed; DeviceError: the host cannot reach it now.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work so far has finished."""
