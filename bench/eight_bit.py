"""What do optimizer states of 8 bits take, in memory, in time and of what is learnt?

Float32 parameters on NumPy, one large one and 128 with as many elements together, whose
temporaries stay in the cache with Chainer too: state an element, processor time and temporaries of
a step of `Adam8bit` and `MomentumSGD8bit`, with Numba and without, beside Chainer's own, in turn in
one process; ratios are medians of those of each turn. Two small networks, a transformer that
fills in bytes of umem's own pages and a convolutional network on gratings of which a tenth have a
wrong label: the loss on what was held out, after training by Chainer's Adam and by Adam8bit from
the same start on the same batches. And every code beside a search in float64: of all values
half-way between two codes, of what lies next to them, and of a million over all exponents.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

import statistics
import subprocess
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import click
import common
import numpy as np
from report_tables import Row, Table, counted, figure, percent, quantity, span, text

import umem.chainer  # isort: skip  (before chainer)
import chainer
from models.learners import Gratings, MaskedBytes

from umem.chainer.optimizers import paths
from umem.chainer.optimizers.quantized_state import BLOCK, dequantized, quantized
from umem.units import MIB

ELEMENTS, QUICK_ELEMENTS = 8 << 20, 1 << 19
STEPS, QUICK_STEPS = 150, 3
HELD_OUT, QUICK_HELD_OUT = 25, 2
"""Batches that the loss is the mean of."""
SEEDS = (0, 1, 2)
RULES, COUNTS = ("Adam", "MomentumSGD"), (1, 128)
MOST_BYTES, MOST_LOSS = 2.05, 0.01
MOST_TIME = {"Numba": 1.0, "NumPy": 3.5}
"""Of Chainer's own update of Adam."""
Array = np.ndarray[Any, Any]


# -- one update --------------------------------------------------------------------------------


@contextmanager
def without_numba() -> Iterator[None]:
    """Have updates go by NumPy alone."""
    compiled, paths.compiled = paths.compiled, lambda name: None
    try:
        yield
    finally:
        paths.compiled = compiled


class Way(NamedTuple):
    """A way to update, and the parameters that it updates."""

    name: str
    block: Callable[[], AbstractContextManager[None]]
    optimizer: Any
    parameters: list[Any]
    seconds: list[float]

    def update(self) -> None:
        """Take one step of the optimizer, its look at the gradients included; note its time."""
        with self.block():
            start = time.process_time()
            self.optimizer.update()
            self.seconds.append(time.process_time() - start)

    def temporaries(self) -> int:
        """The most bytes that a step needs only while it runs."""
        with self.block():
            tracemalloc.start(1)
            try:
                self.optimizer.update()
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()


def way(name: str, block: Any, optimizer: Any, elements: int, count: int) -> Way:
    """A way with parameters of its own, which have gradients, and the state of one update."""
    generator = np.random.default_rng(0)
    model = chainer.Chain()
    with model.init_scope():
        for number in range(count):
            value = generator.standard_normal(elements // count, "float32")
            setattr(model, f"W{number}", chainer.Parameter(value))
    for param in model.params():
        param.grad = generator.standard_normal(param.size, "float32") * np.float32(1e-3)
    with block():
        optimizer.setup(model).update()
    return Way(name, block, optimizer, list(model.params()), [])


def updates(rule: str, elements: int, count: int, repeats: int, beside: str | None) -> list[Row]:
    """A row a path: Chainer's, with Numba, by NumPy alone, and perhaps of bitsandbytes."""
    small = getattr(umem.chainer.optimizers, f"{rule}8bit")
    plain = way("Chainer", nullcontext, getattr(chainer.optimizers, rule)(), elements, count)
    found = [plain, way("NumPy", without_numba, small(), elements, count)]
    if paths.compiled("AdamStep") is not None:
        found.append(way("Numba", nullcontext, small(), elements, count))
    others: list[float] = []
    is_there = beside is not None and (rule, count) == ("Adam", 1)
    with bitsandbytes(beside, elements) if is_there else nullcontext() as theirs:
        for repeat in range(repeats):
            for one in found[:: 1 if repeat % 2 else -1]:
                one.update()
            if theirs is not None:
                others.append(theirs())
    rows = [update_row(rule, one, plain) for one in found]
    if others:
        rows.append(
            {
                "part": "update", "rule": rule, "path": "bitsandbytes", "elements": elements,
                "count": count,
                "seconds": others, "ratio": ratio(others, plain.seconds),
            }
        )  # fmt: skip
    return rows


def update_row(rule: str, one: Way, plain: Way) -> Row:
    states = (value for p in one.parameters for value in p.update_rule.state.values())
    state, elements = sum(v.nbytes for v in states), sum(p.size for p in one.parameters)
    row: dict[str, Any] = {
        "part": "update", "rule": rule, "path": one.name, "elements": elements,
        "count": len(one.parameters), "state_bytes": state, "seconds": one.seconds,
        "temporary_bytes": one.temporaries(), "ratio": ratio(one.seconds, plain.seconds),
    }  # fmt: skip
    if rule == "Adam" and one.name in MOST_TIME:
        small = state <= MOST_BYTES * elements
        row["target"] = "met" if small and row["ratio"] <= MOST_TIME[one.name] else "missed"
    return row


def ratio(seconds: list[float], plain: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(seconds, plain, strict=True))


BITSANDBYTES = """
import sys, time, torch, bitsandbytes
torch.set_num_threads(1)
torch.manual_seed(0)
parameter = torch.nn.Parameter(torch.randn({elements}))
optimizer = bitsandbytes.optim.Adam8bit([parameter])
parameter.grad = 1e-3 * torch.randn({elements})
optimizer.step()
for line in sys.stdin:
    start = time.process_time()
    optimizer.step()
    print(time.process_time() - start, flush=True)
"""


@contextmanager
def bitsandbytes(python: str, elements: int) -> Iterator[Callable[[], float]]:
    """Have bitsandbytes' Adam8bit in a process of its own, one thread; each call times a step."""
    process = subprocess.Popen(
        [python, "-c", BITSANDBYTES.format(elements=elements)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def step() -> float:
        try:
            print("step", file=process.stdin, flush=True)
            return float(process.stdout.readline())  # type: ignore[union-attr]
        except (BrokenPipeError, ValueError):
            _, said = process.communicate()
            raise click.ClickException(f"bitsandbytes does not run there: {said[-500:]}") from None

    try:
        yield step
    finally:
        process.kill()
        process.communicate()


# -- what is learnt ----------------------------------------------------------------------------


def networks() -> dict[str, Callable[[], Any]]:
    return {"language": lambda: MaskedBytes(common.HERE.parent / "docs"), "pictures": Gratings}


def learnt(network: str, seed: int, steps: int, held_out: int) -> Row:
    """The loss on what was held out, by either optimizer."""
    losses = {}
    for name, kind in (
        ("whole", chainer.optimizers.Adam),
        ("small", umem.chainer.optimizers.Adam8bit),
    ):
        chainer.global_config.dtype = np.dtype("f")
        np.random.seed(seed)
        model = networks()[network]()
        optimizer = kind(alpha=1e-3).setup(model)
        generator = np.random.default_rng(seed)
        for step in range(steps):
            optimizer.alpha = 1e-3 * (1 - step / steps)  # to nothing: less noise at the end
            optimizer.update(model, *model.batch(generator, False))
        losses[name] = loss_on_held_out(model, held_out)
    share = (
        sum(param.size for param in model.params() if "m_codes" in (param.update_rule.state or {}))
        / model.count_params()
    )
    return {
        "part": "training", "network": network, "seed": seed, "steps": steps, **losses,
        "change": losses["small"] / losses["whole"] - 1, "quantized_share": share,
    }  # fmt: skip


def loss_on_held_out(model: Any, batches: int) -> float:
    generator = np.random.default_rng(10_000)
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        found = [float(model(*model.batch(generator, True)).array) for _ in range(batches)]
    return statistics.fmean(found)


# -- codes -------------------------------------------------------------------------------------


def codes(signed: bool, drawn: int) -> Row:
    """Codes of values beside a search in float64, which takes the first of the nearest."""
    map_ = dequantized(np.arange(256, dtype=np.uint8), np.ones(1, "f"), signed, np.float64)
    middles = ((map_[1:] + map_[:-1]) / 2).astype("f")
    near = [middles, map_.astype("f")]
    for side in (-np.inf, np.inf):
        near.append(np.nextafter(middles, np.float32(side)))
    bits = np.random.default_rng(0).integers(0, 0x3F800001, drawn, dtype=np.uint32)
    values = np.concatenate([*near, bits.view("f"), *([-bits.view("f")] if signed else [])])
    exact = map_[1:] + map_[:-1] == 2 * middles.astype("d")
    return {
        "part": "codes",
        "map": "signed" if signed else "unsigned",
        "values": len(values),
        "ties": int(exact.sum()),
        "wrong": int((code_of(values, signed) != nearest(values, map_)).sum()),
    }


def code_of(values: Array, signed: bool) -> Array:
    """Quantise values from -1 to 1, with a 1 in each block so that nothing is scaled."""
    rows = np.ones((-(-len(values) // (BLOCK - 1)), BLOCK), "f")
    flat = np.zeros(len(rows) * (BLOCK - 1), "f")
    flat[: len(values)] = values
    rows[:, 1:] = flat.reshape(len(rows), -1)
    return quantized(rows, signed)[0][:, 1:].reshape(-1)[: len(values)]


def nearest(values: Array, map_: Array) -> Array:
    parts = np.array_split(values.astype("d"), max(1, len(values) // 4096))
    return np.concatenate([np.abs(part[:, None] - map_).argmin(axis=1) for part in parts])


# -- the report --------------------------------------------------------------------------------


def of(result: common.Result, part: str) -> list[Row]:
    return [row for row in result["rows"] if row["part"] == part]


def means(rows: list[Row]) -> dict[str, float]:
    """By network, how the mean loss over the seeds changes."""
    found = {}
    for network in dict.fromkeys(row["network"] for row in rows):
        its = [row for row in rows if row["network"] == network]
        found[network] = sum(r["small"] for r in its) / sum(r["whole"] for r in its) - 1
    return found


def answer(result: common.Result) -> str:
    found = [row for row in of(result, "update") if row["rule"] == "Adam"]
    adam = {row["path"]: row for row in found}
    state = adam["NumPy"]["state_bytes"] / adam["NumPy"]["elements"]
    times = [
        f"{span(row['ratio'] for row in found if row['path'] == name)} {words}"
        for name, words in (("Numba", "with Numba"), ("NumPy", "without"))
        if name in adam
    ]
    training, wrong = of(result, "training"), sum(row["wrong"] for row in of(result, "codes"))
    return (
        f"Adam8bit keeps {figure(state)} bytes an element and takes {' and '.join(times)} of the "
        "time of Chainer's Adam; over the seeds the loss on what is held out changes by "
        f"{span(means(training).values(), lambda x: percent(x, signed=True))} in the mean "
        f"({span((r['change'] for r in training), lambda x: percent(x, signed=True))} for a seed); "
        f"{wrong} of {sum(row['values'] for row in of(result, 'codes')):,} codes are not the "
        "nearest."
    )


def per_element(row: Row) -> float:
    return statistics.median(row["seconds"]) / row["elements"]


def tables(result: common.Result) -> list[Table]:
    return [
        Table(
            (
                text("rule", "rule"),
                counted("parameters", "count"),
                text("path", "path"),
                quantity(
                    "state an element",
                    lambda r: r["state_bytes"] / r["elements"] if "state_bytes" in r else None,
                    "bytes",
                ),
                quantity("time an element", per_element, "ns", per=1e-9),
                quantity("time of Chainer's update", "ratio"),
                quantity("temporaries of an update", "temporary_bytes", "MiB", per=MIB),
                text("target", "target"),
            ),
            of(result, "update"),
            "One update",
        ),
        Table(
            (
                text("network", "network"),
                counted("seed", "seed"),
                quantity("loss with Adam", "whole"),
                quantity("loss with Adam8bit", "small"),
                text("change of the loss", lambda row: percent(row["change"], signed=True)),
                text("elements with 8 bits", lambda row: percent(row["quantized_share"])),
            ),
            of(result, "training"),
            "Loss on what was held out",
        ),
        Table(
            (
                text("map", "map"),
                counted("values", "values"),
                counted("exact ties among them", "ties"),
                counted("codes that are not the nearest", "wrong"),
            ),
            of(result, "codes"),
            "Codes",
        ),
    ]


def notes(result: common.Result) -> list[str]:
    kept = {n: abs(c) <= MOST_LOSS for n, c in means(of(result, "training")).items()}
    return [
        f"Mean loss within {percent(MOST_LOSS)} over the seeds: "
        + ", ".join(f"{name} {'met' if met else 'missed'}" for name, met in kept.items())
        + "."
    ]


BENCH = common.Bench("eight_bit", __doc__, answer, tables=tables, notes=notes)


@click.command(help=__doc__)
@click.option("--elements", type=click.IntRange(4096), default=ELEMENTS, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=9, show_default=True)
@click.option("--bitsandbytes", "beside", help="A Python in which bitsandbytes is installed.")
@click.option("--quick", is_flag=True, help="A smaller parameter, three steps, one seed.")
@common.json_option
def main(elements: int, repeats: int, beside: str | None, quick: bool, path: Path | None) -> None:
    common.writable(path)
    seeds, steps, held_out, drawn = SEEDS, STEPS, HELD_OUT, 1_000_000
    if quick:
        elements, repeats, drawn = QUICK_ELEMENTS, 3, 10_000
        seeds, steps, held_out = SEEDS[:1], QUICK_STEPS, QUICK_HELD_OUT
    rows = [
        row
        for rule in RULES
        for count in COUNTS
        for row in updates(rule, elements, count, repeats, beside)
    ]
    for network in networks():
        for seed in seeds:
            rows.append(learnt(network, seed, steps, held_out))
            click.echo(f"{network}, seed {seed}", err=True)
    rows += [codes(signed, drawn) for signed in (True, False)]
    options = {"elements": elements, "repeats": repeats, "steps": steps, "seeds": list(seeds)}
    BENCH.finish(rows, path, simulated=False, options=options)


if __name__ == "__main__":
    main()
