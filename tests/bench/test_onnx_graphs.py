"""bench/onnx_graphs.py runs, and what a file says of a step is near what was recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_scripts import written

from umem.compat.installation import find_package

pytestmark = pytest.mark.thorough
pytest.importorskip("onnx")
if find_package("chainer") is None:
    pytest.skip("no Chainer", allow_module_level=True)


def test_files_say_what_recordings_say(tmp_path: Path) -> None:
    report, printed = written(tmp_path, "onnx_graphs.py", "--quick")
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
