"""A step on several numbers of ranks, as text and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from umem.as_json import named
from umem.predict.ranks.rank_links import RankLink
from umem.units import format_bytes, format_seconds


@dataclass(frozen=True)
class RankStep:
    """A step on a number of ranks; simulated.

    Attributes:
        ranks: the number of ranks.
        share: a rank's share of the graph or batch, in words.
        peak_bytes: the most bytes of a rank's tensors, workspace and buffers, of the rank with
            the largest peak.
        fits: whether the peak fits the VRAM of the GPU; otherwise the step is timed in managed
            memory.
        sent_bytes: by rank, the bytes of the halo that it sends in a step; 0 for a split batch.
        summed_bytes: the bytes summed over ranks in a step, counted once.
        compute_seconds: of computing, by the rank that is last at each operation.
        exchange_seconds, sum_seconds: of the halo, and of sums, gathers and broadcasts.
    """

    ranks: int
    share: str
    peak_bytes: int
    fits: bool
    sent_bytes: tuple[int, ...]
    summed_bytes: int
    compute_seconds: float
    exchange_seconds: float
    sum_seconds: float

    @property
    def seconds(self) -> float:
        """Return the time of a step: nothing is computed while ranks wait for each other."""
        return self.compute_seconds + self.exchange_seconds + self.sum_seconds

    def to_json(self) -> dict[str, Any]:
        """Return a dict for a JSON file; simulated figures are under names that say so."""
        return named(self, ("ranks", "share", *_FIGURES), _FIGURES)


_FIGURES = ("peak_bytes", "fits", "sent_bytes", "summed_bytes", "compute_seconds",
            "exchange_seconds", "sum_seconds", "seconds")  # fmt: skip


@dataclass(frozen=True)
class RankChoice:
    """The same step on several numbers of ranks; simulated.

    Attributes:
        kind: ``graph``: rows of a graph are split and parameters replicated. ``data``: a batch is
            split and parameters replicated.
        gpu, title, vram_bytes: name, full name and usable VRAM of each rank's GPU.
        link: the link between any two ranks.
        sharded: whether each rank keeps only its share of the optimizer's state.
        steps: the step on each number of ranks, in rising order.
        caveat: the memory that the trace leaves out, so that the real step needs more; or None.
    """

    kind: Literal["graph", "data"]
    gpu: str
    title: str
    vram_bytes: int
    link: RankLink
    sharded: bool
    steps: tuple[RankStep, ...]
    caveat: str | None
    simulated: Literal[True] = True

    @property
    def fits(self) -> tuple[int, ...]:
        """Return the numbers of ranks with which the step fits the VRAM of each."""
        return tuple(step.ranks for step in self.steps if step.fits)

    def to_json(self) -> dict[str, Any]:
        """Return a dict for a JSON file."""
        names = ("simulated", "kind", "gpu", "title", "vram_bytes", "link", "sharded", "caveat")
        return named(self, (*names, "steps"))

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """Yield the lines of the report."""
        vram = format_bytes(self.vram_bytes)
        split = "rows of the graph" if self.kind == "graph" else "the batch"
        state = "; each keeps its share of the optimizer's state" if self.sharded else ""
        yield f"Ranks with {self.title}, {vram} of VRAM each; all figures are simulated."
        yield f"Kind: {self.kind} ({split} split, parameters on every rank{state})."
        rate, latency = self.link.bandwidth / 1e9, format_seconds(self.link.latency_seconds)
        yield f"Link: {self.link.name}, {rate:g} GB/s each way and {latency} a message"
        yield f"  ({self.link.source})"
        yield ""
        yield f"{'ranks':>5}  {'peak a rank':>11}  {'most sent':>10}  {'a step':>9}  of which"
        for step in self.steps:
            yield _line(step)
        if self.caveat is not None:
            yield f"\n{self.caveat}"


def _line(step: RankStep) -> str:
    times = [format_seconds(s) for s in (step.seconds, step.compute_seconds)]
    times += [format_seconds(s) for s in (step.exchange_seconds, step.sum_seconds)]
    sent = format_bytes(max(step.sent_bytes, default=0))
    fits = "" if step.fits else "; does not fit: paged"
    return (
        f"{step.ranks:>5}  {format_bytes(step.peak_bytes):>11}  {sent:>10}  {times[0]:>9}  "
        f"{times[1]} computing, {times[2]} halo, {times[3]} sums; {step.share}{fits}"
    )
