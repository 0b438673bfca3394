"""Runs a random training program by whole batches and in parts, and says what came of it.

"wrong, later" is of a program that people write, in an update after the first.

Chainer alone, with whole batches, is the oracle. Before each update both sides have the same
parameters, kept values and state, so that each update is judged by itself. What is compared is the
change of the parameters: with SGD, the gradient.

``python tests/support/loss_verdicts.py SEED...`` prints programs and their outcomes.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L
from random_losses import Columns, Program, cut, parts, program

from umem.errors import AccumulationError, AccumulationWarning, UmemError

RATE = 0.1
OUTCOMES = (
    "right",
    "right, warned",
    "refused",
    "wrong",
    "wrong, later",
    "wrong, warned",
    "refused, state changed",
    "traceback",
    "raised by the loss",
    "skipped",
)
LINKS: dict[str, Callable[[], Any]] = {
    "l1": lambda: L.Linear(5, 6),
    "l2": lambda: L.Linear(6, 4),
    "l3": lambda: L.Linear(6, 6),
    "l4": lambda: L.Linear(5, 6),
    "out": lambda: L.Linear(6, 3),
    "lv": lambda: L.Linear(6, 3),
    "back": lambda: L.Linear(3, 6),
    "d": lambda: L.Linear(6, 1),
    "step": lambda: L.Linear(4, 6),
    "ln": lambda: L.LayerNormalization(6),
    "bn": lambda: L.BatchNormalization(6),
    "brn": lambda: L.BatchRenormalization(6),
    "emb": lambda: L.EmbedID(7, 6, ignore_label=-1),
    "lstm": lambda: L.LSTM(6, 6),
    "gru": lambda: L.NStepGRU(1, 4, 6, 0),
    "crf": lambda: L.CRF1d(4),
}
PARAMETERS = {"s": (), "proto": (4, 6)}
UNUSED_OFTEN = 4
"""Each so many programs has a link that its loss does not use."""


@dataclass(frozen=True)
class Verdict:
    outcome: str
    update: int
    """The first that it is about."""
    message: str = ""


class State:
    """What the loss function may keep; ``update`` counts the updates from 0."""

    update = 0
    size = 0


class Side:
    """A program's model, optimizer and functions."""

    def __init__(self, one: Program) -> None:
        self.model = _model(one)
        self.model.cleargrads()
        self.optimizer = chainer.optimizers.SGD(RATE).setup(self.model)
        if one.hook == "frozen":
            next(iter(self.model.children())).disable_update()
        elif one.hook:
            name, _, rest = one.hook.partition("(")
            values = [float(each) for each in rest.rstrip(")").split(",")]
            self.optimizer.add_hook(getattr(chainer.optimizer_hooks, name)(*values))
        self.state = State()
        names = {"F": F, "L": L, "np": np, "chainer": chainer}
        self.names = {**names, "model": self.model, "state": self.state, "math": np}
        self.names["optimizer"] = self.optimizer
        exec(compile(one.source, f"<program {one.seed}>", "exec"), self.names)
        self.loss = self.names["loss"]
        self.by_hand = self.names.get("one_round")
        self.closed = self.loss.__code__.co_argcount == 0

    def plainly(self, args: tuple[Any, ...]) -> None:
        """Update by a whole batch; terms in a dictionary are summed."""
        args = self.given(args)
        if self.by_hand is not None:
            self.by_hand(*args)
        else:
            self.optimizer.update(lambda *args: total(self.loss(*args)), *args)

    def given(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Give a closure its arguments by the way."""
        if not self.closed:
            return args
        self.state.part = args
        return ()

    def values(self) -> list[np.ndarray]:
        return [np.array(each.array) for each in self.model.params()]

    def kept(self) -> list[Any]:
        """Copy the persistent values of all links."""
        return [
            copy.deepcopy(link.__dict__[name])
            for link in self.model.links()
            for name in sorted(link._persistent)
        ]

    def snapshot(self) -> tuple[Any, ...]:
        """Copy whatever an update may change."""
        lstm = getattr(self.model, "lstm", None)
        carried = None if lstm is None or lstm.h is None else (lstm.c.array, lstm.h.array)
        return self.values(), self.kept(), carried, copy.deepcopy(self.state.__dict__)

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        """Put back parameters, persistent values, the state of an LSTM, and that of the loss."""
        values, kept, carried, state = snapshot
        for parameter, array in zip(self.model.params(), values, strict=True):
            parameter.array[...] = array
        values = iter(kept)
        for link in self.model.links():
            for name in sorted(link._persistent):
                link.__dict__[name] = copy.deepcopy(next(values))
        if hasattr(self.model, "lstm"):
            self.model.lstm.reset_state()
            if carried is not None:
                self.model.lstm.set_state(*map(chainer.Variable, carried))
        self.state.__dict__.clear()
        self.state.__dict__.update(copy.deepcopy(state))


def total(loss: Any) -> Any:
    return sum(loss.values()) if isinstance(loss, dict) else loss


def _model(one: Program) -> Any:
    """Make the links that the program speaks of, filled by its seed."""
    used = [name for name in LINKS if f"model.{name}" in one.source]
    if one.seed % UNUSED_OFTEN == 0 and "l3" not in used and "params()" not in one.source:
        used.append("l3")
    numbers = np.random.RandomState(one.seed % 2**31)
    model = chainer.Chain()
    with chainer.using_config("dtype", np.dtype(one.dtype)), model.init_scope():
        for name in used:
            setattr(model, name, LINKS[name]())
        for name, shape in PARAMETERS.items():
            if f"model.{name}" in one.source:
                setattr(model, name, chainer.Parameter(np.zeros(shape, one.dtype)))
    for parameter in sorted(model.namedparams()):
        array = parameter[1].array
        array[...] = numbers.randn(*array.shape) * 0.5
    if "model.center" in one.source:
        model.add_persistent("center", np.zeros(6, one.dtype))
    return model


# -- in parts ----------------------------------------------------------------------------------


class Samples(chainer.dataset.Iterator):  # type: ignore[misc]
    """Gives one batch, as a list of examples."""

    epoch, epoch_detail, is_new_epoch = 0, 0.0, False

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args = args
        self.listed = [isinstance(each, list) for each in args]

    def __next__(self) -> list[Any]:
        return list(zip(*self.args, strict=True))

    def convert(self, batch: list[Any], device: Any = None) -> tuple[Any, ...]:
        return tuple(
            list(column) if listed else np.stack(column)
            for listed, column in zip(self.listed, zip(*batch, strict=True), strict=True)
        )


class Parts:
    """Runs updates of one side in parts; a block is open until one of them is refused."""

    def __init__(self, one: Program, side: Side) -> None:
        self.one, self.side = one, side
        self.weight = self._weight()
        self.block: Any = None
        self.samples: Samples | None = None
        self.updater: Any = None
        self.before: list[Any] = []
        """What may be found after a refusal."""

    def _weight(self) -> Any:
        if self.one.weight is None:
            return None
        weight = eval(self.one.weight, self.side.names)
        if self.one.how == "by hand" and callable(weight):
            return lambda: weight(*self.part)
        return weight

    def update(self, columns: Columns, sizes: Sequence[int]) -> None:
        """Run one update of a batch in the way of this case: its parts, or a micro-batch."""
        whole = cut(columns, self.one.names, range(sum(sizes)))
        self.mark()
        if self.one.how == "updater":
            self._by_updater(whole)
            return
        if self.block is None:
            how = (
                {"micro_batch": self.one.micro_batch}
                if self.one.micro_batch
                else {"steps": len(sizes)}
            )
            block = umem.chainer.accumulate(self.side.optimizer, weight=self.weight, **how)
            block.__enter__()
            self.block = block
        if self.one.micro_batch:
            self.side.optimizer.update(self.side.loss, *self.side.given(whole))
            return
        for part in parts(columns, self.one.names, sizes):
            self.part = part
            self.mark()
            if self.one.how == "steps":
                self.side.optimizer.update(self.side.loss, *self.side.given(part))
            else:
                assert self.side.by_hand is not None
                self.side.by_hand(*self.part)

    def mark(self) -> None:
        self.before.append((self.side.kept(), _random()))

    def _by_updater(self, whole: tuple[Any, ...]) -> None:
        """Run one update by an `AccumulatingUpdater`, which the first one makes."""
        if self.updater is None:
            self.samples = Samples(whole)
            self.updater = umem.chainer.AccumulatingUpdater(
                self.samples,
                self.side.optimizer,
                self.one.micro_batch,
                weight=self.weight,
                converter=lambda batch, device=None: self.samples.convert(batch),  # type: ignore[union-attr]
                loss_func=self.side.loss,
            )
        assert self.samples is not None
        self.samples.args = whole
        self.updater.update()

    def close(self, *raised: Any) -> None:
        block, self.block, self.updater = self.block, None, None
        if block is not None:
            block.__exit__(*(raised or (None, None, None)))


def _random() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()
    return (kind, keys.tobytes(), *rest)


def _same(mine: Sequence[Any], theirs: Sequence[Any]) -> bool:
    return all(np.array_equal(*pair) for pair in zip(mine, theirs, strict=True))


# -- verdicts ----------------------------------------------------------------------------------


def judged(one: Program) -> Verdict:
    """Run a program both ways."""
    with warnings.catch_warnings(record=True) as caught, np.errstate(all="ignore"):
        warnings.simplefilter("always")
        try:
            whole, other = Side(one), Side(one)
        except Exception as error:  # a program that cannot be made says nothing
            return Verdict("skipped", 0, repr(error))
        run = Parts(one, other)
        first: Verdict | None = None
        try:
            for found in _updates(one, whole, other, run):
                if found.outcome in ("wrong", "wrong, later") and _warned(caught):
                    return Verdict("wrong, warned", found.update, found.message)
                if found.outcome == "refused":
                    first = first or found
                elif found.outcome != "right":
                    return first or found if found.outcome == "skipped" else found
        finally:
            with contextlib.suppress(Exception):
                run.close()
        return first or Verdict("right, warned" if _warned(caught) else "right", 0)


def _warned(caught: Sequence[warnings.WarningMessage]) -> bool:
    return any(issubclass(each.category, AccumulationWarning) for each in caught)


def _updates(one: Program, whole: Side, other: Side, run: Parts) -> Iterator[Verdict]:
    """Judge update after update."""
    for number, (columns, sizes) in enumerate(one.updates):
        args = cut(columns, one.names, range(sum(sizes)))
        whole.state.update = other.state.update = number
        before = whole.snapshot()
        whole.restore(before)  # whatever is carried over has no graph behind it, on either side
        start = before[0]
        try:
            whole.plainly(args)
        except Exception as error:
            if number == 0:
                yield Verdict("skipped", 0, f"plain Chainer: {error!r}")
            return
        change = [now - then for now, then in zip(whole.values(), start, strict=True)]
        if not all(np.isfinite(each).all() for each in change):
            if number == 0:
                yield Verdict("skipped", 0, "plain Chainer gives nan")
            return
        if number == 0 and _largest(change) < 100 * _rounding(one, start):
            yield Verdict("skipped", 0, "a gradient below rounding")
            return
        other.model.cleargrads()  # by hand, those of a plain update may be there still
        updates = other.optimizer.t
        run.before = []
        try:
            run.update(columns, sizes)
        except UmemError as error:
            yield _refusal(run, other, start, number, error)
            run.close(type(error), error, error.__traceback__)
            other.restore(before)
            other.plainly(cut(columns, one.names, range(sum(sizes))))
            message = _differs(one, other, start, change)
            if message:
                yield Verdict("wrong", number, f"a plain update after the refusal: {message}")
        except Exception as error:
            own = _own(one, columns, sizes, number)
            outcome = "raised by the loss" if type(error) in own else "traceback"
            yield Verdict(outcome, number, f"{type(error).__name__}: {error}")
            return
        else:
            message = _differs(one, other, start, change)
            # The comparison sees what the samples of the first update show (docs: Limits).
            later = number > 0 and one.grade == "other"
            wrong = "wrong, later" if later else "wrong"
            if not message and other.optimizer.t != updates + 1:
                wrong, message = "wrong", f"{other.optimizer.t - updates} updates are counted"
            yield Verdict(wrong if message else "right", number, message)
        other.restore(whole.snapshot())


def _rounding(one: Program, values: Sequence[np.ndarray]) -> float:
    return 8 * float(np.finfo(one.dtype).eps) * max(1.0, _largest(values))


def _largest(arrays: Sequence[np.ndarray]) -> float:
    return max((float(abs(each).max()) for each in arrays if each.size), default=0.0)


def _differs(
    one: Program, side: Side, start: Sequence[np.ndarray], change: Sequence[np.ndarray]
) -> str:
    """Say by how much the parameters have changed otherwise than by the whole batch."""
    mine = [now - then for now, then in zip(side.values(), start, strict=True)]
    off = _largest([a - b for a, b in zip(mine, change, strict=True)])
    size = _largest(change)
    allowed = one.tolerance * size + _rounding(one, start)
    if off <= allowed:  # false for nan
        return ""
    return f"the change is off by {off:.2g} of {size:.2g}"


def _refusal(
    run: Parts, side: Side, start: Sequence[np.ndarray], number: int, error: Exception
) -> Verdict:
    """Say whether a refusal has left everything as it was."""
    changed = []
    if not _same(side.values(), start):
        changed.append("parameters")
    if run.one.how != "by hand":  # there the forward pass is the user's own
        kept, drawn = side.kept(), _random()
        if not any(_same(kept, each) for each, _ in run.before):
            changed.append("persistent values")
        if drawn not in [each for _, each in run.before]:
            changed.append("random state")
    opened = run.block is not None or run.updater is not None
    grads = [each.grad for each in side.model.params() if each.grad is not None]
    if opened and isinstance(error, AccumulationError) and any(each.any() for each in grads):
        changed.append("gradients are left")
    message = f"{type(error).__name__}: {error}"
    if changed:
        return Verdict("refused, state changed", number, f"{', '.join(changed)}; {message}")
    return Verdict("refused", number, message)


def _own(one: Program, columns: Columns, sizes: Sequence[int], number: int) -> set[type[Exception]]:
    """Find what the loss function and the weight= raise themselves, on few samples."""
    count = sum(sizes)
    ends = np.cumsum((0, *sizes))
    some = [range(*pair) for pair in pairwise(ends)]
    some += [(n,) for n in range(count)]
    some += [(0, count // 2), (0, count - 1), (count // 2, count - 1)]
    some += [(0, count // 2, count - 1)] if count > 2 else []
    raised: set[type[Exception]] = set()
    # Where a state is carried over, the order matters.
    for order in (some, some[::-1], sorted(some, key=len)):
        side = Side(one)
        side.state.update = number
        weight = eval(one.weight, side.names) if one.weight else None
        weights = weight.values() if isinstance(weight, dict) else [weight]
        for which in order:
            try:
                args = cut(columns, one.names, which)
                side.plainly(args)
                for each in filter(callable, weights):
                    each(*args)
            except Exception as error:
                raised.add(type(error))
    return raised


def main(seeds: Sequence[str]) -> None:
    for seed in map(int, seeds):
        one = program(seed)
        found = judged(one)
        print(one)
        print(f"=> {found.outcome} (update {found.update}) {found.message}".rstrip())


if __name__ == "__main__":
    main(sys.argv[1:])
