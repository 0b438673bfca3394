"""A graph in parts on several ranks: the bits of one, the bytes of the plan, and bad input."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi_programs import needs_ranks, run_ranks
from project import ROOT
from software_programs import needs_compiler, needs_cupy

pytest.importorskip("pymetis", reason="a graph is cut by pymetis (umem's extra: mpi)")
from part_training import SAME_BITS, WAYS, train

pytestmark = needs_ranks

START = """
import json, sys
from pathlib import Path
from part_training import *
from mpi4py import MPI
world = MPI.COMM_WORLD
place = Path(sys.argv[1])
found = {}
"""
END = """
(place / f"{world.rank}.json").write_text(json.dumps(found))
"""


def on_ranks(count: int, program: str, folder: Path, *, before: str = "") -> list[dict[str, Any]]:
    """What each rank found, given a folder in `place`; `before` comes before any import of CuPy."""
    done = run_ranks(count, before + START + program + END, folder)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Has a cut into seven parts, which goes evenly to one rank and to seven."""
    from umem.graphs import communities, cut

    cut(communities(300, 6, 1500, across=0.1, seed=2, features=9, classes=4), 7, tmp_path / "cut")
    return tmp_path


@pytest.mark.thorough
def test_bits_are_the_same_on_one_to_five_ranks_and_bytes_those_of_the_plan(folder: Path) -> None:
    from umem.graphs import halo_plan, open_cut

    ranks = on_ranks(
        5,
        """
for size in range(1, 6):
    comm = world.Split(int(world.rank >= size), world.rank)
    if world.rank < size:
        found[size] = train(place / "cut", comm if size > 1 else None, updates=3)
    world.Barrier()
""",
        folder,
    )
    plain = ranks[0]["1"][:3]
    assert len(set(plain[0])) == 3 and np.isfinite(list(map(float.fromhex, plain[0]))).all()
    for size in range(1, 6):
        plan = halo_plan(open_cut(folder / "cut"), size)
        sent = 0
        for rank, found in enumerate(ranks[:size]):
            *said, sent_bytes, widths, parts = found[str(size)]
            assert said == plain
            assert list(plan.ranks[rank]) == parts
            assert sent_bytes == [plan.sent_bytes(rank, widths)] * 3
            sent += sent_bytes[0]
        assert sent == sum(plan.received_bytes(rank, widths) for rank in range(size))
        assert (sent > 0) == (size > 1)


@pytest.mark.slow
def test_whatever_else_is_on_bits_are_those_of_one_process(folder: Path) -> None:
    """ChainerMN's communicator, and messages that go in pieces."""
    ranks = on_ranks(
        2,
        f"""
import chainermn
import umem.chainer.parallel.ranks
umem.chainer.parallel.ranks.MESSAGE_BYTES = 1000
comm = chainermn.create_communicator("naive")
own = place / str(comm.rank)
own.mkdir()
for way in {WAYS}:
    found[way] = train(place / "cut", comm, way, place=own)[:3]
""",
        folder,
    )
    for way in WAYS:
        (folder / way).mkdir()
        alone = [*train(folder / "cut", None, way, place=folder / way)[:3]]
        assert ranks[0][way] == ranks[1][way] == alone, way
        assert (alone == ranks[0]["plain"]) == (way in SAME_BITS), way


@pytest.mark.thorough
def test_empty_parts_and_ranks_without_a_training_node(tmp_path: Path) -> None:
    """Three ranks of four parts, the second of which is empty; only the last has training nodes."""
    from umem.graphs import communities, cut

    graph = communities(120, 4, 500, across=0.2, features=4, classes=3)
    assignment = np.array([0, 2, 3])[np.arange(120) % 3]
    few = graph.train_mask & (assignment == 3)
    cut(replace(graph, train_mask=few), 4, tmp_path / "cut", assignment=assignment)
    ranks = on_ranks(
        3,
        """
opened = set()
sys.addaudithook(lambda event, args: opened.add(str(args[0])) if event == "open" else None)
found["trained"] = train(place / "cut", world)
found["opened"] = sorted(Path(p).name for p in opened if str(place) in p and "cut" in p
    and not p.endswith(".tmp"))  # marks of what was verified

graph = umem.chainer.ParallelGraph(place / "cut", world)
layer = umem.chainer.ParallelGraphConvolution(world, graph.feature_count, graph.class_count)
optimizer = chainer.optimizers.SGD(5.0).setup(layer)
x, labels = graph.load_features(), graph.labels_where(graph.val_mask)
found["training nodes"], found["best"], worse = int(graph.train_mask.sum()), 0.0, 0
for update in range(200):  # stop early, by each rank's own decision
    optimizer.update(lambda: graph.cross_entropy(layer(graph, x), graph.labels_where(
        graph.train_mask)))
    share = graph.accuracy(layer(graph, x), labels)
    worse = 0 if share > found["best"] else worse + 1
    found["best"] = max(share, found["best"])
    if worse == 3:
        break
found["stopped"] = update
""",
        tmp_path,
    )
    alone = [*train(tmp_path / "cut", None)[:3]]
    assert [rank["trained"][:3] for rank in ranks] == [alone] * 3
    assert [rank["training nodes"] for rank in ranks] == [0, 0, few.sum()]
    files = [["part-00000", "part-00001"], ["part-00002"], ["part-00003"]]
    for rank, own in zip(ranks, files, strict=True):
        assert rank["opened"] == ["cut.json", *(f"{name}.safetensors" for name in own)]
    stopped = {(rank["stopped"], rank["best"]) for rank in ranks}
    assert len(stopped) == 1 and 3 <= stopped.pop()[0] < 199


@pytest.mark.thorough
def test_what_one_rank_lacks_is_an_error_on_all(folder: Path) -> None:
    """Other data, a torn part, another umem, and more ranks than parts."""
    from umem.graphs import communities, cut

    graph = communities(300, 6, 1500, across=0.1, seed=3, features=9, classes=4)
    cut(graph, 7, folder / "other")
    cut(graph, 3, folder / "three")
    cut(graph, 2, folder / "two")
    torn = folder / "three" / "part-00001.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    ranks = on_ranks(
        3,
        """
def failed(name, where):
    try:
        umem.chainer.ParallelGraph(place / where, world)
    except umem.errors.UmemError as error:
        found[name] = [type(error).__name__, str(error)]

failed("data", "other" if world.rank == 2 else "cut")
failed("torn", "three")
failed("missing", "nowhere" if world.rank == 1 else "cut")
failed("too many", "two")
if world.rank == 1:
    umem.__version__ = "0.0.0"
failed("version", "cut")
""",
        folder,
    )
    wanted = {
        "data": ("DataError", "rank 2 on .* has another cut than rank 0"),
        "torn": ("DataError", "rank 1 on .*part-00001.safetensors .* it is damaged"),
        "missing": ("DataError", "rank 1 on .* there is no such file"),
        "too many": ("SizeError", "3 ranks for a graph in 2 parts: each needs at least one part"),
        "version": ("DataError", "rank 1 on .* has another version of umem than .* 0.0.0"),
    }
    for found in ranks:
        assert found.keys() == wanted.keys()
        for name, (kind, message) in wanted.items():
            assert found[name][0] == kind
            assert re.search(message, found[name][1])


@pytest.mark.thorough
def test_the_example_gives_the_same_alone_and_on_three_ranks(tmp_path: Path) -> None:
    printed = []
    for count in (1, 3):
        example = ROOT / "examples" / "09_graph_in_parts.py"
        options = [tmp_path / "cut", "--steps", "8"]
        done = run_ranks(count, example, *map(str, options))
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0].startswith("1 ranks; 8 steps") and "weights" in printed[0]
    assert printed[1] == printed[0].replace("1 ranks", "3 ranks")


@needs_cupy
@needs_compiler
@pytest.mark.thorough
def test_cupy_arrays_go_through_the_host_and_agree_to_rounding(folder: Path) -> None:
    """On the software GPU, two ranks with one each, beside NumPy arrays of the same ranks."""
    ranks = on_ranks(
        2,
        """
for device in ("@numpy", "@cupy:0"):
    np.random.seed(0)
    graph = umem.chainer.ParallelGraph(place / "cut", world).to_device(device)
    model = umem.chainer.ParallelGCN(world, 9, 6, graph.class_count, layers=2, dropout=0.3)
    optimizer = chainer.optimizers.SGD(0.5).setup(model)
    model.to_device(device)
    x, labels = graph.load_features(), graph.labels_where(graph.train_mask)
    for _ in range(3):
        optimizer.update(lambda: graph.cross_entropy(model(graph, x), labels))
    share = graph.accuracy(model(graph, x), labels)
    weights = [chainer.get_device("@numpy").send(p.array).tolist() for p in model.params()]
    found[device] = {"weights": weights, "share": share, "sent": graph.ranks.sent_bytes["halo"]}
try:
    graph.aggregate(np.zeros((graph.node_count, 2), np.float32))
except umem.errors.DeviceError as error:
    found["error"] = str(error)
""",
        folder,
        before="import umem; umem.software_gpu('t4', vram='256MiB')",
    )
    for found in ranks:
        assert "bring both to one device" in found["error"]
        numpy_, cupy = found["@numpy"], found["@cupy:0"]
        assert numpy_["sent"] == cupy["sent"] > 0
        assert numpy_["share"] == pytest.approx(cupy["share"], abs=0.02)
        for one, other in zip(numpy_["weights"], cupy["weights"], strict=True):
            np.testing.assert_allclose(one, other, 1e-5, 1e-6)
    assert ranks[0]["@cupy:0"]["weights"] == ranks[1]["@cupy:0"]["weights"]
