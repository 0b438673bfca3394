"""Which CuPy the software GPU knows: distributions, versions, and the CUDA they were built for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from project import EXTRAS, ROOT
from software_programs import needs_compiler, needs_software_gpu, run

from umem._common.extras import CUPY_DISTRIBUTIONS
from umem.errors import DeviceError
from umem.host_cuda.versions import KNOWN, built_for, known_cupy, refuse_unknown

WHEELS = (
    "cupy-cuda11x==13.6.*", "cupy-cuda12x==13.6.*", "cupy-cuda13x==13.6.*", "cupy-cuda12x==14.*",
    "cupy-cuda13x==14.*", "cupy-cuda12x==14.0.*",
)  # fmt: skip
FIRST = "tests/host_cuda/test_starting.py"


@pytest.mark.parametrize("name", CUPY_DISTRIBUTIONS)
@pytest.mark.parametrize(("cuda", "version"), [(c, v) for c, known in KNOWN.items() for v in known])
def test_a_known_version_is_taken_whatever_its_distribution_is_called(
    name: str, cuda: int, version: str
) -> None:
    refuse_unknown({name: version}, cuda)
    refuse_unknown({name: f"{version}.9"}, cuda)


@pytest.mark.parametrize(
    ("installed", "cuda", "said"),
    [
        ({"cupy-cuda12x": "13.5.1"}, 12, "13.6 and 14 for CUDA 12.*; cupy-cuda12x 13.5.1 is for"),
        ({"cupy-cuda12x": "15.0.0"}, 12, "cupy-cuda12x 15.0.0 is for CUDA 12$"),
        ({"cupy-cuda12x": "140.0"}, 12, "140.0 is for CUDA 12$"),
        ({"cupy": "14.2.0"}, 11, "13.6 for CUDA 11, .*; cupy 14.2.0 is for CUDA 11$"),
        ({"cupy": "14.2.0"}, 14, "cupy 14.2.0 is for CUDA 14$"),
        ({"cupy": "13.6.0"}, None, "cupy 13.6.0 is for something other than CUDA$"),
        ({}, 12, "not installed as any of cupy-cuda12x, cupy-cuda13x, cupy-cuda11x, cupy$"),
        (
            {"cupy-cuda12x": "14.2.0", "cupy": "13.6.0"},
            12,
            "several distributions of CuPy are installed, cupy-cuda12x 14.2.0 and cupy 13.6.0",
        ),
    ],
)
def test_what_was_not_tried_is_refused_by_name(
    installed: dict[str, str], cuda: int | None, said: str
) -> None:
    with pytest.raises(DeviceError, match=said):
        refuse_unknown(installed, cuda)


def test_the_cuda_is_that_of_the_library_that_cupy_is_linked_to(tmp_path: Path) -> None:
    libraries = tmp_path / "cupy_backends" / "cuda" / "libs"
    libraries.mkdir(parents=True)
    assert built_for(tmp_path / "cupy") is None
    (libraries / "cublas.cpython-311-x86_64-linux-gnu.so").write_bytes(b"\0libcublas.so.13\0")
    assert built_for(tmp_path / "cupy") == 13


def test_the_extras_are_of_known_versions() -> None:
    for extra, cuda in (("software", 12), ("software13", 13)):
        (cupy,) = (one for one in EXTRAS[extra] if one.startswith("cupy"))
        assert cupy == f"cupy-cuda{cuda}x>=14.0,<15" and "14" in KNOWN[cuda]


@needs_software_gpu
def test_runtime_and_compiler_say_the_cuda_of_the_build(kernel_cache: Path) -> None:
    program = """
runtime = cp.cuda.runtime
print(runtime.runtimeGetVersion(), *cp.cuda.nvrtc.getVersion(), runtime.driverGetVersion())
"""
    version, major, minor, driver = map(int, run(program, kernel_cache).split())
    assert version // 1000 == major == built_for(known_cupy()) and version % 1000 == 10 * minor
    assert driver >= version


@needs_software_gpu
def test_nobody_looks_for_cudas_headers_which_may_not_be_there(kernel_cache: Path) -> None:
    program = """
import sys
started = []

def hear(event, given):
    if event == "subprocess.Popen":
        started.append(str(given[0]))

sys.addaudithook(hear)
print(int(cp.arange(4).sum()), sys.executable in started)
if cp.__version__ >= "14":
    from cuda import pathfinder
    from umem.host_cuda.kernels import HEADERS
    assert pathfinder.find_nvidia_header_directory("cudart") == str(HEADERS)
"""
    assert run(program, kernel_cache) == "6 False\n"


# -- an environment of its own for each -----------------------------------------------------------


def environment(folder: Path, *words: str) -> Path:
    """Make an environment with these packages and umem; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    python = folder / "env" / "bin" / "python"
    tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for name in filter(None, tracked):  # a build writes beside its sources
        (folder / "umem" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "umem" / name)
    install = [python, "-m", "pip", "install", "-q", *words, f"{folder}/umem"]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode and "connection broken" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
    return python


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("wheel", WHEELS)
def test_the_first_tests_pass_with_each_wheel(wheel: str, tmp_path: Path) -> None:
    # CuPy 13 was made for NumPy up to 2.3.
    numpy = "numpy<2.4" if "==13" in wheel else "numpy"
    python = environment(tmp_path, wheel, numpy, "scipy", "pytest>=9", "hypothesis>=6.160")
    asked = [python, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", FIRST]
    done = subprocess.run(
        asked, cwd=tmp_path / "umem", capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "no CuPy" not in done.stdout and "not installed as" not in done.stdout


@pytest.mark.slow
@needs_compiler
def test_a_distribution_named_cupy_is_taken_by_its_version(tmp_path: Path) -> None:
    """As conda's: the files of a wheel, under another name."""
    python = environment(tmp_path, "cupy-cuda12x==14.*", "scipy")
    (found,) = (tmp_path / "env").glob("lib/python*/site-packages/cupy_cuda12x-*.dist-info")
    metadata = found / "METADATA"
    text = metadata.read_text(encoding="utf-8").replace("Name: cupy-cuda12x", "Name: cupy", 1)
    metadata.write_text(text, encoding="utf-8")
    found.rename(found.with_name(found.name.replace("cupy_cuda12x", "cupy")))
    program = "import cupy; print(int(cupy.arange(4).sum()))"
    asked = {**os.environ, "UMEM_SOFTWARE_GPU": "t4,force", "PYTHONPATH": ""}
    done = subprocess.run(
        [python, "-c", program], env=asked, capture_output=True, text=True, check=False
    )
    assert done.stdout == "6\n", done.stderr
