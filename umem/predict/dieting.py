"""The cheapest techniques that keep a step to a budget, from its trace; all of it simulated.

Recomputation, micro-batches, a cap on workspace, states of eight bits, half precision, and these
together. On the host the peak is the most bytes alive at once; on a GPU the pool decides whether
the step fits VRAM. Costs are arithmetic and traffic counted in a trace, or times of the GPU's
model, never measured times: the same program has the same choice each time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Literal

from umem.errors import BudgetError, GraphError, ScalingError, StateError
from umem.predict.diet_places import HostArrays, Place
from umem.predict.techniques import changing
from umem.predict.techniques.changes import Changes
from umem.predict.techniques.step_variants import StepVariants
from umem.units import MIB, format_apart, format_bytes

WORTH = 0.95
"""A less exact combination must cost at most this share of a more exact one."""
ROUNDING_RANK = 1
"""The last rank at which results are those of the plain step, up to rounding."""
CAPS = (16 * MIB, MIB)
Again = int | Literal["min"] | None
"""A budget of recomputation: bytes, "min" for the least, None for no recomputation."""
WORDS = {
    "recompute": "recomputation",
    "accumulate": "micro-batches",
    "workspace": "a cap on workspace",
    "8-bit states": "states of 8 bits",
    "half precision": "half precision",
}
"""The techniques that a diet may leave out, each with its name for people."""
PARTS = tuple(WORDS)
"""The names by which a diet is told to leave techniques out."""
_NOTHING = (BudgetError, GraphError, ScalingError, StateError)


@dataclass(frozen=True)
class Combination:
    """Techniques for a step, and its peak and time under them; simulated.

    Attributes:
        change: all techniques but recomputation.
        budget: of `umem.chainer.Recompute`, in bytes or "min"; None: nothing is recomputed.
        peak_bytes: the most bytes of tensors and workspace at once.
        seconds: a step's time; on the host summed from measured times, to be shown only.
        cost: compared between combinations: on a GPU the model's seconds, on the host arithmetic
            and traffic.
        fits: whether the step stays within the budget of memory.
        taken_bytes: what is held against the budget: on the host the peak; on a GPU the VRAM that
            the pool takes, its gaps included, where it is not short of VRAM if the step fits not.
    """

    change: Changes
    budget: Again
    peak_bytes: int
    seconds: float
    cost: float
    fits: bool
    taken_bytes: int

    @property
    def names(self) -> tuple[str, ...]:
        """Return the techniques that are on, with their figures, in words."""
        change = self.change
        micro, cap = change.micro_batch, change.cap_bytes
        found = [
            "half precision" if change.half else "",
            "8-bit states" if change.small_states else "",
            f"micro-batches of {micro}" if micro is not None else "",
            f"workspace of at most {format_bytes(cap)}" if cap is not None else "",
            "" if self.budget is None else f"recomputation within {_shown(self.budget)}",
        ]
        return tuple(filter(None, found))

    @property
    def parts(self) -> tuple[str, ...]:
        """Return those of `PARTS` that are on."""
        change = self.change
        is_on = (
            self.budget is not None,
            change.micro_batch is not None,
            change.cap_bytes is not None,
            change.small_states,
            change.half,
        )
        return tuple(part for part, on in zip(PARTS, is_on, strict=True) if on)

    @property
    def rank(self) -> int:
        """Return how far results may differ, 0 to 3.

        0: the same bits; 1: up to rounding; 2: 8-bit states; 3: half precision.
        """
        change = self.change
        rounds = change.micro_batch is not None or change.cap_bytes is not None
        return 3 if change.half else 2 if change.small_states else int(rounds)

    @property
    def exactness(self) -> str:
        """Return the rank in words; with micro-batches, that dropout draws for each of them."""
        words = ("the same bits", "up to rounding", "8-bit states", "half precision")[self.rank]
        return words if self.change.micro_batch is None else f"{words}, dropout's masks aside"


@dataclass(frozen=True)
class Chosen:
    """The cheapest combination, all that were tried, and the step as it is; simulated.

    ``counted`` says what is in their ``taken_bytes`` beside tensors; empty: nothing.
    """

    best: Combination
    plain: Combination
    tried: tuple[Combination, ...]
    counted: str = ""


def cheapest(variants: StepVariants, place: Place, without: Collection[str] = ()) -> Chosen:
    """Choose the combination of techniques that keeps a step to a budget at the least cost.

    Exact combinations are tried first: results to the bit, then up to rounding, then 8-bit states,
    then half precision. A less exact one is chosen only if its cost is at most 95% of the best so
    far, and not tried where no cost could be that low. 8 and 16 bits on the host, where they save
    no time, are tried only if nothing else fits. The plain step is chosen where it fits.

    Args:
        variants: the step at the wanted size.
        place: where it runs.
        without: the `PARTS` that are not to be used.

    Raises:
        BudgetError: nothing fits; names the least that would.
    """
    search = _Candidates(variants, place, without)
    plain = search.judged(variants)
    best = plain if plain.fits else None
    is_measured = isinstance(place, HostArrays)
    for rank in range(4):
        if best is not None and plain.cost >= WORTH * best.cost:
            break
        if best is not None and is_measured and rank > ROUNDING_RANK:
            break
        found = [one for one in search.of_rank(rank) if one.fits]
        cheapest_found = min(found, key=lambda one: one.cost, default=None)
        limit = inf if best is None else WORTH * best.cost
        if cheapest_found is not None and cheapest_found.cost <= limit:
            best = cheapest_found
    if best is None:
        best = search.least()
        if not best.fits:
            raise BudgetError(_too_little(place, best, plain))
    return Chosen(best, plain, tuple(search.tried), place.counted)


class _Candidates:
    """The combinations to try, by how exact they are, and all that were tried so far."""

    def __init__(self, variants: StepVariants, place: Place, without: Collection[str]) -> None:
        self._subject, self._place, self._without = variants, place, without
        self.tried: list[Combination] = []

    def judged(self, variants: StepVariants, budget: Again = None) -> Combination:
        """Return the peak and cost of a step, under a budget of recomputation if any."""
        if budget is None:
            prepared = variants.prepared("")
        else:
            prepared = variants.prepared("", None if budget == "min" else budget)
        found = Combination(
            variants.change, budget, **self._place.judged(variants, prepared)._asdict()
        )
        self.tried.append(found)
        return found

    def of_rank(self, rank: int) -> Iterator[Combination]:
        """Try and yield the combinations of a `Combination.rank`; of rank 1 those of 0, too."""
        for half, small in ((False, False), (False, True), (True, False), (True, True)):
            if (3 if half else 2 if small else 0) != (rank if rank > 1 else 0):
                continue
            if (half and not self._may("half precision")) or (
                small and not self._may("8-bit states")
            ):
                continue
            with suppress(*_NOTHING):
                changed = self._subject.changed(half=half, small_states=small)
                yield from self._of(changed, rounds=rank > 0)

    def _may(self, part: str) -> bool:
        return part not in self._without

    def _of(self, variants: StepVariants, *, rounds: bool) -> Iterator[Combination]:
        """Try a step with and without recomputation; if it may round, also capped and split."""
        yield from self._again(variants)
        if not rounds:
            return
        steps = [variants]
        for cap in CAPS if self._may("workspace") else ():
            capped = variants.changed(cap_bytes=cap)
            if capped.trace.peak_bytes < WORTH * steps[-1].trace.peak_bytes:
                steps.append(capped)
                yield from self._again(capped)
        for step in steps if self._may("accumulate") else ():
            with suppress(*_NOTHING):
                yield from self._split(step)

    def _again(self, variants: StepVariants) -> Iterator[Combination]:
        plain = self.judged(variants)
        yield plain
        if not plain.fits and self._may("recompute"):
            with suppress(*_NOTHING):
                yield self.judged(variants, self._place.recompute_budget(variants))

    def _split(self, variants: StepVariants) -> Iterator[Combination]:
        """Try micro-batches from the largest, until one fits without recomputation."""
        for micro in changing.smaller_batches(variants):
            for found in self._again(variants.changed(micro_batch=micro)):
                yield found
                if found.fits and found.budget is None:
                    return

    def least(self) -> Combination:
        """Try all techniques together; return what takes the least of all tried, or the cheapest
        that fits.
        """
        for micro in (None, 1) if self._may("accumulate") else (None,):
            with suppress(*_NOTHING):
                self._judge_least(self._subject, micro)
                for small, half in ((True, False), (True, True)):
                    fields = {
                        "small_states": small and self._may("8-bit states"),
                        "half": half and self._may("half precision"),
                    }
                    with suppress(*_NOTHING):
                        self._judge_least(self._subject.changed(**fields), micro)
        fitting = [one for one in self.tried if one.fits]
        if fitting:
            return min(fitting, key=lambda one: one.cost)
        return min(self.tried, key=lambda one: one.taken_bytes)

    def _judge_least(self, variants: StepVariants, micro: int | None) -> None:
        if micro is not None:
            next(changing.smaller_batches(variants))  # or it cannot be split
            variants = variants.changed(micro_batch=micro)
        if self._may("workspace"):
            variants = variants.changed(cap_bytes=CAPS[-1])
        self.judged(variants)
        if self._may("recompute"):
            self.judged(variants, "min")


def _shown(budget: Again) -> str:
    return format_bytes(budget) if isinstance(budget, int) else "the least"


def _too_little(place: Place, least: Combination, plain: Combination) -> str:
    budget, needed = format_apart(place.budget_bytes, least.taken_bytes)
    how = ", ".join(least.names) or "nothing done"
    return (
        f"a budget of {budget} is too small: the step takes {format_bytes(plain.taken_bytes)}"
        f"{place.counted} as it is, and the least that was found is {needed} ({least.taken_bytes} "
        f"bytes), with {how} (simulated). Give as much, or a smaller size"
    )
