"""``umem run --budget SIZE``: what keeps a script to so much VRAM is chosen dry, and turned on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from dry_programs import EIGHT_LAYERS
from software_programs import needs_cupy, needs_software_gpu

from tests.cli.test_run import execute
from umem.cli import main
from umem.compat import find_package

needs_chainer = pytest.mark.skipif(find_package() is None, reason="no Chainer")

NETWORK = (
    EIGHT_LAYERS.replace("WIDTH", "256")
    + """
import numpy as np
np.random.seed(0)
model = Net()
model.to_device(sys.argv[1])
x = model.xp.ones((4096, 256), "f")
optimizer = chainer.optimizers.SGD()
optimizer.setup(model)
for step in range(5):
    optimizer.update(model, x)
print("loss", float(model(x[:8]).array))
"""
)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "network.py"
    path.write_text(NETWORK)
    return path


@needs_software_gpu
@needs_chainer
@pytest.mark.slow  # in CI the page how-to/run-within-a-budget does the same
def test_a_script_runs_for_real_within_what_was_chosen(script: Path, kernel_cache: Path) -> None:
    starts = "import subprocess\nsubprocess.run(['true'], check=True)\n"
    script.write_text(starts + script.read_text())  # the dry part stops there without --programs
    said = {}
    for asked in ([], ["--budget", "48MiB", "--programs", "run"]):
        ended = execute(
            "-m", "umem", "run", "--software", "t4", *asked, str(script), "@cupy:0",
            cwd=script.parent, XDG_CACHE_HOME=str(kernel_cache), CUPY_CACHE_DIR=str(kernel_cache),
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        said[bool(asked)] = ended
    chosen, peak = (line for line in said[True].stderr.splitlines() if "--budget 48MiB:" in line)
    assert re.search(r"--budget 48MiB: uses .+ a step, .+ by CuPy's pool \(simulated T4\)", chosen)
    assert "nothing" not in chosen and peak.endswith("within the budget")
    assert float(re.findall(r"the peak was ([\d.]+) MiB", peak)[0]) <= 48
    if "half" not in chosen and "accumulate" not in chosen:
        assert said[True].stdout == said[False].stdout


@pytest.mark.thorough
@needs_cupy
@needs_chainer
def test_a_script_on_numpy_is_told_of_recompute(script: Path) -> None:
    asked = ["run", "--software", "t4", "--budget", "48MiB", str(script), "@numpy"]
    result = CliRunner().invoke(main, asked)
    assert result.exit_code == 1
    assert "umem run --recompute 48MiB" in " ".join(result.output.split())


def test_what_does_not_go_with_a_budget_is_refused(script: Path) -> None:
    for words, said in (
        (["--budget", "lots"], "must be a size"),
        (["--budget", "1GiB", "--mode", "managed"], "--budget cannot be used with --mode"),
        (["--budget", "1GiB", "--recompute", "min"], "--budget cannot be used with --recompute"),
        (["--budget", "1GiB", "--dry", "t4"], "--budget cannot be used with --dry"),
        (["--gpu", "t4"], "--gpu needs --budget"),
        (["--software", "t44", "--budget", "1GiB"], "no GPU named"),
    ):
        result = CliRunner().invoke(main, ["run", *words, str(script), "@numpy"])
        assert result.exit_code in (1, 2) and said in " ".join(result.output.split()), result.output
