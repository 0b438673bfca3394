"""The loss of distillation, from labels and from a teacher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L

from umem._common.printable import quoted
from umem.chainer.distillation.labels import NO_LABEL, Given, are_classes, split
from umem.chainer.distillation.teacher import Teacher, check_options, values_of
from umem.errors import DistillationError, SizeError, StateError, UnsupportedError

Loss = Callable[[Any, Any], Any]
TEMPERATURES = 0.001, 1000
"""Beyond these float32 cannot represent the gradient: the softmax is uniform, or one-hot. They are
round numbers, because the exact limits depend on the scores."""


class DistillingLoss:
    """A loss function for a student: cross entropy with labels, plus the distance to a teacher's
    output.

    Use it as ``optimizer.update(loss, x, t)``. For scores z of the student and v of the teacher,
    both of shape (n, classes, ...), a temperature T and a weight w, the loss is (1 - w) *
    lossfun(z, t) + w * T**2 * KL(softmax(v / T) || softmax(z / T)), where KL is the mean over the
    rows. With a weight of 0 it is the plain loss, to the bit, and the teacher does not run. Rows of
    label -1 have only the teacher's share. It reports ``loss``, ``label_loss``, ``teacher_loss``,
    and ``accuracy`` on rows with labels. A Classifier's ``compute_accuracy`` turns the accuracy
    off, and its own ``accfun`` replaces it.

    Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network" (arXiv 1503.02531).

    The teacher runs first, and changes nothing else of the run; see `Teacher`. It takes memory for
    its parameters, and while it runs for the arrays that its code holds at once; afterwards, for
    two arrays as large as its scores. It waits for the GPU once a step, to check that the scores
    are finite.

    Args:
        optimizer: the student's, set up; if its model is a Classifier, the student is the
            predictor.
        teacher: a link, which gets the student's inputs; of a Classifier, its predictor.
        temperature: from 0.001 to 1000; the higher, the more the teacher's small scores count. In
            float32 the loss is off by about 1e-7 * T**2; its gradient is not.
        weight: the teacher's share, from 0 to 1.
        lossfun: a function of the student's scores and the labels; by default the Classifier's own,
            else `softmax_cross_entropy`. It must ignore rows of label -1, if there are any.
        distance: a function of the student's output and the teacher's that replaces T**2 * KL: for
            outputs that are not scores of classes.
        label_key: the labels' index or name among the loss's arguments; None: there are none, which
            needs a weight of 1. By default the Classifier's own, else the last argument.
        teacher_precision: "float32", or "float16": a copy in halves.
        teacher_memory: None, or "managed": a copy of its parameters in managed memory.
        device: the teacher's Chainer device; by default the student's.

    Raises:
        StateError: the optimizer is not set up; it trains the teacher, or arrays that the teacher
            shares; the teacher is not a link, or a parameter of it has no values; there are no
            labels, and their share is not 0.
        SizeError: temperature or weight is out of range.
        UnsupportedError: the student is a Classifier of a class with another ``forward``, and no
            ``lossfun`` is given; or see `Teacher`, also for DeviceNotFoundError.
        DistillationError: in an update, if scores of the teacher are not finite, or of another
            shape than the student's. No parameter was changed.
    """

    def __init__(
        self,
        optimizer: Any,
        teacher: Any,
        *,
        temperature: float = 4.0,
        weight: float = 0.5,
        lossfun: Loss | None = None,
        distance: Loss | None = None,
        label_key: Any = "own",
        teacher_precision: str = "float32",
        teacher_memory: str | None = None,
        device: Any = None,
    ) -> None:
        check_options(teacher_precision, teacher_memory)
        self.temperature = _within("temperature", temperature, *TEMPERATURES)
        self.weight = _within("weight", weight, 0, 1)
        target = optimizer.target
        if target is None:
            raise StateError("the optimizer has no model yet: call optimizer.setup(model) first")
        classifier = target if isinstance(target, L.Classifier) else None
        network = teacher.predictor if isinstance(teacher, L.Classifier) else teacher
        _check_apart(network, target)
        if lossfun is None:
            _check_calls(classifier)
        self._optimizer = optimizer
        self._classifier = classifier
        self._student = target if classifier is None else classifier.predictor
        own = F.softmax_cross_entropy if classifier is None else classifier.lossfun
        self._lossfun: Loss = own if lossfun is None else lossfun
        self._distance = distance
        if label_key == "own":
            label_key = NO_LABEL if classifier is None else classifier.label_key
        self.label_key = label_key
        if label_key is None and self.weight < 1:
            raise StateError(
                f"label_key=None means that there are no labels, but at weight={self.weight} "
                "they have a share in the loss: give weight=1"
            )
        where = target.device if device is None else chainer.get_device(device)
        self.teacher = Teacher(network, where, teacher_precision, teacher_memory)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of a batch; see the class."""
        given = split(self.label_key, args, kwargs)
        distance = None if self.weight == 0 else self._distance_from_teacher(given)
        scores = self._student(*given.args, **given.kwargs)
        reports: dict[str, Any] = {}
        loss = None
        if self.weight < 1:
            loss = reports["label_loss"] = self._lossfun(scores, given.labels)
        if distance is not None:
            teacher_loss = reports["teacher_loss"] = distance(scores)
            share = self.weight * teacher_loss
            loss = share if loss is None else (1 - self.weight) * _in_type_of(share, loss) + share
        reports.update(self._accuracy(scores, given.labels))
        chainer.report({"loss": loss, **reports}, self._optimizer.target)
        return loss

    def _accuracy(self, scores: Any, labels: Any) -> dict[str, Any]:
        """Return the accuracy that a Classifier would report; its own function gets no label -1."""
        of = self._classifier
        if labels is None or (of is not None and not of.compute_accuracy):
            return {}
        if of is not None and of.accfun is not F.accuracy:
            return {"accuracy": of.accfun(scores, labels)}
        is_one = are_classes(scores, labels)
        return {"accuracy": F.accuracy(scores.array, labels, NO_LABEL)} if is_one else {}

    def _distance_from_teacher(self, given: Given) -> Callable[[Any], Any]:
        """Run the teacher; returns a function from the student's output to the distance."""
        output = self.teacher(int(self._optimizer.t), *given.args, **given.kwargs)
        distance = self._distance
        if distance is not None:
            _check_finite(output)
            return lambda scores: distance(scores, output)
        return Softened(output, self.temperature)


class Softened:
    """A teacher's softmax at a temperature, and the student's KL divergence from it.

    Args:
        output: the teacher's scores, a Variable or an array of shape (n, classes, ...).
        temperature: scores are divided by it.

    Raises:
        DistillationError: scores are not finite.
    """

    def __init__(self, output: Any, temperature: float) -> None:
        _check_finite(output)
        self._temperature = temperature
        scores = _single(chainer.as_array(output))
        with chainer.no_backprop_mode():
            logs = F.log_softmax(scores / scores.dtype.type(temperature)).array
        self._shares = chainer.backend.get_array_module(logs).exp(logs)
        logs *= self._shares
        self._log_shares = logs.sum(axis=1)

    def __call__(self, scores: Any) -> Any:
        """Return T**2 * KL, averaged over all rows and positions.

        Raises:
            DistillationError: scores are of another shape than the teacher's.
        """
        if scores.shape != self._shares.shape:
            raise DistillationError(
                f"the teacher gives scores of shape {self._shares.shape} and the student of "
                f"{scores.shape}: both need the same classes in the same order. For outputs of "
                "other kinds give distance=, a function of both"
            )
        temperature = self._temperature
        logs = F.log_softmax(_single(scores) * (1 / temperature))
        shares = self._shares.astype(logs.dtype, copy=False)
        crossed = F.sum(logs * shares, axis=1)
        away = self._log_shares.astype(logs.dtype, copy=False) - crossed
        return temperature**2 * F.mean(away)


def _in_type_of(share: Any, loss: Any) -> Any:
    """Cast a loss to the dtype of the teacher's loss, which is float32 for float16 scores."""
    return loss if loss.dtype == share.dtype else F.cast(loss, share.dtype)


def _single(x: Any) -> Any:
    """Cast float16 scores to float32, as quotients and exponentials lose digits."""
    if x.dtype != "float16":
        return x
    return F.cast(x, "float32") if isinstance(x, chainer.Variable) else x.astype("float32")


# -- refusals -----------------------------------------------------------------------------------


def _within(name: str, value: Any, low: float, high: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = low - 1
    if not low <= number <= high:
        why = ": float32 has no digits beyond them" if high > 1 else ""
        raise SizeError(f"{name} must be a number from {low} to {high}{why}; got {quoted(value)}")
    return number


def _check_apart(teacher: Any, target: Any) -> None:
    """Raise StateError unless the teacher is a Link that shares no array with the student."""
    if not isinstance(teacher, chainer.Link):
        raise StateError(f"a teacher must be a chainer.Link; got {type(teacher).__name__}")
    trained = {id(one) for _, one in values_of(target)}
    for name, one in values_of(teacher):
        if id(one) in trained:
            raise StateError(
                f"the teacher's {name} is also the student's, and training would change it: give "
                "the teacher its own arrays, such as teacher.copy(mode='copy'); without a mode "
                "Chainer's copies share them"
            )


def _check_calls(classifier: Any) -> None:
    if classifier is not None and type(classifier).forward is not L.Classifier.forward:
        raise UnsupportedError(
            f"{type(classifier).__name__} has its own forward, which is not called: give "
            "lossfun=, a function of scores and labels, to compute the loss from its "
            "predictor's scores"
        )


def _check_finite(output: Any) -> None:
    """Raise DistillationError if an output has NaN or infinity; outputs that are not arrays are
    skipped.
    """
    array = output.array if isinstance(output, chainer.Variable) else output
    if not isinstance(array, chainer.get_array_types()) or array.dtype.kind != "f":
        return
    is_bad = ~chainer.backend.get_array_module(array).isfinite(array)
    if bool(is_bad.any()):
        rows = int(is_bad.reshape(len(array), -1).any(axis=1).sum()) if array.ndim else 1
        raise DistillationError(
            f"the teacher's output for {rows} of {len(array) if array.ndim else 1} rows is not "
            "finite: check that the inputs are, that the teacher is trained, and, in float16, that "
            'its activations stay below 65504, or use teacher_precision="float32"'
        )
