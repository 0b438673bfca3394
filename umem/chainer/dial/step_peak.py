"""The measured peak of a step in the steady state, to compare with a budget."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import chainer
import numpy as np

from umem.chainer.parameters_once import parameters
from umem.chainer.recompute.observing import meter_of
from umem.chainer.tap import Proceed, Subscriber, subscribe, unsubscribe
from umem.devices.open import entered_device
from umem.trace.recording.meter import BlockMeter, HostMeter, is_host_measured, was_followed
from umem.trace.recording.storage import root_of
from umem.units import format_bytes

SETTLING = 2
"""Updates before the measured ones: a plan of recomputation is followed from the third on."""
OBJECTS = 1 << 20
"""At most this many bytes over the budget are laid to Python's own objects, which count as well."""


class StepPeak(Subscriber):
    """Measures the peak bytes of a step in the steady state.

    A step lasts from the end of one update to that of the next. On a GPU the peak is that of its
    pools, which have whatever the process has there. On the host, by `tracemalloc`, counted are the
    parameters, gradients, states, persistent arrays of links and inputs that were there before, and
    everything that is allocated; tracing begins a step earlier, so that arrays which that step
    leaves are followed, and both steps run slower. On a virtual GPU, and where the program uses
    tracemalloc itself, nothing is measured.

    Args:
        period: updates of a step; more than 1 where several optimizers take turns.

    Attributes:
        peak_bytes: the peak, once measured; None before.
        why_not: the reason where nothing was measured.
    """

    place = -5  # around all that allocates

    def __init__(self, period: int = 1) -> None:
        self._period, self._count = period, 0
        self._is_on = self._looks = False
        self._most = 0
        self._meter: BlockMeter = HostMeter()
        self._inputs: dict[int, int] = {}
        self.why_not = "the script ended before a step that had settled"
        self.peak_bytes: int | None = None

    def updated(self, optimizers: Iterable[Any]) -> None:
        """Handle the end of an update: count it, and begin or end the measurement where it is time.

        Args:
            optimizers: all of the program's.
        """
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
            self.peak_bytes = self._most
            if isinstance(self._meter, HostMeter):
                self.peak_bytes += lasting_bytes(optimizers) + sum(self._inputs.values())
            self.stop()

    def stop(self) -> None:
        """Stop measuring; a second time does nothing."""
        if self._is_on:
            self._is_on = self._looks = False
            unsubscribe(self)
            self._meter.stop()

    def against(self, budget_bytes: int) -> str:
        """Describe whether the measured peak is within a budget, or why that is not known."""
        peak = self.peak_bytes
        if peak is None:
            return f"whether it held was not measured: {self.why_not}"
        of_arrays = "" if isinstance(self._meter, HostMeter) else " of arrays, without pool gaps,"
        said = f"{format_bytes(peak)}{of_arrays} measured in a settled step, its update included"
        if peak <= budget_bytes:
            return f"it held: {said}"
        over = f"{format_bytes(peak - budget_bytes)} over the budget"
        if isinstance(self._meter, HostMeter) and peak <= budget_bytes + OBJECTS:
            return f"it held but for Python's own objects, which are measured too: {said}, {over}"
        return f"it did NOT hold: {said}, {over}"

    # -- the measurement -------------------------------------------------------------------

    def _begin(self, optimizers: list[Any]) -> None:
        """Start the meter of the memory that parameters are in, if that can be measured."""
        arrays = [one.array for each in _set_up(optimizers) for one in parameters(each.target)]
        if entered_device() is not None:
            self.why_not = "on a virtual GPU nothing is measured"
            return
        self._meter = meter_of(arrays)
        if isinstance(self._meter, HostMeter) and is_host_measured():
            self.why_not = "something else traces memory by tracemalloc"
            return
        why_not = self._meter.why_not()
        if why_not is not None:
            self.why_not = why_not
            return
        self._meter.start()
        self._is_on = True
        subscribe(self)

    def _look(self) -> None:
        """Take in the meter's peak, which others that measure a part of the step may reset."""
        self._most = max(self._most, self._meter.held().peak)

    def apply(self, proceed: Proceed, func: Any, inputs: Any) -> Any:
        """Take in the peak before a function runs, and the bytes of inputs made before tracing."""
        self._look()
        for x in inputs if self._looks else ():
            if getattr(x, "creator_node", None) is None and not isinstance(x, chainer.Parameter):
                array = getattr(x, "array", x)
                if isinstance(array, np.ndarray) and not _is_traced(array):
                    self._inputs[array.ctypes.data] = array.nbytes
        return proceed(func, inputs)

    def backprop_step(self, proceed: Proceed, func: Any, *args: Any) -> None:
        """Take in the peak before a function's backward runs."""
        self._look()
        proceed(func, *args)


def _is_traced(array: Any) -> bool:
    """Tell whether an array's root was made since tracing began, so that its bytes are traced."""
    return was_followed(root_of(array))


def _set_up(optimizers: Iterable[Any]) -> list[Any]:
    return [one for one in optimizers if one.target is not None]


def lasting_bytes(optimizers: Iterable[Any]) -> int:
    """Sum the bytes of parameters, gradients, states and persistent arrays that are not traced."""
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
