"""Which packages the steps of bench/gpu_run.py need, of which versions, and what is installed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec


@dataclass(frozen=True)
class Wheel:
    """What provides a module.

    Attributes:
        bring: how to come by it.
        names: that it may be installed by; the first that is there counts.
        least: the oldest version.
        below: the first version that is too new; "" where none is known.
    """

    bring: str
    names: tuple[str, ...] = ()
    least: str = "0"
    below: str = ""


WHEELS = {
    "numpy": Wheel("numpy>=1.24", ("numpy",), "1.24"),
    "click": Wheel("click>=8.1", ("click",), "8.1"),
    "rich": Wheel("rich>=13.0", ("rich",), "13.0"),
    "scipy": Wheel("scipy>=1.10", ("scipy",), "1.10"),
    "cupy": Wheel(
        "cupy-cuda13x[ctk]>=14.0 or cupy-cuda12x[ctk]>=14.0, as the driver is",
        ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
        "13.0",
    ),
    "cuda.core": Wheel("cuda-core>=1.1", ("cuda-core",), "1.1"),
    "pytest": Wheel("pytest>=8.0", ("pytest",), "8.0"),
    "hypothesis": Wheel("hypothesis>=6.100", ("hypothesis",), "6.100"),
    "chainer": Wheel(
        "chainer 7.8.1, which has to be built, with six, typing-extensions, filelock, protobuf",
        ("chainer",),
        "7.8.1",
        "7.9",
    ),
    "packaging": Wheel("packaging>=22.0", ("packaging",), "22.0"),
}
"""By module; tests hold the versions to pyproject.toml. The tests for a GPU run with an older
pytest and hypothesis than the others: what a machine with a GPU has is not ours to choose."""
CARRIED = (
    "cupti-python==13.*", "nvidia-cuda-cupti==13.*", "pyelftools", "click", "rich",
    "markdown-it-py", "mdurl", "pygments", "six", "typing-extensions", "filelock", "protobuf",
    "packaging", "pytest>=9", "pluggy", "iniconfig", "hypothesis>=6.160", "sortedcontainers",
)  # fmt: skip
"""Requirements of wheels that a machine with CuPy for CUDA 13, NumPy, SciPy and cuda-core may lack,
or have too old; 24 MiB together, with Chainer's."""
PYTHON = "3.12"
PLATFORMS = (
    "manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_25_x86_64",
    "manylinux_2_24_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64",
)  # fmt: skip
"""pip takes a wheel only for a platform that it is told of by name."""
MOST_MIB = 50


def instructions() -> str:
    """Say which wheels to bring, how to get them where there is a network, and how to use them."""
    platforms = " ".join(f"--platform {name}" for name in PLATFORMS)
    wanted = " ".join(f"'{one}'" for one in CARRIED)
    return f"""# At most {MOST_MIB} MiB of wheels for Python {PYTHON}. Where there is a network,
# in the clone:
mkdir -p out/wheels out/tools
python3 -m pip download --no-deps --only-binary :all: --implementation cp \\
  --python-version {PYTHON} {platforms} \\
  -d out/wheels {wanted}
# Chainer is published as source, which needs an old setuptools:
python3 -m pip install --target out/tools 'setuptools<81' wheel
PYTHONPATH=out/tools python3 -m pip wheel --no-deps --no-build-isolation -w out/wheels \\
  chainer==7.8.1
du -sm out/wheels

# On the machine with the GPU, with out/wheels brought along; a wheel is a zip, and pip not needed:
for wheel in out/wheels/*.whl; do python3 -m zipfile -e "$wheel" out/packages; done
PYTHONPATH=out/packages python3 bench/gpu_run.py out/gpu_run.zip --minutes 9"""


def version(wheel: Wheel) -> str | None:
    """Look up which version is installed; None where nobody says."""
    for name in wheel.names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def problem(module: str) -> str | None:
    """Say why a module will not do: not installed, or of a version that umem does not know."""
    try:
        if find_spec(module) is None:
            return "not installed"
    except ImportError:
        return "not installed"
    wheel = WHEELS[module]
    found = version(wheel)
    if found is None:
        return None
    if numbers(found) < numbers(wheel.least):
        return f"{found} is installed, which is older than {wheel.least}"
    if wheel.below and numbers(found) >= numbers(wheel.below):
        return f"{found} is installed, which is not older than {wheel.below}"
    return None


def numbers(text: str) -> list[int]:
    """Read a version's numbers, without what it says of pre-releases and builds."""
    release = re.match(r"[0-9.]*", text)
    return [int(part) for part in (release[0] if release else "").split(".") if part]


def missing(modules: Sequence[str]) -> dict[str, str]:
    """Say of those modules that will not do why not; imports at most their packages."""
    found = {module: problem(module) for module in modules}
    return {module: why for module, why in found.items() if why is not None}


def table() -> dict[str, dict[str, str | None]]:
    """Say of each module which version is installed, and why it will not do."""
    return {
        module: {"version": version(wheel), "problem": problem(module)}
        for module, wheel in WHEELS.items()
    }
