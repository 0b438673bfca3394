"""Traces of all ranks of a run: which files they are, what is said of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from mpi_programs import needs_ranks, run_ranks

import umem
from umem.cli import main
from umem.errors import TraceError
from umem.graphs import communities, cut
from umem.trace import Access, Alloc, Mark, Op
from umem.trace.analysis.rank_traces import rank_files

TRAIN = """
import json, sys, tracemalloc
from pathlib import Path
import umem.chainer
import chainer
import numpy as np
import umem
from mpi4py import MPI

folder, out = Path(sys.argv[1]), Path(sys.argv[2])
comm = MPI.COMM_WORLD
graph = umem.chainer.ParallelGraph(folder, comm)
model = umem.chainer.ParallelGCN(comm, graph.feature_count, 12, graph.class_count)
optimizer = chainer.optimizers.Adam(0.01).setup(model)
features, labels = graph.load_features(), graph.labels_where(graph.train_mask)

def step():
    optimizer.update(lambda: graph.cross_entropy(model(graph, features), labels))

step()
before = graph.ranks.sent_bytes["halo"]
with umem.record() as recorder:
    step()
sent = graph.ranks.sent_bytes["halo"] - before
recorder.trace.save(out / f"run.rank{comm.rank}.umem.gz")
(out / f"{comm.rank}.json").write_text(json.dumps(sent))
"""


def rank_trace(nodes: int, sent_rows: int) -> umem.Trace:
    """Two products with the adjacency, 64 and 16 columns wide."""
    sizes = [
        (nodes * 256, "x", "input"),
        ((nodes + 1) * 4, "PartAggregation.starts", "input"),
        (sent_rows * 4, "PartAggregation.sent", "input"),
        (nodes * 256, "y", "activation"),
        (nodes * 64, "z", "activation"),
    ]
    events: list[Any] = [Alloc(i, n, kind, label, True) for i, (n, label, kind) in enumerate(sizes)]
    at = [Access(i, 0, n) for i, (n, _, _) in enumerate(sizes)]
    for made in (3, 4):
        events.append(Op("PartAggregation", "forward", (at[0], at[1]), (at[made],), 1, 1))
    return umem.Trace([*events, Mark("step")])


def saved(folder: Path, **shapes: tuple[int, int]) -> list[Path]:
    """Files of ranks, by the middle of their names."""
    return [
        rank_trace(*shape).save(folder / f"run.{name}.umem.gz") for name, shape in shapes.items()
    ]


def test_the_ranks_of_a_folder_are_shown_beside_each_other(tmp_path: Path) -> None:
    saved(tmp_path, rank1=(500, 7), rank0=(300, 5), rank10=(1, 0), **{
        f"rank{n}": (10, 1) for n in range(2, 10)
    })  # fmt: skip
    done = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "11 ranks: rank 1 has the largest peak" in done.output
    assert "PartAggregation" in done.output
    found = json.loads(CliRunner().invoke(main, ["report", str(tmp_path), "--json"]).output)
    assert [row["rank"] for row in found["ranks"]] == list(range(11))
    assert found["ranks"][0]["sent_bytes"] == 5 * (256 + 64)
    assert found["ranks"][1]["sent_bytes"] == 7 * (256 + 64)
    assert found["sent_bytes"] == (5 + 7 + 8) * (256 + 64)
    assert found["peak_bytes"] == 500 * (256 + 256 + 64) + 501 * 4 + 28


def test_two_ranks_are_no_comparison(tmp_path: Path) -> None:
    paths = [str(path) for path in saved(tmp_path, rank1=(5, 1), rank0=(3, 1))]
    done = CliRunner().invoke(main, ["report", *paths])
    assert done.exit_code == 0 and "2 ranks: rank 1 has the largest peak" in done.output


def test_what_is_sent_is_unknown_without_a_graph_in_parts(tmp_path: Path) -> None:
    for rank in (0, 1):
        umem.Trace([Alloc(0, 64, "input", "x", True)]).save(tmp_path / f"a.rank{rank}.umem.gz")
    found = json.loads(CliRunner().invoke(main, ["report", str(tmp_path), "--json"]).output)
    assert found["sent_bytes"] is None and found["ranks"][0]["sent_bytes"] is None


def test_other_files_are_no_ranks(tmp_path: Path) -> None:
    paths = [rank_trace(3, 1).save(tmp_path / f"{name}.umem.gz") for name in "abc"]
    assert rank_files(paths[:1]) is None and rank_files(paths[:2]) is None
    done = CliRunner().invoke(main, ["report", *map(str, paths)])
    assert done.exit_code == 2 and "got 3" in done.output


def test_a_missing_rank_another_run_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    assert rank_files([tmp_path]) is None  # and is refused as a folder is
    paths = saved(tmp_path, rank0=(3, 1), rank2=(3, 1))
    with pytest.raises(TraceError, match="missing: 1"):
        rank_files(paths)
    (tmp_path / "one").mkdir()
    saved(tmp_path / "one", rank1=(3, 1))
    with pytest.raises(TraceError, match="missing: 0"):
        rank_files([tmp_path / "one"])
    with pytest.raises(TraceError, match="several runs"):
        rank_files([paths[0], rank_trace(3, 1).save(tmp_path / "other.rank1.umem.gz")])
    done = CliRunner().invoke(main, ["report", str(tmp_path), "--html", str(tmp_path / "x.html")])
    assert done.exit_code != 0 and not (tmp_path / "x.html").exists()


@needs_ranks
@pytest.mark.thorough
def test_what_a_report_says_was_sent_is_what_was_sent(tmp_path: Path) -> None:
    cut(communities(600, 6, 3000, across=0.1, seed=2, features=9, classes=4), 7, tmp_path / "cut")
    out = tmp_path / "out"
    out.mkdir()
    done = run_ranks(3, TRAIN, tmp_path / "cut", out)
    assert done.returncode == 0, done.stderr
    sent = [json.loads((out / f"{rank}.json").read_text()) for rank in range(3)]
    said = CliRunner().invoke(main, ["report", str(out), "--json"])
    assert [row["sent_bytes"] for row in json.loads(said.output)["ranks"]] == sent and min(sent) > 0
    shown = CliRunner().invoke(main, ["report", str(out)]).output
    assert "PartAggregation" in shown and "PartLinear" in shown
