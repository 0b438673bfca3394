"""Random training programs: a loss function, a few batches, and a way to take them in parts.

A program is a function of its seed, and can be printed. `loss_verdicts` runs one by whole batches
with Chainer alone, which is the oracle, and in parts with `umem.chainer.accumulate`.

Its class (`grade`) says what has to come of it:
- ``known``: sums with factors of Chainer's losses and of means; accepted, and right.
- ``weight``: other losses with a right ``weight=``; accepted, and right.
- ``wrong``: the same with a wrong one, which shows in three samples spread over a batch; refused.
- ``other``: whatever people write (`odd_losses`, `odd_programs`), and what the contract refuses by
  name (`_refused_by_name`); refused, or right.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from loss_families import DICTIONARIES, KNOWN, RAGGED, REGULARISERS, SAID, STEPWISE
from odd_losses import GROUPS
from odd_programs import MORE

STEPS, LABELS, IDS = 3, 4, 7
"""Time steps of fixed length; labels; identifiers."""
WAYS = ("micro_batch",) * 5 + ("steps",) * 2 + ("by hand",) * 2 + ("updater",)
BY_UPDATE = tuple(each for each in WAYS if each != "by hand")
LATER = ("regular", "ignored", "empty part", "nothing", "ragged", "sorted", "equal", "clumped")
HOOKS = (
    "frozen",
    "WeightDecay(0.1)",
    "GradientClipping(0.05)",
    "GradientHardClipping(-0.01, 0.01)",
)
TRUNKS = (
    "h = F.tanh(model.l1(x))",
    "h = F.tanh(model.l1(x))",
    "h = F.relu(model.l1(x))\n    h = F.tanh(model.l3(h)) + h",
    "h = F.sigmoid(model.l1(x)) * F.tanh(model.l4(x))",
    "h = model.ln(F.tanh(model.l1(x)))",
    "h = F.tanh(model.l3(F.tanh(model.l3(F.tanh(model.l1(x))))))",
    "h = F.reshape(F.tanh(F.reshape(model.l1(x), (-1, 2, 3))), (-1, 6))",
    "h = F.normalize(model.l1(x)) + F.softmax(model.l4(x), axis=1)",
)
ROUND = "model.cleargrads()\n    loss({0}).backward()\n    optimizer.update()"
ROUNDS = (
    ROUND,
    ROUND,
    "value = loss({0})\n    model.cleargrads()\n    value.backward()\n"
    "    value.unchain_backward()\n    optimizer.update()",
    "model.cleargrads()\n    (loss({0}) / 3).backward()\n    optimizer.update()",
)
VECTOR = (
    "model.cleargrads()\n    value = loss({0})\n"
    "    value.grad = np.full(value.shape, 1 / value.size, value.dtype)\n"
    "    value.backward()\n    optimizer.update()"
)
TWICE = (
    "model.cleargrads()\n    first, second = loss({0})\n"
    "    first.backward()\n    second.backward()\n    optimizer.update()"
)
MEANS = ("mean", "average", "gaussian_nll", "gaussian_kl_divergence", "bernoulli_nll", "black_out")
"""Functions that end in Chainer's mean."""
Columns = dict[str, Any]
"""Arrays, whose first axis is the samples, and lists of an array a sample, by name."""


@dataclass(frozen=True)
class Shared:
    """An argument that is the same for all samples."""

    value: Any


@dataclass(frozen=True)
class AsVariable:
    """An argument that is given as a Variable."""

    array: np.ndarray


@dataclass(frozen=True)
class Program:
    seed: int
    grade: str
    kinds: tuple[str, ...]
    how: str
    source: str
    names: tuple[str, ...]
    weight: str | None
    """Source text of the weight=; functions take the arguments of the loss function."""
    micro_batch: int
    """0 where parts are given."""
    updates: tuple[tuple[Columns, tuple[int, ...]], ...]
    """The samples of each, and the sizes of its parts."""
    modes: tuple[str, ...]
    dtype: str
    hook: str | None

    @property
    def tolerance(self) -> float:
        return 1e-3 if "float32" in (self.dtype, *self.source.split("'")) else 1e-7

    def __str__(self) -> str:
        how = f"micro_batch={self.micro_batch}" if self.micro_batch else "parts as given"
        lines = [f"# program {self.seed}: {self.grade}; {'; '.join(self.kinds)}", self.source]
        lines += [f"# {self.how}, {how}, weight={self.weight}, {self.dtype}, hook {self.hook}"]
        for mode, (columns, sizes) in zip(self.modes, self.updates, strict=True):
            lines.append(f"# batch of {sum(sizes)} = {' + '.join(map(str, sizes))}, {mode}:")
            lines += [f"#   {name} = {_shown(columns[name])}" for name in self.names]
        return "\n".join(lines)


def _shown(column: Any) -> str:
    """Format an argument for the report of a failure."""
    if isinstance(column, AsVariable):
        return f"Variable{list(column.array.shape)}"
    if isinstance(column, Shared):
        return f"for all: {column.value!r}".replace("\n", " ")
    if isinstance(column, list):
        return f"arrays of {[len(each) for each in column]}"
    if column.dtype.kind == "f" and column.ndim > 1:
        return f"{column.dtype}{list(column.shape)}"
    return " ".join(np.array2string(column, precision=3, separator=",").split())


@dataclass
class Draft:
    """What a class draws; the batches come after it."""

    grade: str
    kinds: list[str]
    names: str
    body: str
    weight: str | None = None
    right: str | None = None
    """What a wrong weight= should have been, where the two can be compared."""
    ways: Sequence[str] = WAYS
    round: str | None = None
    level: bool = False
    """Sequences are of the same length in all batches."""
    known: Sequence[str] = ()
    """The terms whose divisor is known, each with the factors that the program writes at it."""
    first: Sequence[str] = ("regular",) * 6 + ("sorted", "ignored", "equal", "ragged")


def program(seed: int) -> Program:
    """Draw the program of a seed."""
    rng = random.Random(seed)
    maker = rng.choices((known, weighted, wrong, other), (25, 22, 12, 41))[0]
    draft = maker(rng)
    how = rng.choice(draft.ways)
    named = re.search(r"return (\{|dict|terms)", draft.body) is not None
    if named and how == "by hand":  # a dictionary is summed by update()
        how = "steps"
    names = tuple(dict.fromkeys(draft.names.split()))
    dtype = "float32" if rng.random() < 0.12 else "float64"
    arguments = ", ".join(names)
    if draft.kinds == ["a loss in a closure"]:
        source = f"def loss():\n    {arguments} = state.part\n    {draft.body}"
    else:
        source = f"def loss({arguments}):\n    {draft.body}"
    if how == "by hand":
        text = draft.round or rng.choice(ROUNDS)
        source += f"\n\ndef one_round({arguments}):\n    {text.format(arguments)}"
    micro = 0 if how in ("steps", "by hand") else rng.choice((1, 2, 2, 3, 3, 4, 4, 5))
    grade = draft.grade
    for _ in range(12):
        updates, modes = _batches(rng, draft, names, how, micro, dtype)
        if grade != "wrong" or _shows(draft, names, *updates[0], how):
            break
    kinds = [f"{kind}, by hand" if (grade, how) == ("other", "by hand") else kind
             for kind in draft.kinds]  # fmt: skip
    if grade in ("known", "weight") and not micro:
        refused = _refused_by_name(draft, names, modes, source, how, [each[1] for each in updates])
        if refused:
            grade, kinds = "other", [refused]
    if grade == "wrong":
        shown = [n for n, (columns, sizes) in enumerate(updates)
                 if _shows(draft, names, columns, sizes, how)]  # fmt: skip
        if 0 in shown:
            updates, modes = [updates[n] for n in shown], [modes[n] for n in shown]
        else:
            grade = "other"
            kinds = ["a wrong weight that may not show"]
    return Program(
        seed,
        grade,
        tuple(dict.fromkeys(kinds)),
        how,
        source,
        names,
        _weight(draft.weight, arguments),
        micro,
        tuple(updates),
        tuple(modes),
        dtype,
        rng.choice(HOOKS) if rng.random() < 0.08 else None,
    )


def _refused_by_name(
    draft: Draft,
    names: Sequence[str],
    modes: Sequence[str],
    source: str,
    how: str,
    sizes: Sequence[tuple[int, ...]],
) -> str:
    """Name what the contract refuses where parts come one by one; "" if it accepts a program."""
    if how == "by hand" and _is_divided_by_steps(draft, source, len(sizes[0])):
        return "loss / steps, by hand"
    if how == "by hand" and 1 in {each for of in sizes for each in of} and _has_like_terms(draft):
        return "like terms of a single row, by hand"
    if _apart(draft, names, modes):
        return "counts of terms that go apart, parts as given"
    return ""


def _is_divided_by_steps(draft: Draft, source: str, steps: int) -> bool:
    """Say whether all known terms have the factor 1 / steps, as in PyTorch's loops."""
    habit = {2: r"\b0\.5 \*", 3: r"/ 3\b"}[steps]
    by_hand = source.partition("def one_round")[2]
    return bool(draft.known) and all(re.search(habit, each + by_hand) for each in draft.known)


def _has_like_terms(draft: Draft) -> bool:
    """Say whether several known terms may end in the same function."""
    names = []
    for each in draft.known:
        end = re.search(r"F\.(?!identity|cast|reshape)(\w+)", each)
        name = end[1] if end else ""
        names.append("mean" if name in MEANS else name)
    return draft.level or len({*names}) < len(names)


def _apart(draft: Draft, names: Sequence[str], modes: Sequence[str]) -> bool:
    """Say whether the terms count in another proportion in each part.

    The first part is then gone through before anybody knows its share of each.
    """
    if len({*draft.kinds} - {"one term", "mixture"}) == 1 and draft.level is False:
        return False
    weight = draft.weight or ""
    if weight == "1" or re.search(r"1,|\br\b|\bm\b|\[c\]|map\(len|>= 0", weight):
        return True
    labels = {"t", "b", "tt", "m"} & {*names}
    left_out = labels and {*modes} - {"regular", "sorted", "clumped"}
    return bool(left_out) or "tt" in labels or "ignore_label=2" in draft.body


def _weight(text: str | None, arguments: str) -> str | None:
    """Make functions of expressions; those of dictionaries stand between bars."""
    if text is None or text == "1":
        return text
    if text.startswith("{"):
        pieces = text.split("|")
        return "".join(f"lambda {arguments}: {piece}" if number % 2 else piece
                       for number, piece in enumerate(pieces))  # fmt: skip
    return f"lambda {arguments}: {text}"


# -- classes -----------------------------------------------------------------------------------


def known(rng: random.Random) -> Draft:
    """Draw a sum with factors of Chainer's losses."""
    if rng.random() < 0.12:
        name, names, body = rng.choice(STEPWISE)
        return Draft("known", [name], names, body, level=True, known=[body])
    count = rng.choices((1, 2, 3, 4), (40, 30, 20, 10))[0]
    alone = count == 1
    pool = list(KNOWN) + list(RAGGED) * alone
    if alone and rng.random() < 0.05:
        norm = rng.choice(("L1", "L2"))
        terms = [("hinge", "x c", f"F.hinge(model.l2(h), c, norm='{norm}')")]
    else:
        terms = [rng.choice(pool) for _ in range(count)]
        if not alone and rng.random() < 0.35:
            terms[rng.randrange(1, count)] = rng.choice(REGULARISERS)
    summed, kind, factored = _sum(rng, [text for _, _, text in terms])
    names = " ".join(["x", *(each[1] for each in terms)])
    hinge = terms[0][0] == "hinge"
    body = f"{rng.choice(TRUNKS)}\n    "
    body += f"return {terms[0][2]}" if hinge else f"{summed}\n    return {_outside(rng, 'loss')}"
    kinds = [each[0] for each in terms] + [kind] * (not hinge)
    known = _known([each[2] for each in terms], factored)
    return Draft("known", kinds, names, body, known=known)


def _known(terms: Sequence[str], factored: Sequence[str]) -> list[str]:
    """Return those with a divisor of their own, with their factors."""
    texts = {text for _, _, text in (*KNOWN, *RAGGED)}
    return [each for each, term in zip(factored, terms, strict=True) if term in texts]


def _outside(rng: random.Random, name: str) -> str:
    """Put what passes between a loss and its end."""
    if rng.random() < 0.65:
        return name
    return rng.choice(
        ("F.reshape({0}, (1,))", "F.reshape({0}, ())", "F.identity({0})", "{0} + 1.0", "-{0}",
         "3 - {0}", "F.cast({0}, 'float32')", "F.cast(F.identity(-{0}), 'float64')", "{0} / 7",
         "F.reshape(F.reshape({0} + 2, (1, 1)), ())")
    ).format(name)  # fmt: skip


def _factor(rng: random.Random, text: str) -> str:
    if not isinstance(ast.parse(text, mode="eval").body, ast.Call):
        text = f"({text})"
    return rng.choice(
        ("{0}", "{0}", "0.5 * {0}", "{0} * 3", "{0} / 3", "0.1 * {0}", "0 * {0}", "F.identity({0})",
         "0.5 ** state.update * {0}", "np.pi * {0}", "({0} + 0.25)", "-0.3 * -{0}",
         "min(1, 0.1 + state.update) * {0}", "2 * (0.5 * {0} / 4)")
    ).format(text)  # fmt: skip


def _sum(rng: random.Random, terms: Sequence[str]) -> tuple[str, str, list[str]]:
    """Write the sum of terms as programs do; the lines set ``loss``.

    Returns:
        the lines, the name of the form, and each term with its factors.
    """
    terms = [_factor(rng, each) for each in terms]
    if terms[0].startswith("0 *"):  # a loss that is nothing has no gradient to compare
        terms[0] = terms[0].replace("0 *", "1.5 *", 1)
    form = rng.choice(("a sum", "a sum", "a running sum", "sum()", "F.add", "a nested sum"))
    if len(terms) == 1 and form in ("F.add", "a nested sum"):
        form = "a sum"
    if form == "a sum":
        text = terms[0] + "".join(rng.choice((" + ", " - ")) + each for each in terms[1:])
        return f"loss = {text}", "one term" if len(terms) == 1 else form, terms
    if form == "a running sum":
        later = (rng.choice(("loss += {}", "loss -= {}", "loss = loss + {}")).format(each)
                 for each in terms)  # fmt: skip
        return "\n    ".join(("loss = 0", *later)), form, terms
    listed = ", ".join(terms)
    if form == "sum()":
        return f"loss = sum([{listed}])", form, terms
    if form == "F.add":
        return f"loss = F.add({listed})", form, terms
    text = f"loss = 0.5 * ({' + '.join(terms[:-1])} - 2 * ({terms[-1]}))"
    return text, form, [f"0.5 * {each}" for each in terms]


def weighted(rng: random.Random) -> Draft:
    """Draw a loss that needs a weight=, with a right one."""
    if rng.random() < 0.28:
        name, names, body, weight, _ = rng.choice(DICTIONARIES)
        body = f"{rng.choice(TRUNKS)}\n    {body}"
        return Draft("weight", [name], f"x {names}", body, weight, ways=BY_UPDATE, level=True)
    name, names, text, weight, _ = rng.choice(SAID)
    terms, kinds, names = [text], [name], f"x {names}"
    if rng.random() < 0.3:
        pool = (*KNOWN, *REGULARISERS)
        extra, more, text = rng.choice(pool)
        terms.insert(rng.randrange(2), text)
        names, kinds = f"{names} {more}", [*kinds, "mixture", extra]
    summed, _, factored = _sum(rng, terms)
    body = f"{rng.choice(TRUNKS)}\n    {summed}\n    return {_outside(rng, 'loss')}"
    return Draft("weight", kinds, names, body, weight, known=_known(terms, factored))


def wrong(rng: random.Random) -> Draft:
    """Draw a loss with a wrong weight=; not by hand, where nothing can be compared."""
    first = ("regular", "ignored", "uneven", "uneven", "uneven")
    if rng.random() < 0.25:
        pool = [each for each in DICTIONARIES if each[4]]
        name, names, body, right, faults = rng.choice(pool)
        weight, mistaken, meant = rng.choice(faults)
        body = f"{rng.choice(TRUNKS)}\n    {body}"
        draft = Draft("wrong", [f"{name}: {mistaken} for {meant}"], names, body, weight, meant)
        draft.right = f"{mistaken}|{meant}"
    else:
        name, names, text, right, faults = rng.choice([each for each in SAID if each[4]])
        mistaken = rng.choice(faults)
        body = f"{rng.choice(TRUNKS)}\n    return {text}"
        draft = Draft("wrong", [f"{name}: {mistaken} for {right}"], f"x {names}", body, mistaken)
        draft.right = f"{mistaken}|{right}"
    draft.ways, draft.first = BY_UPDATE, first
    return draft


def other(rng: random.Random) -> Draft:
    """Draw what people write."""
    family = rng.choice(rng.choice(GROUPS + MORE))
    lines = [rng.choice(TRUNKS), *family.body.strip("\n").split("\n")]
    names = f"x {family.names}"
    if family.plain and rng.random() < 0.3:
        _, more, text = rng.choice(KNOWN)
        sign = rng.choice(("loss = loss + 0.5 * {}", "loss = {} - loss", "loss += {}"))
        lines.append(sign.format(text))
        names = f"{names} {more}"
    if family.plain:
        lines.append("return " + (_outside(rng, "loss") if rng.random() < 0.3 else "loss"))
    text = {"vector": VECTOR, "twice": TWICE}.get(family.round or "")
    # What is said by hand cannot be checked: there umem has no loss function to call.
    ways = family.ways or (BY_UPDATE if family.weight else WAYS)
    ways = ("by hand",) if text else ways
    draft = Draft("other", [family.name], names, "\n    ".join(lines), family.weight, ways=ways)
    draft.round = text
    return draft


# -- batches -----------------------------------------------------------------------------------


def _batches(
    rng: random.Random, draft: Draft, names: Sequence[str], how: str, micro: int, dtype: str
) -> tuple[list[tuple[Columns, tuple[int, ...]]], list[str]]:
    """Draw the batches of all updates, the sizes of their parts, and how each was drawn."""
    numbers = np.random.RandomState(rng.randrange(2**31))
    updates, modes = [], []
    steps = rng.choice((2, 3))
    for number in range(rng.choice((2, 2, 3, 4))):
        if micro:
            least = max(5, micro + 1)
            size = rng.randrange(least, 10) if number == 0 else rng.randrange(1, 12)
            sizes = (micro,) * (size // micro) + (size % micro,) * (size % micro > 0)
        else:
            least = 3 if number == 0 else 1
            sizes = tuple(rng.randrange(least, 6) for _ in range(steps))
            if number == 0 and rng.random() < 0.5:
                sizes = (sizes[0],) * steps
        mode = rng.choice(draft.first if number == 0 else LATER)
        if draft.level and mode == "ragged":
            mode = "ignored"
        columns = {name: _column(name, numbers, sizes, mode, dtype) for name in names}
        _agree(columns)
        updates.append((columns, sizes))
        modes.append(mode)
    return updates, modes


def _column(
    name: str, numbers: np.random.RandomState, sizes: Sequence[int], mode: str, dtype: str
) -> Any:
    """Draw one argument for a batch."""
    size = sum(sizes)
    part = np.repeat(np.arange(len(sizes)), sizes)
    empty = _left_out(numbers, part, mode)
    if name == "vx":
        name = "x"
        return AsVariable(_real(name, numbers, part, mode).astype(dtype))
    if name in WIDTHS:
        return _real(name, numbers, part, mode).astype(dtype)
    if name in ("t", "c"):
        labels = numbers.randint(0, LABELS, size)
        if mode in ("sorted", "clumped"):
            labels.sort()
        return np.where(empty & (name == "t"), -1, labels).astype(np.int32)
    if name == "b":
        lost = empty[:, None] if mode != "uneven" else _uneven(numbers, size)
        return np.where(lost, -1, numbers.randint(0, 2, (size, 3))).astype(np.int32)
    if name == "q":
        return numbers.randint(0, 2, size).astype(np.int32)
    if name == "s":
        soft = numbers.rand(size, LABELS)
        return (soft / soft.sum(axis=1, keepdims=True)).astype(dtype)
    if name == "m":
        return np.where(empty, 0, 1).astype(dtype)
    if name == "k":  # no identifier twice in a part
        return np.concatenate([numbers.permutation(IDS)[:each] for each in sizes]).astype(np.int32)
    if name in ("e", "tt"):
        return numbers.randint(0, IDS if name == "e" else LABELS, (size, STEPS)).astype(np.int32)
    if name == "all":
        return Shared(numbers.randn(5, 6).astype(dtype))
    if name == "half":
        return Shared(0.5)
    if name == "il":
        return np.full(size, STEPS, np.int32)
    if name == "lab":
        return numbers.randint(1, LABELS, (size, 1)).astype(np.int32)
    ragged = mode in ("ragged", "clumped", "equal")
    lengths = numbers.randint(1, 6, size) if ragged else np.full(size, STEPS)
    if name == "xs":
        return [numbers.randn(each, 4).astype(dtype) for each in lengths]
    return [numbers.randint(0, LABELS, each).astype(np.int32) for each in lengths]


WIDTHS = {"x": 5, "u": 5, "v": 5, "y": 3, "noise": 3, "r": 0, "p": 3}


def _real(name: str, numbers: np.random.RandomState, part: np.ndarray, mode: str) -> np.ndarray:
    """Draw floats for an argument: probabilities, positive numbers, or normal ones."""
    width = WIDTHS[name]
    if name == "p":  # between 0 and 1
        return numbers.rand(len(part), width)
    if name == "r":  # positive, and a number a sample
        grown = 2.0 ** numbers.permutation(len(part)) if mode == "uneven" else 1
        return (0.3 + numbers.rand(len(part))) * grown
    drawn = numbers.randn(len(part), width)
    if mode == "clumped":
        drawn = drawn * (0.5 + part[:, None]) + part[:, None]
    return drawn


def _uneven(numbers: np.random.RandomState, size: int) -> np.ndarray:
    """Leave out so much that hardly any three samples count in proportion."""
    left = numbers.choice((0, 2), size)
    return np.arange(3)[None] < left[:, None]


def _left_out(numbers: np.random.RandomState, part: np.ndarray, mode: str) -> np.ndarray:
    """Say which samples count nothing."""
    if mode in ("ignored", "uneven"):
        lost = numbers.rand(len(part)) < 0.4
    elif mode == "empty part":
        lost = (part == numbers.choice(part)) | (numbers.rand(len(part)) < 0.2)
    elif mode == "nothing":
        lost = np.ones(len(part), bool)
    elif mode == "equal":  # as many in each part
        lost = np.concatenate([np.arange((part == n).sum()) > 1 for n in range(part.max() + 1)])
    else:
        lost = np.zeros(len(part), bool)
    return lost


def _agree(columns: Columns) -> None:
    """Sequences and their labels are of one length; steps without a word have no label."""
    if "xs" in columns and "ts" in columns:
        columns["ts"] = [
            np.resize(labels, len(values)).astype(np.int32)
            for labels, values in zip(columns["ts"], columns["xs"], strict=True)
        ]
    if "tt" in columns and "m" in columns:
        columns["tt"] = np.where(columns["m"][:, None] > 0, columns["tt"], -1).astype(np.int32)
    elif "tt" in columns:
        late = np.arange(STEPS)[None] > np.arange(len(columns["tt"]))[:, None] % STEPS
        columns["tt"] = np.where(late & (columns["tt"] > 1), -1, columns["tt"]).astype(np.int32)


def cut(columns: Columns, names: Sequence[str], which: Sequence[int]) -> tuple[Any, ...]:
    """Take some samples, as the arguments of the loss function."""
    return tuple(_taken(columns[name], list(which)) for name in names)


def _taken(column: Any, which: list[int]) -> Any:
    if isinstance(column, Shared):
        return column.value
    if isinstance(column, AsVariable):
        from chainer import Variable  # not above: umem.chainer has to be imported before

        return Variable(column.array[which])
    return [column[n].copy() for n in which] if isinstance(column, list) else column[which]


def parts(columns: Columns, names: Sequence[str], sizes: Sequence[int]) -> list[tuple[Any, ...]]:
    ends = np.cumsum((0, *sizes))
    return [cut(columns, names, range(*pair)) for pair in pairwise(ends)]


def _shows(
    draft: Draft, names: Sequence[str], columns: Columns, sizes: Sequence[int], how: str
) -> bool:
    """Say whether three samples, spread over a batch, tell a wrong weight from the right one."""
    assert draft.right is not None
    arguments = ", ".join(names)
    pair = [
        None if each == "1" else eval(f"lambda {arguments}: {each}", {"np": np, "len": len})
        for each in draft.right.split("|")
    ]
    first = range(sizes[0] if how == "steps" else sum(sizes))
    if len(first) < 3 or len(sizes) == 1:
        return False
    last = len(first) - 1
    spread = {(0, last // 2, last), (0, (last + 1) // 2, last), (0, len(first) // 2, last)}
    spread |= {(0, len(first) // 3, 2 * len(first) // 3)}
    spread |= {(len(first) // 6, len(first) // 2, 5 * len(first) // 6)}
    for chosen in spread:
        labels = [columns[name][list(chosen)] for name in ("t", "b", "m") if name in names]
        if any((each < 0).all() or (each.dtype.kind == "f" and not each.any()) for each in labels):
            return False  # they have no gradient
        for one in chosen:
            halves = [tuple(each for each in chosen if each != one), (one,)]
            given, meant = (_shares(each, columns, names, halves) for each in pair)
            if given is None or meant is None or abs(given[0] - meant[0]) < 0.05:
                return False
    return True


def _shares(
    weight: Callable[..., Any] | None,
    columns: Columns,
    names: Sequence[str],
    halves: Sequence[Sequence[int]],
) -> list[float] | None:
    """Return what each half is of the whole by a weight=; None where that is nothing."""
    if weight is None:
        return [1.0, 1.0]
    counts = [float(weight(*cut(columns, names, half))) for half in halves]
    return [each / sum(counts) for each in counts] if sum(counts) > 0 else None
