"""Parameters in float16 with masters in float32, which the optimizer updates in their place."""

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
    """The float32 masters of a model's parameters, and what goes to and fro.

    A master is where Chainer keeps its own under `use_fp32_update`, on the parameter's update rule,
    so that traces and budgets count it. Chainer's code does not use it: it would give hooks halves
    that are scaled still, make a new half array each step, and forget the masters on saving.
    Parameters that share an array, as those of ``copy(mode="share")`` do, share its master's.

    Args:
        parameters: those to be halves; the ones without an array yet are taken when they have one.

    Attributes:
        before_join: what whoever has shortened masters does before parameters are float32 again.

    Raises nothing; a parameter is changed in one assignment after its master is there.
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
        """Make halves of those that have got their array since."""
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
        """Keep what a file has for the master of a parameter that has no array yet."""
        if id(parameter) in self._waiting and loaded is not None:
            self._loaded[id(parameter)] = np.array(to_cpu(loaded), np.float32)

    def _split(self, sharing: list[Any]) -> None:
        """Make halves of parameters that have one array, as Chainer's copies may."""
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
        """Keep the master of a part of a parameter alone; the part is a parameter of its own."""
        single = self._masters.pop(id(parameter))[1].array.reshape(-1)[span].copy()
        self._give_master(part, single)

    def of(self, parameter: Any) -> Any:
        """The master of a parameter; None where it has none."""
        return self._masters.get(id(parameter), (None, None))[1]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Each parameter with its master."""
        return iter(self._masters.values())

    def catch_up(self) -> None:
        """Have masters take over what was written to their parameters: loaded, copied, by hand.

        A master that rounds to the half that is there keeps its further digits. It goes to the
        device where its parameter is.
        """
        for parameter, master in self:
            if master.device != parameter.device:
                master.to_device(parameter.device)
            _take_over(parameter.array, master.array)

    def update(
        self, update: Callable[[Any], None], parameter: Any, scale: float, is_last: bool = False
    ) -> None:
        """Have a rule update the master, and round it to the parameter.

        Args:
            update: what the rule does with a parameter.
            parameter: the half.
            scale: that of its gradient.
            is_last: whether nobody reads the gradient in float32 after it.
        """
        master = self.of(parameter)
        if master.grad is None:
            self.take_gradient(parameter, scale)
        update(master)
        if is_last:
            master.cleargrad()
        self.round(parameter)

    def take_gradient(self, parameter: Any, scale: float) -> None:
        """Give the master the gradient, as float32 and without its scale."""
        grad, master = parameter.grad, self.of(parameter)
        if grad is not None and master.grad is None:
            master.grad = grad.astype(SINGLE)
            master.grad *= np.float32(1 / scale)

    def round(self, parameter: Any) -> None:
        """Write the master to the parameter's own array."""
        to_half(self.of(parameter).array, out=parameter.array)

    def let_gradients_go(self) -> None:
        """Hold no gradient in float32."""
        for _, master in self:
            master.cleargrad()

    def join(self) -> None:
        """Give the parameters their float32 arrays back; gradients are cleared."""
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
    get_array_module(half).copyto(single, half, where=to_half(single) != half)


class MastersView:
    """A model as an optimizer's hooks are to see it: its parameters are the masters.

    They are in ``params``, in ``namedparams`` and in its own attributes; all else is the model's,
    links below it too.
    """

    def __init__(self, model: Any, masters: Masters) -> None:
        self._model, self._of_model = model, masters

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        return self._stand_in(value) if isinstance(value, chainer.Parameter) else value

    def params(self, include_uninit: bool = True) -> Iterator[Any]:
        """As the model's, with masters in the place of halves."""
        for parameter in self._model.params(include_uninit):
            yield self._stand_in(parameter)

    def namedparams(self, include_uninit: bool = True) -> Iterator[tuple[str, Any]]:
        """As the model's, with masters in the place of halves."""
        for name, parameter in self._model.namedparams(include_uninit):
            yield name, self._stand_in(parameter)

    def _stand_in(self, parameter: Any) -> Any:
        master = self._of_model.of(parameter)
        return parameter if master is None else master


# -- saving ---------------------------------------------------------------------------------------


def serialize(serializer: Any, model: Any, masters: Masters, scale: LossScale) -> None:
    """Save or load what the optimizer's own state has not.

    A file of a float32 run has none of it: the masters then follow the parameters that are there,
    and the scale stays.
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
    """Read a master; None where the file has none, which npz and HDF5 say differently."""
    try:
        return serializer[name]("master", None)
    except (KeyError, ValueError):
        return None
