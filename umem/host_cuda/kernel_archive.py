"""Compiled kernels in one file, to copy between machines with the same compiler.

A zip file with a manifest of the kernels' compiler, target and checksums. Kernels are machine code
that runs as their user: trust an archive only as much as its maker.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

from umem._common.files import open_regular, reason, whole
from umem._common.printable import short
from umem.errors import FileError
from umem.host_cuda.kernel_cache import KERNEL, kernel_cache_limit
from umem.host_cuda.processors import TARGET_VARIABLE, Processors
from umem.host_cuda.toolchain import Toolchain

MANIFEST = "manifest.json"
_MANIFEST_BYTES = 64 << 20
"""The largest manifest that is read, for half a million kernels (a guess)."""
_DAMAGES = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, KeyError, ValueError)
"""Errors of a damaged archive, its contents or its manifest; RuntimeError if it is encrypted."""


def export_kernels(tools: Toolchain, file: IO[bytes], version: str) -> int:
    """Write an archive of a compiler's and target's kernels; returns their number.

    Raises:
        FileError: there are no kernels.
    """
    paths = [path for path in sorted(tools.folder.glob(f"{tools.label}-*.so"))]
    contents = {path.name: path.read_bytes() for path in paths if KERNEL.fullmatch(path.name)}
    if not contents:
        raise FileError(f"{short(tools.folder)} has no kernels of this compiler and target")
    manifest = {
        "umem": version,
        "target": tools.target.name,
        "label": tools.label,
        "compiler": _compiler(tools),
        "kernels": {name: _checksum(content) for name, content in contents.items()},
    }
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MANIFEST, json.dumps(manifest))
        for name, content in contents.items():
            archive.writestr(name, content)
    return len(contents)


def import_kernels(path: Path, folder: Path, version: str) -> tuple[str, int]:
    """Add an archive's kernels to a folder; returns their target and the number of new ones.

    Raises:
        FileError: the file is not an archive, is damaged, has other files, is from another version
            of umem, compiler or processor, or is larger than a cache may be. Nothing was written.
        DeviceError: its kernels do not run here.
    """
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            manifest = _manifest(archive)
            target = Processors.named(manifest["target"])
            _check_maker(manifest, Toolchain(folder, target), version)
            contents = _contents(archive, manifest["kernels"])
    except _DAMAGES as error:
        raise FileError(f"not an archive of kernels, or damaged: {reason(error)}") from error
    new = [name for name in contents if not (folder / name).exists()]
    for name in new:
        with whole(folder / name, force=True) as made:
            made.write(contents[name])
    return target.name, len(new)


def _manifest(archive: zipfile.ZipFile) -> dict[str, Any]:
    """Read and check an archive's manifest.

    Raises:
        FileError, ValueError: it is too large or invalid.
    """
    if archive.getinfo(MANIFEST).file_size > _MANIFEST_BYTES:
        raise FileError("its manifest is too large")
    found = json.loads(archive.read(MANIFEST))
    texts = ("umem", "target", "label", "compiler")
    if not isinstance(found, dict) or not all(isinstance(found.get(name), str) for name in texts):
        raise ValueError("its manifest is invalid")
    if not isinstance(found.get("kernels"), dict):
        raise ValueError("its manifest names no kernels")
    return found


def _check_maker(manifest: dict[str, Any], tools: Toolchain, version: str) -> None:
    """Raise FileError unless an archive is from this umem, compiler and processor."""
    if manifest["umem"] != version:
        made = short(manifest["umem"])
        raise FileError(f"its kernels are of umem {made}, but this is umem {version}")
    if manifest["label"] == tools.label:
        return
    made, here = short(manifest["compiler"]), _compiler(tools)
    if made != here:
        raise FileError(f"its kernels are of the compiler {made}, but {here} is installed")
    raise FileError(
        "its kernels are for another processor, by the same compiler: export them again where "
        f"they were made, with {TARGET_VARIABLE}=portable"
    )


def _contents(archive: zipfile.ZipFile, checksums: dict[str, Any]) -> dict[str, bytes]:
    """Read an archive's kernels, after checking names, total size and checksums.

    Raises:
        FileError: one of them is wrong; nothing was written.
    """
    names = [info.filename for info in archive.infolist() if info.filename != MANIFEST]
    for name in names:
        if KERNEL.fullmatch(name) is None:
            raise FileError(f"it contains {short(name)}, which is not a kernel's name")
    if sorted(names) != sorted(checksums):
        raise FileError("its files differ from its manifest")
    if sum(info.file_size for info in archive.infolist()) > kernel_cache_limit():
        raise FileError("it is larger than the cache may be (UMEM_KERNEL_CACHE_SIZE)")
    contents = {name: archive.read(name) for name in names}
    for name, content in contents.items():
        if _checksum(content) != checksums[name]:
            raise FileError(f"{name} in it is damaged: its checksum differs")
    return contents


def _compiler(tools: Toolchain) -> str:
    return f"{tools.compiler}, {tools.version.splitlines()[0]}"


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
