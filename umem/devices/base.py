"""The interface of devices.

Two implementations share this interface and one contract test: ``cuda`` (a real GPU through
CuPy) and ``virtual`` (the model of one). Public functions check arguments and word the errors;
a device only does the work.
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

    ``limit_bytes`` bounds what the mode's pool may reserve; under ``hybrid`` it bounds the
    unmanaged part. ``prefetch`` makes memory resident as it is handed out. ``spill`` says where
    hybrid's spilled memory lives: ``"host"`` (read over the bus) or ``"migrate"``. ``preset``, of
    managed memory, names the pool whose memory has that advice (`umem.devices.presets`).
    ``headroom_bytes`` of VRAM are left free under ``hybrid``. ``upstream`` is the allocator of
    another library from which managed memory comes, by CuPy's interface; None is the driver.
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

    ``resident_bytes`` (in VRAM) is None where the device cannot tell. A range whose parts differ
    reports None for what they differ in.
    """

    managed: bool
    preferred: Place | None = None
    accessed_by: tuple[Place, ...] = ()
    last_prefetch: Place | None = None
    read_mostly: bool = False
    resident_bytes: int | None = None


def common(locations: Sequence[Location]) -> Location:
    """Merge locations: fields in which all agree, and the sum of resident bytes."""
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
    """Bytes reserved by a device's pools, now and at most."""

    reserved_bytes: int
    peak_bytes: int
    managed_bytes: int
    resident_bytes: int | None
    paging: str


@dataclass(frozen=True)
class Feature:
    """A capability of a device, and why it has it or lacks it; ``on`` is None if unknown."""

    name: str
    on: bool | None
    why: str


Restore = Callable[[], None]


class Watcher(Protocol):
    """Interface of objects that are told of allocations and frees."""

    def allocated(self, nbytes: int, label: str, address: int) -> Any:
        """Record an allocation; the returned ticket is passed to `freed`.

        The address is that of `watch_pages`; 0 of memory that has no pages there.
        """

    def begin(self) -> None:
        """Note that an allocation begins, which may move pages itself."""

    def freed(self, ticket: Any) -> None:
        """Record that the allocation of a ticket was freed.

        Any thread may call this, at any moment, the garbage collector in the middle of `allocated`
        included: so it must take no lock.
        """


class Served(NamedTuple):
    """Payload of a scope whose allocations on a device follow a policy; ``handle`` is the device's
    own.
    """

    device: Device
    policy: Policy
    handle: Any


class Watched(NamedTuple):
    """Payload of a scope in which a watcher is told of a device's allocations."""

    device: Device
    watcher: Watcher
    handle: Any


def policy_here(device: Device) -> Policy | None:
    """Return the policy of the innermost block on a device that the calling code is in."""
    return derived(_policies).get(id(device))


def _policies(payload: tuple[Any, ...]) -> dict[int, Policy]:
    return {id(part.device): part.policy for part in payload if isinstance(part, Served)}


class Device(Paging, ABC):
    """A place for arrays, with allocation modes and hints.

    Thread-safety: `serve`, `watch` and ``install(everywhere=False)`` concern who is inside of the
    scope (`umem._common.scopes`); the rest may be called from any thread.
    """

    simulated: bool
    """True if residency and time are a model's."""
    backend: ClassVar[Literal["numpy", "cupy"]]
    """The library whose arrays live here."""
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
        """Return the counts of a model so far; None on a real device."""
        return None

    def enter(self, scope: Scope) -> tuple[Any, ...]:
        """Prepare to be the current device while ``scope`` is open.

        Returns what the scope has to hold beside the device.
        """
        return ()

    @abstractmethod
    def why_not(self, mode: Mode) -> str | None:
        """Return why this device cannot serve ``mode``; None if it can."""

    def serve(self, scope: Scope, policy: Policy) -> None:
        """Open ``scope``, in which allocations follow ``policy``; nothing if that raises.

        A change to managed or hybrid mode, here or in `serve_all`, may free unused memory of other
        pools.

        Raises:
            DeviceError: the device cannot serve the mode.
            SizeError: the limit is below what the mode's pool has in use.
            MissingDependencyError: the mode needs a library that is not installed.
        """
        self._check(policy.mode)
        handle = self._prepared(policy)
        scope.at_close(lambda: self._left(scope))
        scope.open(Served(self, policy, handle))
        self._entered(scope)

    def watch(self, scope: Scope, watcher: Watcher) -> None:
        """Open ``scope``, in which ``watcher`` is told of every allocation that is not empty.

        Memory that is freed later may still be told of.
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
            StateError: another allocator of the thread stands in the way.
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
            StateError: something of this thread stands in the way; nothing has changed.
        """
        scope.close()

    def install(self, policy: Policy, *, everywhere: bool) -> Restore:
        """Serve as `serve` or `serve_all`; returns a function that ends it, to be called once.

        Raises:
            StateError: by what is returned, when it is called a second time.
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
        """Make what serves a policy; raises SizeError and so on, as `serve` does."""

    @abstractmethod
    def _serve_all(self, scope: Scope, policy: Policy, handle: Any) -> None:
        """Serve all code outside of blocks by the result of `_prepared`."""

    def _watch(self, watcher: Watcher) -> Any:
        """Make what tells a watcher; change nothing yet."""

    def _unwatch(self, handle: Any) -> None:
        """Undo `_watch`."""

    def _entered(self, scope: Scope) -> None:
        """Do what the calling thread needs, which is inside ``scope`` now."""

    def _left(self, scope: Scope) -> None:
        """Undo it once no code is inside ``scope``; a second call does nothing."""

    def report_frees(self) -> None:
        """Tell watchers of all frees so far."""

    def give_back(self) -> None:
        """Give free blocks of managed memory back to the device, if a pool keeps any."""

    @abstractmethod
    def usage(self) -> Usage:
        """Return the bytes reserved now and at most."""

    def own_array(self, array: Any) -> Any:
        """Return an array as one of this device's library; raises DeviceError for another's."""
        return array

    def follow(self, scope: Scope, watcher: Watcher) -> None:
        """Tell ``watcher`` of allocations until a scope is closed, as `watch` does.

        On CUDA memory hooks tell it, so that the program may set allocators meanwhile.
        """
        self.watch(scope, watcher)

    def watch_pages(self, listener: MoveListener, scope: Scope) -> Now:
        """Report every move of managed memory's pages until a scope is closed.

        All moves before that have been reported then. Any thread may be told, with locks held:
        ``told`` must not allocate here. Returns the clock of the moves.

        Raises:
            StateError: they are reported already.
            DeviceError: this device, or its profiler, cannot report them.
            MissingDependencyError: the profiler's library is missing.
        """
        raise DeviceError(f"{self.name} has no pages to watch")

    def set_over(self) -> str | None:
        """Name the allocator that the program has set over the mode of the calling code."""
        return None

    def features(self) -> tuple[Feature, ...]:
        """List what is on and off here and why, in reading order."""
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
        """Return what is known of where an array's bytes are."""

    @abstractmethod
    def host_view(self, array: Any) -> np.ndarray[Any, Any]:
        """Wait for the GPU, and return a managed array's memory as a NumPy array.

        Raises:
            HintError: the array is not managed; DeviceError: the host cannot reach it now.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work so far is done."""
