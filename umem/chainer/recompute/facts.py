"""Facts about a function: may it run again, its state, its seconds and its memory.

A graph that repeats has facts of each of its calls, as `Observed`. A graph that does not repeat has
facts by class of function: the first calls of a class are examined closely (`FunctionKind`), and
others are assumed to be alike. Memory is measured for the first of similar calls, around each call
alone, by the meter of its arrays' memory (`CallMemory`).
"""

from __future__ import annotations

import ctypes
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import chainer
import numpy as np

from umem.chainer.function_facts import output_gradient_bytes, owner_of, rules_of
from umem.chainer.recompute.tape import STATISTICS, Call
from umem.chainer.saved.slots import NODE_ATTRIBUTES, arrays_in, packing
from umem.devices import cuda_model, entered_device, work_seconds
from umem.planner import DRAWS, CallFacts
from umem.trace.recording import BlockMeter, HostMeter, root_of

LOOKS = 3
"""Calls of a class that are examined before the class is known, if graphs do not repeat. A guess,
not measured."""
MEASURED = 2
"""Similar calls whose memory is measured: the first one may allocate memory that stays."""
OBJECTS = 4096
"""Bytes of a measured rise that are Python's own objects, which `tracemalloc` also sees. A guess
below the 5.3 to 7.0 KB that the objects of a call take in five networks."""
STEP = 512
"""Workspace is rounded down to a multiple of this, the step of CuPy's pools: on the host a few of
Python's floats come and go with it, and the same call seems to take 24 bytes more or less."""
SHAPES = 32
"""At most this many shapes of parameters are distinguished a class. A guess, not measured."""
_MT19937_BYTES = 624 * 4 + 4
"""Bytes of the key and the position of mt19937_state in NumPy's random/src/mt19937/mt19937.h."""
_AGAIN = frozenset(("BatchNormalization", "FixedBatchNormalization"))
"""Functions that may be recomputed although they change state, because a recompute preserves it."""


class Before(NamedTuple):
    """State that a forward may change, taken before it; ``random`` is None if not examined."""

    state: dict[str, Any]
    checksums: list[tuple[Any, int]]
    random: bytes | None


def look(func: Any) -> Before:
    """Record a function's attributes, the checksums of its arrays and the random state."""
    state = dict(vars(owner_of(func)))
    return Before(state, [(a, _sum(a)) for a in _arrays(state.items())], _random())


@dataclass(frozen=True)
class Observed(CallFacts):
    """Facts of one call, measured while its forward ran; its backward is not known.

    The cost is the seconds of the forward; if requested, by a device's cost model.

    Attributes:
        stash: names of the function state, the attributes that forward set to arrays.
        looked: whether the random state was also examined to tell if the call may run again.
    """

    stash: tuple[str, ...] = ()
    looked: bool = False


def observe(
    call: Call, func: Any, inputs: Any, before: Before, seconds: float, workspace: int
) -> Observed:
    """Collect the facts of a call that has just run.

    Args:
        call, func, inputs: the call, and its function and inputs.
        before: the state before the forward, from `look`.
        seconds, workspace: of the forward.
    """
    owner = owner_of(func)
    found = _made_on(owner, before)
    arrays = [x.array if isinstance(x, chainer.Variable) else x for x in inputs]
    ins = [root_of(x) for x in arrays]
    assert call.values is not None
    roots = {id(root): root for root in map(root_of, call.values)}
    own = [root for root in roots.values() if not any(root is x for x in ins)]
    bases = [
        s.call.index
        for s, x in zip(call.sources, ins, strict=True)
        if s.call is not None and s.call.number == call.number and id(x) in roots
    ]
    held = {id(a): a.nbytes for arrays in found.values() for a in arrays}
    for root in own:
        held.pop(id(root), None)
    mask, packed = packing(func, found)
    drawn = type(owner).__name__ in DRAWS
    return Observed(
        label=call.label,
        nbytes=sum(root.nbytes for root in own),
        grad_bytes=output_gradient_bytes(arrays, call.values),
        alias=bases[0] if bases and not own else None,
        stash=tuple(found),
        stash_bytes=0 if drawn or (bases and not own) else sum(held.values()),
        drawn_bytes=sum(held.values()) if drawn else 0,
        mask_bytes=mask,
        packed_bytes=packed,
        again=_may_run_again(func, before),
        looked=before.random is not None,
        cost=seconds,
        workspace_bytes=workspace,
    )


def _made_on(owner: Any, before: Before) -> dict[str, list[Any]]:
    """Return by name the arrays that forward has set on a function."""
    new = {
        k: v
        for k, v in vars(owner).items()
        if before.state.get(k) is not v and k not in NODE_ATTRIBUTES
    }
    lists = {key: _arrays([(key, value)]) for key, value in new.items()}
    return {key: arrays for key, arrays in lists.items() if arrays}


def _may_run_again(func: Any, before: Before) -> bool:
    kind = owner_of(func).__class__
    name = kind.__name__
    same = name in _AGAIN or all(_sum(array) == known for array, known in before.checksums)
    return same and (name in DRAWS or before.random == _random()) and rules_of(kind)[0]


def _arrays(items: Iterable[tuple[str, Any]]) -> list[Any]:
    own = ((key, value) for key, value in items if not isinstance(value, chainer.Function))
    return [array for _, array in arrays_in(own)]


def _sum(array: Any) -> int:
    """Return a checksum of a NumPy array; 0 for a device's array, which is not copied."""
    return zlib.crc32(np.ascontiguousarray(array).tobytes()) if type(array) is np.ndarray else 0


def _random() -> bytes:
    """Return the state of NumPy's global generator that drawing bits changes.

    The copy lacks the second of two normal numbers that are drawn together; `DRAWS` names
    Chainer's functions that draw them. ``get_state`` takes 150 times as long as this copy.
    """
    random: Any = np.random
    generator = random.get_bit_generator()
    if type(generator) is random.MT19937:
        return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    return repr(generator.state).encode()


# -- time -----------------------------------------------------------------------------------------


def wait_for(inputs: Any) -> None:
    """Wait for all kernels on a GPU, where the host's time of a call is only their launch."""
    arrays = [x.array if isinstance(x, chainer.Variable) else x for x in inputs]
    device = chainer.backend.get_device_from_array(*arrays)
    if device.xp is not np:
        device.device.synchronize()


class Timed:
    """A call that is timed when it runs.

    Args:
        run: the call.
        inputs: its inputs, to wait for its kernels; None: do not wait.
        by_model: whether to ask also the current device's cost model for the call's cost.

    Attributes:
        seconds: on this host.
        cost: by the cost model; without one, the same.
    """

    def __init__(self, run: Callable[[], Any], inputs: Any, *, by_model: bool) -> None:
        self._run, self._inputs, self._by_model = run, inputs, by_model
        self.seconds = self.cost = 0.0

    def __call__(self) -> Any:
        """Run the call; return its result."""
        modelled = model_seconds() if self._by_model else None
        start = work_seconds()
        made = self._run()
        if self._inputs is not None:
            wait_for(self._inputs)
        self.cost = self.seconds = work_seconds() - start
        if modelled is not None:
            self.cost = (model_seconds() or 0.0) - modelled
        return made


def model_seconds() -> float | None:
    """Return the seconds so far by the current device's cost model; None without one."""
    device = entered_device() or cuda_model()
    figures = None if device is None else device.figures
    return None if figures is None else figures.seconds


# -- memory ----------------------------------------------------------------------------------------


def meter_of(arrays: Iterable[Any]) -> BlockMeter:
    """Return a meter of the memory of arrays: the host's, or the current GPU's pools.

    The host's if all are NumPy's; variables and None are allowed among them.
    """
    arrays = [getattr(x, "array", x) for x in arrays]
    if all(x is None or isinstance(x, np.ndarray) for x in arrays):
        return HostMeter()
    from umem.devices.cuda import PoolMeter  # imports CuPy, which may be missing

    return PoolMeter()


def shape_of(leaves: Sequence[Any]) -> Any:
    """Return the shape of a call's second input if that is from outside, as weights are."""
    return None if len(leaves) < 2 or leaves[1] is None else leaves[1].shape


class CallMemory:
    """The memory of similar calls while they run: measured for the first, and for larger ones.

    For other calls, the expected rise of memory is the same share of the bytes that they work on.
    The largest calls determine it, because small ones have much memory beside their arrays.

    Attributes:
        workspace_bytes: needed only during the last measured call.
        risen_bytes: the largest rise of memory in a measured call, including its results.
    """

    __slots__ = ("_base", "_count", "_share", "risen_bytes", "workspace_bytes")

    def __init__(self) -> None:
        self._share, self._base, self._count = 1.0, 0, 0
        self.workspace_bytes = self.risen_bytes = 0

    def wants(self, base: int = 0) -> bool:
        """Tell whether to measure a call that works on this many bytes.

        ``base`` is 0 if all similar calls work on equally many.
        """
        return self._count < MEASURED or base > 1.5 * self._base

    def run(
        self,
        run: Callable[[], Any],
        meter: BlockMeter,
        base: int = 0,
        gradients: Sequence[tuple[weakref.ref[Any], int]] = (),
    ) -> Any:
        """Run a call, and measure its memory if possible; return its result.

        A peak that the user follows with `tracemalloc` is preserved.

        Args:
            run: the call.
            meter: of its arrays' memory.
            base: see `wants`.
            gradients: earlier arrays that it may free, with their bytes.
        """
        if meter.why_not() is not None:
            return run()
        with meter:
            begun = meter.held().live
            made = run()
            held = meter.held()
            # A meter that is ours has not seen that gradients were freed once others were added.
            freed = [size for array, size in gradients if array() is None] if meter.is_ours else []
        self.workspace_bytes = (held.workspace + sum(freed)) // STEP * STEP
        self._learn(base, held.peak - begun)
        return made

    def _learn(self, base: int, risen: int) -> None:
        """Record that memory rose by some bytes in a call that worked on ``base`` bytes."""
        self._count += 1
        self.risen_bytes = max(self.risen_bytes, risen)
        share = max(0, risen - OBJECTS) / max(base, 1)
        if base > 2 * self._base:
            self._share, self._base = share, base
        elif 2 * base >= self._base:
            self._share, self._base = max(self._share, share), max(self._base, base)

    def expected_bytes(self, base: int) -> int:
        """Return the expected rise for a call on this many bytes; the same if none was measured."""
        return int(self._share * base)


# -- classes of functions ------------------------------------------------------------------------


class FunctionKind:
    """The facts of one class of functions.

    Attributes:
        again: whether its calls may be recomputed.
        changes: whether its calls change running statistics.
        is_plain: whether enough calls were examined, may be recomputed and change nothing.
        draws: whether its function state is drawn at random.
        stash: names of the function state, the attributes that forward sets to arrays.
    """

    __slots__ = (
        "_backward", "_count", "_forward", "again", "changes", "draws", "is_plain", "stash",
    )  # fmt: skip

    def __init__(self, kind: type) -> None:
        self.again = True
        self.draws = kind.__name__ in DRAWS
        self.stash: tuple[str, ...] = ()
        self.changes = self.is_plain = False
        self._count = 0
        self._forward: dict[Any, CallMemory] = {}
        self._backward: dict[Any, CallMemory] = {}

    @property
    def is_known(self) -> bool:
        """True once enough calls were examined."""
        return self._count >= LOOKS

    def look(self, func: Any) -> Before | None:
        """Record the state that a forward may change; None if enough calls were examined."""
        return None if self.is_known else look(func)

    def learn(self, func: Any, before: Before) -> None:
        """Record the facts of a call that has just run, given the state before it."""
        stash = _made_on(owner_of(func), before)
        self._count += 1
        self.again = self.again and _may_run_again(func, before)
        self.changes = self.changes or any(hasattr(func, name) for name in STATISTICS)
        kept = [name for name in stash if name not in STATISTICS]
        self.stash = tuple(dict.fromkeys((*self.stash, *kept)))
        self.is_plain = self.is_known and self.again and not self.changes

    def forward(self, shape: Any) -> CallMemory:
        """Return the memory in forward of calls with a parameter of this shape."""
        return _of_shape(self._forward, shape)

    def backward(self, shape: Any) -> CallMemory:
        """Return the memory in backward of calls with a parameter of this shape."""
        return _of_shape(self._backward, shape)


def _of_shape(memories: dict[Any, CallMemory], shape: Any) -> CallMemory:
    found = memories.get(shape)
    if found is None:
        if len(memories) >= SHAPES:
            shape = next(iter(memories))
        found = memories.setdefault(shape, CallMemory())
    return found


class Experience:
    """Facts about functions from all passes, and about the passes without a plan.

    Attributes:
        kinds: the classes of functions that were seen.
        rise_bytes: the largest rise of memory in a call of forward.
        backward_share: the most that backward has held beside arrays of forward and the gradients
            of parameters, as a share of the former; None before a backward was followed.
        plain_bytes: the highest peak that a pass would have had with nothing evicted.
        peak_bytes: the highest peak of a pass, by account.
        count: passes that have had a backward.
        seconds, rerun_seconds: of functions in passes under pressure, and of recomputing there.
    """

    def __init__(self) -> None:
        self.kinds = Kinds()
        self._alike: dict[Any, CallMemory] = {}
        self.rise_bytes = 0
        self.backward_share: float | None = None
        self.plain_bytes = self.peak_bytes = self.count = 0
        self.seconds = self.rerun_seconds = 0.0

    def forward(self, func: Any, inputs: Any, run: Callable[[], Any]) -> tuple[Any, int]:
        """Run a forward; return its outputs, and its workspace by calls of the same shapes."""
        arrays = [getattr(x, "array", x) for x in inputs]
        memory = self._memory(func, arrays)
        made = memory.run(run, meter_of(arrays)) if memory.wants() else run()
        return made, memory.workspace_bytes

    def backward(self, func: Any, args: tuple[Any, ...], run: Callable[[], Any]) -> int:
        """Run a step of backward; return its workspace by steps of the same shapes.

        Args:
            func: its function.
            args: the arguments of Chainer's ``backprop_step`` after the function.
            run: the step.
        """
        targets, out_grad, in_grads = args[:3]
        before = [g.array for found in in_grads.values() for g in found]
        arrays = [None if g is None else g.array for g in out_grad]
        arrays = [*(x.data for x in func.inputs), *arrays, *before]
        memory, meter = self._memory(func, arrays, targets), meter_of(arrays)
        gradients = [(weakref.ref(array), array.nbytes) for array in before]
        del arrays, before  # so that the step can free them
        if memory.wants():
            memory.run(run, meter, gradients=gradients)
        else:
            run()
        return memory.workspace_bytes

    def _memory(self, func: Any, arrays: Iterable[Any], targets: Any = None) -> CallMemory:
        """Return the memory of calls of the same class, options and shapes.

        Options are attributes with plain values, such as a stride.
        """
        owner = owner_of(func)
        options = [
            (name, value)
            for name, value in vars(owner).items()
            if type(value) in (bool, int, float, str) and name not in NODE_ATTRIBUTES
        ]
        shapes = [None if x is None else (x.shape, x.strides, x.dtype) for x in arrays]
        key = type(owner), targets, tuple(options), tuple(shapes)
        return self._alike.setdefault(key, CallMemory())

    def rose(self, nbytes: int) -> None:
        """Record a rise of memory in a call of forward."""
        self.rise_bytes = max(self.rise_bytes, nbytes)

    def went_backward(self, share: float) -> None:
        """Record the share that a backward has held; see ``backward_share``."""
        self.backward_share = max(self.backward_share or 0.0, share)

    def ended(
        self, plain_bytes: int, peak_bytes: int, seconds: float, rerun_seconds: float
    ) -> None:
        """Count a finished pass.

        Args:
            plain_bytes: its peak, had nothing been dropped.
            peak_bytes: its peak.
            seconds, rerun_seconds: of its functions under pressure, and of recomputing.
        """
        self.count += 1
        self.plain_bytes = max(self.plain_bytes, plain_bytes)
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        self.seconds += seconds
        self.rerun_seconds += rerun_seconds


class Kinds(dict[type, FunctionKind]):
    """The classes of functions that were seen, by type; a requested class is added."""

    def __missing__(self, kind: type) -> FunctionKind:
        found = self[kind] = FunctionKind(kind)
        return found
