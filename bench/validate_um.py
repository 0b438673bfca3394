"""How close is the model of unified memory to what was measured on real GPUs?

Each published figure is held against the same program, written down as the events of a trace
(um_programs.py, um_gcn.py) and replayed on the model of that GPU. Nothing is computed by a formula
here, and every constant comes from umem/devices/specs.py, the same for all rows.

With --nodes, --mode, --allocator or --prefetch it shows the graph network in that configuration
instead. Everything it prints is simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import common
import um_views as views
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

import umem
from umem.devices.specs import COSTS, gpu_spec
from umem.predict.replaying import Replay
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


def geometric_means() -> Iterator[Case]:
    """A suite of many programs; none of them is written down here, so nothing is modelled."""
    note = "not modelled: a mean over a suite of programs that is not written down here"
    for case, published in (("untuned", -34.0), ("with prefetch", 0.7)):
        case = f"in memory, over cudaMalloc, {case}"
        source = "public measurement, geometric mean over a suite: GTX 1080 Ti"
        yield Case("suite", case, "gtx-1080-ti", "%", None, published, source, note=note)


# -- the graph network -------------------------------------------------------------------------


@dataclass(frozen=True)
class How:
    """Where a program's memory comes from."""

    mode: str
    allocator: str
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


def network(nodes: int, ways: Sequence[How], band: bool) -> Iterator[Case]:
    """One size of the graph network, each way."""
    gcn = GcnProgram(Sizes(nodes))
    trace = gcn.program.trace
    for how in ways:
        found = _replay(trace, how)
        published = PUBLISHED_SECONDS.get(how, {}).get(nodes // 1_000_000)
        if nodes % 1_000_000:
            published = None
        judged = how in (MANAGED, PREFETCHED) and nodes in JUDGED_NODES
        yield _network_case(gcn, nodes, how, found, published, 0.10 if judged else None, band)


def _replay(trace: umem.Trace, how: How, **more: Any) -> Replay:
    return umem.replay(
        trace, GCN_GPU, how.mode, prefetch=how.prefetch, allocator=how.allocator, **more
    )


def _network_case(
    gcn: GcnProgram,
    nodes: int,
    how: How,
    found: Replay,
    published: float | None,
    tolerance: float | None,
    band: bool,
) -> Case:
    seconds = found.figures.step_seconds[-1] if found.fits else None
    measured = None if published in (None, NO_ROOM) else published
    peak = gcn.program.trace.peak_bytes
    factor = peak / found.vram_bytes
    wide = _band(gcn.program.trace, how, seconds) if band and seconds and factor > 1 else None
    more = {
        "nodes": nodes,
        "mode": how.mode,
        "allocator": how.allocator,
        "prefetch": how.prefetch,
        "factor": factor,
        "model_seconds": seconds,
        "published_seconds": measured,
        "band_seconds": wide,
        "fits": found.fits,
        "published_fits": None if published is None else published != NO_ROOM,
        "peak_bytes": peak,
        "allocated_bytes_an_epoch": gcn.epoch_bytes,
        "migrated_in_bytes": found.figures.migrated_in_bytes,
        "migrated_out_bytes": found.figures.migrated_out_bytes,
    }
    return Case(
        "gcn",
        f"{nodes / 1e6:g}M nodes, {how}",
        GCN_GPU,
        "s",
        seconds,
        measured,
        GCN_SOURCE if published else "",
        tolerance,
        more=more,
    )


def _band(trace: umem.Trace, how: How, seconds: float) -> list[float]:
    """Least and most with 5% more or less VRAM, and faults of an ordinary or a random kernel."""
    vram = gpu_spec(GCN_GPU).usable_bytes
    values = [seconds]
    for share, fault in ((1.05, COSTS.fault_stream), (0.95, COSTS.fault_random)):
        costs = replace(COSTS, fault_stream=fault, fault_random=fault)
        found = _replay(trace, how, vram=round(share * vram), costs=costs)
        values.append(found.figures.step_seconds[-1])
    return [min(values), max(values)]


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
    for part in (p100_stream, titan_v_blocks, weights, strides, geometric_means):
        yield from part()
    sizes = sorted({n * 1_000_000 for known in PUBLISHED_SECONDS.values() for n in known})
    for nodes in JUDGED_NODES if quick else sizes:
        yield from network_sizes(nodes)
        ways = [how for how, known in PUBLISHED_SECONDS.items() if nodes // 1_000_000 in known]
        yield from network(nodes, ways, band=not quick)


BENCH = common.Bench("validate_um", __doc__, views.answer, tables=views.by_unit, notes=views.notes)


@click.command(help=__doc__)
@click.option(
    "--nodes",
    type=click.IntRange(10_000, 100_000_000),
    multiple=True,
    help="The graph network with so many nodes; may be given more than once.",
)
@click.option("--mode", type=click.Choice(["managed", "unmanaged"]), help="Default: managed.")
@click.option("--allocator", type=click.Choice(["caching", "plain"]), help="Default: plain.")
@click.option("--prefetch", is_flag=True, help="Prefetch memory as it is allocated.")
@click.option("--quick", is_flag=True, help="Fewer sizes, and no bands.")
@common.json_option
def main(
    nodes: tuple[int, ...],
    mode: str | None,
    allocator: str | None,
    prefetch: bool,
    quick: bool,
    path: Path | None,
) -> None:
    if prefetch and mode == "unmanaged":
        raise click.UsageError("--prefetch is for managed memory; unmanaged memory never moves")
    if nodes or mode or allocator or prefetch:
        how = How(mode or "managed", allocator or "plain", prefetch)
        sizes = dict.fromkeys(nodes or JUDGED_NODES)
        cases = [case for n in sizes for case in network(n, [how], band=not quick)]
    else:
        cases = list(published_cases(quick))
    options = dict(
        nodes=list(nodes), mode=mode, allocator=allocator, prefetch=prefetch, quick=quick
    )
    BENCH.finish([case.row() for case in cases], path, simulated=True, options=options)


if __name__ == "__main__":
    main()
