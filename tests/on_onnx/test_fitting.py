"""Plans on the step of an exported model: the trace keeps to them, and a schedule runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.on_onnx.test_operators import node, save, weights
from umem.devices.specs import gpu_spec
from umem.onnx import ExportedStep, onnx_step
from umem.onnx.fitting.applying import apply
from umem.onnx.fitting.gpu_times import link_of, op_seconds
from umem.onnx.fitting.model_choice import ModelChoice, choose_for_model
from umem.onnx.fitting.offloading import all_offloaded
from umem.onnx.fitting.repeated_step import repeated
from umem.onnx.fitting.step_problem import problem_of
from umem.planner.problem import Problem
from umem.trace import Alloc, Checker, Free, Hint, Mark, Op, Trace
from umem.units import MIB

pytest.importorskip("onnx")

LAYERS = 5
WAYS = {
    "plain", "hybrid", "managed", "managed, prefetch", "recompute to fit", "recompute min",
    "offload", "recompute, offload to fit",
}  # fmt: skip


def residual(path: Path, seed: int, layers: int = LAYERS) -> Path:
    """Products and sigmoids, with dropout, and sums with results of earlier layers."""
    rng = np.random.default_rng(seed)
    nodes, given, results = [], [], ["x"]
    for layer in range(layers):
        nodes.append(node("MatMul", f"{results[-1]} W{layer}", f"h{layer}"))
        nodes.append(node("Sigmoid", f"h{layer}", f"s{layer}"))
        given.append(weights(f"W{layer}", 256, 256))
        results.append(f"s{layer}")
        if rng.random() < 0.3:
            nodes.append(node("Dropout", results[-1], f"d{layer}"))
            results.append(f"d{layer}")
        if rng.random() < 0.5:
            nodes.append(node("Add", f"{results[-1]} {rng.choice(results[:-1])}", f"a{layer}"))
            results.append(f"a{layer}")
    nodes.append(node("Relu", results[-1], "y"))
    return save(path, nodes, given, ["batch", 256], ["batch", 256], 13)


def step_of(folder: Path, seed: int, batch: int = 32_768) -> ExportedStep:
    return onnx_step(residual(folder / "m.onnx", seed), {"batch": batch}, "momentum")


def check(trace: Trace) -> None:
    checker = Checker()
    for event in trace.events:
        checker.check(event)


def runs(trace: Trace) -> Counter[tuple[str, str]]:
    return Counter((op.name, op.phase) for op in trace.ops)


def test_a_repeated_step_finds_what_the_one_before_it_left(tmp_path: Path) -> None:
    step = step_of(tmp_path, 0).trace
    trace = repeated(step, 3)
    check(trace)
    assert trace.step_count == 3
    assert runs(trace) == Counter({key: 3 * count for key, count in runs(step).items()})
    kinds = Counter(event.kind for event in trace.events if isinstance(event, Alloc))
    once = Counter(event.kind for event in step.events if isinstance(event, Alloc))
    for kind in ("parameter", "state", "input"):
        assert kinds[kind] == once[kind]
    assert kinds["activation"] == 3 * once["activation"]
    # A step that finds gradients needs them beside its forward.
    left = sum(
        event.nbytes
        for event in step.events
        if isinstance(event, Alloc)
        and event.kind == "gradient"
        and not any(isinstance(e, Free) and e.tensor == event.tensor for e in step.events)
    )
    assert left == LAYERS * 256 * 256 * 4
    first = trace.events.index(Mark("step"))
    frees = [e for e in trace.events[first:] if isinstance(e, Free)]
    assert len(frees) > 2 * sum(isinstance(e, Free) for e in step.events)


def test_a_step_under_the_least_plan_runs_its_calls_again(tmp_path: Path) -> None:
    trace = repeated(step_of(tmp_path, 1).trace)
    plan = problem_of(trace).least().plan
    found = apply(trace, plan)
    check(found)
    assert found.peak_bytes < trace.peak_bytes
    again = Counter(name.partition("#")[0] for block in plan.recomputed for name in block)
    more = runs(found) - runs(trace)
    assert again and more == Counter({(n, "backward"): 3 * count for n, count in again.items()})


@pytest.mark.parametrize("seed", range(2))
def test_what_is_offloaded_leaves_and_comes_back(tmp_path: Path, seed: int) -> None:
    trace, gpu = repeated(step_of(tmp_path, seed).trace), gpu_spec("t4")
    seconds = op_seconds(trace, gpu)
    timed = problem_of(trace, lambda op: seconds[id(op)])
    least = timed.least(link=link_of(gpu))
    for plan in (least.plan, all_offloaded(problem_of(trace))):
        found = apply(trace, plan)
        check(found)
        sent, fetched = (
            [e.accesses for e in found.events if isinstance(e, Hint) and e.action == action]
            for action in ("send", "fetch")
        )
        assert plan.moves and len(sent) == len(fetched) == 3 * len(plan.moves)
        assert found.peak_bytes < trace.peak_bytes
    assert least.peak_bytes < problem_of(trace).least().peak_bytes


def scheduled(choice: ModelChoice, name: str) -> list[tuple[str, str]]:
    (option,) = [option for option in choice.options if option.name == name]
    assert option.schedule is not None and option.schedule.simulated
    return [(action.do, action.node) for action in option.schedule.actions]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_choice_has_every_way_and_the_schedules_run(tmp_path: Path, seed: int) -> None:
    step = step_of(tmp_path, seed)
    problem = problem_of(repeated(step.trace))
    between = (problem.least().peak_bytes + problem.keep_all.peak_bytes) // 2
    gpu = gpu_spec("t4").with_vram(between)
    choice = choose_for_model(step, gpu)
    assert {option.name for option in (*choice.options, *choice.dropped)} == WAYS
    times = [option.seconds for option in choice.options]
    assert times == sorted(times, key=lambda seconds: seconds or 0.0)
    assert [option.name for option in choice.dropped] == ["plain"]
    for option in choice.options:
        if option.schedule is not None:
            assert option.peak_bytes is not None and option.peak_bytes <= gpu.usable_bytes
    for name in ("recompute to fit", "recompute min", "recompute, offload to fit", "offload"):
        run_schedule(scheduled(choice, name), step.names)


def run_schedule(actions: list[tuple[str, str]], names: tuple[str, ...]) -> None:
    """Each call runs forward and backward once, and nothing runs again that is still there."""
    there: set[str] = set()
    done: Counter[str] = Counter()
    for do, name in actions:
        done[do] += 1
        if do in ("forward", "recompute", "fetch"):
            assert name not in there, (do, name)
            there.add(name)
        elif do in ("drop", "leave"):
            assert name in there, (do, name)
            there.remove(name)
    assert [name for do, name in actions if do == "forward"] == list(names)
    assert sorted(name for do, name in actions if do == "backward") == sorted(names)
    assert done["send"] == done["leave"] == done["fetch"]


def test_a_step_that_fits_needs_nothing(tmp_path: Path) -> None:
    choice = choose_for_model(step_of(tmp_path, 0, 64), gpu_spec("t4"))
    assert choice.options[0].name == "plain"
    reasons = {option.name: option.reason for option in choice.dropped}
    assert set(reasons.values()) == {"the step fits with everything kept"}
    assert reasons.keys() == WAYS - {"plain", "recompute min"}


def test_a_gpu_that_shares_its_memory_has_no_offload_target(tmp_path: Path) -> None:
    gpu = gpu_spec("jetson-orin-64gb").with_vram(100 * MIB)
    choice = choose_for_model(step_of(tmp_path, 0), gpu)
    reasons = {option.name: str(option.reason) for option in choice.dropped}
    assert "shares its memory with the host" in reasons["offload"]
    assert reasons["recompute min"]


def test_the_problem_is_the_recorded_one_by_hand(tmp_path: Path) -> None:
    """Of a chain of products and sigmoids, all sigmoids but none of the products are kept."""
    nodes, given = [], []
    for layer in range(4):
        before = f"r{layer - 1}" if layer else "x"
        nodes.append(node("MatMul", f"{before} W{layer}", f"h{layer}"))
        nodes.append(node("Sigmoid", f"h{layer}", "y" if layer == 3 else f"r{layer}"))
        given.append(weights(f"W{layer}", 256, 256))
    path = save(tmp_path / "m.onnx", nodes, given, ["batch", 256], ["batch", 256], 13)
    step = onnx_step(path, {"batch": 4096}, "sgd")
    problem: Problem = problem_of(repeated(step.trace))
    assert [call.needs for call in problem.calls] == [
        (), (1,), (1,), (3,), (3,), (5,), (5,), (7,),
    ]  # fmt: skip
    weight = 256 * 256 * 4
    layer = 4096 * 256 * 4
    assert problem.outside_bytes == layer + 4 * weight
    assert problem.forward_bytes == 4 * weight
    assert {call.nbytes for call in problem.calls} == {layer}
    assert [call.stays_bytes for call in problem.calls] == [weight, 0] * 4


def test_events_are_of_the_step_and_of_copies_alone(tmp_path: Path) -> None:
    trace = repeated(step_of(tmp_path, 1).trace)
    found = apply(trace, problem_of(trace).least().plan)
    assert {type(event) for event in found.events} <= {Alloc, Free, Op, Mark}
