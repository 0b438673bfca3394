"""One call, as a pass sees it: what it makes, keeps on itself and changes, and what it takes."""

from __future__ import annotations

import ctypes
import weakref
import zlib
from collections.abc import Iterable
from time import perf_counter
from typing import Any, NamedTuple

import chainer
import numpy as np
from chainer import configuration

from umem.chainer.function_facts import output_gradient_bytes, owner_of, running_rules
from umem.chainer.recompute.tape import Call
from umem.chainer.saved.slots import NODE_ATTRIBUTES, arrays_on, find_arrays, holds_nothing, packing
from umem.devices.cost import cuda_model
from umem.devices.open import entered_device
from umem.errors import UnsupportedError
from umem.planner.from_trace import DRAWS
from umem.trace.recording.meter import HostMeter
from umem.trace.recording.storage import root_of

_MT19937_BYTES = 624 * 4 + 4
"""Its key and its position: mt19937_state in NumPy's random/src/mt19937/mt19937.h."""
_AGAIN = frozenset(("BatchNormalization", "FixedBatchNormalization"))
"""Functions whose state is kept out of a second run."""


class Before(NamedTuple):
    """A function before its forward; ``random`` is None where nobody has looked closely."""

    state: dict[str, Any]
    checksums: list[tuple[Any, int]]
    random: bytes | None


def look(func: Any) -> Before:
    """Remember what a forward may change."""
    state = dict(vars(owner_of(func)))
    return Before(state, [(a, _sum(a)) for a in _arrays(state.items())], _random())


class Observed(NamedTuple):
    """One call, as a pass saw it."""

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
    """Look at a call that has just run: what it made, kept on itself and changed."""
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
    """Whether a function that has just run may run again, and what it has set on itself."""
    return _may_run_again(func, before), tuple(_made_on(owner_of(func), before))


def _made_on(owner: Any, before: Before) -> dict[str, list[Any]]:
    """By name, the arrays that forward has set on a function."""
    new = {
        k: v
        for k, v in vars(owner).items()
        if before.state.get(k) is not v and k not in NODE_ATTRIBUTES
    }
    lists = {key: _arrays([(key, value)]) for key, value in new.items()}
    return {key: arrays for key, arrays in lists.items() if arrays}


def _may_run_again(func: Any, before: Before) -> bool:
    name = type(owner_of(func)).__name__
    same = name in _AGAIN or all(_sum(array) == known for array, known in before.checksums)
    return same and (name in DRAWS or before.random == _random()) and running_rules(func)[0]


def _arrays(items: Iterable[tuple[str, Any]]) -> list[Any]:
    found: list[tuple[str, Any]] = []
    for key, value in items:
        if not isinstance(value, chainer.Function):
            find_arrays(key, value, found)
    return [array for _, array in found]


def _sum(array: Any) -> int:
    """A checksum of what is on the host; the device is not asked."""
    return zlib.crc32(np.ascontiguousarray(array).tobytes()) if type(array) is np.ndarray else 0


def _random() -> bytes:
    """The state of NumPy's global generator, as far as drawing bits changes it.

    The second of two normal numbers, which are drawn together, is not seen; `DRAWS` names the
    functions of Chainer that draw such. ``get_state`` takes 150 times as long as this copy.
    """
    random: Any = np.random
    generator = random.get_bit_generator()
    if type(generator) is random.MT19937:
        return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    return repr(generator.state).encode()


class Beside(NamedTuple):
    """Arrays beside a graph's own, between forward and backward.

    Attributes:
        constant_bytes: parameters and other arrays from outside that its calls read, or hold.
        stays: by call, the gradients of parameters that its backward is the first to make.
        parameters: weak references to the parameters.
        held_gradients: by parameter, the bytes of the gradient that it has now.
    """

    constant_bytes: int
    stays: dict[int, int]
    parameters: dict[int, Any]
    held_gradients: dict[int, int]


def look_beside(calls: Iterable[Call]) -> Beside:
    """Look at what the calls of a pass that has gone forward read from outside."""
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
            if node.requires_grad:  # backward comes here first
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
    """The arrays that a function held before it ran, such as statistics and indexes."""
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
    """Bytes of a parameter's gradient, as far as it has one."""
    grad = parameter.grad if parameter._grad_valid else None  # reading grad would make it valid
    return 0 if grad is None else int(grad.nbytes)


# -- time -----------------------------------------------------------------------------------------


def wait_for(inputs: Any) -> None:
    """On a GPU, wait for all kernels: the host's time of a call is that of launching them."""
    arrays = [x.array if isinstance(x, chainer.Variable) else x for x in inputs]
    device = chainer.backend.get_device_from_array(*arrays)
    if device.xp is not np:
        device.device.synchronize()


class Timed:
    """A call that is going on.

    Args:
        by_model: whether a model's seconds are asked for, where there is one.
    """

    def __init__(self, *, by_model: bool) -> None:
        self._modelled = model_seconds() if by_model else None
        self._start = perf_counter()

    def stop(self) -> tuple[float, float]:
        """Return the seconds that it took here, and what it costs; the same without a model."""
        seconds = perf_counter() - self._start
        if self._modelled is None:
            return seconds, seconds
        return seconds, (model_seconds() or 0.0) - self._modelled


def model_seconds() -> float | None:
    """The seconds of the model that answers for the current device; None without one."""
    device = entered_device() or cuda_model()
    figures = None if device is None else device.figures
    return None if figures is None else figures.seconds


# -- memory on the host -------------------------------------------------------------------------


class HostPeaks:
    """Measures each call's workspace, or the peak of a whole pass, by a `HostMeter`; or is off.

    Slow, and it sees what NumPy allocates only: on a GPU nothing is measured.
    """

    def __init__(self) -> None:
        self.what: str | None = None
        self._before = self._forward = 0
        self._meter = HostMeter()
        self._blind = False

    def start(self, what: str, *, blind: bool = False) -> None:
        """Begin to measure each call's ``workspace``, or a pass's ``peak``.

        ``blind``: the arrays are where it sees nothing.
        """
        self.what, self._blind = what, blind
        if not blind:
            self._meter.start()
            self._before, self._forward = self._meter.held().live, 0

    def stop(self) -> None:
        """Measure no more; what was on before stays on."""
        self._meter.stop()
        self.what = None

    def call_begins(self) -> None:
        """Measure one call from here on."""
        if self._measures("workspace"):
            self._meter.reset()

    def workspace(self) -> int:
        """Bytes that the call needed only while it ran; 0 where they are not measured."""
        return self._meter.held().workspace if self._measures("workspace") else 0

    def turn(self) -> None:
        """Forward is over."""
        if self._measures("peak"):
            self._forward = self._meter.held().peak - self._before
            self._meter.reset()

    def peak(self, cleared: int) -> int | None:
        """The most bytes at once of a pass, above what is there all the time; None unmeasured.

        ``cleared``: what was there before the pass, and went when forward was over.
        """
        if self._blind:
            return None
        backward = self._meter.held().peak - self._before
        if not self._meter.is_ours:  # what was cleared was followed, and is missing since
            backward += cleared
        return max(self._forward + cleared, backward)

    def _measures(self, what: str) -> bool:
        return self.what == what and not self._blind


def check_tape(func: Any, inputs: Any) -> None:
    """Refuse what does not go through Chainer's own tape.

    Raises:
        UnsupportedError: it does not.
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
