"""Quantised models in files: safetensors, with codes as they are in memory; nothing is executed.

The file's metadata has the version of the format, the scheme, and the path, kind and sizes of each
layer. A model must match them to load the file.
"""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from chainer.backends import cuda

from umem._common.checksums import SUMS, check_arrays, sum_of, with_sums
from umem._common.files import reason, whole
from umem._common.printable import short
from umem._common.safetensors_file import SafetensorsFile, pieces
from umem.chainer.quantization.aware_links import AWARE
from umem.chainer.quantization.exchanging import by_path, exchanged, own_names
from umem.chainer.quantization.integer_products import LARGEST_SUM
from umem.chainer.quantization.quantization_report import report_of
from umem.chainer.quantization.quantized_links import KINDS, QuantizedLayer, specs_of, weight_shape
from umem.chainer.quantization.quantized_weight import QuantizedWeight
from umem.chainer.quantization.scheme import Scheme
from umem.chainer.resume.collecting import Collector, Distributor, MissingValue, decoded
from umem.errors import (
    FileError,
    QuantizationError,
    SnapshotError,
    StateError,
    UnsupportedError,
    UnverifiedWarning,
    warn_at_program,
)

__all__ = ["load_quantized", "save_quantized"]

_FORMAT = "umem quantized model"
_VERSION = 1
_QUANTIZED = {kind.__name__: kind for kind in KINDS.values()}


def save_quantized(path: str | os.PathLike[str], model: Any, *, force: bool = False) -> None:
    """Save a model made by `quantize` as safetensors: codes, scales and all other arrays.

    The file gets its name when it is complete. An array that layers share is written once.

    Args:
        path: the file's name; ".safetensors" is usual.
        model: on NumPy or CuPy.
        force: replace an existing file.

    Raises:
        StateError: the model is not quantised. FileError: see `umem._common.files.whole`.
        UnsupportedError: the model has values that neither safetensors nor JSON can represent, or
            parts with different bits or groups. Then no file is written, and an existing one stays.
    """
    scheme = _scheme_of(model)
    collector = Collector()
    model.serialize(collector)
    arrays = {name: _on_host(array) for name, array in _once(collector.arrays).items()}
    description = {"scheme": vars(scheme), "layers": _structure(model), "values": collector.values}
    notes = {
        "format": _FORMAT,
        "version": str(_VERSION),
        "model": json.dumps(description, separators=(",", ":")),
    }
    sums = {name: sum_of(name, array) for name, array in arrays.items()}
    try:
        with whole(Path(path), force=force) as file:
            for piece in pieces(arrays, with_sums(notes, sums)):
                file.write(piece)
    except FileError:
        raise
    except (OSError, ValueError) as error:
        raise FileError(f"cannot write {short(path)}: {reason(error)}") from error


def load_quantized(path: str | os.PathLike[str], model: Any) -> Any:
    """Load a quantised model from a file.

    Args:
        path: a file that `save_quantized` wrote.
        model: a float model with the layers of the quantised one. Its weights may have any values,
            or be uninitialised, which takes no memory. It is unchanged.

    Returns:
        A new quantised model on the device of ``model``.

    Raises:
        QuantizationError: the file is not a quantised model, has a newer version, is of another
            model (the message lists the differences), or is damaged. FileError: it cannot be read.
            StateError: the model is quantised.
    """
    arrays = _opened(path)
    try:
        return _loaded(short(path), arrays, model)
    finally:
        arrays.close()


def _scheme_of(model: Any) -> Scheme:
    """Return the one scheme of a model's quantised layers.

    Raises:
        StateError: no layer is quantised.
        UnsupportedError: layers have different schemes.
    """
    schemes = {path: link.scheme for path, link in by_path(model).items()
               if isinstance(link, QuantizedLayer)}  # fmt: skip
    if not schemes:
        raise StateError("the model is not quantised: give what umem.chainer.quantize returns")
    first, scheme = next(iter(schemes.items()))
    other = next((path for path, each in schemes.items() if each != scheme), None)
    if other is not None:
        raise UnsupportedError(
            f"{first} has {scheme} and {other} has {schemes[other]}, but a file has only one: "
            "save each part in its own file"
        )
    return scheme


def _opened(path: str | os.PathLike[str]) -> SafetensorsFile:
    try:
        return SafetensorsFile(Path(path))
    except FileError as error:
        raise FileError(f"{short(path)}: {error}") from None
    except OSError as error:
        raise FileError(f"cannot read {short(path)}: {reason(error)}") from error
    except ValueError as error:
        raise QuantizationError(f"{short(path)} is not a safetensors file: {error}") from error


def _loaded(name: str, arrays: SafetensorsFile, model: Any) -> Any:
    """Make the quantised model that a file describes from a float model.

    Raises:
        QuantizationError: the file is damaged, or of another model.
        StateError: a layer is quantised already. The given model is unchanged.
    """
    description = _description(name, arrays)
    _verify(name, arrays)
    links = by_path(model)
    for path, link in links.items():
        if isinstance(link, QuantizedLayer):
            raise StateError(f"{path} is quantised already: give the float model")
    layers = description["layers"]
    differences = _differences(layers, links)
    if differences:
        raise QuantizationError(f"{name} is of another model: {'; '.join(differences)}")
    _check_sizes(name, layers, arrays)
    instead = _empty(layers, links, Scheme(**description["scheme"]))
    made = exchanged(model, instead)
    _fill(name, made, arrays, description["values"])
    for path, link in by_path(made).items():
        wrong = _wrong(link) if isinstance(link, QuantizedLayer) else None
        if wrong is not None:
            raise QuantizationError(f"{name} is damaged: {path}: {wrong}")
    left = {path: "in floats in the file" for path, each in links.items() if each not in instead}
    made.quantization_report = report_of(links, instead, left)
    return made


def _description(name: str, arrays: SafetensorsFile) -> dict[str, Any]:
    """Read and check the JSON description in a file.

    Raises:
        QuantizationError: it is missing, damaged, or of another version.
    """
    notes = arrays.notes
    if notes.get("format") != _FORMAT:
        raise QuantizationError(f"{name} was not written by umem.chainer.save_quantized")
    if notes.get("version") != str(_VERSION):
        raise QuantizationError(
            f"{name} has version {notes.get('version')} of the format; this umem reads version "
            f"{_VERSION}"
        )
    try:
        found: dict[str, Any] = json.loads(notes["model"])
        Scheme(**found["scheme"])
        for value in found["values"].values():
            decoded(value)  # as a Distributor does later
        for kind, specs in found["layers"].values():
            _check_layer(kind, specs)
    except (
        AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError, RecursionError,
    ) as error:  # fmt: skip
        raise QuantizationError(
            f"{name} is damaged: its description is not valid: {error}"
        ) from error
    return found


def _verify(name: str, arrays: SafetensorsFile) -> None:
    """Compare a file with its checksums; files of an earlier umem have none."""
    unknown = arrays.notes.keys() - {"format", "version", "model", SUMS}
    if unknown:
        raise QuantizationError(f"{name} is damaged: its header has {short(min(unknown))!r}")
    if SUMS not in arrays.notes:
        warn_at_program(
            f"{name} has no checksums: an earlier umem wrote it, and damage would not be "
            "noticed. Save the model again to add them",
            UnverifiedWarning,
        )
        return
    try:
        check_arrays(arrays.notes, arrays)
    except ValueError as error:
        raise QuantizationError(f"{name} is damaged: {error}. No model was made") from None


def _check_layer(kind: Any, specs: Any) -> None:
    """Check the description of one layer, so that later code can rely on it.

    Raises:
        ValueError, TypeError, KeyError: it is not valid.
    """
    if not isinstance(kind, str) or not isinstance(specs, dict):
        raise TypeError(f"a layer is {kind!r:.50} of {specs!r:.50}")
    if kind not in _QUANTIZED:
        return
    for name, value in specs.items():
        if name in ("ignore_label", "dtype"):  # the model's own, or it is another model
            continue
        is_pair, least = name in ("ksize", "stride", "pad", "dilate"), int(name != "pad")
        sizes = value if is_pair else [value]
        if len(sizes) != 1 + is_pair or any(type(e) is not int or e < least for e in sizes):
            raise ValueError(f"a {kind} has {name} {value!r:.50}")
    weight_shape(_QUANTIZED[kind], specs)


# -- the layers of a model -----------------------------------------------------------------------


def _structure(model: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return kind and sizes of each link that has arrays, by path."""
    found = {}
    for path, link in by_path(model).items():
        if isinstance(link, QuantizedLayer):
            found[path] = type(link).__name__, link.specs
        elif own_names(link) and not isinstance(link, QuantizedWeight):
            found[path] = _plain(link)
    return found


def _plain(link: Any) -> tuple[str, dict[str, Any]]:
    parameters = {name: getattr(link, name) for name in own_names(link)}
    return type(link).__name__, {
        name: list(each.shape) if each.is_initialized else None for name, each in parameters.items()
    }


def _differences(layers: dict[str, Any], links: dict[str, Any]) -> list[str]:
    """List how the layers of a file and a model differ; empty if they match."""
    here = {path: link for path, link in links.items() if own_names(link)}
    found = [f"it has {path} ({layers[path][0]})" for path in layers.keys() - here.keys()]
    found += [
        f"it has no {path} ({type(link).__name__})"
        for path, link in here.items() if path not in layers
    ]  # fmt: skip
    for path, link in here.items():
        if path in layers:
            kind, specs = layers[path]
            ours = _as_listed(kind, link)
            if ours[0] != kind or not _alike(specs, ours[1]):
                found.append(f"{path} is {_layer(kind, specs)} there and {_layer(*ours)} here")
    return sorted(found)


def _as_listed(kind: str, link: Any) -> tuple[str, dict[str, Any]]:
    """Describe a link as the file format describes it."""
    if kind in _QUANTIZED:
        plain = _QUANTIZED[kind].stands_for
        if type(link) in (plain, AWARE[plain]):  # a subclass may compute something else
            return kind, specs_of(link)
    return _plain(link)


def _alike(theirs: Any, ours: dict[str, Any]) -> bool:
    """Tell whether two descriptions have the same sizes, where both are known."""
    if theirs.keys() != ours.keys():
        return False
    pairs = [(theirs[name], ours[name]) for name in ours if name != "ignore_label"]
    is_same = all(a is None or b is None or a == b for a, b in pairs)
    return is_same and theirs.get("ignore_label") == ours.get("ignore_label")


def _layer(kind: str, specs: dict[str, Any]) -> str:
    sizes = ", ".join(f"{name} {value}" for name, value in specs.items())
    return f"{kind.removeprefix('Quantized')} ({sizes})"


def _check_sizes(name: str, layers: dict[str, Any], arrays: SafetensorsFile) -> None:
    """Check that no layer is larger than the file, before memory is allocated for it.

    A size that the model leaves open comes from the file alone.
    """
    numbers = 2 * sum(prod(shape) for shape, _ in arrays.described.values())
    for path, (kind, specs) in layers.items():
        if kind in _QUANTIZED and prod(weight_shape(_QUANTIZED[kind], specs)) > numbers:
            raise QuantizationError(
                f"{name} is damaged: {path} is {_layer(kind, specs)}, larger than the file"
            )


# -- filling a model -------------------------------------------------------------------------------


def _empty(layers: dict[str, Any], links: dict[str, Any], scheme: Scheme) -> dict[Any, Any]:
    """Make quantised links without content in place of float ones."""
    weights: dict[int, QuantizedWeight] = {}
    made = {}
    for path, (name, specs) in layers.items():
        if name not in _QUANTIZED:
            continue
        kind, link = _QUANTIZED[name], links[path]
        if id(link.W) not in weights:
            shape = weight_shape(kind, specs)
            weights[id(link.W)] = QuantizedWeight(*shape, scheme, link.device)
        made[link] = kind.of(link, weights[id(link.W)], specs=specs)
    return made


def _fill(name: str, model: Any, arrays: SafetensorsFile, values: dict[str, Any]) -> None:
    """Copy a file's arrays and other persistent values into a model.

    Args:
        name: the file's name, for messages.
        model: has quantised links.
        arrays, values: the file's.

    Raises:
        QuantizationError: the file lacks one of the model's arrays or values, has others, or one
            does not fit.
    """
    collector = Collector()
    model.serialize(collector)
    shared = collector.arrays.keys() - _once(collector.arrays).keys()
    extra = sorted((arrays.keys() | values) - (collector.arrays.keys() | collector.values))
    if extra:
        raise QuantizationError(f"{name} is of another model: it has {', '.join(extra)}")
    try:
        model.serialize(Distributor(arrays, values, (), stays=frozenset(shared)))
    except MissingValue as error:
        raise QuantizationError(f"{name} is of another model: it has no {error}") from None
    except SnapshotError as error:
        raise QuantizationError(f"{name} is of another model: {error}") from None


def _wrong(layer: QuantizedLayer) -> str | None:
    """Describe what is wrong with a loaded layer; None if it is valid."""
    if layer.has_input:
        scale, zero = (float(each) for each in layer.step)
        if not 0 < scale < np.inf or not 0 <= zero <= layer.scheme.levels or zero % 1:
            return f"its input has the scale {scale} and the zero point {zero}"
    if layer.bias is not None and not bool(layer.xp.isfinite(layer.bias).all()):
        return "its bias has NaN or infinity"
    wrong = layer.weight.wrong()
    if wrong is None and layer.has_input and layer.weight.largest_sum() > LARGEST_SUM:
        return "sums of its products could pass int32"
    return wrong


def _once(arrays: dict[str, Any]) -> dict[str, Any]:
    """Drop arrays that are also under an alphabetically earlier name."""
    found = {id(arrays[name]): name for name in sorted(arrays, reverse=True)}
    return {name: array for name, array in arrays.items() if found[id(array)] == name}


def _on_host(array: Any) -> Any:
    return np.ascontiguousarray(cuda.to_cpu(array)).reshape(array.shape)
