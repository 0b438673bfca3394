"""The memory that a step has to fit, the host's or a GPU's, and its cost there; simulated."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal, NamedTuple, Protocol

from umem.devices.specs import GpuSpec
from umem.errors import BudgetError
from umem.predict.recorded_problem import cost_in_bytes
from umem.predict.techniques.recomputation import largest_budget
from umem.predict.techniques.step_variants import STEPS, Prepared, StepVariants
from umem.trace.events import Op
from umem.trace.trace import Trace
from umem.units import KIB

CALL_BYTES = 256 * KIB
"""The time of Chainer's Python around an operation on the host, as bytes of memory's traffic in
that time: about 25 us at 10 GB/s, whichever machine it is."""
ROOMY_BYTES = 1 << 43
SLOWER_STATES = 3.1
"""An update takes this many times as long with states of eight bits, on NumPy without numba."""
SLOWER_HALVES = 2.0
"""NumPy takes this many times as long for a step in half precision, computed as float32."""
SURE = 1.1
"""Below this many times the least budget, the budget of recomputation is "min", which never fails:
a running pass may need a little more than its trace says, and a budget in bytes would then fail.
"""
TRIES = 3
"""At most this many budgets of recomputation are tried, each less by the excess of the last."""


class Judged(NamedTuple):
    """The bytes, seconds and cost of a step; see `umem.predict.dieting.Combination`."""

    fits: bool
    peak_bytes: int
    seconds: float
    cost: float
    taken_bytes: int


class Place(Protocol):
    """A memory that a step runs in; ``counted`` says what is in its figures beside tensors."""

    budget_bytes: int
    counted: str

    def judged(self, variants: StepVariants, prepared: Prepared) -> Judged:
        """Return the peak, time and cost of a step that was prepared from its variants."""

    def recompute_budget(self, variants: StepVariants) -> int | Literal["min"]:
        """Return the budget of recomputation in bytes with which a step fits, or "min".

        Raises:
            BudgetError: the step fits with no budget. GraphError: there is nothing to plan.
        """


class HostArrays:
    """The memory of NumPy's arrays.

    Args:
        budget_bytes: the bytes that the step may use.
        sure: a budget of recomputation below this many times the least is "min"; inf: always.
    """

    counted = ""

    def __init__(self, budget_bytes: int, sure: float = SURE) -> None:
        self.budget_bytes, self._sure = budget_bytes, sure

    def judged(self, variants: StepVariants, prepared: Prepared) -> Judged:
        """See `Place`."""
        peak = prepared.trace.peak_bytes
        seconds, cost = (
            _of_all(prepared, weight) + _slower(variants, weight)
            for weight in (_measured, _counted)
        )
        return Judged(peak <= self.budget_bytes, peak, seconds, cost, peak)

    def recompute_budget(self, variants: StepVariants) -> int | Literal["min"]:
        """See `Place`. Tries smaller budgets for memory that no plan counts, as gradient sums."""
        budget, least = self.budget_bytes, self._sure * variants.least_bytes
        for _ in range(TRIES):
            if budget < least:
                break
            over = variants.under(budget).peak_bytes - self.budget_bytes
            if over <= 0:
                return budget
            budget -= over + KIB
        if variants.under(None).peak_bytes <= self.budget_bytes:
            return "min"
        raise BudgetError("no plan leaves as little")


class PlainPool:
    """The plain memory of a GPU, whose usable VRAM is the budget.

    Args:
        gpu: the GPU.
        variants: the step whose replays are shared.
        sure: as of `HostArrays`.
    """

    counted = " with the pool's gaps"

    def __init__(self, gpu: GpuSpec, variants: StepVariants, sure: float = SURE) -> None:
        self.budget_bytes, self._gpu, self._subject = gpu.usable_bytes, gpu, variants
        self._sure = sure
        self._roomy = gpu.with_vram(ROOMY_BYTES)

    def judged(self, variants: StepVariants, prepared: Prepared) -> Judged:
        """See `Place`."""
        replays = self._subject.replays
        step = replays.step(prepared.trace, self._gpu, "unmanaged")
        gpu = self._gpu if step.fits else self._roomy  # which times it all the same
        cost = replays.step(prepared.trace, gpu, "unmanaged").cost
        seconds, peak = cost.seconds or 0.0, replays.peak_bytes(prepared.trace)
        if prepared.less is not None:
            less = replays.step(prepared.less, gpu, "unmanaged").cost.seconds or 0.0
            seconds += prepared.more * (seconds - less)
        return Judged(step.fits, peak, seconds, seconds, cost.resident_peak_bytes or peak)

    def recompute_budget(self, variants: StepVariants) -> int | Literal["min"]:
        """See `Place`."""
        budget = largest_budget(variants, self._gpu)
        return budget if budget >= self._sure * variants.least_bytes else "min"


Weight = Callable[[Op], float]
"""The weight of an operation on the host, such as its seconds."""


def _measured(op: Op) -> float:
    return op.host_seconds or 0.0


def _counted(op: Op) -> float:
    return cost_in_bytes(op) + CALL_BYTES


def _of_all(prepared: Prepared, weight: Weight) -> float:
    """Return the weight of a step, with that of the micro-batches that its trace leaves out."""
    total = _of_a_step(prepared.trace, weight)
    if prepared.less is None:
        return total
    return total + prepared.more * (total - _of_a_step(prepared.less, weight))


def _of_a_step(trace: Trace, weight: Weight) -> float:
    return sum(map(weight, trace.ops)) / STEPS


def _slower(variants: StepVariants, weight: Weight) -> float:
    """Return the weight that 8-bit states and half precision add to a step on NumPy."""
    whole, extra = variants.change.passes(variants.size), 0.0
    ops = list(variants.trace.ops)
    if variants.change.small_states and find_spec("numba") is None:
        updates = sum(weight(op) for op in ops if op.phase == "update") / STEPS
        extra += (SLOWER_STATES - 1) * updates
    if variants.change.half:
        rest = sum(weight(op) for op in ops if op.phase != "update") / STEPS
        shown = min(whole, variants.change.shown)
        extra += (SLOWER_HALVES - 1) * rest * whole / shown
    return extra
