"""bench/choose.py runs, and what it says of the choice is what umem.choose says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from umem.devices.specs import GPUS
from umem.techniques.registry import TECHNIQUES

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(find_spec("chainer") is None, reason="Chainer is not installed")


def test_it_times_a_choice_for_one_gpu_and_for_all(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    places = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "choose.py"), "--quick", "--json", str(path)],
        capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": places},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert report["bench"] == "choose" and report["simulated"] is True
    assert "simulated" in done.stdout
    one, every = report["rows"]
    assert one["techniques"] == len(TECHNIQUES)
    assert every["techniques"] == len(TECHNIQUES) * len(GPUS)
    assert 0 < one["fit"] < one["techniques"], "with too little VRAM some do not fit"
    assert 0 < one["cpu_seconds"] < every["cpu_seconds"]
    assert one["vram_bytes"] < one["peak_bytes"]
