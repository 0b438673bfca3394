"""`quantize`: a model whose layers have weights in 8 or 4 bits and compute with integers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import chainer
import chainerx
import numpy as np

from umem.chainer.finite import LARGEST_SINGLE, first_beyond
from umem.chainer.quantization.aware_links import (
    AWARE,
    AwareLayer,
    aware_step,
    become_plain,
    has_hooks,
)
from umem.chainer.quantization.calibration import (
    Call,
    SeenRange,
    attributes_restored,
    calibrate,
    run,
)
from umem.chainer.quantization.exchanging import by_path, checked_names, exchanged, own_names
from umem.chainer.quantization.integer_products import LARGEST_SUM
from umem.chainer.quantization.quantization_report import report_of
from umem.chainer.quantization.quantized_links import KINDS, QuantizedLayer, WeightReadError
from umem.chainer.quantization.quantized_weight import QuantizedWeight
from umem.chainer.quantization.scheme import Scheme, input_step
from umem.errors import QuantizationError, StateError, UnsupportedError

__all__ = ["quantize"]


def quantize(
    model: Any,
    calibration: Any = None,
    bits: int | None = None,
    *,
    activation_bits: int | None = None,
    group: int | None = None,
    keep: Iterable[str] = (),
) -> Any:
    """Make an inference model with weights of 8 or 4 bits; the float model is not changed.

    `Linear`, `Convolution2D` (also in groups) and `EmbedID` are replaced, wherever they are, by
    links that store their weights as codes, with one scale a row, and that multiply integers: the
    sums are int32 sums, to the bit. Inputs are rounded to codes with one scale and one zero point a
    layer, from the range seen in calibration. The rest of the model is unchanged. A weight that
    layers share is quantised once. The result's ``quantization_report`` lists bytes, and each layer
    that stays in floats, with the reason; ``print`` it.

    Results are not exact: see docs/reference/quantization.md for the cost in accuracy and time.

    Args:
        model: a trained link or chain on NumPy or CuPy, in float16, 32 or 64. After training under
            `quantization_aware` it has its own ranges and bits.
        calibration: an array, which is one batch, or an iterable of batches, read once: each an
            array, or a tuple or dictionary of the model's arguments. Give some hundred typical
            examples: the range of an input is from its least to its largest number there, and later
            values outside of it are clipped. None only after aware training.
        bits: bits of a weight: 8 (the default) or 4.
        activation_bits: bits of an input: 8 (the default) or 4.
        group: in 4 bits, columns of a row that share a multiplier, from 8 to 512: closer weights,
            for one byte a group. None: only a scale a row.
        keep: names of links to leave in floats, such as "/score".

    Returns:
        A new model of the same class. It has no gradients: a backward through it raises. It can be
        copied, moved to a GPU and saved by Chainer's serializers, or by `save_quantized`.

    Cost: no weight is ever in float32 as a whole; the peak is both models and some MiB.

    Raises:
        QuantizationError: invalid bits, names in ``keep`` that do not exist, calibration that is
            empty or that the model cannot run; NaN or infinity, in it or in a weight; uninitialised
            weights; no layer that can be replaced. StateError: the model is quantised already.
            UnsupportedError: ChainerX arrays. The model is as before.

    Sources: Jacob et al. 2018 (arXiv:1712.05877), Krishnamoorthi 2018 (arXiv:1806.08342).
    """
    links = by_path(model)
    _check_model(links)
    kept = checked_names(keep, links)
    scheme = _scheme(links, bits, activation_bits, group)
    chosen, left = _chosen(links, kept)
    paths = {link: path for path, link in chosen.items()}
    if calibration is None and not any(isinstance(link, AwareLayer) for link in paths):
        raise QuantizationError("calibration is needed: some hundred inputs of the model")
    seen: dict[Any, SeenRange] = {}
    call = None
    if calibration is not None:
        seen, call = calibrate(model, calibration, paths)
    made = _quantized(chosen, seen, scheme, left)
    return _finished(model, links, made, left, call)


def _check_model(links: dict[str, Any]) -> None:
    """Raise if a layer is quantised already, or an array is ChainerX's."""
    for path, link in links.items():
        if isinstance(link, QuantizedLayer):
            raise StateError(
                f"{path} is a {type(link).__name__}: the model is quantised already; quantise the "
                "float model"
            )
        for name in own_names(link):
            if getattr(link, name).device.xp is chainerx:
                raise UnsupportedError(
                    f"{path}/{name} is a ChainerX array: move the model to NumPy or CuPy"
                )


def _scheme(
    links: dict[str, Any], bits: int | None, activation_bits: int | None, group: int | None
) -> Scheme:
    """Return the requested scheme, or the one of quantisation-aware training."""
    trained = next((link.scheme for link in links.values() if isinstance(link, AwareLayer)), None)
    if trained is None:
        return Scheme(
            8 if bits is None else bits, 8 if activation_bits is None else activation_bits, group
        )
    requested = Scheme(
        trained.bits if bits is None else bits,
        trained.activation_bits if activation_bits is None else activation_bits,
        trained.group if group is None else group,
    )
    if requested != trained:
        raise QuantizationError(
            f"the model was trained for {trained}, but {requested} is requested: leave out bits, "
            "activation_bits and group, or undo() the aware training first"
        )
    return trained


def _chosen(links: dict[str, Any], kept: set[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Split links with parameters into those to quantise and those that stay, with the reason."""
    chosen, left = {}, {}
    for path, link in links.items():
        if not own_names(link):
            continue
        why = "named in keep" if path in kept else _why_not(link)
        if why is not None:
            left[path] = why
            continue
        _check_weight(path, link)
        chosen[path] = link
    return chosen, left


def _why_not(link: Any) -> str | None:
    """Return why a link cannot be quantised; None if it can."""
    kind = type(link)
    if has_hooks(link):
        # The private one: the property would make a dictionary.
        return f"it has link hooks, {', '.join(link._local_link_hooks)}"
    if kind in AWARE.values() or kind in KINDS:
        if not isinstance(link.W, chainer.Parameter):
            return "its W is not a parameter"
        if link.W.is_initialized and not link.W.size:
            return "its W is empty"
        is_last = getattr(link, "cudnn_fast", False)
        return "its channels are last (cudnn_fast)" if is_last else None
    above = next((known.__name__ for known in KINDS if isinstance(link, known)), None)
    if above is not None:
        return f"a subclass of {above}, which may compute something else"
    return "no Linear, Convolution2D or EmbedID"


def _check_weight(path: str, link: Any) -> None:
    """Raise QuantizationError unless a link's parameters are initialised and finite in float32."""
    for name in own_names(link):
        parameter = getattr(link, name)
        if not parameter.is_initialized:
            raise QuantizationError(
                f"{path}/{name} is not initialised: nothing was trained. Train or load the model "
                "first, or call it once"
            )
        if first_beyond([(name, parameter.array)], LARGEST_SINGLE) is not None:
            raise QuantizationError(f"{path}/{name} has NaN, infinity, or numbers beyond float32")


def _quantized(
    chosen: dict[str, Any], seen: dict[Any, SeenRange], scheme: Scheme, left: dict[str, str]
) -> dict[Any, Any]:
    """Quantise each link; reasons of links that stay are added to ``left``."""
    weights: dict[int, QuantizedWeight] = {}
    made = {}
    for path, link in chosen.items():
        step = _step_of(link, seen.get(link), scheme)
        if isinstance(step, str):
            left[path] = step
            continue
        weight = weights.get(id(link.W))
        if weight is None:
            weight = weights[id(link.W)] = QuantizedWeight.of(link.W.array, scheme)
        kind = next(KINDS[known] for known in KINDS if isinstance(link, known))
        if kind.has_input and weight.largest_sum() > LARGEST_SUM:
            left[path] = "sums of its products could pass int32"
            continue
        made[link] = kind.of(link, weight, step)
    return made


def _step_of(link: Any, seen: SeenRange | None, scheme: Scheme) -> Any:
    """Return scale and zero point of an input, None if it needs none, or the reason why it has
    none.
    """
    kind = next(KINDS[known] for known in KINDS if isinstance(link, known))
    if not kind.has_input:
        return None
    if isinstance(link, AwareLayer):
        step = aware_step(link)
        return "never called in training" if step is None else step
    if seen is None or not seen.calls:
        return "never called in calibration"
    step = input_step(np.float64(seen.low), np.float64(seen.high), scheme)
    if not np.isfinite(step[0]):
        return "its input had numbers beyond float32"
    return step if float(step[0]) > 0 else "its input was zero throughout calibration"


def _finished(
    model: Any, links: dict[str, Any], made: dict[Any, Any], left: dict[str, str], call: Call | None
) -> Any:
    """Exchange the links and run the model once; a layer whose W is read directly stays in
    floats.
    """
    while True:
        if not made:
            reasons = "; ".join(f"{path}: {why}" for path, why in left.items())
            raise QuantizationError(f"no layer can be quantised: {reasons or 'there is none'}")
        quantized = exchanged(model, made)
        for link in list(quantized.links()):
            if isinstance(link, AwareLayer):  # it stays in floats
                become_plain(link)
        try:
            if call is not None:
                with attributes_restored(quantized):
                    run(quantized, call)
        except WeightReadError as error:
            reader = error.link
            link = next(each for each, instead in made.items() if instead is reader)
            path = next(path for path, each in links.items() if each is link)
            del made[link]
            left[path] = "its W is read from outside"
            continue
        except Exception as error:
            raise QuantizationError(
                f"the quantised model does not run: {type(error).__name__}: {error}. Name the "
                "failing layer in keep"
            ) from error
        quantized.quantization_report = report_of(links, made, left)
        return quantized
