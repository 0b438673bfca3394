"""Random compositions of techniques: a network, what is on while it learns, and where it stops.

A composition is a function of its seed. It is run as drawn, and then with less and less on:

- without what is documented to change no bit (`EXACT`, and resuming in the middle): losses,
  gradients, parameters and states have to be the same bits;
- without what takes sums in another order (`ROUNDING`): the first loss and the first update's
  gradient have to be the same up to rounding;
- plain: the first loss has to be within the 2% that half precision documents, and the same bits
  under what is stored in fewer bits; the first gradient the same bits under states of fewer bits,
  and elsewhere near enough that no term or scale is missing.

What a composition may not have is refused with an error of `REFUSALS`, after which nothing has
changed; it goes on without. Smaller layers and ties stay in every run: they are the model.
"""

from __future__ import annotations

import io
import random
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, NamedTuple

import numpy as np

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L
from chainer import optimizer_hooks, optimizers

from umem.chainer import POINTS
from umem.chainer.layers import LowRank, Separable
from umem.chainer.optimizers import quantize_states
from umem.errors import UmemError

CALLS, CLASSES = 5, 7
EXACT = ("recompute", "offload", "chunked", "workspace, exact")
"""Documented to change no bit."""
ROUNDING = ("accumulate", "workspace")
"""Documented to take sums in another order."""
FEWER_BITS = ("half", "saved_in", "8-bit")
MODEL = ("tie", "slimmer")
REFUSALS = (
    "an Offload is on: Recompute",
    "a Recompute is on, which plans keeping, recomputing and offloading together",
    "is on, and holds the parameters as they are: slim before",
    "is enabled for the process: disable that first",
)
"""What errors say that refuse to turn something on beside what is on."""


class Composition(NamedTuple):
    """What is drawn of a seed.

    Attributes:
        network: the name of the model.
        samples: of a call of update; calls have differing numbers where ``is_uneven``.
        rule: the optimizer's class.
        techniques: by name, in the order of turning on, with options.
        leaves: the places in that order, in which they are turned off.
        stops: after how many calls the process ends and begins again; None: not.
    """

    seed: int
    network: str
    samples: int
    is_uneven: bool
    rule: str
    techniques: dict[str, Any]
    leaves: list[int]
    stops: int | None

    def __str__(self) -> str:
        on = ", ".join(f"{name} {options}" for name, options in self.techniques.items())
        stops = "" if self.stops is None else f"; stops after call {self.stops}"
        return (
            f"{self.seed}: {self.network}, {self.samples}{' uneven' * self.is_uneven} samples, "
            f"{self.rule}; {on or 'nothing'}; off {self.leaves}{stops}"
        )

    def without(self, *names: str) -> Composition:
        """The same with less on, which goes on and off in the same order, and without a stop."""
        every = list(self.techniques)
        kept = {name: o for name, o in self.techniques.items() if name not in names}
        leaves = [list(kept).index(every[at]) for at in self.leaves if every[at] in kept]
        return self._replace(techniques=kept, leaves=leaves, stops=None)


# -- networks --------------------------------------------------------------------------------------


class Network(chainer.Chain):
    """What they have in common: a loss by valid labels, and whether masks are drawn."""

    has_masks = False

    def forward(self, x: Any, t: Any) -> Any:
        return F.softmax_cross_entropy(self.scores(x), t)


class Perceptron(Network):
    """Three layers, of which two have the same shape; large enough for Offload to move some."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.first, self.second = L.Linear(20, 640), L.Linear(640, 48)
            self.third, self.fourth = L.Linear(48, 48), L.Linear(48, 48)
            self.slope, self.score = L.PReLU(), L.Linear(48, CLASSES)

    def scores(self, x: Any) -> Any:
        h = F.relu(self.second(F.tanh(self.first(x))))
        return self.score(F.sigmoid(self.fourth(self.slope(self.third(h)))) + h)


class Dropping(Perceptron):
    """The same with masks."""

    has_masks = True

    def scores(self, x: Any) -> Any:
        h = F.dropout(F.relu(self.second(F.tanh(self.first(x)))), 0.3)
        return self.score(F.dropout(F.tanh(self.third(h)), 0.2))


class Convolutional(Network):
    """Two convolutions and a pooling."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(3, 8, 3, pad=1)
            self.second, self.score = L.Convolution2D(8, 12, 3), L.Linear(None, CLASSES)

    def scores(self, x: Any) -> Any:
        h = F.max_pooling_2d(F.relu(self.first(x)), 2)
        return self.score(F.average_pooling_2d(F.relu(self.second(h)), 2))


class Words(Network):
    """Words that are embedded, a layer that is used at each step, and a score of words."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.embed, self.step = L.EmbedID(30, 16), L.Linear(32, 16)
            self.score = L.Linear(16, 30, nobias=True)

    def scores(self, x: Any) -> Any:
        h = self.embed(x[:, 0])
        for at in range(1, x.shape[1]):
            h = F.tanh(self.step(F.concat([h, self.embed(x[:, at])])))
        return self.score(h)


class Normalized(Network):
    """Layer normalisation and a residual."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.first, self.norm = L.Linear(20, 64), L.LayerNormalization(64)
            self.second, self.score = L.Linear(64, 64), L.Linear(64, CLASSES)

    def scores(self, x: Any) -> Any:
        h = self.first(x)
        return self.score(h + F.relu(self.second(self.norm(h))))


NETWORKS = {
    kind.__name__: kind for kind in (Perceptron, Dropping, Convolutional, Words, Normalized)
}
TIES = {"Perceptron": ("/third", "/fourth"), "Words": ("/embed/W", "/score/W")}
SLIMS: dict[str, Any] = {
    "Perceptron": {"/second": LowRank(rank=6)},
    "Dropping": {"/second": LowRank(energy=0.5)},
    "Convolutional": {"/second": Separable()},
    "Words": {"/step": LowRank(rank=4)},
    "Normalized": {"/second": LowRank(rank=8)},
}
RULES: dict[str, Callable[[], Any]] = {
    "SGD": lambda: optimizers.SGD(0.05),
    "MomentumSGD": lambda: optimizers.MomentumSGD(0.02),
    "Adam": lambda: optimizers.Adam(0.01),
    "AdamW": lambda: optimizers.AdamW(0.01, weight_decay_rate=1e-3),
    "RMSprop": lambda: optimizers.RMSprop(0.005),
}


def batches(drawn: Composition) -> list[tuple[Any, Any]]:
    """The samples of each call; some have no label, and no call only such."""
    generator = np.random.RandomState(drawn.seed % 2**31)
    found = []
    for at in range(CALLS):
        count = max(4, drawn.samples - 3 * at) if drawn.is_uneven else drawn.samples
        if drawn.network == "Words":
            x: Any = generator.randint(0, 30, (count, 5)).astype("i")
            t = generator.randint(0, 30, count).astype("i")
        elif drawn.network == "Convolutional":
            x = generator.randn(count, 3, 11, 11).astype("f")
            t = generator.randint(0, CLASSES, count).astype("i")
        else:
            x = generator.randn(count, 20).astype("f")
            t = generator.randint(0, CLASSES, count).astype("i")
        t[1:][generator.rand(count - 1) < 0.2] = -1
        found.append((x, t))
    return found


# -- what is drawn ---------------------------------------------------------------------------------


def composition(seed: int) -> Composition:
    """Draw a composition."""
    draw = random.Random(seed)
    network = draw.choice(list(NETWORKS))
    has_masks = NETWORKS[network].has_masks
    samples = draw.choice((8, 12, 26, 32))
    rule = draw.choice(list(RULES))
    options: dict[str, Callable[[], Any]] = {
        "tie": lambda: TIES[network],
        "slimmer": lambda: SLIMS[network],
        "half": lambda: {"scale": 2.0 ** draw.randint(0, 9)},
        "8-bit": lambda: {"least_size": draw.choice((0, 1, 64, 4096))},
        "saved_in": lambda: "bfloat16",
        "accumulate": lambda: (
            {"micro_batch": draw.choice((3, 5, 8))}
            if has_masks or draw.random() < 0.5
            else {"steps": draw.choice((2, 3, CALLS + 1))}
        ),
        "recompute": lambda: (draw.choice(("min", "50%", "70%", "90%")), draw.random() < 0.3),
        "offload": dict,
        "workspace": lambda: draw.choice(("4KiB", "20KiB", "1MiB")),
        "workspace, exact": lambda: draw.choice(("4KiB", "20KiB", "1MiB")),
        "chunked": dict,
    }
    likely = {"accumulate": 0.6, "recompute": 0.5, "half": 0.35, "offload": 0.3, "8-bit": 0.35}
    names = [name for name in options if draw.random() < likely.get(name, 0.2)]
    draw.shuffle(names)
    if network not in TIES and "tie" in names:
        names.remove("tie")
    if rule not in ("Adam", "AdamW", "MomentumSGD") and "8-bit" in names:
        names.remove("8-bit")
    techniques = {name: options[name]() for name in names}
    leaves = list(range(len(names)))[::-1]
    if draw.random() < 0.5:
        draw.shuffle(leaves)
    stops = draw.choice((None, None, 1, 2, 3, 4, CALLS))
    return Composition(seed, network, samples, draw.random() < 0.3, rule, techniques, leaves, stops)


# -- a run -----------------------------------------------------------------------------------------


class Seen:
    """A hook that notes the first update's gradient, as an optimizer's hooks see it."""

    name, call_for_each_param, timing = "Seen", False, "pre"

    def __init__(self) -> None:
        self.gradients: dict[str, Any] = {}

    def __call__(self, optimizer: Any) -> None:
        if not self.gradients:
            named = optimizer.target.namedparams()
            self.gradients = {n: p.grad.copy() for n, p in named if p.grad is not None}


class Outcome(NamedTuple):
    """What a run has left.

    Attributes:
        losses: of each call, as the loss function had them; NaN where it was given parts alone,
            which it is not in the call that compares them with the whole, again after resuming.
        gradients: of the first update.
        left: parameters, what links keep, states and counts, by name.
        refused: by technique, the error that refused to turn it on or off.
    """

    losses: list[float]
    gradients: dict[str, Any]
    left: dict[str, Any]
    refused: dict[str, str]


class Unexplained(AssertionError):
    """Something that no page documents."""


def left_of(net: Any, optimizer: Any) -> dict[str, Any]:
    """Everything that a model and its optimizer are."""
    found: dict[str, Any] = {"t": optimizer.t}
    for name, parameter in net.namedparams():
        found[name] = None if parameter.array is None else parameter.array.copy()
        rule = parameter.update_rule
        found[f"{name}.t"] = rule.t
        for key, value in (rule.state or {}).items():
            found[f"{name}.{key}"] = value.copy() if hasattr(value, "copy") else value
    return found


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """The names whose values are not the same bits."""
    if found.keys() != expected.keys():
        return sorted(found.keys() ^ expected.keys())
    return [n for n in found if not _same(found[n], expected[n])]


def _same(one: Any, other: Any) -> bool:
    are_arrays = isinstance(one, np.ndarray), isinstance(other, np.ndarray)
    if not all(are_arrays):
        return not any(are_arrays) and bool(one is other or one == other)
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def turn_on(name: str, options: Any, net: Any, optimizer: Any, folder: str) -> Callable[[], None]:
    """Turn a technique on; returns what turns it off."""
    if name == "tie":
        return umem.chainer.tie(net, *options).undo
    if name == "slimmer":
        return umem.chainer.slimmer(net, options, quiet=True).undo
    if name == "half":
        return umem.chainer.half_precision(net, optimizer, **options).undo
    if name == "8-bit":
        quantize_states(optimizer, embeddings=True, **options)
        return lambda: None
    if name == "saved_in":
        return umem.chainer.saved_in(options).undo
    if name == "accumulate":
        return umem.chainer.accumulate(optimizer, **options).enable().disable
    if name == "chunked":
        return umem.chainer.chunked_updates().close
    if name in ("workspace", "workspace, exact"):
        return umem.chainer.workspace(options, exact=name != "workspace").enable().disable
    if name == "recompute":
        budget, moves = options
        made: Any = umem.chainer.Recompute(budget, **({"offload": folder} if moves else {}))
    else:
        made = umem.chainer.Offload(folder)
    made.__enter__()
    return lambda: made.__exit__(None, None, None)


def run(drawn: Composition) -> Outcome:
    """Train under a composition; again from where it stopped, where it does."""
    originals = [vars(point.owner)[point.name] for point in POINTS]
    refused: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if drawn.stops is not None:
            _life(drawn, folder, refused, drawn.stops)
        outcome = _life(drawn, folder, refused, None)
    if [vars(point.owner)[point.name] for point in POINTS] != originals:
        raise Unexplained("functions of Chainer are replaced when all is off")
    return outcome


def _life(drawn: Composition, folder: str, refused: dict[str, str], stop: int | None) -> Outcome:
    """Train under the drawn techniques, from a snapshot or up to one; return what there was."""
    np.random.seed(drawn.seed % 2**31)
    net = NETWORKS[drawn.network]()
    net(*batches(drawn)[0])  # lazy parameters get their arrays
    optimizer = RULES[drawn.rule]().setup(net)
    optimizer.add_hook(optimizer_hooks.WeightDecay(1e-3))
    seen, losses = Seen(), list[float]()
    optimizer.add_hook(seen)
    np.random.seed(1 + drawn.seed % 2**31)
    with _on(drawn, net, optimizer, folder, refused):
        run = {"net": net, "optimizer": optimizer}
        begin = 0
        if drawn.stops is not None:
            begin = _resumed(folder, run)
        for at, batch in _calls(drawn):
            if at < begin:
                continue
            if at == stop:
                break
            losses.append(_call(net, optimizer, batch))
            if drawn.stops is not None and at + 1 == drawn.stops and not begin:
                umem.chainer.save_run(f"{folder}/run", step=at + 1, wait=True, **run)
                break
    return Outcome(losses, seen.gradients, left_of(net, optimizer), refused)


def _resumed(folder: str, run: dict[str, Any]) -> int:
    with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
        return umem.chainer.resume_run(f"{folder}/run", **run).step


def _calls(drawn: Composition) -> Iterator[tuple[int, tuple[Any, Any]]]:
    """Each call's batch; those of one update together, where nothing accumulates them."""
    options = drawn.techniques.get("together")
    every = batches(drawn)
    size = 1 if options is None else options
    for at in range(0, CALLS, size):
        xs, ts = zip(*every[at : at + size], strict=True)
        yield at, (np.concatenate(xs), np.concatenate(ts))


def _call(net: Any, optimizer: Any, batch: tuple[Any, Any]) -> float:
    found: list[float] = []

    def loss(x: Any, t: Any) -> Any:
        y = net(x, t)
        if len(x) == len(batch[0]):
            found.append(float(y.array))
        return y

    optimizer.update(loss, *batch)
    return found[0] if found else float("nan")


@contextmanager
def _on(
    drawn: Composition, net: Any, optimizer: Any, folder: str, refused: dict[str, str]
) -> Iterator[None]:
    """Have techniques on; those that are refused stay off."""
    off: dict[int, Callable[[], None]] = {}
    names = list(drawn.techniques)
    try:
        for place, (name, options) in enumerate(drawn.techniques.items()):
            if name == "together":
                continue
            before = left_of(net, optimizer)
            try:
                off[place] = turn_on(name, options, net, optimizer, folder)
            except UmemError as error:
                refused[name] = _explained(name, error)
                if changed := differing(left_of(net, optimizer), before):
                    raise Unexplained(f"{name} refused, and changed {changed}: {error}") from error
        yield
    finally:
        for place in drawn.leaves:
            if place in off and names[place] not in MODEL:
                off[place]()


def _explained(name: str, error: UmemError) -> str:
    text = f"{type(error).__name__}: {error}"
    if not any(re.search(pattern, text) for pattern in REFUSALS):
        raise Unexplained(f"{name} is refused: {text}") from error
    return text


# -- verdicts --------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """What came of a composition.

    Attributes:
        outcome: "as documented", "refused in part" (and the rest as documented), or "unexplained".
        compared: what it was compared with: "bits", "rounding", "fewer bits".
        message: of what is unexplained.
    """

    outcome: str
    compared: tuple[str, ...] = ()
    message: str = ""
    refused: tuple[str, ...] = ()


def judged(drawn: Composition) -> Verdict:
    """Run a composition and what it is compared with."""
    try:
        return _judged(drawn)
    except Exception as error:
        origin = error.__cause__ or error
        return Verdict("unexplained", message=f"{type(origin).__name__}: {error}")


def _judged(drawn: Composition) -> Verdict:
    """Run a composition and without its exact techniques, and compare bits or within rounding."""
    found = run(drawn)
    drawn = drawn.without(*found.refused)
    compared = ["bits"]
    expected = run(drawn.without(*EXACT))
    if {"saved_in", "recompute"} <= drawn.techniques.keys():
        # What Recompute looks after is not rounded, so that gradients are nearer to float32.
        compared = ["rounding"]
        _near(run(drawn._replace(stops=None)), expected, 2e-2, "bfloat16 under Recompute")
    else:
        _same_bits(found, expected)
    # Each part of a batch draws masks of its own.
    keeps = {"accumulate"} if NETWORKS[drawn.network].has_masks else set()
    without = [name for name in ROUNDING if name in drawn.techniques and name not in keeps]
    if without:
        compared.append("rounding")
        whole = drawn.without(*EXACT, *without)
        steps = None if keeps else drawn.techniques.get("accumulate", {}).get("steps")
        if steps is not None:
            whole = whole._replace(techniques={**whole.techniques, "together": steps})
            whole = whole._replace(leaves=[*whole.leaves, len(whole.leaves)])
        plain = run(whole)
        is_coarse = bool({"half", "saved_in"} & drawn.techniques.keys())
        _near(expected, plain, 2e-2 if is_coarse else 2e-5, "rounding")
        expected = plain
        drawn = whole
    if any(name in drawn.techniques for name in FEWER_BITS):
        compared.append("fewer bits")
        plain = run(drawn.without(*FEWER_BITS))
        _fewer_bits(drawn, expected, plain)
    refused = tuple(sorted(found.refused))
    return Verdict("refused in part" if refused else "as documented", tuple(compared), "", refused)


def _same_bits(found: Outcome, expected: Outcome) -> None:
    if changed := differing(found.left, expected.left):
        raise Unexplained(f"other bits at the end: {changed[:6]} of {len(changed)}")
    last = len(found.losses)
    pairs = zip(found.losses, expected.losses[-last:] if last else (), strict=True)
    if any(one != other for one, other in pairs if not np.isnan(one + other)):
        raise Unexplained(f"other losses: {found.losses}, {expected.losses}")


def _near(found: Outcome, expected: Outcome, least: float, why: str) -> None:
    if found.gradients.keys() != expected.gradients.keys():
        raise Unexplained(
            f"{why}: gradients of {found.gradients.keys() ^ expected.gradients.keys()}"
        )
    apart = _apart(found.gradients, expected.gradients)
    if not apart <= least:
        raise Unexplained(f"{why}: the first gradient is {apart:.1e} of its norm from")


def _apart(found: dict[str, Any], expected: dict[str, Any]) -> float:
    one, other = (
        np.concatenate([each[name].ravel().astype("d") for name in sorted(each)])
        for each in (found, expected)
    )
    return float(np.linalg.norm(one - other) / max(np.linalg.norm(other), 1e-30))


def _fewer_bits(drawn: Composition, found: Outcome, plain: Outcome) -> None:
    """Compare the first gradient and loss of half precision or 8-bit states with float32."""
    if {"half", "saved_in"} & drawn.techniques.keys():
        _near(found, plain, 0.15, "half precision or bfloat16")
    elif differing(found.gradients, plain.gradients):
        raise Unexplained("states of fewer bits have changed the first gradient")
    if "accumulate" in drawn.techniques:
        return  # no loss is of a whole batch
    first, expected = found.losses[0], plain.losses[0]
    least = 2e-2 if "half" in drawn.techniques else 0.0
    if not abs(first - expected) <= least * abs(expected):
        raise Unexplained(f"the first loss is {first}, and {expected} in float32")
