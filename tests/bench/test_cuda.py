"""bench/cuda_managed.py without a GPU: its flow on the virtual one, its sums on made-up times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_scripts import ROOT, module, run

import umem

pytestmark = pytest.mark.thorough


@pytest.fixture
def bench() -> Any:
    return module("cuda_managed")


class FakeBench:
    """Takes as long as it is told: ``seconds`` counts what each action asks of the device."""

    ordinal = 0
    nbytes = 1 << 20

    def __init__(self) -> None:
        self.device, self.array, self.log = self, "array", []

    def prefetch(self, array: Any, to: Any, stream: Any) -> None:
        self.log.append(f"prefetch {to}")

    def touch(self, array: Any) -> None:
        self.log.append("touch")

    def to(self, place: Any) -> None:
        self.log.append(f"to {place}")

    def seconds(self, action: Any) -> float:
        start = len(self.log)
        action()
        return float(len(self.log) - start)


def test_without_a_gpu_it_says_why_and_exits_with_1(bench: Any) -> None:
    from umem.devices.cuda import cuda_reason

    if cuda_reason() is None:
        pytest.skip("there is a CUDA device")
    done = run("cuda_managed.py", "--quick", "--json", "never.json")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("Error: no CUDA device: ")
    assert not (ROOT / "never.json").exists()


def test_no_script_hides_a_package_that_others_import() -> None:
    """A script's folder is the first place where Python looks, for namespace packages even last."""
    for name in ("cuda", "cupy", "chainer", "numpy", "scipy", "umem"):
        assert not (ROOT / "bench" / f"{name}.py").exists()
        assert not (ROOT / "tests" / "support" / f"{name}.py").exists()


def test_training_steps_are_timed_in_turn_in_both_modes(bench: Any) -> None:
    with umem.virtual_gpu("v100-16gb") as gpu:
        rows = bench.networks(gpu, bench.QUICK._replace(nodes=300))
    assert [(row["name"], row["ratio_of"]) for row in rows] == [
        ("graph network", "managed"),
        ("residual network", "managed"),
        ("graph network", "faults"),
    ]
    for row in rows[:2]:
        assert row["same_losses"] is True and row["at_most"] == 1.02
        assert {len(found) for found in row["repeat_seconds"].values()} == {bench.QUICK.repeats}
    assert rows[2]["passed"] is None
    assert gpu.usage().managed_bytes > 0 and gpu.usage().reserved_bytes > gpu.usage().managed_bytes


def test_a_step_on_the_host_starts_from_the_host_each_time(bench: Any) -> None:
    log = []

    class Training:
        arrays = ()

        def step(self) -> None:
            log.append("step")

    with umem.virtual_gpu("v100-16gb") as gpu:
        pair = bench.host_resident(gpu, "made up", Training)
        log.clear()
        umem_prefetch, umem.prefetch = umem.prefetch, lambda x, to=None: log.append(to)
        try:
            row = bench.measure(pair, 1)
        finally:
            umem.prefetch = umem_prefetch
    assert log == ["cpu", "step", "cpu", None, "step"] * 2
    assert row["ratio_of"] == "faults"


def test_transfers_are_paired_with_what_they_are_held_against(bench: Any, monkeypatch: Any) -> None:
    fake = FakeBench()
    for name in ("copy_in", "copy_out"):
        monkeypatch.setattr(bench.cuda_constants, name, lambda bench: 0.95)
    rows = [bench.measure(pair, 3) for pair in bench.transfers(fake)]
    assert [row["ratio"] for row in rows] == [0.95, 0.95, 0.5]
    assert [row["passed"] for row in rows] == [True, True, False]
    assert [row["at_least"] for row in rows] == [0.9, 0.9, 3.0]
    assert fake.log[:2] == ["to cpu", "prefetch 0"]  # in: from the host
    assert fake.log[-3:] == ["to cpu", "prefetch 0", "touch"]


@pytest.mark.parametrize(
    ("ratio", "bounds", "passed"),
    [
        (1.02, {"at_most": 1.02}, True),
        (1.03, {"at_most": 1.02}, False),
        (3.0, {"at_least": 3.0}, True),
        (2.9, {"at_least": 3.0}, False),
        (7.0, {}, None),
    ],
)
def test_the_ratio_of_the_medians_is_judged_and_the_first_round_is_not(
    bench: Any, ratio: float, bounds: Any, passed: Any
) -> None:
    times = {"a": iter([99.0, ratio, ratio * 2, ratio]), "b": iter([99.0, 1.0, 1.0, 0.1])}
    turns: list[str] = []

    def action(name: str) -> Any:
        return lambda: (turns.append(name), next(times[name]))[1]

    pair = bench.Pair("x", "y", "a", "b", {"a": action("a"), "b": action("b")}, **bounds)
    row = bench.measure(pair, 3)
    assert (row["ratio"], row["passed"]) == (ratio, passed)
    assert turns == ["a", "b"] * 4
    assert row["repeat_seconds"] == {"a": [ratio, ratio * 2, ratio], "b": [1.0, 1.0, 0.1]}


def test_a_run_prints_its_table_and_writes_every_repeat(
    bench: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    from click.testing import CliRunner

    class Gpu:
        name, vram_bytes, simulated = "Made-up GPU", 1 << 30, False

    pair = bench.Pair("x", "y", "a", "b", {"a": lambda: 2.0, "b": lambda: 1.0}, at_most=1.5)
    other = pair._replace(at_most=None)
    monkeypatch.setattr(
        bench, "run", lambda size: (Gpu(), [bench.measure(p, size.repeats) for p in (pair, other)])
    )
    guard = type("Guard", (), {"budget_bytes": 123})()
    monkeypatch.setattr(bench.gpu_guard, "guard", lambda device: guard)
    path = tmp_path / "report.json"
    done = CliRunner().invoke(bench.main, ["--quick", "--repeats", "4", "--json", str(path)])
    assert done.exit_code == 0, done.output
    for text in ("x: y", "2.00", "at most 1.5", "MISS", "shown"):
        assert text in done.output
    report = json.loads(path.read_text())
    assert (report["simulated"], report["budget_bytes"]) == (False, 123)
    assert report["rows"][0]["repeat_seconds"] == {"a": [2.0] * 4, "b": [1.0] * 4}
    assert report["machine"]["gpu"]["name"] == "Made-up GPU"
