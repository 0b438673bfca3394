"""Setuptools' build backend, which also puts ``umem_software_gpu.pth`` into the wheel.

A file of that kind has to lie beside the packages; setuptools places none there, least of all in
an editable install.

Two builds of the same files with the same ``SOURCE_DATE_EPOCH`` are the same bytes. Setuptools sees
to that for what it puts into a wheel, but not for an sdist.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import os
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (what a frontend calls beside the two below)

NAME = "umem_software_gpu.pth"
# Python runs it as it starts: without the variables it is two looks at a dictionary.
LINE = (
    'import os; (os.environ.get("UMEM_DRY_DISK")'
    ' or os.environ.get("UMEM_SOFTWARE_GPU", "0") not in ("", "0"))'
    ' and __import__("umem_software_gpu").start()\n'
)

# 1980-01-01, the first date that a zip file can have.
_FIRST_SECONDS = 315532800


def build_wheel(wheel_directory: str, *given: Any, **more: Any) -> str:
    """Build a wheel; returns its file's name."""
    return _with_line(wheel_directory, build_meta.build_wheel(wheel_directory, *given, **more))


def build_editable(wheel_directory: str, *given: Any, **more: Any) -> str:
    """Build a wheel of an editable install; returns its file's name."""
    return _with_line(wheel_directory, build_meta.build_editable(wheel_directory, *given, **more))


def build_sdist(sdist_directory: str, *given: Any, **more: Any) -> str:
    """Build an sdist; returns its file's name."""
    name = build_meta.build_sdist(sdist_directory, *given, **more)
    if "SOURCE_DATE_EPOCH" in os.environ:
        _with_one_time(Path(sdist_directory, name), int(os.environ["SOURCE_DATE_EPOCH"]))
    return name


def _with_one_time(path: Path, seconds: int) -> None:
    """Give all members of an sdist one time, one owner and a fixed order."""
    new = path.with_suffix(".new")
    with (
        tarfile.open(path) as old,
        open(new, "wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=seconds) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as sdist,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid = seconds, 0, 0
            member.uname = member.gname = ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            sdist.addfile(member, old.extractfile(member) if member.isfile() else None)
    os.replace(new, path)


def _with_line(folder: str, name: str) -> str:
    path = Path(folder, name)
    new = path.with_suffix(".new")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as wheel:
        for info in old.infolist():
            content = old.read(info)
            if info.filename.endswith(".dist-info/RECORD"):
                digest = base64.urlsafe_b64encode(hashlib.sha256(LINE.encode()).digest())
                content += f"{NAME},sha256={digest.decode().rstrip('=')},{len(LINE)}\n".encode()
            wheel.writestr(info, content)
        seconds = max(int(os.environ.get("SOURCE_DATE_EPOCH", time.time())), _FIRST_SECONDS)
        wheel.writestr(zipfile.ZipInfo(NAME, time.gmtime(seconds)[:6]), LINE)
    os.replace(new, path)
    return name
