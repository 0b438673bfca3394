"""Puts the host's own functions under CuPy, before CuPy is imported."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from time import perf_counter
from typing import Any

from umem._common.host import has_real_gpu, leave_host_unknown
from umem._common.scopes import Scope
from umem._common.specs import GpuSpec, check_vram, gpu_spec
from umem.devices.cost import Sample, StepCost, set_cuda_models
from umem.devices.page_moves import MoveListener, Now
from umem.devices.software.allocations import AllocationParts
from umem.devices.software.checked_mode import CheckedKernels, bypass_pools
from umem.devices.software.deferred_libraries import current_stream, on_stream
from umem.devices.software.deferred_streams import DeferredDriver, DeferredRuntime
from umem.devices.software.device_state import DeviceState, DriverCalls, check_count, check_seed
from umem.devices.software.driver import HostDriver
from umem.devices.software.dry.dry_kernels import DryDriver, DryNvrtc
from umem.devices.software.dry.dry_runtime import DryRuntime
from umem.devices.software.faults import Contexts, Fault, Finding, Led, contexts
from umem.devices.software.fork import refuse_children
from umem.devices.software.kernel_guard import KernelGuard, check_seconds
from umem.devices.software.kernels import KernelCompiler, report_races, share_kernels
from umem.devices.software.libcuda import HostHints
from umem.devices.software.libraries import cufft, cufft_devices, cusolver, distributions, nccl
from umem.devices.software.libraries.cublas import HostBlas
from umem.devices.software.libraries.curand import HostRand
from umem.devices.software.libraries.cusparse import HostSparse
from umem.devices.software.libraries.thrust import HostThrust
from umem.devices.software.linking import StandIns, Trampolines, hide_from_numba
from umem.devices.software.memory_sources import GuardedSource
from umem.devices.software.nvrtc import HostNvrtc
from umem.devices.software.overrides import Overrides
from umem.devices.software.runtime import HostRuntime
from umem.devices.software.sharing import usable_cores
from umem.devices.software.toolchain import Toolchain
from umem.devices.software.versions import known_cupy
from umem.dry import FLAG
from umem.errors import DeviceError, StateError
from umem.trace.recording import add_source
from umem.units import BLOCK_BYTES, format_bytes, parse_bytes
from umem_software_gpu import disarm

_LIBRARIES = ("cublas", "curand", "cusolver", "cusparse", "nccl")
_ABSENT = {
    "cupy.cuda.compiler.compile_using_nvcc": "nvcc",
    "cupy.cuda.compiler._jitify_prep": "jitify",
    "cupy.cuda.jitify.jitify": "jitify",
}
"""Functions of CuPy that raise NotImplementedError, besides missing library functions."""
_CALLBACKS = {"13": "cupy.fft.config", "14": "cupy.fft._config._FFTConfig"}
"""Module of ``set_cufft_callbacks``, by CuPy's version."""
_LEFT = (
    "check_status", "get_build_version", "is_cuda_python_build",
    "_get_cuda_build_version",  # CuPy 13's name
)  # fmt: skip
"""Functions of CuPy's modules that do not need NVIDIA's libraries."""
_led: list[Led] = []
_opened: list[SoftwareGPU] = []
absent: set[str] = set()
"""Names of CuPy and CUDA that this process has called, and that the software GPU has not."""
_kept: list[Any] = []
"""Objects that CuPy's modules point to, kept for the life of the process."""


class SoftwareGPU:
    """The handle of `software_gpu`: the real CuPy on host memory, for the process.

    Arithmetic is real; VRAM, pages and time are simulated. Counts are those of one device.

    Attributes:
        devices: all there are, by their numbers; `software_gpu` returns the first.
    """

    simulated = True

    def __init__(self, runtime: HostRuntime, state: DeviceState) -> None:
        self._runtime, self._state = runtime, state
        self.devices: tuple[SoftwareGPU, ...] = (self,)
        self._model = state.model
        self.spec = runtime.spec
        self.name = runtime.spec.name
        self.is_dry = isinstance(runtime, DryRuntime)

    def __repr__(self) -> str:
        vram = format_bytes(self.spec.usable_bytes)
        return f"<{self.spec.title} with {vram} of VRAM (simulated), under the real CuPy>"

    def reseed(self, stream_seed: int | None) -> None:
        """Run all queued work, and continue with another seed; None runs everything at once.

        Raises:
            StateError: it was opened without a seed.
            SizeError: the seed is no whole number of at least 0.
        """
        check_seed(stream_seed)
        if not isinstance(self._runtime, DeferredRuntime):
            raise StateError("opened without a seed: umem.software_gpu(..., stream_seed=0)")
        self._runtime.reseed(stream_seed)

    @property
    def has_seeds(self) -> bool:
        """Tell whether it was opened with a seed, so that `reseed` gives it others."""
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
        """Tell whether this process was forked after the first use, and can only end."""
        return self._runtime.is_refused

    def finish(self) -> None:
        """Run all queued work of all devices, as no wait of the program's.

        Raises:
            DeviceError, CUDARuntimeError: of that work, the first of several; all has been run.
        """
        self._runtime.finish()

    @property
    def figures(self) -> StepCost:
        """Return the counts so far (simulated); all None without the model."""
        if not self._runtime.is_modelled:
            return StepCost()
        with self._model.lock:
            return self._model.figures

    @property
    def seconds(self) -> float:
        """Return the simulated time at which all work so far is done; the host's without model."""
        return self._model.clock.seconds if self._runtime.is_modelled else perf_counter()

    def restart(self) -> None:
        """Restart time and counts at zero on all devices, and peaks at what is held now.

        Memory stays as it is, and what was still running is over.
        """
        with self._runtime.lock:
            for state in self._runtime.devices:
                state.restart()
            self._runtime.restart_times()

    @property
    def calls(self) -> DriverCalls:
        """Return the counts of driver calls so far: allocations, frees, and waits of the host.

        A pool that gives back what it has cached asks for a free of each chunk. Waits are those for
        a stream, an event and the device.
        """
        return replace(self._state.calls)

    @property
    def resident_bytes(self) -> int | None:
        """Return the VRAM in use, in whole blocks (simulated); None without the model."""
        if not self._runtime.is_modelled:
            return None
        with self._model.lock:
            return self._model.driver.resident_count * BLOCK_BYTES

    def watch_pages(self, told: MoveListener, scope: Scope) -> Now:
        """Report moves of the model's blocks by the program's addresses; see `Device.watch_pages`.

        Raises:
            DeviceError: it was opened without the model.
        """
        if not self._runtime.is_modelled:
            raise DeviceError("the software GPU was opened without its model of pages")
        parts = AllocationParts(self._runtime, self._model, told)
        return self._model.watch_pages(parts.tell, scope)

    def host_worked(self, phase: str) -> None:
        """Advance the host by the time of Chainer's Python for an operation of a phase."""
        if self._runtime.is_modelled:
            with self._runtime.lock, self._model.lock:
                self._runtime.turn_to(self._state).clocks.launch(None, phase, 0)

    @property
    def timeline(self) -> list[Sample]:
        """Return allocated and resident bytes over simulated time."""
        return list(self._model.counters.timeline)


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
    """Run the real CuPy on host memory as if on a GPU, from now on, for the process.

    Kernels are compiled for this machine's processor when they are first used, and kept on disk.

    Args:
        gpu: a name of the table, such as ``"t4"``.
        vram: usable VRAM instead of the table's figure, such as ``"1GiB"``.
        model: False leaves out VRAM, pages and time: nothing is full or moves, and
            operations are quicker.
        force: also where there is a real GPU.
        checked: each array gets memory of its own, between pages that nothing may touch: a kernel
            that leaves it is a DeviceError that names kernel and argument. Slower.
        strict: what CUDA refuses raises CUDA's own error: docs/software-gpu.md has a table. False
            accepts what can be computed here.
        sticky: a fault of a kernel ends the context of its device, as on a GPU: each later call
            raises its error, but for those that free something. False goes on after a fault.
        stream_seed: work on streams runs late, at any moment that CUDA's rules allow, in an order
            drawn from this seed: a program whose results depend on it has missed a wait. Without
            one, streams do their work at once.
        kernel_seconds: the processor time that a kernel may take, from 0.001 s: one that takes
            longer ends there, by a fault that names it (cudaErrorLaunchTimeout). One core runs
            each kernel then. None for no limit.
        devices: how many such GPUs there are, at most 8, each with VRAM, streams and counts of its
            own; what is returned is the first, and its ``devices`` all of them.
        dry: leaves out the arithmetic. Memory, out of memory, simulated pages and time are those
            of a run; values are zeros, but for what is small and follows from known values. Files
            are written for real, which the first line on standard error says; UMEM_DRY is 1.

    Raises:
        StateError: CuPy is imported already, or this was called before.
        MissingDependencyError: no CuPy, or no compiler.
        DeviceError: a CuPy whose inside is not known, a real GPU and no ``force``, a `GpuSpec` of
            yours without a ``chip``, no such number of devices, or what a dry run does not go
            with.
        UnknownGpuError, SizeError: see `umem.virtual_gpu`; ``stream_seed`` is no whole number of
            at least 0, or ``kernel_seconds`` no time. Nothing has changed after any of these.
        DeviceError: the compiler fails. Then the process cannot go on to use CuPy.
    """
    check_seed(stream_seed)
    is_computing = checked or stream_seed is not None or kernel_seconds is not None
    if dry and (is_computing or not model):
        raise DeviceError(
            "a dry run computes nothing that checked=True, stream_seed= or kernel_seconds= could"
            " check, and without its model it would say nothing: leave them out"
        )
    spec, folder = requirements(
        gpu, vram, force=force, devices=devices, kernel_seconds=kernel_seconds
    )
    if any(name in sys.modules for name in ("cupy", "cupy_backends")):
        raise StateError(
            "the software GPU is on already, for the process"
            if is_open()
            else "CuPy is imported already: umem.software_gpu comes before the first `import cupy`,"
            " or run the script under umem run --software"
        )
    disarm()
    runtime = _runtime(spec, devices, model=model, dry=dry, stream_seed=stream_seed)
    runtime.is_strict, runtime.is_sticky, runtime.kernel_seconds = strict, sticky, kernel_seconds
    if checked:
        runtime.source, runtime.is_checked = GuardedSource(), True
    gpus = _open(runtime, folder)
    if dry and os.environ.get(FLAG) != "1":  # `umem run --dry` keeps the disk, and has set it
        print("umem: a dry GPU: values are zeros, and what is written is real", file=sys.stderr)
        os.environ[FLAG] = "1"
    return gpus[0]


def _runtime(
    spec: GpuSpec, devices: int, *, model: bool, dry: bool, stream_seed: int | None
) -> HostRuntime:
    """Make the runtime: dry, late by a seed, or at once."""
    if dry:
        return DryRuntime(spec, devices)
    if stream_seed is None:
        return HostRuntime(spec, model, devices)
    return DeferredRuntime(spec, stream_seed, model, devices)


def _open(runtime: HostRuntime, folder: Path) -> tuple[SoftwareGPU, ...]:
    """Put a runtime under CuPy, whose package is in a folder; its devices."""
    tools = Toolchain()
    names = [f"cupy_backends/cuda/libs/{name}" for name in _LIBRARIES]
    names += ["cupy/cuda/cufft", "cupy/cuda/jitify"]
    found = [path for name in names for path in folder.parent.glob(f"{name}.*.so")]
    led = {**cufft.C_FUNCTIONS, **cufft_devices.C_FUNCTIONS, **cusolver.C_FUNCTIONS}
    led.update(nccl.C_FUNCTIONS)
    libraries = StandIns(found, tools, led)
    (generators,) = folder.glob("random/_generator_api.*.so")
    overrides = Overrides(generators, distributions.C_FUNCTIONS, distributions.KIND, tools)
    hints = HostHints(runtime, tools)
    hide_from_numba()
    libraries.stand_in()  # nothing of Python's has changed before
    libraries.add("libcuda", hints.library)
    _kept.extend((libraries, hints, overrides))
    os.environ["CUPY_ACCELERATORS"] = ""  # CUB's kernels are compiled for a GPU
    _install(runtime, folder, tools, libraries)
    overrides.lead(on_stream(runtime, distributions.HostDistributions(runtime)))
    gpus = tuple(SoftwareGPU(runtime, state) for state in runtime.devices)
    for each in gpus:
        each.devices = gpus
    set_cuda_models(gpus, runtime.getDevice)
    _opened[:] = gpus
    return gpus


def requirements(
    gpu: str | GpuSpec,
    vram: int | str | None = None,
    *,
    force: bool = False,
    devices: int = 1,
    kernel_seconds: float | None = None,
) -> tuple[GpuSpec, Path]:
    """Check the requirements of `software_gpu`, without importing CuPy.

    Returns the GPU, and CuPy's folder.

    Raises:
        MissingDependencyError, DeviceError, UnknownGpuError, SizeError: see `software_gpu`.
    """
    spec = gpu_spec(gpu)
    check_count(devices)
    check_seconds(kernel_seconds)
    if vram is not None:
        spec = spec.with_vram(parse_bytes(vram, "vram"))
    check_vram(spec)
    if spec.chip is None:
        raise DeviceError(
            f"{spec.title}: CuPy asks for the compute capability and the number of "
            "multiprocessors, which are not known: give GpuSpec(..., chip=(8, 9, 128))"
        )
    folder = known_cupy()
    if not force and has_real_gpu():
        raise DeviceError("this machine has a real GPU; software_gpu(..., force=True) ignores it")
    Toolchain().compiler  # noqa: B018  (it is looked for)
    return spec, folder


def is_open() -> bool:
    """Tell whether CuPy runs on host memory in this process."""
    return bool(_kept)


def opened() -> SoftwareGPU | None:
    """Return the first software GPU of this process, if one is open."""
    return _opened[0] if _opened else None


def _install(runtime: HostRuntime, folder: Path, tools: Toolchain, stand_ins: StandIns) -> None:
    """Point CuPy's modules at the host's functions, and disable what the host cannot do."""
    api = importlib.import_module("cupy_backends.cuda.api.runtime")
    runtime.error_type, runtime.attributes_type = api.CUDARuntimeError, api.PointerAttributes
    runtime.fault_type = importlib.import_module("umem.devices.software.cuda_fault").CudaFault

    def ended(fault: Fault) -> None:
        raise runtime.fault_type(fault.status, fault.reminder, fault.finding)

    point_at = partial(_point_at, tools=tools, ended=ended)
    point_at(api, runtime)
    is_guarded = runtime.is_checked or runtime.kernel_seconds is not None
    share_kernels(1 if is_guarded else usable_cores())  # a guard is for the caller's thread
    driver = _install_compiler(runtime, folder, tools, point_at)
    _install_libraries(runtime, stand_ins, point_at)
    cupy: Any = importlib.import_module("cupy")
    callbacks = _CALLBACKS[cupy.__version__.partition(".")[0]]
    absent = {**_ABSENT, f"{callbacks}.set_cufft_callbacks": "callbacks of cuFFT"}
    for place, name in absent.items():
        owner, _, attribute = place.rpartition(".")
        setattr(resolve_name(owner), attribute, _missing(owner, name))
    compiling: Any = importlib.import_module("cupy.cuda.compiler")
    # CuPy 13 links fused kernels with CUDA's device runtime, of which the software GPU has nothing.
    compiling._is_cudadevrt_needed = lambda options: False
    _refuse_accelerators()
    point_at(importlib.import_module("cupy.cuda.cub"), None)
    hooks: Any = importlib.import_module("umem.devices.software.block_hook")
    if is_guarded:
        guard = KernelGuard(tools, runtime.kernel_seconds, runtime.is_checked)
        driver.run = (CheckedKernels(runtime, guard) if runtime.is_checked else guard).run
    if runtime.is_checked:  # nearly each array is an allocation
        report_races()
        bypass_pools(cupy, runtime)
        hook = hooks.FreshBlockHook(runtime, current_stream())
    else:
        hook = hooks.PoolBlockHook(runtime)
    source = importlib.import_module("umem.devices.software.cupy_source").CupySource(runtime)
    add_source(source)
    _kept.extend((hook, runtime, source))
    refuse_children(runtime, _led)
    contexts.append(Contexts(runtime, [each for each in _led if each.fail is not None]))
    runtime.context_ends = contexts[-1].end


def _install_compiler(
    runtime: HostRuntime, folder: Path, tools: Toolchain, point_at: Callable[..., None]
) -> HostDriver:
    """Point CuPy's driver and run-time compiler at the host's; returns the driver."""
    driver_api = importlib.import_module("cupy_backends.cuda.api.driver")
    nvrtc_api = importlib.import_module("cupy_backends.cuda.libs.nvrtc")

    def driver_fail(status: int, more: str = "", finding: Finding | None = None) -> None:
        error = driver_api.CUDADriverError(status)
        error.args, error.finding = (f"{error}{more}",), finding
        raise error

    def driver_ended(fault: Fault) -> None:
        driver_fail(fault.status, f": {fault.reminder}", fault.finding)

    def nvrtc_fail(status: int) -> None:
        raise nvrtc_api.NVRTCError(status)

    runtime.cuda_version = driver_api.get_build_version()
    runtime.hints.raise_version(runtime.cuda_version)
    compiler = KernelCompiler(tools, folder, runtime.cuda_version)
    compiler.is_strict = runtime.is_strict
    compiler.is_checked = runtime.is_strict and runtime.is_checked
    kind: Any = HostDriver
    nvrtc: Any = HostNvrtc
    if isinstance(runtime, DryRuntime):
        kind, nvrtc = DryDriver, DryNvrtc
        leave_host_unknown()
    elif isinstance(runtime, DeferredRuntime):
        kind = DeferredDriver
    driver: HostDriver = kind(runtime, compiler, driver_fail)
    point_at(driver_api, driver, ended=driver_ended)
    point_at(nvrtc_api, nvrtc(runtime, compiler, nvrtc_fail), ended=None)  # it needs no context
    return driver


def _install_libraries(
    runtime: HostRuntime, stand_ins: StandIns, point_at: Callable[..., None]
) -> None:
    """Point CuPy's libraries at the host's."""
    solver = cusolver.HostSolver(runtime)
    libraries = {
        "cupy_backends.cuda.libs.cublas": HostBlas(runtime),
        "cupy_backends.cuda.libs.curand": HostRand(runtime),
        "cupy_backends.cuda.libs.cusolver": solver,
        "cupy_backends.cuda.libs.cusparse": HostSparse(runtime),
        "cupy.cuda.thrust": HostThrust(runtime),
    }
    for name, functions in libraries.items():
        point_at(importlib.import_module(name), on_stream(runtime, functions))
    stand_ins.lead("libcusolver", on_stream(runtime, solver))
    stand_ins.lead("libnccl", nccl.HostNccl(runtime))
    stand_ins.lead("libcufft", on_stream(runtime, cufft_devices.DeviceFft(runtime)))


def _point_at(
    module: Any, functions: Any, tools: Toolchain, ended: Callable[[Fault], None] | None
) -> None:
    """Redirect a module's C and Python functions to an object's methods.

    Functions that the object lacks raise NotImplementedError, as their library is missing.
    ``ended`` raises this module's error after a fault; None where none is raised.
    """

    def handler(name: str) -> Any:
        found = getattr(functions, name, None) or _missing(module.__name__, name)
        if isinstance(found, partial):
            found.__name__ = name  # type: ignore[attr-defined]  # for CuPy's errors
        return found

    trampolines = Trampolines(module, tools)
    names = [
        name
        for name, value in vars(module).items()
        if callable(value) and not isinstance(value, type) and not name.startswith("__")
        if name not in _LEFT and not (name.startswith("_") and not hasattr(functions, name))
    ]

    def lead(handler: Callable[[str], Any]) -> None:
        trampolines.lead(lambda name: None if name in _LEFT else handler(name))
        for name in names:
            setattr(module, name, handler(name))

    lead(handler)
    _led.append(Led(lead, handler, ended))


def _refuse_accelerators() -> None:
    """Turn off CUB and cuTENSOR, whose kernels were compiled for a GPU."""
    core: Any = importlib.import_module("cupy._core")
    for kind in ("elementwise", "reduction", "routine"):
        name = f"set_{kind}_accelerators"
        for module in (core, core._accelerator):
            setattr(module, name, partial(_choose_none, getattr(core._accelerator, name)))


def _choose_none(choose: Callable[[Sequence[str]], None], accelerators: Sequence[str]) -> None:
    if accelerators:
        raise NotImplementedError(f"the software GPU has no accelerators: {accelerators}")
    choose(accelerators)


def _missing(module: str, name: str) -> Any:
    def missing(*_: Any, **more: Any) -> None:
        absent.add(f"{name} ({module})")
        raise NotImplementedError(f"the software GPU has no {name} ({module})")

    return missing
