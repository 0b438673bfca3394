"""The peak of a settled step, measured, to hold a budget against; NumPy's arrays alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import chainer
import numpy as np

from umem.chainer.parameters_once import parameters
from umem.chainer.tap import Proceed, Subscriber, subscribe, unsubscribe
from umem.devices.open import entered_device
from umem.trace.recording.meter import HostMeter, is_host_measured, was_followed
from umem.trace.recording.storage import root_of
from umem.units import format_bytes

SETTLING = 2
"""Updates of an optimizer before those that are looked at: a plan is followed from the third on."""
OBJECTS = 1 << 20
"""Bytes that Python's own objects, which are measured as well, may take in a step."""


class StepPeak(Subscriber):
    """Measures what a step holds at most, by `tracemalloc`, once it has settled.

    From the end of one update to that of the next: what is there from before, of parameters,
    gradients, states, what links keep and inputs, and all that is allocated. Tracing begins a step
    before, so that what that one leaves is followed. Both run slower. On a GPU, on a model of one,
    and where the program traces by itself, nothing is measured.

    Args:
        period: updates of a turn, where several optimizers take turns.
    """

    place = -5  # around all that allocates

    def __init__(self, period: int = 1) -> None:
        self._period, self._count = period, 0
        self._is_on = self._looks = False
        self._most = 0
        self._meter = HostMeter()
        self._inputs: dict[int, int] = {}
        self.why_not = "the script ended before a step that had settled"
        self.peak_bytes: int | None = None

    def updated(self, optimizers: Iterable[Any]) -> None:
        """An update is over; ``optimizers`` are all of the program's."""
        self._count += 1
        turn, rest = divmod(self._count, self._period)
        if rest:
            return
        if turn == SETTLING:
            self._begin(list(optimizers))
        elif turn == SETTLING + 1 and self._is_on:
            self._looks = True
            self._meter.reset()
        elif self._looks:
            self._look()
            self.peak_bytes = self._most + lasting_bytes(optimizers) + sum(self._inputs.values())
            self.stop()

    def stop(self) -> None:
        """Measure no more."""
        if self._is_on:
            self._is_on = self._looks = False
            unsubscribe(self)
            self._meter.stop()

    def against(self, budget_bytes: int) -> str:
        """Say whether a budget held."""
        peak = self.peak_bytes
        if peak is None:
            return f"whether it held was not measured: {self.why_not}"
        said = f"{format_bytes(peak)} measured in a settled step"
        if peak <= budget_bytes:
            return f"it held: {said}"
        over = f"{format_bytes(peak - budget_bytes)} over the budget"
        if peak <= budget_bytes + OBJECTS:
            return f"it held but for Python's own objects, which are measured too: {said}, {over}"
        return f"it did NOT hold: {said}, {over}"

    # -- the measurement -------------------------------------------------------------------

    def _begin(self, optimizers: list[Any]) -> None:
        arrays = [one.array for each in _set_up(optimizers) for one in parameters(each.target)]
        if entered_device() is not None or not all(
            one is None or isinstance(one, np.ndarray) for one in arrays
        ):
            self.why_not = "on a GPU, and on a model of one, nothing is measured yet"
            return
        if is_host_measured():
            self.why_not = "something else traces memory by tracemalloc"
            return
        self._meter.start()
        self._is_on = True
        subscribe(self)

    def _look(self) -> None:
        """Note the peak; others that measure a part of the step may begin it anew."""
        self._most = max(self._most, self._meter.held().peak)

    def apply(self, proceed: Proceed, func: Any, inputs: Any) -> Any:
        """Note the peak so far, and what comes in from outside."""
        self._look()
        for x in inputs if self._looks else ():
            if getattr(x, "creator_node", None) is None and not isinstance(x, chainer.Parameter):
                array = getattr(x, "array", x)
                if isinstance(array, np.ndarray) and not _is_traced(array):
                    self._inputs[array.ctypes.data] = array.nbytes
        return proceed(func, inputs)

    def backprop_step(self, proceed: Proceed, func: Any, *args: Any) -> None:
        """Note the peak so far."""
        self._look()
        proceed(func, *args)


def _is_traced(array: Any) -> bool:
    """Tell whether an array's memory was allocated since tracing began, as its object was."""
    return was_followed(root_of(array))


def _set_up(optimizers: Iterable[Any]) -> list[Any]:
    return [one for one in optimizers if one.target is not None]


def lasting_bytes(optimizers: Iterable[Any]) -> int:
    """Count parameters, gradients, states and what links keep, made before tracing began."""
    found: list[Any] = []
    for optimizer in _set_up(optimizers):
        for parameter in parameters(optimizer.target):
            rule = parameter.update_rule
            master = getattr(rule, "_fp32_param", None)  # of mixed16, which has no public name
            state = getattr(rule, "state", None) or {}
            found += [parameter.array, parameter.grad, getattr(master, "array", None)]
            found += state.values()
        for link in optimizer.target.links():
            found += [getattr(link, name) for name in link._persistent]  # no public list either
    arrays = {id(one): one for one in found if isinstance(one, np.ndarray)}
    return sum(one.nbytes for one in arrays.values() if not _is_traced(one))
