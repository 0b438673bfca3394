"""Stand-in for pkg_resources, which setuptools 82 removed, for lent packages."""

from __future__ import annotations

from importlib import metadata
from types import SimpleNamespace
from typing import Any


class DistributionNotFound(Exception):
    """A distribution is not installed."""


def get_distribution(name: str) -> Any:
    """Return an installed distribution: its ``project_name`` and ``version``.

    Raises:
        DistributionNotFound: the distribution is not installed.
    """
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise DistributionNotFound(f"the distribution {name!r} is not installed") from None
    return SimpleNamespace(project_name=found.metadata["Name"], version=found.version)


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"pkg_resources is not installed, and umem's stand-in for it has no {name!r}: use "
        "importlib.metadata or importlib.resources, or install 'setuptools<82'",
        name=name,
    )
