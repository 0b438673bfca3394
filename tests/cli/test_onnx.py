"""``umem choose MODEL.onnx``: a model of any framework, its plans and its schedules."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.on_onnx.test_operators import node, save, two_layers, weights
from umem.cli import main
from umem.onnx import onnx_step

pytest.importorskip("onnx")


def run(*args: Any) -> Result:
    return CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"}).invoke(
        main, ["choose", *map(str, args)]
    )


def refused(*args: Any) -> str:
    done = run(*args)
    assert done.exit_code in (1, 2) and "Traceback" not in done.output
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
    assert "give --size batch=N" in refused(deep)
    done = run(deep, "--size", "batch=64", "--gpu", "t4")
    assert done.exit_code == 0 and "plain" in done.output and "simulated" in done.output
    assert "hybrid: the step fits with everything kept" in done.output


@pytest.mark.thorough
def test_each_planned_way_has_its_schedule_for_another_executor(deep: Path) -> None:
    done = run(deep, "--size", "batch=16384", "--vram", "120MiB", "--json")
    assert done.exit_code == 0
    found = json.loads(done.output)
    options = {option["name"]: option for option in found["options"]}
    assert found["simulated"] is True and options["managed"]["schedule"] is None
    least = options["recompute min"]["schedule"]
    assert least["recomputed"] and not least["offloaded"]
    assert options["offload"]["schedule"]["offloaded"]
    assert {action["do"] for action in least["actions"]} >= {"forward", "recompute", "backward"}


def test_where_nothing_fits_the_status_is_3(tmp_path: Path) -> None:
    path = two_layers(tmp_path / "m.onnx", 8)
    done = run(path, "--vram", "2MiB", "--gpu", "jetson-orin-64gb")
    assert done.exit_code == 0  # of a few bytes
    wide = [node("MatMul", "x W", "y")]
    path = save(tmp_path / "w.onnx", wide, [weights("W", 1024, 1024)], [1, 1024], [1, 1024], 13)
    done = run(path, "--vram", "2MiB", "--gpu", "jetson-orin-64gb")
    assert done.exit_code == 3 and "No way fits a training step" in done.output


def test_the_optimizers_state_counts_and_inference_has_none(deep: Path) -> None:
    peaks = []
    ways: list[list[str]] = [["--inference"]]
    ways += [["--optimizer", optimizer] for optimizer in ("none", "sgd", "momentum", "adam")]
    for way in ways:
        done = run(deep, "--size", "batch=1", *way, "--json")
        peaks.append(json.loads(done.output)["options"][0]["simulated_peak_bytes"])
    assert peaks[0] < peaks[1] <= peaks[2] < peaks[3] < peaks[4]


def test_inference_keeps_nothing_for_a_backward(deep: Path) -> None:
    layer, weight = 4096 * 256 * 4, 256 * 256 * 4
    done = run(deep, "--size", "batch=4096", "--inference", "--json")
    (plain,) = json.loads(done.output)["options"]
    assert plain["name"] == "plain"
    assert plain["simulated_peak_bytes"] == 3 * layer + 8 * weight  # x, a result and the next
    reasons = {option["name"]: option["reason"] for option in json.loads(done.output)["dropped"]}
    assert "no backward" in reasons["recompute min"]
    trained = onnx_step(deep, {"batch": 4096}).trace
    assert trained.peak_bytes > 9 * layer


def test_dropout_and_statistics_of_inference(tmp_path: Path) -> None:
    nodes = [
        node("Dropout", "x", "d mask"), node("BatchNormalization", "d s b m v", "h"),
        node("Conv", "h W", "y"),
    ]  # fmt: skip
    given = [weights(name, 4) for name in "sbmv"]
    shape = [8, 4, 16, 16]
    path = save(tmp_path / "m.onnx", nodes, [*given, weights("W", 4, 4, 1, 1)], shape, None, 13)
    trace = onnx_step(path, inference=True).trace
    dropout, normalized, _ = trace.ops
    assert dropout.traffic_bytes == 0 and set(dropout.writes) == set(dropout.reads[:1])
    assert len(normalized.writes) == 1 and len(normalized.reads) == 5
    assert not [op for op in trace.ops if op.phase != "forward" or op.entry is not None]


def test_what_does_not_go_together_is_refused(deep: Path, tmp_path: Path) -> None:
    for wrong in ("4", "batch=", "batch=x", "=4", "batch=-1"):
        assert "write the name of a dynamic axis and its size" in refused(deep, "--size", wrong)
    assert "names an axis twice" in refused(deep, "--size", "batch=4", "--size", "batch=8")
    assert "Leave --optimizer out" in refused(
        deep, "--size", "batch=4", "--inference", "--optimizer", "sgd"
    )
    assert "no dynamic axis 'length'" in refused(deep, "--size", "batch=4", "--size", "length=8")
    assert "there is no file" in refused(tmp_path / "t.umem.gz")
    assert "cannot read" in refused(tmp_path / "none.onnx")


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
