"""A clone that is called umem is no package: what lies beside it imports the installed one."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import umem

ROOT = Path(umem.__file__).parent.parent
TRAIN = "import umem\nwith umem.virtual_gpu('t4'):\n    print(umem.__version__)\n"


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A folder that holds the project, as a clone calls it, and a script."""
    try:
        metadata.distribution("umem")
    except metadata.PackageNotFoundError:
        pytest.skip("umem is not installed here")
    (tmp_path / "umem").symlink_to(ROOT)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [("train.py",), ("-c", TRAIN), ("-m", "umem", "run", "train.py"), ("-m", "train")],
    ids=lambda arguments: " ".join(arguments).split("\n")[0],
)
def test_a_script_beside_the_clone_imports_umem(beside: Path, arguments: tuple[str, ...]) -> None:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=beside,
        env=inherited,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == (f"{umem.__version__}\n", "")
