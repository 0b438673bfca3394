"""Models with wrong words in them, in all that the reader rewrites, are read or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.on_onnx import test_exporters as exporters
from tests.on_onnx import test_fusion as fusion
from tests.on_onnx.test_operators import ints, node, save, weights
from umem.errors import OnnxError
from umem.onnx import onnx_step

onnx = pytest.importorskip("onnx")
MUTATIONS = 20
"""Of each seed; set to 250 for 4,000 files."""


def branch(path: Path) -> Path:
    chain = [node("Shape", "x", "s"), node("Gather", "s at", "n"), node("Equal", "n one", "c")]
    return exporters.branching(path, chain)


def sequence(path: Path) -> Path:
    nodes = [
        node("MatMul", "x W", "h"), node("SplitToSequence", "h two", "parts", axis=1),
        node("SequenceAt", "parts zero", "a"), node("SequenceLength", "parts", "n"),
        node("SequenceConstruct", "a a", "both"),
        node("ConcatFromSequence", "both", "y", axis=0, new_axis=1),
    ]  # fmt: skip
    given = [weights("W", 6, 5), exporters.number("two", 2), exporters.number("zero", 0)]
    return save(path, nodes, given, ["n", 6], None, 13)


def function(path: Path) -> Path:
    like = [node("CastLike", "a a", "t"), node("Sigmoid", "t", "s"), node("Mul", "s t", "b")]
    return exporters.with_functions(path, exporters.function("Twice", *like))


def made(path: Path) -> Path:
    given = [weights("W", 3, 3, 1, 1), weights("g", 3), weights("b", 3), weights("v", 3)]
    nodes = [
        exporters.constant("K", exporters.floats(3, 3, 1, 1)), node("Conv", "x W", "c"),
        node("Identity", "v", "m"), node("BatchNormalization", "c g b m v", "n"),
        node("Conv", "n K", "y"),
    ]  # fmt: skip
    return save(path, nodes, given, ["n", 3, 4, 4], None, 13)


def chain(path: Path) -> Path:
    nodes = [
        node("MatMul", "x W", "h"), node("Shape", "h", "s"), node("Split", "s", "n m", axis=0),
        node("Greater", "s one", "g"), node("NonZero", "g", "z"), node("Shape", "z", "count"),
        node("Tile", "m two", "t"), node("Slice", "t zero two", "u"),
        node("Pad", "u pads", "p"), node("ReduceMax", "p", "q", keepdims=1),
        node("ScatterND", "s at m", "w"), node("Transpose", "w", "r"), node("Reshape", "h r", "y"),
    ]  # fmt: skip
    given = [
        weights("W", 6, 6), ints("one", 1), ints("two", 2), ints("zero", 0), ints("pads", 0, 1),
        onnx.numpy_helper.from_array(np.array([[1]], np.int64), "at"),
    ]  # fmt: skip
    return save(path, nodes, given, ["n", 6], None, 13)


def formulas(path: Path) -> Path:
    norm = fusion.layer_norm("Pow", "Div", True)
    nodes = [node("MatMul", "x W", "h"), *norm, node("Sigmoid", "g", "z"), node("Mul", "g z", "y")]
    given = [*fusion.NUMBERS, epsilon(), weights("gamma", 6), weights("beta", 6)]
    return save(path, nodes, [weights("W", 6, 6), *given], ["n", 6], None, 13)


def epsilon() -> Any:
    return onnx.numpy_helper.from_array(np.float32(1e-5), "eps")


SEEDS: tuple[Callable[[Path], Path], ...] = (
    branch, sequence, function, made, chain, formulas,
)  # fmt: skip


def graphs(model: Any) -> Iterator[Any]:
    todo = [model.graph]
    while todo:
        graph = todo.pop()
        yield graph
        todo += [a.g for n in graph.node for a in n.attribute if a.HasField("g")]


def mutated(model: Any, rng: np.random.Generator) -> None:
    """Change a word, a number, a type, an order or a count somewhere in a model."""

    def one(some: Any) -> Any:
        return some[int(rng.integers(len(some)))]

    bodies = [g.node for g in graphs(model)] + [f.node for f in model.functions]
    given = [t for g in graphs(model) for t in g.initializer]
    used = {n for body in bodies for x in body for n in (*x.input, *x.output)}
    names = [*sorted(used), "", "q"]
    kinds = [*sorted({x.op_type for body in bodies for x in body}), "If", "Constant", "Loop"]
    odd = [-(2**63), 2**63 - 1, -1, 0, 1, 2, 3, 7, 64, 4097, 2**31]
    x = one(one([body for body in bodies if body]))
    match int(rng.integers(9)):
        case 0 if x.input:
            x.input[int(rng.integers(len(x.input)))] = one(names)
        case 1 if x.output:
            x.output[int(rng.integers(len(x.output)))] = one(names)
        case 2:
            x.op_type = one(kinds)
        case 3 if x.attribute:
            attribute = one(x.attribute)
            attribute.i = one(odd)
            attribute.ints[:] = [one(odd)] * len(attribute.ints)
        case 4 if x.attribute:
            del x.attribute[:]
        case 5 if given:
            tensor = one(given)
            tensor.dims[:] = [one(odd)] * int(rng.integers(4))
        case 6 if given:
            tensor = one([t for t in given if t.data_type == 7] or given)
            count = len(tensor.raw_data) // 8
            tensor.raw_data = np.array([one(odd) for _ in range(count)], np.int64).tobytes()
        case 7 if given:
            one(given).data_type = int(rng.integers(20))
        case _:
            (x.input if rng.integers(2) else x.output)[:] = [one(names)] * int(rng.integers(4))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", SEEDS, ids=[seed.__name__ for seed in SEEDS])
def test_a_model_with_wrong_words_is_read_or_refused(tmp_path: Path, seed: Any) -> None:
    path = seed(tmp_path / "m.onnx")
    sizes = None if seed is function else {"n": 1}
    assert onnx_step(path, sizes)
    original = path.read_bytes()
    for number in range(MUTATIONS):
        rng = np.random.default_rng(number)
        model = onnx.ModelProto.FromString(original)
        for _ in range(int(rng.integers(1, 4))):
            mutated(model, rng)
        path.write_bytes(model.SerializeToString())
        try:
            onnx_step(path, sizes)
        except OnnxError as error:
            assert str(error)
