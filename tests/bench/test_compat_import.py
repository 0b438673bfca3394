"""The benchmark of the layer's import time runs and writes what it measured."""

from __future__ import annotations

import pytest
from bench_scripts import written

pytestmark = pytest.mark.thorough


def test_compat_import_quick(tmp_path):
    result, _ = written(tmp_path, "compat_import.py", "--quick")
    assert [row["condition"] for row in result["rows"]] == ["baseline", "layer"]
    assert all(len(row["seconds"]) == 3 for row in result["rows"])
    assert result["machine"] and result["versions"]["chainer"].startswith("7.8.")
