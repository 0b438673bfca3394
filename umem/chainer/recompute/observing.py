"""Observation of one call: its outputs, function state, side effects, time and workspace."""

from __future__ import annotations

import ctypes
import weakref
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import chainer
import numpy as np
from chainer import configuration

from umem.chainer.function_facts import output_gradient_bytes, owner_of, rules_of
from umem.chainer.recompute.tape import Call
from umem.chainer.saved.slots import NODE_ATTRIBUTES, arrays_in, arrays_on, holds_nothing, packing
from umem.devices import cuda_model, entered_device, work_seconds
from umem.errors import UnsupportedError
from umem.planner import DRAWS
from umem.trace.recording import BlockMeter, HostMeter, root_of

_MT19937_BYTES = 624 * 4 + 4
"""Bytes of the key and the position of mt19937_state in NumPy's random/src/mt19937/mt19937.h."""
SURE = 2
"""Calls of a kind and shape whose workspace is measured: the first one may set up what stays."""
_AGAIN = frozenset(("BatchNormalization", "FixedBatchNormalization"))
"""Functions that may be recomputed although they change state, as a recompute leaves it alone."""


class Before(NamedTuple):
    """State that a forward may change, taken before it; ``random`` is None if not examined."""

    state: dict[str, Any]
    checksums: list[tuple[Any, int]]
    random: bytes | None


def look(func: Any) -> Before:
    """Record a function's attributes, the checksums of its arrays and the random state."""
    state = dict(vars(owner_of(func)))
    return Before(state, [(a, _sum(a)) for a in _arrays(state.items())], _random())


class Observed(NamedTuple):
    """Facts of one call, measured while its forward ran.

    Attributes:
        nbytes: memory of the outputs, without that of inputs that they are views of.
        grad_bytes: gradients of the outputs.
        alias: index of the call of this pass whose memory all outputs are views of; None otherwise.
        stash: names of the function state, the attributes that forward set to arrays.
        stash_bytes: function state beside the outputs, if it can be dropped; 0 for a view.
        drawn_bytes: function state that was drawn at random.
        mask_bytes, packed_bytes: a dropout's mask, as it is and as bits.
        again: whether the call may be recomputed.
        looked: whether the random state was examined as well for that.
        seconds: of the forward, as a device's cost model has it if that is asked for.
        workspace_bytes: needed only while forward ran; 0 if not measured.
    """

    nbytes: int
    grad_bytes: int
    alias: int | None
    stash: tuple[str, ...]
    stash_bytes: int
    drawn_bytes: int
    mask_bytes: int
    packed_bytes: int
    again: bool
    looked: bool
    seconds: float
    workspace_bytes: int


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
        seconds=seconds,
        workspace_bytes=workspace,
    )


def again_and_stash(func: Any, before: Before) -> tuple[bool, tuple[str, ...]]:
    """Return whether a call that has just run may be recomputed, and its function state's names."""
    return _may_run_again(func, before), tuple(_made_on(owner_of(func), before))


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
    """Return the state of NumPy's global generator, as far as drawing bits changes it.

    The copy lacks the second of two normal numbers that are drawn together; `DRAWS` names the
    functions of Chainer that draw such. ``get_state`` takes 150 times as long as this copy.
    """
    random: Any = np.random
    generator = random.get_bit_generator()
    if type(generator) is random.MT19937:
        return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    return repr(generator.state).encode()


class Beside(NamedTuple):
    """Arrays outside of a graph that are alive between its forward and its backward.

    Attributes:
        constant_bytes: parameters and other arrays from outside that its calls read, or hold.
        stays: by call, bytes of the gradients of leaves that its backward is the first to make.
        parameters: by id, weak references to the parameters.
        held_gradients: by id of a parameter, the bytes of the gradient that it has now.
    """

    constant_bytes: int
    stays: dict[int, int]
    parameters: dict[int, Any]
    held_gradients: dict[int, int]


def look_beside(calls: Iterable[Call]) -> Beside:
    """Collect the arrays that the calls of a pass read from outside; for use after forward."""
    constant = 0
    stays: dict[int, int] = {}
    parameters: dict[int, Any] = {}
    held_gradients: dict[int, int] = {}
    seen: set[int] = set()
    for call in reversed(list(calls)):
        for node, array in call.leaves():
            if id(node) in seen:
                continue
            seen.add(id(node))
            if node.requires_grad:  # backward reaches the leaf first by this call
                stays[call.index] = stays.get(call.index, 0) + array.nbytes
            held = node.get_variable_or_none()
            if isinstance(held, chainer.Parameter):
                parameters[id(held)] = weakref.ref(held)
                if gradient_bytes(held):
                    held_gradients[id(held)] = gradient_bytes(held)
            constant += _unseen_bytes(array, seen)
        for array in _held_from_outside(call):
            constant += _unseen_bytes(array, seen)
    return Beside(constant, stays, parameters, held_gradients)


def _held_from_outside(call: Call) -> list[Any]:
    """List the arrays that a function held before it ran, such as statistics and indexes."""
    if not call.has_func or holds_nothing(call.func):
        return []
    return [array for name, array in arrays_on(call.func) if name not in call.stash.names]


def _unseen_bytes(array: Any, seen: set[int]) -> int:
    root = root_of(array)
    if id(root) in seen:
        return 0
    seen.add(id(root))
    return int(root.nbytes)


def gradient_bytes(parameter: Any) -> int:
    """Return the bytes of a parameter's gradient; 0 if it has none."""
    grad = parameter.grad if parameter._grad_valid else None  # reading grad would make it valid
    return 0 if grad is None else int(grad.nbytes)


# -- time -----------------------------------------------------------------------------------------


def wait_for(inputs: Any) -> None:
    """Wait for all kernels on a GPU, where the host's time of a call is that of launching them."""
    arrays = [x.array if isinstance(x, chainer.Variable) else x for x in inputs]
    device = chainer.backend.get_device_from_array(*arrays)
    if device.xp is not np:
        device.device.synchronize()


class Timed:
    """Measures the time of one call, from its construction until `stop`.

    Args:
        by_model: whether to ask the current device's cost model for the call's cost as well.
    """

    def __init__(self, *, by_model: bool) -> None:
        self._modelled = model_seconds() if by_model else None
        self._start = work_seconds()

    def stop(self) -> tuple[float, float]:
        """Return the seconds on this host, and the cost model's; without one, the same twice."""
        seconds = work_seconds() - self._start
        if self._modelled is None:
            return seconds, seconds
        return seconds, (model_seconds() or 0.0) - self._modelled


def model_seconds() -> float | None:
    """Return the seconds so far by the current device's cost model; None without one."""
    device = entered_device() or cuda_model()
    figures = None if device is None else device.figures
    return None if figures is None else figures.seconds


# -- memory --------------------------------------------------------------------------------------


def meter_of(arrays: Iterable[Any]) -> BlockMeter:
    """Return a meter of the memory that arrays are in: the host's, or the current GPU's pools.

    The host's where all are NumPy's; variables and None are allowed among them.
    """
    arrays = [getattr(x, "array", x) for x in arrays]
    if all(x is None or isinstance(x, np.ndarray) for x in arrays):
        return HostMeter()
    from umem.devices.cuda import PoolMeter  # imports CuPy, which need not be there

    return PoolMeter()


class PassPeaks:
    """Measures the workspace of calls, or the peak of a whole pass, by a meter; or is off.

    The peak of a pass is slow to measure on the host, where the meter is that of `tracemalloc`.
    Workspace is measured around the first calls of each kind and shape; the others take the same.

    Attributes:
        what: ``workspace`` or ``peak`` while measuring; None while off.
    """

    def __init__(self) -> None:
        self.what: str | None = None
        self._before = self._forward = 0
        self._meter: BlockMeter = HostMeter()
        self._blind = False
        self._known: dict[Any, tuple[int, int]] = {}
        self._key: Any = None
        self._is_on = False
        self._gradients: list[tuple[weakref.ref[Any], int]] = []

    def start(self, what: str, meter: BlockMeter, *, blind: bool = False) -> None:
        """Begin to measure the ``workspace`` of calls, or a pass's ``peak``.

        ``blind``: the meter cannot tell what the arrays take, and nothing is measured.
        """
        self.what, self._meter, self._blind = what, meter, blind
        if self._measures("peak"):
            meter.start()
            self._before, self._forward = meter.held().live, 0

    def stop(self) -> None:
        """Stop measuring; a `tracemalloc` that was on before stays on."""
        self._meter.stop()
        self.what = None
        self._is_on = False
        self._gradients = []

    def forward_begins(self, func: Any, inputs: Any) -> None:
        """Begin to measure the workspace of a forward, if that is not known yet."""
        if self._measures("workspace"):
            self._begin(func, [getattr(x, "array", x) for x in inputs])

    def backward_begins(self, func: Any, args: tuple[Any, ...]) -> None:
        """Begin to measure the workspace of a step of backward, if that is not known yet.

        ``args``: the arguments of Chainer's ``backprop_step`` behind the function.
        """
        if self._measures("workspace"):
            targets, out_grad, in_grads = args[:3]
            before = [g.array for found in in_grads.values() for g in found]
            arrays = [None if g is None else g.array for g in out_grad]
            self._begin(func, [*(x.data for x in func.inputs), *arrays, *before], targets)
            if self._meter.is_ours:
                self._gradients = [(weakref.ref(array), array.nbytes) for array in before]

    def _begin(self, func: Any, arrays: Iterable[Any], targets: Any = None) -> None:
        """Find the call's kind and shapes, and start the meter if they are not known well.

        Attributes that are plain values, such as a stride, are of the kind.
        """
        owner = owner_of(func)
        options = [
            (name, value)
            for name, value in vars(owner).items()
            if type(value) in (bool, int, float, str) and name not in NODE_ATTRIBUTES
        ]
        shapes = [None if x is None else (x.shape, x.strides, x.dtype) for x in arrays]
        self._key = type(owner), targets, tuple(options), tuple(shapes)
        if self._known.get(self._key, (0, 0))[0] < SURE:
            self._meter.start()
            self._is_on = True

    def workspace(self) -> int:
        """Return the bytes that the call needed only while it ran; 0 if they are not measured."""
        if not self._measures("workspace"):
            return 0
        count, nbytes = self._known.get(self._key, (0, 0))
        if self._is_on:
            # A meter that is ours has not seen that gradients were freed once others were added.
            freed = sum(size for array, size in self._gradients if array() is None)
            nbytes = self._meter.held().workspace + freed
            self._meter.stop()
            self._is_on = False
            self._known[self._key] = count + 1, nbytes
        self._gradients = []
        return nbytes

    def turn(self) -> None:
        """Handle the end of forward: note its peak, and begin to measure that of backward."""
        if self._measures("peak"):
            self._forward = self._meter.held().peak - self._before
            self._meter.reset()

    def peak(self, cleared: int) -> int | None:
        """Return the peak bytes of a pass above those alive throughout; None if not measured.

        ``cleared``: bytes that were alive before the pass and were freed at the end of forward.
        """
        if self._blind:
            return None
        backward = self._meter.held().peak - self._before
        if not self._meter.is_ours:  # cleared arrays were traced, and are missing since
            backward += cleared
        return max(self._forward + cleared, backward)

    def gaps(self) -> float | None:
        """Return the bytes that the pool has reserved, relative to the most that were in use.

        Measured is the pass whose `peak` is; None if that is off, or the meter is the host's.
        """
        pools = self._meter.pools
        if pools is None or not self._measures("peak"):
            return None
        return pools.needed() / max(1, self._before + self._forward, self._meter.held().peak)

    def _measures(self, what: str) -> bool:
        return self.what == what and not self._blind


def check_tape(func: Any, inputs: Any) -> None:
    """Raise if a call bypasses Chainer's own tape.

    Raises:
        UnsupportedError: static_graph is on, or an input is a ChainerX array. Nothing has run.
    """
    if configuration.config.schedule_func is not None:
        raise UnsupportedError(
            "static_graph runs a schedule of its own, around Chainer's tape: take the decorator "
            "away, or do not use Recompute"
        )
    for x in inputs:
        if getattr(x, "_has_chainerx_array", False) or type(x).__module__ == "chainerx":
            raise UnsupportedError(
                f"{func.label!r} was given a ChainerX array; ChainerX keeps a graph of its own, "
                "which Recompute cannot reach: use NumPy or CuPy arrays"
            )
