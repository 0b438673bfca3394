"""Offload reads ahead only where there is room, and an error there leaves nothing pinned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from software_programs import START, needs_compiler, needs_cupy, run

umem_chainer = pytest.importorskip("umem.chainer", exc_type=ImportError)

import chainer  # noqa: E402
import chainer.functions as F  # noqa: E402

from umem.chainer.offload.offloaded_pass import OffloadedPass  # noqa: E402

MODEL = """
import gc
import umem.chainer
import chainer
import chainer.functions as F
import chainer.links as L
from umem.chainer.offload.offloaded_pass import OffloadedPass

pool = cp.get_default_memory_pool()
x, t = cp.ones((1 << 13, 64), "f"), cp.zeros(1 << 13, "i")  # an activation has 2 MiB

def step():
    layers = [layer for _ in range(8) for layer in (L.Linear(64, 64), F.tanh)]
    model = chainer.Sequential(*layers, L.Linear(64, 4)).to_device("@cupy:0")
    with umem.chainer.Offload():
        loss = F.softmax_cross_entropy(model(x), t)
        model.cleargrads()
        loss.backward()

def fits(limit):
    gc.collect()
    pool.free_all_blocks()
    pool.set_limit(size=limit)
    try:
        step()
    except MemoryError:
        return False
    finally:
        pool.set_limit(size=0)
    return True
"""


@pytest.mark.thorough
@needs_cupy
@needs_compiler
def test_a_step_that_fits_without_reading_ahead_fits_with_it(tmp_path: Path) -> None:
    program = """
read_ahead = OffloadedPass.read_ahead
OffloadedPass.read_ahead = lambda current, func: None
low, high = 4 << 20, 48 << 20
while high - low > 2 << 20:
    middle = (low + high) // 2
    low, high = (low, middle) if fits(middle) else (middle, high)
OffloadedPass.read_ahead = read_ahead
print([fits(high + (more << 20)) for more in (0, 2, 6)])
"""
    start = START.replace('"64MiB"', '"256MiB", model=False') + MODEL
    assert run(program, tmp_path, start=start) == f"{[True] * 3}\n"


def test_an_error_while_reading_ahead_leaves_backward_as_it_was(tmp_path: Path) -> None:
    def gradient(x: chainer.Variable, loss: chainer.Variable) -> np.ndarray:
        x.cleargrad()
        loss.backward()
        return x.grad.copy()

    def graph() -> tuple[chainer.Variable, chainer.Variable]:
        x = chainer.Variable(np.linspace(-1, 1, 1 << 15, dtype="f"))
        y = F.tanh(F.tanh(F.tanh(F.tanh(x))))
        return x, F.sum(y * y)

    plain = gradient(*graph())
    begin, orders = OffloadedPass.__init__, []

    def begins(current: OffloadedPass, order: list[Any]) -> None:
        orders.append(order)
        begin(current, order)

    def fails(current: OffloadedPass, func: object) -> None:
        raise KeyError("room")

    with umem_chainer.Offload(tmp_path):
        x, loss = graph()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(OffloadedPass, "__init__", begins)
            patch.setattr(OffloadedPass, "read_ahead", fails)
            with pytest.raises(KeyError):
                gradient(x, loss)
        ((*order,),) = orders
        buffers = {buffer for _, saved in order for buffer in saved.buffers}
        assert buffers and {buffer.pin_count for buffer in buffers} == {0}
        assert np.array_equal(gradient(x, loss), plain)
