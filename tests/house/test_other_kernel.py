"""scripts/other_kernel.py: with which kernels of OpenBLAS bits are compared a second time."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import pytest
from project import ROOT

SCRIPT = ROOT / "scripts" / "other_kernel.py"


def module() -> ModuleType:
    spec = spec_from_file_location("other_kernel", SCRIPT)
    assert spec is not None and spec.loader is not None
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize(
    ("taken", "flags", "other"),
    [
        ("SkylakeX", {"avx", "avx2", "fma", "avx512f"}, "Haswell"),
        ("Zen", {"avx", "avx2", "fma"}, "Sandybridge"),
        ("Haswell", {"avx", "avx2", "fma"}, "Sandybridge"),
        ("Sandybridge", {"avx"}, None),
        ("neoversen1", {"asimd"}, None),
        (None, {"avx", "avx2", "fma"}, None),
    ],
)
def test_other_kernels_are_those_that_the_processor_can_run(
    taken: str | None, flags: set[str], other: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = module()
    monkeypatch.setattr(found, "runs", lambda kernel: True)
    assert found.other(taken, flags) == other


def test_kernels_that_end_the_process_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    found = module()
    monkeypatch.setattr(found, "runs", lambda kernel: kernel != "Haswell")
    assert found.other("SkylakeX", {"avx", "avx2", "fma"}) == "Sandybridge"


@pytest.mark.thorough
def test_numpy_takes_the_kernels_that_are_printed() -> None:
    """Or prints nothing, where there are no others."""

    def printed(*arguments: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, **environment}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout.strip()

    if other := printed(str(SCRIPT)):
        code = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        code += "import other_kernel; print(other_kernel.taken())"
        assert printed("-c", code, OPENBLAS_CORETYPE=other) == other != module().taken()
