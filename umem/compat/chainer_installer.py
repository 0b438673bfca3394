"""Installs Chainer into this environment, built with an older setuptools.

Chainer is published as source only, and its setup.py imports pkg_resources, which setuptools 82 no
longer has. pip has twice changed which of its options reach the setuptools of an isolated build, so
Chainer is built without isolation, with a setuptools installed in a temporary folder.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from umem._common import extras
from umem.compat import installation
from umem.compat.pth import site_packages
from umem.errors import CompatError

BUILD_TOOLS = ("setuptools<81", "wheel")
"""Requirements with which Chainer's setup.py can be built."""
_OFFLINE = (
    "connection broken",
    "Failed to establish a new connection",
    "Temporary failure in name resolution",
    "Network is unreachable",
)
"""Phrases in pip's output when no index could be reached."""
_SAID_LINES = 12


def get_chainer(say: Callable[[str], None]) -> str:
    """Install Chainer 7.8 and its dependencies; returns the installed version.

    Takes a minute, and needs the network unless pip is configured with packages on the disk. Does
    nothing if everything is installed; replaces another release of Chainer.

    Args:
        say: prints a line of progress.

    Raises:
        CompatError: this environment is read-only or has no pip, no index can be reached, pip
            fails, or Python finds another release of Chainer outside of it first.
    """
    has_it = _has_chainer()
    missing = [one for one in extras.PACKAGES["chainer"][1:] if not _is_there(one)]
    if not has_it or missing:
        _require_writable()
        with TemporaryDirectory(prefix="umem-chainer-") as folder:
            wheels = [] if has_it else [str(_built(Path(folder), say))]
            say(f"installing {', '.join([*(['Chainer'] if wheels else []), *missing])}")
            _pip(["install", *wheels, *missing])
        importlib.invalidate_caches()
        installation.package_version.cache_clear()
    package = installation.find_package()
    if package is None:
        raise CompatError("pip has installed Chainer, but this Python does not find it")
    return installation.require_supported(str(package / "__init__.py"))


def _has_chainer() -> bool:
    package = installation.find_package()
    if package is None:
        return False
    return installation.SUPPORTED.match(installation.package_version(package)) is not None


def _is_there(requirement: str) -> bool:
    name, _, least = requirement.partition(">=")
    found = extras.installed_version(name)
    return found is not None and _numbers(found) >= _numbers(least)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")[:3] if part.isdigit()]


def _require_writable() -> None:
    """Raise CompatError if this user may not change the environment."""
    folder = site_packages()
    way_out = (
        "Nothing was installed. Make an environment of your own: python3 -m venv .venv && "
        ". .venv/bin/activate, install umem there, and try again"
    )
    if sys.prefix == sys.base_prefix:
        marker = Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"
        if marker.exists():
            raise CompatError(f"this Python is managed by the system's own packages. {way_out}.")
    if not os.access(folder, os.W_OK):
        raise CompatError(f"{folder} cannot be written. {way_out}.")
    has_pip = [sys.executable, "-m", "pip", "--version"]
    if subprocess.run(has_pip, capture_output=True, check=False).returncode:
        raise CompatError(
            "this environment has no pip: python -m ensurepip, or with uv: uv pip install pip. "
            "Nothing was installed."
        )


def _built(folder: Path, say: Callable[[str], None]) -> Path:
    """Build Chainer's wheel with an older setuptools."""
    say(f"building Chainer, with {BUILD_TOOLS[0]} in a folder of its own")
    tools, wheels = folder / "tools", folder / "wheels"
    _pip(["install", "--target", str(tools), *BUILD_TOOLS])
    path = os.pathsep.join(filter(None, [str(tools), os.environ.get("PYTHONPATH")]))
    wanted = ["--no-build-isolation", "--no-deps", extras.PACKAGES["chainer"][0]]
    _pip(["wheel", "--wheel-dir", str(wheels), *wanted], {"PYTHONPATH": path})
    return next(wheels.glob("chainer-*.whl"))


def _pip(arguments: list[str], variables: Mapping[str, str] | None = None) -> None:
    """Run pip.

    Raises:
        CompatError: it failed, or no index could be reached; Chainer was not installed.
    """
    environment = {
        "PIP_RETRIES": "2",
        **os.environ,
        "PIP_NO_INPUT": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_USER": "0",
        **(variables or {}),
    }
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if not done.returncode:
        return
    if any(words in done.stdout for words in _OFFLINE):
        raise CompatError(
            "no package index could be reached: connect to a network, or name a folder that has "
            "Chainer's files with PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER. Chainer was not installed."
        )
    said = "\n".join(done.stdout.strip().splitlines()[-_SAID_LINES:])
    raise CompatError(f"pip {arguments[0]} failed, and Chainer was not installed:\n{said}")
