"""The function by which one sample of a batch reaches another, found by changing one."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from umem.chainer.accumulation.dropout_masks import DropoutMasks
from umem.chainer.accumulation.part_reports import PartReports
from umem.chainer.accumulation.splitting import ChosenSamples
from umem.chainer.accumulation.step_state import StepState
from umem.chainer.accumulation.whole_gradient import WholeGradient
from umem.chainer.tap import Proceed, Subscriber, subscribe, unsubscribe


class _Call(NamedTuple):
    label: str
    inputs: list[Any]
    outputs: list[Any]
    """Nodes, kept alive so that their ids stay unique."""
    arrays: list[Any]


class _Calls(Subscriber):
    """Records each call of a function with its results."""

    place = -2

    def __init__(self) -> None:
        self.found: list[_Call] = []
        self._thread = threading.get_ident()

    def apply(self, proceed: Proceed, func: Any, inputs: Any) -> Any:
        """Record one call."""
        outputs = proceed(func, inputs)
        if threading.get_ident() == self._thread:
            nodes = [getattr(x, "node", None) for x in inputs]
            call = _Call(func.label, nodes, [y.node for y in outputs], [y.array for y in outputs])
            self.found.append(call)
        return outputs


def what_mixes(
    lossfun: Any, chosen: ChosenSamples, state: StepState, gradient: WholeGradient
) -> str:
    """Find the function by which one sample influences another, by changing one; "" if none is
    seen.

    Cost: two times forward over the samples.
    """
    others = ChosenSamples(chosen, [chosen.size - 1, *range(1, chosen.size)])
    gradient.masks = DropoutMasks(chosen.size, stay=True)
    once, again = (_calls(lossfun, batch, state, gradient) for batch in (chosen, others))
    kinds: dict[int, str] = {}
    origins: dict[int, str] = {}
    for at, (a, b) in enumerate(zip(once, again, strict=False)):
        if a.label != b.label:
            break
        reached = [kinds.get(id(node), "same") for node in b.inputs]
        origin = next((origins[id(n)] for n in b.inputs if id(n) in origins), None)
        for node, x, y in zip(b.outputs, a.arrays, b.arrays, strict=True):
            kind = _kind(x, y, chosen.size)
            if kind == "mixed" and "mixed" not in reached:
                mine = f"'{b.label}' (call {at + 1} of {len(again)}, result {y.shape})"
                return origin or mine
            kinds[id(node)] = kind
            if kind == "reduced":
                origins[id(node)] = origin or (
                    f"'{b.label}' (call {at + 1} of {len(again)}, result {y.shape})"
                )
    return ""


def _calls(
    lossfun: Any, batch: ChosenSamples, state: StepState, gradient: WholeGradient
) -> list[_Call]:
    """Run a loss function forward on a batch, and return all calls of functions."""
    calls = _Calls()
    state.put_back()
    part = slice(0, batch.size)
    if gradient.masks is not None:
        gradient.masks.begin(part)
    given = batch.take(part)
    with gradient.listening(), PartReports().part():
        subscribe(calls)
        try:
            lossfun(*given.args, **given.kwargs)
        finally:
            unsubscribe(calls)
    return calls.found


def _kind(x: Any, y: Any, size: int) -> str:
    """Classify how a result changes when the first of ``size`` samples is changed.

    Returns:
        ``same``: it does not; ``own``: in the first sample's rows only; ``mixed``: in other rows;
        ``reduced``: it has no row for each sample.
    """
    if x.shape != y.shape:
        return "reduced"
    differs = x != y
    if not bool(differs.any()):
        return "same"
    axes = [axis for axis, n in enumerate(x.shape) if n >= size and n % size == 0]
    for axis in axes:
        rest = [slice(None)] * x.ndim
        rest[axis] = slice(x.shape[axis] // size, None)
        if not bool(differs[tuple(rest)].any()):
            return "own"
    return "mixed" if axes else "reduced"
