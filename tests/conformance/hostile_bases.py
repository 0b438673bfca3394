"""Small recorded steps, each as the lines of its file; hostile_traces.py changes them."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import umem.chainer  # it mends Chainer, which has to come after it

# isort: split

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

import umem
from umem.trace import Access, Alloc, Event, Free, Hint, Mark, Op, Trace
from umem.trace.trace import tail

MOST_OPS = 200


class Base(NamedTuple):
    """A trace that is whole: its lines, without their ends."""

    name: str
    lines: tuple[bytes, ...]


def bases() -> list[Base]:
    """All of them; none has more than `MOST_OPS` operations."""
    rng = np.random.RandomState(0)
    mlp, deep, conv, lstm = _mlp(rng), _deep(rng), _conv(rng), _lstm(rng)
    found = {
        "mlp": _recorded(mlp), "mlp, stacks": _recorded(mlp, stacks=True),
        "mlp, three steps": _recorded(mlp, count=3), "mlp, cut": _cut(_recorded(mlp, count=3)),
        "deep, workspace": _measured(deep), "conv": _measured(conv), "lstm": _recorded(lstm),
        "lstm, two steps": _recorded(lstm, count=2), "arrays": _by_hand(), "hints": _hinted(),
        "deep, cupy": replace(_recorded(deep), backend="cupy"),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        whole = [_base(name, trace, Path(folder)) for name, trace in found.items()]
    return [*whole, _of_two_sizes(whole[0], whole[0])]


def _of_two_sizes(small: Base, large: Base) -> Base:
    """A file of two sizes, as an older umem has written it."""
    header = json.dumps({**json.loads(small.lines[0]), "sizes": [4, 8]}).encode()
    return Base("mlp, sizes", (header, *small.lines[1:], *large.lines[1:]))


def _base(name: str, trace: Trace, folder: Path) -> Base:
    assert sum(isinstance(event, Op) for event in trace.events) <= MOST_OPS, name
    path = trace.save(folder / "base", force=True)
    lines = gzip.decompress(path.read_bytes()).split(b"\n")[:-1]
    return Base(name, tuple(lines))


# -- what is recorded --------------------------------------------------------------------------

Step = Callable[..., None]


def _recorded(step: Step, *, count: int = 1, **options: Any) -> Trace:
    step()
    with umem.record(**options) as recorder:
        for _ in range(count):
            step()
    return recorder.trace


def _measured(step: Step) -> Trace:
    """With workspace."""
    return _recorded(step).with_workspace(_recorded(step, measure="workspace"))


def _cut(trace: Trace) -> Trace:
    """From the end of its first step on, as `umem run --record` cuts it."""
    return tail(trace, trace.events.index(Mark("step")) + 1)


def _trainer(model: Any, optimizer: Any, make: Callable[[int], Any]) -> Step:
    optimizer.setup(model)

    def step(size: int = 4) -> None:
        model.cleargrads()
        model(make(size)).backward()
        optimizer.update()

    return step


class _Net(chainer.Chain):
    """Links after one another, and a loss."""

    def __init__(self, forward: Callable[..., Any], **links: Any) -> None:
        super().__init__()
        self._run = forward
        with self.init_scope():
            for name, link in links.items():
                setattr(self, name, link)

    def forward(self, x: Any) -> Any:
        return F.mean(F.square(self._run(self, x)))


def _rows(rng: Any, *shape: int) -> Callable[[int], Any]:
    return lambda size: rng.standard_normal((size, *shape)).astype("f")


def _mlp(rng: Any) -> Step:
    net = _Net(lambda m, x: m.b(F.relu(m.a(x))), a=L.Linear(32, 64), b=L.Linear(64, 8))
    return _trainer(net, chainer.optimizers.Adam(), _rows(rng, 32))


def _deep(rng: Any) -> Step:
    links = {f"l{i}": L.Linear(24, 24) for i in range(12)}

    def run(m: Any, x: Any) -> Any:
        for name in links:
            x = F.dropout(F.sigmoid(m[name](x)), 0.2)
        return x

    return _trainer(_Net(run, **links), chainer.optimizers.MomentumSGD(), _rows(rng, 24))


def _conv(rng: Any) -> Step:
    def run(m: Any, x: Any) -> Any:
        x = F.max_pooling_2d(F.relu(m.norm(m.a(x))), 2)
        return m.b(F.dropout(F.average_pooling_2d(x, 2)))

    links = {
        "a": L.Convolution2D(3, 4, 3, pad=1),
        "norm": L.BatchNormalization(4),
        "b": L.Linear(16, 5),
    }
    return _trainer(_Net(run, **links), chainer.optimizers.SGD(), _rows(rng, 3, 8, 8))


def _lstm(rng: Any) -> Step:
    def run(m: Any, x: Any) -> Any:
        m.cell.reset_state()
        for _ in range(5):
            h = m.cell(x)
        return m.out(h)

    links = {"cell": L.LSTM(8, 16), "out": L.Linear(16, 3)}
    return _trainer(_Net(run, **links), chainer.optimizers.SGD(), _rows(rng, 8))


# -- what is made by hand ----------------------------------------------------------------------


def _by_hand() -> Trace:
    """Arrays and a number that is used twice, without a step."""
    x, y = Access(0, 0, 4096), Access(1, 0, 4096)
    events: list[Event] = [
        Alloc(0, 4096, "input", "x", True), Alloc(1, 4096, "array", "y"),
        Op("square", "array", (x,), (y,), 1024, 8192, "random", 1e-5, 512),
        Op("add", "array", (x, y), (y,), 1024, 8192, "strided", 1e-5, 0), Free(1),
        Alloc(1, 1 << 20, "array", "z"), Op("fill", "array", (), (Access(1, 0, 1 << 20),)), Free(1),
    ]  # fmt: skip
    return Trace(events, "model", {"made": "by hand"})


def _hinted() -> Trace:
    """A step of 16 MiB tensors with a hint of each kind."""
    size = 16 << 20
    events: list[Event] = [Alloc(0, size, "parameter", "W", True), Mark("start")]
    for number, action in enumerate(
        ("read_mostly", "prefetch", "preferred_location", "discard", "accessed_by"), 1
    ):
        before, after = Access(number - 1, 0, size), Access(number, 0, size)
        events += [
            Alloc(number, size, "activation", f"y{number}"),
            Hint(action, (before,), "cpu" if number % 2 else 0, False, number == 2),
            Op("Linear", "forward", (Access(0, 0, size), before), (after,), 10**9, 3 * size),
        ]
    for number in range(5, 0, -1):
        events.append(Op("LinearGrad", "backward", (Access(number, 0, size),), (), 10**9, size))
        events.append(Free(number))
    events += [Op("SGD", "update", (), (Access(0, 0, size),)), Mark("step")]
    return Trace(events)
