"""What does the compatibility layer add to importing Chainer?

``layer``: ``umem.compat.install()`` and ``import chainer``; importing umem counts. ``baseline``:
``import chainer`` from a copy of Chainer whose files hold the same mends already, without umem.
(Chainer as released cannot be the baseline: on NumPy 2 it does not import.) All byte code is cached
but that of the modules that the layer mends, which never is. Each runs in a process of its own, by
turns; only the import statements are timed, so the start of Python and the import of NumPy, which
both need, do not count.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import common
from report_tables import duration, quantity, text

from umem.compat import installation
from umem.compat import support as support_module
from umem.compat.catalogue import SHIMS
from umem.compat.requirement import holds

LIMIT_SECONDS = 0.150
ROOT = Path(__file__).resolve().parent.parent
_TIMED = (
    "import time, numpy; start = time.perf_counter(); {}; import chainer; "
    "print(time.perf_counter() - start); assert chainer.__file__.startswith({!r})"
)
_LAYER = "from umem.compat import install; install()"


def chainer_folder() -> Path:
    """Return the folder of the installed Chainer."""
    package = installation.find_package("chainer")
    assert package is not None, "Chainer is not installed"
    return package


def mended_copy(folder: Path) -> None:
    """Write a Chainer that needs no layer into ``folder``: the sources with the mends in them."""
    installed = chainer_folder()
    for name in ("chainer", "chainerx"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(installed.with_name(name), folder / name, ignore=ignored)
    _copy_support(folder)
    for shim in SHIMS:
        original = installation.module_file(shim.module)
        if shim.module.startswith("chainer.") and holds(shim.versions) and original is not None:
            path = folder / "chainer" / original.relative_to(installed)
            text = shim.apply(path.read_text("utf-8"), "7.8")
            text = text.replace("from umem.compat import support", "import chainer_support")
            path.write_text(text, "utf-8")


def _copy_support(folder: Path) -> None:
    """Write the functions that mended modules call as a module that knows no umem."""
    text = Path(str(support_module.__file__)).read_text("utf-8")
    text = text.replace("from umem.compat.requirement import holds", "holds = None")
    devices = Path(str(support_module.__file__)).with_name("cuda_devices.py")
    (folder / "chainer_devices.py").write_text(devices.read_text("utf-8"), "utf-8")
    text = text.replace("umem.compat.cuda_devices", "chainer_devices")
    (folder / "chainer_support.py").write_text(text, "utf-8")


def import_seconds(statement: str, path: Path, home: Path, cache: Path) -> float:
    """Return the seconds that the import takes in a fresh process."""
    environment = {**os.environ, "PYTHONPATH": str(path), "PYTHONPYCACHEPREFIX": str(cache)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-W", "ignore", "-c", _TIMED.format(statement, str(home))]
    done = subprocess.run(
        command, env=environment, cwd=cache, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def measure(repeats: int) -> dict[str, list[float]]:
    """Return the seconds of every repeat; the two take turns, after one run that is not kept."""
    seconds: dict[str, list[float]] = {"baseline": [], "layer": []}
    with tempfile.TemporaryDirectory() as name:
        folder, cache = Path(name) / "path", Path(name) / "cache"
        folder.mkdir()
        cache.mkdir()
        mended_copy(folder)
        for _ in range(repeats + 1):
            seconds["baseline"].append(import_seconds("pass", folder, folder, cache))
            installed = chainer_folder().parent
            seconds["layer"].append(import_seconds(_LAYER, ROOT, installed, cache))
    return {key: values[1:] for key, values in seconds.items()}


def rows(seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return one row for each of the two: its repeats, their median, and what it adds."""
    base = statistics.median(seconds["baseline"])
    return [
        {
            "condition": key,
            "seconds": values,
            "median_seconds": statistics.median(values),
            "added_seconds": statistics.median(values) - base,
            "ratio": statistics.median(values) / base,
        }
        for key, values in seconds.items()
    ]


def answer(result: common.Result) -> str:
    baseline, layer = result["rows"]
    return (
        f"{duration(layer['added_seconds'])}, from {duration(baseline['median_seconds'])} to "
        f"{duration(layer['median_seconds'])}, where {duration(LIMIT_SECONDS)} are allowed."
    )


BENCH = common.Bench(
    "compat_import",
    __doc__,
    answer,
    (
        text("import of Chainer", "condition"),
        quantity("median", "median_seconds", "ms", per=1e-3),
        quantity("least", lambda row: min(row["seconds"]), "ms", per=1e-3),
        quantity("most", lambda row: max(row["seconds"]), "ms", per=1e-3),
        quantity("added", "added_seconds", "ms", per=1e-3, signed=True),
        quantity("of baseline", "ratio"),
    ),
)


@click.command(help=__doc__)
@click.option("--repeats", type=click.IntRange(1), default=15, show_default=True)
@click.option("--quick", is_flag=True, help="Three repeats.")
@common.json_option
def main(repeats: int, quick: bool, path: Path | None) -> None:
    repeats = 3 if quick else repeats
    BENCH.finish(
        rows(measure(repeats)),
        path,
        simulated=False,
        options={"repeats": repeats, "quick": quick},
        limit_seconds=LIMIT_SECONDS,
    )


if __name__ == "__main__":
    main()
