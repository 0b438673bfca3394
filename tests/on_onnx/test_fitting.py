"""Plans on the step of an exported model: the trace keeps to them, and a schedule runs."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from traced_graphs import check, contents_read

from tests.on_onnx.test_operators import node, save, weights
from umem._common.specs import GpuSpec, gpu_spec
from umem.onnx import (
    STEPS,
    ExportedStep,
    ModelChoice,
    all_offloaded,
    apply,
    choose_for_model,
    link_of,
    onnx_step,
    op_seconds,
    problem_of,
    repeated,
)
from umem.planner import Plan, Solution
from umem.trace import Alloc, Free, Hint, Trace
from umem.units import MIB

pytest.importorskip("onnx")

LAYERS = 5
WAYS = {
    "plain", "hybrid", "managed", "managed, prefetch", "recompute to fit", "recompute min",
    "offload", "recompute, offload to fit",
}  # fmt: skip


def residual(
    path: Path, seed: int, layers: int = LAYERS, branches: bool = True, dropout: float = 0.3
) -> Path:
    """Products and sigmoids, with dropout, and sums with results of earlier layers."""
    rng = np.random.default_rng(seed)
    nodes, given, results = [], [], ["x"]
    for layer in range(layers):
        nodes.append(node("MatMul", f"{results[-1]} W{layer}", f"h{layer}"))
        nodes.append(node("Sigmoid", f"h{layer}", f"s{layer}"))
        given.append(weights(f"W{layer}", 256, 256))
        results.append(f"s{layer}")
        if rng.random() < dropout:
            nodes.append(node("Dropout", results[-1], f"d{layer}"))
            results.append(f"d{layer}")
        if branches and rng.random() < 0.5:
            nodes.append(node("Add", f"{results[-1]} {rng.choice(results[:-1])}", f"a{layer}"))
            results.append(f"a{layer}")
    nodes.append(node("Relu", results[-1], "y"))
    return save(path, nodes, given, ["batch", 256], ["batch", 256], 13)


def step_of(folder: Path, seed: int, batch: int = 32_768, **how: Any) -> ExportedStep:
    return onnx_step(residual(folder / "m.onnx", seed, **how), {"batch": batch}, "momentum")


def whole(trace: Trace) -> Trace:
    """All steps of a replay, one after the other."""
    return Trace([*chain.from_iterable(repeated(trace))])


def runs(trace: Trace) -> Counter[tuple[str, str]]:
    return Counter((op.name, op.phase) for op in trace.ops)


def test_a_repeated_step_finds_what_the_one_before_it_left(tmp_path: Path) -> None:
    step = step_of(tmp_path, 0).trace
    trace = check(whole(step))
    assert trace.step_count == STEPS
    assert runs(trace) == Counter({key: STEPS * count for key, count in runs(step).items()})
    kinds = Counter(event.kind for event in trace.events if isinstance(event, Alloc))
    once = Counter(event.kind for event in step.events if isinstance(event, Alloc))
    for kind in ("parameter", "state", "input"):
        assert kinds[kind] == once[kind]
    assert kinds["activation"] == STEPS * once["activation"]
    # A step that finds gradients needs them beside its forward; those of the last one stay.
    frees = [sum(isinstance(e, Free) for e in found.events) for found in (step, trace)]
    assert frees[1] == STEPS * frees[0] + (STEPS - 1) * LAYERS


def plans_of(trace: Trace, gpu: GpuSpec) -> list[Solution]:
    """Plans for the least bytes and for more, with offload and without."""
    seconds = op_seconds(trace, gpu)
    problem, timed = problem_of(trace), problem_of(trace, lambda op: seconds[id(op)])
    link, keep_all = link_of(gpu), problem.keep_all
    found = [problem.least(), timed.least(link=link), keep_all]
    found.append(keep_all._replace(plan=all_offloaded(problem, link)))
    middle = (problem.least().peak_bytes + keep_all.peak_bytes) // 2
    return [*found, problem.within(middle), timed.within(middle, link=link)]


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [1, 2])
def test_every_operation_under_a_plan_finds_what_it_found_before(tmp_path: Path, seed: int) -> None:
    dropout = 0.3 * (seed % 2)
    trace = step_of(tmp_path, seed, dropout=dropout).trace
    wanted = contents_read(trace)
    for solution in plans_of(trace, gpu_spec("t4")):
        plan = solution.plan
        found = check(apply(trace, plan))
        more = runs(found) - runs(trace)
        again = Counter(name.partition("#")[0] for block in plan.recomputed for name in block)
        # What is freed early is made once more where the step has another order of backward.
        assert plan.frees_early or more == Counter({(n, "backward"): k for n, k in again.items()})
        assert more.total() >= again.total() or plan.frees_early
        sent, back = (
            sum(e.accesses[0].stop for e in found.events if isinstance(e, Hint) and e.action == do)
            for do in ("send", "fetch")
        )
        assert sent == back and (sent > 0) == bool(plan.moves)
        if not plan.moves and not dropout:  # whose mask is packed meanwhile
            kept = iter(contents_read(found))  # all in order, with what ran again in between
            assert all(any(op == each for each in kept) for op in wanted)


def test_without_branches_the_peak_is_at_most_the_planned_one(tmp_path: Path) -> None:
    trace = step_of(tmp_path, 0, branches=False, dropout=0.0).trace
    for solution in plans_of(trace, gpu_spec("t4")):
        planned = whole(apply(trace, solution.plan))
        assert planned.peak_bytes <= solution.peak_bytes


def test_what_runs_again_and_when_by_hand(tmp_path: Path) -> None:
    """Of three products with sigmoids the first sigmoid is dropped, and made for the third."""
    path = tmp_path / "m.onnx"
    trace = onnx_step(sigmoids(path, 3), {"batch": 4096}, "none").trace
    names = ("MatMul#0", "Sigmoid#1", "MatMul#2", "Sigmoid#3", "MatMul#4", "Sigmoid#5")
    kept = ("Sigmoid#3", "Sigmoid#5")
    blocks, again = (names[:4], names[4:]), (names[:2], ())
    plan = Plan(blocks, kept, again, (), 0, 0, "auto", "time", "saved", 0)
    found = check(apply(trace, plan))
    assert [op.name for op in found.ops if op.phase == "backward"] == [
        "SigmoidGrad", "MatMulGrad", "MatMul", "Sigmoid", "SigmoidGrad", "MatMulGrad",
        "SigmoidGrad", "MatMulGrad",
    ]  # fmt: skip
    layer, weight = 4096 * 256 * 4, 256 * 256 * 4
    # At the second product's backward: x, three sigmoids, two gradients of values, two of weights.
    assert trace.peak_bytes == 6 * layer + (3 + 2) * weight
    # At the second sigmoid's: x, two sigmoids, two gradients of values, one of weights.
    assert found.peak_bytes == 5 * layer + (3 + 1) * weight


def scheduled(choice: ModelChoice, name: str) -> list[tuple[str, str]]:
    (option,) = [option for option in choice.options if option.name == name]
    assert option.schedule is not None and option.schedule.simulated
    return [(action.do, action.node) for action in option.schedule.actions]


@pytest.mark.thorough
def test_a_choice_has_every_way_and_the_schedules_run(tmp_path: Path) -> None:
    step = step_of(tmp_path, 1)
    problem = problem_of(step.trace)
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


def test_a_gpu_that_shares_its_memory_has_no_offload_target(tmp_path: Path) -> None:
    gpu = gpu_spec("jetson-orin-64gb").with_vram(100 * MIB)
    choice = choose_for_model(step_of(tmp_path, 0), gpu)
    reasons = {option.name: str(option.reason) for option in choice.dropped}
    assert "shares its memory with the host" in reasons["offload"]
    assert reasons["recompute min"]


def sigmoids(path: Path, layers: int) -> Path:
    nodes, given = [], []
    for layer in range(layers):
        before, after = f"r{layer - 1}" if layer else "x", f"r{layer}"
        nodes.append(node("MatMul", f"{before} W{layer}", f"h{layer}"))
        nodes.append(node("Sigmoid", f"h{layer}", after if layer < layers - 1 else "y"))
        given.append(weights(f"W{layer}", 256, 256))
    return save(path, nodes, given, ["batch", 256], ["batch", 256], 13)


def test_the_problem_is_the_recorded_one_by_hand(tmp_path: Path) -> None:
    """Of a chain of products and sigmoids, all sigmoids but none of the products are kept."""
    step = onnx_step(sigmoids(tmp_path / "m.onnx", 4), {"batch": 4096}, "sgd")
    problem = problem_of(step.trace)
    assert [call.needs for call in problem.calls] == [
        (), (1,), (1,), (3,), (3,), (5,), (5,), (7,),
    ]  # fmt: skip
    weight, layer = 256 * 256 * 4, 4096 * 256 * 4
    assert problem.outside_bytes == layer + 4 * weight
    assert problem.forward_bytes == 4 * weight
    assert {call.nbytes for call in problem.calls} == {layer}
    assert [call.stays_bytes for call in problem.calls] == [weight, 0] * 4
