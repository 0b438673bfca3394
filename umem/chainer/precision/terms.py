"""The rules of half precision: valid models, parameters to round, and the types of inputs."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import chainer
import chainerx
import numpy as np

from umem.chainer.agreement import refuse_in_shards
from umem.chainer.function_facts import owner_of
from umem.chainer.parameters_once import overlapping
from umem.chainer.precision.floats import HALF, SINGLE, constant_to_half, quiet
from umem.chainer.precision.half_functions import PRODUCTS, SUMS
from umem.chainer.precision.halves import evaluate, layer_norm_gradients
from umem.chainer.tap import Proceed, SharedSubscriber
from umem.errors import StateError, UnsupportedError

_NO_BFLOAT16 = (
    "umem cannot compute in bfloat16: Chainer's functions check for a float by dtype.kind, which "
    "is 'V' for it, NumPy has no arithmetic for it, and a saved array of it loads as bytes. Use "
    '"float16"; to store saved tensors in bfloat16 use umem.chainer.saved_in("bfloat16")'
)


def check(model: Any, optimizer: Any, dtype: Any, scale: float, interval: int) -> None:
    """Check the arguments of `half_precision`, and raise the errors that it documents."""
    _check_type(dtype)
    if not scale >= 1 or scale == float("inf"):
        raise StateError(f"a loss scale must be a finite number of at least 1, not {scale!r}")
    if interval < 1:
        raise StateError(f"interval must be at least 1 good step, not {interval!r}")
    _check_optimizer(optimizer)
    refuse_in_shards(optimizer, "half_precision")
    if optimizer._loss_scale is not None:
        raise StateError(
            "the optimizer has a loss scale of Chainer's: half precision brings its own, so leave "
            "out loss_scaling() and set_loss_scale()"
        )
    updated = {id(one) for one in optimizer.target.params()}
    if not any(id(one) in updated for one in model.params()):
        raise StateError(
            "the optimizer is set up with another model: none of its parameters are the model's"
        )
    _check_parameters(model)


def _check_optimizer(optimizer: Any) -> None:
    """Check that an optimizer has update rules and a model.

    Raises:
        UnsupportedError: it is not a GradientMethod. StateError: it is not set up.
    """
    if not isinstance(optimizer, chainer.GradientMethod):
        raise UnsupportedError(
            f"{type(optimizer).__name__} is not a chainer.GradientMethod: half precision needs its "
            "update rules, one a parameter"
        )
    if optimizer.target is None:
        raise StateError("the optimizer is not set up: call optimizer.setup(model) first")


def _check_type(dtype: Any) -> None:
    if str(dtype) == "bfloat16":
        raise UnsupportedError(_NO_BFLOAT16)
    try:
        is_half = np.dtype(dtype) == HALF
    except TypeError:
        is_half = False
    if not is_half:
        raise UnsupportedError(f'half precision computes in "float16", not in {dtype!r}')


def _check_parameters(model: Any) -> None:
    """Check that no parameter is ChainerX's or float16 already, and all are on one device.

    Raises:
        UnsupportedError: a ChainerX array. StateError: float16, or several devices.
    """
    devices: dict[Any, str] = {}
    for name, parameter in model.namedparams():
        if parameter.device.xp is chainerx:
            raise UnsupportedError(f"{name} is a ChainerX array: move the model to NumPy or CuPy")
        devices.setdefault(parameter.device, name)
        if parameter.array is not None and parameter.dtype == HALF:
            raise StateError(
                f"{name} is float16 already: half precision starts from a float32 model, whose "
                "parameters become the masters; undo() the one before, or make the model under "
                "chainer.config.dtype = float32"
            )
    if len(devices) > 1:
        shown = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise StateError(
            f"the model is on several devices ({shown}), but gradients are checked on one: move it "
            "by model.to_device first"
        )


def chosen(model: Any, keep: Iterable[str]) -> list[Any]:
    """Return the parameters to round to float16, each once.

    They are float32 or uninitialised, except for parameters of normalising links and those named in
    ``keep``.

    Raises:
        StateError: a name in ``keep`` matches no parameter or link; or parameters share memory that
            would be rounded for one and not for another.
    """
    kept = {id(one) for one in _kept(model, keep)}
    found = {}
    for link in model.links():
        if not _normalises(link):
            found.update({id(one): one for one in _own(link)})
    for link in model.links():
        if _normalises(link):
            kept.update(id(one) for one in _own(link))
    halves = [
        one
        for key, one in found.items()
        if key not in kept and (one.array is None or one.dtype == SINGLE)
    ]
    _check_shared(model, {id(one) for one in halves})
    return halves


def _check_shared(model: Any, halves: set[int]) -> None:
    """Raise StateError if parameters share memory that would be rounded only for one of them."""
    for first, one, second, other in overlapping(model.namedparams()):
        are_halves = {id(one) in halves, id(other) in halves}
        if True in are_halves and (False in are_halves or one.array is not other.array):
            raise StateError(
                f"{first} and {second} share memory, and would not as halves: make both hold the "
                "same array and keep= both or neither, or tie them by umem.chainer.tie"
            )


def _own(link: Any) -> list[Any]:
    return [getattr(link, name) for name in sorted(link._params)]


def _normalises(link: Any) -> bool:
    """Tell whether a link derives from a normalising link of Chainer, or any link of ChainerMN."""
    return any(
        kind.__module__.startswith(("chainer.links.normalization.", "chainermn.links."))
        for kind in type(link).__mro__
    )


def _kept(model: Any, keep: Iterable[str]) -> list[Any]:
    """Return the parameters that names in ``keep`` refer to, directly or by a link.

    Raises:
        StateError: no parameter or link has such a name.
    """
    parameters = list(model.namedparams())
    found = []
    for name in [keep] if isinstance(keep, str) else keep:
        path = "/" + name.strip("/")
        of_name = [one for at, one in parameters if at == path or at.startswith(path + "/")]
        if not of_name:
            raise StateError(
                f"keep names {name!r}, but the model has no such parameter or link: names are as "
                f"in model.namedparams(), such as {parameters[0][0]!r}"
            )
        found += of_name
    return found


# -- types of inputs -----------------------------------------------------------------------------

SINGLE_MODULES = ("chainer.functions.loss.", "chainer.functions.evaluation.")
"""Modules of losses and evaluations, which get float32 inputs like sums."""
TAKE_BOTH = frozenset((
    "BatchNormalization", "DecorrelatedBatchNormalization", "FixedBatchNormalization",
    "FixedDecorrelatedBatchNormalization",
))  # fmt: skip
"""Chainer's normalisations that accept float16 inputs with float32 parameters."""
LIKE_FIRST = frozenset(("GroupNormalization", "LayerNormalization", "LocalResponseNormalization"))
"""Normalisations that need their parameters in the type of their input."""


def suited(func: Any, inputs: Any) -> Any:
    """Return a function's inputs cast to types that suit it; the casts are part of the graph.

    Sums and losses get float32, matrix products and convolutions float16, other functions a common
    type. Normalisations in `TAKE_BOTH` keep their inputs, and those in `LIKE_FIRST` get float16 if
    their first input is float16. Inputs are unchanged without a float16 one, and for functions that
    are not Chainer's. Turns off ``cache_score`` of a `SoftmaxCrossEntropy`.
    """
    kinds = [x.dtype for x in inputs]
    kind = type(owner_of(func))
    if HALF not in kinds or not kind.__module__.startswith("chainer."):
        return inputs
    name = kind.__name__
    if name in SUMS or kind.__module__.startswith(SINGLE_MODULES):
        if name == "SoftmaxCrossEntropy":
            func.cache_score = False  # it would keep a second float32 array as large as its input
        return tuple([_as_single(x) for x in inputs])
    if name in TAKE_BOTH:
        return inputs
    if name in PRODUCTS or (name in LIKE_FIRST and kinds[0] == HALF):
        return tuple([_as_half(x) for x in inputs])
    return _alike(inputs)


def _alike(inputs: Any) -> Any:
    """Return inputs with the floating-point ones cast to float16 or float32; integers stay.

    Constants, which need no gradient, are rounded to float16 in either case. The type is float16 if
    all others have it; otherwise float16 inputs are cast to float32, and float64 inputs stay
    float64.
    """
    if all(x.dtype == HALF or x.dtype.kind != "f" for x in inputs):
        return inputs
    inputs = tuple([_as_half(x) if _is_constant(x) else x for x in inputs])
    if all(x.dtype == HALF or x.dtype.kind != "f" for x in inputs):
        return inputs
    return tuple([_as_single(x) for x in inputs])


def _is_constant(x: Any) -> bool:
    return not isinstance(x, chainer.Variable) or not x.requires_grad


def _as_half(x: Any) -> Any:
    if x.dtype == HALF or x.dtype.kind != "f":
        return x
    if _is_constant(x):
        return RoundedConstant().apply((x,))[0]
    return chainer.functions.cast(x, HALF)


class RoundedConstant(chainer.FunctionNode):
    """Rounds a constant to float16; a function, so that recordings see the float32 array."""

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Round to float16, clipped to its largest finite numbers."""
        return (constant_to_half(inputs[0]),)


def _as_single(x: Any) -> Any:
    return chainer.functions.cast(x, SINGLE) if x.dtype == HALF else x


# -- while any model is in half precision -------------------------------------------------------

_RUNS_FORWARD = ("Forget", "Checkpoint")
"""Functions whose backward recomputes a part of forward, in which inputs are cast as in forward."""


def is_of_halves(x: Any) -> bool:
    """Tell whether an array, a variable or its node is float16, or was computed from float16."""
    return x.dtype == HALF or hasattr(getattr(x, "node", x), "_umem_of_halves")


class _InHalves(SharedSubscriber):
    """Casts inputs in forward, and computes float16 in float32 on NumPy, while a model needs it.

    It is held by the `Masters` of models, which adopt parameters among each function's inputs.
    """

    place = -2

    def __init__(self) -> None:
        super().__init__()
        self._here = threading.local()

    def apply(self, proceed: Proceed, func: Any, inputs: Any) -> Any:
        """Run a function on inputs that are `suited`; in backward their types are right already.

        In forward, masters adopt parameters among the inputs, and outputs are marked as of halves.
        """
        if getattr(self._here, "is_backward", False):
            return proceed(func, inputs)
        for masters in [*self.holders.values()]:
            masters.adopt(inputs)
        if not any(map(is_of_halves, inputs)):
            return proceed(func, inputs)
        with quiet():
            outputs = proceed(func, suited(func, inputs))
        for y in outputs:
            y.node._umem_of_halves = True
        return outputs

    def backprop_step(self, proceed: Proceed, func: Any, *args: Any) -> None:
        """Run a function's backward; inputs are cast only in a backward of `_RUNS_FORWARD`."""
        before = getattr(self._here, "is_backward", False)
        self._here.is_backward = type(func).__name__ not in _RUNS_FORWARD
        try:
            proceed(func, *args)
        finally:
            self._here.is_backward = before

    def backward(self, proceed: Proceed, *args: Any, **kwargs: Any) -> None:
        """Run a backward without warnings of overflow."""
        with quiet():
            proceed(*args, **kwargs)

    def evaluate(self, proceed: Proceed, func: Any, inputs: Any) -> Any:
        """Compute a function, on NumPy's float16 arrays in float32."""
        return evaluate(proceed, func, inputs)

    def operand(self, proceed: Proceed, x: Any, value: Any) -> Any:
        """Round an array constant beside float16, clipped if Chainer would make it infinite."""
        is_array = isinstance(value, chainer.get_array_types())
        is_half = x.dtype == HALF and is_array and value.dtype.kind == "f"
        return _as_half(value) if is_half else proceed(x, value)

    def layer_norm_back(self, proceed: Proceed, *given: Any) -> Any:
        """Compute a layer normalisation's gradients at once; see `layer_norm_gradients`."""
        return layer_norm_gradients(proceed, *given)

    def compute(self, proceed: Proceed, func: Any, *arrays: Any) -> Any:
        """Compute a convolution or pooling, on NumPy's float16 arrays in float32."""
        return evaluate(proceed, func, *arrays)


halves = _InHalves()
