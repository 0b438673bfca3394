"""``umem choose, batch, advise MODEL.onnx``: a model of any framework, its schedule."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.trace.exported.test_operators import ints, node, save, two_layers, weights
from umem.cli import main
from umem.devices.specs import gpu_spec
from umem.predict.choosing import Search
from umem.trace.exported import onnx_step
from umem.units import MIB

pytest.importorskip("onnx")


def run(*args: Any, command: str = "choose") -> Result:
    return CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"}).invoke(
        main, [command, *map(str, args)]
    )


def refused(*args: Any, command: str = "choose") -> str:
    done = run(*args, command=command)
    assert done.exit_code != 0 and "Traceback" not in done.output
    return " ".join(done.output.split())


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    """Eight products of 256 numbers a sample, each with a sigmoid."""
    nodes, given = [], []
    for layer in range(8):
        before = f"r{layer - 1}" if layer else "x"
        nodes.append(node("MatMul", f"{before} W{layer}", f"h{layer}"))
        nodes.append(node("Sigmoid", f"h{layer}", "y" if layer == 7 else f"r{layer}"))
        given.append(weights(f"W{layer}", 256, 256))
    return save(tmp_path / "deep.onnx", nodes, given, ["batch", 256], ["batch", 256], 13)


def test_sizes_are_asked_for_and_taken(deep: Path) -> None:
    assert "--sizes batch=N" in refused(deep)
    done = run(deep, "--sizes", "batch=64", "--gpu", "t4")
    assert done.exit_code == 0 and "nothing" in done.output and "simulated" in done.output
    assert f"umem choose {deep} --sizes batch=64" in done.output.replace("\n", "")


NAMES = {*(f"MatMul-h{n}" for n in range(8)), "Sigmoid-y", *(f"Sigmoid-r{n}" for n in range(7))}


def test_a_schedule_has_every_call_by_the_models_own_name(deep: Path) -> None:
    step = onnx_step(deep, {"batch": 16_384}, "sgd")
    gpu = gpu_spec("t4").with_vram(150 * MIB)
    search = Search(step.trace, [gpu])
    found = search.schedule(gpu, step.names)
    assert found.simulated is True and found.budget_bytes is not None
    assert found.peak_bytes <= found.budget_bytes <= gpu.usable_bytes
    by_kind: dict[str, list[str]] = {}
    for do, name in found.actions:
        by_kind.setdefault(do, []).append(name)
    assert sorted(by_kind["forward"]) == sorted(NAMES) == sorted(by_kind["backward"])
    assert by_kind["forward"][0] == "MatMul-h0" and by_kind["backward"][0] == "Sigmoid-y"
    assert found.recomputed and sorted(by_kind["recompute"]) == sorted(found.recomputed)
    # What runs again runs after it was let go, and before its own backward.
    for name in found.recomputed:
        places = {do: found.actions.index((do, name)) for do in ("drop", "recompute", "backward")}
        assert places["drop"] < places["recompute"] < places["backward"]


def test_where_everything_fits_everything_that_backward_reads_is_kept(deep: Path) -> None:
    done = run(deep, "--sizes", "batch=64", "--json")
    schedule = json.loads(done.output)["schedule"]
    assert schedule["budget_bytes"] is None and schedule["recomputed"] == []
    assert {name for name in schedule["kept"] if name.startswith("Sigmoid")} == {
        "Sigmoid-y", *(f"Sigmoid-r{n}" for n in range(7)),
    }  # fmt: skip


@pytest.mark.thorough
def test_where_no_budget_fits_the_reason_is_in_the_place_of_the_schedule(deep: Path) -> None:
    done = run(deep, "--sizes", "batch=1024", "--vram", "4MiB", "--json")
    found = json.loads(done.output)
    assert found["schedule"] is None and "the least budget" in found["why_no_schedule"]


def test_the_optimizers_state_counts(deep: Path) -> None:
    peaks = []
    for optimizer in ("none", "sgd", "momentum", "adam"):
        done = run(deep, "--sizes", "batch=1", "--optimizer", optimizer, "--json")
        option = json.loads(done.output)["options"][0]
        peaks.append(next(value for key, value in option.items() if "peak_bytes" in key))
    assert peaks[0] <= peaks[1] < peaks[2] < peaks[3]


def test_what_does_not_go_together_is_refused(deep: Path, tmp_path: Path) -> None:
    assert "have names: --sizes batch=32" in refused(deep, "--sizes", "4")
    assert "name one file" in refused(deep, deep, "--sizes", "4,8")
    assert "--size" in refused(deep, "--sizes", "batch=4", "--size", "8")
    assert "goes with a model in ONNX" in refused(tmp_path / "t.umem.gz", "--optimizer", "sgd")
    assert "cannot read" in refused(tmp_path / "none.onnx")


def test_the_largest_batch_is_found_by_the_models_own_shapes(deep: Path) -> None:
    done = run(deep, "--optimizer", "sgd", "--vram", "150MiB", "--json", command="batch")
    assert done.exit_code == 0
    found = next(v for k, v in json.loads(done.output)["largest"].items() if k == "batch")
    for batch, fits in ((found, True), (found + 1, False)):
        peak = onnx_step(deep, {"batch": batch}, "sgd").trace.peak_bytes
        assert (peak + (1 << 20) <= 150 * MIB) or not fits  # the pool rounds up
    assert found > 1000


def test_the_largest_batch_of_convolutions_is_that_under_the_cap_on_their_workspace(
    tmp_path: Path,
) -> None:
    nodes = [node("Conv", "x W", "c", pads=[1] * 4), node("Relu", "c", "y")]
    shape = ["batch", 16, 32, 32]
    path = save(tmp_path / "conv.onnx", nodes, [weights("W", 16, 16, 3, 3)], shape, shape, 13)

    def found(*args: Any) -> int:
        done = run(path, "--vram", "96MiB", "--json", *args, command="batch")
        return int(json.loads(done.output)["largest"]["batch"])

    largest = found()
    assert largest == found("--sizes", f"batch={largest}")
    peak = onnx_step(path, {"batch": largest}).trace.peak_bytes
    assert 0.8 * 96 * MIB < peak <= 96 * MIB


def test_a_fixed_batch_is_refused_with_a_way_out(tmp_path: Path) -> None:
    path = two_layers(tmp_path / "m.onnx", 8)
    for command in ("batch", "advise"):
        assert "dynamic_axes" in refused(path, command=command)


def test_a_graph_that_is_right_for_one_batch_is_refused_by_name(tmp_path: Path) -> None:
    nodes = [node("MatMul", "x W", "h"), node("Reshape", "h to", "y")]
    given = [weights("W", 4, 6), ints("to", 8, 3, 2)]
    path = save(tmp_path / "m.onnx", nodes, given, ["batch", 4], None, 13)
    assert run(path, "--sizes", "batch=8").exit_code == 0
    assert "Reshape-y" in refused(path, "--sizes", "batch=8", command="batch")


@pytest.fixture
def words(tmp_path: Path) -> Callable[[int], Path]:
    """Two products of so many numbers a word."""

    def write(width: int) -> Path:
        nodes = [
            node("MatMul", "x W", "h"), node("Sigmoid", "h", "r"), node("MatMul", "r V", "y"),
        ]  # fmt: skip
        given = [weights("W", width, width), weights("V", width, width)]
        shape = ["N", "words", width]
        return save(tmp_path / f"{width}.onnx", nodes, given, shape, shape, 13)

    return write


def test_half_of_each_dynamic_axis_is_the_model_at_half_of_it(words: Callable[[int], Path]) -> None:
    asked = ["--sizes", "N=64,words=32", "--optimizer", "sgd", "--json"]
    done = run(words(64), *asked, "--halved", f"width={words(32)}", command="advise")
    assert done.exit_code == 0
    found = json.loads(done.output)
    rows = {row["axis"]: row for row in found["rows"]}

    def peak(batch: int, length: int, width: int) -> int:
        # x, the sigmoid and y are kept; when the gradient of h is made from that of the sigmoid,
        # both are there, and beside the parameters the gradient of V.
        return 4 * (5 * batch * length * width + 3 * width * width)

    whole = found["simulated_peak_bytes"]
    assert whole == pytest.approx(peak(64, 32, 64), rel=0.001)
    for axis, sizes in (("batch", (32, 32, 64)), ("words", (64, 16, 64)), ("width", (64, 32, 32))):
        ratio = rows[axis]["simulated_peak_bytes"] / whole
        assert ratio == pytest.approx(peak(*sizes) / peak(64, 32, 64), rel=0.001)
    assert rows["precision"]["simulated_peak_bytes"] < 0.85 * whole
    assert "export the model with half of it" in rows["depth"]["missing"]


def test_the_code_is_said_to_be_for_chainer(deep: Path) -> None:
    done = run(deep, "--sizes", "batch=64")
    assert "Lines of code are for Chainer" in done.output and "--json" in done.output


def test_the_command_loads_no_chainer(tmp_path: Path) -> None:
    path = two_layers(tmp_path / "m.onnx", 8)
    code = (
        "import sys; sys.argv = ['umem', 'choose', sys.argv[1]]\n"
        "from umem.cli import main\n"
        "try: main()\n"
        "except SystemExit: print([n for n in ('chainer', 'cupy', 'torch') if n in sys.modules])"
    )
    args = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(args, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
