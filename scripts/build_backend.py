"""Setuptools' build backend, which also puts ``umem_software_gpu.pth`` into the wheel.

A file of that kind has to lie beside the packages; setuptools places none there, least of all in
an editable install.
"""

from __future__ import annotations

import base64
import hashlib
import os
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


def build_wheel(wheel_directory: str, *given: Any, **more: Any) -> str:
    """Build a wheel; returns its file's name."""
    return _with_line(wheel_directory, build_meta.build_wheel(wheel_directory, *given, **more))


def build_editable(wheel_directory: str, *given: Any, **more: Any) -> str:
    """Build a wheel of an editable install; returns its file's name."""
    return _with_line(wheel_directory, build_meta.build_editable(wheel_directory, *given, **more))


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
        wheel.writestr(NAME, LINE)
    os.replace(new, path)
    return name
