"""First light of what is Chainer's: each public function once, beside plain Chainer or NumPy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

import umem
from gpu_run_parts.calls import Call, Calls, Given

CALLS = Calls()
NEEDS = ("chainer", "scipy")
call = partial(CALLS, needs=NEEDS)
GPU = "@cupy:0"


def each(module: str, *names: str) -> Callable[[Any], Any]:
    """Add a call a name: of a function that gets the name as well."""

    def add(function: Any) -> Any:
        for name in names:
            run = partial(function, name=name)
            CALLS.append(Call(name, run, (f"{module}.{name}",), NEEDS))
        return function

    return add


def chainer() -> Any:
    """Import Chainer under umem, with the GPU as its device."""
    from umem import chainer as layer  # isort: skip  (before Chainer, whose layer it is)
    import chainer as found

    assert layer.__all__
    with warnings.catch_warnings():  # of cuDNN, which CuPy 14 does not have
        warnings.simplefilter("ignore")
        found.get_device(GPU).use()
    return found


def network(width: int = 64, depth: int = 6) -> Any:
    """Make a perceptron on the GPU."""
    L, F = chainer().links, chainer().functions
    np.random.seed(0)
    layers = [layer for _ in range(depth) for layer in (L.Linear(width, width), F.relu)]
    model = L.Classifier(chainer().Sequential(*layers, L.Linear(width, 4)))
    model.to_device(GPU)
    return model


def batch(rows: int = 256, width: int = 64) -> tuple[Any, Any]:
    """Make a batch on the GPU."""
    random = np.random.RandomState(1)
    x, t = random.randn(rows, width).astype("f4"), random.randint(0, 4, rows).astype("i4")
    send = chainer().get_device(GPU).send
    return send(x), send(t)


def losses(
    block: AbstractContextManager[Any] | None = None,
    optimizer: Any = None,
    change: Callable[[Any, Any], Any] | None = None,
    steps: int = 3,
) -> list[float]:
    """Train some steps in a block; ``change`` gets the model and its optimizer before, and
    returns what is to be undone after them, or nothing."""
    made = chainer().optimizers.Adam() if optimizer is None else optimizer
    model = network()
    made.setup(model)
    changed = None if change is None else change(model, made)
    x, t = batch()
    found = []
    with nullcontext() if block is None else block:
        for _ in range(steps):
            made.update(model, x, t)
            found.append(float(model.loss.array))
    if changed is not None:
        changed.undo()
    return found


def near(found: list[float], wanted: list[float], rtol: float) -> dict[str, Any]:
    """Check that losses are alike."""
    np.testing.assert_allclose(found, wanted, rtol=rtol)
    return {"losses": found, "plain": wanted}


def same(found: list[float]) -> dict[str, Any]:
    """Check that losses have the bits of plain Chainer's."""
    return near(found, losses(), 0)


@call("umem.chainer.device")
def device(given: Given) -> str:
    chainer()
    with umem.managed():
        found = umem.chainer.device()
        assert found.name == GPU
    return str(found)


@call("umem.chainer.Recompute")
def recompute(given: Given) -> Any:
    chainer()
    with umem.chainer.Recompute("80%") as memory:
        found = losses(steps=5)
    return {**near(found, losses(steps=5), 0), "report": str(memory.report())}


@call("umem.chainer.Offload")
def offload(given: Given) -> Any:
    chainer()
    with umem.chainer.Offload() as moves:
        found = losses()
    return {**same(found), "report": str(moves)}


@call("umem.chainer.LookaheadPrefetch")
def lookahead_prefetch(given: Given) -> Any:
    chainer()
    with umem.managed(), umem.chainer.LookaheadPrefetch() as ahead:
        found = losses()
    assert ahead.report().off is None, ahead.report().off
    return same(found)


def gradient(name: str) -> bytes:
    """Compute a gradient plainly, or under a function of umem's; its bits."""
    F = chainer().functions
    model = network().predictor
    x, t = batch()
    x = chainer().Variable(x)
    ways: dict[str, Callable[[], Any]] = {
        "plain": lambda: model(x),
        "checkpoint": lambda: umem.chainer.checkpoint(model, x),
        "checkpointed": lambda: umem.chainer.checkpointed(model.forward)(x),
        "checkpoint_sequential": lambda: umem.chainer.checkpoint_sequential(list(model), x, 2),
    }
    y = ways[name]()
    model.cleargrads()
    F.softmax_cross_entropy(y, t).backward()
    bits: bytes = model[0].W.grad.get().tobytes()
    return bits


@each("umem.chainer", "checkpoint", "checkpointed", "checkpoint_sequential")
def same_gradient(given: Given, name: str) -> None:
    assert gradient(name) == gradient("plain")


@call("umem.chainer.workspace")
def workspace(given: Given) -> None:
    L, F = chainer().links, chainer().functions
    found = []
    for cap in (None, "64KiB"):
        np.random.seed(0)
        link = L.Convolution2D(4, 8, 3, pad=1).to_device(GPU)
        x = link.xp.ones((4, 4, 16, 16), "f")
        with nullcontext() if cap is None else umem.chainer.workspace(cap):
            F.sum(link(x)).backward()
        found.append(link.W.grad.get())
    np.testing.assert_allclose(*found, rtol=1e-5)


@call("umem.chainer.chunked_updates")
def chunked_updates(given: Given) -> Any:
    chainer()
    return same(losses(umem.chainer.chunked_updates()))


@call("umem.chainer.saved_in")
def saved_in(given: Given) -> Any:
    chainer()
    return near(losses(umem.chainer.saved_in("bfloat16")), losses(), 1e-2)


@call("umem.chainer.half_precision")
def half_precision(given: Given) -> Any:
    chainer()
    return near(losses(change=umem.chainer.half_precision), losses(), 2e-2)


@call("umem.chainer.accumulate")
def accumulate(given: Given) -> Any:
    """A batch in parts gives the weights of the whole batch."""
    found = []
    for parts in (False, True):
        model, (x, t) = network(), batch()
        optimizer = chainer().optimizers.SGD(0.1).setup(model)
        whole = umem.chainer.accumulate(optimizer, micro_batch=64) if parts else nullcontext()
        with whole:
            for _ in range(2):
                optimizer.update(model, x, t)
        found.append(model.predictor[0].W.array.get())
    np.testing.assert_allclose(*found, 1e-4, 1e-6)


@each("umem.chainer", "AccumulatingUpdater", "MemoryReport", "Snapshot")
def trainer(given: Given, name: str) -> Any:
    """Train with a trainer, stop, and train again to a later end; its log."""
    training = chainer().training
    every = (1, "iteration")

    def run(updates: int) -> list[Any]:
        model, (x, t) = network(), batch()
        optimizer = chainer().optimizers.SGD().setup(model)
        rows = chainer().datasets.TupleDataset(x.get(), t.get())
        batches = chainer().iterators.SerialIterator(rows, 64, shuffle=False)
        if name == "AccumulatingUpdater":
            updater = umem.chainer.AccumulatingUpdater(batches, optimizer, 32, device=GPU)
        else:
            updater = training.StandardUpdater(batches, optimizer, device=GPU)
        made = training.Trainer(updater, (updates, "iteration"), out=str(given.folder))
        if name == "MemoryReport":
            made.extend(umem.chainer.MemoryReport(trigger=every))
        log = training.extensions.LogReport(trigger=every)
        made.extend(log)
        if name == "Snapshot":
            made.extend(umem.chainer.Snapshot(every=2))
        made.run()
        return list(log.log)

    first, second = run(2), run(4)
    assert len(second) == 4 and second[1]["main/loss"] == first[1]["main/loss"]
    if name == "Snapshot":
        assert second[:2] == first  # with its times: the second run has begun behind them
    if name == "MemoryReport":
        assert second[-1]["memory/peak_MiB"] > 0
    return second[-1]


@call("umem.chainer.save_run", "umem.chainer.resume_run")
def save_run(given: Given) -> Any:
    chainer()
    model, (x, t) = network(), batch()
    optimizer = chainer().optimizers.Adam().setup(model)
    folder = given.folder / "run"
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
    begun = umem.chainer.resume_run(folder, **parts)
    optimizer.update(model, x, t)
    umem.chainer.save_run(folder, wait=True, **parts)
    wanted = model.predictor[0].W.array.get()
    other = network()
    again: dict[str, Any] = {"model": other, "optimizer": chainer().optimizers.Adam().setup(other)}
    done = umem.chainer.resume_run(folder, **again)
    assert (begun.step, done.step) == (0, 1)
    assert np.array_equal(other.predictor[0].W.array.get(), wanted)


@each("umem.chainer.optimizers", "Adam8bit", "AdamW8bit", "MomentumSGD8bit")
def states_of_8_bits(given: Given, name: str) -> Any:
    chainer()
    small = getattr(umem.chainer.optimizers, name)(least_size=0)
    whole = getattr(chainer().optimizers, name.removesuffix("8bit"))()
    return near(losses(optimizer=small), losses(optimizer=whole), 2e-2)


@call("umem.chainer.optimizers.quantize_states", "umem.chainer.optimizers.dequantize_states")
def quantize_states(given: Given) -> Any:
    chainer()
    turn = umem.chainer.optimizers

    def change(model: Any, optimizer: Any) -> None:
        turn.quantize_states(optimizer, least_size=0)
        optimizer.update(model, *batch())
        turn.dequantize_states(optimizer)

    return {"losses": losses(change=change)}


@call("umem.chainer.slimmer")
def slimmer(given: Given) -> Any:
    layers = umem_layers()
    model = on_gpu(chainer().links.Convolution2D(3, 8, 3), chainer().links.Linear(32, 32))
    x = model.xp.ones((2, 3, 4, 4), "f")
    before = model(x).array.get()
    rules = {"/0": layers.Separable(), "/1": layers.LowRank(rank=2)}
    slim = umem.chainer.slimmer(model, rules, x, quiet=True)
    assert model(x).shape == (2, 32)
    slim.undo()
    assert np.array_equal(model(x).array.get(), before)
    return str(slim)


@call("umem.chainer.tie")
def tie(given: Given) -> None:
    model = on_gpu(chainer().links.Linear(8, 8), chainer().links.Linear(8, 8))
    ties = umem.chainer.tie(model, "/0/W", "/1/W")
    assert model[0].W is model[1].W and model(model.xp.ones((2, 8), "f")).shape == (2, 8)
    ties.undo()
    assert model[0].W is not model[1].W


def on_gpu(*links: Any) -> Any:
    """Make a model of some links on the GPU."""
    model = chainer().Sequential(*links)
    model.to_device(GPU)
    return model


def umem_layers() -> Any:
    """Import umem's layers, after Chainer under umem."""
    chainer()
    return umem.chainer.layers


@each(
    "umem.chainer.layers",
    "LowRankLinear", "LowRankEmbedID", "SeparableConvolution2D", "in_groups",
)  # fmt: skip
def layer(given: Given, name: str) -> None:
    """A layer beside itself on NumPy."""
    made, image = umem_layers(), np.ones((2, 4, 6, 6), "f")
    makers: dict[str, tuple[Callable[[], Any], Any]] = {
        "LowRankLinear": (lambda: made.LowRankLinear(144, 8, rank=3), image),
        "LowRankEmbedID": (
            lambda: made.LowRankEmbedID(10, 8, rank=3), np.arange(6, dtype="i").reshape(2, 3),
        ),
        "SeparableConvolution2D": (lambda: made.SeparableConvolution2D(4, 8, 3), image),
        "in_groups": (lambda: made.in_groups(chainer().links.Convolution2D(4, 8, 3), 2), image),
    }  # fmt: skip
    make, x = makers[name]
    link = make()
    wanted = link(x).array
    link.to_device(GPU)
    np.testing.assert_allclose(link(link.xp.asarray(x)).array.get(), wanted, 1e-4, 1e-5)


@each("umem.chainer.layers", "LowRank", "Separable", "Grouped", "TiedTo")
def rule(given: Given, name: str) -> None:
    """A rule of slimmer, on a model on the GPU."""
    made, L = umem_layers(), chainer().links
    makers: dict[str, tuple[str, Callable[[], Any]]] = {
        "LowRank": ("/1", lambda: made.LowRank(rank=2)),
        "Separable": ("/0", made.Separable),
        "Grouped": ("/0", lambda: made.Grouped(2)),
        "TiedTo": ("/2", lambda: made.TiedTo("/1")),
    }
    place, make = makers[name]
    model = on_gpu(L.Convolution2D(4, 8, 3), L.Linear(32, 32), L.Linear(32, 32))
    x = model.xp.ones((2, 4, 4, 4), "f")
    umem.chainer.slimmer(model, {place: make()}, x, quiet=True)
    assert model(x).shape == (2, 32)


def called(model: Any) -> Any:
    """Call a model, as one that is not trained."""
    with chainer().using_config("train", False), chainer().no_backprop_mode():
        return model(batch()[0]).array.get()


@call("umem.chainer.quantize")
def quantize(given: Given) -> Any:
    model = network().predictor
    plain = called(model)
    found = called(umem.chainer.quantize(model, batch()[0], 8))
    off = float(np.abs(found - plain).max() / np.abs(plain).max())
    assert 0 < off < 0.1
    return {"off": off}


@call("umem.chainer.save_quantized", "umem.chainer.load_quantized")
def save_quantized(given: Given) -> None:
    small = umem.chainer.quantize(network().predictor, batch()[0], 8)
    umem.chainer.save_quantized(given.folder / "net", small)
    read = umem.chainer.load_quantized(given.folder / "net", network().predictor)
    assert np.array_equal(called(read), called(small))


@call("umem.chainer.quantization_aware")
def quantization_aware(given: Given) -> Any:
    def change(model: Any, optimizer: Any) -> Any:
        return umem.chainer.quantization_aware(model.predictor, 8)

    return near(losses(change=change), losses(), 5e-2)


@call("umem.chainer.DistillingLoss")
def distilling_loss(given: Given) -> None:
    student, teacher = network(), network().predictor
    optimizer = chainer().optimizers.SGD().setup(student.predictor)
    loss = umem.chainer.DistillingLoss(optimizer, teacher)
    optimizer.update(loss, *batch())
    assert np.isfinite(student.predictor[0].W.array.get()).all()


@call("umem.chainer.DistillingUpdater")
def distilling_updater(given: Given) -> None:
    student, teacher = network(), network().predictor
    optimizer = chainer().optimizers.SGD().setup(student.predictor)
    rows = chainer().datasets.TupleDataset(*(array.get() for array in batch()))
    batches = chainer().iterators.SerialIterator(rows, 64)
    umem.chainer.DistillingUpdater(batches, optimizer, teacher, device=GPU).update()
    assert np.isfinite(student.predictor[0].W.array.get()).all()


@call(
    "umem.chainer.GCN",
    "umem.chainer.GraphConvolution",
    "umem.chainer.Adjacency",
    "umem.chainer.sparse_matmul",
)
def graph_convolution(given: Given) -> Any:
    """A network on a small graph, forward and backward on the GPU and on NumPy."""
    chainer()
    from umem.graphs import karate_club, normalised_adjacency

    graph, found = karate_club(), {}
    for place in ("@numpy", GPU):
        np.random.seed(0)
        model = umem.chainer.GCN(34, hidden=8, classes=2, layers=2)
        model.to_device(place)
        adjacency = umem.chainer.Adjacency(normalised_adjacency(graph)).to_device(place)
        features = chainer().get_device(place).send(graph.features)
        scores = model(adjacency, features) + umem.chainer.sparse_matmul(adjacency, features)[:, :2]
        model.cleargrads()
        loss = chainer().functions.mean(scores**2)
        loss.backward()
        layer = umem.chainer.GraphConvolution(34, 3).to_device(place)
        assert layer(adjacency, features).shape == (34, 3)
        found[place] = [float(loss.array), float((model[0].W.grad ** 2).sum())]
    return near(found[GPU], found["@numpy"], 1e-4)


@call(
    "umem.chainer.ParallelGraph",
    "umem.chainer.ParallelGraphConvolution",
    "umem.chainer.ParallelGCN",
    stand_in="one rank alone",
)
def parallel_graph(given: Given) -> Any:
    """A graph in two parts, trained on the GPU and on NumPy."""
    chainer()
    from umem.graphs import communities, cut

    graph = communities(240, 4, 1000, across=0.2, features=6, classes=3)
    cut(graph, 2, given.folder / "cut", assignment=np.arange(240) % 2)
    found = {}
    for place in ("@numpy", GPU):
        parts = umem.chainer.ParallelGraph(given.folder / "cut", graph=graph)
        np.random.seed(0)
        model = umem.chainer.ParallelGCN(None, 6, 8, 3)
        model.to_device(place)
        parts = parts.to_device(place)
        send = chainer().get_device(place).send
        optimizer = chainer().optimizers.SGD(0.1).setup(model)
        labels, features = parts.labels_where(parts.train_mask), send(parts.load_features())
        found[place] = []
        for _ in range(3):
            loss = parts.cross_entropy(model(parts, features), labels)
            model.cleargrads()
            loss.backward()
            optimizer.update()
            found[place].append(float(loss.array))
        layer = umem.chainer.ParallelGraphConvolution(None, 6, 8).to_device(place)
        assert layer(parts, features).shape == (240, 8)
    return near(found[GPU], found["@numpy"], 1e-4)


@call("umem.chainer.sharded", needs=(*NEEDS, "mpi4py"), stand_in="one rank alone")
def sharded(given: Given) -> Any:
    chainer()
    from mpi4py import MPI

    shards = umem.chainer.sharded(chainer().optimizers.Adam(), MPI.COMM_WORLD)
    return near(losses(optimizer=shards), losses(), 0)
