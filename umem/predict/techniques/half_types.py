"""Which tensors of a float32 step are halves under `umem.chainer.half_precision`, and what is cast.

Parameters are halves, but for those of normalisations. From there types go through the step by the
rules of that function: products take and give halves, losses and sums are float32, anything else is
half where all it reads is. A trace has no types: whole numbers are told by who reads them.
"""

from __future__ import annotations

from collections.abc import Mapping

from umem.predict.cupy_differences import DONE
from umem.predict.packed_images import packed_images
from umem.trace.analysis.half_functions import PRODUCTS, SUMS
from umem.trace.events import LEAF, Access, Alloc, Hint, Mark, Op
from umem.trace.trace import Trace
from umem.trace.walk import allocations

BACK_OF_PRODUCTS = ("GradData", "GradWeight", "GradW")
"""The ends of the names of functions that give their gradients."""
SINGLES = SUMS | frozenset((
    "SoftmaxCrossEntropy", "SigmoidCrossEntropy", "MeanSquaredError", "MeanAbsoluteError",
    "HuberLoss", "Hinge", "CTC", "ConnectionistTemporalClassification", "Contrastive", "Triplet",
    "Accuracy", "NegativeLogLikelihoodLoss", "ReduceLogSumExp", "ReduceMean", "ReduceSum",
    "SoftmaxCrossEntropyLoss",
))  # fmt: skip
"""The same with losses and evaluations."""
NORMALIZES = frozenset((
    "BatchNormalization", "FixedBatchNormalization", "GroupNormalization", "LayerNormalization",
))  # fmt: skip
"""They are given what there is; their parameters stay."""
WHOLE_NUMBERS = {"EmbedIDFunction": 0, "SelectItem": 1, "SoftmaxCrossEntropy": 1, "Accuracy": 1,
                 "SigmoidCrossEntropy": 1, "Gather": 1, "SoftmaxCrossEntropyLoss": 1,
                 "NegativeLogLikelihoodLoss": 1}  # fmt: skip
"""Where functions read whole numbers."""
NO_SCORES = "SoftmaxCrossEntropy"
"""It does not keep the logarithms of its scores."""
BACK_OF_SCORES = "_SoftmaxCrossEntropyGrad_NoDoubleBackprop"
SCALAR_BYTES = 4


class HalfTypes:
    """Follows the types through a trace.

    Args:
        trace: the step in float32.

    Attributes:
        trace: the same, on NumPy without the borders around images, which rounding leaves out.
        on_host: whether it is a step of NumPy's own.
        allocs: its tensors.
        masters: the parameters that become halves, and the names of their updates.
        halves: the tensors that are halves.
        casts: by the place of an operation of forward, the tensors that are cast for it.
        backward_of: by the place of an operation of backward, the call whose backward it is.
        last_uses: by the place of an operation, tensors of which only casts are used afterwards.
    """

    def __init__(self, trace: Trace) -> None:
        self.on_host = trace.backend == "numpy" and DONE not in trace.meta
        self.trace = trace = packed_images(trace) if self.on_host else trace
        self.allocs = allocations(trace.events)
        kept = _parameters_of(trace, NORMALIZES, self.allocs)
        self.masters = {
            access.tensor: op.name
            for op in trace.ops
            if op.phase == "update"
            for access in op.writes
            if self.allocs[access.tensor].kind == "parameter" and access.tensor not in kept
        }
        self.halves = set(self.masters)
        self._whole = _whole_numbers(trace)
        self._trained = {LEAF}  # the calls that something with a gradient goes into
        self.casts = self._outputs()
        self.halves |= self._left_over()
        self.backward_of = _backward_of(trace)
        self.last_uses = self._last_uses()

    def _outputs(self) -> dict[int, list[int]]:
        """Find for each operation the casts it needs; what it makes is noted as half or not."""
        wanted: dict[int, list[int]] = {}
        for index, op in enumerate(self.trace.ops):
            if op.phase == "forward":
                wanted[index] = self._forward(op)
            elif op.phase == "backward":
                self._backward(op)
        return wanted

    def _is_float(self, tensor: int) -> bool:
        return tensor not in self._whole and self.allocs[tensor].nbytes > SCALAR_BYTES

    def _is_held(self, tensor: int) -> bool:
        """Tell whether a function holds it, and is not given it: it stays as it is."""
        alloc = self.allocs[tensor]
        return alloc.kind == "input" and "." in alloc.label

    def _forward(self, op: Op) -> list[int]:
        """Note what an operation makes, and return the tensors that are cast for it."""
        if op.entry is not None and not self._trained.isdisjoint(op.entry.sources):
            self._trained.add(op.entry.number)
        reads = [n for a in op.reads if self._is_float(n := a.tensor) and not self._is_held(n)]
        halves = [n for n in reads if n in self.halves]
        if halves and op.name not in PRODUCTS | SINGLES | NORMALIZES:
            self.halves.update(n for n in reads if self._is_first_state(op, n))
        singles = [n for n in reads if n not in self.halves]
        if op.name in NORMALIZES or not halves:
            is_half, cast = bool(reads) and reads[0] in self.halves, []
        elif op.name in SINGLES:
            is_half, cast = False, halves
        elif op.name in PRODUCTS or all(self._is_constant(op, n) for n in singles):
            is_half, cast = True, singles
        else:
            is_half, cast = False, halves
        for access in op.writes:
            is_stash = self.allocs[access.tensor].kind == "stash"
            stays = is_stash and (self.on_host or op.name in NORMALIZES)
            stays = stays or ".indexes" in self._label(access)
            if is_half and not stays and self.allocs[access.tensor].kind != "state":
                self.halves.add(access.tensor)
        return cast

    def _label(self, access: Access) -> str:
        return self.allocs[access.tensor].label

    def _is_constant(self, op: Op, tensor: int) -> bool:
        """Tell whether an input is given from outside, without a gradient."""
        if self.allocs[tensor].kind != "input":
            return False
        if op.entry is None:
            return True
        pairs = zip(op.entry.sources, op.reads, strict=False)
        return not any(source in self._trained for source, a in pairs if a.tensor == tensor)

    def _is_first_state(self, op: Op, tensor: int) -> bool:
        """Tell whether an input with a gradient is what a recurrent link begins with.

        Chainer's LSTM and GRU make it of the type of what they read beside it.
        """
        if self.allocs[tensor].kind != "input" or op.entry is None:
            return False
        pairs = zip(op.entry.sources, op.reads, strict=False)
        return any(source == LEAF and a.tensor == tensor for source, a in pairs)

    def _left_over(self) -> set[int]:
        """What the step before left, of the types that the same has in this one."""
        made: dict[tuple[str, str, int], set[bool]] = {}
        for tensor, alloc in self.allocs.items():
            if not alloc.uploaded:
                key = alloc.kind, alloc.label, alloc.nbytes
                made.setdefault(key, set()).add(tensor in self.halves)
        return {
            tensor
            for tensor, alloc in self.allocs.items()
            if alloc.uploaded and alloc.kind in ("activation", "gradient")
            if made.get((alloc.kind, alloc.label, alloc.nbytes)) == {True}
        }

    def _backward(self, op: Op) -> None:
        """A gradient has the type of what is read beside gradients; without, of those."""
        if is_product(op):
            self.halves.update(access.tensor for access in op.writes)
            return
        floats = [n for a in op.reads if self._is_float(n := a.tensor) and not self._is_held(n)]
        if op.name == BACK_OF_SCORES:  # in float32, and cast at once to the type of the scores
            if floats and floats[0] in self.halves:
                self.halves.update(access.tensor for access in op.writes)
            return
        if op.name.removesuffix("Grad") in NORMALIZES:
            first = op.reads[0].tensor  # those of its parameters are float32
            size = self.allocs[first].nbytes
            same = [a.tensor for a in op.writes if self.allocs[a.tensor].nbytes == size]
            self.halves.update(same if first in self.halves else ())
            return
        beside = [
            n
            for n in floats
            if self.allocs[n].kind in ("activation", "stash", "input") or n in self.masters
        ]
        deciding = beside or floats
        if deciding and all(n in self.halves for n in deciding):
            made = (a.tensor for a in op.writes if self.allocs[a.tensor].kind != "parameter")
            self.halves.update(made)

    def _last_uses(self) -> dict[int, list[int]]:
        """Where tensors are let go that were kept for calls which now keep a cast instead."""
        casters: dict[int, set[int]] = {}
        ops = list(self.trace.ops)
        for index, tensors in self.casts.items():
            entry = ops[index].entry
            for tensor in tensors:
                if self.allocs[tensor].kind == "activation" and entry is not None:
                    casters.setdefault(tensor, set()).add(entry.number)
        last: dict[int, int] = {}
        hints = (event for event in self.trace.events if isinstance(event, Hint))
        kept = {access.tensor for hint in hints for access in hint.accesses}
        for index, op in enumerate(ops):
            for access in op.reads:
                if access.tensor in casters and op.phase == "forward":
                    last[access.tensor] = index
                elif self.backward_of.get(index) not in casters.get(access.tensor, ()):
                    kept.add(access.tensor)
            if op.entry is not None:
                of_it = [op.reads[n] for n in op.entry.retained if n < len(op.reads)]
                of_it = [a for a in of_it if op.entry.number not in casters.get(a.tensor, ())]
                of_it += op.writes if op.entry.retains_outputs else ()
                kept.update(access.tensor for access in of_it)
        found: dict[int, list[int]] = {}
        for tensor, index in last.items():
            if tensor not in kept:
                found.setdefault(index, []).append(tensor)
        return found


def is_product(op: Op) -> bool:
    """Tell whether an operation multiplies halves, forward or backward, cast if need be."""
    return op.name in PRODUCTS or op.name.endswith(BACK_OF_PRODUCTS)


def _backward_of(trace: Trace) -> dict[int, int]:
    """By the place of an operation of backward, the number of its call, where marks say."""
    found: dict[int, int] = {}
    waiting: list[int] = []
    place = -1
    for event in trace.events:
        if isinstance(event, Op):
            place += 1
            if event.phase != "backward":
                waiting.clear()
            else:
                waiting.append(place)
        elif isinstance(event, Mark) and event.entry is not None:
            found |= dict.fromkeys(waiting, event.entry)
            waiting.clear()
    return found


def _whole_numbers(trace: Trace) -> set[int]:
    """What functions read as whole numbers."""
    return {
        op.reads[place].tensor
        for op in trace.ops
        if (place := WHOLE_NUMBERS.get(op.name)) is not None and place < len(op.reads)
    }


def _parameters_of(trace: Trace, names: frozenset[str], allocs: Mapping[int, Alloc]) -> set[int]:
    return {
        access.tensor
        for op in trace.ops
        if op.name in names
        for access in op.reads
        if allocs[access.tensor].kind == "parameter"
    }
