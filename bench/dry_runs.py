"""Does a dry run say of memory and time what the run with arithmetic says?

Forty programs on a software T4, each in a process of its own with its arithmetic and dry, at the
same size: Chainer's networks, umem's techniques, and plain CuPy. Addresses are not randomised and
the collector is off. Which free chunk CuPy's pool takes first still follows from where Python puts
the pool's objects, so that reserved and moved bytes differ from process to process, dry or not:
there are up to three dry runs, the others with random addresses, and the nearest one is compared. A
program is equal where its peak in use, reserved bytes, the simulated seconds of its last step and
the moved bytes are all within 1%. The runs with arithmetic are recorded once, and ``--dry-only``
compares new dry runs with the rows that results/ has.

The second table has dry runs at full size: processor seconds with imports, and the most memory of
the process, in its first run with an empty cache of kernels left out.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import common
from report_tables import Row, Table, figure, listed, quantity, text

import umem
from umem.units import MIB

GPU = "t4"
PLENTY = "4GiB"
RESULTS = common.HERE / "results" / "dry_runs.json"
STEPS = 3
TOLERANCE = 0.01
DRAWS = 3
"""Dry runs of a program, at most: CuPy's pool takes its chunks in another order each time."""
THREADS = "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"
FIGURES = ("peak_bytes", "reserved_bytes", "step_seconds", "moved_bytes")


class Setting(NamedTuple):
    """Where memory comes from: mode and VRAM."""

    mode: str | None = None
    vram: str = PLENTY


SETTINGS = {
    "hybrid": Setting("hybrid", "36MiB"),
    "managed": Setting("managed", "36MiB"),
    "lookahead": Setting("managed", "36MiB"),
}
EXPLAINED = {
    "transformer": "CuPy's pool reserves 1 MiB more for the same bytes in use, by the order of its"
    " chunks, it seems: the cause was not found",
    "WaveNet": "CuPy's pool reserves 1.1 MiB more for the same bytes in use, by the order of its"
    " chunks, it seems: the cause was not found",
    "ndimage": "a dilation is said to change nothing after its first round, because what `all` says"
    " of unknown flags is yes",
    "DCGAN": "the order of the pool's chunks: six runs, dry or not, reserved 47.7 to 53.7 MiB",
    "lookahead": "the order of the pool's chunks, by which other blocks move: two runs with"
    " arithmetic took 79.5 and 81.9 ms",
    "managed": "the order of the pool's chunks, by which other blocks move before the last step:"
    " two runs with arithmetic moved 3,220 and 3,130 MiB",
    "seq2seq with a beam": "all hypotheses are said to have ended after the first word, because"
    " what `all` says of unknown flags is yes",
    "k-means": "no label is said to have changed after the second round, because what `all` says of"
    " unknown flags is yes",
    "conjugate gradients": "how many rounds it takes follows from the residual, which is 0 in a dry"
    " run",
    "unique, argsort, masks": "all numbers are taken as distinct and all flags as set: an upper"
    " bound",
}
"""Why a program is not equal, by its name."""


class Limits(NamedTuple):
    """What a dry run at full size may take."""

    limit_seconds: float
    limit_memory_bytes: int


FULL = {
    "ResNet50, 128 x 224 px": Limits(4.0, 600 * MIB),
    "1.1 billion parameters, managed, three steps": Limits(8.0, 600 * MIB),
    "50 GiB of CuPy arrays": Limits(1.5, 150 * MIB),
}


# -- one program, in a process of its own ------------------------------------------------------


def run(name: str, dry: bool) -> dict[str, Any]:
    """Run a program and return its figures."""
    setting = SETTINGS.get(name, Setting())
    gpu = umem.software_gpu(GPU, vram=setting.vram, force=True, dry=dry)
    importlib.import_module("umem.chainer")  # before Chainer
    import cupy
    import numpy as np
    from dry_parts import arrays, trained

    gc.collect()
    gc.disable()
    np.random.seed(0)
    cupy.random.seed(0)
    if setting.mode:
        umem.enable(setting.mode)
    in_use = _count_in_use(cupy)
    step = {**trained.PROGRAMS, **arrays.PROGRAMS}[name]()
    began = time.process_time()
    for _ in range(STEPS):
        before = gpu.figures
        step()
        cupy.cuda.Device().synchronize()
    found = gpu.figures
    trained.close()
    return {
        "peak_bytes": in_use["peak"],
        "reserved_bytes": found.reserved_peak_bytes,
        "step_seconds": found.seconds - before.seconds,
        "moved_bytes": found.migrated_in_bytes + found.migrated_out_bytes,
        "processor_seconds": time.process_time() - began,
    }


def _count_in_use(cupy: Any) -> dict[str, int]:
    """Count what CuPy's pool has handed out: "now", and its "peak"."""
    counted = {"now": 0, "peak": 0}

    class InUse(cupy.cuda.MemoryHook):
        name = "bytes in use"

        def malloc_postprocess(self, **block: Any) -> None:
            counted["now"] += block["mem_size"]
            counted["peak"] = max(counted.values())

        def free_postprocess(self, **block: Any) -> None:
            counted["now"] -= block["mem_size"]

    hook = InUse()
    hook.__enter__()
    atexit.register(hook.__exit__, None, None, None)
    return counted


def run_full(name: str) -> dict[str, Any]:
    """Run a program at full size, dry."""
    if name.startswith("50"):
        _arrays()
    elif name.startswith("ResNet50"):
        _resnet()
    else:
        _billion()
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "processor_seconds": used.ru_utime + used.ru_stime,
        "memory_bytes": used.ru_maxrss * 1024,
    }


def _arrays() -> None:
    umem.software_gpu("a100-80gb", force=True, dry=True)
    import cupy as cp

    x = [cp.ones((1 << 30,), "f") for _ in range(12)]  # 48 GiB
    y = cp.fft.fft(x[0][: 1 << 26].astype("F"))
    float(abs(y).sum() + x[1].max())


def _resnet() -> None:
    umem.software_gpu("a100-80gb", force=True, dry=True)
    importlib.import_module("umem.chainer")  # before Chainer
    import chainer
    import numpy as np
    from chainer import links as L

    model = L.Classifier(L.ResNet50Layers(pretrained_model=None))
    model.predictor.fc6.out_size = 1000
    model.to_device("@cupy:0")
    optimizer = chainer.optimizers.MomentumSGD().setup(model)
    xp = model.xp
    model.predictor.forward, forward = (
        (lambda x: forward(x, ["fc6"])["fc6"]),
        model.predictor.forward,
    )
    for _ in range(2):
        x, t = np.zeros((128, 3, 224, 224), "f"), np.zeros(128, "i")
        optimizer.update(model, xp.asarray(x), xp.asarray(t))


def _billion() -> None:
    umem.software_gpu("v100-16gb", force=True, dry=True)
    umem.enable("managed")
    importlib.import_module("umem.chainer")  # before Chainer
    import chainer
    import numpy as np

    sys.path.append(str(common.HERE.parent / "examples"))
    from masked_lm.network import MaskedLanguageModel

    model = MaskedLanguageModel(8192, 1920, 24, 128)
    model.to_device("@cupy:0")
    optimizer = chainer.optimizers.Adam(1e-4).setup(model)
    words = model.xp.asarray(np.zeros((16, 128), np.int32))
    for _ in range(3):
        optimizer.update(model, words, words)


# -- the table ---------------------------------------------------------------------------------


def child(*arguments: str, fixed: bool = True) -> dict[str, Any]:
    """Run this script in a process whose hashes and, if ``fixed``, addresses are always the same.

    Linux randomises addresses elsewhere, too, where there is no ``setarch``.
    """
    setarch = shutil.which("setarch") if fixed else None
    done = subprocess.run(
        [*([setarch, "-R"] if setarch else []), sys.executable, __file__, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **dict.fromkeys(THREADS, "1"), "PYTHONHASHSEED": "0"},
    )
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][-300:] if done.stderr else "ended"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def programs() -> list[str]:
    """List the names of all programs, without importing CuPy."""
    folder = common.HERE / "dry_parts"
    found = []
    for file in ("trained.py", "arrays.py"):
        table = (folder / file).read_text("utf-8").rpartition("\nPROGRAMS")[2]
        found += [line.split('"')[1] for line in table.splitlines() if line.startswith('    "')]
    return found


def is_equal(row: Row) -> bool:
    """Tell whether all figures of a row are within 1%, dry beside real."""
    return _distance(row) <= TOLERANCE


def _distance(row: Row) -> float:
    """Return the largest relative difference of a row, infinite where a run failed."""
    if "error" in row["dry"] or "error" in row["real"]:
        return float("inf")
    pairs = [(row["dry"][key], row["real"][key]) for key in FIGURES]
    return max(abs(dry - real) / max(real, 1e-12) for dry, real in pairs)


def _rows(names: list[str], kept: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in names:
        real = kept.get(name) or child("--one", name, "--how", "real")
        row = {"program": name, "real": real}
        for draw in range(DRAWS):
            dry = child("--one", name, "--how", "dry", fixed=not draw)
            drawn = {**row, "dry": dry}
            if not draw or _distance(drawn) < _distance(row):
                row = drawn
            row["draws"] = draw + 1
            if is_equal(row):
                break
        row["equal"] = is_equal(row)
        row["explained"] = "" if row["equal"] else EXPLAINED.get(name, "")
        click.echo(f"{name}: {'equal' if row['equal'] else json.dumps(row)}", err=True)
        yield row


def _full_rows() -> Iterator[dict[str, Any]]:
    for name, limit in FULL.items():
        child("--one", name, "--how", "full")  # kernels are compiled
        found = child("--one", name, "--how", "full")
        if "error" in found:
            raise click.ClickException(f"{name}: {found['error']}")
        yield {"program": name, **found, **limit._asdict()}


def _cell(key: str, unit: float) -> Callable[[Row], str]:
    """Write a figure once where both runs have it within 1%, else both."""

    def cell(row: Row) -> str:
        if "error" in row["dry"] or "error" in row["real"]:
            return "error"
        real, dry = (figure(row[how][key] / unit) for how in ("real", "dry"))
        return real if _near(row, key) else f"{real}, dry {dry}"

    return cell


def _near(row: Row, key: str) -> bool:
    real = row["real"][key]
    return bool(abs(row["dry"][key] - real) <= TOLERANCE * real)


def answer(result: common.Result) -> str:
    rows, full = result["rows"], result["full"]
    equal = sum(map(is_equal, rows))
    seconds = [figure(row["processor_seconds"]) for row in full]
    words = f"Of {len(rows)} programs {equal} are equal within 1%"
    if not full:
        return words + "."
    most = max(row["memory_bytes"] for row in full)
    return (
        f"{words}; at full size a dry run takes {listed(seconds)} s of a processor, and at most"
        f" {figure(most / MIB)} MiB of the host's memory."
    )


def notes(result: common.Result) -> Iterator[str]:
    """Say why programs are not equal."""
    for row in result["rows"]:
        if not row["equal"]:
            errors = [row[how]["error"] for how in ("real", "dry") if "error" in row[how]]
            yield f"{row['program']}: {'; '.join([row['explained'] or 'not explained', *errors])}"


def tables(result: common.Result) -> Iterator[Table]:
    yield Table(
        (
            text("program", "program"),
            text("equal", lambda row: "yes" if row["equal"] else "no"),
            text("dry runs", "draws"),
            text("peak in use (MiB)", _cell("peak_bytes", MIB)),
            text("reserved (MiB)", _cell("reserved_bytes", MIB)),
            text("simulated step (ms)", _cell("step_seconds", 1e-3)),
            text("moved (MiB)", _cell("moved_bytes", MIB)),
        ),
        result["rows"],
    )
    yield Table(
        (
            text("dry, at full size", "program"),
            quantity("processor", "processor_seconds", "s"),
            quantity("at most", "limit_seconds", "s"),
            quantity("memory", "memory_bytes", "MiB", per=MIB),
            quantity("at most", "limit_memory_bytes", "MiB", per=MIB),
        ),
        result["full"],
    )


BENCH = common.Bench("dry_runs", __doc__, answer, tables=tables, notes=notes)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Two programs, nothing at full size.")
@click.option("--only", "names", multiple=True, type=click.Choice(programs()))
@click.option("--dry-only", is_flag=True, help="Take the runs with arithmetic from results/.")
@click.option("--no-full", is_flag=True, help="Leave out the second table.")
@click.option("--one", hidden=True)
@click.option("--how", type=click.Choice(["dry", "real", "full"]), default="dry", hidden=True)
@common.json_option
def main(
    quick: bool,
    names: tuple[str, ...],
    dry_only: bool,
    no_full: bool,
    one: str | None,
    how: str,
    path: Path | None,
) -> None:
    if one:
        click.echo(json.dumps(run_full(one) if how == "full" else run(one, how == "dry")))
        return
    common.writable(path)
    chosen = list(names) or (["Kalman filters", "option prices"] if quick else programs())
    kept = {}
    if dry_only:
        rows = json.loads(RESULTS.read_text("utf-8"))["rows"]
        kept = {row["program"]: row["real"] for row in rows}
    found = list(_rows(chosen, kept))
    full = [] if quick or no_full else list(_full_rows())
    options = {"quick": quick, "programs": len(chosen), "gpu": GPU, "dry_only": dry_only}
    BENCH.finish(found, path, simulated=True, options=options, full=full)


if __name__ == "__main__":
    main()
