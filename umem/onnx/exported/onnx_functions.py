"""Inlining of a model's functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from umem._common.printable import quoted
from umem.errors import OnnxError
from umem.units import MIB

DEEPEST = 64
"""The deepest nesting of function calls: a limit against hostile files, far above exporters'
files."""
GROWTH, ROOM_BYTES = 4, 64 * MIB
"""A model may grow to this many times its bytes, plus this many: a limit against hostile files. A
choice that no measurement supports."""


def inlined(model: Any) -> Any:
    """Return the model with each call of a function replaced by the function's operators.

    Raises:
        OnnxError: a function calls itself, or the model becomes many times as large.
    """
    if not model.functions:
        return model
    functions = {(f.domain, f.name): f for f in model.functions}
    sizes: dict[tuple[str, str], int] = {}

    def grown(nodes: Any, depth: int) -> int:
        """Return the bytes of nodes after inlining.

        Raises:
            OnnxError: calls are nested too deep, or form a ring.
        """
        if depth > DEEPEST:
            raise OnnxError(f"functions of the model call one another {DEEPEST} deep, or in a ring")
        total = 0
        for node in with_inner(nodes):
            total += node.ByteSize()
            key = (node.domain, node.op_type)
            if key in functions:
                if key not in sizes:
                    sizes[key] = grown(functions[key].node, depth + 1)
                total += sizes[key]
        return total

    most = GROWTH * model.ByteSize() + ROOM_BYTES
    if (size := grown(model.graph.node, 0)) > most:
        raise OnnxError(
            f"with its functions inlined the model would have {size} bytes of operators; "
            f"umem reads at most {most}"
        )
    import onnx.inliner

    try:
        return onnx.inliner.inline_local_functions(model)
    except Exception as error:  # RuntimeError, ValidationError, DecodeError
        raise OnnxError(
            f"the functions of the model cannot be inlined: {quoted(str(error))}"
        ) from error


def with_inner(nodes: Any) -> Iterator[Any]:
    """Yield nodes, and the nodes of the graphs in their attributes."""
    todo = list(nodes)
    while todo:
        node = todo.pop()
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                todo.extend(graph.node)
