"""Graphs that are cut: what is left begins at the cut, and has the numbers of plain Chainer."""

from __future__ import annotations

import inspect
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from software_programs import needs_compiler, needs_cupy, run

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L

pytestmark = pytest.mark.filterwarnings("ignore::umem.errors.RecomputeWarning")
BUDGETS = ("min", "70%", 260_000)


class Programs:
    """Two networks, one after the other, and the ways to cut between them.

    In each step one network is updated, the graph is cut behind it, and the other network goes
    backward again, as adversarial networks do: nothing behind the cut can run again.
    """

    def __init__(self, xp: Any = np, norm: bool = False, depth: int = 6) -> None:
        np.random.seed(0)
        layers = [p for _ in range(depth) for p in self.layer(norm, F.relu)]
        self.first = chainer.Sequential(L.Linear(8, 32), *layers, F.tanh)
        layers = [p for _ in range(depth) for p in self.layer(False, F.leaky_relu)]
        self.second = chainer.Sequential(*layers, L.Linear(32, 1))
        self.memory = chainer.Sequential(L.LSTM(32, 32), F.tanh)
        self.nets = [self.first, self.second, self.memory]
        if xp is not np:
            for net in self.nets:
                net.to_gpu()
        self.optimizers = [chainer.optimizers.SGD(1e-5).setup(net) for net in self.nets]
        self.z = xp.asarray(np.random.randn(16, 8).astype("f"))
        self.number = 0

    def layer(self, norm: bool, function: Any) -> list[Any]:
        normed = [L.BatchNormalization(32)] if norm else []
        return [L.Linear(32, 32), *normed, function]

    def update(self, net: int, *losses: Any) -> None:
        self.nets[net].cleargrads()
        for loss in losses:
            loss.backward()
        self.optimizers[net].update()

    def adversarial(self) -> None:
        """Cuts after a backward, and between a forward and its backward."""
        for i in range(2):
            x = self.first(chainer.Variable(self.z))
            y = self.second(x)
            if i == 0:
                self.update(0, F.sum(-y))
            x.unchain_backward()
            self.second(chainer.Variable(0.5 * x.array))
            self.update(1, F.sum(y))

    def several(self) -> None:
        """Cuts one graph in several places, one after another, each behind the one before."""
        h = chainer.Variable(self.z)
        held = []
        for i, part in enumerate(self.first):
            h = part(h)
            if i % 4 == 1:
                held.append(h)
        y = self.second(h)
        self.update(0, F.sum(y * y))
        for cut in reversed(held[-2:]):
            cut.unchain() if self.number % 2 else cut.unchain_backward()
        del held, cut
        h.unchain_backward()
        self.second.cleargrads()
        F.sum(y).backward()

    def outputs_one_by_one(self) -> None:
        """Cuts a function with two outputs behind one of them, then behind the other."""
        cell = self.memory[0]
        cell.reset_state()
        x = self.first(chainer.Variable(self.z))
        for _ in range(3):
            h = self.memory(x)
        y = self.second(F.tanh(cell.c) * F.tanh(cell.h) + 0 * h)
        self.nets[2].cleargrads()
        self.update(0, F.sum(y))
        self.optimizers[2].update()
        cell.h.unchain()
        cell.c.unchain()
        self.update(1, F.sum(y))

    def lost_variables(self) -> None:
        """Lets go of the variable at which the graph was cut."""
        x = self.first(chainer.Variable(self.z))
        y, other = self.second(x), self.second(F.tanh(x * x))
        self.update(0, F.sum(y))
        x.unchain_backward()
        del x
        self.update(1, F.sum(y), F.sum(other))

    def gradients(self) -> None:
        """Asks for gradients by `chainer.grad` after a cut."""
        x = self.first(chainer.Variable(self.z))
        y = self.second(x)
        self.update(0, F.sum(y))
        x.unchain_backward()
        (gx,) = chainer.grad([y], [x], enable_double_backprop=True)
        self.second.cleargrads()
        F.sum(gx * gx).backward()
        self.update(1, F.sum(y))

    def never_backward(self) -> None:
        """Cuts a graph of several networks before any backward, and another one beside it."""
        x = self.first(chainer.Variable(self.z))
        y = self.second(x)
        u = self.first(chainer.Variable(self.z * 2))
        v = self.second(u)
        x.unchain_backward()
        self.update(0, F.sum(v))
        u.unchain_backward()
        self.update(1, F.sum(y), F.sum(v * y))

    def by_the_step(self) -> None:
        """Takes another of the programs in each step, so that graphs do not repeat."""
        programs = [self.adversarial, self.several, self.outputs_one_by_one, self.lost_variables]
        programs[self.number * 7 % 4]()


NAMES = [
    name
    for name, value in vars(Programs).items()
    if inspect.isfunction(value) and value.__doc__ and name != "__init__"
]


def numbers(name: str, memory: Any, xp: Any = np, *, steps: int = 7, norm: bool = False) -> Any:
    """Parameters and gradients after each step of a program."""
    programs = Programs(xp, norm)
    found = []
    with memory:
        for _ in range(steps):
            getattr(programs, name)()
            programs.number += 1
            for net in programs.nets:
                for path, p in sorted(net.namedparams()):
                    grad = None if p.grad is None else p.grad.tobytes()
                    found.append((name, programs.number, path, p.array.tobytes(), grad))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_graph_that_was_cut_has_the_numbers_of_plain_chainer(name: str, norm: bool) -> None:
    plain = numbers(name, nullcontext(), norm=norm)
    for budget in BUDGETS:
        assert numbers(name, umem.chainer.Recompute(budget), norm=norm) == plain


def test_what_is_left_of_a_cut_graph_is_planned() -> None:
    memory = umem.chainer.Recompute("min")
    numbers("lost_variables", memory)
    assert memory.planned_count >= 3


def test_a_cut_frees_what_is_behind_it() -> None:
    """Nothing holds the functions behind a cut, whose arrays plain Chainer frees there."""
    programs = Programs()
    with umem.chainer.Recompute("min"):
        for _ in range(4):
            x = programs.first(chainer.Variable(programs.z))
            y = programs.second(x)
            programs.update(0, F.sum(y))
            middle = x.creator_node.inputs[0].creator_node
            behind = [weakref.ref(x.creator_node), weakref.ref(middle)]
            del middle
            x.unchain_backward()
            assert [one() for one in behind] == [None, None]
            programs.update(1, F.sum(y))


@needs_compiler
@needs_cupy
def test_graphs_that_were_cut_have_their_numbers_on_cupy(kernel_cache: Path) -> None:
    source = inspect.getsource
    program = f"""
import inspect, sys
from contextlib import nullcontext
import umem
gpu = umem.software_gpu("t4", "256MiB", force=True, model=False)
import umem.chainer
import warnings; warnings.simplefilter("ignore")
import chainer, chainer.functions as F, chainer.links as L, cupy as cp, numpy as np
from typing import Any
{source(Programs)}
{source(numbers)}
for name in {NAMES!r}:
    plain = numbers(name, nullcontext(), cp, steps=5)
    for budget in ("min", "70%", "card"):
        same = numbers(name, umem.chainer.Recompute(budget), cp, steps=5) == plain
        print(name, budget, "same" if same else "DIFFERENT")
"""
    lines = run(program, kernel_cache, start="").splitlines()
    assert len(lines) == 3 * len(NAMES)
    assert [line for line in lines if not line.endswith("same")] == []
