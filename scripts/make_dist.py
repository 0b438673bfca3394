"""Builds sdist and wheel into dist/, and checks them: make dist ARGS="--python python3.12 ..."

Builds twice and compares the bytes, the wheel from the sdist. Looks at what is in the wheel, has
twine check both, and installs each into an empty environment of each Python, where it runs a few
lines from a folder outside of the clone. Needs the network, for setuptools and dependencies.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 2 << 20  # a wheel that is larger has something in it that should not be
SMOKE = """
import umem
with umem.virtual_gpu("v100-16gb", vram="8MiB"), umem.managed() as memory:
    assert float(memory.xp.ones((2048, 2048), "float32").sum()) == 2048 * 2048
assert "site-packages" in umem.__file__, umem.__file__
"""
MISSING = """
import umem
try:
    umem.software_gpu("t4")
except umem.errors.MissingDependencyError as error:
    assert "extra: software" in str(error), error
else:
    raise AssertionError("a software GPU without CuPy")
"""


def run(*words: str | Path, folder: Path = ROOT, **variables: str) -> str:
    """Run a program; returns what it prints, and ends this one where it fails."""
    done = subprocess.run(
        list(map(str, words)),
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}")
    return done.stdout


def commit_seconds() -> str:
    """Return the time of the last commit, or of the environment, as ``SOURCE_DATE_EPOCH``."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    return given or run("git", "log", "-1", "--format=%ct").strip()


def built(folder: Path, seconds: str) -> tuple[Path, Path]:
    """Build an sdist, and from it a wheel, into a folder."""
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, SOURCE_DATE_EPOCH=seconds)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def check_wheel(path: Path) -> None:
    """Compare a wheel's name and files with the clone's."""
    tracked = run("git", "ls-files", "umem", "umem_software_gpu").split()
    expected = {*tracked, "umem_software_gpu.pth"}
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
    files = {name for name in names if ".dist-info/" not in name}
    info = {name.partition(".dist-info/")[2] for name in names}
    problems = {
        "tag": path.name.endswith("-py3-none-any.whl"),
        "size": path.stat().st_size <= MOST_BYTES,
        "files": files == expected,
        "licence": "licenses/LICENSE" in info,
    }
    wrong = [name for name, is_right in problems.items() if not is_right]
    if wrong:
        differing = sorted(files ^ expected)
        sys.exit(
            f"{path.name} has a wrong {', '.join(wrong)}; {path.stat().st_size:,} bytes; "
            f"files on one side only: {differing}"
        )


def check_sdist(path: Path) -> None:
    """Look whether a wheel can be built of an sdist, and whether its licence is in it."""
    with tarfile.open(path) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    missing = {"LICENSE", "pyproject.toml", "scripts/build_backend.py", "README.md"} - names
    if missing:
        sys.exit(f"{path.name} lacks {', '.join(sorted(missing))}")


def try_out(python: str, dist: Path, folder: Path) -> None:
    """Install into an empty environment, and run a few lines outside of the clone."""
    venv = folder / "venv"
    run(python, "-m", "venv", "--clear", venv)
    own = venv / "bin" / "python"
    run(own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", dist)
    outside = {"PYTHONPATH": "", "HOME": str(folder)}
    for program in (SMOKE, MISSING):
        run(own, "-I", "-W", "error", "-c", program, folder=folder, **outside)
    run(venv / "bin/umem", "doctor", "--device", "virtual:v100-16gb", folder=folder, **outside)
    print(f"umem: {dist.name} works on {run(own, '--version').strip()}")


def main() -> None:
    """Build, compare, check and try out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", nargs="+", default=[sys.executable], metavar="PYTHON")
    pythons = parser.parse_args().python
    seconds = commit_seconds()
    with tempfile.TemporaryDirectory() as temporary:
        one, two = Path(temporary, "one"), Path(temporary, "two")
        files = [built(folder, seconds) for folder in (one, two)]
        for first, second in zip(*files, strict=True):
            if first.name != second.name or first.read_bytes() != second.read_bytes():
                sys.exit(f"two builds differ: {first.name}, {second.name}")
        sdist, wheel = files[0]
        check_sdist(sdist)
        check_wheel(wheel)
        run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
        for python in pythons:
            for dist in (wheel, sdist):
                try_out(python, dist, Path(temporary))
        target = ROOT / "dist"
        target.mkdir(exist_ok=True)
        for dist in (sdist, wheel):
            (target / dist.name).write_bytes(dist.read_bytes())
            print(f"umem: dist/{dist.name}, {dist.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
