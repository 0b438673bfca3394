"""What makes another model of a step's: bytes are those of the other model, or there are none."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len

from umem.compat.installation import find_package
from umem.predict.choosing import Choice
from umem.predict.other_models import OtherModel, other_models
from umem.reports.choice_report import choice_text
from umem.trace import Access, Alloc, Op, Trace

if find_package() is not None:
    import umem.chainer  # isort: skip  (before chainer)
    import chainer
    import chainer.functions as F
    import chainer.links as L

needs_chainer = pytest.mark.skipif(find_package() is None, reason="no Chainer")
NAMES = ("smaller layers", "quantisation", "distillation")


def recorded(optimizer: str, *links: Any, shape: tuple[int, ...] = (6, 24)) -> Trace:
    """The second step of a chain of links, in which states and gradients are there."""
    model = chainer.Sequential(*links)
    updates = getattr(chainer.optimizers, optimizer)().setup(model)

    def step() -> None:
        updates.update(lambda: chainer.functions.mean(model(np.ones(shape, "f")) ** 2))

    step()
    with umem.record() as recorder:
        step()
    return recorder.trace


def of(trace: Trace) -> dict[str, OtherModel]:
    found = other_models(trace)
    assert tuple(one.name for one in found) == NAMES and not any(one.exact for one in found)
    return {one.name: one for one in found}


def kept(trace: Trace) -> int:
    """What parameters, gradients of them and states take, by their names in the trace."""
    allocs = [event for event in trace.events if isinstance(event, Alloc)]
    states = sum(a.nbytes for a in allocs if a.kind in ("parameter", "state"))
    update = {a.tensor for op in trace.ops if op.phase == "update" for a in op.reads}
    return states + sum(a.nbytes for a in allocs if a.kind == "gradient" and a.tensor in update)


@needs_chainer
@pytest.mark.parametrize("optimizer", ["SGD", "MomentumSGD", "Adam"])
def test_low_rank_is_what_a_model_of_low_rank_keeps(optimizer: str) -> None:
    plain = recorded(optimizer, L.Linear(24, 40), F.relu, L.Linear(40, 12, nobias=True))
    low = recorded(
        optimizer,
        L.Linear(24, 6, nobias=True), L.Linear(6, 40), F.relu,
        L.Linear(40, 3, nobias=True), L.Linear(3, 12, nobias=True),
    )  # fmt: skip
    found = of(plain)["smaller layers"]
    assert (found.now_bytes, found.then_bytes) == (kept(plain), kept(low))


@needs_chainer
def test_low_rank_is_what_slimmer_leaves() -> None:
    from umem.chainer.layers import LowRank

    model = chainer.Sequential(L.Linear(24, 40), F.relu, L.Linear(40, 12))
    found = of(recorded("SGD", *model))["smaller layers"]
    ranks = {"/0": LowRank(rank=6), "/1": LowRank(rank=3)}
    umem.chainer.slimmer(model, ranks, np.ones((6, 24), "f"), quiet=True)
    assert found.then_bytes == 2 * sum(p.array.nbytes for p in model.params())  # with gradients


@needs_chainer
def test_weights_of_8_bits_are_what_a_quantised_model_has() -> None:
    model = chainer.Sequential(
        L.Convolution2D(3, 8, 3), L.BatchNormalization(8), F.relu, L.Linear(128, 10, nobias=True)
    )
    images = np.random.RandomState(0).rand(2, 3, 6, 6).astype("f")
    found = of(recorded("Adam", *model, shape=images.shape))["quantisation"]
    report = umem.chainer.quantize(model, images).quantization_report
    assert (found.now_bytes, found.then_bytes) == (report.float_bytes, report.quantized_bytes)


@needs_chainer
def test_a_teacher_in_the_trace_is_no_part_of_what_could_be_smaller() -> None:
    student, teacher = L.Linear(24, 4), L.Linear(24, 4)
    optimizer = chainer.optimizers.SGD().setup(student)
    loss = umem.chainer.DistillingLoss(optimizer, teacher)
    with umem.record() as recorder:
        optimizer.update(loss, np.ones((5, 24), "f"), np.zeros(5, "i"))
    assert of(recorder.trace)["quantisation"].now_bytes == student.W.array.nbytes + 4 * 4


def updated(name: str, x: int, weight: int, y: int) -> Trace:
    """A step with one function of one weight, by bytes."""
    sizes = (("input", x), ("parameter", weight), ("activation", y), ("gradient", weight))
    allocs = [
        Alloc(n, nbytes, kind, kind, kind == "input") for n, (kind, nbytes) in enumerate(sizes)
    ]
    whole = [Access(n, 0, nbytes) for n, (_, nbytes) in enumerate(sizes)]
    forward = Op(name, "forward", (whole[0], whole[1]), (whole[2],))
    update = Op("SGD", "update", (whole[3],), (whole[1],))
    return Trace([*allocs, forward, update])


@pytest.mark.parametrize(
    ("name", "x", "weight", "y"),
    [
        ("LinearFunction", 84, 100, 80),  # of no whole number of rows
        ("LinearFunction", 2 * 48, 2 * 96, 2 * 32),  # of types of 2 bytes
        ("EmbedIDFunction", 8, 96, 32),
    ],
)
def test_what_the_bytes_do_not_tell_has_no_figures(name: str, x: int, weight: int, y: int) -> None:
    found = of(updated(name, x, weight, y))["smaller layers"]
    assert found.now_bytes is None and found.then_bytes is None and found.missing is not None


def test_distillation_says_what_to_record_and_no_figure() -> None:
    found = of(Trace([]))
    assert all(one.now_bytes is None and one.missing for one in found.values())
    assert "record a step of the smaller model" in str(found["distillation"])


def choice_of(trace: Trace) -> Choice:
    return Choice("t4", "T4", 1 << 30, None, (), (), other_models=other_models(trace))


def test_the_list_is_in_the_text_at_any_width_with_its_code() -> None:
    choice = choice_of(updated("LinearFunction", 4 * 6 * 24, 4 * 24 * 40, 4 * 6 * 40))
    wide = "\n".join(line.plain for line in choice_text(choice, 200))
    assert "What makes another model, so that results are others (not exact)" in wide
    assert "gradients and states: 7.5 KiB, then 3.0 KiB" in wide
    for one in choice.other_models:
        assert f"     {one.line}\n" in wide + "\n"
    for width in (40, 80):
        lines = [line.plain for line in choice_text(choice, width)]
        assert max(map(cell_len, lines)) <= width
        broken = "".join(line.strip() for line in lines)
        assert all(one.line in broken for one in choice.other_models)


def test_in_json_figures_are_under_names_that_say_simulated() -> None:
    choice = choice_of(updated("LinearFunction", 4 * 6 * 24, 4 * 24 * 40, 4 * 6 * 40))
    content = json.loads(json.dumps(choice.to_json(), allow_nan=False))["other_models"]
    assert [one["name"] for one in content] == [*NAMES]
    for one in content:
        assert one["exact"] is False and one["simulated"] is True and one["line"]
        assert {"simulated_now_bytes", "simulated_then_bytes"} < {*one}
        assert (one["simulated_now_bytes"] is None) == (one["missing"] is not None)
