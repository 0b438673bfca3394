"""Puts the host's functions under CuPy, before CuPy is imported."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from umem._common.host import has_real_gpu, leave_host_unknown
from umem._common.specs import GpuSpec, check_vram, gpu_spec
from umem.errors import DeviceError, StateError
from umem.host_cuda.checked_mode import CheckedKernels, bypass_pools
from umem.host_cuda.deferred_libraries import ENDS, current_stream, on_stream
from umem.host_cuda.deferred_streams import DeferredDriver, DeferredRuntime
from umem.host_cuda.driver import HostDriver
from umem.host_cuda.dry.dry_kernels import DryDriver, DryNvrtc
from umem.host_cuda.dry.dry_runtime import DryRuntime
from umem.host_cuda.faults import Contexts, Fault, Finding, RedirectedModule, contexts
from umem.host_cuda.fork import refuse_children
from umem.host_cuda.kernel_guard import KernelGuard
from umem.host_cuda.kernels import KernelCompiler, report_races, share_kernels
from umem.host_cuda.libcuda import HostHints
from umem.host_cuda.libraries import cufft, cufft_devices, cusolver, distributions, nccl
from umem.host_cuda.libraries.cublas import HostBlas
from umem.host_cuda.libraries.curand import HostRand
from umem.host_cuda.libraries.cusparse import HostSparse
from umem.host_cuda.libraries.thrust import HostThrust
from umem.host_cuda.linking import StandIns, Trampolines, hide_from_numba
from umem.host_cuda.memory_sources import GuardedSource
from umem.host_cuda.nvrtc import HostNvrtc
from umem.host_cuda.observer import Observer
from umem.host_cuda.options import check_count, check_seconds, check_seed
from umem.host_cuda.overrides import Overrides
from umem.host_cuda.runtime import HostRuntime
from umem.host_cuda.sharing import usable_cores
from umem.host_cuda.toolchain import Toolchain
from umem.host_cuda.versions import known_cupy
from umem.units import parse_bytes

_LIBRARIES = ("cublas", "curand", "cusolver", "cusparse", "nccl")
_ABSENT = {
    "cupy.cuda.compiler.compile_using_nvcc": "nvcc",
    "cupy.cuda.compiler._jitify_prep": "jitify",
    "cupy.cuda.jitify.jitify": "jitify",
}
"""CuPy functions that raise NotImplementedError, besides missing library functions."""
_CALLBACKS = {"13": "cupy.fft.config", "14": "cupy.fft._config._FFTConfig"}
"""Module of ``set_cufft_callbacks``, by CuPy's version."""
_LEFT = (
    "check_status", "get_build_version", "is_cuda_python_build",
    "_get_cuda_build_version",  # CuPy 13's name
)  # fmt: skip
"""Functions of CuPy's modules that do not need NVIDIA's libraries."""
_redirected: list[RedirectedModule] = []
absent: set[str] = set()
"""Names of CuPy and CUDA functions that this process has called, and the software GPU lacks."""
_kept: list[Any] = []
"""Objects that CuPy's modules point to, kept alive until the process ends."""
DRY_COMPUTES_NOTHING = (
    "a dry run has no arithmetic to check, delay or limit, and needs its model: leave out"
    " checked=True, stream_seed=, kernel_seconds= and model=False"
)


def open_host_cuda(
    gpu: str | GpuSpec,
    vram: int | str | None = None,
    *,
    observer: Callable[[GpuSpec, int], Observer] = Observer,
    force: bool = False,
    checked: bool = False,
    strict: bool = True,
    sticky: bool = True,
    stream_seed: int | None = None,
    kernel_seconds: float | None = None,
    devices: int = 1,
    dry: bool = False,
) -> HostRuntime:
    """Run the real CuPy on host memory for the rest of the process; returns its CUDA runtime.

    `umem.software_gpu` adds the model of VRAM, pages and time, and documents the arguments in
    detail.

    Args:
        gpu: a name from the table of GPUs, or your own `GpuSpec` with a ``chip``.
        vram: usable VRAM instead of the table's figure.
        observer: makes the observer, given the GPU and the number of devices.
        force: True ignores a real GPU.
        checked: True makes a kernel that leaves its arrays an error.
        strict: True raises CUDA's own errors for whatever CUDA refuses.
        sticky: True makes a kernel's fault end the context of its device.
        stream_seed: streams run late, in an order drawn from this seed; None runs all at once.
        kernel_seconds: the limit of a kernel's processor time; None for no limit.
        devices: the number of GPUs.
        dry: True skips the arithmetic.

    Raises:
        StateError: CuPy is already imported, or a software GPU is already open.
        MissingDependencyError, DeviceError, UnknownGpuError, SizeError: see `requirements`; or a
            dry run has an option that needs arithmetic, ``stream_seed`` is invalid, or the compiler
            fails.
    """
    check_seed(stream_seed)
    if dry and (checked or stream_seed is not None or kernel_seconds is not None):
        raise DeviceError(DRY_COMPUTES_NOTHING)
    spec, folder = requirements(
        gpu, vram, force=force, devices=devices, kernel_seconds=kernel_seconds
    )
    if any(name in sys.modules for name in ("cupy", "cupy_backends")):
        raise StateError(
            "the software GPU is already open in this process"
            if is_open()
            else "CuPy is imported already: call umem.software_gpu before the first `import cupy`,"
            " or run the script under umem run --software"
        )
    # The finder of `umem_software_gpu` would open another one as CuPy is imported.
    finders = [each for each in sys.meta_path if not hasattr(each, "opens_software_gpu")]
    sys.meta_path[:] = finders
    runtime: HostRuntime
    if dry:
        runtime = DryRuntime(spec, devices, observer(spec, devices))
    elif stream_seed is None:
        runtime = HostRuntime(spec, devices, observer(spec, devices))
    else:
        runtime = DeferredRuntime(spec, stream_seed, devices, observer(spec, devices))
    runtime.is_strict, runtime.is_sticky, runtime.kernel_seconds = strict, sticky, kernel_seconds
    if checked:
        runtime.source, runtime.is_checked = GuardedSource(), True
    _open(runtime, folder)
    return runtime


def _open(runtime: HostRuntime, folder: Path) -> None:
    """Put a runtime under the CuPy package in a folder."""
    tools = Toolchain()
    names = [f"cupy_backends/cuda/libs/{name}" for name in _LIBRARIES]
    names += ["cupy/cuda/cufft", "cupy/cuda/jitify"]
    found = [path for name in names for path in folder.parent.glob(f"{name}.*.so")]
    redirected = {**cufft.C_FUNCTIONS, **cufft_devices.C_FUNCTIONS, **cusolver.C_FUNCTIONS}
    redirected.update(nccl.C_FUNCTIONS)
    libraries = StandIns(found, tools, redirected)
    (generators,) = folder.glob("random/_generator_api.*.so")
    overrides = Overrides(generators, distributions.C_FUNCTIONS, distributions.KIND, tools)
    hints = HostHints(runtime, tools)
    hide_from_numba()
    libraries.stand_in()  # nothing of Python's has changed before
    libraries.add("libcuda", hints.library)
    _kept.extend((libraries, hints, overrides))
    os.environ["CUPY_ACCELERATORS"] = ""  # CUB's kernels are compiled for a GPU
    _install(runtime, folder, tools, libraries)
    overrides.redirect(on_stream(runtime, distributions.HostDistributions(runtime)))


def requirements(
    gpu: str | GpuSpec,
    vram: int | str | None = None,
    *,
    force: bool = False,
    devices: int = 1,
    kernel_seconds: float | None = None,
) -> tuple[GpuSpec, Path]:
    """Check the requirements of `open_host_cuda` without importing CuPy.

    Returns the GPU and CuPy's folder.

    Raises:
        MissingDependencyError: CuPy or a compiler is missing.
        DeviceError: CuPy's version is not supported; there is a real GPU, without ``force``; a
            `GpuSpec` has no ``chip``; or ``devices`` is out of range.
        UnknownGpuError, SizeError: the GPU, VRAM or ``kernel_seconds`` is invalid.
    """
    spec = gpu_spec(gpu)
    check_count(devices)
    check_seconds(kernel_seconds)
    if vram is not None:
        spec = spec.with_vram(parse_bytes(vram, "vram"))
    check_vram(spec)
    if spec.chip is None:
        raise DeviceError(
            f"{spec.title}: CuPy needs the compute capability and the number of "
            "multiprocessors, which are unknown: give GpuSpec(..., chip=(8, 9, 128))"
        )
    folder = known_cupy()
    if not force and has_real_gpu():
        raise DeviceError("this machine has a real GPU; software_gpu(..., force=True) ignores it")
    Toolchain().compiler  # noqa: B018  (it is looked for)
    return spec, folder


def is_open() -> bool:
    """Tell whether CuPy runs on host memory in this process."""
    return bool(_kept)


def _install(runtime: HostRuntime, folder: Path, tools: Toolchain, stand_ins: StandIns) -> None:
    """Point CuPy's modules at the host's functions, and disable functions that the host lacks."""
    api = importlib.import_module("cupy_backends.cuda.api.runtime")
    runtime.error_type, runtime.attributes_type = api.CUDARuntimeError, api.PointerAttributes
    runtime.fault_type = importlib.import_module("umem.host_cuda.cuda_fault").CudaFault

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
    hooks: Any = importlib.import_module("umem.host_cuda.block_hook")
    if is_guarded:
        guard = KernelGuard(tools, runtime.kernel_seconds, runtime.is_checked)
        driver.run = (CheckedKernels(runtime, guard) if runtime.is_checked else guard).run
    if runtime.is_checked:  # nearly each array is an allocation
        report_races()
        bypass_pools(cupy, runtime)
        hook = hooks.FreshBlockHook(runtime, current_stream())
    else:
        hook = hooks.PoolBlockHook(runtime)
    _kept.extend((hook, runtime))
    refuse_children(runtime, _redirected)
    contexts.append(Contexts(runtime, [each for each in _redirected if each.fail is not None]))
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
    stand_ins.redirect("libcusolver", on_stream(runtime, solver))
    stand_ins.redirect("libnccl", nccl.HostNccl(runtime))
    stand_ins.redirect("libcufft", on_stream(runtime, cufft_devices.DeviceFft(runtime)))


def _point_at(
    module: Any, functions: Any, tools: Toolchain, ended: Callable[[Fault], None] | None
) -> None:
    """Redirect a module's C and Python functions to an object's methods.

    Functions that the object lacks raise NotImplementedError, because their library is missing.
    ``ended`` raises this module's error after a fault; None raises no error.
    """

    def handler(name: str) -> Any:
        found = getattr(functions, name, None) or _missing(module.__name__, name)
        if isinstance(found, partial):
            found.__name__ = name  # type: ignore[attr-defined]  # for CuPy's errors
        return _silent_at_exit(found) if name.startswith(ENDS) else found

    trampolines = Trampolines(module, tools)
    names = [
        name
        for name, value in vars(module).items()
        if callable(value) and not isinstance(value, type) and not name.startswith("__")
        if name not in _LEFT and not (name.startswith("_") and not hasattr(functions, name))
    ]

    def redirect(handler: Callable[[str], Any]) -> None:
        trampolines.redirect(lambda name: None if name in _LEFT else handler(name))
        for name in names:
            setattr(module, name, handler(name))

    redirect(handler)
    _redirected.append(RedirectedModule(redirect, handler, ended))


def _silent_at_exit(
    function: Callable[..., Any], is_exiting: Callable[[], bool] = sys.is_finalizing
) -> Callable[..., Any]:
    """Wrap a function that frees a handle, so that it does nothing at Python's exit.

    CuPy keeps a thread's handles in a `threading.local`, which Python clears after the modules.
    umem's own locals and globals no longer exist then, and CuPy would print an empty error.
    """

    def free(*given: Any) -> Any:
        return None if is_exiting() else function(*given)

    return free


def _refuse_accelerators() -> None:
    """Disable CUB and cuTENSOR, whose kernels were compiled for a GPU."""
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
