"""``pytest --software-gpu t4``: CuPy without a GPU, here and in all processes started by tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from umem_software_gpu import FORM, OFF, PACKAGES, VARIABLE, arm, disarm, parsed, with_seed
from umem_software_gpu.each_test import EachTest
from umem_software_gpu.faults import Known, read
from umem_software_gpu.seeds import resolved
from umem_software_gpu.summary import NEEDS_GPU, Figures, Summary

DEVICES = ("/dev/nvidia[0-9]*", "/dev/nvhost-gpu", "/dev/nvmap", "/dev/dxg", "/dev/kfd")
"""Device files of GPUs: NVIDIA's, on Tegra, under WSL, AMD's. The driver is not called, because a
process that has initialised CUDA cannot fork children that use it.
"""


def pytest_addoption(parser: Any) -> None:
    """Add ``--software-gpu`` and its related options."""
    group = parser.getgroup("umem", "CuPy without a GPU")
    group.addoption(
        "--software-gpu",
        metavar=FORM,
        help="run CuPy on host memory as if on this GPU, here and in all processes that tests "
        f"start (the environment variable {VARIABLE}); VRAM, pages and time are simulated. "
        "Streams run late, by a seed; seed=off does all at once",
    )
    group.addoption(
        "--software-gpu-seeds",
        metavar="N",
        type=int,
        default=1,
        help="run each test under N base seeds, until it fails",
    )
    group.addoption(
        "--software-gpu-baseline",
        metavar="FILE",
        help="known faults of kernels, for which no test fails",
    )
    group.addoption(
        "--software-gpu-new-baseline", metavar="FILE", help="write the faults that are found"
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest redirects the output
def pytest_load_initial_conftests(early_config: Any) -> Iterator[None]:
    """Prepare CuPy before a conftest imports it; restart pytest if a plugin already has."""
    option = early_config.known_args_namespace.software_gpu
    before = os.environ.get(VARIABLE, "")
    given = text = before if option is None else option
    if text not in OFF:
        try:
            text, problem = resolved(given), None
        except ValueError as error:
            problem = str(error)
        problem = problem or _problem(text)
        if problem is None and _is_plain_cupy_imported():
            problem = _start_again(early_config, text, given)
        if problem is not None:
            raise pytest.UsageError(f"umem: {problem}")
        os.environ[VARIABLE] = text
        if not any(name in sys.modules for name in PACKAGES):
            arm(text)
    elif option is not None:
        os.environ[VARIABLE] = "0"
        disarm()
    return (yield)


def pytest_configure(config: Any) -> None:
    """Register the marker, and if the GPU is on, the plugins for each test and the summary."""
    config.addinivalue_line(
        "markers", f"{NEEDS_GPU}(reason): needs a real GPU; skipped on the software GPU"
    )
    text = os.environ.get(VARIABLE, "")
    if text in OFF:
        return
    text = resolved(text)
    config.option.software_gpu = text  # a worker of pytest-xdist is told of it, with the seed
    count, known = config.option.software_gpu_seeds, _known(config)
    if count < 1 or (count > 1 and parsed(text)[1].get("stream_seed") is None):
        raise pytest.UsageError(
            f"umem: --software-gpu-seeds {count}: a whole number of at least 1"
            if count < 1
            else f"umem: --software-gpu-seeds {count} needs streams that run late: {text} has none"
        )
    config.pluginmanager.register(EachTest(text, count, known), "umem_each_test")
    if hasattr(config, "workeroutput"):
        config.pluginmanager.register(Figures(config), "umem_summary")
    else:
        new = _new_baseline(config)
        config.pluginmanager.register(Summary(text, count, known, new), "umem_summary")


def _new_baseline(config: Any) -> Path | None:
    """Return the file to write the found faults to, if any."""
    given = config.option.software_gpu_new_baseline
    path = None if given is None else config.invocation_params.dir / given
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise pytest.UsageError(f"umem: --software-gpu-new-baseline: {path} cannot be a file")
    return path


def _known(config: Any) -> set[Known]:
    """Read the known faults."""
    given = config.option.software_gpu_baseline
    if given is None:
        return set()
    path = config.invocation_params.dir / given
    config.option.software_gpu_baseline = str(path)  # for workers, wherever they start
    try:
        return read(path)
    except ValueError as error:
        raise pytest.UsageError(f"umem: --software-gpu-baseline: {error}") from None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a real GPU, if the software GPU is on."""
    if os.environ.get(VARIABLE, "") in OFF:
        return
    for item in items:
        mark = item.get_closest_marker(NEEDS_GPU)
        if mark is not None:
            reason = mark.args[0] if mark.args else mark.kwargs.get("reason", "")
            reason = f"needs a real GPU: {reason}" if reason else "needs a real GPU"
            item.add_marker(pytest.mark.skip(reason=reason))


def _problem(text: str) -> str | None:
    """Return why this GPU cannot be opened here, if it cannot."""
    try:
        gpu, given = parsed(text)
    except ValueError as error:
        return str(error)
    computing = [given.get(name) is not None for name in ("stream_seed", "kernel_seconds")]
    if given.get("dry") and (given.get("checked") or any(computing)):
        why = "a dry run computes nothing to check, to run late or to limit"
        return f"{why}: {text!r}"
    from umem.errors import UmemError
    from umem.host_cuda import requirements

    try:
        names = ("vram", "force", "devices", "kernel_seconds")
        requirements(gpu, **{name: given[name] for name in names if name in given})
    except UmemError as error:
        return str(error)
    return None


def _is_plain_cupy_imported() -> bool:
    from umem.host_cuda import is_open

    return "cupy" in sys.modules and not is_open()


def _start_again(config: Any, text: str, given: str) -> str:
    """Restart this pytest with the variable set; return the reason if that is impossible.

    The message names ``given`` as the value to set, without a drawn seed.
    """
    importers = ", ".join(_importers(config)) or "a plugin"
    why = f"CuPy was imported before pytest had read its options, by {importers}"
    is_command = [*config.invocation_params.args] == sys.argv[1:]
    if os.environ.get(VARIABLE) == text or not is_command or not sys.orig_argv:
        return f"{why}: set {VARIABLE}={given} in the environment, with umem installed there"
    print(f"umem: {why}: pytest starts again with {VARIABLE}={text}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os.environ[VARIABLE] = text
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _importers(config: Any) -> Iterator[str]:
    """Name the plugins whose packages have imported CuPy."""
    packages = {
        name.partition(".")[0]
        for name, module in [*sys.modules.items()]
        if isinstance(vars(module).get("cupy") if hasattr(module, "__dict__") else None, ModuleType)
    }
    for name, plugin in config.pluginmanager.list_name_plugin():
        if getattr(plugin, "__name__", "").partition(".")[0] in packages:
            yield f"the plugin {name}"


def _has_cupy_alone() -> bool:
    """Tell whether CuPy is installed on a machine without a GPU; does not import CuPy."""
    return find_spec("cupy") is not None and not any(map(glob, DEVICES))


def pytest_report_header(config: Any) -> list[str]:
    """Name the simulated GPU in the header; or tell how to get one."""
    text = os.environ.get(VARIABLE, "")
    if not text and _has_cupy_alone():
        return [
            "CuPy without a GPU: pytest --software-gpu t4 runs CuPy's tests on host memory (umem)"
        ]
    if text in OFF:
        return []
    found = [f"software GPU: {with_seed(text, None)} (umem; VRAM, pages and time are simulated)"]
    given = parsed(text)[1]
    if given.get("dry"):
        found.append("dry: values are zeros, but files are really written")
    elif given.get("stream_seed") is not None:
        found.append(
            f"streams run late: --software-gpu {text} repeats this run (seed=off: at once)"
        )
    elif "stream_seed" in given:
        found.append("streams do their work at once (seed=off)")
    return found
