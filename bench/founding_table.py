"""What does the dry run say of RoBERTa with each technique, beside what was measured in 2021?

The published run: 84 million parameters, batch 64, a P100 of 16 GB, MiB in use as the driver says,
with a framework that is not Chainer. Here examples/06_masked_lm.py runs dry at that size on that
GPU, a technique a run, each switched on by the example's own options: all figures of it are
simulated. The driver's figure also has the context of CUDA, which no row here has.

``--measure`` asks another question: what do the techniques save a training that really runs? The
same network trains smaller on NumPy, a process a technique, on the text that it comes with, each
technique switched on from outside.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import common
from founding_parts.measuring import Measured, measure
from founding_parts.worker import Settings
from report_tables import Column, figure, percent, quantity, span, text

from umem.units import MIB

# -- dry -------------------------------------------------------------------------------------------

GPU = "p100-16gb"
SCRIPT = common.HERE.parent / "examples" / "06_masked_lm.py"
PUBLISHED = {"layers": 6, "hidden": 768, "length": 128, "vocabulary": 52_000, "batch": 64}
"""RoBERTa's sizes in Hugging Face's tutorial "How to train a new language model from scratch"; its
514 positions are as many here as a line has tokens."""
SMALL = {"layers": 1, "hidden": 64, "length": 16, "vocabulary": 300, "batch": 16}
PARTS = 16
"""Parts of a batch under accumulation."""


@dataclass(frozen=True)
class Technique:
    """A row: what is done, by the example's options, and what the source measured."""

    name: str
    published_mib: int | None
    options: tuple[str, ...] = ()


def techniques(batch: int) -> tuple[Technique, ...]:
    """List the techniques of the published table, with its figures in MB."""
    recomputed, parts = ("--recompute", "min"), ("--micro-batch", str(batch // PARTS))
    combined = (*recomputed, *parts, "--adam8bit")
    return (
        Technique("base", 12_589),
        Technique("recomputation", 8_311, recomputed),
        Technique("accumulation, 16 x 4", 3_503, parts),
        Technique("half precision", 10_119, ("--half",)),
        Technique("8-bit Adam", 12_621, ("--adam8bit",)),
        Technique("all but half precision", None, combined),
        Technique("all", 2_873, (*combined, "--half")),
    )


def dry_run(technique: Technique, sizes: dict[str, int]) -> dict[str, Any]:
    """Run the example dry, and return what its report says.

    Raises:
        click.ClickException: it does not fit, or failed.
    """
    words = [f"--{name}={value}" for name, value in sizes.items()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        given = ["run", "--dry", GPU, "--json", str(path), str(SCRIPT), "--device", "@cupy:0"]
        done = subprocess.run(
            [sys.executable, "-m", "umem", *given, *words, *technique.options],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise click.ClickException(f"{technique.name}: {done.stderr.strip()[-2000:]}")
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def dry_rows(techniques_run: tuple[Technique, ...], sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Run each technique; the first is the base, which all others are compared with."""
    rows: list[dict[str, Any]] = []
    for technique in techniques_run:
        found = dry_run(technique, sizes)
        row = {
            "technique": technique.name, "published_mib": technique.published_mib,
            "simulated_peak_mib": found["peak_bytes"] / MIB,
            "simulated_reserved_mib": found["reserved_peak_bytes"] / MIB,
            "simulated_step_seconds": found["step_seconds"],
        }  # fmt: skip
        base = rows[0] if rows else row
        for name in ("published", "simulated_peak", "simulated_reserved"):
            mib = row[f"{name}_mib"]
            row[f"{name}_change"] = None if mib is None else mib / base[f"{name}_mib"] - 1
        row["time_ratio"] = row["simulated_step_seconds"] / base["simulated_step_seconds"]
        rows.append(row)
        click.echo(f"{technique.name}: {row['simulated_peak_mib']:.0f} MiB (simulated)", err=True)
    return rows


def answer(result: common.Result) -> str:
    """Word the answer to the question, from the rows of a result."""
    rows = [row for row in result["rows"] if row["published_mib"] is not None]
    points = [
        100 * abs(row["simulated_reserved_change"] - row["published_change"]) for row in rows[1:]
    ]
    of_published = [row["simulated_reserved_mib"] / row["published_mib"] for row in rows]
    return (
        f"What the pool reserves in a dry run (simulated) is {span(of_published)} of what was "
        f"published; by each technique it changes within {figure(max(points, default=0.0))} "
        "percentage points of the published change."
    )


def notes(result: common.Result) -> list[str]:
    return [
        "Peak: the most that arrays use. Reserved: the most that CuPy's pool takes. Published: the "
        "driver's count, with the context of CUDA and what another framework's allocator holds.",
        "The networks differ in their functions: gelu and the loss of the published run are one "
        "function each, those of the example are several of Chainer's. Half precision is the "
        "framework's autocast there, parameters in float16 with a master in float32 here.",
        "A P100 has no tensor cores: products of float16 take float32's time here.",
    ]


def change(head: str, name: str) -> Column:
    return quantity(head, f"{name}_change", "%", per=0.01, places=1, signed=True)


BENCH = common.Bench(
    "founding_table",
    __doc__,
    answer,
    (
        text("technique", "technique"),
        quantity("published", "published_mib", "MiB"),
        quantity("peak, simulated", "simulated_peak_mib", "MiB"),
        quantity("reserved, simulated", "simulated_reserved_mib", "MiB"),
        change("published change", "published"),
        change("change of peak", "simulated_peak"),
        change("of reserved", "simulated_reserved"),
        quantity("step, simulated", "simulated_step_seconds", "s"),
        quantity("of the base's", "time_ratio"),
    ),
    notes=notes,
)


# -- measured --------------------------------------------------------------------------------------

NETWORK = Settings(layers=6, hidden=384, length=128, vocabulary=8192, batch=64)
SMALL_NETWORK = Settings(layers=1, hidden=64, length=16, vocabulary=300, batch=16)


def measured_techniques(network: Settings) -> tuple[Measured, ...]:
    """List the same techniques for a network that NumPy trains."""
    part = network.batch // PARTS
    combined = {"budget": "min", "micro_batch": part, "small_states": True}
    return (
        Measured("base", 12_589, network),
        Measured("recomputation", 8_311, replace(network, budget="min")),
        Measured("accumulation, 16 x 4", 3_503, replace(network, micro_batch=part)),
        Measured("half precision", 10_119, replace(network, half=True)),
        Measured("8-bit Adam", 12_621, replace(network, small_states=True)),
        Measured("all but half precision", None, replace(network, **combined)),
        Measured("all", 2_873, replace(network, half=True, **combined)),
    )


def measured_answer(result: common.Result) -> str:
    """Word the answer to the question, from the rows of a result."""
    rows = {row["technique"]: row for row in result["rows"]}
    combined, everything = rows["all but half precision"], rows["all"]
    return (
        "Recomputation, accumulation and 8-bit Adam together take "
        f"{percent(combined['tensors_saved'])} less in tensors and "
        f"{percent(combined['process_saved'])} less in the process than the base, "
        f"at {figure(combined['time_ratio'])} times its time; with half precision, too, "
        f"{percent(everything['tensors_saved'])} and {percent(everything['process_saved'])} less."
    )


def measured_notes(result: common.Result) -> list[str]:
    """List how the figures were measured."""
    return [
        "Tensors: the most that arrays and Python's objects take in a settled step, by "
        "tracemalloc, with parameters, gradients, state and the text. Process: the largest "
        "resident memory of the whole run, the first steps included, less that before the "
        "network was built.",
        "Time: processor time on one thread, the techniques' steps in turn. That of half "
        "precision is NumPy's, which computes in single precision a tile at a time.",
        "Published: another framework, on a GPU, with 84 million parameters; the driver's count.",
    ]


MEASURED = common.Bench(
    "founding_table-measured",
    "What do the techniques save a training on NumPy, each alone and all together?",
    measured_answer,
    (
        text("technique", "technique"),
        quantity("tensors", "tensor_bytes", "MiB", per=MIB),
        quantity("process", "process_bytes", "MiB", per=MIB),
        quantity("published less", "published_saved", "%", per=0.01, places=1),
        quantity("less tensors", "tensors_saved", "%", per=0.01, places=1),
        quantity("less in the process", "process_saved", "%", per=0.01, places=1),
        quantity("time, of the base", "time_ratio"),
        text("least to most", lambda row: span((row["ratio_low"], row["ratio_high"]))),
    ),
    notes=measured_notes,
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="A small network: the figures mean nothing.")
@click.option("--measure", "is_measured", is_flag=True, help="Train on NumPy, and measure.")
@click.option("--repeats", default=5, show_default=True, help="Measured steps of each.")
@common.json_option
def main(quick: bool, is_measured: bool, repeats: int, path: Path | None) -> None:
    """Measure, print the tables, and write the result."""
    common.writable(path)
    if is_measured:
        network = SMALL_NETWORK if quick else NETWORK
        every = measured_techniques(network)
        found = measure((every[0], *every[-2:]) if quick else every, repeats)
        MEASURED.finish(found, path, simulated=False, options={"quick": quick, **asdict(network)})
        return
    sizes = SMALL if quick else PUBLISHED
    techniques_run = techniques(sizes["batch"])
    rows = dry_rows(techniques_run[:2] if quick else techniques_run, sizes)
    BENCH.finish(rows, path, simulated=True, options={"quick": quick, "gpu": GPU, **sizes})


if __name__ == "__main__":
    main()
