"""What ranks do in the tests of optimizers in shards; each case lists what is wrong with it.

``sharded_program.py FOLDER CASE...``, under mpiexec; rank r writes FOLDER/r.json.
"""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import umem

if "gpus" in sys.argv:  # before CuPy is imported
    umem.software_gpu("t4", vram="64MiB", force=True)

import umem.chainer  # isort: skip  (before Chainer, which it mends)
import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
from chainer import training
from mpi4py import MPI

from umem.chainer import optimizers as small
from umem.chainer.resume.loop_snapshots import close_all
from umem.errors import GradientError, StateError, UnsupportedError

COMM = MPI.COMM_WORLD
SAMPLES = 6
"""Of each rank and update."""


class Network(chainer.Chain):
    """Layers of odd sizes, so that cuts lie inside of parameters and of vector registers."""

    def __init__(self, seed: int = 0, units: int = 301) -> None:
        super().__init__()
        random = np.random.RandomState(seed)
        with self.init_scope():
            for name, (a, b) in {"a": (37, units), "b": (units, 113), "c": (113, 5)}.items():
                W = random.randn(b, a).astype(np.float32) / np.float32(np.sqrt(a))
                setattr(self, name, L.Linear(a, b, initialW=W))

    def forward(self, x: Any) -> Any:
        return self.c(F.relu(self.b(F.tanh(self.a(x.astype(self.a.W.dtype))))))


def batches(count: int, samples: int = SAMPLES) -> Iterator[tuple[Any, Any]]:
    """Each update's samples of this rank."""
    random = np.random.RandomState(1)
    for _ in range(count):
        x = random.randn(samples * COMM.size, 37).astype(np.float32)
        t = random.randint(0, 5, samples * COMM.size).astype(np.int32)
        yield x[COMM.rank :: COMM.size], t[COMM.rank :: COMM.size]


def average(model: Any) -> None:
    """Average gradients in the order of ranks; every rank has all of them."""
    for parameter in model.params():
        total, *others = [each.astype(np.float32) for each in COMM.allgather(parameter.grad)]
        for other in others:
            total = total + other
        parameter.grad = (total * np.float32(1.0 / COMM.size)).astype(parameter.dtype)


def trained(
    optimizer: Any,
    is_sharded: bool,
    updates: int = 5,
    prepare: Callable[[Any, Any], None] = lambda model, optimizer: None,
    model: Any = None,
) -> tuple[Any, Any]:
    """A model after some updates, and its optimizer."""
    model = Network() if model is None else model
    optimizer.setup(model)
    prepare(model, optimizer)
    if is_sharded:
        assert umem.chainer.sharded(optimizer, COMM) is optimizer
    for x, t in map(model.device.send, batches(updates)):

        def loss(x: Any = x, t: Any = t) -> Any:
            return F.softmax_cross_entropy(model(x), t)

        if is_sharded:
            optimizer.update(loss)
        else:
            model.cleargrads()
            loss().backward(loss_scale=optimizer._loss_scale)
            average(model)
            optimizer.update()
    return model, optimizer


def weights(model: Any) -> bytes:
    return b"".join(one.array.tobytes() for _, one in sorted(model.namedparams()))


def state_bytes(model: Any) -> int:
    states = (one.update_rule.state or {} for one in model.params())
    return sum(value.nbytes for state in states for value in state.values())


def compared(make: Callable[[], Any], what: str, **options: Any) -> list[str]:
    """What differs between an optimizer in shards and the same one whole."""
    whole, _ = trained(make(), False, **options)
    ours, _ = trained(make(), True, **options)
    found = []
    if weights(ours) != weights(whole):
        found.append(f"{what}: other weights")
    share, least = state_bytes(ours), state_bytes(whole) / COMM.size
    if share > least + 0.02 * state_bytes(whole):
        found.append(f"{what}: {share} bytes of state, where {least:.0f} are an equal share")
    return found


CHAINERS = (
    "SGD MomentumSGD CorrectedMomentumSGD NesterovAG AdaGrad AdaDelta Adam AdamW AMSGrad AdaBound "
    "AMSBound MSVAG RMSprop RMSpropGraves SMORMS3"
).split()


def optimizers() -> list[str]:
    """Every optimizer of Chainer's and of umem's."""
    kinds = [getattr(chainer.optimizers, name) for name in CHAINERS]
    kinds += [small.Adam8bit, small.AdamW8bit, small.MomentumSGD8bit]
    return [wrong for kind in kinds for wrong in compared(kind, kind.__name__)]


class Tied(chainer.Chain):
    """A table that words are looked up in, and scored by."""

    def __init__(self) -> None:
        super().__init__()
        random = np.random.RandomState(0)
        with self.init_scope():
            W = random.randn(301, 37).astype(np.float32)
            self.embed, self.score = L.EmbedID(301, 37, W), L.Linear(37, 301, initialW=W)
        umem.chainer.tie(self, "/embed/W", "/score/W")

    def forward(self, x: Any) -> Any:
        return self.score(F.tanh(self.embed(np.abs(x[:, 0] * 100).astype(np.int32) % 301)))[:, :5]


def tied() -> list[str]:
    """What is tied is one parameter: one shard of its state, one update."""
    found = []
    for kind in (chainer.optimizers.Adam, small.Adam8bit):
        whole, plain = trained(kind(), False, model=Tied())
        ours, optimizer = trained(kind(), True, model=Tied())
        if weights(ours) != weights(whole) or ours.embed.W is not ours.score.W:
            found.append(f"{kind.__name__}: other weights")
        shards = umem.chainer.parallel.sharding.shards_of(optimizer)
        if sorted(shards) != ["/embed/W", "/score/b"] or plain.t != optimizer.t:
            found.append(f"{kind.__name__}: shards {sorted(shards)}")
        if state_bytes(ours) > 0.53 * state_bytes(whole):
            found.append(f"{kind.__name__}: {state_bytes(ours)} of {state_bytes(whole)} here")
    model, _ = trained(chainer.optimizers.Adam(), True)
    before = weights(model)
    try:
        umem.chainer.slimmer(model, {"/a": umem.chainer.layers.LowRank(rank=2)})
        found.append("layers were exchanged whose state is in shards")
    except StateError as error:
        if "in shards" not in str(error) or weights(model) != before:
            found.append(f"refused by {error}")
    return found


def gpus() -> list[str]:
    """CuPy arrays: shards go through the host, and the device has its shard of the state."""

    def to_gpu(model: Any, optimizer: Any) -> None:
        model.to_device("@cupy:0")

    kinds = chainer.optimizers.Adam, chainer.optimizers.MomentumSGD, small.Adam8bit
    found = [wrong for kind in kinds for wrong in compared(kind, kind.__name__, prepare=to_gpu)]
    model, _ = trained(chainer.optimizers.Adam(), True, prepare=to_gpu)
    arrays = [*(one.array for one in model.params()), *model.a.W.update_rule.state.values()]
    if {type(array).__module__.partition(".")[0] for array in arrays} != {"cupy"}:
        found.append("an array left its device")
    plain, _ = trained(chainer.optimizers.Adam(), True)
    for ours, other in zip(model.params(), plain.params(), strict=True):
        if not np.allclose(ours.array.get(), other.array, rtol=1e-3, atol=1e-5):
            found.append("weights are others than NumPy's")
    return found


def adams() -> list[str]:
    """The two that most use."""
    kinds = chainer.optimizers.Adam, small.Adam8bit
    return [wrong for kind in kinds for wrong in compared(kind, kind.__name__)]


def hooks() -> list[str]:
    """Hooks that go by element; and those that need a norm, against float64 of whole gradients."""

    def by_element(model: Any, optimizer: Any) -> None:
        optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.01))
        optimizer.add_hook(chainer.optimizer_hooks.Lasso(0.001))
        optimizer.add_hook(chainer.optimizer_hooks.GradientHardClipping(-0.01, 0.02))
        model.a.W.update_rule.add_hook(chainer.optimizer_hooks.WeightDecay(0.1))

    found = compared(chainer.optimizers.MomentumSGD, "hooks by element", prepare=by_element)
    for hook in (
        chainer.optimizer_hooks.GradientClipping(0.1),
        chainer.optimizer_hooks.GradientLARS(weight_decay=0.01),
    ):

        def by_norm(model: Any, optimizer: Any, hook: Any = hook) -> None:
            optimizer.add_hook(hook)

        whole, _ = trained(chainer.optimizers.MomentumSGD(), False, prepare=by_norm)
        ours, _ = trained(chainer.optimizers.MomentumSGD(), True, prepare=by_norm)
        plain, _ = trained(chainer.optimizers.MomentumSGD(), True)
        for a, b in zip(whole.params(), ours.params(), strict=True):
            if not np.allclose(a.array, b.array, rtol=1e-5, atol=1e-7):
                found.append(f"{type(hook).__name__}: {np.abs(a.array - b.array).max()}")
        if weights(plain) == weights(ours):
            found.append(f"{type(hook).__name__} did nothing")
    return found


def halves() -> list[str]:
    """Masters are in shards; an overflow on one rank makes all skip; undone, weights are whole."""

    def run(is_sharded: bool) -> tuple[Any, Any, Any]:
        kept: list[Any] = []

        def prepare(model: Any, optimizer: Any) -> None:
            kept.append(umem.chainer.half_precision(model, optimizer, scale=256.0))

        model, optimizer = trained(chainer.optimizers.Adam(), is_sharded, prepare=prepare)
        return model, optimizer, kept[0]

    whole, _, of_whole = run(False)
    ours, optimizer, of_ours = run(True)
    found = [] if weights(ours) == weights(whole) else ["halves: other weights"]
    masters = sum(one.update_rule._fp32_param.array.size for one in ours.params())
    if masters > sum(one.size for one in ours.params()) / COMM.size * 1.03:
        found.append(f"halves: {masters} elements of masters here")
    before, t = weights(ours), optimizer.t
    ours.cleargrads()
    for one in ours.params():
        one.grad = np.ones_like(one.array)
    if COMM.rank == COMM.size - 1:
        ours.c.b.grad[0] = np.inf
    optimizer.update()
    if weights(ours) != before or optimizer.t != t or of_ours.skipped_steps != 1:
        found.append("halves: an overflow of one rank was not skipped by all")
    of_whole.undo()
    of_ours.undo()
    if weights(ours) != weights(whole) or ours.a.W.dtype != np.float32:
        found.append("halves: other weights after undo")
    return found


def continued(kind: Any, folder: Path, updates: int, **options: Any) -> tuple[Any, Any, Any]:
    """A run in shards that goes on from its folder, if there is something, and is saved."""
    model = Network()
    optimizer = umem.chainer.sharded(kind(), COMM).setup(model)
    if "half" in options:
        umem.chainer.half_precision(model, optimizer, scale=256.0)
    done = umem.chainer.resume_run(folder, comm=COMM, model=model, optimizer=optimizer)
    for step, (x, t) in enumerate(batches(updates, 60 // COMM.size)):
        if step >= done.step:
            optimizer.update(lambda x=x, t=t: F.softmax_cross_entropy(model(x), t))
            umem.chainer.save_run(folder, comm=COMM, model=model, optimizer=optimizer)
    return model, optimizer, done


def gathered_state(model: Any) -> dict[str, bytes]:
    """The whole state by name, put together from all ranks in their order."""
    mine = {
        f"{name}/{key}": value.tobytes()
        for name, one in sorted(model.namedparams())
        for key, value in sorted((one.update_rule.state or {}).items())
    }
    every = COMM.allgather(mine)
    return {name: b"".join(theirs[name] for theirs in every) for name in mine}


KINDS = {"adam": chainer.optimizers.Adam, "adam8": small.Adam8bit}


def begun() -> list[str]:
    """Three updates of each kind, saved; what the state is goes beside it."""
    for name, kind in KINDS.items():
        model, *_ = continued(kind, FOLDER / name, 3)
        state = gathered_state(model)
        if COMM.rank == 0:
            np.savez(
                FOLDER / f"{name}.npz",
                weights=np.frombuffer(weights(model), "u1"),
                **{
                    key.replace("/", "|"): np.frombuffer(value, "u1")
                    for key, value in state.items()
                },
            )
    return []


def resumed() -> list[str]:
    """On any number of ranks: the same weights and state as they were when they were saved."""
    found = []
    for name, kind in KINDS.items():
        model, optimizer, done = continued(kind, FOLDER / name, 3)
        there = np.load(FOLDER / f"{name}.npz")
        state = gathered_state(model)
        if done.step != 3 or optimizer.t != 3 or there["weights"].tobytes() != weights(model):
            found.append(f"{name}: step {done.step}, t {optimizer.t}, other weights?")
        if any(there[key.replace("/", "|")].tobytes() != value for key, value in state.items()):
            found.append(f"{name}: other state")
        share = state_bytes(model) / sum(len(value) for value in state.values())
        if share > 1 / COMM.size + 0.02:
            found.append(f"{name}: {share:.3f} of the state is here")
        close_all()
    return found


def whole() -> list[str]:
    """An optimizer that is not in shards goes on from what was saved in shards, on one rank."""
    found = []
    for name, kind in KINDS.items():
        model = Network()
        optimizer = kind().setup(model)
        umem.chainer.resume_run(FOLDER / name, model=model, optimizer=optimizer)
        there = np.load(FOLDER / f"{name}.npz")
        for key, value in gathered_state(model).items():
            if there[key.replace("/", "|")].tobytes() != value:
                found.append(f"{name}: other {key}")
        shapes = {one.shape for one in model.params()}
        if {one.update_rule.state.get("m", one.array).shape for one in model.params()} - shapes:
            found.append(f"{name}: states of other shapes")
        close_all()
    return found


def trained_on() -> list[str]:
    """Two more updates from there: rounding apart, those of any other number of ranks."""
    model, *_ = continued(KINDS["adam"], FOLDER / "adam", 5)
    other = FOLDER / "trained.npz"
    if COMM.rank == 0 and not other.exists():
        np.savez(other, *[one.array for _, one in sorted(model.namedparams())])
    COMM.Barrier()
    there = np.load(other).values()
    mine = [one.array for _, one in sorted(model.namedparams())]
    worst = max(float(np.abs(a - b).max()) for a, b in zip(mine, there, strict=True))
    return [f"{worst} apart"] if worst > 1e-4 else []


def edges() -> list[str]:
    """Parameters that are lazy, frozen, added, shared or updated by a rule of their own."""
    found = []
    model = chainer.Chain()
    with model.init_scope():
        model.first, model.second = L.Linear(37, 21), L.Linear(None, 5)
    model.first.W.array[...] = np.random.RandomState(COMM.rank).randn(21, 37)  # as ranks seed it
    optimizer = umem.chainer.sharded(chainer.optimizers.Adam(), COMM).setup(model)
    model.first.b.update_rule.enabled = False
    model.first.W.update_rule.hyperparam.alpha = 0.1
    model.second.b.update_rule = chainer.optimizers.SGD(0.5).create_update_rule()
    before = model.first.b.array.copy()

    def step(times: int = 1) -> None:
        for x, t in batches(times):
            h = model.second(model.first(x))
            optimizer.update(lambda h=h, t=t: F.softmax_cross_entropy(h, t))

    step()
    if optimizer.t != 0 or len(set(COMM.allgather(weights(model)))) != 1:
        found.append("weights of another seed were not made those of rank 0")
    step(3)
    if optimizer.t != 3 or len(set(COMM.allgather(weights(model)))) != 1:
        found.append(f"ranks are apart after {optimizer.t} updates")
    if (model.first.b.array != before).any():
        found.append("a frozen parameter was updated")
    model.first.b.update_rule.enabled = True
    with model.init_scope():
        model.third = chainer.Parameter(np.ones(7, np.float32))
    model.third.update_rule = optimizer.create_update_rule()
    step(2)
    if (model.first.b.array == before).all() or optimizer.t != 5:
        found.append("a parameter that was frozen before is not updated")
    if len(set(COMM.allgather(weights(model)))) != 1:
        found.append("ranks are apart after a parameter was added")
    if any(model.third.update_rule.state["m"].tobytes().strip(b"\0")):
        found.append("a gradient of nothing is not 0")
    return found


def accumulated() -> list[str]:
    """Two calls of update make one, by the mean of all ranks' gradients of both."""
    model = Network()
    optimizer = umem.chainer.sharded(chainer.optimizers.SGD(0.1), COMM).setup(model)
    other = Network()
    plain = chainer.optimizers.SGD(0.1).setup(other)
    data = list(batches(4))
    with umem.chainer.accumulate(optimizer, steps=2):
        for x, t in data:
            optimizer.update(lambda x, t: F.softmax_cross_entropy(model(x), t), x, t)
    for (x, t), (y, u) in (data[:2], data[2:]):
        other.cleargrads()
        F.softmax_cross_entropy(other(np.concatenate([x, y])), np.concatenate([t, u])).backward()
        average(other)
        plain.update()
    pairs = zip(model.params(), other.params(), strict=True)
    worst = max(float(np.abs(a.array - b.array).max()) for a, b in pairs)
    return [f"{worst} apart, t {optimizer.t}"] if worst > 1e-6 or optimizer.t != 2 else []


def scaled() -> list[str]:
    """Chainer's own loss scaling and float32 updates: an overflow of one rank is everybody's."""

    def prepare(model: Any, optimizer: Any) -> None:
        for one in model.params():
            one.array = one.array.astype(np.float16)
            one.cleargrad()
        optimizer.use_fp32_update()
        optimizer.loss_scaling(interval=3)

    def run(is_sharded: bool) -> tuple[Any, Any]:
        with chainer.using_config("dtype", np.float16):
            return trained(chainer.optimizers.MomentumSGD(), is_sharded, prepare=prepare)

    (ours, optimizer), (plain, _) = run(True), run(False)
    found = [] if weights(ours) == weights(plain) else ["float32 updates: other weights"]
    before, scale = weights(ours), optimizer._loss_scale
    for one in ours.params():
        one.grad = np.ones_like(one.array)
    if COMM.rank == 0:
        ours.a.W.grad[0, 0] = np.nan
    optimizer.update()
    if weights(ours) != before or len(set(COMM.allgather(optimizer._loss_scale))) != 1:
        found.append("an overflow of one rank was not skipped by all")
    if optimizer._loss_scale != scale * 0.5:
        found.append(f"the scale was {scale} and is {optimizer._loss_scale}")
    return found


def spoiled() -> list[str]:
    """8-bit states: a NaN of one rank is every rank's error, and nothing has changed."""
    model = Network()
    optimizer = umem.chainer.sharded(small.Adam8bit(), COMM).setup(model)
    for one in model.params():
        one.grad = np.ones_like(one.array)
    optimizer.update()
    before = weights(model), gathered_state(model), optimizer.t
    if COMM.rank == COMM.size - 1:
        model.c.b.grad[-1] = np.inf
    found = []
    try:
        optimizer.update()
        found.append("no error")
    except GradientError as error:
        if "/c/b" not in str(error):
            found.append(str(error))
    if before != (weights(model), gathered_state(model), optimizer.t):
        found.append("something changed")
    model.c.b.grad[...] = 1
    optimizer.update()
    return [*found, *(["another t"] if optimizer.t != 2 else [])]


def refused() -> list[str]:
    """What cannot be updated in shards, by its name and before anything changes."""
    found = []

    def with_hook(model: Any, optimizer: Any) -> None:
        optimizer.add_hook(lambda optimizer: None, "of ours")

    def with_rule(model: Any, optimizer: Any) -> None:
        model.b.W.update_rule = Lamb()

    def with_difference(model: Any, optimizer: Any) -> None:
        if COMM.rank:
            model.b.disable_update()

    def with_array(model: Any, optimizer: Any) -> None:
        model.b.W.update_rule.hyperparam.alpha = np.ones((113, 301), np.float32)

    for prepare, kind, message in (
        (with_hook, UnsupportedError, "<lambda>"),
        (with_rule, UnsupportedError, "Lamb"),
        (with_difference, StateError, "/b/W"),
        (with_array, UnsupportedError, "alpha"),
    ):
        model = Network()
        try:
            trained(chainer.optimizers.Adam(), True, 1, prepare, model)
            found.append(f"no error with {message}")
        except kind as error:
            if message not in str(error):
                found.append(str(error))
        if weights(model) != weights(Network()):
            found.append(f"weights changed with {message}")
    for wrong in ("world", None):
        try:
            umem.chainer.sharded(chainer.optimizers.Adam(), wrong)
            found.append(f"{wrong} is no communicator")
        except TypeError:
            pass
    return found


def refused_at_once() -> list[str]:
    """What an optimizer that is set up has already is refused by `sharded`, which leaves it so."""
    found = []
    noise = chainer.optimizer_hooks.GradientNoise(0.1)
    for prepare, message in (
        (lambda optimizer: optimizer.add_hook(noise), "GradientNoise"),
        (lambda optimizer: optimizer.add_hook(lambda optimizer: None, "ours"), "<lambda>"),
        (lambda optimizer: setattr(optimizer.target.b.W, "update_rule", Lamb()), "Lamb"),
    ):
        ours, plain = Network(), Network()
        optimizer = chainer.optimizers.Adam().setup(ours)
        other = chainer.optimizers.Adam().setup(plain)
        for one in (optimizer, other):
            prepare(one)
        try:
            umem.chainer.sharded(optimizer, COMM)
            found.append(f"no error with {message}")
        except UnsupportedError as error:
            found += [] if message in str(error) else [str(error)]
        found += differences(message, (ours, optimizer), (plain, other))
    several = chainermn.create_multi_node_optimizer(
        chainer.optimizers.Adam(), chainermn.create_communicator("naive")
    )
    try:
        umem.chainer.sharded(several, COMM)
        found.append("no error with ChainerMN's")
    except UnsupportedError as error:
        found += [] if "_MultiNodeOptimizer" in str(error) else [str(error)]
    return found


class Lamb(chainer.optimizers.adam.AdamRule):
    pass


def differences(what: str, *pairs: Any) -> list[str]:
    """What differs between optimizers after one more update on the same gradients."""
    for model, optimizer in pairs:
        np.random.seed(7)  # of hooks that draw
        for one in model.params():
            one.grad = np.full_like(one.array, 0.1)
        optimizer.update()
    same = len({(weights(model), optimizer.t) for model, optimizer in pairs}) == 1
    return [] if same else [f"another update after {what}"]


def converted() -> list[str]:
    """Once the state is in shards, what would convert a whole one is refused, and leaves it so."""
    found = []
    for kind, conversions in (
        (
            chainer.optimizers.Adam,
            (
                ("quantize_states", umem.chainer.optimizers.quantize_states),
                ("half_precision", lambda optimizer: half(optimizer)),
                ("sharded already", lambda optimizer: umem.chainer.sharded(optimizer, COMM)),
            ),
        ),
        (small.Adam8bit, (("dequantize_states", umem.chainer.optimizers.dequantize_states),)),
    ):
        ours, optimizer = trained(kind(), True, 1)
        plain, other = trained(kind(), True, 1)
        for message, convert in conversions:
            try:
                convert(optimizer)
                found.append(f"no error with {message}")
            except StateError as error:
                found += [] if message in str(error) else [str(error)]
            found += differences(message, (ours, optimizer), (plain, other))
    # before the first update it is in order, also after `sharded` and a new setup
    model = Network()
    optimizer = umem.chainer.sharded(chainer.optimizers.Adam(), COMM).setup(model)
    umem.chainer.optimizers.quantize_states(optimizer)
    now, _ = trained_on_ones(model, optimizer)
    model = Network()
    then, optimizer = trained_on_ones(
        model, umem.chainer.sharded(small.Adam8bit(), COMM).setup(model)
    )
    if weights(now) != weights(then):
        found.append("states converted before the first update differ")
    optimizer.setup(model)
    umem.chainer.half_precision(model, optimizer, scale=256.0).undo()
    return found


def half(optimizer: Any) -> Any:
    return umem.chainer.half_precision(optimizer.target, optimizer)


def trained_on_ones(model: Any, optimizer: Any) -> tuple[Any, Any]:
    for _ in range(3):
        for one in model.params():
            one.grad = np.ones_like(one.array)
        optimizer.update()
    return model, optimizer


def recomputed() -> list[str]:
    """Under `Recompute` each rank runs its own plan, and weights are those without it."""

    def run(is_recomputed: bool) -> tuple[Any, int]:
        model = Deep()
        optimizer = umem.chainer.sharded(chainer.optimizers.Adam(), COMM).setup(model)
        # Ranks have other budgets, so that they run other parts again.
        budget = "min" if COMM.rank else "70%"
        with umem.chainer.Recompute(budget) if is_recomputed else nullcontext() as recompute:
            for x, t in batches(6, 400):
                optimizer.update(lambda x=x, t=t: F.softmax_cross_entropy(model(x), t))
            planned = recompute.planned_count if recompute is not None else 0
        return model, planned

    (ours, planned), (plain, _) = run(True), run(False)
    found = [] if weights(ours) == weights(plain) else ["other weights under Recompute"]
    if not planned:
        found.append("no pass followed a plan")
    return found


class Deep(chainer.ChainList):
    """Layers of which several have to be kept at once."""

    def __init__(self) -> None:
        random = np.random.RandomState(0)
        sizes = [37, *[64] * 8, 5]
        super().__init__(
            *[
                L.Linear(a, b, initialW=random.randn(b, a).astype(np.float32) / 8)
                for a, b in pairwise(sizes)
            ]
        )

    def forward(self, x: Any) -> Any:
        for layer in self:
            x = F.tanh(layer(x))
        return x


def memory() -> list[str]:
    """No rank has the whole state at once: not in shards, nor while it is saved or read."""
    size, found, peaks = 500_000, [], {}
    for kind in (chainer.optimizers.SGD, chainer.optimizers.Adam):
        for run in ("saving", "resuming"):
            model = chainer.Chain()
            with model.init_scope():
                model.p = chainer.Parameter(np.ones(size, np.float32))
            optimizer = umem.chainer.sharded(kind(), COMM).setup(model)
            folder = FOLDER / kind.__name__
            parts = {"model": model, "optimizer": optimizer}
            model.p.grad = np.ones(size, np.float32)
            if run == "saving":
                optimizer.update()
            tracemalloc.start()
            if run == "saving":
                umem.chainer.save_run(folder, comm=COMM, step=1, **parts)
            else:
                umem.chainer.resume_run(folder, comm=COMM, **parts)
            peaks[kind.__name__, run] = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            close_all()
    whole = 8 * size
    for run in ("saving", "resuming"):
        over = peaks["Adam", run] - peaks["SGD", run]
        if over > (0.1 if run == "saving" else 1 / COMM.size + 0.1) * whole:
            found.append(f"{run}: {over} bytes more than without state, of {whole} in whole")
    return found


def trainers() -> list[str]:
    """A Trainer's run of ranks that have their own samples goes on, on any number of them."""
    rows = np.random.RandomState(0).randn(120, 37).astype(np.float32)[COMM.rank :: COMM.size]
    labels = (np.arange(120) % 5).astype(np.int32)[COMM.rank :: COMM.size]
    np.random.seed(COMM.rank)
    model = L.Classifier(Network())
    optimizer = umem.chainer.sharded(chainer.optimizers.Adam(), COMM).setup(model)
    data = chainer.datasets.TupleDataset(rows, labels)
    updater = training.StandardUpdater(chainer.iterators.SerialIterator(data, 10), optimizer)
    snapshot = umem.chainer.Snapshot(every=4, comm=COMM)
    begun = (FOLDER / "snapshots").exists()
    COMM.Barrier()
    trainer = training.Trainer(updater, (14 if begun else 10, "iteration"), out=FOLDER)
    trainer.extend(snapshot)
    trainer.run()
    share = 8 * 10 * 2 / 120 + 6 * 10 * COMM.size / 120  # eight updates on two ranks, six here
    found = [] if optimizer.t == updater.iteration else [f"t {optimizer.t}"]
    if begun and abs(updater.epoch_detail - share) > 0.02:
        found.append(f"at {updater.epoch_detail} of an epoch, and not {share}")
    if len(set(COMM.allgather(weights(model)))) != 1 or snapshot.resumed.step != 8 * begun:
        found.append(f"ranks are apart, or went on from {snapshot.resumed.step}")
    return found


CASES = {
    case.__name__: case
    for case in (
        *(optimizers, adams, hooks, halves, begun, resumed, whole, trained_on),
        *(edges, accumulated, scaled, spoiled, refused, memory, trainers),
        *(refused_at_once, converted, recomputed, gpus, tied),
    )
}


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    wrong = [line for name in sys.argv[2:] for line in CASES[name]()]
    (FOLDER / f"{COMM.rank}.json").write_text(json.dumps(wrong))
