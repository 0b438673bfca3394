"""Differences between Chainer's allocations on NumPy and on CuPy.

A trace recorded on NumPy has the workspace of NumPy's code. Where Chainer 7.8.1 has other code
for CuPy, the allocations follow from its source; `CORRECTIONS` holds those cases, each with the
place in the source (files are Chainer's). All other figures stay as measured: most functions run
the same array code on both.

Models: temporaries of fused kernels (none), of dropout, of batch normalisation, of pooling;
int32 indexes; images without the border that NumPy leaves around them; an output that convolutions
allocate and drop; cuDNN's limit where it is there.
Does not model: CuPy's own temporaries inside one array function, taken to be NumPy's (its
``tensordot`` copies the operands of a convolution as NumPy's does); effects of cuDNN besides the
workspace of convolutions, such as dropout without a mask.
bench/cupy_peak.py compares corrected peaks with the real CuPy, on a software GPU. No correction has
been compared with a real GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from umem.trace.analysis.capping import CONVOLUTIONS
from umem.trace.analysis.updating import CHUNKED_RULES
from umem.trace.events import Access, Alloc, Event, Free, Hint, Mark, Op
from umem.trace.trace import Trace
from umem.trace.walk import allocations
from umem.units import MIB

Correct = Literal["auto", "cudnn", "off"]
CORRECT: tuple[Correct, ...] = ("auto", "cudnn", "off")
NUMPY_BUFFER_BYTES = 2 * 8192 * 8
"""The most that NumPy's buffers take for two operands (``numpy.getbufsize``, of 8 bytes each)."""
CUDNN_LIMIT_BYTES = 8 * MIB
"""CuPy's default, which ``chainer.backends.cuda.set_max_workspace_size`` changes."""

DONE = "corrected"
"""The key in the meta of a corrected trace; its value is the `Correct` that was asked for."""

Rule = Callable[[Op, int], int]
"""Returns the workspace on a GPU of an operation, given its workspace on NumPy, in bytes."""


@dataclass(frozen=True)
class Correction:
    """Operations whose workspace on a GPU differs from NumPy's.

    Attributes:
        ops: the names of the operations.
        rule: returns the workspace on a GPU.
        says: the reason, in words.
        source: the place in Chainer's source, or in umem's own.
    """

    ops: tuple[str, ...]
    rule: Rule
    says: str
    source: str


def _nothing(op: Op, measured: int) -> int:
    return 0


def _float32_an_element(op: Op, measured: int) -> int:
    return 4 * op.flops  # counted as one an element


def _first_output(op: Op, measured: int) -> int:
    return _nbytes(op.writes[0]) if op.writes else measured


def _columns(op: Op, measured: int) -> int:
    """Return the columns, their copy and an output that is made first and not used.

    Without known columns, as under a cap on the workspace, what NumPy needed and that output.
    """
    first = _nbytes(op.writes[0]) if op.writes else 0
    if not _has_columns(op, measured):
        return measured + first
    return first + _piece(op) * (1 + _copies(op))


def _columns_of_adjoint(op: Op, measured: int) -> int:
    """Return the columns that the product writes, beside a copy of its input or the output."""
    if not _has_columns(op, measured):
        return measured
    copied = _operand(op, op.reads[1]) if _copies(op) else 0
    return _piece(op) + max(0, copied - _nbytes(op.writes[0]))


def _columns_of_gradient(op: Op, measured: int) -> int:
    """Return the columns, their copy and that of the gradient of the outputs."""
    if not _has_columns(op, measured):
        return measured
    copies = _copies(op)
    return _piece(op) * min(2, 1 + copies) + (_operand(op, op.writes[0]) if copies > 1 else 0)


def _operand(op: Op, kernel: Access) -> int:
    """Return the bytes that a product reads besides columns and kernel.

    An access to a view, such as a part of a concatenation, spans more than its numbers.
    """
    return max(0, op.traffic_bytes - _piece(op) - _nbytes(kernel))


def _has_columns(op: Op, measured: int) -> bool:
    return 0 < _piece(op) <= measured


def _piece(op: Op) -> int:
    return 0 if op.kernels is None else op.kernels.piece_bytes


def _copies(op: Op) -> int:
    """Return how many operands ``tensordot`` copies: kernels besides im2col, product and bias."""
    has_bias = op.name != "Convolution2DGradW" and len(op.reads) > 2
    return 0 if op.kernels is None else op.kernels.launch_count - 2 - has_bias


def _without_buffers(op: Op, measured: int) -> int:
    return 0 if measured <= NUMPY_BUFFER_BYTES else measured


def _at_most_the_limit(op: Op, measured: int) -> int:
    return min(measured, CUDNN_LIMIT_BYTES)


def _nbytes(access: Access) -> int:
    return access.stop - access.start


CORRECTIONS = (
    Correction(CHUNKED_RULES, _nothing, "one fused kernel, in place",
               "optimizers/*.py, update_core_gpu"),
    Correction(("ReLUGrad2", "SigmoidGrad", "TanhGrad", "Sigmoid", "LeakyReLU", "_LeakyReLUGrad",
                "ELU", "ELUGrad", "Softplus", "SoftplusGrad", "ClippedReLUGrad2"), _nothing,
               "one fused kernel", "functions/activation/*.py, forward_gpu"),
    Correction(("LinearFunction",), _without_buffers,
               "no buffer of 8,192 numbers, which NumPy broadcasts by",
               "functions/connection/linear.py, forward"),
    Correction(("LSTM", "LSTMGrad"), _nothing, "one fused kernel",
               "functions/rnn/lstm.py, forward"),
    Correction(("_SoftmaxCrossEntropyGrad_NoDoubleBackprop",), _nothing, "one fused kernel",
               "functions/loss/softmax_cross_entropy.py, forward_gpu"),
    Correction(("Dropout",), _float32_an_element, "random numbers, float32",
               "functions/noise/dropout.py, forward_gpu"),
    Correction(("BatchNormalization",), _nothing, "one fused kernel",
               "functions/normalization/batch_normalization.py, _apply_bn_fwd"),
    Correction(("BatchNormalizationGrad",), _first_output, "x_hat, beside the gradient",
               "functions/normalization/batch_normalization.py, "
               "GeneralBatchNormalizationImpl.backward"),
    Correction(("MaxPoolingND", "MaxPoolingNDGrad"), _nothing, "one kernel, no columns",
               "functions/pooling/max_pooling_nd.py, forward_gpu"),
    Correction(("AveragePoolingND", "AveragePoolingNDGrad"), _nothing, "one kernel, no columns",
               "functions/pooling/average_pooling_nd.py, forward_gpu"),
    Correction(("AveragePooling2D", "AveragePooling2DGrad"), _nothing, "one kernel, no columns",
               "functions/pooling/average_pooling_2d.py, forward_gpu"),
)  # fmt: skip
OWN = (
    Correction(
        ("Adam8bit", "MomentumSGD8bit"),
        _nothing,
        "one fused kernel, in place",
        "umem/chainer/optimizers/paths/on_cuda.py",
    ),
)
"""Corrections of umem's own updates, which run in chunks on NumPy and in one kernel on a GPU."""
WITHOUT_CUDNN = (
    Correction(
        ("Convolution2DFunction",),
        _columns,
        "the columns (im2col), their copy where there are several samples, and an output that is "
        "made first and not used",
        "functions/connection/convolution_2d.py, forward_gpu",
    ),
    Correction(
        ("Deconvolution2DFunction",),
        _columns_of_adjoint,
        "the columns (col2im), and what a copy of the input takes beyond the output",
        "functions/connection/deconvolution_2d.py, _forward_gpu_core",
    ),
    Correction(
        ("Convolution2DGradW",),
        _columns_of_gradient,
        "the columns (im2col), and with several samples copies of them and of the gradient",
        "functions/connection/convolution_2d.py, Convolution2DGradW._forward_gpu_core",
    ),
)
WITH_CUDNN = (
    Correction(
        ("Convolution2DFunction", "Convolution2DGradW", "Deconvolution2DFunction"),
        _at_most_the_limit,
        "cuDNN's workspace, 8 MiB unless it is set",
        "backends/cuda.py, set_max_workspace_size",
    ),
)
HALVED = {"MaxPoolingND.indexes": "functions/pooling/max_pooling_nd.py, forward_gpu"}
"""Labels of tensors that are int32 on CuPy and int64 on NumPy, each with its place in Chainer.

Under `umem.chainer.workspace` these are int32 on both, and have another label."""


def on_gpu(trace: Trace, correct: Correct = "auto") -> Trace:
    """Return the trace that the same step on CuPy would leave.

    Args:
        trace: returned as it is if its backend is not NumPy, or if it is corrected already.
        correct: ``"auto"`` for CuPy without cuDNN (CuPy 14 has none), ``"cudnn"`` for
            convolutions within cuDNN's default limit, ``"off"``.

    Workspace is corrected where it was measured. Cost: one pass over the events.
    """
    if correct == "off" or trace.backend != "numpy" or DONE in trace.meta:
        return trace
    more = WITH_CUDNN if correct == "cudnn" else WITHOUT_CUDNN
    rules = {name: each.rule for each in (*CORRECTIONS, *OWN, *more) for name in each.ops}
    meta = {**trace.meta, DONE: correct}
    without_columns = CONVOLUTIONS if correct == "cudnn" else frozenset()
    events = _corrected(packed_images(trace).events, rules, without_columns)
    return Trace(events, trace.backend, meta)


def _corrected(
    events: list[Event], rules: Mapping[str, Rule], without_columns: frozenset[str]
) -> list[Event]:
    """Return events with the workspace and tensor sizes of CuPy.

    Functions ``without_columns`` are one kernel, which reads and writes its arrays alone.
    """
    halved: set[int] = set()
    masters: set[int] = set()
    made: list[Event] = []
    for event in events:
        if isinstance(event, Op):
            event = _halve(event, halved)
            rule = rules.get(event.name)
            if rule is not None and event.workspace_bytes is not None:
                if masters.isdisjoint(access.tensor for access in event.writes):
                    event = event._replace(workspace_bytes=rule(event, event.workspace_bytes))
            if event.name in without_columns and event.kernels is not None:
                traffic = sum(map(_nbytes, (*event.reads, *event.writes)))
                event = event._replace(traffic_bytes=traffic, kernels=None)
        elif isinstance(event, Alloc):
            if event.label in HALVED:
                halved.add(event.tensor)
                event = event._replace(nbytes=event.nbytes // 2)
            elif event.kind == "state" and event.label.endswith(".fp32"):
                masters.add(event.tensor)  # an update that converts is not in place
        elif isinstance(event, Free):
            halved.discard(event.tensor)
            masters.discard(event.tensor)
        elif isinstance(event, Hint):
            event = event._replace(accesses=_halve_all(event.accesses, halved))
        made.append(event)
    return made


def _halve(op: Op, halved: set[int]) -> Op:
    if not halved or halved.isdisjoint(a.tensor for a in (*op.reads, *op.writes)):
        return op
    reads, writes = _halve_all(op.reads, halved), _halve_all(op.writes, halved)
    before = sum(map(_nbytes, (*op.reads, *op.writes)))
    saved = before - sum(map(_nbytes, (*reads, *writes)))
    return op._replace(reads=reads, writes=writes, traffic_bytes=max(0, op.traffic_bytes - saved))


def _halve_all(accesses: tuple[Access, ...], halved: set[int]) -> tuple[Access, ...]:
    return tuple(
        Access(tensor, start // 2, stop // 2) if tensor in halved else Access(tensor, start, stop)
        for tensor, start, stop in accesses
    )


FROM_COLUMNS = frozenset((
    "AveragePooling2DGrad", "AveragePoolingNDGrad", "Deconvolution2DFunction", "DeconvolutionND",
    "MaxPoolingNDGrad", "Unpooling2D", "UnpoolingND",
))  # fmt: skip
"""Functions that sum columns into images."""


def packed_images(trace: Trace) -> Trace:
    """Return the trace without NumPy's borders around images; the trace itself if none has one."""
    sizes = own_sizes(trace)
    return trace.with_events(_packed(trace, sizes)) if sizes else trace


def own_sizes(trace: Trace) -> dict[int, int]:
    """Map each image that lies in a larger array to its own bytes, without the border.

    Cost: one pass over the events.
    """
    if not any(op.name in FROM_COLUMNS for op in trace.ops):
        return {}
    allocs = allocations(trace.events)
    found: dict[int, int] = {}
    inputs: dict[int, int] = {}  # bytes of a call's first input, by the call's number
    waiting: list[int] = []  # images of a call's backward

    def note(tensor: int, nbytes: int) -> None:
        if 0 < nbytes < allocs[tensor].nbytes:
            found[tensor] = nbytes

    for event in trace.events:
        if isinstance(event, Op):
            made = [a.tensor for a in event.writes] if event.name in FROM_COLUMNS else []
            entry = event.entry
            if event.phase == "backward":
                waiting += made
            elif entry is not None:
                if len(made) == 1:
                    note(made[0], entry.gradient_bytes)
                if event.reads:
                    first = event.reads[0]
                    own = found.get(first.tensor, first.stop - first.start)
                    inputs[entry.number] = min(own, first.stop - first.start)
        elif isinstance(event, Mark) and event.entry is not None:
            for tensor in waiting:
                note(tensor, inputs.get(event.entry, 0))
            waiting.clear()
    return found


def _packed(trace: Trace, sizes: dict[int, int]) -> Iterator[Event]:
    """Yield events with images of the given sizes in bytes, by tensor."""
    whole = {n: a.nbytes for n, a in allocations(trace.events).items() if n in sizes}

    def shrunk(accesses: tuple[Access, ...]) -> tuple[Access, ...]:
        return tuple(
            Access(n, start * sizes[n] // whole[n], stop * sizes[n] // whole[n])
            if n in sizes
            else Access(n, start, stop)
            for n, start, stop in accesses
        )

    for event in trace.events:
        if isinstance(event, Alloc) and event.tensor in sizes:
            yield event._replace(nbytes=sizes[event.tensor])
        elif isinstance(event, Op):
            yield event._replace(reads=shrunk(event.reads), writes=shrunk(event.writes))
        elif isinstance(event, Hint):
            yield event._replace(accesses=shrunk(event.accesses))
        else:
            yield event
