"""`umem.choose` and `Recompute` plan the same problem, to the byte, on every network of bench/.

Two figures are measured, by each for itself, and are never the same twice: what an operation needs
only while it runs, which Python's own objects are a part of, and how long it takes. So both get the
figures of one; how far they are apart is tested too.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from bench_scripts import module

if find_spec("chainer") is None:
    pytest.skip("no Chainer", allow_module_level=True)

import umem.chainer
from umem.planner.problem import Problem
from umem.predict.recorded_problem import problems_of
from umem.predict.techniques.steady_state import steady
from umem.trace.analysis.updating import CHUNK_BYTES

models = module("models")
QUICK = {
    ("residual", "6 narrow blocks, dropout"): (4,),
    ("residual", "classifier of 1 block"): (4,),
    ("MLP", "256 wide"): (8,),
    ("GCN", "3 layers, 16 classes"): (300,),
    ("autoencoder", "32 px"): (2,),
    ("U-Net", "4 levels"): (1,),
    ("RoBERTa", "2 narrow layers"): (2,),
    ("transformer", "4 layers"): (1,),
}
"""By model and size, its input's: the batch, and for images the edge in pixels."""
THOROUGH = {
    ("residual", "24 blocks"): (2,),
    ("residual", "24 blocks, sum first"): (2,),
    ("ResNet50", "64 px"): (2,),
    ("VGG16", "32 px"): (2,),
    ("GoogLeNet", "224 px"): (1,),
    ("DenseNet", "18 layers"): (2,),
    ("DCGAN", "32 px"): (2,),
    ("LSTM", "40 words"): (4,),
    ("unrolled LSTM", "129 words"): (4,),
    ("mixer", "4 layers"): (2,),
    ("language model", "4,000 words"): (4,),
    ("MLP", "1,024 wide"): (8,),
    ("GCN", "8 layers"): (300,),
}
SLOW = {
    ("PSPNet", "713 px"): (2, 65),
    ("ResNet152", "224 px"): (2, 32),
    ("VGG19", "224 px"): (1,),
    ("DenseNet", "161, 224 px"): (2, 32),
    ("U-Net", "as published, 572 px"): (1, 188),
    ("LSTM", "200 narrow words"): (2,),
    ("GRU", "40 words"): (4,),
}
"""Larger ones, and others of the kinds above: of ResNet50, VGG16 and LSTM."""
OBJECTS = 10_000
"""Bytes of Python's own objects that a measured workspace may differ by."""


def both(name: str, size: str, shape: tuple[int, ...]) -> tuple[Problem, Problem]:
    """The problem that is in the trace of a step, and the one that Recompute has learned."""
    np.random.seed(0)
    model = models.build(name, size)
    optimizer = model.make_optimizer().setup(model.link)
    inputs = model.inputs(*shape)

    def step() -> None:
        loss = model.loss(*inputs)
        model.link.cleargrads()
        loss.backward()
        optimizer.update()

    step()
    with umem.record() as recorder:
        step()
    with umem.record(measure="workspace") as calibration:
        step()
    (recorded,) = problems_of(steady(recorder.trace.with_workspace(calibration.trace), 3))
    with umem.chainer.Recompute("min") as memory:
        for _ in range(4):
            step()
    (learned,) = [seen.problem for seen in memory.graphs if seen.plan is not None]
    return recorded, learned


def measured_alike(problem: Problem, other: Problem) -> Problem:
    """The problem with what was measured for another."""
    names = ("cost", "backward_cost", "workspace_bytes", "backward_workspace_bytes")
    calls = [
        replace(call, **{name: getattr(theirs, name) for name in names})
        for call, theirs in zip(problem.calls, other.calls, strict=True)
    ]
    return replace(
        problem,
        calls=tuple(calls),
        update_bytes=other.update_bytes,
        whole_update_bytes=other.whole_update_bytes,
    )


CASES: list[Any] = [
    *(pytest.param(*case, id=", ".join(case[0])) for case in QUICK.items()),
    *(
        pytest.param(*case, id=", ".join(case[0]), marks=pytest.mark.thorough)
        for case in THOROUGH.items()
    ),
    *(pytest.param(*case, id=", ".join(case[0]), marks=pytest.mark.slow) for case in SLOW.items()),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "shape"), CASES)
def test_the_graph_of_choose_is_that_of_recompute(
    model: tuple[str, str], shape: tuple[int, ...]
) -> None:
    recorded, learned = both(*model, shape)
    # One has measured a whole update, the other one in chunks, which has more temporaries.
    assert recorded.plain_bytes <= learned.plain_bytes * 1.001 + OBJECTS
    assert recorded.left_alone_bytes == pytest.approx(
        learned.left_alone_bytes, rel=1e-3, abs=OBJECTS
    )
    least = learned.least().peak_bytes
    near = CHUNK_BYTES // 2 if least == learned.update_peak_bytes else OBJECTS
    assert recorded.least().peak_bytes == pytest.approx(least, rel=1e-3, abs=near)
    alike = measured_alike(recorded, learned)
    assert alike.edges == learned.edges and alike.names == learned.names
    for own, theirs in zip(alike.calls, learned.calls, strict=True):
        assert own == theirs
    assert alike.plain_bytes == learned.plain_bytes
    assert alike.constant_bytes(packs=True) == learned.constant_bytes(packs=True)
    assert alike.floor == learned.floor
    for budget in (None, learned.least().peak_bytes, learned.plain_bytes):
        ours, theirs = alike.within(budget), learned.within(budget)
        assert ours.peak_bytes == theirs.peak_bytes
        assert ours.plan.blocks == theirs.plan.blocks and ours.plan.kept == theirs.plan.kept


def test_every_model_of_the_benchmarks_is_compared() -> None:
    compared = {name for name, _ in (*QUICK, *THOROUGH, *SLOW)}
    assert compared == set(models.MODELS)
