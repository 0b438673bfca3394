"""Every example runs as a program, on a virtual GPU where there is no other, and stays short."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import python
from project import ROOT
from ranks import needs_ranks, start_file
from software_programs import needs_compiler, needs_cupy

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ON_VIRTUAL = {"03_gcn": ["--device", "virtual:v100-16gb"]}
ON_NUMPY = (
    "04_before_renting",
    "05_budget",
    "06_masked_lm",
    "07_a_billion",
    "08_ranks",
    "09_graph_in_parts",
    "10_small_from_large",
)


def run(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python(path, *arguments, timeout=300)


def umem_command(*words: str, status: int = 0) -> str:
    """What the command prints on standard output, in umem's own folder."""
    done = python("-m", "umem", *words, cwd=ROOT)
    assert done.returncode == status, done.stderr
    return done.stdout


@needs_cupy
@pytest.mark.thorough
def test_before_renting_a_gpu_the_largest_batch_that_fits_is_found(tmp_path: Path) -> None:
    found = umem_command(
        "batch", "--gpu", "t4", "--vram", "256MiB", "--argument=--batch", "--json",
        "examples/04_before_renting.py", "--device", "@cupy:0", "--batch", "32",
    )  # fmt: skip
    largest = json.loads(found)["largest"]
    assert largest["fits"] and 32 <= largest["value"] < 256
    assert largest["peak_bytes"] < 256 << 20


@pytest.mark.thorough
@needs_cupy
@pytest.mark.parametrize(("sizes", "fits"), [((), True), (("--hidden", "1920"), False)])
def test_a_billion_parameters_do_not_fit_as_they_are(
    tmp_path: Path, sizes: tuple[str, ...], fits: bool
) -> None:
    told = tmp_path / "told.json"
    words = ("--layers", "24", "--batch", "16", *sizes)
    umem_command(
        "run", "--dry", "v100-16gb", "--json", str(told),
        "examples/07_a_billion.py", "--device", "@cupy:0", *words, status=0 if fits else 3,
    )  # fmt: skip
    found = json.loads(told.read_text())
    assert found["fits"] == fits and found["simulated"]
    assert fits or "network.py" in found["failure"]["line"]


@pytest.mark.thorough
@needs_cupy
def test_the_masked_language_model_runs_dry(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    words = ("examples/06_masked_lm.py", "--device", "@cupy:0")
    umem_command("run", "--dry", "t4", "--json", str(told), *words)
    found = json.loads(told.read_text())
    assert found["fits"] and found["peak_bytes"] > 100 << 20


@pytest.mark.thorough
def test_the_programs_that_run_dry_run_for_real_on_numpy() -> None:
    for name in ("04_before_renting", "07_a_billion"):
        result = run(ROOT / "examples" / f"{name}.py", "--batch", "2")
        assert result.returncode == 0, result.stderr
        assert "loss" in result.stdout


@pytest.mark.thorough
def test_a_budget_changes_no_bit() -> None:
    result = run(ROOT / "examples" / "05_budget.py")
    assert result.returncode == 0, result.stderr
    assert "losses are the same to the bit: True" in result.stdout
    assert "planned by" in result.stdout


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("sklearn") is None, reason="no scikit-learn")
def test_a_small_model_is_made_of_a_large_one_and_reads_about_as_well() -> None:
    result = run(ROOT / "examples" / "10_small_from_large.py")
    assert result.returncode == 0, result.stderr
    rows = [line.replace("KiB", "").split()[-3:] for line in result.stdout.splitlines()]
    nbytes = [float(row[0]) for row in rows]
    reads = [float(row[2].rstrip("%")) for row in rows]
    assert nbytes == sorted(nbytes, reverse=True) and nbytes[-1] < 0.1 * nbytes[0]
    assert min(reads) > max(reads) - 5 > 75


TECHNIQUES = {
    "none": [],
    "exact": ["--recompute", "min", "--micro-batch", "5"],
    "small": ["--adam8bit", "--half"],
    "all": ["--recompute", "min", "--micro-batch", "5", "--adam8bit", "--half"],
}


@pytest.mark.slow
def test_a_language_model_learns_the_same_with_every_technique(tmp_path: Path) -> None:
    losses = {}
    for name, flags in TECHNIQUES.items():
        sizes = ["--hidden", "64", "--length", "32", "--vocabulary", "400", "--batch", "16"]
        folder = tmp_path / name
        asked = ["--steps", "20", "--out", str(folder), *sizes, *flags]
        result = run(ROOT / "examples" / "06_masked_lm.py", *asked)
        assert result.returncode == 0, result.stderr
        losses[name] = [row["main/loss"] for row in json.loads((folder / "log").read_text())]
    assert losses["none"][-1] < 0.97 * losses["none"][0]
    assert losses["exact"] == pytest.approx(losses["none"], rel=0.02)  # other dropout masks
    assert losses["small"] == pytest.approx(losses["none"], rel=0.02)
    assert losses["all"] == pytest.approx(losses["none"], rel=0.02)


@pytest.mark.thorough
def test_a_language_model_goes_on_where_it_was(tmp_path: Path) -> None:
    path = ROOT / "examples" / "06_masked_lm.py"
    sizes = ["--hidden", "64", "--length", "32", "--vocabulary", "400", "--batch", "16"]
    logs = []
    for name, parts in (("whole", ["30"]), ("parts", ["20", "30"])):
        folder = tmp_path / name
        for steps in parts:
            asked = ["--steps", steps, "--out", str(folder), "--snapshot", str(folder / "saved")]
            result = run(path, *asked, *sizes, "--adam8bit")
            assert result.returncode == 0, result.stderr
        logs.append([row["main/loss"] for row in json.loads((folder / "log").read_text())])
    assert len(logs[0]) == 3 and logs[0] == logs[1]


@needs_ranks
@pytest.mark.thorough
def test_two_ranks_train_the_same_model(tmp_path: Path) -> None:
    ended = start_file(tmp_path, str(ROOT / "examples" / "08_ranks.py"), n=2).finish()
    assert ended.status == 0, ended.err
    *_, row, last = ended.of(0)
    assert float(row.split()[2]) > 0.95 and last == "all ranks have the same weights: True"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "path", [p for p in EXAMPLES if p.stem not in ON_NUMPY], ids=lambda path: path.stem
)
def test_an_example_runs_and_says_that_the_gpu_is_simulated(path: Path) -> None:
    result = run(path, *ON_VIRTUAL.get(path.stem, ["virtual:v100-16gb"]))
    assert result.returncode == 0, result.stderr
    assert "The GPU is simulated (virtual:v100-16gb" in result.stdout
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_begins_with_what_it_shows(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) < 60
    assert lines[0].startswith('"""')
    assert f"python examples/{path.name}" in "\n".join(lines[:5])


@pytest.mark.thorough
def test_enabling_once_holds_three_times_the_memory_of_the_gpu() -> None:
    output = run(ROOT / "examples/01_enable.py", "virtual:v100-16gb").stdout
    assert "mean: 7.0" in output  # 2 + 10 * 0.5 * 1
    assert "384.0 MiB were reserved on a GPU with 128.0 MiB." in output


def test_a_hint_changes_what_moves_and_not_the_result() -> None:
    output = run(ROOT / "examples/02_managed_block.py", "virtual:t4").stdout.splitlines()
    total = 3 * 24 * 2**20 * (1 + 2 + 3)
    assert output[1] == f"without a hint: the sum is {total}"
    assert output[3] == f"with a hint: the sum is {total}"
    assert "GiB moved, 0 B used in place" in output[2]
    assert "used in place" in output[4]
    assert "GiB moved" not in output[4]


@pytest.mark.parametrize("name", ["01_enable", "02_managed_block"])
@pytest.mark.parametrize("device", ["tpu", "virtual:v101"])
def test_an_unknown_device_is_refused(name: str, device: str) -> None:
    result = run(ROOT / f"examples/{name}.py", device)
    assert result.returncode == 1
    assert "did you mean" in result.stderr or "a device is virtual:NAME or cuda" in result.stderr


ON_SOFTWARE = {
    "01_enable": (["cuda"], "384.0 MiB were reserved on a GPU with 256.0 MiB"),
    "02_managed_block": (["cuda"], "with a hint: the sum is 452984832"),
    "03_gcn": (["--device", "cuda"], "96.9% of the test nodes' labels found"),
}
"""How each is told to use CuPy, and what it says on NumPy too."""


@needs_compiler
@needs_cupy
@pytest.mark.parametrize("name", ON_SOFTWARE)
def test_an_example_runs_on_the_real_cupy_with_the_same_result(
    name: str, kernel_cache: Path
) -> None:
    arguments, says = ON_SOFTWARE[name]
    path = str(ROOT / "examples" / f"{name}.py")
    asked = [sys.executable, "-m", "umem", "run", "--software", "t4", "--vram", "256MiB", path]
    result = subprocess.run(
        [*asked, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(kernel_cache)},
    )
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    assert says in result.stdout
