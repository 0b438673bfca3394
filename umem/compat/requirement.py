"""Requirements such as ``numpy>=2.0,<3``, checked against the installed packages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from umem._common import extras
from umem.errors import CompatError, MissingDependencyError

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet


def holds(requirement: str) -> bool:
    """Tell whether a requirement is met in this environment; "any" always is.

    A package that is not installed meets none. A pre-release counts as its release. A requirement
    whose marker excludes this environment is met. An invalid version, such as "unknown", meets only
    a requirement without a version.

    Raises:
        CompatError: the text is not a valid requirement.
        MissingDependencyError: packaging is not installed.
    """
    if requirement == "any":
        return True
    wanted = parsed(requirement)
    if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
        return True
    version = extras.installed_version(wanted.name)
    return version is not None and (not wanted.specifier or _meets(version, wanted.specifier))


def parsed(requirement: str) -> Requirement:
    """Read a requirement as pip does.

    Raises:
        CompatError, MissingDependencyError: see `holds`.
    """
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "The compatibility layer reads requirements with packaging, which is not installed: "
            f"{extras.command('chainer', 'packaging')}"
        ) from error
    try:
        return Requirement(requirement)
    except InvalidRequirement as error:
        raise CompatError(f"not a requirement: {requirement!r}") from error


def _meets(version: str, specifier: SpecifierSet) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        return specifier.contains(Version(version).base_version)
    except InvalidVersion:
        return False
