"""The start-up file that puts the layer into every Python process of an environment.

Python executes the line of a ``.pth`` file in site-packages when it starts. This line adds a finder
that waits for ``import chainer``; only then are umem and NumPy imported. That covers scripts that
do not mention umem, and worker processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from umem.errors import CompatError

FILE_NAME = "umem_chainer.pth"

_HOOK = """
import sys
class UmemChainerHook:
    def find_spec(self, name, path=None, target=None):
        if name != "chainer":
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        try:
            from umem.compat.finder import arm
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "umem":
                raise
            raise ImportError("umem cannot be imported: install it, or delete " + FILE) from None
        return arm().find_spec(name, path, target)
sys.meta_path.insert(0, UmemChainerHook())
"""


def site_packages() -> Path:
    """Return the folder whose ``.pth`` files this interpreter executes."""
    return Path(sysconfig.get_path("purelib"))


def content(path: Path) -> str:
    """Return the line of the start-up file at ``path``."""
    names = {"FILE": str(path), "__name__": "umem_chainer"}
    return f"import sys; exec({_HOOK!r}, {names!r})\n"


def installed_pth(folder: Path | None = None) -> Path | None:
    """Return the path of the start-up file, or None if it does not exist."""
    path = (folder or site_packages()) / FILE_NAME
    return path if path.is_file() else None


def install_pth(folder: Path | None = None) -> Path:
    """Write the start-up file and return its path; safe to repeat.

    Costs the start of one Python process, which checks that other processes can import umem.

    Raises:
        CompatError: the folder cannot be written, or umem is not installed; no file was written.
    """
    path = (folder or site_packages()) / FILE_NAME
    _require_importable()
    try:
        _write(path, content(path))
    except OSError as error:
        raise CompatError(
            f"cannot write {path}: {error.strerror}. Nothing was written. Use a virtual "
            "environment of your own, or put `import umem.chainer` first in the script."
        ) from error
    return path


def _require_importable() -> None:
    """Raise CompatError if Python finds umem only because of the current folder."""
    command = [sys.executable, "-c", "import umem"]
    home = Path(sys.executable).parent
    if subprocess.run(command, cwd=home, capture_output=True, check=False).returncode:
        raise CompatError(
            "other Python processes cannot import umem, so the start-up file would break "
            "`import chainer`. Nothing was written. Install umem with pip first."
        )


def _write(path: Path, text: str) -> None:
    """Replace the file atomically, so that no process ever starts with half a line."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=FILE_NAME, suffix=".new")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:  # Ctrl-C included
        os.unlink(temporary)
        raise


def remove_pth(folder: Path | None = None) -> Path | None:
    """Delete the start-up file; return its path, or None if it did not exist.

    Raises:
        CompatError: it cannot be deleted, and still exists.
    """
    path = (folder or site_packages()) / FILE_NAME
    try:
        path.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CompatError(f"cannot delete {path}: {error.strerror}; it is still there.") from error
    return path
