"""Reads and checks an ONNX file.

Files are untrusted. Nothing in them is run, and weights are never needed: only small arrays are
read, on which a shape may depend.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from umem._common import extras
from umem._common.files import reason
from umem._common.printable import quoted, short
from umem.errors import MissingDependencyError, OnnxError
from umem.onnx.exported.onnx_functions import inlined
from umem.onnx.exported.onnx_weights import MOST_AXES, KnownTensors, add_initializers
from umem.onnx.exported.operators import OPERATORS

OWN_DOMAINS = ("", "ai.onnx")
LARGEST_FILE_BYTES = (2 << 30) - 1
"""The largest file that protobuf reads."""
BRANCHES = ("If", "Loop", "Scan", "SequenceMap")
"""Operators that hold a graph, which the data may run any number of times."""
LOWERED = (
    "If", "CastLike", "SplitToSequence", "SequenceAt", "SequenceConstruct", "SequenceLength",
    "ConcatFromSequence",
)  # fmt: skip
"""Operators that are replaced by others before shapes are inferred."""
QUANTISED = ("quantize", "qlinear", "integer", "matmulnbits", "qgemm", "qattention")
"""Parts of names of operators that compute with quantised numbers."""


@dataclass(frozen=True)
class CheckedModel:
    """A model that was read and checked.

    Attributes:
        onnx: the package.
        model: its ModelProto; every dynamic axis of the inputs has its size.
        known: tensors of the file and the inputs.
        inputs: names of the inputs.
        folder: the file's folder.
    """

    onnx: Any
    model: Any
    known: KnownTensors
    inputs: tuple[str, ...]
    folder: Path


def read_onnx(path: str | PathLike[str], sizes: Mapping[str, int] | None = None) -> CheckedModel:
    """Read a model, and make all checks that need no shapes.

    Args:
        path: the file; files with weights beside it may be missing.
        sizes: a whole number of at least 1 for each dynamic axis, by its name in the model, or as
            ``"x[0]"`` for an unnamed axis.

    Raises:
        OnnxError: the file does not exist or is not an ONNX model; an operator is unknown or holds
            a graph; sizes are missing or unknown; or a tensor exceeds any machine's memory. Names
            the node or the axis.
        MissingDependencyError: onnx is not installed.
    """
    onnx = _onnx()
    folder = Path(path).parent
    model = _parsed(onnx, Path(path))
    _check_opset(onnx, model)
    _check_quantised(model)
    model = inlined(model)
    _check_model(model)
    _set_sizes(model.graph, dict(sizes or {}))
    known = KnownTensors()
    add_initializers(onnx, model.graph, known, folder)
    return CheckedModel(onnx, model, known, _take_inputs(onnx, model.graph, known), folder)


def _onnx() -> Any:
    """Import onnx.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import onnx
        import onnx.helper
        import onnx.numpy_helper
        import onnx.shape_inference
    except ImportError as error:
        raise MissingDependencyError(
            f"a model in ONNX needs the package onnx; {extras.command('onnx')}"
        ) from error
    return onnx


def _parsed(onnx: Any, path: Path) -> Any:
    """Parse a file.

    Raises:
        OnnxError: the file cannot be read, or is not a model.
    """
    try:
        nbytes = os.stat(path).st_size
        if not path.is_file():
            raise OnnxError(f"{short(path)} is not a regular file")
        if nbytes > LARGEST_FILE_BYTES:
            raise OnnxError(
                f"{short(path)} has {nbytes} bytes, and ONNX reads {LARGEST_FILE_BYTES}: save the "
                "weights beside it, by onnx.save_model(model, path, save_as_external_data=True)"
            )
        model = onnx.ModelProto()
        model.ParseFromString(path.read_bytes())
    except OnnxError:
        raise
    except OSError as error:
        raise OnnxError(f"cannot read {short(path)}: {reason(error)}") from error
    except MemoryError as error:
        raise OnnxError(f"{short(path)} needs more memory to be read than there is") from error
    except Exception as error:  # protobuf has several classes of them, by its implementation
        raise OnnxError(
            f"{short(path)} is not a model in ONNX: {quoted(str(error))}; export it once more"
        ) from error
    if not model.ir_version or not model.graph.node:
        raise OnnxError(f"{short(path)} is not a model in ONNX: it has no version, or no operator")
    _check_text(model)
    return model


# -- nodes -----------------------------------------------------------------------------------------


def _check_opset(onnx: Any, model: Any) -> None:
    """Raise OnnxError for operators newer than the installed onnx."""
    versions = [x.version for x in model.opset_import if x.domain in OWN_DOMAINS]
    version, newest = max(versions, default=1), onnx.defs.onnx_opset_version()
    if not 1 <= version <= newest:
        raise OnnxError(
            f"the model has operators of version {version}, and the installed onnx knows 1 to "
            f"{newest}: take a newer onnx, or export the model for an older version"
        )


def _check_text(message: Any) -> None:
    """Refuse names that are not UTF-8, which protobuf gives as bytes."""
    todo = [message]
    while todo:
        for field, value in todo.pop().ListFields():
            if field.type == field.TYPE_MESSAGE:
                todo += [value] if hasattr(value, "ListFields") else value
            elif field.type == field.TYPE_STRING:
                for name in [value] if isinstance(value, (str, bytes)) else value:
                    if isinstance(name, bytes):
                        raise OnnxError(
                            f"the name {quoted(name)} in the model is not text in UTF-8"
                        )


def _check_quantised(model: Any) -> None:
    """Raise OnnxError for a quantised model, which has no backward."""
    for place, node in enumerate(model.graph.node):
        if any(part in str(node.op_type).lower() for part in QUANTISED):
            raise OnnxError(
                f"the model is a quantised graph ({node_name(node, place)} is "
                f"{quoted(node.op_type)}), which has no backward: export the model in "
                "floating-point numbers, before it is quantised"
            )


def _check_model(model: Any) -> None:
    """Raise OnnxError for unknown operators, and names used before they are made."""
    graph = model.graph
    if not graph.output:
        raise OnnxError("the model has no output, from which backward would begin")
    if len({x.name for x in graph.input}) < len(graph.input):
        raise OnnxError("two inputs of the model have the same name")
    _check_graph(graph, {x.name for x in graph.input} - {x.name for x in graph.initializer}, "")


def check_branch(graph: Any, known: set[str], name: str) -> None:
    """Check a graph inside an operator as a model is checked.

    Args:
        known: names that it may read beside its own.
        name: the operator's name in messages.
    """
    if graph.input:
        raise OnnxError(f"{name} holds a graph with inputs of its own")
    _check_graph(graph, set(known), f" of a branch of {name}")


def _check_graph(graph: Any, known: set[str], whose: str) -> None:
    """Check the nodes of a graph in order; outputs are added to ``known``."""
    if graph.sparse_initializer:
        raise OnnxError("the model has sparse initialisers, which umem does not know")
    given = {x.name for x in graph.initializer}
    if len(given) < len(graph.initializer) or given & known:
        raise OnnxError("two initialisers of the model have the same name")
    known |= given
    for place, node in enumerate(graph.node):
        _check_operator(node, place)
        for name in node.input:
            if name and name not in known:
                raise OnnxError(
                    f"{node_name(node, place)} reads {quoted(name)} before any node makes it: the "
                    "graph has a cycle, or its nodes are out of order"
                )
        for name in node.output:
            if name and name in known:
                raise OnnxError(
                    f"{node_name(node, place)} makes {quoted(name)}, which already exists"
                )
            known.add(name)
    for output in graph.output:
        if output.name not in known:
            raise OnnxError(f"no node makes the output {quoted(output.name)}{whose}")


def _check_operator(node: Any, place: int) -> None:
    """Raise OnnxError for an operator that umem does not know, or that holds a graph."""
    holds = any(a.HasField("g") or a.graphs for a in node.attribute)
    if node.op_type != "If" and (node.op_type in BRANCHES or holds):
        raise OnnxError(holds_a_graph(node, place))
    known = node.op_type in OPERATORS or node.op_type in LOWERED
    if node.domain not in OWN_DOMAINS or not known:
        raise OnnxError(
            f"{_kind_name(node, place)}, which umem does not know: add its saved tensors to "
            "umem/onnx/exported/operators.py"
        )


def holds_a_graph(node: Any, place: int) -> str:
    """Return the error message for an operator that holds a graph."""
    return (
        f"{_kind_name(node, place)}, which holds a graph whose runs depend on data: export the "
        "model without it, with the loop unrolled or one branch chosen"
    )


def _kind_name(node: Any, place: int) -> str:
    domain = node.domain or "ai.onnx"
    return f"{node_name(node, place)} is {quoted(node.op_type)} of the domain {quoted(domain)}"


def node_name(node: Any, place: int) -> str:
    """Name a node in a message."""
    return f"node {quoted(node.name or next(iter(node.output), '') or str(place))}"


# -- sizes -----------------------------------------------------------------------------------------


def _set_sizes(graph: Any, sizes: dict[str, int]) -> None:
    """Set the size of every dynamic input axis, by name."""
    for name, value in sizes.items():
        if type(value) is not int or not 1 <= value < 1 << 63:
            raise OnnxError(
                f"the size of {quoted(name)} is {quoted(value)}, not a whole number of at least 1 "
                "and at most 63 bits"
            )
    missing: dict[str, str] = {}
    unused, fixed = set(sizes), dict[str, int]()
    for own, dim in _input_dims(graph):
        if is_fixed(dim):
            fixed[own] = dim.dim_value
            continue
        name = own if own in sizes or not dim.dim_param else dim.dim_param
        if name in sizes:
            unused.discard(name)
            dim.dim_value = sizes[name]
        else:
            missing.setdefault(name, own)
    if missing:
        axes = ", ".join(
            short(name if name == own else f"{name} ({own})") for name, own in missing.items()
        )
        example = " ".join(f"--size {short(name)}=N" for name in missing)
        raise OnnxError(f"the model has dynamic axes without a size: {axes}; give {example}")
    for name in unused:
        if name in fixed:
            raise OnnxError(f"the axis {quoted(name)} is {fixed[name]} in the model, not dynamic")
        raise OnnxError(f"the model has no dynamic axis {quoted(name)} in its inputs")


def is_fixed(dim: Any) -> bool:
    """Tell whether an axis has a size; some exporters write a negative size for a dynamic axis."""
    return bool(dim.HasField("dim_value") and dim.dim_value >= 0)


def _input_dims(graph: Any) -> Iterator[tuple[str, Any]]:
    """Yield each axis of the inputs, named as ``x[0]``."""
    weights = {x.name for x in graph.initializer}
    for x in graph.input:
        if x.name not in weights:
            for axis, dim in enumerate(dims_of(x)):
                yield f"{x.name}[{axis}]", dim


def dims_of(x: Any) -> Any:
    """Return the axes of an input.

    Raises:
        OnnxError: the input is not a tensor, or its number of axes is unknown.
    """
    if not x.type.HasField("tensor_type"):
        raise OnnxError(f"{quoted(x.name)} is a sequence, a map or an optional, not a tensor")
    if not x.type.tensor_type.HasField("shape"):
        raise OnnxError(
            f"the model's input {quoted(x.name)} has an unknown number of axes: export it with a "
            "shape, in which an axis may be dynamic"
        )
    if len(x.type.tensor_type.shape.dim) > MOST_AXES:
        raise OnnxError(f"{quoted(x.name)} has {len(x.type.tensor_type.shape.dim)} axes")
    return x.type.tensor_type.shape.dim


def _take_inputs(onnx: Any, graph: Any, known: KnownTensors) -> tuple[str, ...]:
    """Add the types of the inputs; returns their names."""
    names = []
    for x in graph.input:
        if x.name not in known.initializers:
            dims = [dim.dim_value for dim in dims_of(x)]
            known.add(onnx, x.name, x.type.tensor_type.elem_type, dims)
            names.append(x.name)
    return tuple(names)
