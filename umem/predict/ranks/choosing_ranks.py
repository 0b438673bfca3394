"""The choice of a number of ranks, by memory, bytes exchanged and time; all simulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from umem.devices.specs import GpuSpec
from umem.errors import ScalingError, SizeError
from umem.memory.limits import Size
from umem.predict.choosing import gpu_asked_for
from umem.predict.cupy_differences import Correct, on_gpu
from umem.predict.ranks.found_ranks import RankChoice, RankStep
from umem.predict.ranks.graph_step import GraphStep
from umem.predict.ranks.rank_links import (
    RankLink,
    all_reduce_seconds,
    ordered_sum_seconds,
    rank_link,
    shared_seconds,
)
from umem.predict.ranks.rank_shares import GraphInParts, composite, rounds_of, shares_of
from umem.predict.ranks.scaled_events import with_state_split
from umem.predict.replaying import replay
from umem.printable import quoted
from umem.trace.analysis.explain import missing
from umem.trace.axes import StepSize, size_text
from umem.trace.trace import Trace, check_trace
from umem.trace.walk import allocations

SHARD_BUFFER_BYTES = 16 << 20
"""The most bytes of each of two buffers of `umem.chainer.sharded`, to send and to receive."""


def choose_ranks(
    trace: Trace,
    ranks: Sequence[int],
    gpu: str | GpuSpec,
    link: str,
    *,
    cut: GraphInParts | None = None,
    recorded: GraphInParts | None = None,
    size: StepSize | None = None,
    sharded: bool = False,
    vram: Size | None = None,
    correct: Correct = "auto",
) -> RankChoice:
    """Return the memory and time of a step of one process on several ranks; nothing is run.

    With a cut the ranks split the rows of a graph, as `umem.chainer.ParallelGraphConvolution`
    does: a step's time is computing, of the rank that is last at each operation; for each product
    with the adjacency the rounds of the halo, latency + rows * bytes (1 / link + 1 / out of the
    GPU + 1 / into it), because rows are staged in the host's memory; and each sum over parts in
    order, N - 1 messages and a broadcast. Without a cut they split the batch, and gradients are
    summed by a ring's all-reduce; ChainerMN packs them into two buffers. With a sharded optimizer
    state each rank has 1 / N of the state; gradients are scattered and parameters gathered, staged
    in the hosts' memory.

    Models: see `umem.predict.ranks.rank_links` and `RankLink`, each with its source. Does not
    model: work beside an exchange, links that are shared, MPI's own memory, stragglers, float16
    on the wire where the trace has none.

    Cost: two replays for each number of ranks, and for a cut reading its parts once for each.

    Args:
        trace: of one process. Without a cut: of a step that can be scaled to other sizes
            (`umem.record_at`); otherwise each rank takes the batch as it was recorded.
        ranks: the numbers of ranks to try, each from 1.
        gpu: the GPU of each rank, a name of the table.
        link: ``"nvlink"``, ``"pcie4"``, ``"100gbe"``, ``"GB/s,us"``, or the file of a link.
        cut: the graph in parts, `umem.graphs.PlannedCut`; None: a batch is split.
        recorded: the graph of the trace in parts, where the trace has a smaller graph than ``cut``.
        size: the size of the whole step, all ranks together; a batch is its axis ``batch``.
        sharded: whether the optimizer's state is sharded, as by `umem.chainer.sharded`.
        vram: usable VRAM instead of the table's figure.
        correct: see `umem.replay`.

    Raises:
        SizeError: a number of ranks is not valid, or more than there are parts or samples; an
            unknown link; vram that is no size.
        UnknownGpuError: no such GPU.
        TraceError: ``trace`` is no trace, or has no operation, or no graph convolution for a cut.
        DataError: the cut is of another graph than the trace.
        ScalingError: ``size`` of a trace that cannot be scaled.
    """
    check_trace(trace)
    counts = _checked(ranks)
    spec = gpu_asked_for(gpu, vram)
    way = rank_link(link, spec)
    known = _Asked(spec, way, sharded, correct)
    step: Callable[[int], RankStep]
    if cut is None:
        kind: Literal["graph", "data"] = "data"
        step = _Batch(trace, size, known).on
    else:
        kind = "graph"
        whole = trace if size is None else trace.at(size)
        step = _Graph(GraphStep(whole, cut if recorded is None else recorded), cut, known).on
    return RankChoice(
        kind,
        spec.name,
        spec.title,
        spec.usable_bytes,
        way,
        sharded,
        tuple(map(step, counts)),
        missing(trace),
    )


def _checked(ranks: Sequence[int]) -> tuple[int, ...]:
    found = tuple(ranks)
    for count in found:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise SizeError(f"a number of ranks is a whole number from 1; got {quoted(count)}")
    if not found:
        raise SizeError("no number of ranks to try; give some, such as 1,2,4")
    return tuple(sorted(set(found)))


@dataclass(frozen=True)
class _Asked:
    """The GPU, the link and the options that all numbers of ranks share."""

    gpu: GpuSpec
    link: RankLink
    sharded: bool
    correct: Correct

    def peak(self, trace: Trace) -> int:
        return on_gpu(trace, self.correct).peak_bytes

    def seconds(self, trace: Trace, *, fits: bool) -> float:
        """Return the time of one step's computing, in managed memory where it does not fit."""
        mode = "unmanaged" if fits else "managed"
        room = None if not fits else max(self.gpu.usable_bytes, 2 * self.peak(trace))
        found = replay(trace, self.gpu, mode, room, correct=self.correct)  # type: ignore[arg-type]
        return found.seconds / max(1, trace.step_count)

    @property
    def staging(self) -> float:
        """Return the seconds a byte of a copy from one GPU to another, through host memory."""
        rates = (self.gpu.host_out_bandwidth, self.gpu.host_in_bandwidth)
        return sum(1 / rate for rate in rates if rate)

    def shard_seconds(self, ranks: int, nbytes: int) -> float:
        """Return the time to scatter gradients and gather parameters.

        0 unless sharded over several ranks.
        """
        if not self.sharded or ranks == 1:
            return 0.0
        return 2 * shared_seconds(self.link, ranks, nbytes) + nbytes * self.staging

    def shard_bytes(self, ranks: int, nbytes: int) -> int:
        """Return the bytes of a shard of the gradient and two buffers.

        0 unless sharded over several ranks.
        """
        if not self.sharded or ranks == 1:
            return 0
        return ceil(nbytes / ranks) + 2 * min(SHARD_BUFFER_BYTES, nbytes)


class _Graph:
    """A step on a graph whose parts are split over ranks."""

    def __init__(self, step: GraphStep, graph: GraphInParts, asked: _Asked) -> None:
        self._step, self._graph, self._asked = step, graph, asked
        self._parameters = _parameter_bytes(step.trace)

    def on(self, ranks: int) -> RankStep:
        """Return the simulated step on a number of ranks, each with its share of the parts.

        The peak is that of the rank with the largest, the time that of the last rank at each
        operation.

        Raises:
            SizeError: there are more ranks than parts.
        """
        shares = shares_of(self._graph, ranks)
        state = ranks if self._asked.sharded else 1
        peak = max(self._asked.peak(self._step.of_rank(share, state)) for share in shares)
        peak += self._asked.shard_bytes(ranks, self._parameters)
        fits = peak <= self._asked.gpu.usable_bytes
        last = self._step.of_rank(composite(shares), state)
        steps = max(1, self._step.trace.step_count)
        a_row = sum(self._step.exchanged) // steps
        return RankStep(
            ranks,
            _parts_text(ranks, len(self._graph.nodes), max(share.nodes for share in shares)),
            peak,
            fits,
            tuple(share.sent_rows * a_row for share in shares),
            sum(self._step.summed) // steps,
            self._asked.seconds(last, fits=fits),
            self._exchange_seconds(ranks) / steps,
            self._sum_seconds(ranks) / steps + self._asked.shard_seconds(ranks, self._parameters),
        )

    def _exchange_seconds(self, ranks: int) -> float:
        rounds = rounds_of(self._graph, ranks)
        widths = self._step.exchanged
        link = self._asked.link.seconds(rounds.rows * sum(widths), rounds.count * len(widths))
        return link + rounds.rows * sum(widths) * self._asked.staging

    def _sum_seconds(self, ranks: int) -> float:
        if ranks == 1:
            return 0.0
        return sum(ordered_sum_seconds(self._asked.link, ranks, n) for n in self._step.summed)


def _parts_text(ranks: int, parts: int, nodes: int) -> str:
    most = ceil(parts / ranks)
    return f"at most {nodes:,} nodes in {most} part{'' if most == 1 else 's'}"


class _Batch:
    """A step whose batch is split over ranks, or that each rank runs as it was recorded."""

    def __init__(self, trace: Trace, size: StepSize | None, asked: _Asked) -> None:
        self._trace, self._asked = trace, asked
        self._size = trace.sizes[-1] if size is None and trace.sizes else size
        if self._size is not None:
            trace.at(self._size)  # raises now if the trace cannot be scaled
        if trace.axes and "batch" not in trace.axes:
            raise ScalingError(
                "ranks split the axis 'batch', and the trace has "
                f"{', '.join(trace.axes)}; record it along one of that name"
            )

    def on(self, ranks: int) -> RankStep:
        """Return the simulated step on a number of ranks, each with its share of the batch.

        All are taken to have the largest share; each has the recorded batch where the trace has no
        sizes.

        Raises:
            SizeError: there are more ranks than samples.
        """
        trace, share = self._of_rank(ranks)
        state = ranks if self._asked.sharded else 1
        trace = with_state_split(trace, state)
        parameters = _parameter_bytes(trace)
        packed = 2 * parameters if ranks > 1 and not self._asked.sharded else 0
        buffers = packed + self._asked.shard_bytes(ranks, parameters)
        peak = self._asked.peak(trace) + buffers
        fits = peak <= self._asked.gpu.usable_bytes
        return RankStep(
            ranks,
            share,
            peak,
            fits,
            (0,) * ranks,
            parameters if ranks > 1 else 0,
            self._asked.seconds(trace, fits=fits),
            0.0,
            self._sum_seconds(ranks, parameters),
        )

    def _sum_seconds(self, ranks: int, nbytes: int) -> float:
        if self._asked.sharded:
            return self._asked.shard_seconds(ranks, nbytes)
        return all_reduce_seconds(self._asked.link, ranks, nbytes)

    def _of_rank(self, ranks: int) -> tuple[Trace, str]:
        """Return the step of the rank with the largest share of the batch, and that share in words.

        Raises:
            SizeError: there are more ranks than samples.
        """
        if self._size is None:
            return self._trace, "the recorded batch on each"
        whole = self._size["batch"] if isinstance(self._size, Mapping) else self._size
        assert isinstance(whole, int)
        if ranks > whole:
            raise SizeError(f"{ranks} ranks for a batch of {whole}: each needs a sample at least")
        most = ceil(whole / ranks)
        own: StepSize = {**self._size, "batch": most} if isinstance(self._size, Mapping) else most
        return self._trace.at(own), f"size {size_text(own)} on each"


def _parameter_bytes(trace: Trace) -> int:
    return sum(a.nbytes for a in allocations(trace.events).values() if a.kind == "parameter")
