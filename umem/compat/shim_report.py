"""A report of the layer's mends in this environment, one row each."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from umem._common.extras import installed_version
from umem.compat import finder, installation
from umem.compat.catalogue import SHIMS
from umem.compat.requirement import holds, parsed
from umem.compat.shim import Shim
from umem.errors import CompatError, MissingDependencyError


@dataclass(frozen=True)
class Row:
    """One mend and its state in this environment.

    Attributes:
        name, module, versions, symptom, link, until: as in the mend itself.
        installed: the installed version of the package in ``versions``, or None.
        needed: whether ``versions`` holds here, so that the mend is needed.
        applied: whether the module is imported in this process with the mend.
        error: why the mend does not fit the installed module; None if it fits.
    """

    name: str
    module: str
    versions: str
    symptom: str
    link: str
    until: str
    installed: str | None
    needed: bool
    applied: bool
    error: str | None

    @property
    def state(self) -> str:
        """Return one of "does not fit", "not needed", "applied", "on import"."""
        if self.error is not None:
            return "does not fit"
        if not self.needed:
            return "not needed"
        return "applied" if self.applied else "on import"


def check() -> list[Row]:
    """Return a row for each mend; does not import Chainer.

    Raises:
        MissingDependencyError: Chainer is not installed.
        CompatError: Chainer is not a 7.8 release.
    """
    package = installation.find_package()
    if package is None:
        raise MissingDependencyError(finder.NOT_INSTALLED)
    version = installation.require_supported(str(package / "__init__.py"))
    return [_row(shim, version) for shim in SHIMS]


def import_mended(rows: Iterable[Row]) -> dict[str, str]:
    """Import every module that needs a mend; return the modules that failed, and why.

    Costs the import of all of Chainer, and of CuPy, h5py and ONNX if they are installed. Leaves out
    ChainerMN, because importing it starts MPI.

    Raises:
        CompatError: Chainer was imported before, unmended; nothing was imported.
    """
    finder.install()
    failed = {}
    wanted = (row.module for row in rows if row.needed and row.error is None)
    for module in dict.fromkeys(wanted):
        if module.startswith("chainermn."):
            continue
        try:
            importlib.import_module(module)
        except Exception as error:  # the user wants to read any error of a module
            failed[module] = f"{type(error).__name__}: {error}"
    return failed


def _row(shim: Shim, version: str) -> Row:
    """Describe one mend and its state here."""
    needed = holds(shim.versions)
    return Row(
        name=shim.name,
        module=shim.module,
        versions=shim.versions,
        symptom=shim.symptom,
        link=shim.link,
        until=shim.until,
        installed=None if shim.versions == "any" else installed_version(parsed(shim.versions).name),
        needed=needed,
        applied=needed and finder.is_mended(shim.module),
        error=_misfit(shim, version),
    )


def _misfit(shim: Shim, version: str) -> str | None:
    path = installation.module_file(shim.module)
    if path is None:
        return f"{shim.module} is not in the installed Chainer {version}"
    try:
        shim.check(_original(path), version)
    except CompatError as error:
        return str(error)
    return None


def _original(path: Path) -> str:
    return path.read_text("utf-8")
