"""`software_gpu`: the real CuPy on host memory, with modelled VRAM, pages and time."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace
from time import perf_counter

from umem._common.scopes import Scope
from umem._common.specs import GpuSpec
from umem.devices.cost import Sample, StepCost, set_cuda_models
from umem.devices.page_moves import MoveListener, Now
from umem.devices.software.allocation_parts import AllocationParts
from umem.devices.software.gpu_model import GpuModel
from umem.devices.software.recording_observer import RecordingObserver
from umem.dry import FLAG
from umem.errors import DeviceError, StateError
from umem.host_cuda import (
    DRY_COMPUTES_NOTHING,
    DeferredRuntime,
    DriverCalls,
    DryRuntime,
    HostRuntime,
    check_seed,
    open_host_cuda,
)
from umem.trace.recording import add_source
from umem.units import BLOCK_BYTES, format_bytes

_opened: list[SoftwareGPU] = []


class SoftwareGPU:
    """The handle of `software_gpu`: the real CuPy on host memory, for the process.

    Arithmetic is real; VRAM, pages and time are simulated. Counts are those of one device.

    Attributes:
        devices: all devices by number; `software_gpu` returns the first.
    """

    simulated = True

    def __init__(self, runtime: HostRuntime, ordinal: int) -> None:
        self._runtime, self._ordinal = runtime, ordinal
        observer = runtime.observer
        self._gpus = observer if isinstance(observer, GpuModel) else None
        self._model = None if self._gpus is None else self._gpus.devices[ordinal].model
        self.devices: tuple[SoftwareGPU, ...] = (self,)
        self.spec = runtime.spec
        self.name = runtime.spec.name
        self.is_dry = isinstance(runtime, DryRuntime)

    def __repr__(self) -> str:
        vram = format_bytes(self.spec.usable_bytes)
        return f"<{self.spec.title} with {vram} of VRAM (simulated), under the real CuPy>"

    def reseed(self, stream_seed: int | None) -> None:
        """Run all queued work, and continue with another seed; None runs everything at once.

        Raises:
            StateError: the software GPU was opened without a seed.
            SizeError: the seed is not a whole number of at least 0.
        """
        check_seed(stream_seed)
        if not isinstance(self._runtime, DeferredRuntime):
            raise StateError("opened without a seed: use umem.software_gpu(..., stream_seed=0)")
        self._runtime.reseed(stream_seed)

    @property
    def has_seeds(self) -> bool:
        """Tell whether it was opened with a seed, so that `reseed` can change it."""
        return isinstance(self._runtime, DeferredRuntime)

    @property
    def is_late(self) -> bool:
        """Tell whether work on streams runs late, by a seed."""
        return isinstance(self._runtime, DeferredRuntime) and self._runtime.is_late

    @property
    def is_checked(self) -> bool:
        """Tell whether kernels are checked."""
        return self._runtime.is_checked

    @property
    def is_refused(self) -> bool:
        """Tell whether this process was forked after the first use, and so cannot use the GPU."""
        return self._runtime.is_refused

    def finish(self) -> None:
        """Run all queued work of all devices, without counting as a wait of the program.

        Raises:
            DeviceError, CUDARuntimeError: the first error of that work; all of it has run.
        """
        self._runtime.finish()

    @property
    def figures(self) -> StepCost:
        """Return the counts so far (simulated); all None without the model."""
        if self._model is None:
            return StepCost()
        with self._model.lock:
            return self._model.figures

    @property
    def seconds(self) -> float:
        """Return the simulated time at which all work so far has finished; or the host's time."""
        return perf_counter() if self._model is None else self._model.clock.seconds

    def restart(self) -> None:
        """Restart time and counts at zero on all devices, and peaks at the current levels.

        Memory does not change, and running work counts as finished.
        """
        with self._runtime.lock:
            for device in () if self._gpus is None else self._gpus.devices:
                device.restart()
            self._runtime.restart()

    @property
    def calls(self) -> DriverCalls:
        """Return the counts of driver calls so far: allocations, frees, and waits of the host.

        A pool that returns its cache frees each chunk. Waits are for a stream, an event or the
        device.
        """
        return replace(self._runtime.devices[self._ordinal].calls)

    @property
    def resident_bytes(self) -> int | None:
        """Return the VRAM in use, in whole blocks (simulated); None without the model."""
        if self._model is None:
            return None
        with self._model.lock:
            return self._model.driver.resident_count * BLOCK_BYTES

    def watch_pages(self, moved: MoveListener, scope: Scope) -> Now:
        """Report moves of the model's blocks by the program's addresses; see `Device.watch_pages`.

        Raises:
            DeviceError: the software GPU was opened without the model.
        """
        if self._gpus is None or self._model is None:
            raise DeviceError("the software GPU was opened without its model of pages")
        parts = AllocationParts(self._gpus, self._model, moved)
        return self._model.watch_pages(parts.tell, scope)

    def host_worked(self, phase: str) -> None:
        """Advance the host by the time of Chainer's Python for an operation of a phase."""
        if self._gpus is not None:
            self._gpus.host_worked(self._ordinal, phase)

    @property
    def timeline(self) -> list[Sample]:
        """Return allocated and resident bytes over simulated time."""
        return [] if self._model is None else list(self._model.counters.timeline)


def software_gpu(
    gpu: str | GpuSpec,
    vram: int | str | None = None,
    *,
    model: bool = True,
    force: bool = False,
    checked: bool = False,
    strict: bool = True,
    sticky: bool = True,
    stream_seed: int | None = None,
    kernel_seconds: float | None = None,
    devices: int = 1,
    dry: bool = False,
) -> SoftwareGPU:
    """Run the real CuPy on host memory as if on a GPU, for the rest of the process.

    Kernels are compiled for this machine's processor on first use, and cached on disk.

    Args:
        gpu: a name from the table of GPUs, such as ``"t4"``, or a `GpuSpec`.
        vram: usable VRAM instead of the table's figure, such as ``"1GiB"``.
        model: False turns off the model of VRAM, pages and time: memory never runs out, no page
            moves, and operations are quicker.
        force: True ignores a real GPU; otherwise a real GPU is an error.
        checked: gives each array its own memory between inaccessible pages. A kernel that leaves
            its array raises DeviceError, which names the kernel and the argument. Slower.
        strict: raises CUDA's own error for whatever CUDA refuses; docs/reference/software-gpu.md
            has a table. False accepts what this machine can compute.
        sticky: a kernel's fault ends the context of its device, as on a GPU: every later call
            raises the fault's error, except calls that free something. False lets the program
            continue after a fault.
        stream_seed: delays the work of streams, within CUDA's rules, in an order drawn from this
            seed. A program whose results depend on the seed lacks a synchronization. None runs
            the work of streams at once.
        kernel_seconds: the processor time that a kernel may take, at least 0.001 s. A kernel that
            takes longer ends with a fault that names it (cudaErrorLaunchTimeout). Each kernel then
            runs on one core. None for no limit.
        devices: the number of GPUs, at most 8. Each has its own VRAM, streams and counts. The
            first is returned; its ``devices`` has all of them.
        dry: skips the arithmetic. Memory, out-of-memory errors, and simulated pages and time are
            as in a full run; values are zeros, except small ones that follow from known values.
            Files are really written; the first line on standard error says so. Sets UMEM_DRY=1.

    Raises:
        StateError: CuPy is already imported, or a software GPU is already open.
        MissingDependencyError: CuPy or a compiler is missing.
        DeviceError: this version of CuPy is not supported; there is a real GPU, without ``force``;
            your `GpuSpec` has no ``chip``; ``devices`` is out of range; or ``dry`` is combined with
            an option that needs arithmetic or the model.
        UnknownGpuError, SizeError: see `umem.virtual_gpu`; or ``stream_seed`` is not a whole
            number of at least 0, or ``kernel_seconds`` is out of range. None of these errors
            changes anything.
        DeviceError: the compiler fails. The process cannot use CuPy afterwards.
    """
    check_seed(stream_seed)
    if dry and not model:
        raise DeviceError(DRY_COMPUTES_NOTHING)
    observer = GpuModel if model else RecordingObserver
    runtime = open_host_cuda(
        gpu, vram, observer=observer, force=force, checked=checked, strict=strict, sticky=sticky,
        stream_seed=stream_seed, kernel_seconds=kernel_seconds, devices=devices, dry=dry,
    )  # fmt: skip
    _follow(runtime)
    gpus = tuple(SoftwareGPU(runtime, device.ordinal) for device in runtime.devices)
    for each in gpus:
        each.devices = gpus
    set_cuda_models(gpus, runtime.getDevice)
    _opened[:] = gpus
    if dry and os.environ.get(FLAG) != "1":  # `umem run --dry` keeps the disk, and has set it
        print("umem: a dry GPU: values are zeros, but files are really written", file=sys.stderr)
        os.environ[FLAG] = "1"
    return gpus[0]


def _follow(runtime: HostRuntime) -> None:
    """Make recordings follow a runtime, and the runtime the blocks of umem's arenas."""
    assert isinstance(runtime.observer, RecordingObserver)
    source = importlib.import_module("umem.devices.software.cupy_source")  # imports CuPy
    add_source(source.CupySource(runtime.observer))
    if not runtime.is_checked:  # each array is an allocation there
        importlib.import_module("umem.devices.cuda.arena").listeners.append(runtime.new_block)


def opened() -> SoftwareGPU | None:
    """Return the first software GPU of this process, if one is open."""
    return _opened[0] if _opened else None
