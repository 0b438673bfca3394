"""A process with a software GPU ends in silence."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import python
from software_programs import needs_software_gpu

PROGRAM = """
import cupy
a = cupy.ones((8, 8), "float32")
print((a @ a).shape)
"""


@needs_software_gpu
@pytest.mark.parametrize("option", ["--dry", "--software"])
def test_handles_that_python_frees_last_are_freed_in_silence(
    option: str, tmp_path: Path, kernel_cache: Path
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ("-m", "umem", "run", option, "t4", "program.py")
    done = python(*words, cwd=tmp_path, XDG_CACHE_HOME=kernel_cache, CUPY_CACHE_DIR=kernel_cache)
    assert (done.returncode, done.stdout) == (0, "(8, 8)\n")
    assert "rror" not in done.stderr
