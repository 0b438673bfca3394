"""The virtual GPU: a model of pages and time that follows a run, or replays a trace.

docs/reference/virtual-gpu.md lists what it models and what it does not. All figures are
*simulated*; arithmetic is real and runs on NumPy.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from umem._common.host import host_view, unmanaged_text
from umem._common.scopes import Scope, derived
from umem._common.specs import COSTS, GpuSpec, gpu_spec
from umem.devices.base import (
    Advice,
    Device,
    Feature,
    Location,
    Mode,
    Place,
    Policy,
    Span,
    Usage,
    Watched,
    Watcher,
    policy_here,
)
from umem.devices.cost import Sample, StepCost
from umem.devices.page_moves import MoveListener, Now
from umem.devices.spans import byte_ranges
from umem.devices.virtual.advice import (
    ACCESSED_BY_GPU,
    ACCESSED_BY_HOST,
    PREFER_GPU,
    PREFER_HOST,
    READ_MOSTLY,
)
from umem.devices.virtual.clock import Clock
from umem.devices.virtual.driver import covered, half_covered
from umem.devices.virtual.features import features
from umem.devices.virtual.free_blocks import discard_free, make_ready
from umem.devices.virtual.model import Allocator, Model
from umem.devices.virtual.residency import TO_GPU, TO_HOST, Residency
from umem.devices.virtual.watching import EventWatch
from umem.errors import DeviceError, HintError, StateError
from umem.trace import Access, Event, Free, Hint
from umem.trace.recording import Reach, Recorder, active, address_of, root_of
from umem.units import BLOCK_BYTES

UNMANAGED = Policy("unmanaged")
_PLACES: dict[int, Place | None] = {0: None, TO_GPU: 0, TO_HOST: "cpu"}


class VirtualGPU(Device):
    """A model of one GPU, driven by events.

    Args:
        gpu: a name from the table (`umem._common.specs`), or a spec.
        vram_bytes: usable VRAM instead of the table's figure.
        allocator, backend, clocks: see `Model`.

    Models: see docs/reference/virtual-gpu.md. Does not model: contents.
    Thread-safe. Cost: bench/residency.py (block touches a second), bench/overhead.py (live).
    """

    simulated = True
    backend: ClassVar[Literal["numpy", "cupy"]] = "numpy"

    def __init__(
        self,
        gpu: str | GpuSpec,
        *,
        vram_bytes: int | None = None,
        allocator: Allocator = "caching",
        backend: str = "numpy",
        clocks: Sequence[Clock] = (),
    ) -> None:
        spec = gpu_spec(gpu)
        spec = spec if vram_bytes is None else spec.with_vram(vram_bytes)
        self.spec, self.name, self.ordinal = spec, spec.name, 0
        self.model = Model(spec, COSTS, allocator, backend, lambda: self.policy, clocks)
        self.recorder: Recorder | None = None
        self.watches: tuple[EventWatch, ...] = ()
        self._everywhere: tuple[list[Policy], ...] = ()

    # -- Device ----------------------------------------------------------------------------

    @property
    def vram_bytes(self) -> int:
        """Return the usable VRAM."""
        return self.spec.usable_bytes

    @property
    def xp(self) -> Any:
        """Return the array functions that this GPU follows, `umem.devices.virtual.arrays`."""
        from umem.devices.virtual import arrays

        return arrays

    def enter(self, scope: Scope) -> tuple[Recorder]:
        """Follow the operations of code inside ``scope``."""
        self.recorder = Recorder(self.on_event, keep=False)
        scope.at_close(self.model.end)
        self.recorder.join(scope)
        return (self.recorder,)

    def why_not(self, mode: Mode) -> str | None:
        """Return why managed memory is refused: no host link to migrate over. None if it is not."""
        if mode != "unmanaged" and self.spec.host_in_bandwidth is None:
            return (
                f"{self.spec.title} shares its memory with the CPU and has no concurrent managed "
                "access: there is nothing to oversubscribe"
            )
        return None

    def features(self) -> tuple[Feature, ...]:
        """List the GPU features that the model covers, and those that it does not."""
        return features(self.spec, self.why_not("managed"))

    def _prepared(self, policy: Policy) -> None:
        if policy.upstream is not None:
            raise DeviceError("a virtual GPU takes no other library's memory: leave out upstream=")
        with self.model.lock:
            self._flush()
            self.model.driver.check_limit(policy)

    def _serve_all(self, scope: Scope, policy: Policy, handle: None) -> None:
        entry = [policy]
        scope.at_close(lambda: self._stop_serving(entry))
        self._everywhere = (*self._everywhere, entry)

    def _stop_serving(self, entry: list[Policy]) -> None:
        self._everywhere = tuple(each for each in self._everywhere if each is not entry)

    def _watch(self, watcher: Watcher) -> EventWatch:
        self.report_frees()
        return EventWatch(watcher, self.model.tensors)

    def _entered(self, scope: Scope) -> None:
        with self.model.lock:
            self.watches = (*self.watches, *_watching(scope.payload))

    def _unwatch(self, watch: EventWatch) -> None:
        self.report_frees()
        with self.model.lock:
            self.watches = tuple(each for each in self.watches if each is not watch)

    def report_frees(self) -> None:
        """Notify watchers of all freed arrays so far."""
        with self.model.lock:
            self._flush()

    def usage(self) -> Usage:
        """Return the bytes of the pools; resident bytes are known, because they are simulated."""
        with self.model.lock:
            self._flush()
            return Usage(
                reserved_bytes=self.model.driver.reserved_bytes,
                peak_bytes=self.model.counters.reserved_peak_bytes,
                managed_bytes=self.model.driver.managed_bytes,
                resident_bytes=self.model.driver.resident_count * BLOCK_BYTES,
                paging=f"{self.model.counters.fault_count} faults (simulated)",
            )

    def prefetch(self, array: Any, to: Place, stream: Any) -> int:
        """Move an array's blocks; with a ``stream``, concurrently with operations."""
        self._check_place(to)
        return self._hint(array, Hint("prefetch", (), to, overlap=stream is not None))

    @property
    def forgets(self) -> bool:
        """Return True: the model can always discard."""
        return True

    def repeat_places(self, scope: Scope) -> None:
        """Reuse the previous step's addresses for managed memory, until ``scope`` is closed."""
        pool = self.model.driver.repeating
        if not pool.repeats:
            pool.repeats = True
            scope.at_close(lambda: setattr(pool, "repeats", False))

    def address(self, array: Any) -> int | None:
        """Return the model's address of a managed array; None for other arrays."""
        with self.model.lock:
            found = None if self.recorder is None else self.recorder.known(array)
            tensor = None if found is None else self.model.tensors.get(found[0])
            if found is None or tensor is None or not tensor.managed:
                return None
            return tensor.span.address + int(found[1])

    def discard_free(self, blocks: Iterable[int]) -> int:
        """Discard the contents of free blocks; returns their bytes."""
        return discard_free(self.model, blocks) * BLOCK_BYTES

    def make_ready(self, blocks: Iterable[int], stream: Any) -> int:
        """Make free blocks resident, concurrently with operations; returns their bytes."""
        return make_ready(self.model, blocks) * BLOCK_BYTES

    def advise(self, array: Any, advice: Advice, place: Place | None, *, unset: bool) -> int:
        """Set or unset advice on blocks that an array covers at least half of."""
        self._check_place(place)
        return self._hint(array, Hint(advice, (), place, unset))

    def is_sent(self, array: Any) -> bool:
        """Tell whether an array's copy has ended on the host's clock; True without a copy."""
        with self.model.lock:
            found = None if self.recorder is None else self.recorder.known(array)
            return found is None or self.model.copies.is_sent(found[0])

    def location(self, array: Any) -> Location:
        """Return the places of an array's blocks in the model."""
        with self.model.lock:
            found = None if self.recorder is None else self.recorder.known(array)
            tensor = None if found is None else self.model.tensors.get(found[0])
            if found is None or tensor is None:
                return Location(managed=False)
            if not tensor.managed:
                return Location(managed=False, resident_bytes=array.nbytes)
            parts = [tensor.part(low, high) for _, low, high in _parts(array, found)]
            return _location(self.model.driver.residency, parts, array.nbytes)

    def host_view(self, array: Any) -> np.ndarray[Any, Any]:
        """Return the array's memory as a NumPy array, treated as a host array."""
        with self.model.lock:
            found = None if self.recorder is None else self.recorder.known(array)
            tensor = None if found is None else self.model.tensors.get(found[0])
            if tensor is None or not (array.nbytes == 0 or tensor.managed):
                raise HintError(unmanaged_text(array.shape))
        self.synchronize()
        return host_view(address_of(array), array.shape, array.strides, array.dtype, array)

    def synchronize(self) -> None:
        """Make the host wait for the GPU."""
        self.model.synchronize()

    # -- figures ---------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """Return the policy of the calling code's allocations."""
        policy = policy_here(self)
        if policy is not None:
            return policy
        everywhere = self._everywhere
        return everywhere[-1][0] if everywhere else UNMANAGED

    @property
    def figures(self) -> StepCost:
        """Return the counts so far (simulated)."""
        with self.model.lock:
            self._flush()
            return self.model.figures

    def on_event(self, event: Event) -> None:
        """Apply one event; see `Model.on_event`."""
        if self.recorder is not None and type(event) is Free:
            if event.tensor not in self.model.tensors:
                return  # a signal has interrupted its allocation
        for watch in self.watches:
            watch.begin()
        self.model.on_event(event)
        for watch in self.watches:
            if type(event) is Free or watch in derived(_watching):
                watch.on_event(event)

    def watch_pages(self, listener: MoveListener, scope: Scope) -> Now:
        """Report moves of blocks by simulated addresses and time; see `Device.watch_pages`."""
        self._flush()
        now = self.model.watch_pages(listener, scope)
        scope.at_close(self._flush)  # before the model's end
        return now

    @property
    def timeline(self) -> list[Sample]:
        """Return allocated and resident bytes over simulated time, at most 20,000 points."""
        return list(self.model.counters.timeline)

    def _flush(self) -> None:
        if self.recorder is not None:
            self.recorder.flush()

    # -- hints -----------------------------------------------------------------------------

    def _check_place(self, place: Place | None) -> None:
        if place not in ("cpu", None, self.ordinal):
            raise DeviceError(f"there is no GPU {place}: this virtual GPU is number {self.ordinal}")

    def _hint(self, array: Any, hint: Hint) -> int:
        """Emit a hint on an array to all recorders; returns the managed bytes.

        Raises:
            StateError: outside the device's block. DeviceError: it is a CuPy array.
        """
        if self.recorder is None or self.recorder not in active():
            raise StateError("give hints on a virtual GPU inside its umem.virtual_gpu block")
        if type(array).__module__.partition(".")[0] == "cupy":
            raise DeviceError("a CuPy array is not on this virtual GPU; use memory.xp's arrays")
        nbytes = 0
        for recorder in active():
            parts = _parts(array, recorder.access(array, "input", "array", uploaded=True))
            tensor = self.model.tensors.get(parts[0].tensor)
            if recorder is self.recorder and tensor and tensor.managed:
                nbytes = sum(part.stop - part.start for part in parts)
            recorder.emit(hint._replace(accesses=parts))
        return nbytes


def _watching(payload: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(part.handle for part in payload if isinstance(part, Watched))


def _location(residency: Residency, parts: list[Span], nbytes: int) -> Location:
    """Merge the advice and residency of an array's blocks."""
    advice: set[int] = set()
    places: set[int] = set()
    resident = 0
    for part in parts:
        advice.update(residency.advice[slice(*half_covered(part))])
        start, stop = covered(part)
        places.update(residency.last_prefetch[start:stop])
        resident += residency.resident.count(1, start, stop) * BLOCK_BYTES
    common = functools.reduce(operator.and_, advice) if advice else 0
    accessed_by: tuple[tuple[int, Place], ...] = ((ACCESSED_BY_GPU, 0), (ACCESSED_BY_HOST, "cpu"))
    return Location(
        managed=True,
        preferred="cpu" if common & PREFER_HOST else 0 if common & PREFER_GPU else None,
        accessed_by=tuple(place for flag, place in accessed_by if common & flag),
        last_prefetch=_PLACES[places.pop()] if len(places) == 1 else None,
        read_mostly=bool(common & READ_MOSTLY),
        resident_bytes=min(nbytes, resident),
    )


def _parts(array: Any, access: Reach) -> tuple[Access, ...]:
    """Return the byte ranges of an array in its tensor; an empty array has an empty range."""
    root = root_of(array)
    if root is array or array.nbytes == root.nbytes or array.size == 0:
        return (Access(*access),)
    offset = address_of(array) - address_of(root)
    spans = byte_ranges(offset, array.shape, array.strides, array.itemsize)
    return tuple(Access(access[0], span.address, span.address + span.nbytes) for span in spans)
