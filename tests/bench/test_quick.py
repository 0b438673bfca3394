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

from umem.compat import find_package

pytestmark = pytest.mark.thorough
needs_chainer = pytest.mark.skipif(find_package() is None, reason="Chainer is not installed")
needs_linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
needs_cuts = pytest.mark.skipif(find_spec("pymetis") is None, reason="a graph is cut by pymetis")
CHECKS: list[Any] = []
Check = Callable[[dict[str, Any], str], None]


def quick(
    *options: str, script: str | None = None, needs: tuple[Any, ...] = ()
) -> Callable[[Check], Check]:
    """Run a script, that which a check is named after, with ``--quick`` and options; check it."""

    def add(check: Check) -> Check:
        name = check.__name__
        given = f"{script or name}.py", options, check
        CHECKS.append(pytest.param(*given, id=name, marks=needs))
        return check

    return add


@quick(needs=(needs_cupy, needs_compiler, needs_chainer))
def dry_runs(report: dict[str, Any], printed: str) -> None:
    assert [row["program"] for row in report["rows"]] == ["Kalman filters", "option prices"]
    assert all(row["equal"] and not row["explained"] for row in report["rows"])
    assert all(row["real"]["peak_bytes"] > 2**20 for row in report["rows"])
    assert "Of 2 programs 2 are equal within 1%" in printed


@quick(needs=(needs_cupy, needs_compiler, needs_chainer))
def software_gpu_turns(report: dict[str, Any], printed: str) -> None:
    assert [row["operation"] for row in report["rows"]][2:] == ["a new kernel, compiled"]
    for row in report["rows"]:
        assert row["seconds"].keys() == {"at once", "late", "not strict"}
        assert all(len(took) == 3 and min(took) > 0 for took in row["seconds"].values())
        assert row["ratios"].keys() == {"late", "not strict"}
    assert "late streams take" in printed and "(measured)" in printed


@quick(needs=(needs_cupy, needs_compiler, needs_chainer))
def choice_live(report: dict[str, Any], printed: str) -> None:
    (row,) = report["rows"]
    assert row["in_order"] and row["left"].keys() == {"nothing"}
    assert [line["technique"] for line in row["lines"]] == ["recompute min", "managed"]
    assert all(line["why_not"] is None for line in row["lines"])
    assert "2 of 2 lines that are said to fit train" in printed and "simulated" in printed


@quick(needs=(needs_cupy, needs_compiler, needs_chainer))
def batch_live(report: dict[str, Any], printed: str) -> None:
    (row,) = report["rows"]
    assert row["equal"] == "yes" and row["given"] < row["dry_batch"] == row["live_batch"]
    assert "In 1 of 1 networks it is" in printed and "simulated" in printed


@quick()
def data_cache(report: dict[str, Any], printed: str) -> None:
    parts = [row["part"] for row in report["rows"]]
    assert parts == ["time"] * 5 + ["waiting"] * 2
    assert all(row["most_us"] >= row["mean_us"] > 0 for row in report["rows"][:5])
    assert "With fetching ahead requests wait" in printed


@quick(
    "--codecs",
    script="data_cache",
    needs=(pytest.mark.skipif(find_spec("blosc2") is None, reason="no blosc2"),),
)
def codecs(report: dict[str, Any], printed: str) -> None:
    assert len(report["rows"]) == 15
    for row in report["rows"]:
        limit = 0.6 if row["kind"] in ("features", "pixels / 255", "counts") else 0.9
        assert row["ratio"] <= limit and row["decode_gb_a_second"] > 0
        assert len(row["decode_seconds_a_gb"]) == 2
    assert "features, pixels / 255 and counts shrink to" in printed


@quick(needs=(needs_compiler, needs_cupy))
def lookahead(report: dict[str, Any], printed: str) -> None:
    assert [row["of_vram"] for row in report["rows"]] == [1.5]
    for row in report["rows"]:
        assert row["bound_bytes"] <= row["told_bytes"] < row["managed_bytes"]
        assert row["of_managed"] < 0.8
        assert row["told_ms"] < row["advice_ms"]  # what choose finds tells no order
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
    assert "blocks are the fastest in 2 of 2" in printed and "simulated" in printed


@quick(needs=(needs_chainer,))
def dynamic(report: dict[str, Any], printed: str) -> None:
    rows = report["rows"]
    assert {row["budget"] for row in rows} == {"a tenth more", "half"} and len(rows) == 6
    assert all(row["identical"] == "yes" for row in rows)
    assert all(row["online_count"] > 0 for row in rows)
    assert all(row["peak_of_budget"] < 1.02 for row in rows if row["budget"] == "a tenth more")
    assert "TreeLSTM" in printed


@quick(needs=(needs_chainer, needs_linux))
def offload(report: dict[str, Any], printed: str) -> None:
    rows = {row["way"]: row for row in report["rows"]}
    assert rows["plain"]["saved_of_plain"] == 1
    assert rows["offload"]["identical"] == "yes"
    assert rows["offload"]["saved_mb"] < rows["plain"]["saved_mb"]
    assert "of what a plain step has saved in memory" in printed


@quick(needs=(needs_chainer, pytest.mark.skipif(find_spec("onnx") is None, reason="no onnx")))
def onnx_graphs(report: dict[str, Any], printed: str) -> None:
    networks = {row["network"]: row for row in report["rows"]}
    assert list(networks) == ["MLP", "autoencoder", "language model"]
    for row in networks.values():
        assert row["kept_bytes"] > 0 and row["peak_bytes"] > row["kept_bytes"]
        assert abs(row["kept"]) <= 0.02
        assert abs(row["peak"]) <= 0.05
    assert networks["MLP"]["kept"] == networks["MLP"]["peak"] == 0
    assert "Of 3 networks" in printed


@quick(needs=(needs_chainer,))
def overhead(report: dict[str, Any], printed: str) -> None:
    assert [row["workload"] for row in report["rows"]] == ["residual", "lstm"]
    assert [row["op_count"] for row in report["rows"]] == [293, 4995]
    for row in report["rows"]:
        assert set(row["seconds"]) == {"off", "record", "stacks", "watch", "live"}
        assert {len(seconds) for seconds in row["seconds"].values()} == {2}
        assert row["ratio_to_off"]["off"] == 1
        pairs = zip(row["seconds"]["live"], row["seconds"]["off"], strict=True)
        assert row["ratio_to_off"]["live"] == statistics.median(a / b for a, b in pairs)
    assert "times as long with a recorder" in printed


@quick(needs=(needs_chainer, needs_cuts))
def papers100m(report: dict[str, Any], printed: str) -> None:
    rows = {(row["like"], row["ranks"]): row for row in report["rows"]}
    assert rows.keys() == {(name, n) for name in ("communities", "R-MAT") for n in (32, 64, 128)}
    for ranks in (32, 64, 128):
        low, high = rows["communities", ranks], rows["R-MAT", ranks]
        assert low["halo"] < high["halo"] and low["sent_gib"] < high["sent_gib"]
    # a node's row of 128 numbers goes once for each of five exchanges
    mean = rows["R-MAT", 64]["halo"] * 111_059_956 / 64 * 5 * 128 * 4 / 2**30
    assert mean < rows["R-MAT", 64]["sent_gib"] < 3 * mean
    assert "simulated" in printed


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


@quick(needs=(needs_chainer,))
def low_precision(report: dict[str, Any], printed: str) -> None:
    assert len(report["rows"]) == 6
    for row in report["rows"]:
        assert row["network"] in ("language", "pictures") and abs(row["change"]) < 0.1
        assert (row["loss"] == row["whole"]) == (row["change"] == 0)
    assert any(row["change"] for row in report["rows"] if row["technique"] == "half precision")
    assert "with 8-bit states" in printed


@quick("--workspace", script="recompute", needs=(needs_chainer,))
def workspace(report: dict[str, Any], printed: str) -> None:
    rows = {(row["mode"], row["cap"]): row for row in report["rows"]}
    assert rows.keys() == {("plain", ""), ("min", ""), ("alone", "64KiB"), ("min", "64KiB")}
    assert all(row["identical"] == "yes" for row in rows.values())
    assert rows["alone", "64KiB"]["of_raw"] < 0.8
    assert rows["min", "64KiB"]["of_raw"] < rows["min", ""]["of_raw"]
    assert "small residual" in printed


@quick("--eight-bit", script="updates", needs=(needs_chainer,))
def small_states(report: dict[str, Any], printed: str) -> None:
    for row in report["rows"]:
        assert len(row["seconds"]) == 3 and row["ratio"] > 0
        if row["path"] != "Chainer":
            assert row["state_bytes"] <= (2.05 if row["rule"] == "Adam" else 1.03) * row["elements"]
            assert row["temporary_bytes"] < 2 << 20
    assert "Adam8bit keeps 2.03 bytes an element" in printed


@quick(needs=(needs_chainer,))
def updates(report: dict[str, Any], printed: str) -> None:
    from umem.chainer import CHUNKED_RULES

    assert {*CHUNKED_RULES, "AMSBound"} <= {row["rule"] for row in report["rows"]}
    for row in report["rows"]:
        assert len(row["seconds"]["whole"]) == len(row["seconds"]["chunked"]) == 3
        assert row["workspace_bytes"]["chunked"] < 1.5 * 2**20
        assert row["workspace_bytes"]["whole"] >= row["parameter_bytes"]
    assert "Adam takes" in printed


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
