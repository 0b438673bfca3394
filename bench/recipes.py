"""Is the advice of docs/how-to/recipes.md the fastest way, for data that fits in VRAM or not?

Eight plain CuPy programs whose data begins and ends on the host, on the software GPU with its model
on, as a T4 and as an A100, both with 64 MiB of VRAM. Each runs in blocks, by the page's own code,
and over chunks that are copied to the GPU first: in managed memory as it is, in managed memory with
one hint a program (the order told, or chunks left on the host), and in hybrid memory. The page was
written from data of 0.5 to 4 times VRAM. Its advice, blocks but for loops over data that has room
on the GPU with all that they allocate, is held against the quickest way on data of 0.6, 0.75, 1.5
and 3 times VRAM, sizes in between, in rows of another width. Results are compared. What the host
itself takes is not in the model: to copy into pinned memory, and to merge what was sorted in
blocks, which is measured.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import common
import numpy as np
from recipe_programs import HINTS, RECIPES, Data, page_code
from report_tables import Row, duration, figure, listed, quantity, span, text

import umem
from umem._common.specs import gpu_spec
from umem.devices import current_device
from umem.units import MIB

VRAM = 64 * MIB
GPUS = ("t4", "a100-40gb")
SEEN, UNSEEN = (0.5, 0.65, 0.8, 0.9, 1.2, 2.0, 4.0), (0.6, 0.75, 1.5, 3.0)
"""Times VRAM: those that the page was written from, and those that its advice is held against."""
WAYS = ("blocks", "managed", "managed, hint", "hybrid")
NEAR = 1.1
SCRIPT = Path(__file__).resolve()


# -- a run -------------------------------------------------------------------------------------


def in_blocks(cp: Any, name: str, data: Data) -> Any:
    """Run the page's code of a recipe on the host's arrays; return its result."""
    code = page_code(name)
    held = {"cp": cp, "np": np, "umem": umem, **data}
    exec(f"{code.imports}\n{code.program}", held)
    return cp.asnumpy(held[RECIPES[name].result])


def run(gpu: Any, name: str, data: Data, way: str) -> tuple[float, Any]:
    """Run a recipe one way; return its simulated seconds and its result."""
    import cupy as cp

    data = {key: value.copy() if hasattr(value, "copy") else value for key, value in data.items()}
    recipe = RECIPES[name]
    forget(cp)
    mode = {"blocks": umem.unmanaged, "hybrid": umem.hybrid}.get(way, umem.managed)
    with mode():
        before = gpu.figures.seconds
        if way == "blocks":
            result = in_blocks(cp, name, data)
        else:
            result = recipe.on_gpu(cp, data, HINTS[recipe.hint] if "hint" in way else list)
        cp.cuda.Device().synchronize()
        return gpu.figures.seconds - before, result


def forget(cp: Any) -> None:
    """Give the memory of the run before back: that of hybrid memory outlives its block."""
    gc.collect()
    device: Any = current_device()
    device.pools.give_back_all()
    cp.get_default_memory_pool().free_all_blocks()


def measure(gpu_name: str, names: list[str], all_times: list[float]) -> Iterator[Row]:
    """Yield a row a recipe and size, with the time of each way; opens the software GPU."""
    gpu = umem.software_gpu(gpu_name, vram=VRAM, force=True)
    for name in names:
        recipe = RECIPES[name]
        for times in all_times:
            width = recipe.widths[times in UNSEEN]
            data = recipe.make(round(times * VRAM), width)
            found = {way: run(gpu, name, data, way) for way in WAYS}
            same = found["managed"][1]
            assert all(np.allclose(one, same, 1e-4, 1e-5) for _, one in found.values()), name
            seconds = {way: one for way, (one, _) in found.items()}
            best, advised = min(seconds, key=lambda way: seconds[way]), recipe.advised(times)
            yield {
                "program": name, "gpu": gpu_name, "of_vram": times, "width": width,
                "seen": times in SEEN, "hint": recipe.hint, "advised": advised, "best": best,
                "of_best": seconds[advised] / seconds[best], **seconds,
            }  # fmt: skip


def measured(gpu_name: str, names: list[str], all_times: list[float]) -> list[Row]:
    """Run `measure` in a process of its own, as there is one software GPU a process."""
    command = [sys.executable, str(SCRIPT), "--on", gpu_name, "--sizes", json.dumps(all_times)]
    command += [part for name in names for part in ("--only", name)]
    rows = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            rows.append(json.loads(line))
            click.echo(line, err=True, nl=False)
    if process.returncode:
        raise click.ClickException(f"the run on {gpu_name} has failed")
    return rows


def host_part(nbytes: int) -> dict[str, float]:
    """Measure what the host takes after 24 blocks were sorted: to merge them, or to cut them.

    The sort of the page cuts them into buckets, which the GPU sorts.
    """
    keys = RECIPES["sort"].make(nbytes, 1)["keys"]
    keys = keys[: len(keys) // 24 * 24].reshape(24, -1)
    keys.sort(axis=1)
    step = keys.shape[1] // 24
    start = time.perf_counter()
    for first in range(0, keys.shape[1], step):
        np.concatenate([run[first : first + step] for run in keys])
    cut = time.perf_counter()
    keys.ravel().sort(kind="stable")  # which merges sorted runs
    return {"cut_seconds": cut - start, "merge_seconds": time.perf_counter() - cut}


# -- what it answers ---------------------------------------------------------------------------


def answer(result: common.Result) -> str:
    """Word the answer to the question, from the rows of a result."""
    rows = result["rows"]
    cases = []
    for seen, words in ((False, "new sizes"), (True, "the sizes it was written from")):
        own = [row for row in rows if row["seen"] == seen]
        near = [row for row in own if row["of_best"] <= NEAR]
        if own:
            cases.append(f"{len(near)} of {len(own)} cases at {words}")
    large = [row for row in rows if row["of_vram"] > 1]
    ahead = [row for row in large if row["best"] == "blocks"]
    return (
        f"The page's advice is the fastest way, or within 10% of it, in {listed(cases)}; with more "
        f"data than VRAM, blocks are the fastest in {len(ahead)} of {len(large)}."
    )


def misses(result: common.Result) -> Iterator[str]:
    """Say where the page's advice is more than 10% off the quickest way."""
    for row in result["rows"]:
        if row["of_best"] > NEAR:
            best = row["best"].replace(", ", " with the ")
            ways = f"{row['advised']} take {figure(row['of_best'])} times as long as {best}"
            at = f"with {row['of_vram']:g} times VRAM on {_a(row['gpu'])}"
            yield f"{row['program']} {at}: {ways}"


def _a(gpu: str) -> str:
    """Return a GPU's title behind its article."""
    title = gpu_spec(gpu).title
    return f"{'an' if title[0] in 'AHL' else 'a'} {title}"


def notes(result: common.Result) -> Iterator[str]:
    """Yield what was missed, left out, and measured beside the times."""
    yield from (f"Missed: {miss}." for miss in misses(result))
    skipped = [name for name in RECIPES if name not in result["options"]["programs"]]
    if skipped:
        yield f"Left out: {listed(skipped)}."
    host = result.get("host")
    if host:
        yield (
            f"Measured on one core, and not in the times: of {host['nbytes'] // MIB} MiB sorted in "
            f"24 blocks, cutting into buckets takes {duration(host['cut_seconds'])}, merging on "
            f"the host {duration(host['merge_seconds'])}."
        )


# -- what docs/how-to/recipes.md says of it -------------------------------------------------------
# tests/house/test_recipes_page.py finds these lines in the page.

PAGE_SIZE, PAGE_GPU = 2.0, "t4"
"""The size, in times VRAM, and the GPU of the page's table."""


def page_lines(result: common.Result) -> list[str]:
    """Return the lines of the page that have figures."""
    programs = result["options"]["programs"]
    small = [row for row in result["rows"] if row["of_vram"] < 1]
    worst = max(row["blocks"] / row[row["best"]] for row in small)
    spilled = [
        row["hybrid"] / row["blocks"]
        for row in small
        if (row["program"], row["of_vram"]) == ("k-means", 0.8)
    ]
    return [
        "| recipe | stays on the GPU up to | blocks | managed | with the hint | hybrid |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        *(_page_row(result, name) for name in programs),
        answer(result),
        f"k-means with 0.8 times VRAM takes {span(spilled)} times as long there as in blocks. If "
        f"in doubt, use blocks: below VRAM they take at most {figure(worst)} times the fastest "
        "way.",
        *_host_lines(result["host"]),
        *(page_sentence(result, name) for name in programs),
    ]


def _page_row(result: common.Result, name: str) -> str:
    """Return the page's row of a recipe: the times at one size on one GPU."""
    at = (name, PAGE_GPU, PAGE_SIZE)
    rows = result["rows"]
    row = next(row for row in rows if (row["program"], row["gpu"], row["of_vram"]) == at)
    recipe = RECIPES[name]
    anchor = recipe.heading.lower().replace(" ", "-").replace(".", "")
    stays = "-" if recipe.stays_up_to is None else f"{recipe.stays_up_to:g} times VRAM"
    times = " | ".join(duration(row[way]) for way in WAYS)
    return f"| [{recipe.heading}](#{anchor}) | {stays} | {times} |"


def page_sentence(result: common.Result, name: str) -> str:
    """Return what the page says of a recipe: ratios above VRAM, and which way is quickest where."""
    rows = [row for row in result["rows"] if row["program"] == name and row["seen"]]
    large = [row for row in rows if row["of_vram"] > 1]
    managed, hint, hybrid = (span(row[way] / row["blocks"] for row in large) for way in WAYS[1:])
    return (
        f"Above VRAM managed memory takes {managed} times as long as blocks, {hint} with the hint, "
        f"and hybrid memory {hybrid} (simulated). Fastest: {_quickest(rows)}."
    )


def _quickest(rows: list[Row]) -> str:
    """Return the quickest ways by size, such as "hybrid up to 0.8, blocks from 0.9 on"."""
    groups: list[tuple[str, list[float]]] = []
    for times in sorted({row["of_vram"] for row in rows}):
        found = sorted({row["best"] for row in rows if row["of_vram"] == times})
        ways = " or ".join("managed with the hint" if "hint" in way else way for way in found)
        if groups and groups[-1][0] == ways:
            groups[-1][1].append(times)
        else:
            groups.append((ways, [times]))
    if len(groups) == 1:
        return f"{groups[0][0]} at every size"
    *first, (last, sizes) = groups
    sentences = [f"{ways} at {listed(f'{size:g}' for size in own)}" for ways, own in first]
    return f"{'; '.join(sentences)}; {last} from {min(sizes):g} times VRAM on"


def _host_lines(host: Row) -> list[str]:
    """Return what the page says of the host's own work, which is measured."""
    size, copy = f"{host['nbytes'] // MIB} MiB", duration(host["cut_seconds"])
    links = ((gpu, gpu_spec(gpu).host_in_bandwidth or 1) for gpu in GPUS)
    sent = listed(f"{duration(host['nbytes'] / rate)} to {_a(gpu)}" for gpu, rate in links)
    return [
        f"One core of the bench's machine copies {size} in {copy} (measured); the link takes "
        f"{sent} (simulated).",
        f"On one core NumPy merges {size} of sorted blocks in {duration(host['merge_seconds'])}, "
        f"and cuts them into buckets in {copy} (measured).",
    ]


BENCH = common.Bench(
    "recipes",
    __doc__,
    answer,
    (
        text("program", "program"),
        text("GPU", "gpu"),
        quantity("of VRAM", "of_vram"),
        *(quantity(way, way, "ms", per=1e-3) for way in WAYS),
        text("hint", "hint"),
        text("advised", "advised"),
        text("quickest", "best"),
        quantity("advised, of the quickest", "of_best"),
    ),
    notes=notes,
)


def available() -> list[str]:
    """Return the names of the recipes that can run here: dask may not be installed."""
    try:
        import dask.array  # noqa: F401
    except ImportError:
        return [name for name in RECIPES if name != "dask"]
    return [*RECIPES]


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Two programs at one size on one GPU.")
@click.option("--only", "names", multiple=True, type=click.Choice([*RECIPES]))
@click.option("--on", "gpu_name", hidden=True, help="Print rows of this GPU, from this process.")
@click.option("--sizes", hidden=True)
@common.json_option
def main(
    quick: bool, names: tuple[str, ...], gpu_name: str | None, sizes: str | None, path: Path | None
) -> None:
    """Measure, print the tables, and write the result."""
    if gpu_name is not None:
        for row in measure(gpu_name, list(names), json.loads(sizes or "[]")):
            print(json.dumps(row), flush=True)
        return
    common.writable(path)
    chosen = (
        ["product", "k-means"] if quick else [n for n in available() if n in (names or RECIPES)]
    )
    all_times = [1.2] if quick else [*SEEN, *UNSEEN]
    gpus = GPUS[:1] if quick else GPUS
    rows = [row for gpu in gpus for row in measured(gpu, chosen, all_times)]
    host = {"nbytes": 4 * VRAM, **host_part(4 * VRAM)} if "sort" in chosen else None
    options = {"programs": chosen, "of_vram": all_times, "gpus": gpus, "vram_bytes": VRAM}
    BENCH.finish(rows, path, simulated=True, options=options, host=host)


if __name__ == "__main__":
    main()
