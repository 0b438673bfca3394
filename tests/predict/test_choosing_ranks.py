"""How many ranks: shares of a step, links, collectives, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import umem
from umem.cli import main
from umem.devices.specs import gpu_spec
from umem.errors import DataError, ScalingError, SizeError, TraceError
from umem.predict.ranks import (
    RankLink,
    all_reduce_seconds,
    ordered_sum_seconds,
    rank_link,
    shares_of,
)
from umem.trace import Access, Alloc, Free, Mark, Op

V100 = gpu_spec("v100-16gb")
NODES, ENTRIES = (300, 200, 301, 199), (2000, 1000, 2100, 900)
LINK = RankLink("test", 1e9, 1e-6, "a test")


class Plan:
    """Every part needs ten rows of each other rank's, and the last part twenty."""

    def __init__(self, ranks: int) -> None:
        size = len(NODES) // ranks
        self.ranks = tuple(range(r * size, (r + 1) * size) for r in range(ranks))
        self.rows = np.zeros((len(NODES), ranks), np.int64)
        for rank, run in enumerate(self.ranks):
            self.rows[:, rank] = [0 if part in run else 10 for part in range(len(NODES))]
        self.rows[-1] *= 2


class Parts:
    """A graph in four parts, of which nothing is known but numbers."""

    nodes, entries = NODES, ENTRIES

    def plan(self, ranks: int) -> Plan:
        if ranks > len(NODES):
            raise SizeError(f"{ranks} ranks for a graph in {len(NODES)} parts")
        return Plan(ranks)


def graph_step() -> umem.Trace:
    """A product with the adjacency, one with a weight, and an update."""
    n, entries = sum(NODES), sum(ENTRIES)
    sizes: dict[str, Any] = {
        "W": (64 * 64 * 4, "parameter"),
        "x": (n * 256, "input"),
        "values": (entries * 8, "input"),
        "starts": ((n + 1) * 4, "input"),
        "y": (n * 256, "activation"),
        "stack": (4 * 64 * 64 * 4, "gradient"),
        "m": (64 * 64 * 4, "state"),
    }
    labels = {"values": "PartAggregation.entries", "starts": "PartAggregation.starts"}
    labels |= {"stack": "PartLinearGrad"}
    events: list[Any] = []
    at = {}
    for number, (name, (nbytes, kind)) in enumerate(sizes.items()):
        at[name] = Access(number, 0, nbytes)
        events.append(Alloc(number, nbytes, kind, labels.get(name, name), kind != "activation"))
    reads = at["x"], at["values"], at["starts"]
    events.append(Op("PartAggregation", "forward", reads, (at["y"],), 4 * entries, 4 * entries))
    events[-1] = events[-1]._replace(workspace_bytes=0)
    linear = (at["y"], at["W"])
    events.append(Op("PartLinearGrad", "backward", linear, (at["stack"],), n, n))
    events[-1] = events[-1]._replace(workspace_bytes=301 * 256)
    events.append(Op("Adam", "update", (at["W"], at["m"]), (at["W"], at["m"]), 640, 640))
    events[-1] = events[-1]._replace(workspace_bytes=0)
    return umem.Trace([*events, Mark("step"), Free(1)])


def test_a_rank_has_its_rows_entries_and_parts_and_every_parameter() -> None:
    choice = umem.choose_ranks(graph_step(), (1, 2), V100, "nvlink", cut=Parts(), correct="off")
    row = 256
    own, entries = 500, 3000  # of either rank: 301 + 199 nodes, and 300 + 200
    adjacency = 8 * entries + 4 * (own + 1) * (2 + 2) + 11 * own
    first = adjacency + 4 * 20 + (10 + 20) * row  # sends 10 + 10 rows, gets 10 + 20
    weights = 64 * 64 * 4
    stack = 2 * weights
    tensors = 2 * own * row + 2 * weights + stack
    # PartLinearGrad needs a part's rows beside: 300 on the first rank, 301 on the second
    second = adjacency + 4 * 30 + (20 + 10) * row
    beside = max(first + 300 * row, second + 301 * row)
    assert choice.steps[1].peak_bytes == pytest.approx(tensors + beside, abs=8)
    assert choice.steps[0].peak_bytes > choice.steps[1].peak_bytes


def test_halo_bytes_are_the_rows_of_each_exchange() -> None:
    choice = umem.choose_ranks(graph_step(), (2, 1, 4), V100, "nvlink", cut=Parts())
    assert [step.ranks for step in choice.steps] == [1, 2, 4]
    assert choice.steps[1].sent_bytes == (20 * 256, 30 * 256)
    assert choice.steps[2].sent_bytes == (30 * 256, 30 * 256, 30 * 256, 60 * 256)


def test_an_exchange_takes_its_rounds_on_the_link_and_through_the_host() -> None:
    choice = umem.choose_ranks(graph_step(), (2,), V100, "1,10", cut=Parts())
    # two rounds: the first parts of both, 10 rows, then their second, of which the longest is 20
    staging = 1 / V100.host_in_bandwidth + 1 / V100.host_out_bandwidth  # type: ignore[operator]
    assert choice.steps[0].exchange_seconds == pytest.approx(
        2 * 10e-6 + 30 * 256 * (1 / 1e9 + staging)
    )


def test_sums_go_from_rank_to_rank_and_back() -> None:
    assert ordered_sum_seconds(LINK, 4, 1000) == pytest.approx(3 * 2e-6 + 2 * 2e-6)
    assert all_reduce_seconds(LINK, 4, 4000) == pytest.approx(6 * 2e-6)
    long = ordered_sum_seconds(LINK, 4, 10**9)
    assert long == pytest.approx(3 * (1 + 1e-6) + 5e-6 + 1.5, rel=1e-6)


def test_shares_add_up() -> None:
    for ranks in (1, 2, 4):
        shares = shares_of(Parts(), ranks)
        assert sum(share.nodes for share in shares) == sum(NODES)
        assert sum(share.entries for share in shares) == sum(ENTRIES)
        sent = sum(share.sent_rows for share in shares)
        assert sent == sum(share.received_rows for share in shares)


def batch_step(batch: int) -> umem.Trace:
    n = 4 * 1024
    tensors = [("W", n, "parameter"), ("m", n, "state"), ("x", batch * n, "input")]
    events: list[Any] = [
        Alloc(i, size, kind, name, True) for i, (name, size, kind) in enumerate(tensors)
    ]
    reads = tuple(Access(i, 0, size) for i, (_, size, _) in enumerate(tensors))
    events.append(Op("f", "forward", reads, (), 1000 * batch, 1000, workspace_bytes=0))
    return umem.Trace([*events, Mark("step")])


def test_a_batch_is_split_and_the_state_where_it_is_sharded() -> None:
    trace = umem.Trace.join([batch_step(8), batch_step(16)], (8, 16))
    plain = umem.choose_ranks(trace, (1, 2, 4), V100, "pcie4", size=64)
    n = 4096
    assert [step.peak_bytes for step in plain.steps] == [
        66 * n,
        34 * n + 2 * n,  # ChainerMN's two buffers
        18 * n + 2 * n,
    ]
    sharded = umem.choose_ranks(trace, (4,), V100, "pcie4", size=64, sharded=True)
    held = n // 4 + n // 4 + 2 * n  # state, a shard of the mean gradient, two buffers
    assert sharded.steps[0].peak_bytes == 16 * n + n + held
    assert plain.kind == "data" and plain.steps[0].sum_seconds == 0
    link = rank_link("pcie4", V100)
    assert plain.steps[2].sum_seconds == pytest.approx(all_reduce_seconds(link, 4, n))
    staging = 1 / V100.host_in_bandwidth + 1 / V100.host_out_bandwidth  # type: ignore[operator]
    assert sharded.steps[0].sum_seconds == pytest.approx(plain.steps[2].sum_seconds + n * staging)


def test_without_sizes_each_rank_takes_the_recorded_batch() -> None:
    choice = umem.choose_ranks(batch_step(8), (2,), V100, "100gbe")
    assert "recorded batch" in choice.steps[0].share
    assert choice.steps[0].peak_bytes == 12 * 4096


@pytest.mark.parametrize("ranks", [(0,), (-1, 2), (True,), (1.5,), ()])
def test_ranks_are_whole_numbers_from_1(ranks: Any) -> None:
    with pytest.raises(SizeError, match="number of ranks"):
        umem.choose_ranks(batch_step(8), ranks, V100, "pcie4")


def test_more_ranks_than_parts_or_samples_are_refused() -> None:
    with pytest.raises(SizeError, match="5 ranks for a graph in 4 parts"):
        umem.choose_ranks(graph_step(), (5,), V100, "pcie4", cut=Parts())
    trace = umem.Trace.join([batch_step(8), batch_step(16)], (8, 16))
    with pytest.raises(SizeError, match="17 ranks for a batch of 16"):
        umem.choose_ranks(trace, (17,), V100, "pcie4")


def test_a_cut_of_another_graph_is_refused() -> None:
    class Other(Parts):
        entries = (2000, 1000, 2100, 901)

    with pytest.raises(DataError, match="6,001 entries, and the trace is of another graph"):
        umem.choose_ranks(graph_step(), (2,), V100, "pcie4", cut=Other())
    with pytest.raises(TraceError, match="no graph convolution"):
        umem.choose_ranks(batch_step(8), (2,), V100, "pcie4", cut=Parts())


def test_a_larger_graph_follows_from_a_step_on_a_smaller_one() -> None:
    class Larger(Parts):
        nodes = tuple(10 * n for n in NODES)
        entries = tuple(10 * n for n in ENTRIES)

    asked: Any = {"correct": "off", "cut": Larger(), "recorded": Parts()}
    larger = umem.choose_ranks(graph_step(), (1,), V100, "pcie4", **asked).steps[0]
    small = umem.choose_ranks(graph_step(), (1,), V100, "pcie4", cut=Parts(), correct="off")
    fixed = 64 * 64 * 4 * 6  # weight, state, and a gradient for each of four parts
    grown = small.steps[0].peak_bytes - fixed
    assert larger.peak_bytes - fixed == pytest.approx(10 * grown, rel=1e-3)


def test_axes_without_a_batch_are_refused() -> None:
    points = [{"length": 8}, {"length": 16}]
    trace = umem.Trace.join([batch_step(8), batch_step(16)], points)
    with pytest.raises(ScalingError, match="split the axis 'batch'"):
        umem.choose_ranks(trace, (2,), V100, "pcie4")


@pytest.mark.parametrize("text", ["", "infiniband", "0,1", "1", "1,2,3", "nan,1", "a,b", "-1,2"])
def test_what_is_no_link_is_refused(text: str) -> None:
    with pytest.raises(SizeError, match="link"):
        rank_link(text, V100)


def test_a_link_is_known_measured_or_told(tmp_path: Path) -> None:
    assert rank_link("NVLink", V100).bandwidth == 0.8 * 150e9
    told = rank_link("11.8,16", V100)
    assert (told.bandwidth, told.latency_seconds) == (11.8e9, 16e-6)
    path = tmp_path / "link.json"
    path.write_text(json.dumps({"link": {"bandwidth": 5e9, "latency_seconds": 1e-6}}))
    assert rank_link(str(path), V100).bandwidth == 5e9
    for wrong in ("{}", "[1]", "no JSON", '{"link": {"bandwidth": 0, "latency_seconds": 0}}'):
        path.write_text(wrong)
        with pytest.raises(DataError):
            rank_link(str(path), V100)
    with pytest.raises(SizeError, match="T4 has no NVLink"):
        rank_link("nvlink", gpu_spec("t4"))


@pytest.fixture
def trace_file(tmp_path: Path) -> str:
    return str(batch_step(8).save(tmp_path / "step.umem.gz"))


def test_the_command_says_what_is_simulated(trace_file: str) -> None:
    told = ["ranks", trace_file, "-n", "1,2", "--link", "pcie4", "--gpu", "v100-16gb"]
    done = CliRunner().invoke(main, told)
    assert done.exit_code == 0 and "simulated" in done.output and "Kind: data" in done.output
    found = json.loads(CliRunner().invoke(main, [*told, "--json"]).output)
    assert found["simulated"] is True
    assert {"simulated_peak_bytes", "simulated_seconds"} <= found["steps"][0].keys()


def test_the_command_has_status_3_where_no_number_of_ranks_fits(tmp_path: Path) -> None:
    trace = str(batch_step(1024).save(tmp_path / "large.umem.gz"))
    told = ["ranks", trace, "-n", "1,2", "--link", "pcie4", "--vram", "4MiB"]
    done = CliRunner().invoke(main, told)
    assert done.exit_code == 3 and done.output.count("does not fit: paged") == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-n", "0"], "whole numbers from 1"),
        (["-n", "a"], "whole numbers from 1"),
        (["-n", "2"], "nvlink, pcie4, 100gbe, GB/s and microseconds"),
        (["--link", "pcie4"], "Missing option '-n'"),
        (["-n", "2", "--link", "string"], "no link named"),
        (["-n", "2", "--link", "pcie4", "--recorded", "x"], "--recorded needs --cut"),
        (["-n", "2", "--link", "pcie4", "--cut", "nowhere"], "no cut of a graph"),
    ],
)
def test_the_command_refuses_what_does_not_go_together(
    trace_file: str, words: list[str], said: str
) -> None:
    done = CliRunner().invoke(main, ["ranks", trace_file, *words])
    assert done.exit_code in (1, 2) and said in done.output
