"""``pytest --software-gpu t4``: CuPy without a GPU, here and in all processes that tests start."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from glob import glob
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest

from umem_software_gpu import FORM, OFF, PACKAGES, VARIABLE, arm, disarm, parsed

DEVICES = ("/dev/nvidia[0-9]*", "/dev/nvhost-gpu", "/dev/nvmap", "/dev/dxg", "/dev/kfd")
"""Files of GPUs: NVIDIA's, on Tegra, under WSL, AMD's. The driver is not asked, because a process
that has initialised CUDA cannot fork children that use it."""


def pytest_addoption(parser: Any) -> None:
    """Add ``--software-gpu``."""
    group = parser.getgroup("umem", "CuPy without a GPU")
    group.addoption(
        "--software-gpu",
        metavar=FORM,
        help="run CuPy on host memory as if on this GPU, here and in all processes that tests "
        f"start (the environment variable {VARIABLE}); VRAM, pages and time are simulated",
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest redirects the output
def pytest_load_initial_conftests(early_config: Any) -> Iterator[None]:
    """Open the way for CuPy before a conftest imports it; start again where a plugin has."""
    asked = early_config.known_args_namespace.software_gpu
    before = os.environ.get(VARIABLE, "")
    text = before if asked is None else asked
    if text not in OFF:
        problem = _problem(text)
        if problem is None and _is_plain_cupy_imported():
            problem = _start_again(early_config, text)
        if problem is not None:
            raise pytest.UsageError(f"umem: {problem}")
        os.environ[VARIABLE] = text
        if not any(name in sys.modules for name in PACKAGES):
            arm(text)
    elif asked is not None:
        os.environ[VARIABLE] = "0"
        disarm()
    return (yield)


def _problem(text: str) -> str | None:
    """Say why this GPU cannot be had here, if it cannot."""
    try:
        gpu, given = parsed(text)
    except ValueError as error:
        return str(error)
    from umem.devices.software.opening import requirements
    from umem.errors import UmemError

    try:
        asked = {name: given[name] for name in ("vram", "force", "devices") if name in given}
        requirements(gpu, **asked)
    except UmemError as error:
        return str(error)
    return None


def _is_plain_cupy_imported() -> bool:
    from umem.devices.software import opening

    return "cupy" in sys.modules and not opening.is_open()


def _start_again(config: Any, text: str) -> str:
    """Start this pytest again with the variable set; why not, where it cannot be."""
    whose = ", ".join(_importers(config)) or "a plugin"
    said = f"CuPy was imported before pytest had read its options, by {whose}"
    is_command = [*config.invocation_params.args] == sys.argv[1:]
    if os.environ.get(VARIABLE) == text or not is_command or not sys.orig_argv:
        return f"{said}: set {VARIABLE}={text} in the environment, with umem installed there"
    print(f"umem: {said}: pytest starts again with {VARIABLE}={text}", file=sys.stderr, flush=True)
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
    """Tell whether CuPy is installed on a machine without a GPU; CuPy is not imported for that."""
    return find_spec("cupy") is not None and not any(map(glob, DEVICES))


def pytest_report_header(config: Any) -> list[str]:
    """Say that the GPU is simulated, and which it is; or that there could be one."""
    text = os.environ.get(VARIABLE, "")
    if not text and _has_cupy_alone():
        return [
            "CuPy without a GPU: pytest --software-gpu t4 runs CuPy's tests on host memory (umem)"
        ]
    if text in OFF:
        return []
    found = [f"software GPU: {text} (umem; VRAM, pages and time are simulated)"]
    if parsed(text)[1].get("dry"):
        found.append("dry: values are zeros, and what tests write is real")
    return found


def _revive() -> None:
    """Make a device usable again whose context a fault has ended: the fault was the test's."""
    module = sys.modules.get("umem.devices.software.faults")
    if module is not None:
        module.revive()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Revive devices behind each phase of a test, so that its fixtures can end."""
    try:
        return (yield)
    finally:
        _revive()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Iterator[None]:
    """Revive devices behind the import of a module of tests."""
    try:
        return (yield)
    finally:
        _revive()
