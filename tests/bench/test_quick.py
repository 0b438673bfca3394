"""Benchmarks run in their quick form, and promises that a short run can keep are kept."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from bench_scripts import written
from mpi_programs import needs_ranks
from software_programs import needs_compiler, needs_cupy

from umem.compat.installation import find_package
from umem.trace.analysis.updating import CHUNKED_RULES

pytestmark = pytest.mark.thorough
needs_chainer = pytest.mark.skipif(find_package() is None, reason="Chainer is not installed")
needs_linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
needs_cuts = pytest.mark.skipif(find_spec("pymetis") is None, reason="a graph is cut by pymetis")
CHECKS: list[Any] = []
Check = Callable[[dict[str, Any], str], None]


def quick(*options: str, needs: tuple[Any, ...] = ()) -> Callable[[Check], Check]:
    """Run the script that a check is named after, with ``--quick`` and options, and check it."""

    def add(check: Check) -> Check:
        name = check.__name__
        CHECKS.append(pytest.param(f"{name}.py", options, check, id=name, marks=needs))
        return check

    return add


@quick(needs=(needs_chainer,))
def accumulation(report: dict[str, Any], printed: str) -> None:
    assert len(report["rows"]) == 4
    for row in report["rows"]:
        assert max(row["float64"]) <= 1e-12 and max(row["float32"]) <= 1e-5
        assert row["mean_of_means"] > 0.01 and row["refused"]
    assert "4 of 4 networks are within" in printed


@quick(needs=(needs_chainer,))
def batches(report: dict[str, Any], printed: str) -> None:
    assert "simulated" in printed
    assert len(report["rows"]) == 4
    for row in report["rows"]:
        assert row["passed"]
        assert row["batch"] == 0 or row["scaled"] == "fits, next not"


@quick("--only", "R-MAT", needs=(needs_ranks,))
def choose_ranks(report: dict[str, Any], printed: str) -> None:
    assert [row["ranks"] for row in report["rows"]] == [2, 4]
    for row in report["rows"]:
        assert row["bytes_exact"] == "yes"
        # of graphs so small 0.2 MB of Python's own objects are a part that shows
        assert -0.25 < row["said_mb"] - row["peak_mb"] < 0.05
    assert "bytes sent were exact in 2" in printed


@quick(needs=(needs_chainer,))
def compat_import(report: dict[str, Any], printed: str) -> None:
    assert [row["condition"] for row in report["rows"]] == ["baseline", "layer"]
    assert all(len(row["seconds"]) == 3 for row in report["rows"])
    assert report["machine"] and report["versions"]["chainer"].startswith("7.8.")


TABLES = {"chunks": 15, "rows": 60, "ways": 14}


@quick(needs=(pytest.mark.skipif(find_spec("blosc2") is None, reason="no blosc2"),))
def data_codecs(report: dict[str, Any], printed: str) -> None:
    tables = {name: [r for r in report["rows"] if r["table"] == name] for name in TABLES}
    assert {name: len(rows) for name, rows in tables.items()} == TABLES
    for row in tables["chunks"]:
        limit = 0.6 if row["kind"] in ("features", "pixels / 255", "counts") else 0.9
        assert row["ratio"] <= limit and row["decode_gb_a_second"]["one"] > 0
        assert len(row["decode_seconds_a_gb"]["two"]) == 2
    for row in tables["rows"]:
        singly, batch = row["decoded_for_used"]["single"], row["decoded_for_used"]["batch"]
        assert batch <= singly <= row["rows_a_block"] and row["ratio"] <= 1
        assert row["rows_a_block"] > 1 or singly <= 1
    assert "features, pixels / 255 and counts shrink to" in printed


@quick(needs=(needs_compiler, needs_cupy))
def lookahead(report: dict[str, Any], printed: str) -> None:
    assert [row["of_vram"] for row in report["rows"]] == [1.5, 3.0]
    for row in report["rows"]:
        assert row["bound_bytes"] <= row["told_bytes"] < row["managed_bytes"]
        assert row["of_managed"] < 0.8
    assert "simulated" in printed


@quick(needs=(needs_compiler, needs_cupy))
def blocks(report: dict[str, Any], printed: str) -> None:
    assert [row["loop"] for row in report["rows"]] == ["sum", "map", "stencil"]
    assert all(row["of_bound"] < 1.1 for row in report["rows"])
    assert "simulated" in printed


@quick(needs=(needs_compiler, needs_cupy))
def recipes(report: dict[str, Any], printed: str) -> None:
    assert [row["program"] for row in report["rows"]] == ["product", "k-means"]
    assert all(row["best"] == row["advised"] == "blocks" for row in report["rows"])
    assert "blocks are the quickest in 2 of 2" in printed and "simulated" in printed


@quick(needs=(needs_chainer,))
def dynamic(report: dict[str, Any], printed: str) -> None:
    rows = report["rows"]
    assert {row["budget"] for row in rows} == {"a tenth more", "half"} and len(rows) == 8
    assert all(row["identical"] == "yes" for row in rows)
    assert all(row["online_count"] > 0 for row in rows)
    assert all(row["peak_of_budget"] < 1.02 for row in rows if row["budget"] == "a tenth more")
    assert "TreeLSTM" in printed


@quick()
def import_time(report: dict[str, Any], printed: str) -> None:
    numpy, umem = report["rows"]
    assert [numpy["import"], umem["import"]] == ["numpy", "umem"]
    assert len(numpy["seconds"]) == len(umem["seconds"]) == 3
    assert numpy["added_seconds"] == 0
    assert umem["passed"] == (umem["added_seconds"] <= report["limit_seconds"] == 0.1)


@quick(needs=(needs_chainer, needs_linux))
def offload(report: dict[str, Any], printed: str) -> None:
    rows = {row["way"]: row for row in report["rows"]}
    assert rows["plain"]["saved_of_plain"] == 1 and rows["plain"]["verdict"] is None
    assert rows["offload"]["identical"] == "yes"
    assert rows["offload"]["saved_mb"] < rows["plain"]["saved_mb"]
    assert "of what a plain step has saved in memory" in printed


@quick(needs=(needs_chainer,))
def one_budget(report: dict[str, Any], printed: str) -> None:
    rows = {(row["model"], row["way"]): row for row in report["rows"]}
    assert all(row["simulated"] for row in rows.values())
    for model in {model for model, _ in rows}:
        again, both = rows[model, "recompute"]["seconds"], rows[model, "one plan"]["seconds"]
        assert both and (again is None or both <= again * (1 + 1e-9))
    for row in rows.values():
        assert row["seconds"] is None or row["seconds"] >= row["bound_seconds"] * (1 - 1e-9)
    assert "(simulated)" in printed


@quick(needs=(needs_chainer, pytest.mark.skipif(find_spec("onnx") is None, reason="no onnx")))
def onnx_graphs(report: dict[str, Any], printed: str) -> None:
    networks = {row["network"]: row for row in report["rows"] if row["table"] == "networks"}
    assert list(networks) == ["MLP", "autoencoder", "language model"]
    for row in networks.values():
        assert row["kept_bytes"] > 0 and row["peak_bytes"] > row["kept_bytes"]
        assert abs(row["kept"]) <= 0.02
        assert abs(row["peak"]) <= 0.05
        for plan in ("least", "middle"):
            own, carried = row[f"{plan}_own_bytes"], row[f"{plan}_from_file_bytes"]
            assert abs(carried / own - 1) <= 0.05
    assert networks["MLP"]["kept"] == networks["MLP"]["peak"] == 0
    assert "Of 3 networks" in printed


@quick(needs=(needs_chainer, needs_compiler, needs_cupy))
def overhead(report: dict[str, Any], printed: str) -> None:
    *on_numpy, on_cupy = report["rows"]
    assert [row["workload"] for row in on_numpy] == ["residual", "lstm"]
    assert [row["op_count"] for row in on_numpy] == [293, 4995]
    assert set(on_cupy["seconds"]) == {"off", "meter", "budget"}
    for row in on_numpy:
        assert set(row["seconds"]) == {"bare", "off", "record", "stacks", "watch", "live"}
        assert {len(seconds) for seconds in row["seconds"].values()} == {2}
        assert row["ratio_to_off"]["off"] == 1
        pairs = zip(row["seconds"]["live"], row["seconds"]["off"], strict=True)
        assert row["ratio_to_off"]["live"] == statistics.median(a / b for a, b in pairs)
    assert "times as long with a recorder" in printed


@quick(needs=(needs_ranks, needs_cuts))
def parallel_graph(report: dict[str, Any], printed: str) -> None:
    names = ("communities", "R-MAT", "half across")
    rows = {(row["graph"], row["ranks"]): row for row in report["rows"]}
    assert rows.keys() == {(name, ranks) for name in names for ranks in (1, 2)}
    assert all(row["identical"] == "yes" and row["as_planned"] == "yes" for row in report["rows"])
    for name in names:
        assert rows[name, 1]["sent_mb"] == 0 < rows[name, 2]["sent_mb"]
        assert rows[name, 2]["of_one"] < 0.9 < rows[name, 1]["of_one"] == 1
        assert len(rows[name, 2]["seconds"]) == 2
    assert "are the same bits in 6 of 6 rows" in printed


@quick(needs=(needs_cupy, needs_compiler))
def software_gpu_batches(report: dict[str, Any], printed: str) -> None:
    assert {row["count"] for row in report["rows"]} == {160, 40} and len(report["rows"]) == 22
    assert all(row["ratio"] > 0 and row["growth"] > 0 for row in report["rows"])
    assert "times NumPy's time in the median" in printed


@quick(needs=(needs_chainer,))
def updates(report: dict[str, Any], printed: str) -> None:
    assert {*CHUNKED_RULES, "AMSBound"} <= {row["rule"] for row in report["rows"]}
    for row in report["rows"]:
        assert len(row["seconds"]["whole"]) == len(row["seconds"]["chunked"]) == 3
        assert row["workspace_bytes"]["chunked"] < 1.5 * 2**20
        assert row["workspace_bytes"]["whole"] >= row["parameter_bytes"]
    assert "Adam takes" in printed


@quick(needs=(needs_chainer,))
def workspace(report: dict[str, Any], printed: str) -> None:
    rows = {(row["mode"], row["cap"]): row for row in report["rows"]}
    assert rows.keys() == {("plain", ""), ("min", ""), ("alone", "64KiB"), ("min", "64KiB")}
    assert all(row["identical"] == "yes" for row in rows.values())
    assert rows["alone", "64KiB"]["of_raw"] < 0.8
    assert rows["min", "64KiB"]["of_raw"] < rows["min", ""]["of_raw"]
    assert 0 < rows["alone", "64KiB"]["apart"] < 1e-3
    assert "small residual" in printed


@pytest.mark.parametrize(("script", "options", "check"), CHECKS)
def test_a_quick_run_keeps_what_is_promised(
    tmp_path: Path,
    kernel_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    options: tuple[str, ...],
    check: Check,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(kernel_cache))
    monkeypatch.setenv("CUPY_CACHE_DIR", str(kernel_cache))
    check(*written(tmp_path, script, "--quick", *options))
