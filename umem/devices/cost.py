"""The cost of a training step on a GPU, from a replay, a run or a real device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple, Protocol

from umem._common.scopes import Scope
from umem.devices.page_moves import MoveListener, Now


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """The cost of one or several steps; unknown figures are None.

    Attributes:
        seconds: the time; ``seconds_low`` and ``seconds_high`` with every cost constant of the
            model at its fastest and at its slowest. ``step_seconds`` has the time of each step,
            from one update to the next.
        compute_seconds: the time of the operations alone; ``stall_seconds`` their wait for memory.
        peak_bytes: the peak of tensors and workspace.
        reserved_peak_bytes: the peak that the pools reserved for them.
        resident_peak_bytes: the peak of VRAM in use, in whole blocks.
        host_bytes: the host memory of data that does not fit into VRAM.
        migrated_in_bytes, migrated_out_bytes: bytes of blocks that moved into VRAM and out of it.
        populated_bytes: bytes of blocks that got memory when they were first written.
        remote_bytes: bytes accessed in place over the bus.
        uploaded_bytes: bytes that the program copied from the host.
        sent_bytes, fetched_bytes: bytes copied to pinned host memory to make room, and back.
        fault_count: the number of blocks that faults brought in or populated.
    """

    seconds: float | None = None
    seconds_low: float | None = None
    seconds_high: float | None = None
    step_seconds: tuple[float, ...] = ()
    compute_seconds: float | None = None
    stall_seconds: float | None = None
    peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    resident_peak_bytes: int | None = None
    host_bytes: int | None = None
    migrated_in_bytes: int | None = None
    migrated_out_bytes: int | None = None
    populated_bytes: int | None = None
    remote_bytes: int | None = None
    uploaded_bytes: int | None = None
    sent_bytes: int | None = None
    fetched_bytes: int | None = None
    fault_count: int | None = None

    @property
    def migrated_bytes(self) -> int | None:
        """Return the bytes of blocks migrated in both directions."""
        return _sum(self.migrated_in_bytes, self.migrated_out_bytes)

    @property
    def moved_bytes(self) -> int | None:
        """Return all bytes over the bus: blocks and copies in both directions, and remote accesses.

        Excludes uploads, which every technique has.
        """
        copied = (self.sent_bytes or 0) + (self.fetched_bytes or 0)
        return _sum(_sum(self.migrated_bytes, self.remote_bytes), copied)


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


class Sample(NamedTuple):
    """A point of the timeline: seconds, tensor bytes and VRAM in use."""

    seconds: float
    allocated_bytes: int
    resident_bytes: int


class CudaModel(Protocol):
    """The model behind a device with real arithmetic but simulated pages and time."""

    @property
    def figures(self) -> StepCost:
        """Return the counts so far."""

    @property
    def resident_bytes(self) -> int | None:
        """Return the VRAM in use, in whole blocks; None if it is not modelled."""

    def watch_pages(self, listener: MoveListener, scope: Scope) -> Now:
        """Report page moves by the program's addresses; see `Device.watch_pages`."""

    is_dry: bool
    """True if it skips the arithmetic, so that values are meaningless."""

    @property
    def seconds(self) -> float:
        """Return the simulated time at which all work so far has finished."""

    def host_worked(self, phase: str) -> None:
        """Advance the host by the time of a framework's Python for an operation of a phase."""


_cuda_models: list[CudaModel] = []


_current: list[Callable[[], int]] = []
work_seconds: Callable[[], float] = perf_counter
"""The clock that measures work: a simulated GPU's own, elsewhere the host's. So plans on a
simulated GPU do not depend on the host. A simulated GPU is opened before CuPy is imported, so code
that imports this after CuPy or Chainer gets the final clock.
"""


def set_cuda_models(models: Sequence[CudaModel], current: Callable[[], int]) -> None:
    """Register the models of the CUDA devices for the process.

    Args:
        models: the models by device number.
        current: returns the number of the calling thread's current device.
    """
    global work_seconds
    _cuda_models[:], _current[:] = models, [current]
    work_seconds = _simulated_seconds


def cuda_model(ordinal: int | None = None) -> CudaModel | None:
    """Return the model of a CUDA device, by default the current one; None on a real GPU."""
    if not _cuda_models:
        return None
    return _cuda_models[_current[0]() if ordinal is None else ordinal]


def is_dry() -> bool:
    """Tell whether the process's CUDA devices skip the arithmetic.

    Code that judges by values then does its usual work once, and takes the check as passed.
    """
    return bool(_cuda_models) and _cuda_models[0].is_dry


def _simulated_seconds() -> float:
    return _cuda_models[_current[0]()].seconds
