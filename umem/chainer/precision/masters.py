"""Float32 masters of float16 parameters, which the optimizer updates instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import chainer
import numpy as np
from chainer.backend import get_array_module
from chainer.backends.cuda import to_cpu
from chainer.serializer import Deserializer

from umem.chainer.precision.floats import SINGLE, to_half
from umem.chainer.precision.loss_scale import LossScale


class Masters:
    """The float32 masters of a model's parameters; iterates over (parameter, master) pairs.

    A master is stored on the parameter's update rule, where Chainer keeps its own under
    `use_fp32_update`, so that traces and budgets count it. Chainer's code does not use it: that
    would give hooks float16 gradients with the loss scale, make a new float16 array each step, and
    not save the masters. The masters of parameters that share an array, as after
    ``copy(mode="share")``, also share one.

    Args:
        parameters: the ones to round to float16; an uninitialised one is rounded later.

    Attributes:
        before_join: called before parameters are float32 again; set by code that has used
            `shorten`, to restore whole masters.

    Raises nothing; a parameter is changed in one assignment, after its master is made.
    """

    def __init__(self, parameters: list[Any]) -> None:
        self._masters: dict[int, tuple[Any, Any]] = {}
        self._waiting: dict[int, Any] = {}
        self._loaded: dict[int, Any] = {}
        self.before_join: Callable[[], None] = lambda: None
        for parameter in parameters:
            self._waiting[id(parameter)] = parameter
        self.adopt(parameters)

    def adopt(self, variables: Any) -> None:
        """Round newly initialised parameters to float16, and make their masters."""
        if not self._waiting:
            return
        ready = [v for v in variables if id(v) in self._waiting and v.array is not None]
        if not ready:
            return
        sharing: dict[int, list[Any]] = {}
        for parameter in self._waiting.values():
            if parameter.array is not None:
                sharing.setdefault(id(parameter.array), []).append(parameter)
        for one in ready:
            if id(one) in self._waiting:
                self._split(sharing[id(one.array)])

    def hold(self, parameter: Any, loaded: Any) -> None:
        """Keep a loaded master for an uninitialised parameter, until `adopt` rounds that."""
        if id(parameter) in self._waiting and loaded is not None:
            self._loaded[id(parameter)] = np.array(to_cpu(loaded), np.float32)

    def _split(self, sharing: list[Any]) -> None:
        """Round parameters that share a float32 array to one float16 array, and make masters."""
        single = sharing[0].array
        half = to_half(single)
        for parameter in sharing:
            del self._waiting[id(parameter)]
            loaded = self._loaded.pop(id(parameter), None)
            if loaded is not None and loaded.shape == single.shape:
                single = loaded
        for parameter in sharing:
            self._give_master(parameter, single)
            parameter.cleargrad()
            parameter.array = half

    def _give_master(self, parameter: Any, single: Any) -> None:
        master = chainer.Parameter(single, name=parameter.name)
        master.cleargrad()
        rule = parameter.update_rule
        master.update_rule = rule
        self._masters[id(parameter)] = parameter, master
        if rule is not None:
            rule._fp32_param = master

    def shorten(self, parameter: Any, part: Any, span: slice) -> None:
        """Replace a parameter's master by the master of its part, which is a separate parameter.

        Args:
            parameter: the whole, which has no master afterwards.
            part: the part's parameter.
            span: the elements of the flat whole that are the part.
        """
        single = self._masters.pop(id(parameter))[1].array.reshape(-1)[span].copy()
        self._give_master(part, single)

    def of(self, parameter: Any) -> Any:
        """Return the master of a parameter, or None."""
        return self._masters.get(id(parameter), (None, None))[1]

    def stand_in(self, parameter: Any) -> Any:
        """Return the master of a parameter, or the parameter if it has none."""
        return self._masters.get(id(parameter), (None, parameter))[1]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Iterate over the parameters, each with its master."""
        return iter(self._masters.values())

    def catch_up(self) -> None:
        """Copy numbers that were written to parameters, by loading or by hand, to their masters.

        A master's number that still rounds to its parameter's keeps its further digits. Masters
        move to the devices of their parameters.
        """
        for parameter, master in self:
            if master.device != parameter.device:
                master.to_device(parameter.device)
            _take_over(parameter.array, master.array)

    def update(
        self, update: Callable[[Any], None], parameter: Any, scale: float, is_last: bool = False
    ) -> None:
        """Update a parameter's master, and round the master to the parameter.

        Args:
            update: called with the master; runs the update rule on it.
            parameter: the float16 parameter, which has a master.
            scale: the loss scale of the parameter's gradient.
            is_last: whether to clear the master's gradient, which no hook reads afterwards.
        """
        master = self.of(parameter)
        if master.grad is None:
            self.take_gradient(parameter, scale)
        update(master)
        if is_last:
            master.cleargrad()
        self.round(parameter)

    def take_gradient(self, parameter: Any, scale: float) -> None:
        """Set the master's gradient, if it has none, to the parameter's, unscaled in float32."""
        grad, master = parameter.grad, self.of(parameter)
        if grad is not None and master.grad is None:
            master.grad = grad.astype(SINGLE)
            master.grad *= np.float32(1 / scale)

    def round(self, parameter: Any) -> None:
        """Round the master to float16, into the parameter's own array."""
        to_half(self.of(parameter).array, out=parameter.array)

    def clear_gradients(self) -> None:
        """Clear the float32 gradients of all masters."""
        for _, master in self:
            master.cleargrad()

    def join(self) -> None:
        """Make the masters' float32 arrays the parameters' own, and clear gradients and masters."""
        self.adopt(list(self._waiting.values()))
        self.catch_up()
        self.before_join()
        for parameter, master in self:
            parameter.cleargrad()
            parameter.array = master.array
            if parameter.update_rule is not None:
                parameter.update_rule._fp32_param = None
        self._masters.clear()
        self._waiting.clear()
        self._loaded.clear()


def _take_over(half: Any, single: Any) -> None:
    """Copy numbers of a float16 array into a float32 one if that does not round to them."""
    get_array_module(half).copyto(single, half, where=to_half(single) != half)


# -- saving ---------------------------------------------------------------------------------------


def serialize(serializer: Any, model: Any, masters: Masters, scale: LossScale) -> None:
    """Save or load the masters and the loss scale, beside the optimizer's own state.

    Loading a file of a float32 run, which has neither, keeps the scale; the masters then take the
    values of the loaded parameters.

    Raises:
        SizeError: the loaded scale or a count is invalid; the scale stays.
    """
    masters.adopt(model.params())
    masters.catch_up()
    state: dict[str, Any] = dict(scale.state())
    try:
        for key in state:
            found = serializer(key, state[key])
            state[key] = state[key] if found is None else type(state[key])(found)
    except KeyError:
        if isinstance(serializer, Deserializer):
            return
        raise
    scale.restore(state)  # type: ignore[arg-type]
    for name, parameter in model.namedparams():
        master = masters.of(parameter)
        if master is not None:
            serializer[name]("master", master.array)
            masters.round(parameter)
        elif parameter.array is None and isinstance(serializer, Deserializer):
            masters.hold(parameter, _read(serializer, name))


def _read(serializer: Any, name: str) -> Any:
    """Load a master; None if the file has none: npz and HDF5 raise different errors for that."""
    try:
        return serializer[name]("master", None)
    except (KeyError, ValueError):
        return None
