"""The proof: what parts of a few samples give is compared with what those give at once."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from chainer.functions.noise.dropout import Dropout

from umem.chainer.accumulation.dropout_masks import DropoutMasks
from umem.chainer.accumulation.part_reports import PartReports
from umem.chainer.accumulation.splitting import Batch, ChosenSamples
from umem.chainer.accumulation.step_state import StepState, numpy_position
from umem.chainer.accumulation.whole_gradient import WholeGradient
from umem.chainer.tap import Proceed, Subscriber, subscribe, unsubscribe
from umem.errors import AccumulationError, AccumulationWarning, warn_at_program

MOST_APART = 1e-5
"""The difference relative to the norm of the gradient; as many roundings of float16 where that is
more."""
ROUNDINGS = 64
RANDOM = ("Zoneout", "RReLU", "Gaussian", "SimplifiedDropconnect", "GumbelSoftmax")
"""Functions that draw, for where the generator cannot be read."""
LEAST = 4
"""The fewest samples that have two uneven splits."""


def prove(gradient: WholeGradient, model: Any, lossfun: Any, batch: Batch, most: int) -> bool:
    """Compare two uneven splits of some samples with all of those at once; leaves no trace.

    Args:
        most: so many samples fit in memory; four are tried where that is less.

    Returns whether it could be compared: a gradient may be infinite while a loss scale is sought.

    Raises:
        AccumulationError: they differ; names what mixes samples where it is found.

    Cost: three passes over that many samples, and one more copy of the gradients.
    """
    state = StepState(model)
    for size in sorted({min(batch.size, max(most, LEAST)), min(batch.size, most)}, reverse=True):
        if size < 2:
            break
        which = np.linspace(0, batch.size - 1, size).astype(int).tolist()
        try:
            with PartReports().part(), gradient.compared():
                return _compared(gradient, model, lossfun, ChosenSamples(batch, which), state)
        except MemoryError:
            if size <= most:
                raise
        finally:
            gradient.masks = None
            model.cleargrads()
            state.put_back()
    warn_at_program(
        "no two samples fit in memory at once, so parts were not compared with a whole",
        AccumulationWarning,
    )
    return True


def _compared(
    gradient: WholeGradient, model: Any, lossfun: Any, chosen: ChosenSamples, state: StepState
) -> bool:
    masks = DropoutMasks(chosen.size, stay=True)  # CuPy's generator cannot be put back

    def gradients(sizes: Sequence[int], samples: Batch = chosen) -> list[Any]:
        state.put_back()
        gradient.masks = masks
        gradient.leave(lossfun, samples, sizes, None)
        found = [p.grad for p in model.params()]
        model.cleargrads()
        return found

    with random_functions() as others:
        whole = gradients([chosen.size])
    norm = _norm(whole)
    if others:
        warn_at_program(
            f"{', '.join(others)}: draws random numbers of its own, so that parts and the whole "
            "draw others, and the gradient of parts was not compared with the whole's",
            AccumulationWarning,
        )
        return True
    if not math.isfinite(norm) or not norm:  # zeros show nothing
        return False
    for sizes in _splits(chosen.size):
        parts = gradients(sizes)
        if _are_half(parts) and not math.isfinite(_norm(parts)):
            return False
        apart = _apart(whole, parts)
        del parts
        if apart <= _allowed(whole) * norm:
            continue
        if not masks.are_used:  # a norm near zero: other orders of the same samples are as far
            backwards = ChosenSamples(chosen, range(chosen.size)[::-1])
            alone = max(_norm(gradients([1], ChosenSamples(chosen, [at]))) for at in (0, -1))
            another_order = _apart(whole, gradients([chosen.size], backwards))
            if apart <= min(3 * another_order, _allowed(whole) * alone):
                continue
        _refuse(apart / norm if norm else math.inf, sizes, chosen, lossfun, state, gradient)
    return True


def _splits(size: int) -> list[list[int]]:
    """Two uneven ones, where there are so many.

    A size comes back at once, so that `umem.chainer.Recompute` does not take graphs for strange.
    """
    if size < LEAST:
        return [[1] * size]
    part = size // 4
    return [[part, part, size - 2 * part], [size - 2 * part, part, part]]


def _refuse(
    apart: float,
    sizes: Sequence[int],
    chosen: ChosenSamples,
    lossfun: Any,
    state: StepState,
    gradient: WholeGradient,
) -> None:
    found = what_mixes(lossfun, chosen, state, gradient)
    why = (
        f"{found} mixes samples. umem.chainer.Recompute saves memory on the whole batch, exactly"
        if found
        else "no function was seen to mix samples: the loss is divided by something else than "
        f"{'weight= says' if gradient.weight is not None else 'umem read from its tape'}, or what "
        "a link keeps from call to call goes from part to part"
    )
    raise AccumulationError(
        f"the gradient of {chosen.size} samples in parts of {' and '.join(map(str, sizes))} is "
        f"{apart:.1e} of its norm away from that of all at once (allowed: {MOST_APART:.0e}): {why}"
    )


def _allowed(gradients: Sequence[Any]) -> float:
    coarsest = max(np.finfo(g.dtype).eps for g in gradients if g is not None)
    return max(MOST_APART, ROUNDINGS * float(coarsest) if coarsest > 1e-5 else 0.0)


def _are_half(gradients: Sequence[Any]) -> bool:
    """Tell whether some are float16, which a sum over parts leaves before the whole's mean does."""
    return any(g is not None and g.dtype == np.float16 for g in gradients)


def _norm(gradients: Sequence[Any]) -> float:
    return math.sqrt(sum(_square(g) for g in gradients if g is not None))


def _apart(whole: Sequence[Any], parts: Sequence[Any]) -> float:
    """The norm of the difference."""
    total = 0.0
    for a, b in zip(whole, parts, strict=True):
        if a is None or b is None:
            total += sum(_square(g) for g in (a, b) if g is not None)
        else:
            total += _square(a - b)
    return math.sqrt(total) if math.isfinite(total) else math.inf


def _square(array: Any) -> float:
    flat = array.ravel().astype("d")
    return float(flat @ flat)


# -- what draws random numbers --------------------------------------------------------------------


class _Draws(Subscriber):
    """Names what draws random numbers, but for dropout, of which the masks are known."""

    place = -2

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self._thread, self._last = threading.get_ident(), numpy_position()

    def outside(self) -> None:
        """See whether numbers were drawn since the last function."""
        if (now := numpy_position()) != self._last:
            self.names["code outside of Chainer's functions"] = None
            self._last = now

    def apply(self, proceed: Proceed, func: Any, inputs: Any) -> Any:
        """See whether a function draws."""
        if threading.get_ident() != self._thread:
            return proceed(func, inputs)
        self.outside()
        outputs = proceed(func, inputs)
        now = numpy_position()
        if type(func) is not Dropout and (now != self._last or type(func).__name__ in RANDOM):
            self.names[f"'{func.label}'"] = None
        self._last = now
        return outputs


@contextmanager
def random_functions() -> Iterator[dict[str, None]]:
    """Names of what draws random numbers meanwhile, in the calling thread."""
    draws = _Draws()
    subscribe(draws)
    try:
        yield draws.names
        draws.outside()
    finally:
        unsubscribe(draws)


# -- what mixes samples ---------------------------------------------------------------------------


class _Call(NamedTuple):
    label: str
    inputs: list[Any]
    outputs: list[Any]
    """Nodes, which stay alive so that they are told apart."""
    arrays: list[Any]


class _Calls(Subscriber):
    """Writes down each call of a function, with its results."""

    place = -2

    def __init__(self) -> None:
        self.found: list[_Call] = []
        self._thread = threading.get_ident()

    def apply(self, proceed: Proceed, func: Any, inputs: Any) -> Any:
        """Write one down."""
        outputs = proceed(func, inputs)
        if threading.get_ident() == self._thread:
            nodes = [getattr(x, "node", None) for x in inputs]
            call = _Call(func.label, nodes, [y.node for y in outputs], [y.array for y in outputs])
            self.found.append(call)
        return outputs


def what_mixes(
    lossfun: Any, chosen: ChosenSamples, state: StepState, gradient: WholeGradient
) -> str:
    """Name the function by which one sample reaches another; empty where none was seen.

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
    """How a result changes with the first of ``size`` samples.

    ``same``: not; ``own``: where that sample is; ``mixed``: where others are; ``reduced``: it has
    no place for each sample.
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
