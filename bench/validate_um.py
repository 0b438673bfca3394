"""How close is the model of unified memory to what was measured on real GPUs?

Each published figure is held against the same program, written down as the events of a trace
(um_programs.py, um_gcn.py) and replayed on the model of that GPU. Nothing is computed by a formula
here, and every constant comes from umem/_common/specs.py, the same for all rows.
Everything it prints is simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click
import common
from report_tables import Column, Row, Table, Value, figure, quantity, span, text
from um_gcn import GcnProgram, Sizes
from um_programs import (
    blocks,
    copy_from_host,
    fill,
    last_step,
    page_stride,
    prefetch_from_host,
    read_from_host,
    weight_stream,
)

from umem.devices import Mode, Policy
from umem.devices.virtual import Allocator, VirtualGPU
from umem.errors import OutOfMemoryError
from umem.trace import Trace
from umem.units import GIB

TITAN_V = "v100-16gb"  # not in the table; the V100 is the same chip on the same bus
GCN_GPU = "rtx-5090"
GCN_SOURCE = "eunomia-bpf/gpu_ext, workloads/pytorch: RTX 5090, PyTorch 2.9, CUDA 12.8"
WEIGHT_SOURCE = "eunomia-bpf/bpftime, example/gpu/prefetch: RTX 5090"
STRIDE_SOURCE = "public measurement: RTX 5090, one word a page"
P100_SOURCE = "public measurement: P100, PCIe 3"
TITAN_SOURCE = "Allen and Ge, SC 2021: Titan V, PCIe 3"


@dataclass(frozen=True)
class Case:
    """A figure: what the model says and what was measured; None is "out of memory" or unknown.

    ``tolerance`` is a share of the published figure; without one the row is only shown.
    """

    name: str
    case: str
    gpu: str
    unit: str
    model: float | None
    published: float | None
    source: str
    tolerance: float | None = None
    note: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def error(self) -> float | None:
        """The model over the published figure, less one."""
        if self.model is None or self.published is None:
            return None
        return self.model / self.published - 1

    @property
    def passed(self) -> bool | None:
        """Whether it is within its tolerance; None where it is not judged."""
        if self.tolerance is None:
            return None
        return self.error is not None and abs(self.error) <= self.tolerance

    def row(self) -> dict[str, Any]:
        """As the object that goes into the JSON."""
        return {
            "name": self.name,
            "case": self.case,
            "gpu": self.gpu,
            "unit": self.unit,
            "model": self.model,
            "published": self.published,
            "error_percent": _percent(self.error),
            "tolerance_percent": _percent(self.tolerance),
            "judged": self.tolerance is not None,
            "passed": self.passed,
            "simulated": True,
            "source": self.source,
            "note": self.note,
            **self.more,
        }


def _percent(share: float | None) -> float | None:
    return None if share is None else round(100 * share, 2)


# -- small programs ----------------------------------------------------------------------------


def p100_stream() -> Iterator[Case]:
    """A GPU reads 2 GiB that the host has written."""
    nbytes = 2 * GIB
    ways = (
        ("fault stream", read_from_host, "managed", 5.4, 0.10),
        ("prefetch", prefetch_from_host, "managed", 10.9, None),
        ("copy from pinned memory", copy_from_host, "unmanaged", 11.4, None),
    )
    for case, make, mode, published, tolerance in ways:
        rate = nbytes / last_step(make(nbytes), "p100-16gb", mode=mode) / 1e9
        yield Case("link", case, "p100-16gb", "GB/s", rate, published, P100_SOURCE, tolerance)


def titan_v_blocks() -> Iterator[Case]:
    """One eviction, and one batch of faults of one block and of eight (256 faults of 64 KiB)."""
    count, vram = 256, blocks(512)
    evicting = last_step(fill(blocks(count), vram), TITAN_V, vram=vram)
    roomy = last_step(fill(blocks(count), 0), TITAN_V, vram=vram)
    note = "on a V100: the same chip and bus"
    each = 1e3 * (evicting - roomy) / count
    yield Case("driver", "evict a block", TITAN_V, "ms", each, 0.188, TITAN_SOURCE, note=note)
    for number in (1, 8):
        model = 1e3 * last_step(read_from_host(blocks(number)), TITAN_V)
        published = 0.10 + 0.139 * blocks(number) / 1e6
        case = f"fault in {2 * number} MiB"
        yield Case("driver", case, TITAN_V, "ms", model, published, TITAN_SOURCE, note=note)


def weights() -> Iterator[Case]:
    """200 layers of 4096 x 11008 float32 for ten tokens: 36 GB a pass, over and over."""
    layers, rows, columns, tokens = 200, 4096, 11008, 10
    seconds = last_step(weight_stream(layers, rows, columns, tokens), GCN_GPU)
    rate = layers * rows * columns * 4 * tokens / seconds / 1e9
    yield Case("weight stream", "36 GB, 10 times", GCN_GPU, "GB/s", rate, 8.0, WEIGHT_SOURCE, 0.15)


def strides() -> Iterator[Case]:
    """A word in each page, for sets of 0.75 to 1.5 times VRAM."""
    figures = ((0.75, 25.3e9, 0.86), (1.0, 33.7e9, 137), (1.25, 42.1e9, 1931), (1.5, 50.5e9, 1973))
    for factor, nbytes, published in figures:
        model = 1e3 * last_step(page_stride(round(nbytes)), GCN_GPU)
        judged = factor > 1
        note = "" if judged else "in VRAM it depends on the access width and on what exactly fits"
        yield Case(
            "page stride",
            f"{factor} of VRAM",
            GCN_GPU,
            "ms",
            model,
            published,
            STRIDE_SOURCE,
            0.25 if judged else None,
            note,
        )


# -- the graph network -------------------------------------------------------------------------


@dataclass(frozen=True)
class How:
    """Where a program's memory comes from."""

    mode: Mode
    allocator: Allocator
    prefetch: bool = False

    def __str__(self) -> str:
        prefetch = " + prefetch" if self.prefetch else ""
        return f"{self.mode}{prefetch}, {'cached' if self.allocator == 'caching' else 'no cache'}"


CACHED, PLAIN = How("unmanaged", "caching"), How("unmanaged", "plain")
MANAGED, PREFETCHED = How("managed", "plain"), How("managed", "plain", prefetch=True)
JUDGED_NODES = (5_000_000, 8_000_000)
NO_ROOM = float("inf")
PUBLISHED_SECONDS: dict[How, dict[int, float]] = {
    CACHED: {1: 0.22, 3: 0.68, 5: 1.14, 7: 1.79, 8: NO_ROOM, 10: NO_ROOM},
    PLAIN: {1: 0.35, 3: 1.04, 5: 1.89, 7: 3.19, 8: NO_ROOM, 10: NO_ROOM},
    MANAGED: {5: 34.23, 7: 48.28, 8: 55.36, 10: 70.06, 12: 93.71, 15: 292.77},
    PREFETCHED: {5: 5.54, 7: 7.68, 8: 8.97, 10: 12.76, 12: 24.41, 15: 215.82},
}
"""Seconds an epoch, by millions of nodes."""
PUBLISHED_PEAKS = {8_000_000: 36.09, 10_000_000: 45.11}
FIRST_TOUCH = {5_000_000: 495.0}
"""Gigabytes an epoch: not measured, but what the published times were explained by."""


def network(nodes: int) -> Iterator[Case]:
    """Replay one size of the graph network, each way that has a published figure of it."""
    gcn = GcnProgram(Sizes(nodes))
    trace = gcn.program.trace
    for how, known in PUBLISHED_SECONDS.items():
        published = known.get(nodes // 1_000_000)
        if published is not None:
            yield _network_case(gcn, nodes, how, *_run(trace, how), published)


def _run(trace: Trace, how: How) -> tuple[VirtualGPU, bool]:
    """Run a trace as `umem.replay` does, with an allocator of its own; tell whether it fits."""
    gpu = VirtualGPU(GCN_GPU, allocator=how.allocator, backend=trace.backend)
    gpu.install(Policy(how.mode, None, how.prefetch), everywhere=True)
    try:
        for event in trace.events:
            gpu.on_event(event)
    except OutOfMemoryError:
        return gpu, False
    finally:
        gpu.model.driver.residency.forget()
    return gpu, True


def _network_case(
    gcn: GcnProgram, nodes: int, how: How, gpu: VirtualGPU, fits: bool, published: float
) -> Case:
    """Make the case of one run of the GCN: its replay beside the published time."""
    seconds = gpu.figures.step_seconds[-1] if fits else None
    measured = None if published == NO_ROOM else published
    peak = gcn.program.trace.peak_bytes
    more = {
        "nodes": nodes,
        "mode": how.mode,
        "allocator": how.allocator,
        "prefetch": how.prefetch,
        "factor": peak / gpu.vram_bytes,
        "model_seconds": seconds,
        "published_seconds": measured,
        "fits": fits,
        "published_fits": published != NO_ROOM,
        "peak_bytes": peak,
        "allocated_bytes_an_epoch": gcn.epoch_bytes,
        "migrated_in_bytes": gpu.figures.migrated_in_bytes,
        "migrated_out_bytes": gpu.figures.migrated_out_bytes,
    }
    judged = how in (MANAGED, PREFETCHED) and nodes in JUDGED_NODES
    return Case(
        "gcn",
        f"{nodes / 1e6:g}M nodes, {how}",
        GCN_GPU,
        "s",
        seconds,
        measured,
        GCN_SOURCE,
        0.10 if judged else None,
        more=more,
    )


def network_sizes(nodes: int) -> Iterator[Case]:
    """Peak and allocated bytes of one size: they check the program, not the model."""
    gcn = GcnProgram(Sizes(nodes))
    figures = (
        ("peak", PUBLISHED_PEAKS, gcn.program.trace.peak_bytes),
        ("allocated an epoch", FIRST_TOUCH, gcn.epoch_bytes),
    )
    for case, published, nbytes in figures:
        if nodes in published:
            yield Case(
                "gcn bytes",
                f"{nodes / 1e6:g}M nodes, {case}",
                GCN_GPU,
                "GB",
                nbytes / 1e9,
                published[nodes],
                GCN_SOURCE,
            )


# -- all of it ---------------------------------------------------------------------------------


def published_cases(quick: bool) -> Iterator[Case]:
    """Every published figure; the judged sizes alone where it must be quick."""
    for part in (p100_stream, titan_v_blocks, weights, strides):
        yield from part()
    sizes = sorted({n * 1_000_000 for known in PUBLISHED_SECONDS.values() for n in known})
    for nodes in JUDGED_NODES if quick else sizes:
        yield from network_sizes(nodes)
        yield from network(nodes)


# -- what it says -------------------------------------------------------------------------------


def answer(result: common.Result) -> str:
    judged = [row for row in result["rows"] if row["judged"]]
    errors = [abs(row["error_percent"]) for row in judged]
    return (
        f"{sum(row['passed'] for row in judged)} of the {len(judged)} figures that are judged are "
        f"within their tolerance, {span(errors, partial(figure, places=1))} % off."
    )


def by_unit(result: common.Result) -> Iterator[Table]:
    """Make a table a unit."""
    rows = result["rows"]
    for unit in dict.fromkeys(row["unit"] for row in rows):
        columns = (
            text("program", lambda row: f"{row['name']}: {row['case']}"),
            text("GPU", "gpu"),
            Column("model, simulated", _or_why("model", "fits"), unit),
            Column("published", _or_why("published", "published_fits"), unit),
            quantity("error", "error_percent", "%", places=1, signed=True),
            quantity("tolerance", "tolerance_percent", "%", places=0),
            text("judged", lambda row: {None: "no", True: "pass", False: "MISS"}[row["passed"]]),
        )
        yield Table(columns, [row for row in rows if row["unit"] == unit])


def _or_why(key: str, fits: str) -> Value:
    def cell(row: Row) -> str | None:
        if row[key] is not None:
            return figure(row[key])
        return "out of memory" if row.get(fits) is False else None

    return cell


def notes(result: common.Result) -> Iterator[str]:
    rows = result["rows"]
    yield from dict.fromkeys(f"{row['name']}: {row['note']}." for row in rows if row["note"])
    yield from sorted({f"Source: {row['source']}." for row in rows if row["source"]})


BENCH = common.Bench("validate_um", __doc__, answer, tables=by_unit, notes=notes)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Fewer sizes.")
@common.json_option
def main(quick: bool, path: Path | None) -> None:
    common.writable(path)
    rows = [case.row() for case in published_cases(quick)]
    BENCH.finish(rows, path, simulated=True, options={"quick": quick})


if __name__ == "__main__":
    main()
