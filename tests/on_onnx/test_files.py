"""Files that are no model, or a hostile one; sizes; data that are not there."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.on_onnx.test_operators import (
    FLOAT,
    INT64,
    ints,
    kept_bytes,
    node,
    save,
    two_layers,
    weights,
)
from umem._common import extras
from umem.errors import MissingDependencyError, OnnxError
from umem.onnx import graph_of, onnx_step

onnx = pytest.importorskip("onnx")
GIB = 1 << 30


def refused(path: Path, sizes: dict[str, Any] | None = None) -> str:
    with pytest.raises(OnnxError) as caught:
        onnx_step(path, sizes)
    assert len(str(caught.value)) < 2000
    return str(caught.value)


def broken(path: Path, *nodes: Any, given: list[Any] | None = None, shape: Any = (4, 4)) -> str:
    """What is said of nodes with one trained product before them."""
    first = [node("MatMul", "x W", "h")]
    all_given = [weights("W", 4, 4), *(given or [])]
    return refused(save(path / "m.onnx", [*first, *nodes], all_given, shape, None, 13))


# -- sizes -----------------------------------------------------------------------------------------


def test_an_axis_without_a_name_is_called_by_its_place(tmp_path: Path) -> None:
    path = two_layers(tmp_path / "m.onnx", None)
    assert "--size x[0]=N" in refused(path)
    kept = 6 * 30 * 4 + 6 * 10 * 4
    assert kept_bytes(onnx_step(path, {"x[0]": 6}).trace) == kept


@pytest.mark.parametrize(
    "sizes, words",
    [
        ({"batch": 0}, "not a whole number"),
        ({"batch": 1 << 63}, "at most 63 bits"),
        ({"batch": 1.5}, "not a whole number"),
        ({"batch": True}, "not a whole number"),
        ({"batch": 4, "length": 5}, "no dynamic axis 'length'"),
        ({"batch": 4, "x[1]": 5}, "'x[1]' is 20 in the model"),
        ({"batch": 1 << 60}, "no machine has"),
    ],
)
def test_sizes_that_are_none(tmp_path: Path, sizes: dict[str, Any], words: str) -> None:
    assert words in refused(two_layers(tmp_path / "m.onnx"), sizes)


def test_sizes_that_contradict_the_graph(tmp_path: Path) -> None:
    nodes = [node("MatMul", "x W", "h"), node("Add", "h b", "y")]
    given = [weights("W", 6, 4), weights("b", 5, 4)]
    path = save(tmp_path / "m.onnx", nodes, given, ["n", 6], None, 13)
    said = refused(path, {"n": 7})
    assert "'Add-y'" in said and "contradict each other" in said
    assert onnx_step(path, {"n": 5})


@pytest.mark.parametrize("said", [[9, 4], ["n"], [7, 4, 1], [-1, -1]])
def test_what_a_model_says_of_its_output_is_not_relied_on(tmp_path: Path, said: list[Any]) -> None:
    nodes = [node("MatMul", "x W", "h"), node("Relu", "h", "y")]
    path = save(tmp_path / "m.onnx", nodes, [weights("W", 6, 4)], ["n", 6], said, 13)
    assert kept_bytes(onnx_step(path, {"n": 7}).trace) == 7 * 4 * 4


def test_an_input_without_a_rank_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", [node("Relu", "x", "y")], [], None, None, 13)
    assert "input 'x' has an unknown number of axes" in refused(path)


# -- operators -------------------------------------------------------------------------------------


def test_an_unknown_operator_is_named_with_its_domain(tmp_path: Path) -> None:
    own = onnx.helper.make_node("FusedThing", ["h"], ["y"], name="fused-3", domain="com.example")
    said = broken(tmp_path, own)
    assert all(word in said for word in ("'fused-3'", "'FusedThing'", "'com.example'"))
    assert "'ai.onnx'" in broken(tmp_path, node("NonMaxSuppression", "h h", "y"))


@pytest.mark.parametrize("op", ["If", "Loop", "Scan"])
def test_what_holds_a_graph_is_named(tmp_path: Path, op: str) -> None:
    said = broken(tmp_path, onnx.helper.make_node(op, ["h"], ["y"], name="branch"))
    assert "'branch'" in said and repr(op) in said and "holds a graph" in said


def test_a_graph_in_an_attribute_of_any_operator_is_refused(tmp_path: Path) -> None:
    inner = onnx.helper.make_graph([], "inner", [], [])
    said = broken(tmp_path, onnx.helper.make_node("Relu", ["h"], ["y"], body=inner))
    assert "holds a graph" in said


def test_a_shape_that_depends_on_data(tmp_path: Path) -> None:
    value = onnx.helper.make_tensor_value_info
    nodes = [node("MatMul", "x W", "h"), node("Reshape", "h s", "y")]
    inputs = [value("x", FLOAT, [4, 4]), value("s", INT64, [2])]
    given = [weights("W", 4, 4)]
    graph = onnx.helper.make_graph(nodes, "g", inputs, [value("y", FLOAT, None)], given)
    path = tmp_path / "m.onnx"
    onnx.save(onnx.helper.make_model(graph), path)
    said = refused(path)
    assert "'Reshape-y'" in said and "not known before the data are" in said


def test_nothing_to_train(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", [node("Exp", "x", "y")], [], [4], [4], 13)
    assert "nothing to train" in refused(path)


# -- what is not in the file -----------------------------------------------------------------------


def external(path: Path) -> Path:
    """A model whose weights and shape lie in a file beside it."""
    nodes = [node("MatMul", "x W", "h"), node("Reshape", "h to", "y")]
    given = [weights("W", 64, 96), ints("to", 2, 48)]
    save(path, nodes, given, [1, 64], [2, 48], 14)
    model = onnx.load(path)
    onnx.save_model(model, path, save_as_external_data=True, location="m.data", size_threshold=0)
    return path


def test_external_data_are_read_where_a_shape_needs_them(tmp_path: Path) -> None:
    path = external(tmp_path / "m.onnx")
    assert path.stat().st_size < 1000
    assert kept_bytes(onnx_step(path).trace) == 96 * 4


def test_external_data_that_are_missing_where_a_shape_needs_them(tmp_path: Path) -> None:
    path = external(tmp_path / "m.onnx")
    (tmp_path / "m.data").unlink()
    assert "external data that a shape may need are missing: 'to'" in refused(path)


def test_a_model_of_more_than_two_gigabytes_needs_none_of_them(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    save(path, [node("MatMul", "x W", "y")], [weights("W", 2, 2)], [1, 30_000], None, 13)
    model = onnx.load(path)
    (tensor,) = model.graph.initializer
    tensor.ClearField("raw_data")
    tensor.dims[:] = [30_000, 20_000]
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights.bin")
    onnx.save(model, path)
    trace = onnx_step(path, optimizer="sgd").trace
    assert trace.peak_bytes > 2 * 30_000 * 20_000 * 4 > 4 * GIB


def test_a_file_of_two_gigabytes_is_told_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    with path.open("wb") as file:
        file.truncate(2 * GIB)  # sparse
    assert "save_as_external_data=True" in refused(path)


# -- no model, or a hostile one --------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [b"", b"not a model", b"\x00" * 100, b"\x08\x08", bytes(range(256)) * 10]
)
def test_a_file_that_is_not_onnx(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    assert "is not a model in ONNX" in refused(path)


def test_a_file_that_is_not_there_or_a_folder(tmp_path: Path) -> None:
    assert "cannot read" in refused(tmp_path / "none.onnx")
    assert "not a regular file" in refused(tmp_path)


@pytest.mark.parametrize("seed", range(150))
def test_a_model_with_wrong_bytes_is_read_or_refused(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    content = bytearray(two_layers(tmp_path / "m.onnx", 4).read_bytes())
    head = [n for n in range(len(content)) if n < 250 or n > len(content) - 200]
    for place in rng.choice(head, 3):
        content[int(place)] = int(rng.integers(256))
    path = tmp_path / "wrong.onnx"
    path.write_bytes(content)
    try:
        onnx_step(path)
    except OnnxError as error:
        assert str(error)


def test_a_cycle_is_refused(tmp_path: Path) -> None:
    said = broken(tmp_path, node("Add", "h b", "a"), node("Relu", "a", "b"))
    assert "'Add-a' reads 'b' before any node makes it" in said


def test_names_that_are_there_twice(tmp_path: Path) -> None:
    assert "'h', which already exists" in broken(tmp_path, node("Relu", "h", "h"))
    assert "the same name" in broken(tmp_path, node("Relu", "h", "y"), given=[weights("W", 4, 4)])


def test_dims_that_are_negative_or_of_no_machine(tmp_path: Path) -> None:
    assert "--size x[0]=N" in broken(tmp_path, node("Relu", "h", "y"), shape=[-4, 4])
    huge = [1 << 40, 1 << 40]
    assert "no machine has" in broken(tmp_path, node("Relu", "h", "y"), shape=huge)
    tensor = onnx.TensorProto(name="b", data_type=FLOAT, dims=[1 << 62, 4])
    assert "no machine has" in broken(tmp_path, node("Add", "h b", "y"), given=[tensor])
    tensor = onnx.TensorProto(name="b", data_type=FLOAT, dims=[-1])
    assert "has the shape (-1,)" in broken(tmp_path, node("Add", "h b", "y"), given=[tensor])


def test_products_of_dims_that_overflow(tmp_path: Path) -> None:
    tiles = ints("n", 1 << 31, 1 << 31)
    said = broken(tmp_path, node("Tile", "h n", "t"), node("Relu", "t", "y"), given=[tiles])
    assert "'t'" in said or "'Tile-t'" in said


def test_contents_that_are_not_as_large_as_they_say(tmp_path: Path) -> None:
    tensor = onnx.TensorProto(name="to", data_type=INT64, dims=[5], raw_data=b"12345678")
    said = broken(tmp_path, node("Reshape", "h to", "y"), given=[tensor])
    assert "contents that do not match its shape" in said


def test_types_that_no_gpu_computes_with(tmp_path: Path) -> None:
    text = onnx.helper.make_tensor("b", onnx.TensorProto.STRING, [1], [b"x"])
    assert "holds text" in broken(tmp_path, node("Add", "h b", "y"), given=[text])
    tensor = onnx.TensorProto(name="b", data_type=99, dims=[1])
    assert "a type that umem does not know" in broken(
        tmp_path, node("Add", "h b", "y"), given=[tensor]
    )


def doubling(path: Path) -> None:
    nodes = [node("Shape", "x", "s0")]
    nodes += [node("Concat", f"s{n} s{n}", f"s{n + 1}", axis=0) for n in range(60)]
    nodes += [node("MatMul", "x W", "h"), node("Reshape", "h s60", "y")]
    save(path, nodes, [weights("W", 4, 4)], [4, 4], None, 14)


def ranks(path: Path) -> None:
    nodes = [node("MatMul", "x W", "h0")]
    nodes += [node("Unsqueeze", f"h{n} axes", f"h{n + 1}") for n in range(200)]
    nodes += [node("Relu", "h200", "y")]
    axes = ints("axes", *range(4000))
    save(path, nodes, [weights("W", 4, 4), axes], [4, 4], None, 13)


def large_shape(path: Path) -> None:
    """A constant that says it has as many numbers as fill 1 GiB, for a Reshape."""
    tensor = onnx.TensorProto(data_type=INT64, dims=[1 << 27], raw_data=b"\x01" * 64)
    nodes = [onnx.helper.make_node("Constant", [], ["s"], value=tensor)]
    nodes += [node("MatMul", "x W", "h"), node("Reshape", "h s", "y")]
    save(path, nodes, [weights("W", 4, 4)], [4, 4], None, 14)


def filled(path: Path) -> None:
    nodes = [node("ConstantOfShape", "n", "s"), node("MatMul", "x W", "h")]
    nodes += [node("Expand", "s n2", "e"), node("Reshape", "h e", "y")]
    given = [weights("W", 4, 4), ints("n", 1 << 40), ints("n2", 1 << 40)]
    save(path, nodes, given, [4, 4], None, 14)


def nested(path: Path) -> None:
    """Graphs in graphs, 20,000 deep, by the wire format: length and content, again and again."""

    def field(number: int, content: bytes) -> bytes:
        size, length = len(content), b""
        while size > 127:
            length += bytes([size & 127 | 128])
            size >>= 7
        return bytes([number << 3 | 2]) + length + bytes([size]) + content

    content = b""
    for _ in range(5_000):  # GraphProto.node = 1, NodeProto.attribute = 5, AttributeProto.g = 6
        content = field(1, field(5, field(6, content)))
    path.write_bytes(b"\x08\x08" + field(7, content))


def many_inputs(path: Path) -> None:
    """An Einsum and a sum with thousands of inputs."""
    nodes = [node("MatMul", "x W", "h")]
    nodes += [onnx.helper.make_node("Sum", ["h"] * 20_000, ["s"])]
    nodes += [onnx.helper.make_node("Einsum", ["s"] * 500, ["y"], equation="," * 10_000)]
    save(path, nodes, [weights("W", 4, 4)], [4, 4], None, 13)


HOSTILE = (doubling, ranks, large_shape, filled, nested, many_inputs)


@pytest.mark.thorough
@pytest.mark.parametrize("write", HOSTILE, ids=[write.__name__ for write in HOSTILE])
def test_a_hostile_model_is_refused_within_two_gibibytes(tmp_path: Path, write: Any) -> None:
    path = tmp_path / "m.onnx"
    write(path)
    code = (
        "import sys; from umem.errors import OnnxError; from umem.onnx import onnx_step\n"
        "import onnx, onnx.helper, onnx.shape_inference, onnx.numpy_helper\n"
        "try: onnx_step(sys.argv[1])\n"
        "except OnnxError as error: print('refused:', str(error)[:300])"
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (2 * GIB, 2 * GIB))

    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True, text=True, preexec_fn=limit, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.startswith("refused:"), done.stderr[-2000:]


def test_without_onnx_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = two_layers(tmp_path / "m.onnx", 4)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingDependencyError) as caught:
        graph_of(path)
    assert extras.command("onnx") in str(caught.value)
