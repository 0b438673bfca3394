"""Half precision: a float32 step as `umem.chainer.half_precision` has it, as far as a trace shows.

Parameters have 16 bits, except those of normalisations, and each has a float32 master; `HalfTypes`
finds the other tensors of 16 bits. A cast is made where a function needs another type, and saved in
place of the original as long as the function saves its input. Inputs of a step live as long as in
float32.

Models: memory, and the traffic of operations; on NumPy the float32 copies that functions compute
with. Does not model: casts of gradients (a gradient has the type of its function's inputs), except
that of a cross entropy's scores; arithmetic in halves, quicker on some GPUs and slower on NumPy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count

from umem.errors import StateError
from umem.predict.cupy_differences import DONE, packed_images
from umem.trace.analysis.half_functions import (
    MOVES,
    PRODUCTS,
    SUMS,
    UNSCALED_LAUNCHES,
    master_kernels,
)
from umem.trace.arithmetic import FLOAT16_PRODUCT
from umem.trace.events import GET, LEAF, Access, Alloc, Event, Free, Hint, Kernels, Mark, Op
from umem.trace.trace import Trace
from umem.trace.walk import allocations

BACK_OF_PRODUCTS = ("GradData", "GradWeight", "GradW")
"""Suffixes of the names of functions that compute the gradients of products."""
SINGLES = SUMS | frozenset((
    "SoftmaxCrossEntropy", "SigmoidCrossEntropy", "MeanSquaredError", "MeanAbsoluteError",
    "HuberLoss", "Hinge", "CTC", "ConnectionistTemporalClassification", "Contrastive", "Triplet",
    "Accuracy", "NegativeLogLikelihoodLoss", "ReduceLogSumExp", "ReduceMean", "ReduceSum",
    "SoftmaxCrossEntropyLoss",
))  # fmt: skip
"""Functions computed in float32: sums, losses and evaluations."""
NORMALIZES = frozenset((
    "BatchNormalization", "FixedBatchNormalization", "GroupNormalization", "LayerNormalization",
))  # fmt: skip
"""Functions whose inputs are not cast, and whose parameters stay in float32."""
WHOLE_NUMBERS = {"EmbedIDFunction": 0, "SelectItem": 1, "SoftmaxCrossEntropy": 1, "Accuracy": 1,
                 "SigmoidCrossEntropy": 1, "Gather": 1, "SoftmaxCrossEntropyLoss": 1,
                 "NegativeLogLikelihoodLoss": 1}  # fmt: skip
"""For each function, the place of the input that holds integers."""
NO_SCORES = "SoftmaxCrossEntropy"
"""The function whose saved logarithms of scores take no memory in half precision."""
RETAINED_OUTPUTS = {"LSTM": 1}
"""The number of outputs that a function retains, where not all: functions/rnn/lstm.py, forward."""
BACK_OF_SCORES = "_SoftmaxCrossEntropyGrad_NoDoubleBackprop"
SCALAR_BYTES = 4


class HalfTypes:
    """The tensors that become halves, and the casts, found operation by operation.

    Args:
        trace: the step in float32.

    Attributes:
        trace: the step; on NumPy without borders around images, as rounding leaves none.
        on_host: whether the step runs on NumPy.
        allocs: the allocations of its tensors.
        masters: the parameters that become halves, and the names of their updates.
        halves: the tensors that become halves.
        casts: by the index of an operation of forward, the tensors that are cast for it.
        cast_back: by the index of an operation of backward, the gradients that it makes in the type
            of such a cast, and that are cast to the tensor's own.
        backward_of: by the index of an operation of backward, the call whose backward it is.
        last_uses: by the index of an operation, the tensors whose casts alone are used after it.
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
        self._trained = {LEAF}  # the calls that read a tensor with a gradient
        self._products: dict[int, Op] = {}  # by the call's number
        self.backward_of = _backward_of(trace)
        self.cast_back: dict[int, list[int]] = {}
        self.casts = self._outputs()
        self.halves |= self._left_over()
        self.last_uses = self._last_uses()

    def _outputs(self) -> dict[int, list[int]]:
        """Return the tensors to cast for each operation of forward.

        Add to `halves` what operations of forward and backward make in 16 bits.
        """
        wanted: dict[int, list[int]] = {}
        calls: dict[int, tuple[Op, list[int]]] = {}
        for index, op in enumerate(self.trace.ops):
            if op.phase == "forward":
                wanted[index] = self._forward(op)
                if op.entry is not None and wanted[index]:
                    calls[op.entry.number] = op, wanted[index]
            elif op.phase == "backward":
                self._backward(op)
                call = calls.get(self.backward_of.get(index, -1))
                if call is not None and op.name != BACK_OF_SCORES:
                    self._cast_back(index, op, *call)
        return wanted

    def _cast_back(self, index: int, op: Op, call: Op, cast: Sequence[int]) -> None:
        """Note the gradients of tensors that were cast for a call: each has its tensor's type.

        A gradient is known by its size, where no other input of the call has that.
        """
        sizes = {self.allocs[n].nbytes: n for n in cast}
        others = {self.allocs[a.tensor].nbytes for a in call.reads if a.tensor not in cast}
        for tensor in (access.tensor for access in op.writes):
            of_tensor = sizes.get(self.allocs[tensor].nbytes)
            if of_tensor is None or self.allocs[tensor].nbytes in others:
                continue
            if (tensor in self.halves) != (of_tensor in self.halves):
                self.halves ^= {tensor}
                self.cast_back.setdefault(index, []).append(tensor)

    def _is_float(self, tensor: int) -> bool:
        return tensor not in self._whole and self.allocs[tensor].nbytes > SCALAR_BYTES

    def _is_held(self, tensor: int) -> bool:
        """Return True for an array that a function holds itself, which keeps its type."""
        alloc = self.allocs[tensor]
        return alloc.kind == "input" and "." in alloc.label

    def _forward(self, op: Op) -> list[int]:
        """Return the tensors to cast for an operation; add its outputs to `halves` if they are.

        Also added are first states of recurrent links that it reads beside halves.
        """
        if op.entry is not None and not self._trained.isdisjoint(op.entry.sources):
            self._trained.add(op.entry.number)
        if op.entry is not None and op.name in PRODUCTS:
            self._products[op.entry.number] = op
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
        """Return True if a tensor is an input of the step that has no gradient."""
        if self.allocs[tensor].kind != "input":
            return False
        if op.entry is None:
            return True
        pairs = zip(op.entry.sources, op.reads, strict=False)
        return not any(source in self._trained for source, a in pairs if a.tensor == tensor)

    def _is_first_state(self, op: Op, tensor: int) -> bool:
        """Return True if a tensor is a recurrent link's first state, and becomes a half.

        It is an input with a gradient, which Chainer's LSTM makes in the type of the link's input:
        what the product reads whose output stands beside the state. A batch stays float32.
        """
        if self.allocs[tensor].kind != "input" or op.entry is None:
            return False
        pairs = list(zip(op.entry.sources, op.reads, strict=False))
        if not any(source == LEAF and a.tensor == tensor for source, a in pairs):
            return False
        products = [self._products[source] for source, _ in pairs if source in self._products]
        return all(product.reads[0].tensor in self.halves for product in products)

    def _left_over(self) -> set[int]:
        """Return tensors of the previous step whose counterparts in this one are all halves."""
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
        """Add the gradients that an operation of backward makes to `halves` if they are.

        They are halves if all tensors read besides gradients are, or, without such, all gradients.
        Gradients of products always are; that of a cross entropy if its scores are; of a
        normalisation those as large as its first input, if that is.
        """
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
        """Return when to free tensors whose calls save a cast instead, by the last operation."""
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
                if op.entry.retains_outputs:
                    of_it += op.writes[: RETAINED_OUTPUTS.get(op.name)]
                kept.update(access.tensor for access in of_it)
        found: dict[int, list[int]] = {}
        for tensor, index in last.items():
            if tensor not in kept:
                found.setdefault(index, []).append(tensor)
        return found


def is_product(op: Op) -> bool:
    """Return True if an operation is a product, forward or backward, whose inputs become halves."""
    return op.name in PRODUCTS or op.name.endswith(BACK_OF_PRODUCTS)


def _backward_of(trace: Trace) -> dict[int, int]:
    """Map operations of backward, by index, to the number of their call, where marks say."""
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
    """Return the tensors that functions read as integers."""
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


LINE = "umem.chainer.half_precision(model, optimizer)"
SPARSE_PRODUCT = "SparseMatMul"
"""umem's own product, which copies halves to float32 and back on every device."""
CAST = "Cast"
CASTING = (SPARSE_PRODUCT, "MatMul")
"""Products that compute in float32 on CuPy: ``cupy.matmul`` of stacks, and umem's sparse one."""
SCORES_LAUNCHES = 9
"""Kernels of the gradient of a cross entropy, with those of ``log_softmax``."""
CHECK_LAUNCHES = 3
"""A memset, umem/chainer/precision/floats.py's kernel, and the copy of what it found."""


def in_half(trace: Trace) -> Trace:
    """Return the trace in half precision.

    Raises:
        StateError: the step is in half precision already, or updates no parameter that could have
            16 bits.
    """
    if any(e.label.endswith(".fp32") for e in trace.events if isinstance(e, Alloc)):
        raise StateError("the step is in half precision already")
    types = HalfTypes(trace)
    if not types.masters:
        raise StateError("the step updates no parameter that could have 16 bits")
    return trace.with_events(_Writer(types).events())


class _Writer:
    """The events of a trace in half precision, with casts and float32 masters."""

    def __init__(self, types: HalfTypes) -> None:
        self._types, self._allocs, self._halves = types, types.allocs, types.halves
        self._fresh = count(1 + max(types.allocs, default=-1))
        self._copies: dict[int, int] = {}
        self._casts: dict[int, dict[int, Access]] = {}  # read and freed by a call's backward
        self._with_original: dict[int, list[int]] = {}  # casts freed with their originals
        self._passing: list[int] = []  # casts freed after the operation
        self._gone: set[int] = set()  # tensors freed earlier than in float32

    def events(self) -> Iterator[Event]:
        """Yield the events with halves, casts and masters."""
        number, before = -1, ""
        for event in self._types.trace.events:
            if isinstance(event, Alloc):
                yield event._replace(nbytes=self._bytes(event.tensor))
                if event.tensor in self._types.masters:
                    yield self._master(event)
            elif isinstance(event, Op):
                number += 1
                if event.phase == "update" and before != "update":
                    yield self._check()
                before = event.phase
                yield from self._op(event, number)
                yield from self._free(self._types.last_uses.get(number, ()))
            elif isinstance(event, Free):
                if event.tensor not in self._gone:
                    yield event
                self._gone.discard(event.tensor)
                yield from map(Free, self._with_original.pop(event.tensor, ()))
            elif isinstance(event, Hint):
                yield event._replace(accesses=self._typed(event.accesses, {}))
            else:
                yield event
                if isinstance(event, Mark) and event.entry is not None:
                    casts = self._casts.pop(event.entry, {})
                    given = (c for n, c in casts.items() if self._allocs[n].kind != "activation")
                    yield from (Free(copy.tensor) for copy in given)

    def _free(self, tensors: Iterable[int]) -> Iterator[Event]:
        for tensor in tensors:
            self._gone.add(tensor)
            yield Free(tensor)

    def _bytes(self, tensor: int) -> int:
        alloc = self._allocs[tensor]
        if alloc.kind == "stash" and alloc.label.startswith(f"{NO_SCORES}."):
            return 0
        return alloc.nbytes // 2 if tensor in self._halves else alloc.nbytes

    def _master(self, alloc: Alloc) -> Alloc:
        copy = self._copies[alloc.tensor] = next(self._fresh)
        label = f"{self._types.masters[alloc.tensor]}.fp32"
        return alloc._replace(tensor=copy, kind="state", label=label)

    def _op(self, op: Op, number: int) -> Iterator[Event]:
        """Yield an operation on halves, after the casts that it needs."""
        cast = self._types.casts.get(number, [])
        copies: dict[int, Access] = {}
        for tensor in dict.fromkeys(cast):
            yield from self._cast(op, tensor, copies)
        if op.phase == "backward":
            copies = self._casts.get(self._types.backward_of.get(number, -1), {})
        before = _sum(op)
        reads, writes = self._typed(op.reads, copies), self._typed(op.writes, copies)
        if op.phase == "update":
            masters = tuple(
                Access(copy, 0, self._allocs[a.tensor].nbytes)
                for a in op.writes
                if (copy := self._copies.get(a.tensor)) is not None
            )
            reads, writes = (*reads, *masters), (*writes, *masters)
        small = op._replace(reads=reads, writes=writes)
        # Chainer's are mostly of stacks, which CuPy multiplies in float32.
        is_in_half = is_product(op) and (
            op.name != "MatMul" or "exported" in self._types.trace.meta
        )
        if is_in_half and _in_halves(op, self._halves):
            small = small._replace(arithmetic=FLOAT16_PRODUCT)
        saved = before - _sum(small)
        share = 1 - saved / before if before and saved > 0 else 1.0
        inside = None if op.workspace_bytes is None else self._inside(op, saved, before, cast)
        traffic = round(op.traffic_bytes * share) if saved > 0 else op.traffic_bytes - saved
        kernels = self._update_kernels(op) if op.phase == "update" else _kernels(op, share)
        small = small._replace(traffic_bytes=traffic, workspace_bytes=inside, kernels=kernels)
        is_cast = op.name == BACK_OF_SCORES and op.writes[0].tensor in self._halves
        cast_back = self._types.cast_back.get(number, ())
        if is_cast:
            yield from self._cast_back(op, small)
        elif cast_back:
            yield from self._cast_each(small, cast_back)
        else:
            yield small
        yield from map(Free, self._passing)
        self._passing.clear()

    def _check(self) -> Op:
        """Return the check of all gradients, for which the host waits before the first update."""
        checked = sum(self._bytes(tensor) for tensor in self._types.masters)
        kernels = Kernels(CHECK_LAUNCHES)
        return Op(GET, "array", (), (), 0, checked, workspace_bytes=0, kernels=kernels)

    def _update_kernels(self, op: Op) -> Kernels:
        """Return the kernels of an update, with those of the loss scale and of masters."""
        masters = [self._allocs[a.tensor].nbytes for a in op.writes if a.tensor in self._copies]
        return master_kernels(sum(masters) // 4) if masters else Kernels(UNSCALED_LAUNCHES)

    def _inside(self, op: Op, saved: int, before: int, cast: Sequence[int]) -> int:
        """Return the workspace of an operation in half precision, in bytes."""
        needed = op.workspace_bytes or 0
        if op.phase == "update":  # of the master, by its gradient in float32
            masters = [a.tensor for a in op.writes if a.tensor in self._copies]
            return needed + sum(self._allocs[tensor].nbytes for tensor in masters)
        if op.name == SPARSE_PRODUCT:
            return needed + sum(a.stop - a.start for a in _in_halves(op, self._halves))
        if self._types.on_host:
            return self._in_float32(op, needed, cast)
        return round(needed * (1 - saved / before)) if before and saved > 0 else needed

    def _cast_back(self, op: Op, small: Op) -> Iterator[Event]:
        """Yield an operation that makes a float32 gradient, and its cast to the allocated half."""
        (half,), single = small.writes, self._allocs[op.writes[0].tensor]
        copy = Access(next(self._fresh), 0, single.nbytes)
        yield single._replace(tensor=copy.tensor)
        needed = op.workspace_bytes and max(0, op.workspace_bytes - single.nbytes // 2)
        yield small._replace(writes=(copy,), traffic_bytes=op.traffic_bytes, workspace_bytes=needed)
        elements, traffic = single.nbytes // 4, single.nbytes * 3 // 2
        yield Op(CAST, op.phase, (copy,), (half,), elements, traffic, workspace_bytes=0)
        yield Free(copy.tensor)

    def _cast_each(self, op: Op, tensors: Sequence[int]) -> Iterator[Event]:
        """Yield an operation that makes gradients in the other type, and a cast of each."""
        copies, writes = [], []
        for access in op.writes:
            if access.tensor in tensors:
                single = self._allocs[access.tensor].nbytes
                nbytes = single if access.tensor in self._halves else single // 2
                copy = Access(next(self._fresh), 0, nbytes)
                yield Alloc(copy.tensor, nbytes, "gradient", CAST)
                copies.append((copy, access))
                access = copy
            writes.append(access)
        yield op._replace(writes=tuple(writes))
        for copy, access in copies:
            moved = copy.stop + access.stop - access.start
            elements = self._allocs[access.tensor].nbytes // 4
            yield Op(CAST, op.phase, (copy,), (access,), elements, moved, workspace_bytes=0)
            yield Free(copy.tensor)

    def _in_float32(self, op: Op, needed: int, cast: Sequence[int]) -> int:
        """Return the workspace on NumPy, with float32 copies of the halves an operation uses.

        Outputs are computed in float32 before their halves are made.
        """
        read = [
            a.stop - a.start
            for a in op.reads
            if is_product(op) or (a.tensor in self._halves) != (a.tensor in cast)
        ]
        if op.name in MOVES or not read:
            return needed
        made = sum(a.stop - a.start for a in op.writes if a.tensor in self._halves)
        return max(needed + sum(read) + made - made // 2, made)

    def _cast(self, op: Op, tensor: int, copies: dict[int, Access]) -> Iterator[Event]:
        """Yield the allocation and cast of a tensor's copy in the other type, float16 or float32.

        An operation reads the copy in place of the tensor; ``copies`` gets its access. It is freed
        after the operation. If the operation retains it, a copy of an activation is freed with the
        float32 step's free of the activation, and another copy after the operation's backward.
        """
        used = [access for access in op.reads if access.tensor == tensor]
        start, stop = min(a.start for a in used), max(a.stop for a in used)
        is_half = tensor in self._halves
        nbytes = stop - start if is_half else (stop - start) // 2
        copy = next(self._fresh)
        copies[tensor] = Access(copy, start, stop)
        yield Alloc(copy, nbytes, "activation", CAST)
        reads = self._typed([Access(tensor, start, stop)], {})
        writes, traffic = (Access(copy, 0, nbytes),), (stop - start) * 3 // 2
        elements = (stop - start) // 4
        yield Op(CAST, op.phase, reads, writes, elements, traffic, workspace_bytes=0)
        places = {place for place, access in enumerate(op.reads) if access.tensor == tensor}
        if op.entry is None or places.isdisjoint(op.entry.retained):
            self._passing.append(copy)
        else:
            self._casts.setdefault(op.entry.number, {})[tensor] = copies[tensor]
            if self._allocs[tensor].kind == "activation":
                self._with_original.setdefault(tensor, []).append(copy)

    def _typed(
        self, accesses: Iterable[Access], copies: Mapping[int, Access]
    ) -> tuple[Access, ...]:
        """Return accesses scaled to the tensors' types, with casts in place of originals."""
        found = []
        for tensor, start, stop in accesses:
            now, whole = self._bytes(tensor), max(1, self._allocs[tensor].nbytes)
            copy = copies.get(tensor)
            if copy is None:
                found.append(Access(tensor, start * now // whole, stop * now // whole))
            else:
                share = 1 if tensor in self._halves else 2
                begin, end = (start - copy.start) // share, (stop - copy.start) // share
                found.append(Access(copy.tensor, begin, end))
        return tuple(found)


def _kernels(op: Op, share: float) -> Kernels | None:
    """Return the kernels of an operation in halves.

    Products that have no halves cast their operands and the result; the gradient of a cross entropy
    computes again the logarithms that are not saved.
    """
    if op.name in CASTING:
        launch_count = max(2, 0 if op.kernels is None else op.kernels.launch_count) + 2
        whole = sum(access.stop - access.start for access in (*op.reads, *op.writes))
        return Kernels(launch_count, round(whole * 3 / 2))
    if op.name == BACK_OF_SCORES and op.reads:
        passes = 8 * (op.reads[0].stop - op.reads[0].start)
        return Kernels(SCORES_LAUNCHES, passes)
    return None if op.kernels is None else op.kernels.scaled(share)


def _sum(op: Op) -> int:
    return sum(stop - start for _, start, stop in (*op.reads, *op.writes))


def _in_halves(op: Op, halves: set[int]) -> list[Access]:
    return [access for access in (*op.reads, *op.writes) if access.tensor in halves]
