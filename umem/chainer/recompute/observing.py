"""Observation of a whole pass: the arrays beside its graph, its peak, calls outside of its tape."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import chainer
from chainer import configuration

from umem.chainer.recompute.tape import Call
from umem.chainer.saved.slots import arrays_on, holds_nothing
from umem.errors import UnsupportedError
from umem.trace.recording import BlockMeter, HostMeter, root_of


class Beside(NamedTuple):
    """Arrays outside of a graph that are alive between its forward and its backward.

    Attributes:
        constant_bytes: parameters and other arrays from outside that its calls read, or hold.
        stays: by call, bytes of the gradients of leaves that its backward is the first to make.
        parameters: by id, weak references to the parameters.
        held_gradients: by id of a parameter, the bytes of its present gradient.
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


class CalledLinks(chainer.LinkHook):
    """Link hook that records the parameters of links, before their first function runs.

    The first functions of a model read few of its parameters, and until an optimizer has updated
    them nothing else tells that the others are there.
    """

    def __init__(self) -> None:
        self.name = f"umem.chainer.Recompute {id(self)}"  # unlike one left in another thread
        self._found: dict[int, weakref.ref[Any]] = {}
        self._links: set[int] = set()
        self._is_on = False

    @property
    def parameters(self) -> list[Any]:
        """Return the parameters that are alive."""
        found = [reference() for reference in self._found.values()]
        return [parameter for parameter in found if parameter is not None]

    def forward_preprocess(self, args: Any) -> None:
        """Record the parameters of a link that is called for the first time."""
        if self._is_on and id(args.link) not in self._links:
            self._links.add(id(args.link))
            self._found.update({id(p): weakref.ref(p) for p in args.link.params()})

    def start(self) -> None:
        """Begin to record the links that the current thread calls."""
        self._is_on = True
        with contextlib.suppress(KeyError):  # a block that ended in another thread has left it
            self.__enter__()

    def stop(self) -> None:
        """Stop recording, if it is on."""
        if self._is_on:
            self._is_on = False
            with contextlib.suppress(KeyError):  # hooks are of threads, and this may be another one
                self.__exit__()


def gradient_bytes(parameter: Any) -> int:
    """Return the bytes of a parameter's gradient; 0 if it has none."""
    grad = parameter.grad if parameter._grad_valid else None  # reading grad would make it valid
    return 0 if grad is None else int(grad.nbytes)


class PassPeaks:
    """Measures the peak of a whole pass by a meter, or says that calls are measured; or is off.

    The peak of a pass is slow to measure on the host, where the meter is `tracemalloc`'s.

    Attributes:
        what: ``workspace`` (of calls, see `CallMemory`) or ``peak`` while measuring; None while
            off.
    """

    def __init__(self) -> None:
        self.what: str | None = None
        self._before = self._forward = 0
        self._meter: BlockMeter = HostMeter()
        self._blind = False

    def start(self, what: str, meter: BlockMeter, *, blind: bool = False) -> None:
        """Begin to measure the ``workspace`` of calls, or a pass's ``peak``.

        ``blind``: the meter cannot see the arrays' memory, and nothing is measured.
        """
        self.what, self._meter, self._blind = what, meter, blind
        if self.measures("peak"):
            meter.start()
            self._before, self._forward = meter.held().live, 0

    def stop(self) -> None:
        """Stop measuring; a `tracemalloc` that was on before stays on."""
        self._meter.stop()
        self.what = None

    def turn(self) -> None:
        """Handle the end of forward: note its peak, and begin to measure backward's."""
        if self.measures("peak"):
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

        They are of the pass whose `peak` is measured; None if that is off, or on the host.
        """
        pools = self._meter.pools
        if pools is None or not self.measures("peak"):
            return None
        return pools.needed() / max(1, self._before + self._forward, self._meter.held().peak)

    def measures(self, what: str) -> bool:
        """Tell whether ``workspace`` or ``peak`` is measured now."""
        return self.what == what and not self._blind


def check_tape(func: Any, inputs: Any) -> None:
    """Raise if a call bypasses Chainer's own tape.

    Raises:
        UnsupportedError: static_graph is on, or an input is a ChainerX array. Nothing has run.
    """
    if configuration.config.schedule_func is not None:
        raise UnsupportedError(
            "static_graph runs its own schedule, around Chainer's tape: remove the decorator, "
            "or do not use Recompute"
        )
    for x in inputs:
        if getattr(x, "_has_chainerx_array", False) or type(x).__module__ == "chainerx":
            raise UnsupportedError(
                f"{func.label!r} was given a ChainerX array; ChainerX keeps its own graph, "
                "which Recompute cannot reach: use NumPy or CuPy arrays"
            )
