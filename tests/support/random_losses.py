"""Random training programs, to compare `umem.chainer.accumulate` with the whole batch.

A program is a function of its seed: the source of a loss function, the batches that it is given
in turn, and how parts are taken of them. Batches differ in composition: the first mostly has
sequences of one length and a label everywhere; later ones have varied lengths, ignored labels,
parts that count nothing, batches that count nothing, and other sizes.

Every program has a class:

- known: a sum, with factors, of Chainer's losses and reductions, of `F.mean` and `F.sum`, and of
  terms made of parameters alone, also once a time step. It has to be accepted.
- weight: losses divided by a count of the samples, and a right ``weight=`` that says so.
- other: anything else. It may be refused, but where it is accepted it has to be right.

`loss_verdicts` runs them: ``python tests/support/loss_verdicts.py SEED`` prints one and its
outcome.
"""

from __future__ import annotations

import linecache
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

import umem.chainer  # noqa: F401  isort: skip  (before chainer)
import chainer
import chainer.functions as F
import chainer.links as L

KNOWN, WEIGHT, OTHER = CLASSES = ("known", "weight", "other")
WIDTH, HIDDEN, LABELS = 6, 7, 5


# -- data --------------------------------------------------------------------------------------

ARGUMENTS = ("x", "x2", "t", "t3", "b", "v", "m", "p", "xs", "ts", "xp", "tp")
"""What a loss function may be given; each is cut along its first dimension, or is a list.

x, x2: rows; t, t3: labels, -1 where there is none, one or three a sample; b: bits, -1 where there
is none; v: shares between 0 and 1; m: a mask; p: whether x and x2 are alike; xs, ts: sequences and
their labels; xp, tp: the same, padded.
"""


@dataclass(frozen=True)
class Composition:
    """What a batch is like.

    Attributes:
        size: its samples.
        labelled: which samples have labels: "all", "some", "none", "one", or all but a "run".
        lengths: "even", or "varied", or "descending".
    """

    size: int
    labelled: str
    lengths: str

    def arrays(self, seed: int) -> dict[str, Any]:
        """Make every argument."""
        rs, n = np.random.RandomState(seed), self.size
        has = self._labelled(rs)
        lengths = rs.randint(1, 6, n) if self.lengths != "even" else np.full(n, rs.randint(2, 5))
        if self.lengths == "descending":
            lengths = np.sort(lengths)[::-1]
        xs = [rs.randn(length, WIDTH) for length in lengths]
        ts = [self._labels(rs, has[i : i + 1].repeat(k)) for i, k in enumerate(lengths)]
        t3 = self._labels(rs, has.repeat(3)).reshape(n, 3)
        b = np.where(
            has[:, None] & (rs.rand(n, LABELS) < self._share), rs.rand(n, LABELS) < 0.5, -1
        )
        padded = np.zeros((n, max(lengths), WIDTH)), np.full((n, max(lengths)), -1, "i")
        for i, (x, t) in enumerate(zip(xs, ts, strict=True)):
            padded[0][i, : len(x)], padded[1][i, : len(x)] = x, t
        return {
            "x": rs.randn(n, WIDTH),
            "x2": rs.randn(n, WIDTH),
            "t": self._labels(rs, has),
            "t3": t3,
            "b": b.astype("i"),
            "v": rs.uniform(0.05, 0.95, (n, LABELS)),
            "m": has.astype("d"),
            "p": rs.randint(0, 2, n).astype("i"),
            "xs": xs,
            "ts": ts,
            "xp": padded[0],
            "tp": padded[1],
        }

    @property
    def _share(self) -> float:
        return 1.0 if self.labelled == "all" else 0.7

    def _labelled(self, rs: np.random.RandomState) -> Any:
        n = self.size
        if self.labelled == "one":
            return np.arange(n) == rs.randint(n)
        if self.labelled == "run":
            start, length = rs.randint(n), rs.randint(n // 2, n)
            return (np.arange(n) < start) | (np.arange(n) >= start + length)
        return rs.rand(n) < {"all": 1.1, "some": 0.6, "none": -1.0}[self.labelled]

    def _labels(self, rs: np.random.RandomState, has: Any) -> Any:
        has = has & (rs.rand(len(has)) < (1.1 if self.labelled in ("all", "one") else 0.9))
        return np.where(has, rs.randint(0, LABELS, len(has)), -1).astype("i")


# -- terms of a loss ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Term:
    """One term of a loss, as source.

    Attributes:
        kind: what it is called in tables.
        value: its expression.
        count: what it is divided by: "samples", "elements", "labels", ...; "sum": nothing;
            "once": it is made of parameters alone.
        grade: the class of a program of such terms only.
        lines: statements before it.
        weight: for the grade "weight", what the user says that it was divided by.
    """

    kind: str
    value: str
    count: str
    grade: str = KNOWN
    lines: tuple[str, ...] = ()
    weight: str = ""


SAMPLER = "sampler = lambda shape: np.broadcast_to(np.arange(shape[1]) % 5, shape).astype('i')"
Maker = Callable[[random.Random], Term]
Y = "y = model.out(act(model.hidden(x)))"
Z = "z = model.out2(act(model.hidden(x)))"
Y2 = "y2 = model.out(act(model.hidden(x2)))"


def _reduced(
    rng: random.Random, kind: str, each: str, columns: int, lines: tuple[str, ...], first: str = "x"
) -> Term:
    """Reduce an array with a row (or a number, without columns) a sample, in one of all ways."""
    ways = ["F.mean({})", "F.average({})", "F.sum({})", "weight"]
    if columns:
        ways += [
            "F.mean(F.sum({}, axis=1))",
            "F.mean(F.mean({}, axis=1))",
            "F.sum(F.mean({}, axis=0))",
            "F.sum(F.mean({}, axis=0, keepdims=True))",
            "F.sum(F.mean({}, axis=1))",
            "F.mean(F.mean({}, axis=0))",
        ]
    way = rng.choice(ways)
    if way == "weight":
        value = rng.choice(
            (f"F.sum({each}) / len({first})", f"F.sum({each}) * (1.0 / len({first}))")
        )
        return Term(kind, value, "samples", WEIGHT, lines, f"len({first})")
    means = "samples" if not columns or way.count("mean") == way.count("sum") == 1 else "elements y"
    count = "sum" if way in ("F.sum({})", "F.sum(F.mean({}, axis=1))") else means
    return Term(kind, way.format(each), count, KNOWN, lines)


def softmax(rng: random.Random) -> Term:
    options, lines, t, y = [], (Y,), "t", "y"
    form = rng.choice(
        ("plain", "plain", "normalize", "class_weight", "ignore", "images", "no", "no")
    )
    if form == "images":
        lines, t, y = ("y3 = F.reshape(model.wide(x), (-1, 5, 3))",), "t3", "y3"
    if form == "class_weight":
        options.append("class_weight=np.array([0.5, 1.0, 2.0, 0.3, 1.5])")
    if form == "ignore":
        options.append("ignore_label=3")
        t = "np.where(t < 0, 3, t)"
    if form == "no":
        each = f"F.softmax_cross_entropy(y, t, reduce='no'{_given(rng, options)})"
        if rng.random() < 0.3:
            value = f"F.sum({each}) / max(1, int((t >= 0).sum()))"
            return Term("softmax, no", value, "labels t", WEIGHT, lines, "int((t >= 0).sum())")
        return _reduced(rng, "softmax, no", each, 0, lines)
    normalized = form != "normalize"
    if not normalized:
        options.append("normalize=False")
    value = f"F.softmax_cross_entropy({', '.join([y, t, *options])})"
    return Term(f"softmax, {form}", value, f"labels {t}" if normalized else "samples", KNOWN, lines)


def _given(rng: random.Random, options: list[str]) -> str:
    if rng.random() < 0.3:
        return ", class_weight=np.array([0.5, 1.0, 2.0, 0.3, 1.5])"
    return "".join(f", {option}" for option in options)


def soft_targets(rng: random.Random) -> Term:
    value = "F.softmax_cross_entropy(y, v / v.sum(axis=1, keepdims=True))"
    return Term("softmax, soft targets", value, "samples", KNOWN, (Y,))


def sigmoid(rng: random.Random) -> Term:
    form = rng.choice(("", ", normalize=False", ", reduce='no'"))
    value = f"F.sigmoid_cross_entropy(y, b{form})"
    if "no'" in form:
        return _reduced(rng, "sigmoid, no", value, LABELS, (Y,))
    kind = f"sigmoid{', normalize' if form else ''}"
    return Term(kind, value, "samples" if form else "labels b", KNOWN, (Y,))


def regression(rng: random.Random) -> Term:
    name = rng.choice(("mean_squared_error", "mean_absolute_error"))
    given = (("y", "v"), ("v", "y"), ("y[:, 0]", "v[:, 0]"), ("y", "z"), ("y", "y2.array"))
    y, v = rng.choice(given)
    if v in ("z", "y2.array"):
        name = "mean_squared_error"  # rounding decides the sign of a difference that is nearly 0
    lines = {"z": (Y, Z), "y2.array": (Y, Y2)}.get(v, (Y,))
    return Term(name, f"F.{name}({y}, {v})", f"elements {y}", KNOWN, lines)


def each_error(rng: random.Random) -> Term:
    name = rng.choice(("squared_error", "absolute_error"))
    return _reduced(rng, name, f"F.{name}(y, v)", LABELS, (Y,))


def huber(rng: random.Random) -> Term:
    delta = rng.choice((0.3, 1.0))
    if rng.random() < 0.5:
        return _reduced(rng, "huber", f"F.huber_loss(y, v, {delta})", 0, (Y,))
    return _reduced(rng, "huber, no", f"F.huber_loss(y, v, {delta}, reduce='no')", LABELS, (Y,))


def hinge(rng: random.Random) -> Term:
    norm = rng.choice(("L1", "L2"))
    value = f"F.hinge(y, np.maximum(t, 0), '{norm}'"
    if rng.random() < 0.6:
        return Term("hinge", value + ")", "samples", KNOWN, (Y,))
    return _reduced(rng, "hinge, no", value + ", reduce='no')", LABELS, (Y,))


def vae(rng: random.Random) -> Term:
    name, given = rng.choice(
        (
            ("gaussian_nll", "v, y, F.tanh(z)"),
            ("bernoulli_nll", "v, y"),
            ("gaussian_kl_divergence", "y, z"),
        )
    )
    lines = (Y, Z) if "z" in given else (Y,)
    reduce = rng.choice(("", ", reduce='mean'", ", reduce='no'", "/"))
    value = f"F.{name}({given}{reduce.strip('/')})"
    if reduce == "/":
        return Term(name, f"{value} / len(x)", "samples", WEIGHT, lines, "len(x)")
    if "no'" in reduce:
        return _reduced(rng, f"{name}, no", value, LABELS, lines)
    return Term(name, value, "elements y" if reduce else "sum", KNOWN, lines)


def pairs(rng: random.Random) -> Term:
    name, value = rng.choice(
        (
            ("contrastive", "F.contrastive(y, y2, p, 1.5"),
            ("triplet", "F.triplet(y, y2, F.concat([y2[:, 1:], y[:, :1]]), 0.5"),
        )
    )
    if rng.random() < 0.6:
        return Term(name, value + ")", "samples", KNOWN, (Y, Y2))
    return _reduced(rng, f"{name}, no", value + ", reduce='no')", 0, (Y, Y2))


def samplewise(rng: random.Random) -> Term:
    """Chainer's losses of structured outputs, which divide by the samples."""
    fresh = (
        "np.maximum(t3[:, :1], 1), 0, np.full(len(xp), xp.shape[1], 'i'), np.full(len(xp), 1, 'i')"
    )
    steps = "[model.out(act(model.hidden(xp[:, k]))) for k in range(xp.shape[1])]"
    labels = "[np.maximum(tp[:, k], 0) for k in range(tp.shape[1])]"
    kind, each, mean = rng.choice(
        (
            ("ctc", f"F.connectionist_temporal_classification({steps}, {fresh}", ")"),
            ("crf", f"F.crf1d(model.crf.cost, {steps}, {labels}", ""),
            ("black out", "F.black_out(act(model.hidden(x)), np.maximum(t, 0), model.out.W, "
             "np.maximum(t3[:, :2], 0)", ")"),
            ("negative sampling", "F.negative_sampling(act(model.hidden(x)), np.maximum(t, 0), "
             "model.out.W, sampler, 3", ""),
        )
    )  # fmt: skip
    lines = () if kind in ("ctc", "crf") else (Y, SAMPLER)
    if kind == "negative sampling" and rng.random() < 0.5:
        return Term(kind, each + ")", "sum", KNOWN, lines)
    if mean and rng.random() < 0.6:
        return Term(kind, each + mean, "samples", KNOWN, lines)
    first = "x" if lines else "xp"
    return _reduced(rng, f"{kind}, no", each + ", reduce='no')", 0, lines, first)


def plain_reduction(rng: random.Random) -> Term:
    each, columns = rng.choice(
        (
            ("F.square(y)", LABELS),
            ("F.softplus(y)", LABELS),
            ("y * v", LABELS),
            ("F.tanh(y) * m[:, None]", LABELS),
            ("F.sum(F.square(y - v), axis=1)", 0),
            ("F.logsumexp(y, axis=1)", 0),
            ("F.batch_l2_norm_squared(y)", 0),
            ("m * F.batch_l2_norm_squared(y - v)", 0),
            ("F.softplus(y[:, 0])", 0),
            ("F.select_item(F.log_softmax(y), np.maximum(t, 0))", 0),
        )
    )
    return _reduced(rng, "reduction", each, columns, (Y,))


def masked(rng: random.Random) -> Term:
    """A sum over those with a label, divided by how many these are."""
    each = rng.choice(
        ("m * y[:, 1]", "m * F.sum(F.square(y - v), axis=1)", "m[:, None] * F.tanh(y)")
    )
    value = rng.choice(
        (f"F.sum({each}) / max(1, int(m.sum()))", f"F.sum({each}) / max(1.0, float(m.sum()))")
    )
    return Term("masked sum / count", value, "mask", WEIGHT, (Y,), "m.sum()")


def regulariser(rng: random.Random) -> Term:
    value = rng.choice(
        (
            "F.sum(F.square(model.out.W))",
            "F.mean(F.square(model.out.W))",
            "sum(F.sum(F.square(each)) for each in model.out.params())",
            "F.sum(F.square(model.out.W - START))",
            "F.mean_squared_error(model.out.W, START)",
            "F.sum(F.batch_l2_norm_squared(model.out.W))",
            "F.mean(F.matmul(model.out.W, model.out.W, transb=True))",
        )
    )
    return Term("regulariser", value, "once", KNOWN, (Y,))


def per_sample(rng: random.Random) -> Term:
    """Losses that a loop over the samples makes."""
    each = rng.choice(
        (
            "F.sum(F.square(y[i]))",
            "F.mean(F.square(y[i] - v[i]))",
            "F.softmax_cross_entropy(y[i : i + 1], t[i : i + 1])",
            "F.mean_squared_error(y[i], v[i])",
            "F.sum(F.softmax_cross_entropy(y[i : i + 1], t[i : i + 1], reduce='no'))",
        )
    )
    lines = (Y, f"each = [{each} for i in range(len(x))]")
    value = rng.choice(
        (
            "sum(each) / len(each)",
            "sum(each)",
            "F.mean(F.stack(each))",
            "F.sum(F.stack(each)) / len(each)",
            "F.mean(F.concat([F.reshape(e, (1, 1)) for e in each], axis=0))",
            "F.average(F.vstack([F.reshape(e, (1,)) for e in each]))",
        )
    )
    if "len(each)" in value:
        return Term("sample by sample", value, "samples", WEIGHT, lines, "len(x)")
    return Term("sample by sample", value, "samples", OTHER, lines)


# -- time steps --------------------------------------------------------------------------------

LISTS = "sx, st = F.pad_sequence(xs, padding=0).array, F.pad_sequence(ts, padding=-1).array"
ARRAYS = "sx, st = xp, tp"
CELLS = (
    ("s = [model.out(act(model.hidden(sx[:, k]))) for k in range(sx.shape[1])]",),
    (
        "model.lstm.reset_state()",
        "s = [model.out(model.lstm(sx[:, k])) for k in range(sx.shape[1])]",
    ),
    (
        "h, s = np.zeros((len(sx), 7)), []",
        "for k in range(sx.shape[1]):",
        "    h = F.tanh(model.cell(F.concat([sx[:, k], h])))",
        "    s.append(model.out(h))",
    ),
)
STEP = "F.softmax_cross_entropy(s[k], st[:, k])"
TOKENS = "sum(int((each >= 0).sum()) for each in {})"


def _unrolled(rng: random.Random) -> tuple[bool, tuple[str, ...]]:
    """Draw whether sequences are padded in the loss, and the statements of the network."""
    is_lists = rng.random() < 0.6
    return is_lists, (LISTS if is_lists else ARRAYS, *rng.choice(CELLS))


def time_steps(rng: random.Random) -> Term:
    """A loss a time step, each with a count of its own."""
    is_lists, lines = _unrolled(rng)
    first, labels = ("xs", "ts") if is_lists else ("xp", "tp")
    forms = [
        (STEP, "labels each step"),
        (STEP, "labels each step"),
        ("F.sum(F.softmax_cross_entropy(s[k], st[:, k], reduce='no'))", "sum"),
        (f"0.8 ** k * {STEP}", "labels each step"),
    ]
    if not is_lists:
        forms += [
            (STEP.replace(")", ", normalize=False)"), "samples"),
            ("F.mean(F.square(s[k]))", "elements"),
            ("F.mean_squared_error(s[k], s[0])", "elements"),
            (f"({STEP} + 0.1 * F.mean(F.square(s[k])))", "labels each step, and elements"),
        ]
    form, count = rng.choice(forms)
    total = f"sum({form} for k in range(len(s)))"
    kind = f"time steps, {'lists' if is_lists else 'arrays'}"
    draw = rng.random()
    if count == "sum" and draw < 0.5:
        tokens = TOKENS.format(labels)
        if draw < 0.25:
            return Term(kind, f"{total} / max(1, {tokens})", "tokens", WEIGHT, lines, tokens)
        return Term(kind, f"{total} / len({first})", "samples", WEIGHT, lines, f"len({first})")
    return Term(kind, total, count, KNOWN, lines)


def sorted_steps(rng: random.Random) -> Term:
    """Sequences by descending length: each time step has the samples that go on."""
    lines = (
        "order = np.argsort([-len(one) for one in xs], kind='stable')",
        "cx = F.transpose_sequence([xs[i] for i in order])",
        "ct = F.transpose_sequence([ts[i] for i in order])",
        "h, total = None, 0",
        "for rows, labels in zip(cx, ct):",
        "    i = model.hidden(rows)",
        "    h = F.tanh(i if h is None else i + model.over(h[: len(rows)]))",
        "    total += F.softmax_cross_entropy(model.out(h), labels)",
    )
    return Term("time steps, those that go on", "total", "labels each step", KNOWN, lines)


def n_step(rng: random.Random) -> Term:
    """A network over sequences, one loss of all their labels."""
    lines = ("o = model.out(F.concat(model.nstep(None, None, xs)[2], axis=0))",)
    given = "o, F.concat(ts, axis=0)"
    kind = "sequences at once"
    value, count, weight = rng.choice(
        (
            (f"F.softmax_cross_entropy({given})", "labels", ""),
            (f"F.sum(F.softmax_cross_entropy({given}, reduce='no'))", "sum", ""),
            (
                f"F.sum(F.softmax_cross_entropy({given}, reduce='no')) / len(xs)",
                "samples",
                "len(xs)",
            ),
            ("F.mean(F.square(o))", "elements of sequences", ""),
            ("F.sum(F.square(o)) / len(o)", "rows", "sum(len(one) for one in xs)"),
        )
    )
    return Term(kind, value, count, WEIGHT if weight else KNOWN, lines, weight)


def strange_steps(rng: random.Random) -> Term:
    """Losses a time step that depend on how many steps there are, or on their order."""
    is_lists, lines = _unrolled(rng)
    by_samples = STEP.replace(")", ", normalize=False)")
    form = rng.choice(
        (STEP, STEP, by_samples, "F.mean(F.square(s[k]))", "F.mean_absolute_error(s[k], s[-1])")
    )
    value = rng.choice(
        (
            "sum({} for k in range(len(s))) / len(s)",
            "F.mean(F.stack([{} for k in range(len(s))]))",
            "F.sum(F.stack([{} for k in range(len(s))]))",
            "sum({} for k in reversed(range(len(s))))",
            "sum({} for k in range(len(s)))",
            "sum({} / (len(s) - k) for k in range(len(s)))",
            "sum({} for k in range(len(s)) if (st[:, k] >= 0).any())",
            "sum({} for k in range(len(s)) if (st[:, k] >= 0).all())",
            "sum({} for k in range(0, len(s), 2)) + sum({} for k in range(1, len(s), 2))",
        )
    )
    kind = f"strange time steps, {'lists' if is_lists else 'arrays'}"
    return Term(kind, value.replace("{}", form), "steps", OTHER, lines)


# -- what is not known -------------------------------------------------------------------------


def nonlinear(rng: random.Random) -> Term:
    value = rng.choice(
        (
            "F.sqrt(F.mean(F.square(y)))",
            "F.exp(F.mean(F.tanh(y)))",
            "F.log(F.mean(F.square(y)) + 1)",
            "F.mean(F.square(y)) ** 2",
            "F.sum(m * F.square(y[:, 0])) / (F.sum(F.square(y)) + 1)",
            "F.mean(F.square(y)) * F.mean(F.square(z))",
            "F.softmax_cross_entropy(y, t) * F.mean_squared_error(y, v)",
            "F.relu(F.mean(y) - 0.1)",
            "F.maximum(F.mean(F.square(y)), F.mean(F.square(z)))",
            "F.exp(-model.scale.W[0, 0]) * F.mean(F.square(y)) + model.scale.W[0, 0]",
            "abs(F.mean(y))",
            "F.mean(F.square(y)) + F.sqrt(F.sum(F.square(model.out.W)))",
            "F.sqrt(F.sum(F.square(model.out.W)))",
            "F.max(F.stack([F.mean(F.square(y)), F.softmax_cross_entropy(y, t)]))",
        )
    )
    return Term("nonlinear", value, "?", OTHER, (Y, Z))


def mixing(rng: random.Random) -> Term:
    value = rng.choice(
        (
            "F.mean(F.square(F.softmax(y, axis=0)))",
            "F.mean(F.square(F.matmul(y, y, transb=True)))",
            "F.mean(F.square(y - F.broadcast_to(F.mean(y, axis=0), y.shape)))",
            "F.softmax_cross_entropy(model.bn(y), t)",
            "F.mean(F.square(model.bn(y) - v))",
            "F.mean(F.square(F.mean(y, axis=0)))",
            "F.sum(F.square(F.sum(y, axis=0)))",
            "F.logsumexp(y)",
            "F.max(y)",
            "F.sum(F.max(y, axis=0))",
            "F.mean(F.square(y[np.argsort(y.array[:, 0])[len(y) // 2 :]]))",
            "F.decov(y)",
            "F.cross_covariance(y, z)",
            "F.sum(F.square(y[0]))",
            "F.mean(F.square(F.cumsum(y, axis=0)))",
            "F.mean(F.square(F.normalize(y, axis=0)))",
            "F.mean(y * F.flip(y, 0))",
            "F.softmax_cross_entropy(F.matmul(y, z, transb=True), np.arange(len(x), dtype='i'))",
            "F.mean(F.square(y) * (v / v.max()))",
            "F.sum(F.square(y) * (m / max(1, m.sum()))[:, None])",
        )
    )
    return Term("mixing", value, "?", OTHER, (Y, Z))


def numbers(rng: random.Random) -> Term:
    """Numbers that come from the samples, where no ``weight=`` says which."""
    value = rng.choice(
        (
            "F.sum(F.square(y)) / len(x)",
            "F.sum(F.square(y)) / max(1, int((t >= 0).sum()))",
            "F.sum(m * y[:, 0]) / max(1, int(m.sum()))",
            "F.mean(F.square(y)) * len(x)",
            "float(len(x)) ** -2 * F.sum(F.square(y))",
            "0.9 ** len(x) * F.mean(F.square(y))",
            "(1 + int((t >= 0).sum())) * F.mean(F.square(y))",
            "float(m.mean()) * F.softmax_cross_entropy(y, t)",
            "F.sum(F.square(y)) / float(v.sum())",
            "F.sum(F.square(y)) / 4",
            "F.mean(F.square(y)) * (1.0 if len(x) > 3 else 2.0)",
            "F.average(F.sum(F.square(y), axis=1), weights=v[:, 0])",
            "F.mean(F.average(F.square(y), axis=1, weights=START[:, 0] ** 2 + 1))",
            "F.average(F.sum(F.square(y), axis=1), weights=m + 1)",
            "F.sum(F.square(y)) / F.sum(chainer.Variable(np.ones(len(x))))",
            "F.sum(F.square(y) / len(x))",
            "F.sum(F.relu(y)) / max(1, int((y.array > 0).sum()))",
            "F.sum(y * (y.array > 0.1)) / float((y.array > 0.1).sum() + 1)",
            "F.sum(F.square(y * len(x) ** -0.5))",
            "F.sum(F.square(y)) / max(len(one) for one in xs)",
            "len(x) * F.sum(F.square(model.out.W))",
            "F.sum(F.square(model.out.W)) / len(x)",
            "chainer.Variable(np.array(0.3)) * F.mean(F.square(y))",
            "BETA[0] * F.mean(F.square(y))",
            "F.sum(F.scale(F.sum(F.square(y), axis=1), 0 * m + 1.0 / len(x), axis=0))",
        )
    )
    return Term("numbers", value, "?", OTHER, (Y,))


def wrapped(rng: random.Random) -> Term:
    """A loss that goes through functions which leave a number as it is, or nearly."""
    value = rng.choice(
        (
            "F.mean(F.softmax_cross_entropy(y, t))",
            "F.sum(F.mean_squared_error(y, v))",
            "F.average(F.reshape(F.sum(F.square(y)), (1, 1)))",
            "F.reshape(F.softmax_cross_entropy(y, t), (1,))[0]",
            "F.cast(F.cast(F.mean(F.square(y)), 'd'), 'd')",
            "F.squeeze(F.mean(F.square(y), axis=(0, 1), keepdims=True))",
            "F.mean(F.broadcast_to(F.softmax_cross_entropy(y, t), (3, 2)))",
            "F.mean(F.broadcast_to(F.mean_squared_error(y, v), (len(x),)))",
            "F.mean(F.stack([F.softmax_cross_entropy(y, t), F.mean(F.square(y))]))",
            "F.sum(F.stack([F.softmax_cross_entropy(y, t), F.mean(F.square(y))]))",
            "F.mean(F.repeat(F.square(y), 2, axis=0))",
            "F.mean(F.concat([F.square(y), F.absolute(y)], axis=0))",
            "F.mean(F.concat([F.square(y), F.square(model.out.W[:, :5])], axis=0))",
            "F.identity(F.softmax_cross_entropy(y, t)) + F.copy(F.mean(y), -1)",
            "(lambda a: a + a)(F.softmax_cross_entropy(y, t))",
            "(lambda a: 3 * a - a)(F.mean_squared_error(y, v))",
            "F.matmul(F.reshape(y, (1, -1)), np.ones((y.size, 1)))[0, 0] / y.size",
        )
    )
    return Term("wrapped", value, "?", OTHER, (Y,))


def composite(rng: random.Random) -> Term:
    """Chainer's own losses that are made of other functions, a division among them."""
    steps = "[model.out(act(model.hidden(xp[:, k]))) for k in range(xp.shape[1])]"
    labels = "[np.maximum(tp[:, k], 0) for k in range(tp.shape[1])]"
    kind, value, lines = rng.choice(
        (
            ("crf, mean", f"F.crf1d(model.crf.cost, {steps}, {labels})", ()),
            ("softmax, twice", "F.softmax_cross_entropy(y, t, enable_double_backprop=True)", (Y,)),
            ("softmax, twice", "F.softmax_cross_entropy(y, t, normalize=False, "
             "enable_double_backprop=True)", (Y,)),
        )
    )  # fmt: skip
    return Term(kind, value, "?", OTHER, lines)


def sometimes(rng: random.Random) -> Term:
    """Terms that are there for some samples only."""
    value = rng.choice(
        (
            "(F.mean(F.square(y)) if (t >= 0).any() else 0)",
            "(F.softmax_cross_entropy(y, t) if (t >= 0).any() else 0 * F.sum(y))",
            "(F.mean(F.square(y)) if (t >= 0).all() else F.mean(F.absolute(y)))",
            "(F.mean(F.square(y)) if len(x) > 2 else F.sum(F.square(y)))",
            "F.sum(F.square(y[np.nonzero(t >= 0)[0]]))",
            "(F.mean(F.square(y[np.nonzero(t >= 0)[0]])) if (t >= 0).any() else F.sum(y) * 0)",
            "sum(F.mean(F.square(y[i])) for i in range(len(t)) if t[i] >= 0) + 0 * F.sum(y)",
            "sum(F.mean(y[np.nonzero(t == k)[0]] ** 2) for k in range(5) if k in t) + 0 * F.sum(y)",
        )
    )
    return Term("sometimes", value, "?", OTHER, (Y,))


def more_than_counted(rng: random.Random) -> Term:
    """A sum over all samples, divided by how many have a label: no weight is right for it."""
    value = "F.sum(F.square(y)) / max(1, int((t >= 0).sum()))"
    return Term("summed, not counted", value, "?", OTHER, (Y,), "int((t >= 0).sum())")


MAKERS: dict[str, tuple[Maker, ...]] = {
    KNOWN: (
        softmax, softmax, softmax, soft_targets, sigmoid, sigmoid, regression, regression,
        each_error, huber, hinge, vae, vae, pairs, plain_reduction, plain_reduction, regulariser,
        regulariser, samplewise, time_steps, time_steps, time_steps, sorted_steps, n_step,
    ),
    WEIGHT: (
        softmax, sigmoid, each_error, huber, hinge, vae, pairs, plain_reduction, masked, masked,
        per_sample, time_steps, n_step,
    ),
    OTHER: (
        per_sample, strange_steps, strange_steps, nonlinear, mixing, mixing, numbers, numbers,
        composite, sometimes, wrapped, wrapped, more_than_counted,
    ),
}  # fmt: skip


def made(rng: random.Random, grade: str, fits: Callable[[Term], bool] = bool) -> Term:
    """Draw a term of this grade that fits."""
    while True:
        term = rng.choice(MAKERS[grade])(rng)
        if term.grade == grade and fits(term):
            return term


# -- programs ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """A loss, the batches that it is given, and how parts of them are taken.

    Attributes:
        grade: its class.
        kinds: of its terms, and what else is special.
        source: of the function ``loss``, and of ``weight`` where one is given.
        arguments: names of the loss function's.
        compositions: of the batches, in turn.
        how: "micro_batch", "steps", or "by hand": with steps, and backward by hand.
        options: what `accumulate` is given.
        calls: for each batch how many samples each call of update is given, with steps.
        optimizer: its source.
        links: "lazy": the first is made by its first call; "unused": one more.
    """

    seed: int
    grade: str
    kinds: tuple[str, ...]
    source: str
    arguments: tuple[str, ...]
    compositions: tuple[Composition, ...]
    how: str
    options: Mapping[str, Any]
    calls: tuple[tuple[int, ...], ...]
    optimizer: str
    links: str = ""

    def __str__(self) -> str:
        batches = ", ".join(f"{c.size} {c.labelled} {c.lengths}" for c in self.compositions)
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        weight = ", weight=weight" if "weight = " in self.source else ""
        calls = "" if self.how == "micro_batch" else f"# samples of each call: {self.calls}\n"
        return (
            f"# program {self.seed}: {self.grade}, {self.how}: {'; '.join(self.kinds)}\n"
            f"# accumulate(optimizer, {options}{weight}) with {self.optimizer}"
            f"{', links: ' + self.links if self.links else ''}\n"
            f"# batches (samples, labels, lengths): {batches}\n{calls}{self.source}"
        )

    def batches(self) -> list[list[Any]]:
        """Make the arguments of each batch."""
        made = [each.arrays(1000 * self.seed + i) for i, each in enumerate(self.compositions)]
        if 'x.astype("d")' in self.source:
            made = [{**arrays, "x": arrays["x"].astype("f")} for arrays in made]
        return [[arrays[name] for name in self.arguments] for arrays in made]

    def parts(self, place: int, batch: Sequence[Any]) -> list[list[Any]]:
        """Cut a batch as the program itself gives it to the optimizer."""
        if self.how == "micro_batch":
            return [list(batch)]
        ends = np.cumsum(self.calls[place])
        starts = ends - self.calls[place]
        return [[each[a:b] for each in batch] for a, b in zip(starts, ends, strict=True)]

    def functions(self, model: Any) -> dict[str, Any]:
        """Run the source with a model; errors can quote its lines."""
        name = f"<program {self.seed}>"
        lines = self.source.splitlines(keepends=True)
        linecache.cache[name] = (len(self.source), None, lines, name)
        start = np.random.RandomState(7).randn(LABELS, HIDDEN)
        space = {"model": model, "F": F, "np": np, "chainer": chainer}
        space |= {"START": start, "BETA": [0.3], "TURN": [0]}
        exec(compile(self.source, name, "exec"), space)
        return space

    def model(self) -> Any:
        """Make the network."""
        return Network(self.source, self.links)

    def optimizer_of(self, model: Any) -> Any:
        """Set up the optimizer, with its hook."""
        rule, *hook = self.optimizer.split(" + ")
        optimizer = eval(rule, {"O": chainer.optimizers}).setup(model)
        if hook:
            optimizer.add_hook(eval(hook[0], {"H": chainer.optimizer_hooks}))
        return optimizer


class Network(chainer.Chain):
    """The links that a source names."""

    def __init__(self, source: str, links: str = "") -> None:
        super().__init__()
        first = None if links == "lazy" else WIDTH
        kinds: dict[str, Callable[[], Any]] = {
            "hidden": lambda: L.Linear(first, HIDDEN),
            "out": lambda: L.Linear(HIDDEN, LABELS),
            "out2": lambda: L.Linear(HIDDEN, LABELS),
            "wide": lambda: L.Linear(WIDTH, 3 * LABELS),
            "lstm": lambda: L.LSTM(WIDTH, HIDDEN),
            "cell": lambda: L.Linear(WIDTH + HIDDEN, HIDDEN),
            "over": lambda: L.Linear(HIDDEN, HIDDEN, nobias=True),
            "nstep": lambda: L.NStepLSTM(1, WIDTH, HIDDEN, 0.0),
            "crf": lambda: L.CRF1d(LABELS),
            "bn": lambda: L.BatchNormalization(LABELS),
            "scale": lambda: L.Linear(1, 1, nobias=True),
            "unused": lambda: L.Linear(3, 2),
        }
        with self.init_scope():
            for name, make in kinds.items():
                if re.search(rf"model\.{name}\b", source) or name == links:
                    setattr(self, name, make())


FACTORS = ("{f} * {v}", "{v} * {f}", "{v} / {g}", "np.float64({f}) * {v}", "np.array({f}) * {v}")


@dataclass(frozen=True)
class Drawn:
    """The terms of a program, and the ``weight=`` that is given with them."""

    grade: str
    terms: list[Term]
    weight: str = ""
    note: str = ""


def _known(rng: random.Random) -> Drawn:
    terms = [made(rng, KNOWN, _is_of_samples)]
    terms += [made(rng, KNOWN) for _ in range(rng.choice((0, 0, 1, 1, 2, 3)))]
    rng.shuffle(terms)
    return Drawn(KNOWN, terms)


def _is_of_samples(term: Term) -> bool:
    return term.count != "once"


def _weighted(rng: random.Random) -> Drawn:
    """Terms that are all divided by the same count, and those of parameters alone."""
    first = made(rng, WEIGHT)
    terms = [first]
    for _ in range(rng.choice((0, 0, 1, 2))):
        if rng.random() < 0.5:
            terms.append(made(rng, KNOWN, lambda term: _goes_with(first.weight, term)))
        elif first.weight.startswith("len("):
            terms.append(made(rng, WEIGHT, lambda term: term.weight.startswith("len(")))
    return Drawn(WEIGHT, terms, first.weight)


def _goes_with(weight: str, term: Term) -> bool:
    return term.count == "once" or (weight.startswith("len(") and _is_by_sample(term))


def _is_by_sample(term: Term) -> bool:
    return term.count in ("samples", "elements y", "elements y[:, 0]")


def _other(rng: random.Random) -> Drawn:
    """A term of no known class among others, or a ``weight=`` that does not suit the terms."""
    draw = rng.random()
    if draw < 0.06:
        drawn = _weighted(rng)
        wrong = rng.choice(("1", f"({drawn.weight}) ** 2", f"({drawn.weight}) + 3", "2.5"))
        return replace(drawn, grade=OTHER, weight=wrong, note="wrong weight")
    if draw < 0.1:
        drawn = _weighted(rng)
        terms = [*drawn.terms, made(rng, KNOWN)]
        return Drawn(OTHER, terms, drawn.weight, "weight, and counts of their own")
    if draw < 0.14:
        terms = [made(rng, KNOWN, _is_by_sample) for _ in range(rng.choice((1, 2)))]
        return Drawn(OTHER, terms, "number", "weight is a number")
    terms = [made(rng, OTHER)]
    for _ in range(rng.choice((0, 0, 1, 2))):
        terms.append(made(rng, rng.choice((KNOWN, KNOWN, WEIGHT))))
    weight = terms[0].weight
    rng.shuffle(terms)
    return Drawn(OTHER, terms, weight)


DRAWN = {KNOWN: _known, WEIGHT: _weighted, OTHER: _other}


def program(seed: int) -> Program:
    """Make the program of a seed."""
    rng = random.Random(seed)
    drawn = DRAWN[rng.choices(CLASSES, (5, 2, 3))[0]](rng)
    how = rng.choices(("micro_batch", "steps", "by hand"), (8, 1.5, 0.7))[0]
    if how == "by hand" and (drawn.weight or any(term.kind == "mixing" for term in drawn.terms)):
        how = "steps"  # by hand mixing is not seen, and a weight is a function of nothing
    if drawn.weight == "number":
        how = "micro_batch"
    kinds = [term.kind for term in drawn.terms] + [drawn.note] * bool(drawn.note)
    alone = len(drawn.terms) == 1
    values = [_with_factor(rng, term, kinds, alone) for term in drawn.terms]
    links = rng.choices(("", "lazy", "unused"), (8, 1, 1))[0]
    options: dict[str, Any] = {}
    source, arguments = _written(rng, drawn, values, kinds, how)
    if "F.dropout" in source:
        options["dropout"] = "batch"
    compositions = _compositions(rng)
    calls: tuple[tuple[int, ...], ...] = ()
    if how == "micro_batch":
        options["micro_batch"] = rng.choice((1, 2, 2, 3, 3, 4, 4, 5, 6, 8, 30))
        if drawn.weight == "number":
            options["micro_batch"] = size = rng.choice((2, 3, 4))
            parts = rng.choice((2, 3, 4))
            compositions = tuple(replace(each, size=size * parts) for each in compositions)
            options["weight"] = 1 / parts
    else:
        options["steps"] = steps = rng.choice((2, 2, 3, 4))
        if rng.random() < 0.1:  # one sample a call, so that nothing can be compared
            options["steps"] = steps = rng.choice((4, 5, 7))
            compositions = tuple(replace(each, size=steps) for each in compositions)
        calls = tuple(_calls(rng, each.size, steps) for each in compositions)
        if rng.random() < 0.2:
            calls = (*calls[:-1], _calls(rng, compositions[-1].size, steps - 1))
    grade = drawn.grade
    if grade == KNOWN and rng.random() < 0.04 and "factor" not in kinds:
        options["check"] = False
    if grade == KNOWN and not _has_to_go(drawn, kinds, how, options, calls):
        grade = OTHER
    rule = rng.choice(("O.SGD(0.05)", "O.SGD(0.05)", "O.MomentumSGD(0.02)"))
    hook = rng.choice(("", "", "", " + H.WeightDecay(1e-2)", " + H.GradientClipping(0.5)"))
    return Program(
        seed, grade, tuple(kinds), source, arguments, compositions, how, options, calls,
        rule + hook, links,
    )  # fmt: skip


def _with_factor(rng: random.Random, term: Term, kinds: list[str], alone: bool) -> str:
    """Give a term a factor, or none; notes it."""
    # Chainer's Hinge.backward divides the gradient that it is given in place: terms that are added
    # to it share that array. A factor is given an array of its own.
    if rng.random() < 0.5 and (alone or term.kind != "hinge"):
        return term.value
    value = term.value
    if not re.fullmatch(r"[\w.]+(\(.*\))?", value) or value.count("(") > 1:
        value = f"({value})"
    kinds += ["factor"] * ("factor" not in kinds)
    factor = f"{rng.choice((0.1, 0.3, 0.5, 2.0, 1.7)):g}"
    return rng.choice(FACTORS).format(f=factor, g=rng.choice((2, 4, 3.5)), v=value)


def _has_to_go(
    drawn: Drawn,
    kinds: Sequence[str],
    how: str,
    options: Mapping[str, Any],
    calls: Sequence[Sequence[int]],
) -> bool:
    """Say whether a program of known terms has to be accepted, as parts of it are taken.

    Several counts need their totals before the first backward, which calls one by one cannot
    give; a factor needs samples enough to compare uneven parts with them at once.
    """
    if options.get("dropout") or options.get("check") is False:
        return False
    if how == "micro_batch":
        return "factor" not in kinds or options["micro_batch"] > 1
    if len({term.count for term in drawn.terms}) > 1 or "each step" in drawn.terms[0].count:
        return False
    if how == "by hand":  # where Chainer's gaussians have factors, too
        return not any(kind == "factor" or kind.startswith("gaussian") for kind in kinds)
    return "factor" not in kinds or calls[0][0] > 2


def _written(
    rng: random.Random, drawn: Drawn, values: Sequence[str], kinds: list[str], how: str
) -> tuple[str, tuple[str, ...]]:
    """Write the source, and say which arguments it takes."""
    act = f"act = F.{rng.choice(('tanh', 'tanh', 'sigmoid', 'relu', 'softplus', 'elu'))}"
    text = "\n".join(line for term in drawn.terms for line in (*term.lines, term.value))
    if how == "micro_batch" and "act(" in text and rng.random() < 0.04:
        act = "act = lambda h: F.dropout(F.tanh(h), 0.4)"
        kinds.append("dropout")
    lines, names = [], []
    for place, (term, value) in enumerate(zip(drawn.terms, values, strict=True)):
        lines += [line for line in term.lines if line not in (Y, Z, Y2) or line not in lines]
        name = "abcd"[place] + "_"
        lines.append(f"{name} = {value}")
        names.append(name)
    if how == "micro_batch" and not drawn.weight and len(names) > 1 and rng.random() < 0.15:
        kinds.append("by turns")  # as of two networks that play against each other
        lines += ["if TURN[0] % 2:", f"    return {names.pop()}"]
    lines += _joined(rng, names, kinds)
    used = set(re.findall(r"\b\w+\b", "\n".join([*lines, drawn.weight])))
    arguments = tuple(name for name in ARGUMENTS if name in used)
    if "x" in arguments and rng.random() < 0.06:
        lines.insert(0, 'x = x.astype("d")')
    given = ", ".join(arguments)
    source = f"{act}\n\n\ndef loss({given}):\n" + "".join(f"    {line}\n" for line in lines)
    if drawn.weight and drawn.weight != "number":
        source += f"\n\nweight = lambda {given}: {drawn.weight}\n"
    return source, arguments


def _joined(rng: random.Random, names: Sequence[str], kinds: list[str]) -> list[str]:
    """Add up the terms, as people do."""
    if len(names) == 1:
        return [f"return {names[0]}"]
    draw = rng.random()
    if draw < 0.1:
        return [f"return sum([{', '.join(names)}])"]
    if draw < 0.2:
        return [f"return F.add({', '.join(names)})"]
    if draw < 0.3:
        lines = ["loss = 0.0", *(f"loss += {name}" for name in names), "return loss"]
        return lines
    if draw < 0.6:
        kinds += ["factor"] * ("factor" not in kinds)  # a difference has one
        how = rng.choice(("{0}", "0.5 * ({1})", "({1}) / {2}", "({0}) * np.float64(0.7)"))
        return ["return " + how.format(" - ".join(names), " + ".join(names), len(names))]
    return [f"return {' + '.join(names)}"]


def _compositions(rng: random.Random) -> tuple[Composition, ...]:
    """Draw what the batches are like: the first mostly plain, later ones not."""
    size = rng.randint(4, 17)
    made = []
    for place in range(rng.choice((2, 3, 3, 4))):
        if place and rng.random() < 0.5:
            size = rng.randint(4, 17)
        if not place and rng.random() < 0.7:
            made.append(Composition(size, "all", "even"))
            continue
        labelled = rng.choices(("all", "some", "none", "one", "run"), (1, 4, 1.5, 1, 2.5))[0]
        made.append(
            Composition(size, labelled, rng.choice(("even", "varied", "varied", "descending")))
        )
    return tuple(made)


def _calls(rng: random.Random, size: int, count: int) -> tuple[int, ...]:
    """Cut a batch into so many calls, even or not."""
    if rng.random() < 0.4:
        return tuple(len(part) for part in np.array_split(np.arange(size), count))
    ends = [0, *sorted(rng.sample(range(1, size), count - 1)), size]
    return tuple(b - a for a, b in pairwise(ends))
