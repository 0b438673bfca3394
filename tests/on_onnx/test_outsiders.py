"""Models as other exporters write them, and files by people who wish umem ill."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.on_onnx.test_exporters import constant, kinds, refused
from tests.on_onnx.test_operators import FLOAT, ints, kept_bytes, node, save, weights
from umem.onnx import onnx_step
from umem.trace import Alloc

onnx = pytest.importorskip("onnx")


# -- as PyTorch writes them ----------------------------------------------------------------------


def test_heads_that_a_chain_of_shapes_splits_lie_in_their_product(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", "x onnx::MatMul_12", "/attn/h"),
        node("Shape", "/attn/h", "/attn/s"),
        constant("/attn/zero", 0),
        node("Gather", "/attn/s /attn/zero", "/attn/n", axis=0),
        constant("/attn/axes", [0]),
        node("Unsqueeze", "/attn/n /attn/axes", "/attn/n1"),
        constant("/attn/heads", [3]),
        constant("/attn/each", [4]),
        node("Concat", "/attn/n1 /attn/heads /attn/each", "/attn/to", axis=0),
        node("Reshape", "/attn/h /attn/to", "/attn/split"),
        node("Sigmoid", "/attn/split", "y"),
    ]
    given = [weights("onnx::MatMul_12", 8, 12)]
    step = onnx_step(save(tmp_path / "m.onnx", nodes, given, ["batch", 8], None, 17), {"batch": 5})
    assert kinds(step.trace, "parameter") == [8 * 12 * 4]
    assert kinds(step.trace, "activation") == [5 * 12 * 4, 5 * 12 * 4]  # the product, the sigmoid
    assert kept_bytes(step.trace) == 5 * 12 * 4  # the sigmoid: it reads its output


def test_a_weight_that_identities_share_is_one_parameter(tmp_path: Path) -> None:
    nodes = [
        node("Identity", "encoder.weight", "decoder.weight"),
        node("MatMul", "x encoder.weight", "h"),
        node("MatMul", "h decoder.weight", "y"),
    ]
    given = [weights("encoder.weight", 6, 6)]
    trace = onnx_step(save(tmp_path / "m.onnx", nodes, given, [4, 6], [4, 6], 17), None).trace
    assert kinds(trace, "parameter") == [6 * 6 * 4]
    assert kinds(trace, "state") == [6 * 6 * 4] * 2  # of Adam, once
    gradients = [e for e in trace.events if isinstance(e, Alloc) and e.label == "Add"]
    assert [e.nbytes for e in gradients] == [6 * 6 * 4]  # of both uses, added


def test_operators_of_the_first_version_have_shapes(tmp_path: Path) -> None:
    nodes = [node("MatMul", "x W", "h"), node("Relu", "h", "y", consumed_inputs=[0])]
    path = save(tmp_path / "m.onnx", nodes, [weights("W", 8, 4)], [2, 8], None, 1)
    assert kept_bytes(onnx_step(path).trace) == 2 * 4 * 4


def test_nodes_of_one_name_are_told_apart(tmp_path: Path) -> None:
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "W"], ["h"], name="same"),
        onnx.helper.make_node("Sigmoid", ["h"], ["r"], name="same"),
        onnx.helper.make_node("Sigmoid", ["r"], ["same"], name="r"),
        onnx.helper.make_node("Sigmoid", ["same"], ["y"], name="same"),
    ]
    path = save(tmp_path / "m.onnx", nodes, [weights("W", 4, 4)], [2, 4], [2, 4], 17)
    names = onnx_step(path).names
    assert names[0] == "same" and len(set(names)) == 4


def test_two_axes_of_one_name_have_one_size(tmp_path: Path) -> None:
    value = onnx.helper.make_tensor_value_info
    nodes = [node("Add", "x z", "h"), node("MatMul", "h W", "y")]
    graph = onnx.helper.make_graph(
        nodes, "g", [value("x", FLOAT, ["n", 4]), value("z", FLOAT, ["n", 4])],
        [value("y", FLOAT, None)], [weights("W", 4, 4)],
    )  # fmt: skip
    path = tmp_path / "m.onnx"
    onnx.save(onnx.helper.make_model(graph), path)
    assert kinds(onnx_step(path, {"n": 3}).trace, "input") == [3 * 4 * 4] * 2
    # One of them apart, by its place: shapes have to go together then.
    assert "contradict each other" in refused(path, {"n": 3, "z[0]": 2})


# -- hostile ---------------------------------------------------------------------------------------


def product(path: Path, **changes: Any) -> Any:
    save(path, [node("MatMul", "x W", "y")], [weights("W", 8, 4)], ["b", 8], None, 17)
    model = onnx.load(path)
    for name, value in changes.items():
        setattr(model, name, value)
    return model


@pytest.mark.parametrize("version", [-5, 0, 99, 1 << 40])
def test_versions_that_nobody_knows_are_refused(tmp_path: Path, version: int) -> None:
    path = tmp_path / "m.onnx"
    model = product(path)
    model.opset_import[0].version = version
    onnx.save(model, path)
    assert "operators of version" in refused(path, {"b": 2})


def test_what_is_there_twice_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    model = product(path)
    model.graph.output.append(model.graph.output[0])
    onnx.save(model, path)
    once = onnx_step(path, {"b": 2}).trace
    assert kinds(once, "gradient").count(2 * 4 * 4) == 1
    model.graph.input.append(model.graph.input[0])
    onnx.save(model, path)
    assert "two inputs" in refused(path, {"b": 2})
    model = product(path)
    del model.graph.output[:]
    onnx.save(model, path)
    assert "no output" in refused(path, {"b": 2})


@pytest.mark.parametrize("name", [b"b", b"MatMul-y", b"W"])
def test_names_that_are_no_text_are_refused(tmp_path: Path, name: bytes) -> None:
    path = tmp_path / "m.onnx"
    content = product(path).SerializeToString()
    tagged = bytes([len(name)]) + name
    assert tagged in content
    path.write_bytes(content.replace(tagged, tagged[:-1] + b"\xb8"))
    assert "is not text in UTF-8" in refused(path, {"b": 2})


def test_names_move_no_cursor(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    evil = "\x1b[2J\u202e"
    nodes = [node("MatMul", "x W", "y")]
    nodes[0].name = evil
    save(path, nodes, [weights("W", 8, 4)], [evil, 8], None, 17)
    assert refused(path).isprintable()
    assert refused(path, {evil: 0}).isprintable()
    nodes[0].op_type = evil
    save(path, nodes, [weights("W", 8, 4)], [2, 8], None, 17)
    assert refused(path).isprintable()


@pytest.mark.parametrize(
    "location", ["../out", "/etc/passwd", "/dev/zero", "link", "pipe", "", "a\0b", "x" * 5000]
)
def test_external_data_that_lead_elsewhere_are_not_read(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    outside = tmp_path / "out"
    outside.write_bytes(np.array([2, 4], np.int64).tobytes())
    os.symlink(outside, folder / "link")
    os.mkfifo(folder / "pipe")
    shape = ints("to", 2, 4)
    shape.ClearField("raw_data")
    shape.data_location = onnx.TensorProto.EXTERNAL
    entry = shape.external_data.add()
    entry.key, entry.value = "location", location
    nodes = [node("MatMul", "x W", "h"), node("Reshape", "h to", "y")]
    path = folder / "m.onnx"
    graph = onnx.helper.make_graph(
        nodes, "g", [onnx.helper.make_tensor_value_info("x", FLOAT, [2, 8])],
        [onnx.helper.make_tensor_value_info("y", FLOAT, None)], [weights("W", 8, 4), shape],
    )  # fmt: skip
    path.write_bytes(onnx.helper.make_model(graph).SerializeToString())
    assert "external data" in refused(path)
