"""What do the techniques save a training on NumPy, each alone and all together?

The network of examples/masked_lm trains, a process a technique, on the text that it comes with,
each technique switched on from outside. Beside it stands what was published in 2021 for RoBERTa
with 84 million parameters, batch 64, on a P100 of 16 GB, with a framework that is not Chainer.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

from dataclasses import asdict, replace
from pathlib import Path

import click
import common
from founding_parts.measuring import Measured, measure
from founding_parts.worker import Settings
from report_tables import figure, percent, quantity, span, text

MIB = 1 << 20
NETWORK = Settings(layers=6, hidden=384, length=128, vocabulary=8192, batch=64)
SMALL_NETWORK = Settings(layers=1, hidden=64, length=16, vocabulary=300, batch=16)


def techniques_of(network: Settings) -> tuple[Measured, ...]:
    part = network.batch // 16
    diet = {"budget": "min", "micro_batch": part, "small_states": True}
    return (
        Measured("base", 12_589, network),
        Measured("recomputation", 8_311, replace(network, budget="min")),
        Measured("accumulation, 16 x 4", 3_503, replace(network, micro_batch=part)),
        Measured("half precision", 10_119, replace(network, half=True)),
        Measured("8-bit Adam", 12_621, replace(network, small_states=True)),
        Measured("all but half precision", None, replace(network, **diet)),
        Measured("all", 2_873, replace(network, half=True, **diet)),
    )


def answer(result: common.Result) -> str:
    rows = {row["technique"]: row for row in result["rows"]}
    diet, everything = rows["all but half precision"], rows["all"]
    return (
        "Recomputation, accumulation and 8-bit Adam together take "
        f"{percent(diet['tensors_saved'])} less in tensors and "
        f"{percent(diet['process_saved'])} less in the process than the base, "
        f"at {figure(diet['time_ratio'])} times its time; with half precision, too, "
        f"{percent(everything['tensors_saved'])} and {percent(everything['process_saved'])} less."
    )


def notes(result: common.Result) -> list[str]:
    return [
        "Tensors: the most that arrays and Python's objects take in a settled step, by "
        "tracemalloc, with parameters, gradients, state and the text. Process: the largest "
        "resident memory of the whole run, the first steps included, less that before the "
        "network was built.",
        "Time: processor time on one thread, the techniques' steps in turn. That of half "
        "precision is NumPy's, which computes in single precision a tile at a time.",
        "Published: another framework, on a GPU, with 84 million parameters; the driver's count.",
    ]


BENCH = common.Bench(
    "founding_table-measured",
    __doc__,
    answer,
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
    notes=notes,
)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="A small network: the figures mean nothing.")
@click.option("--repeats", default=5, show_default=True, help="Measured steps of each.")
@common.json_option
def main(quick: bool, repeats: int, path: Path | None) -> None:
    common.writable(path)
    network = SMALL_NETWORK if quick else NETWORK
    every = techniques_of(network)
    rows = measure((every[0], *every[-2:]) if quick else every, repeats)
    BENCH.finish(rows, path, simulated=False, options={"quick": quick, **asdict(network)})


if __name__ == "__main__":
    main()
