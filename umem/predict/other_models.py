"""Changes of a step's model, such as lower ranks, that save memory and change the results.

A trace of the step tells neither the accuracy of the changed model nor the time of its step.
Figures that follow from the bytes of parameters alone are worked out; for the others the report
says which step to record.

Models: bytes of parameters, their gradients and states. Does not model: activations, time,
accuracy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import isqrt
from typing import Any, Literal, NamedTuple

from umem.as_json import named
from umem.trace.events import Access, Alloc, Op
from umem.trace.trace import Trace
from umem.trace.walk import allocations
from umem.units import format_bytes

NUMBER_BYTES = 4
CHANNEL_BYTES, INPUT_BYTES = 4, 8
"""In 8 bits: bytes of a channel's scale; of the scale and zero point of a layer's input."""
RANK_SHARE = Fraction(1, 4)
"""The rank of a smaller layer, as a share of the smaller side of its matrix."""
WEIGHED = ("LinearFunction", "Convolution2DFunction")
"""Functions whose second input is a weight, and whose third a bias."""


@dataclass(frozen=True)
class OtherModel:
    """A change of the model, and the bytes of a step before and after; simulated.

    Attributes:
        name: the change, for people.
        effect: the change in a sentence.
        line: the code that makes the change.
        counted: the kinds of bytes that are counted; None where none can be worked out.
        now_bytes: these bytes before the change; ``then_bytes`` after it.
        missing: why there are no figures, and which step to record; None where there are.
    """

    name: str
    effect: str
    line: str
    counted: str | None = None
    now_bytes: int | None = None
    then_bytes: int | None = None
    missing: str | None = None
    exact: Literal[False] = False
    simulated: Literal[True] = True

    def __str__(self) -> str:
        """Return the effect and the bytes before and after, in a line."""
        if self.now_bytes is None or self.then_bytes is None:
            return f"{self.name}: {self.effect}; no figures: {self.missing}"
        now, then = format_bytes(self.now_bytes), format_bytes(self.then_bytes)
        return f"{self.name}: {self.effect}; {self.counted}: {now}, then {then}"

    def to_json(self) -> dict[str, Any]:
        """Return a dict for a JSON file; simulated figures are under names that say so."""
        return named(self, _FIELDS, ("now_bytes", "then_bytes"))


_FIELDS = (
    "name", "exact", "effect", "line", "counted", "missing", "now_bytes", "then_bytes", "simulated",
)  # fmt: skip


def other_models(trace: Trace) -> tuple[OtherModel, ...]:
    """Return the changes of a step's model, with figures where the trace has them.

    Args:
        trace: one step or more; in float32.
    """
    weights = _Weights(trace)
    return (_low_rank(weights), _quantized(weights), _DISTILLED)


def _low_rank(weights: _Weights) -> OtherModel:
    """Return the bytes of training with Linear layers of a lower rank."""
    share = f"1/{RANK_SHARE.denominator}"
    plain = OtherModel(
        "smaller layers",
        f"Linear layers as two of {share} of their rank",
        "umem.chainer.slimmer(model, rules, x)",
        missing="no matrix of a Linear layer whose sides the trace tells",
    )
    saved = [whole - then for whole, then in weights.low_rank_bytes() if then < whole]
    if not saved:
        return plain
    now = sum(weights.kept_bytes.values())
    return _with(plain, "parameters, gradients and states", now, now - sum(saved))


def _quantized(weights: _Weights) -> OtherModel:
    """Return the bytes of parameters with weights of 8 bits for inference."""
    plain = OtherModel(
        "quantisation",
        "weights of 8 bits for inference, embeddings aside",
        "umem.chainer.quantize(model, calibration)",
        missing="no Linear layer or convolution that the trace tells",
    )
    small = weights.quantized_bytes()
    if not small:
        return plain
    now = sum(weights.parameter_bytes.values())
    then = now + sum(small.values()) - sum(weights.parameter_bytes[tensor] for tensor in small)
    return _with(plain, "parameters without gradients and states", now, then)


_DISTILLED = OtherModel(
    "distillation",
    "a smaller model learns from this one, whose parameters are there beside its own",
    "umem.chainer.DistillingUpdater(iterator, optimizer, teacher)",
    missing="record a step of the smaller model under the updater, which has the teacher in it",
)


def _with(plain: OtherModel, counted: str, now: int, then: int) -> OtherModel:
    return OtherModel(plain.name, plain.effect, plain.line, counted, now, then)


class _Matrix(NamedTuple):
    """The sides of a weight: outputs by inputs."""

    height: int
    width: int


class _Weights:
    """The parameters that a step trains, and the shapes of weights where the trace tells.

    Attributes:
        parameter_bytes: bytes of each parameter, by its tensor.
        kept_bytes: bytes of each parameter with its gradient and optimizer states.
    """

    def __init__(self, trace: Trace) -> None:
        allocs = allocations(trace.events)
        self._matrices: dict[int, _Matrix] = {}
        self._channels: dict[int, int] = {}
        updated = dict(_updated(trace, allocs))
        self.kept_bytes = updated
        self.parameter_bytes = {tensor: allocs[tensor].nbytes for tensor in updated}
        for op in trace.ops:
            if op.phase == "forward" and op.name in WEIGHED:
                self._see(op)

    def _see(self, op: Op) -> None:
        """Note the sides and output channels of the weight that an operation reads."""
        if len(op.reads) < 2 or not op.writes:
            return
        x, weight, *bias = op.reads
        tensor, whole = weight.tensor, self.parameter_bytes.get(weight.tensor)
        if whole is None or _bytes(weight) != whole:
            return
        if op.name == WEIGHED[0] and (found := _sides(_bytes(x), whole, _bytes(op.writes[0]))):
            self._matrices[tensor] = found
            self._channels[tensor] = found.height
        else:
            self._channels[tensor] = sum(_bytes(one) // NUMBER_BYTES for one in bias)

    def low_rank_bytes(self) -> Iterator[tuple[int, int]]:
        """Yield for each matrix its `kept_bytes`, and those of two matrices of a lower rank."""
        for tensor, (height, width) in self._matrices.items():
            rank = -(-min(height, width) * RANK_SHARE.numerator // RANK_SHARE.denominator)
            kept = self.kept_bytes[tensor]
            yield kept, kept * rank * (height + width) // (height * width)

    def quantized_bytes(self) -> dict[int, int]:
        """Return the bytes of each weight with one byte a value and a scale a known channel."""
        return {
            tensor: self.parameter_bytes[tensor] // NUMBER_BYTES
            + CHANNEL_BYTES * channels
            + INPUT_BYTES
            for tensor, channels in self._channels.items()
        }


def _sides(x_bytes: int, weight_bytes: int, y_bytes: int) -> _Matrix | None:
    """Return the sides of W in y = x W^T from the bytes of all three; None if they do not agree.

    With n rows these are n * width, height * width and n * height values.
    """
    x, weight, y = (nbytes // NUMBER_BYTES for nbytes in (x_bytes, weight_bytes, y_bytes))
    rows = isqrt(x * y // weight) if weight else 0
    if not rows or rows * rows * weight != x * y or x % rows or y % rows:
        return None
    return _Matrix(y // rows, x // rows)


def _updated(trace: Trace, allocs: Mapping[int, Alloc]) -> Iterator[tuple[int, int]]:
    """Yield each parameter that an update writes, once, and the bytes of all the update's tensors.

    Updates that write several parameters are left out.
    """
    seen = set[int]()
    for op in trace.ops:
        if op.phase != "update":
            continue
        tensors = {access.tensor for access in (*op.reads, *op.writes)}
        parameters = [a.tensor for a in op.writes if allocs[a.tensor].kind == "parameter"]
        if len(parameters) == 1 and parameters[0] not in seen:
            seen.add(parameters[0])
            yield parameters[0], sum(allocs[tensor].nbytes for tensor in tensors)


def _bytes(access: Access) -> int:
    return access.stop - access.start
