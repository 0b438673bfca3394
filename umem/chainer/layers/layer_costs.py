"""Costs of layers before and after an exchange: operations of a traced forward pass, a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import chainer

from umem.chainer.step_state import StepState
from umem.trace import Op
from umem.trace.recording import record
from umem.units import format_bytes


@dataclass(frozen=True)
class ForwardCosts:
    """Operations and bytes of one traced forward pass.

    Attributes:
        operations: the operations of the whole pass; a multiply and an add count as two.
        of_layer: operations of each layer, by path.
        calls: how often a layer was called, by path.
        outputs: shapes and types of the results.
    """

    operations: int
    outputs: tuple[str, ...]
    of_layer: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)


def forward_costs(model: Any, layers: dict[str, Any], inputs: Sequence[Any]) -> ForwardCosts:
    """Trace one call of a model in inference mode, and restore its links and random generators.

    Args:
        layers: links by path, whose operations are counted separately.
        inputs: the arguments of the model.

    Raises the model's errors.
    """
    hook = _LayerCalls({id(link): path for path, link in layers.items()})
    state = StepState(model)
    try:
        with record() as recorder:
            hook.recorder = recorder
            with chainer.using_config("train", False), chainer.no_backprop_mode(), hook:
                result = model(*inputs)
            events = recorder.trace.events
    finally:
        state.restore()
    costs = ForwardCosts(_operations(events), tuple(_described(result)))
    for path, start, stop in hook.found:
        costs.calls[path] += 1
        costs.of_layer[path] += _operations(events[start:stop])
    return costs


def _operations(events: Sequence[Any]) -> int:
    return sum(event.flops for event in events if isinstance(event, Op))


def _described(result: Any) -> list[str]:
    if isinstance(result, dict):
        result = list(result.values())
    every = result if isinstance(result, (list, tuple)) else [result]
    return [f"{getattr(y, 'dtype', type(y).__name__)} {getattr(y, 'shape', '')}" for y in every]


class _LayerCalls(chainer.LinkHook):
    """Records between which events each layer was called."""

    name = "umem.layer_costs"

    def __init__(self, paths: dict[int, str]) -> None:
        self._paths = paths
        self._starts: list[int] = []
        self.recorder: Any = None
        self.found: list[tuple[str, int, int]] = []

    def forward_preprocess(self, args: Any) -> None:
        if id(args.link) in self._paths:
            self._starts.append(self.recorder.stored_count)

    def forward_postprocess(self, args: Any) -> None:
        if id(args.link) in self._paths:
            start = self._starts.pop()
            self.found.append((self._paths[id(args.link)], start, self.recorder.stored_count))


def samples_of(inputs: Sequence[Any]) -> int:
    """Return the batch size of inputs: the length of the first array or list; 1 without either."""
    lists = [x for x in inputs if getattr(x, "shape", ()) or isinstance(x, (list, tuple))]
    return max(len(lists[0]), 1) if lists else 1


# -- the report -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerRow:
    """One layer before and after the exchange.

    Attributes:
        path: its path in the model.
        before, after: descriptions of the old and the new layer.
        bytes_before, bytes_after: of its parameters; None for a tie, whose layers have other rows.
        operations_before, operations_after: forward operations per sample, from a trace; a multiply
            and an add are two. None without an example.
    """

    path: str
    before: str
    after: str
    bytes_before: int | None = None
    bytes_after: int | None = None
    operations_before: float | None = None
    operations_after: float | None = None


@dataclass(frozen=True)
class Totals:
    """The whole model before and after the exchange, with the fields of `LayerRow`."""

    bytes_before: int
    bytes_after: int
    operations_before: float | None
    operations_after: float | None


def table(rows: Sequence[LayerRow], totals: Totals) -> str:
    """Format the report as text."""
    lines = [["layer", "was", "is", "parameters", "operations a sample"]]
    lines += [[row.path, row.before, row.after, *_numbers(row)] for row in rows]
    lines.append(["the model", "", "", *_numbers(totals)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _numbers(row: LayerRow | Totals) -> tuple[str, str]:
    sizes = operations = ""
    if row.bytes_before is not None and row.bytes_after is not None:
        sizes = f"{format_bytes(row.bytes_before)} -> {format_bytes(row.bytes_after)}"
    if row.operations_before is not None and row.operations_after is not None:
        operations = f"{row.operations_before:,.0f} -> {row.operations_after:,.0f}"
    return sizes, operations
