"""Does a dry run say of memory and time what the run with arithmetic says?

Forty programs on a software T4, each in a process of its own with its arithmetic and dry, at the
same size: Chainer's networks, umem's techniques, and plain CuPy. Hashes are fixed, addresses are
not randomised, the collector is off, and the chunks of CuPy's pool are put in the order in which
they were made: else the pool takes free chunks in an order that follows from all objects of the
process, so that what it reserves and which blocks move differ by some percent, dry or not. A
program is equal where its peak in use, reserved bytes, the simulated seconds of its last step and
the moved bytes are all within 1%. Where a program decides by values, the dry run may be told one by
``--answer``; its row says so. The runs with arithmetic are recorded once: ``--dry-only`` compares
new dry runs with the rows that results/ has, but for those of ``--again``.

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
import runpy
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
ANSWERS = {"conjugate gradients": ("arrays.py", ".cg(", 0.0)}
"""What a user who knows it would type as ``--answer FILE:LINE=VALUE``; a part of the line here."""
EXPLAINED = {
    "conjugate gradients": "how many rounds it takes follows from the residual, which is 0 in a dry"
    " run; answered with 0, its tests of convergence say no, and all rounds are run",
    "unique, argsort, masks": "all numbers are taken as distinct and all flags as set: an upper"
    " bound",
}
"""Why a program is not equal without an answer, by its name."""


class Limits(NamedTuple):
    """What a dry run at full size may take."""

    limit_seconds: float
    limit_memory_bytes: int | None


TRIED = 11
"""So many of the techniques that `umem choose` tries, the first ones."""
SCRIPT = common.HERE / "dry_parts" / "resnet50.py"
FULL = {
    "ResNet50, 128 x 224 px": Limits(4.0, 600 * MIB),
    "1.1 billion parameters, managed, three steps": Limits(8.0, 600 * MIB),
    "50 GiB of CuPy arrays": Limits(1.5, 150 * MIB),
    f"choose: {TRIED} techniques, ResNet50, 32 x 224 px": Limits(150.0, None),
}


# -- one program, in a process of its own ------------------------------------------------------


def run(name: str, dry: bool) -> dict[str, Any]:
    """Run a program and return its figures."""
    setting = SETTINGS.get(name, Setting())
    gpu = umem.software_gpu(GPU, vram=setting.vram, force=True, dry=dry)
    importlib.import_module("umem.chainer")  # before Chainer
    import cupy
    import numpy as np
    from dry_parts import arrays, chunk_order, trained

    gc.collect()
    gc.disable()
    chunk_order.fix()
    if dry:
        gpu._runtime.answers.update(answers_of(name))
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
    elif name.startswith("choose"):
        _choose()
    else:
        _billion()
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "processor_seconds": sum(each.ru_utime + each.ru_stime for each in used),
        "memory_bytes": max(each.ru_maxrss for each in used) * 1024,
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
    sys.argv = [str(SCRIPT), "128", "2"]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def _choose() -> None:
    from umem.choosing import TECHNIQUES, DryProgram, choose_for

    program = DryProgram(str(SCRIPT), ("32", "20"), "t4", "8GiB")
    found = choose_for(program, techniques=TECHNIQUES[:TRIED])
    assert found.best is not None


def _billion() -> None:
    """Train a network of 1.1 billion parameters for three steps, dry, in managed memory."""
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


def child(*arguments: str) -> dict[str, Any]:
    """Run this script in a process whose hashes are always the same.

    So are its addresses where there is ``setarch``.
    """
    setarch = shutil.which("setarch")
    env = {**os.environ, **dict.fromkeys(THREADS, "1"), "PYTHONHASHSEED": "0"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # modules are compiled once, as where it is installed
    done = subprocess.run(
        [*([setarch, "-R"] if setarch else []), sys.executable, __file__, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=env,
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


def answers_of(name: str) -> dict[str, float]:
    """Return a program's answers by file and line."""
    if name not in ANSWERS:
        return {}
    file, part, value = ANSWERS[name]
    lines = (common.HERE / "dry_parts" / file).read_text("utf-8").splitlines()
    return {f"{file}:{number}": value for number, line in enumerate(lines, 1) if part in line}


def is_equal(row: Row) -> bool:
    """Tell whether all figures of a row are within 1%, dry beside real."""
    return not _errors(row) and all(_near(row, key) for key in FIGURES)


def _errors(row: Row) -> list[str]:
    return [row[how]["error"] for how in ("real", "dry") if "error" in row[how]]


def _rows(names: list[str], kept: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row a program: run for real, unless that is kept, and run dry."""
    for name in names:
        real = kept.get(name) or child("--one", name, "--how", "real")
        dry = child("--one", name, "--how", "dry")
        row = {"program": name, "real": real, "dry": dry, "answers": answers_of(name)}
        row["equal"] = is_equal(row)
        is_plain = row["equal"] and not row["answers"]
        row["explained"] = "" if is_plain else EXPLAINED.get(name, "")
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
        if _errors(row):
            return "error"
        real, dry = (figure(row[how][key] / unit) for how in ("real", "dry"))
        return real if _near(row, key) else f"{real}, dry {dry}"

    return cell


def _near(row: Row, key: str) -> bool:
    real = row["real"][key]
    return bool(abs(row["dry"][key] - real) <= TOLERANCE * real)


def answer(result: common.Result) -> str:
    """Word the answer to the question, from the rows of a result."""
    rows, full = result["rows"], result["full"]
    equal = [row for row in rows if is_equal(row)]
    answered = sum(bool(row["answers"]) for row in equal)
    with_answer = f", {answered} of them with an answer" if answered else ""
    *alone, choose = [figure(row["processor_seconds"]) for row in full] or [""]
    real, dry = (
        figure(sum(row[how].get("processor_seconds", 0) for row in rows)) for how in ("real", "dry")
    )
    words = (
        f"Of {len(rows)} programs {len(equal)} are equal within 1%{with_answer}, in {dry} s of a"
        f" processor and not {real}, imports left out"
    )
    if not full:
        return words + "."
    most = max(row["memory_bytes"] for row in full)
    return (
        f"{words}; at full size a dry run takes {listed(alone)} s of a processor, umem.choose with"
        f" {TRIED} techniques {choose}, and at most {figure(most / MIB)} MiB of the host's memory."
    )


def notes(result: common.Result) -> Iterator[str]:
    """Say why programs are not equal, and what was answered."""
    for row in result["rows"]:
        answered = [
            f"`--answer {place}={value:g}` was given" for place, value in row["answers"].items()
        ]
        if not is_equal(row) or answered:
            parts = [row["explained"] or "not explained", *answered, *_errors(row)]
            yield f"{row['program']}: {'; '.join(parts)}"


def _equal(row: Row) -> str:
    if not is_equal(row):
        return "no"
    return "with an answer" if row["answers"] else "yes"


def _limit(row: Row) -> str:
    limit = row["limit_memory_bytes"]
    return "" if limit is None else figure(limit / MIB)


def tables(result: common.Result) -> Iterator[Table]:
    """Make the tables of a result."""
    yield Table(
        (
            text("program", "program"),
            text("equal", _equal),
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
            text("at most (MiB)", _limit),
        ),
        result["full"],
    )


BENCH = common.Bench("dry_runs", __doc__, answer, tables=tables, notes=notes)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Two programs, nothing at full size.")
@click.option("--only", "names", multiple=True, type=click.Choice(programs()))
@click.option("--dry-only", is_flag=True, help="Take the runs with arithmetic from results/.")
@click.option(
    "--again", multiple=True, type=click.Choice(programs()), help="With its arithmetic again."
)
@click.option("--no-full", is_flag=True, help="Leave out the second table.")
@click.option("--one", hidden=True)
@click.option("--how", type=click.Choice(["dry", "real", "full"]), default="dry", hidden=True)
@common.json_option
def main(
    quick: bool,
    names: tuple[str, ...],
    dry_only: bool,
    again: tuple[str, ...],
    no_full: bool,
    one: str | None,
    how: str,
    path: Path | None,
) -> None:
    """Measure, print the tables, and write the result."""
    if one:
        click.echo(json.dumps(run_full(one) if how == "full" else run(one, how == "dry")))
        return
    common.writable(path)
    chosen = list(names) or (["Kalman filters", "option prices"] if quick else programs())
    kept = {}
    if dry_only:
        rows = json.loads(RESULTS.read_text("utf-8"))["rows"]
        kept = {row["program"]: row["real"] for row in rows if row["program"] not in again}
    found = list(_rows(chosen, kept))
    full = [] if quick or no_full else list(_full_rows())
    options = {"quick": quick, "programs": len(chosen), "gpu": GPU, "dry_only": dry_only}
    options["again"] = list(again)
    BENCH.finish(found, path, simulated=True, options=options, full=full)


if __name__ == "__main__":
    main()
