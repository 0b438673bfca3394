"""What NumPy needs inside while it computes with halves: float32 copies, of parts or of all.

Models: umem/chainer/precision/halves.py, by the same parts and tiles. A trace has no shapes: those
of a product follow from the sizes of its three matrices and its work, and the samples of a batch
are the most that divide what convolutions and losses read. Does not model: Python's own objects.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import reduce
from math import gcd, isqrt

from umem.trace.analysis.capping import CONVOLUTIONS
from umem.trace.events import Access, Alloc, Op
from umem.trace.trace import Trace

PART_BYTES = 1 << 18
"""Of an array in float32 that goes part by part."""
SAMPLES_BYTES = 4 * PART_BYTES
"""The same of what goes by samples."""
TILE = 1024
"""Rows and columns of what a product multiplies at once."""
AT_A_TIME = 1 << 15
"""Numbers that are rounded at a time."""
ROUNDING_BYTES, CUTTING_BYTES = 17, 21
"""For each of them: its size, its half, what of it is small, and with a constant what is cut."""
INDEX_BYTES = 8
"""For each number that is looked up in the table of all halves."""
TILED = frozenset(("LinearFunction", "LinearGradData", "LinearGradWeight", "MatMul"))
BY_SAMPLES = (
    "SoftmaxCrossEntropy", "_SoftmaxCrossEntropyGrad_NoDoubleBackprop",
)  # fmt: skip
BY_PARTS = frozenset((
    "ClippedReLU", "ClippedReLUGrad2", "Clip", "ClipGrad", "Cos", "Dropout", "DropoutGrad", "ELU",
    "ELUGrad", "Erf", "Exp", "HardSigmoid", "HardSigmoidGrad", "LeakyReLU", "Log", "Log1p",
    "LogSoftmax", "Sigmoid", "SigmoidGrad", "Sin", "Softmax", "Softplus", "SoftplusGrad", "Sqrt",
    "Square", "Sum", "Tanh", "TanhGrad", "_LeakyReLUGrad", "_SoftmaxGrad", "LayerNormalization",
))  # fmt: skip
"""Functions that go by elements or by rows, beside Chainer's arithmetic, whose names have signs."""
BY_BITS = frozenset(("ReLU", "ReLUGrad2"))
"""Computed on the halves themselves, with a truth value an element."""
MOVES = frozenset((
    "AsStrided", "Broadcast", "BroadcastTo", "Concat", "Copy", "Depth2Space", "Diagonal", "Dstack",
    "EmbedIDFunction", "ExpandDims", "Flip", "FlipLR", "FlipUD", "GetItem", "Hstack", "Identity",
    "Moveaxis", "Pad", "PadSequence", "Permutate", "Repeat", "Reshape", "Rollaxis", "SelectItem",
    "Separate", "Shift", "Space2Depth", "SplitAxis", "Squeeze", "Stack", "Swapaxes", "Tile",
    "Transpose", "TransposeSequence", "Vstack", "Where",
))  # fmt: skip
"""Functions that compute nothing."""


class HostCopies:
    """What each operation needs on NumPy in halves.

    Args:
        trace: the step in float32.
        allocs: its tensors.
        halves: those that become halves; it may grow afterwards.
    """

    def __init__(self, trace: Trace, allocs: Mapping[int, Alloc], halves: Container[int]) -> None:
        self._allocs, self._halves = allocs, halves
        self._samples = _samples(trace)

    def inside(self, op: Op, given: Container[int]) -> int:
        """The bytes that an operation needs only while it runs.

        Args:
            op: of the trace in float32.
            given: tensors that are cast for it, to what they are not.
        """
        needed = op.workspace_bytes or 0
        is_product = op.name in TILED or op.name in CONVOLUTIONS  # given halves, be it by a cast
        ins = [
            _bytes(a)
            for a in op.reads
            if is_product or (a.tensor in self._halves) != (a.tensor in given)
        ]
        outs = [_bytes(a) for a in op.writes if a.tensor in self._halves]
        if not ins or op.name in MOVES:
            return needed
        if op.name in BY_BITS:
            return max(needed, outs[0] // 4 if outs else 0)
        if op.name in TILED and len(ins) > 1 and outs:
            return _product(op, ins, outs[0])
        if op.name in CONVOLUTIONS:
            return self._convolution(op, needed, ins, outs)
        if op.name in BY_SAMPLES:
            return _shares(needed, SAMPLES_BYTES, ins[:1], outs)
        if op.name in BY_PARTS or " " in op.name or op.name == "-_":
            return _parts(needed, PART_BYTES, ins, outs)
        return _at_once(needed, ins, outs)

    def _convolution(self, op: Op, needed: int, ins: list[int], outs: list[int]) -> int:
        """Some samples at a time, with all of the kernel or of its gradient."""
        is_kernel = "GradW" in op.name
        parts, whole = (ins, 2 * outs) if is_kernel else (ins[:1] + outs, ins[1:])
        sample = max(1, ins[0] // self._samples)
        share = min(1.0, max(1, SAMPLES_BYTES // sample) * sample / max(1, ins[0]))
        return round(share * (needed + sum(parts))) + sum(whole)


def rounding_bytes(nbytes: int, each: int = ROUNDING_BYTES) -> int:
    """What is needed inside to round so many bytes of float32."""
    return each * min(AT_A_TIME, nbytes // 4)


def _parts(needed: int, part: int, ins: list[int], outs: list[int]) -> int:
    """By parts, of which the largest input's is known."""
    largest = max(ins)
    if largest <= part:
        return _at_once(needed, ins, outs)
    return _shares(needed, part, ins, outs)


def _shares(needed: int, part: int, ins: list[int], outs: list[int]) -> int:
    """A part of all at a time, rounded into what is there already."""
    share = min(1.0, part / max(ins))
    made = round(share * sum(outs))
    return max(round(share * (needed + sum(ins))) + made, made + rounding_bytes(made))


def _at_once(needed: int, ins: list[int], outs: list[int]) -> int:
    """Of all: inputs and outputs stand beside what the function needs; then outputs are rounded."""
    made = sum(outs)
    return max(needed + sum(ins) + made - made // 2, made + rounding_bytes(made))


def _product(op: Op, ins: list[int], out: int) -> int:
    """By tiles, or of a stack of matrices some at a time.

    Of matrices of m k, k n and m n numbers, the root of the product is m k n, which is the work.
    """
    a, b, y = (size // 4 for size in (ins[0], ins[1], out))
    if not a or not b or not y:
        return 0
    stack = round(4 * a * b * y / op.flops**2) if op.flops else 1
    if op.name == "MatMul" and stack > 1:
        return _parts(0, PART_BYTES, ins, [out])
    sides = isqrt(a * y // b), isqrt(a * b // y), isqrt(b * y // a)
    m, k, n = (min(side, TILE) for side in sides)
    made, given = 4 * m * n, 4 * (m * k + k * n)
    before = made if sides[1] > TILE else 0
    looking_up = INDEX_BYTES * min(AT_A_TIME, k * n)
    return max(before + given + max(made, looking_up), made + rounding_bytes(made))


def _bytes(access: Access) -> int:
    return access.stop - access.start


def _samples(trace: Trace) -> int:
    """The most samples that a batch can have: they divide what convolutions and losses read."""
    sizes = [
        _bytes(op.reads[place]) // 4
        for op in trace.ops
        for place in _of_samples(op)
        if place < len(op.reads)
    ]
    return max(1, reduce(gcd, sizes, 0))


def _of_samples(op: Op) -> tuple[int, ...]:
    if op.phase != "forward":
        return ()
    return (0,) if op.name in CONVOLUTIONS else (0, 1) if op.name in BY_SAMPLES else ()
