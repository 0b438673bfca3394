"""`umem.explain` of graphs that are never cut: what they hold, and how to cut them."""

from __future__ import annotations

from pathlib import Path

import pytest
from software_programs import lines, needs_compiler, needs_cupy

from umem.compat import find_package

pytestmark = [
    needs_compiler,
    needs_cupy,
    pytest.mark.skipif(find_package() is None, reason="no Chainer"),
]
START = """
import umem
umem.software_gpu("t4", "32MiB", force=True)
import umem.chainer
import chainer, chainer.functions as F, chainer.links as L
import cupy as cp
x = cp.zeros((200, 200), "f4")
def on_gpu(link):
    link.to_gpu()
    return link
def explained(run):
    try:
        for _ in range(10000):
            run()
    except MemoryError as error:
        return umem.explain(error)
def told(found):
    graph = found.graph
    if graph is None:
        print(None, [one.line for one in found.remedies][:2])
        return
    share = graph.nbytes / found.used_bytes
    print(graph.names[:2], len(graph.names), graph.where, graph.label, graph.stateful)
    print(0.5 <= share <= 1, graph.call_count >= 4, [one.line for one in found.remedies])
"""
CUT = "'with chainer.no_backprop_mode():', 'with umem.chainer.Recompute(\"card\"):']"


def test_a_recurrent_state_that_is_never_cut(kernel_cache: Path) -> None:
    program = """
class Model(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.parts = chainer.ChainList(L.Linear(200, 200), L.LSTM(200, 200))
def main():
    model = on_gpu(Model())
    found = explained(lambda: model.parts[1](model.parts[0](x)))
    told(found)
    count = found.graph.call_count
    print(f"LinearFunction was called {count} times in it with the same parameters" in str(found))
    print("umem.enable" in str(found), "umem.blocks" in str(found))
main()
"""
    assert lines(program, kernel_cache, start=START) == [
        "('model.parts[1].c', 'model.parts[1].h') 2 in <lambda> of <string> LinearFunction "
        "('model.parts[1]',)",
        "True True ['model.parts[1].reset_state()', 'model.parts[1].c.unchain_backward()', " + CUT,
        "True",
        "False False",
    ]


def test_losses_that_are_added_up_or_kept(kernel_cache: Path) -> None:
    program = """
net = on_gpu(L.Linear(200, 200))
def add_up():
    total, made = 0, []
    for _ in range(10000):
        made.append(net(x))
        total += F.sum(F.tanh(made[-1]))
kept = {"train": []}
def keep():
    kept["train"].append(F.sum(F.tanh(net(x))))
told(explained(add_up))
told(explained(keep))
"""
    found = lines(program, kernel_cache, start=START)
    names, told, kept, told_kept = found
    assert names.startswith("('total', 'made[0]')")
    assert "in add_up of <string> LinearFunction ()" in names
    assert told == "True True ['total.unchain_backward()', " + CUT
    assert kept.startswith("(\"kept['train'][0]\", \"kept['train'][1]\")")
    assert told_kept == "True True [\"kept['train'][0].unchain_backward()\", " + CUT


def test_no_graph_is_blamed_that_does_not_hold_the_memory_or_repeats_nothing(
    kernel_cache: Path,
) -> None:
    """A deep network, one layer at several shapes, a short recurrence, and arrays beside it."""
    program = """
shared, cell = on_gpu(L.Convolution2D(4, 4, 3)), on_gpu(L.LSTM(8, 8))
def deep():
    h = x
    for _ in range(300):
        h = F.tanh(on_gpu(L.Linear(200, 200))(h))
def pyramid():
    return [shared(cp.zeros((8, 4, n, n), "f4")) for n in range(30, 130)]
def beside():
    kept = [cell(cp.zeros((8, 8), "f4")) for _ in range(20)]
    while True:
        kept.append(cp.zeros((512, 512), "f4"))
for run in (deep, pyramid, beside):
    cell.reset_state()
    told(explained(run))
print(umem.explain().graph)
"""
    modes = "None ['umem.enable(\"hybrid\")', 'umem.enable()']"
    capped = "None ['umem run --workspace 1MiB SCRIPT', 'umem.enable(\"hybrid\")']"
    assert lines(program, kernel_cache, start=START) == [modes, capped, modes, "None"]


def test_a_graph_that_was_cut_is_not_named(kernel_cache: Path) -> None:
    program = """
cell = on_gpu(L.LSTM(200, 200))
for _ in range(5):
    cell(x)
print(umem.explain().graph is not None, umem.explain().remedies != ())
cell.h.unchain_backward()
print(umem.explain().graph)
"""
    assert lines(program, kernel_cache, start=START) == ["True True", "None"]
