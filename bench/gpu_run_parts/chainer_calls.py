"""First light of what is Chainer's: each public function once, beside plain Chainer or NumPy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

import umem
from gpu_run_parts.calls import Calls, Given

CALLS = Calls()
NEEDS = ("chainer", "scipy")
call = partial(CALLS, needs=NEEDS)
GPU = "@cupy:0"


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


@call("umem.chainer.checkpoint", "umem.chainer.checkpointed", "umem.chainer.checkpoint_sequential")
def checkpoint(given: Given) -> Any:
    F = chainer().functions
    found = {}
    for name in ("plain", "checkpoint", "checkpointed", "checkpoint_sequential"):
        model = network().predictor
        x, t = batch()
        if name == "plain":
            y = model(x)
        elif name == "checkpoint_sequential":
            y = umem.chainer.checkpoint_sequential(list(model), chainer().Variable(x), segments=2)
        elif name == "checkpoint":
            y = umem.chainer.checkpoint(model, chainer().Variable(x))
        else:
            y = umem.chainer.checkpointed(model.forward)(chainer().Variable(x))
        model.cleargrads()
        F.softmax_cross_entropy(y, t).backward()
        found[name] = model[0].W.grad.get().tobytes()
    assert len(set(found.values())) == 1


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


@call("umem.chainer.AccumulatingUpdater", "umem.chainer.MemoryReport", "umem.chainer.Snapshot")
def trainer(given: Given) -> Any:
    """A trainer with parts of a batch, the memory in its log, and a snapshot that is resumed."""
    training = chainer().training

    def run(updates: int) -> list[Any]:
        model, (x, t) = network(), batch()
        optimizer = chainer().optimizers.SGD().setup(model)
        rows = chainer().datasets.TupleDataset(x.get(), t.get())
        batches = chainer().iterators.SerialIterator(rows, 64, shuffle=False)
        updater = umem.chainer.AccumulatingUpdater(batches, optimizer, 32, device=GPU)
        made = training.Trainer(updater, (updates, "iteration"), out=str(given.folder))
        every = (1, "iteration")
        log = training.extensions.LogReport(trigger=every)
        made.extend(umem.chainer.MemoryReport(trigger=every))
        made.extend(log)
        made.extend(umem.chainer.Snapshot(every=2))
        made.run()
        return list(log.log)

    first, second = run(2), run(4)
    assert len(second) == 4 and second[:2] == first and second[-1]["memory/peak_MiB"] > 0
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


@call(
    "umem.chainer.optimizers.Adam8bit",
    "umem.chainer.optimizers.AdamW8bit",
    "umem.chainer.optimizers.MomentumSGD8bit",
)
def states_of_8_bits(given: Given) -> Any:
    chainer()
    found = {}
    for name in ("Adam", "AdamW", "MomentumSGD"):
        small = getattr(umem.chainer.optimizers, f"{name}8bit")(least_size=0)
        whole = getattr(chainer().optimizers, name)()
        found[name] = near(losses(optimizer=small), losses(optimizer=whole), 2e-2)
    return found


@call("umem.chainer.optimizers.quantize_states", "umem.chainer.optimizers.dequantize_states")
def quantize_states(given: Given) -> Any:
    chainer()
    turn = umem.chainer.optimizers

    def change(model: Any, optimizer: Any) -> None:
        turn.quantize_states(optimizer, least_size=0)
        optimizer.update(model, *batch())
        turn.dequantize_states(optimizer)

    return {"losses": losses(change=change)}


@call("umem.chainer.slimmer", "umem.chainer.tie")
def slimmer(given: Given) -> Any:
    L = chainer().links
    model = chainer().Sequential(L.Convolution2D(3, 8, 3), L.Linear(32, 32), L.Linear(32, 32))
    model.to_device(GPU)
    x = model.xp.ones((2, 3, 4, 4), "f")
    layers = umem.chainer.layers
    with_rank = {"/0": layers.Separable(), "/1": layers.LowRank(rank=2)}
    slim = umem.chainer.slimmer(model, with_rank, x, quiet=True)
    assert model(x).shape == (2, 32)
    slim.undo()
    ties = umem.chainer.tie(model, "/1/W", "/2/W")
    assert model[1].W is model[2].W
    ties.undo()
    return str(slim)


@call(
    "umem.chainer.layers.LowRank",
    "umem.chainer.layers.Separable",
    "umem.chainer.layers.Grouped",
    "umem.chainer.layers.TiedTo",
    "umem.chainer.layers.LowRankLinear",
    "umem.chainer.layers.LowRankEmbedID",
    "umem.chainer.layers.SeparableConvolution2D",
    "umem.chainer.layers.in_groups",
)
def layers(given: Given) -> None:
    """Each layer beside itself on NumPy; each rule on a model on the GPU."""
    L, made = chainer().links, umem.chainer.layers
    image, words = np.ones((2, 4, 6, 6), "f"), np.arange(6, dtype="i").reshape(2, 3)
    links = (
        (made.LowRankLinear(144, 8, rank=3), image),
        (made.LowRankEmbedID(10, 8, rank=3), words),
        (made.SeparableConvolution2D(4, 8, 3), image),
        (made.in_groups(L.Convolution2D(4, 8, 3), 2), image),
    )
    for link, x in links:
        wanted = link(x).array
        link.to_device(GPU)
        np.testing.assert_allclose(link(link.xp.asarray(x)).array.get(), wanted, 1e-4, 1e-5)
    rules = (
        ("/0", made.Grouped(2), (L.Convolution2D(4, 8, 3),)),
        ("/1", made.TiedTo("/0"), (L.Linear(8, 8), L.Linear(8, 8))),
    )
    for place, rule, parts in rules:
        model = chainer().Sequential(*parts)
        model.to_device(GPU)
        umem.chainer.slimmer(model, {place: rule}, quiet=True)
        shape = (2, 4, 6, 6) if len(parts) == 1 else (2, 8)
        assert model(model.xp.ones(shape, "f")).shape[0] == 2


@call(
    "umem.chainer.quantize",
    "umem.chainer.quantization_aware",
    "umem.chainer.save_quantized",
    "umem.chainer.load_quantized",
)
def quantize(given: Given) -> Any:
    x, t = batch()
    called = []
    with chainer().using_config("train", False), chainer().no_backprop_mode():
        model = network().predictor
        plain = model(x).array.get()
        small = umem.chainer.quantize(model, x, 8)
        called.append(small(x).array.get())
        umem.chainer.save_quantized(given.folder / "net", small)
        called.append(
            umem.chainer.load_quantized(given.folder / "net", network().predictor)(x).array.get()
        )
    assert np.array_equal(*called)
    aware = network()
    training = umem.chainer.quantization_aware(aware.predictor, 8)
    optimizer = chainer().optimizers.SGD().setup(aware)
    optimizer.update(aware, x, t)
    training.undo()
    off = float(np.abs(called[0] - plain).max() / np.abs(plain).max())
    assert off < 0.1
    return {"off": off}


@call("umem.chainer.DistillingUpdater", "umem.chainer.DistillingLoss")
def distilling(given: Given) -> None:
    x, t = batch()
    student, teacher = network(), network().predictor
    optimizer = chainer().optimizers.SGD().setup(student.predictor)
    loss = umem.chainer.DistillingLoss(optimizer, teacher)
    optimizer.update(loss, x, t)
    rows = chainer().datasets.TupleDataset(x.get(), t.get())
    batches = chainer().iterators.SerialIterator(rows, 64)
    umem.chainer.DistillingUpdater(batches, optimizer, network().predictor, device=GPU).update()
    assert np.isfinite(student.predictor[0].W.array.get()).all()


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
