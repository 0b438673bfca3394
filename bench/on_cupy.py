"""In how much VRAM does a program train from its first step, plain and with less?

The least VRAM of a network, by bisection in steps of 2 MiB: CuPy 14 on a software GPU with its
model on, where memory that does not fit is refused, the gaps of CuPy's own pool included. Each try
is a process of its own, of six steps. Beside it: the most that arrays have in use in the first
step and in the last, by a memory hook of the benchmark's own, what the plan predicts, the most
that the pool reserves where VRAM is plenty, and the time of the last step by the GPU's model.

``--budgets`` adds another table to the results that are there: does a program train on a card of B
bytes with `Recompute(B)`? Five cards a network, from the least VRAM under "min" to that of plain
steps, in whole blocks of 2 MiB. ``--techniques`` adds one of what else lowers memory, each alone;
with ``--mode`` it renews the rows of that technique.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import common
from report_tables import Table, figure, listed, quantity, span, text, verdict

import umem
from umem.units import MIB

NETWORKS = {
    "residual": ("residual", "6 narrow blocks", 64), "ResNet50": ("ResNet50", "64 px", 4),
    "VGG16": ("VGG16", "32 px", 8), "U-Net": ("U-Net", "4 levels", 1),
    "DenseNet": ("DenseNet", "18 layers", 4), "transformer": ("transformer", "4 layers", 4),
    "LSTM": ("LSTM", "200 narrow words", 64), "GCN": ("GCN", "3 layers, 16 classes", 5000),
    "perceptron": ("MLP", "256 wide", 4096),
}  # fmt: skip
MODES = ("plain", "plain, 4 MiB", "min", "min, 4 MiB", "card, 4 MiB")
"""With "4 MiB" that is the cap on the workspace of convolutions."""
TECHNIQUES = (
    "offload, 4 MiB", "min and offload, 4 MiB", "accumulate, 4 MiB", "Adam8bit, 4 MiB",
    "half precision, 4 MiB",
)  # fmt: skip
FEW = ("residual", "transformer", "perceptron")
"""The networks that train by each technique."""
POINTS = 5
STEPS, GRANULE = 6, 2 * MIB
PLENTY = 4 << 30
RESULTS = common.HERE / "results" / "on_cupy.json"


# -- one try -----------------------------------------------------------------------------------


def train(network: str, mode: str, vram: int) -> dict[str, Any]:
    """Train some steps; say how far it came, and what the pool had."""
    gpu = umem.software_gpu("t4", vram=vram, force=True)
    from models import build, sent  # imports Chainer, with the compatibility layer

    # isort: split
    import chainer
    import cupy
    import numpy as np

    from umem.chainer import optimizers

    name, size, batch = NETWORKS[network]
    np.random.seed(0)
    cupy.random.seed(0)
    model, place = build(name, size), chainer.get_device("@cupy:0")
    inputs = sent(model.inputs(batch), place)
    rule = optimizers.Adam8bit if mode.startswith("Adam8") else chainer.optimizers.Adam
    optimizer = rule().setup(model.link.to_device(place))
    pool, watch = cupy.get_default_memory_pool(), watching()
    recompute, found = None, dict[str, Any](in_use=[], error=None)

    try:
        with watch, context(mode, model.link, optimizer, batch) as recompute:
            for _ in range(STEPS):
                watch.peak, begun = pool.used_bytes(), gpu.figures.seconds or 0.0
                optimizer.update(model.loss, *inputs)
                found["in_use"].append(watch.peak)
                found["simulated_step_seconds"] = (gpu.figures.seconds or 0.0) - begun
    except (cupy.cuda.memory.OutOfMemoryError, umem.UmemError) as error:
        found["error"] = f"{type(error).__name__}: {error}"
    found["reserved"] = pool.total_bytes()
    found["predicted"] = getattr(recompute, "predicted_bytes", None)
    return found


def watching() -> Any:
    """A memory hook that keeps the most that CuPy's pool has in use."""
    import cupy

    pool = cupy.get_default_memory_pool()

    class Watch(cupy.cuda.memory_hook.MemoryHook):
        name, peak = "bench", 0

        def malloc_postprocess(self, **allocation: int) -> None:
            self.peak = max(self.peak, pool.used_bytes())

    return Watch()


@contextmanager
def context(mode: str, link: Any, optimizer: Any, batch: int) -> Iterator[Any]:
    """What is on while it trains; gives the `Recompute`, or None."""
    from umem import chainer as on_chainer

    what = mode.partition(",")[0]
    with ExitStack() as stack:
        if mode.endswith("MiB"):
            stack.enter_context(on_chainer.workspace("4MiB"))
        if what == "offload":
            stack.enter_context(on_chainer.Offload())
        elif what == "accumulate":
            stack.enter_context(on_chainer.accumulate(optimizer, micro_batch=max(1, batch // 4)))
        elif what == "half precision":
            stack.callback(on_chainer.half_precision(link, optimizer).undo)
        elif not what.startswith(("plain", "Adam8bit")):
            budget, *also = what.split(" and ")
            yield stack.enter_context(on_chainer.Recompute(budget, offload=bool(also)))
            return
        yield None


# -- the bisection -----------------------------------------------------------------------------


def child_row(network: str, mode: str, vram: int) -> dict[str, Any]:
    """One try in a process of its own; memory that the process itself cannot have is an error."""
    try:
        return dict(common.child(__file__, "--one", network, mode, str(vram)))
    except click.ClickException as error:  # before a step: the model and its inputs do not fit
        return {"error": error.message.splitlines()[-1][:200], "in_use": []}


def least(network: str, mode: str) -> dict[str, Any]:
    """The least VRAM in which it trains, and what it does where there is plenty."""
    wide = child_row(network, mode, PLENTY)
    if wide["error"]:
        return {"network": network, "mode": mode, "error": wide["error"]}
    knows_card = mode.startswith("card")  # does less where there is plenty
    low = 0 if knows_card else min(wide["in_use"]) // GRANULE
    high, last = -(-wide["reserved"] // GRANULE), wide
    while child_row(network, mode, high * GRANULE)["error"]:
        low, high = high, high + max(1, high // 8)
    before = kept_least(network, mode)  # a bisection that begins there ends after two tries
    while low + 1 < high:
        middle = next((at for at in (before, before - 1) if low < at < high), (low + high) // 2)
        found = child_row(network, mode, middle * GRANULE)
        if found["error"]:
            low = middle
        else:
            high, last = middle, found
    return {
        "network": network, "mode": mode, "least_bytes": high * GRANULE,
        "first_bytes": last["in_use"][0], "last_bytes": last["in_use"][-1],
        "predicted_bytes": last["predicted"], "reserved_bytes": wide["reserved"],
        "simulated_step_seconds": last["simulated_step_seconds"],
    }  # fmt: skip


def kept_least(network: str, mode: str) -> int:
    """Return the least VRAM of the kept results, in granules; 0 if they have none."""
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    rows = [*kept.get("rows", ()), *kept.get("technique_rows", ())]
    found = (row for row in rows if (row["network"], row["mode"]) == (network, mode))
    return next((row.get("least_bytes", 0) // GRANULE for row in found), 0)


def rows(
    networks: list[str], modes: tuple[str, ...], known: Mapping[str, int] | None = None
) -> Iterator[dict[str, Any]]:
    """Find the least VRAM by network and mode.

    Args:
        known: that of plain steps by network; None: the first mode is plain.
    """
    for network in networks:
        plain = known[network] if known else 0
        for mode in modes:
            row = least(network, mode)
            plain = plain or row.get("least_bytes", 0)
            if plain and "least_bytes" in row:
                row["of_plain"] = row["least_bytes"] / plain
            click.echo(f"{network}, {mode}: {row.get('least_bytes', 0) / MIB:.0f} MiB", err=True)
            yield row


def renew(kept: dict[str, Any], networks: list[str], kinds: tuple[str, ...]) -> None:
    """Take the least VRAM by technique again: for all of them, or for those of ``kinds``."""
    if not kinds:
        kept["technique_commit"] = common.commit()
        kept["technique_rows"] = list(rows(networks, ("plain, 4 MiB", *TECHNIQUES)))
        return
    plain = {
        row["network"]: row["least_bytes"]
        for row in kept["technique_rows"]
        if row["mode"] == "plain, 4 MiB"
    }
    found = {(row["network"], row["mode"]): row for row in rows(networks, kinds, plain)}
    kept["technique_commit"] += f", {common.commit()}"
    kept["technique_rows"] = [
        found.get((row["network"], row["mode"]), row) for row in kept["technique_rows"]
    ]


# -- budgets -----------------------------------------------------------------------------------


def cards(network: str, known: Iterable[Mapping[str, Any]]) -> list[int]:
    """The cards of a network: from the least VRAM under "min" to that of plain steps."""
    least_of = {row["mode"]: row.get("least_bytes") for row in known if row["network"] == network}
    low, high = least_of["min, 4 MiB"], least_of["plain, 4 MiB"]
    ends = low // GRANULE, high // GRANULE
    share = (ends[1] - ends[0]) / (POINTS - 1)
    return [(ends[0] + round(at * share)) * GRANULE for at in range(POINTS)]


def kept_to(network: str, card: int) -> dict[str, Any]:
    """Train on a card with its bytes as the budget; say what was in use, relative to it."""
    found = child_row(network, f"{card}, 4 MiB", card)
    row = {
        "network": network, "card_bytes": card, "error": found["error"],
        "first_steps": max(found["in_use"][:2], default=0) / card,
        "later_steps": max(found["in_use"][2:], default=0) / card,
        "reserved": found.get("reserved", 0) / card,
        "simulated_step_seconds": found.get("simulated_step_seconds"),
    }  # fmt: skip
    within = row["first_steps"] <= 1.15 and row["later_steps"] <= 1.02 and row["reserved"] <= 1
    row["trains"] = found["error"] is None and within
    click.echo(f"{network}, {card / MIB:.0f} MiB: {row['error'] or 'trains'}", err=True)
    return row


def budget_answer(found: list[dict[str, Any]]) -> str:
    """Word what Recompute under a budget of the whole card gives."""
    trains = [row for row in found if row["trains"]]
    first, later = (
        figure(max((row[key] for row in trains), default=0.0))
        for key in ("first_steps", "later_steps")
    )
    return (
        f"; with Recompute(B) on a card of B bytes {len(trains)} of {len(found)} train (all are "
        f"wanted), whose first two steps have at most {first} of it in use, later ones {later}"
    )


BUDGET_COLUMNS = (
    text("network", "network"),
    quantity("card and budget", "card_bytes", "MiB", per=MIB),
    quantity("in use, of it: first steps", "first_steps"),
    quantity("later steps", "later_steps"),
    quantity("reserved", "reserved"),
    quantity("step, simulated", "simulated_step_seconds", "ms", per=1e-3),
    verdict("trains", "trains", "does not"),
)


def answer(result: common.Result) -> str:
    """Word the answer to the question, from the rows of a result."""
    found = [r for r in result["rows"] if r["mode"] == "min, 4 MiB" and "of_plain" in r]
    best = {row["network"]: row["of_plain"] for row in found}
    predicted = [
        row["least_bytes"] / (row["predicted_bytes"] + 4 * MIB)
        for row in found
        if row["predicted_bytes"]
    ]
    budgets = result.get("budget_rows")
    also = budget_answer(budgets) if budgets else ""
    if not best:  # another mode alone was measured
        return f"No network was tried under {MODES[3]!r}{also}."
    return (
        f'Under "min" and workspace("4MiB") {len(best)} networks train in {span(best.values())} of '
        f"the VRAM that plain steps need; that is {span(predicted)} of the predicted peak and "
        f"4 MiB (at most {figure(1.25)} is wanted){also}."
    )


def tables(result: common.Result) -> Iterator[Table]:
    """The least VRAM first; then, where they were asked for, the other two."""
    yield Table(COLUMNS, result["rows"])
    if "budget_rows" in result:
        title = f"Recompute(B) on a card of B bytes, at commit {result['budget_commit']}"
        yield Table(BUDGET_COLUMNS, result["budget_rows"], title)
    if "technique_rows" in result:
        title = f"Other techniques, at commit {result['technique_commit']}"
        yield Table(COLUMNS, result["technique_rows"], title)


COLUMNS = (
    text("network", "network"),
    text("mode", "mode"),
    quantity("least VRAM", "least_bytes", "MiB", per=MIB),
    quantity("of plain's", "of_plain"),
    quantity("in use, first step", "first_bytes", "MiB", per=MIB),
    quantity("last step", "last_bytes", "MiB", per=MIB),
    quantity("predicted", "predicted_bytes", "MiB", per=MIB),
    quantity("reserved where VRAM is plenty", "reserved_bytes", "MiB", per=MIB),
    quantity("step, simulated", "simulated_step_seconds", "ms", per=1e-3),
)


def notes(result: common.Result) -> list[str]:
    """What did not train, and why."""
    found = common.errors("network", "mode")(result)
    failed = [row for row in result.get("budget_rows", []) if row["error"]]
    if failed:
        cards = [f"{row['network']} at {row['card_bytes'] / MIB:.0f} MiB" for row in failed]
        found.append(f"Out of memory with the card's bytes as the budget: {listed(cards)}.")
    for row in result.get("technique_rows", []):
        if "error" in row:
            found.append(f"{row['network']}, {row['mode']}: {row['error']}")
    return found


BENCH = common.Bench("on_cupy", __doc__, answer, tables=tables, notes=notes)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="One network.")
@click.option("--only", "names", multiple=True, type=click.Choice([*NETWORKS]))
@click.option("--mode", "kinds", multiple=True, type=click.Choice([*MODES, *TECHNIQUES]))
@click.option("--budgets", is_flag=True, help="Add the table of five cards a network.")
@click.option("--techniques", is_flag=True, help="Add the table of other techniques.")
@click.option("--one", nargs=3, type=(str, str, int), hidden=True)
@common.json_option
def main(
    quick: bool,
    names: tuple[str, ...],
    kinds: tuple[str, ...],
    budgets: bool,
    techniques: bool,
    one: tuple[str, str, int] | None,
    path: Path | None,
) -> None:
    """Measure, print the tables, and write the result."""
    if one:
        click.echo(json.dumps(train(*one)))
        return
    common.writable(path)
    if not set(kinds) <= set(TECHNIQUES if techniques else MODES):
        raise click.UsageError("--mode takes a technique with --techniques, and else none")
    chosen = ["LSTM"] if quick else [n for n in NETWORKS if not names or n in names]
    if budgets or techniques:
        kept = json.loads((path or RESULTS).read_text(encoding="utf-8"))
        if budgets:
            cases = [(name, card) for name in chosen for card in cards(name, kept["rows"])]
            kept["budget_commit"] = common.commit()
            kept["budget_rows"] = [kept_to(*case) for case in cases]
        if techniques:
            few = [name for name in FEW if name in chosen]
            renew(kept, few, kinds)
        for table in tables(kept):
            table.show()
        print(*notes(kept), answer(kept), sep="\n")
        if path:
            common.write_json(path, kept)
        return
    modes = tuple(m for m in MODES if not kinds or m in kinds)
    found = list(rows(chosen, modes))
    BENCH.finish(found, path, simulated=True, options={"networks": chosen, "modes": modes})


if __name__ == "__main__":
    main()
