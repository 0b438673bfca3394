"""Each public function that needs no GPU, once; last, as they say nothing about one."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import umem
from gpu_run_parts.calls import Calls, Given

CALLS = call = Calls()
SCIPY = ("scipy",)


@call("umem.__version__")
def version(given: Given) -> str:
    return umem.__version__


@call("umem.virtual_gpu")
def virtual_gpu(given: Given) -> Any:
    with umem.virtual_gpu("t4", vram="8MiB") as gpu, umem.managed():
        assert float(gpu.xp.ones((4, 1 << 20), "f4").sum()) == 4 << 20
    return str(gpu.figures)


@call("umem.software_gpu", needs=("cupy",), seconds=15)
def software_gpu(given: Given) -> str:
    """In a process of its own, as CuPy has one driver a process."""
    code = "import umem; umem.software_gpu('t4', force=True); import cupy; print(cupy.zeros(5)[1:])"
    return printed("-c", code)


@call("umem.choose", needs=("cupy", "chainer", "scipy"), seconds=30)
def choose(given: Given) -> str:
    script, program = given.folder / "train.py", given.folder / "choose.py"
    script.write_text(
        "import cupy\nx = cupy.ones((1 << 20,), 'f4')\nfor _ in range(3): y = x * 2\n"
    )
    program.write_text(
        f"import umem\nif __name__ == '__main__': print(umem.choose({str(script)!r}, gpu='t4'))\n"
    )
    return printed(str(program))


def printed(*words: str) -> str:
    """Run Python without a software GPU from its start, as a rehearsal's programs have it."""
    before = os.environ.get("PYTHONPATH", "")
    parts = [part for part in before.split(os.pathsep) if Path(part).name != "on_software_gpu"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(parts)}
    command = [sys.executable, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-1000:]
    return done.stdout


@call("umem.compat.install", "umem.compat.is_installed", needs=("chainer", "scipy"))
def compat(given: Given) -> None:
    from umem import compat as layer

    layer.install()
    assert layer.is_installed()


@call("umem.compat.lend_removed_names")
def lend_removed_names(given: Given) -> None:
    from umem import compat as layer

    (given.folder / "old_package.py").write_text("import numpy as np\nkind = np.float\n")
    sys.path.insert(0, str(given.folder))
    try:
        layer.lend_removed_names("old_package")
        import old_package

        assert old_package.kind is float
    finally:
        sys.path.remove(str(given.folder))


@call(
    "umem.planner.plan",
    "umem.planner.min_budget",
    "umem.planner.pareto",
    "umem.planner.simulate",
    "umem.planner.Graph",
    "umem.planner.Node",
    "umem.planner.Plan",
    "umem.planner.Link",
    "umem.planner.Move",
    "umem.planner.Family",
    "umem.planner.register_method",
)
def planner(given: Given) -> Any:
    from umem import planner as p

    names = [f"n{number}" for number in range(8)]
    edges = list(pairwise(names))
    graph = p.Graph([p.Node(name, 1 << 20, 1.0) for name in names], edges)
    least = p.min_budget(graph)
    found = p.plan(graph, least)
    assert isinstance(found, p.Plan) and p.simulate(graph, found).peak_bytes <= least
    assert p.pareto(graph)
    linked = p.plan(graph, p.min_budget(graph), link=p.Link(1e12, 1e12))
    assert all(isinstance(move, p.Move) for move in linked.moves)
    whole = p.Family(lambda graph, model: (0, (1 << len(names)) - 1))
    p.register_method("all at once", whole)
    return {"least_bytes": least, "peak_bytes": found.peak_bytes}


@call(
    "umem.graphs.rmat",
    "umem.graphs.communities",
    "umem.graphs.karate_club",
    "umem.graphs.load_npz",
    "umem.graphs.save_npz",
    "umem.graphs.normalised_adjacency",
    "umem.graphs.Graph",
    "umem.graphs.cut",
    "umem.graphs.open_cut",
    "umem.graphs.Cut",
    "umem.graphs.halo_plan",
    "umem.graphs.HaloPlan",
    needs=SCIPY,
)
def graphs(given: Given) -> None:
    from umem import graphs as g

    graph = g.communities(240, 4, 1000, features=6, classes=3)
    assert isinstance(graph, g.Graph) and g.rmat(64, 256, 4, 2) and g.karate_club()
    g.save_npz(given.folder / "graph.npz", graph)
    assert np.array_equal(g.load_npz(given.folder / "graph.npz").indices, graph.indices)
    assert g.normalised_adjacency(graph).shape == (240, 240)
    made = g.cut(graph, 2, given.folder / "cut", assignment=np.arange(240) % 2)
    again = g.open_cut(given.folder / "cut", graph)
    assert isinstance(again, g.Cut) and again.nodes == made.nodes
    assert isinstance(g.halo_plan(again, 2), g.HaloPlan)


@call(
    "umem.data.cached",
    "umem.data.CachedDataset",
    "umem.data.DataCounters",
    "umem.data.known_order",
    "umem.data.KnownOrder",
    "umem.data.EpochBits",
    "umem.data.shuffle",
    "umem.data.with_replacement",
    "umem.data.Weighted",
    "umem.data.ClassBalanced",
    "umem.data.RawCodec",
)
def data(given: Given) -> Any:
    from umem import data as d

    items = [np.full(100, number, "f4") for number in range(20)]
    draws: tuple[Any, ...] = (
        d.shuffle, d.with_replacement, d.Weighted([1.0] * 20), d.ClassBalanced([0, 1] * 10),
    )  # fmt: skip
    for draw in draws:
        order = d.known_order(3, draw)
        assert isinstance(order, d.KnownOrder) and len(draw(d.EpochBits(3, 0), 20)) == 20
        kept = d.cached(items, "4KiB", order=order, codec=d.RawCodec())
        assert isinstance(kept, d.CachedDataset)
        drawn = order(np.arange(20), 0)
        assert [float(kept[int(number)][0]) for number in drawn] == list(drawn)
    assert isinstance(kept.counters, d.DataCounters)
    return str(kept.counters)


@call(
    "umem.data.CompressedRows",
    "umem.data.BloscCodec",
    "umem.data.CodecReport",
    "umem.data.RowsReport",
    "umem.data.KindReport",
    needs=("blosc2",),
)
def compressed(given: Given) -> Any:
    from umem import data as d

    rows = np.arange(4000, dtype="f4").reshape(-1, 4)
    packed = d.CompressedRows(rows)
    assert np.array_equal(packed[7], rows[7])
    kept = d.cached(list(rows), "4KiB", codec=d.BloscCodec())
    assert np.array_equal(kept[3], rows[3])
    report = packed.report()
    assert isinstance(report, d.RowsReport) and isinstance(report.codec, d.CodecReport)
    assert all(isinstance(one, d.KindReport) for one in report.codec.kinds)
    return str(report)


@call("umem.data.SparseRows", needs=SCIPY)
def sparse_rows(given: Given) -> None:
    from scipy import sparse

    from umem import data as d

    matrix = sparse.random(20, 30, 0.2, "csr", "f4", random_state=0)
    assert np.array_equal(d.SparseRows(matrix)[3].toarray().ravel(), matrix.toarray()[3])


@call("umem.data.JpegImages", "umem.data.LabeledJpegImages", needs=("simplejpeg",))
def jpeg_images(given: Given) -> None:
    import simplejpeg

    from umem import data as d

    image = np.full((16, 16, 3), 128, "u1")
    (given.folder / "a.jpg").write_bytes(simplejpeg.encode_jpeg(image))
    assert d.JpegImages(["a.jpg"], given.folder)[0].shape == (3, 16, 16)
    assert d.LabeledJpegImages([("a.jpg", 2)], given.folder)[0][1] == 2


@call("umem.onnx.onnx_step", "umem.onnx.graph_of", "umem.onnx.ExportedStep", needs=("onnx",))
def onnx(given: Given) -> None:
    from onnx import TensorProto, helper, save

    from umem import onnx as o

    tensors = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4, 4]) for n in "xy"]
    weight = helper.make_tensor("w", TensorProto.FLOAT, [4, 4], [1.0] * 16)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    graph = helper.make_graph(nodes, "one", tensors[:1], tensors[1:], [weight])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), given.folder / "m")
    (given.folder / "m").rename(given.folder / "m.onnx")
    step = o.onnx_step(given.folder / "m.onnx")
    assert isinstance(step, o.ExportedStep) and o.graph_of(given.folder / "m.onnx").nodes
