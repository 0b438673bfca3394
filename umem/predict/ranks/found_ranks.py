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
    """A step on so many ranks; simulated.

    Attributes:
        ranks: how many.
        share: what a rank has, in words.
        peak_bytes: the most that the tensors, workspace and buffers of a rank hold, of the rank
            that has most.
        fits: whether that fits the VRAM of the GPU; where not, the step is timed in managed
            memory.
        sent_bytes: by rank, the rows of the halo that it sends in a step; nothing for a batch.
        summed_bytes: what is summed over ranks, once each.
        compute_seconds: of the rank that is last at each operation.
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
        """Of a step: nothing is computed while ranks wait for each other."""
        return self.compute_seconds + self.exchange_seconds + self.sum_seconds

    def to_json(self) -> dict[str, Any]:
        """Return it for a JSON file; what the model says is under names that say so."""
        return named(self, ("ranks", "share", *_FIGURES), _FIGURES)


_FIGURES = ("peak_bytes", "fits", "sent_bytes", "summed_bytes", "compute_seconds",
            "exchange_seconds", "sum_seconds", "seconds")  # fmt: skip


@dataclass(frozen=True)
class RankChoice:
    """The same step on several numbers of ranks; simulated.

    Attributes:
        kind: ``graph``: rows of a graph are split and parameters replicated. ``data``: a batch is
            split and parameters replicated.
        gpu, title, vram_bytes: of each rank.
        link: between any two.
        sharded: whether each rank keeps its share of the optimizer's state alone.
        steps: by number of ranks.
        caveat: what the trace does not know; or None.
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
        """The numbers of ranks with which a step fits the VRAM of each."""
        return tuple(step.ranks for step in self.steps if step.fits)

    def to_json(self) -> dict[str, Any]:
        """Return it for a JSON file."""
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
