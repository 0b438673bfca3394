"""Opens the software GPU from the variable ``UMEM_SOFTWARE_GPU=t4``, and shares a dry run's disk.

A package beside umem: each Python process of an environment with umem runs a line of
``umem_software_gpu.pth`` as it starts, and pytest loads `umem_software_gpu.plugin`. Neither may
import NumPy, as ``import umem`` does, unless a GPU is requested. This file has the variable's
syntax, and a finder that opens the software GPU when CuPy is first imported.

    plugin.py     is ``pytest --software-gpu t4``
    each_test.py  sets up each test: its seed, its errors, its properties
    seeds.py      derives each test's seed from the run's
    faults.py     names faults of kernels, and reads a file of known faults
    summary.py    writes the summary of a test run

- It imports umem only if a GPU is requested. Nothing in umem imports it.
- It loads the package `umem.dry` without umem, to share the scratch disk of a dry run.
- scripts/build_backend.py puts the ``.pth`` file into wheels, editable ones included.

PYTEST_DONT_REWRITE: otherwise pytest warns that a plugin's module was imported before pytest.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

VARIABLE = "UMEM_SOFTWARE_GPU"
OFF = ("", "0")
"""Values that request no GPU."""
FORM = (
    "GPU[,vram=SIZE][,model=off][,checked][,not-strict][,sticky=off][,seed=N|off|random]"
    "[,kernel-seconds=N][,devices=N][,dry][,force]"
)
OPTIONS = (
    "vram", "model", "checked", "not-strict", "sticky", "seed", "kernel-seconds", "devices", "dry",
    "force",
)  # fmt: skip
PACKAGES = ("cupy", "cupy_backends")
"""Packages whose first import opens the GPU."""
DRY_DISK = "UMEM_DRY_DISK"
"""Makes a Python process that a dry run started share its scratch disk."""


def parsed(text: str) -> tuple[str, dict[str, Any]]:
    """Read a GPU and the keyword arguments of `umem.software_gpu` from the variable's value.

    Raises:
        ValueError: an option is unknown, given twice, or has an invalid value.
    """
    gpu, *options = (word.strip() for word in text.split(","))
    given: dict[str, Any] = {}
    names = [option.partition("=")[0] for option in options]
    for name, option in zip(names, options, strict=True):
        _, is_given, value = option.partition("=")
        if name == "vram" and value:
            given["vram"] = value
        elif option in ("model=on", "model=off"):
            given["model"] = value == "on"
        elif name in ("checked", "dry", "force") and not is_given:
            given[name] = True
        elif option in ("sticky=on", "sticky=off"):
            given["sticky"] = value == "on"
        elif option == "not-strict":
            given["strict"] = False
        elif name == "seed" and (value == "off" or value.isdecimal()):
            given["stream_seed"] = None if value == "off" else int(value)
        elif name == "kernel-seconds" and value.replace(".", "", 1).isdecimal():
            given["kernel_seconds"] = float(value)
        elif name == "devices" and value.isdecimal():
            given["devices"] = int(value)
        else:
            raise ValueError(
                f"{option!r} is not an option of the software GPU: {FORM}{_nearest(name)}"
            )
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is given more than once for the software GPU")
    return gpu, given


def _nearest(name: str) -> str:
    """Return a question with the option that a misspelt one was probably meant to be."""
    from difflib import get_close_matches  # each Python process loads this file

    near = [] if name in OPTIONS else get_close_matches(name, OPTIONS, n=1)
    return f". Did you mean {near[0]!r}?" if near else ""


def with_seed(text: str, seed: int | str | None) -> str:
    """Return the variable's value with another seed, or ``"off"``; None removes the seed."""
    kept = [word for word in text.split(",") if word.strip().partition("=")[0] != "seed"]
    return ",".join(kept if seed is None else [*kept, f"seed={seed}"])


class Waiting:
    """A finder that opens the software GPU when CuPy is imported for the first time.

    Checking whether CuPy is installed, as `importlib.util.find_spec` does, does not open it.

    Args:
        text: the variable's value.
    """

    opens_software_gpu = True
    """By this name umem finds it, and removes it before opening a software GPU itself."""

    def __init__(self, text: str) -> None:
        self.text = text

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find CuPy with the other finders, and have `_Opening` load it."""
        if name not in PACKAGES:
            return None
        for finder in [finder for finder in sys.meta_path if not isinstance(finder, Waiting)]:
            spec = finder.find_spec(name, None, target)
            if spec is not None:
                found = ModuleSpec(name, _Opening(self, spec), origin=spec.origin, is_package=True)
                found.submodule_search_locations = spec.submodule_search_locations
                found.has_location = spec.has_location
                return found
        return None


class _Opening(Loader):
    """A loader that opens the software GPU, which imports CuPy, and returns the imported CuPy."""

    def __init__(self, finder: Waiting, spec: ModuleSpec) -> None:
        self._finder, self._spec = finder, spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Open the variable's software GPU, and return the CuPy that it imported."""
        import umem
        from umem_software_gpu.seeds import with_drawn

        text = with_drawn(self._finder.text)
        gpu, given = parsed(text)
        if text != self._finder.text:
            print(f"umem: {VARIABLE}={text} repeats this run", file=sys.stderr, flush=True)
            os.environ[VARIABLE] = text  # for the processes that this one starts
        try:
            umem.software_gpu(gpu, **given)  # which takes the finder away
        except BaseException:
            arm(text)  # plain CuPy would say next to nothing of why it has no GPU
            raise
        return sys.modules[self._spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def start() -> None:
    """Follow the environment variables as Python starts."""
    setting = os.environ.get(DRY_DISK)
    if setting:
        try:
            _join_disk(setting)
        except BaseException:  # which site.py would print, and go on to write for real
            import traceback

            traceback.print_exc()
            os._exit(1)
    arm()


def _join_disk(setting: str) -> None:
    """Load `umem.dry` without umem, which would import NumPy, and share the scratch disk."""
    name = "umem.dry"
    if name not in sys.modules:
        found = find_spec("umem")
        if found is None or found.origin is None:
            raise ImportError("umem is not installed")
        folder = os.path.join(os.path.dirname(found.origin), "dry")
        spec = spec_from_file_location(
            name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
        )
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    import_module("umem.dry.disk").join(setting)


def arm(text: str | None = None) -> None:
    """Make the first import of CuPy open the variable's GPU."""
    if text is None:
        text = os.environ.get(VARIABLE, "")
    disarm()
    if text not in OFF:
        sys.meta_path.insert(0, Waiting(text))


def is_armed() -> bool:
    """Tell whether the first import of CuPy will open a GPU."""
    return any(isinstance(finder, Waiting) for finder in sys.meta_path)


def disarm() -> None:
    """Make imports open nothing any more."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Waiting)]
