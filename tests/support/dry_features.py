"""Features of umem on small programs: ``python dry_features.py dry`` prints what they say."""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import numpy as np

import umem

SIZE = 1 << 20
"""Items of an array of 4 MiB: more than a dry run computes with."""


def record() -> Any:
    """A recording of a step of Chainer's."""
    import chainer

    model = chainer.Sequential(chainer.links.Linear(600, 800), chainer.links.Linear(800, 10))
    model.to_device("@cupy:0")
    optimizer = chainer.optimizers.Adam().setup(model)
    x = cupy.zeros((500, 600), "f")
    for _ in range(2):
        with umem.record() as recorder:
            model.cleargrads()
            chainer.functions.sum(model(x)).backward()
            optimizer.update()
    trace = recorder.trace
    ops = [(op.name, op.phase, op.flops, op.traffic_bytes, op.workspace_bytes) for op in trace.ops]
    return trace.peak_bytes, ops


def paging() -> Any:
    """Moves of managed memory that VRAM has no room for."""
    with umem.managed(), umem.paging() as pages:
        arrays = [cupy.ones(SIZE, "f") for _ in range(12)]
        for x in arrays:
            x += 1
    return str(pages), len(pages.moves)


def explain() -> Any:
    """Who holds the memory that ran out."""
    held = [cupy.ones(SIZE, "f") for _ in range(3)]
    try:
        cupy.zeros(64 * SIZE, "f")
    except cupy.cuda.memory.OutOfMemoryError as error:
        found = umem.explain(error)
    return str(found), found.used_bytes, len(held)


def report() -> Any:
    """The status, and the figures that ``--report`` prints."""
    x = cupy.ones(SIZE, "f")
    with umem.statistics() as counted:
        y = x + 1
        del x, y
    return counted.summary(), umem.status().table()


def lookahead() -> Any:
    """Managed arrays in the order that a loop tells."""
    with umem.managed():
        chunks = [cupy.ones(SIZE, "f") for _ in range(12)]
        for chunk in umem.lookahead(chunks):
            chunk += 1
    return gpu.figures.moved_bytes


def blocks() -> Any:
    """An array of the host in blocks."""
    x = np.ones((16, SIZE // 2), "f")
    shapes = []
    for block in umem.blocks(x, write=True, room="12MiB"):
        block *= 2
        shapes.append(block.shape)
    return shapes


def hints() -> Any:
    """Hints about managed memory."""
    with umem.managed():
        x = cupy.ones(SIZE, "f")
    counts = umem.advise(x, "read_mostly"), umem.prefetch(x, "cpu"), umem.prefetch(x)
    return counts, str(umem.location(x))


FEATURES = record, paging, explain, report, lookahead, blocks, hints

if __name__ == "__main__":
    gpu = umem.software_gpu("t4", "32MiB", force=True, dry=sys.argv[1] == "dry")
    import cupy

    import umem.chainer
    from umem.devices import current_device

    found = {}
    for feature in FEATURES:
        gc.collect()
        current_device().pools.give_back_everything()  # a chunk's address decides who is next
        gpu.restart()
        text = feature()
        figures = gpu.figures
        seconds = figures.seconds
        found[feature.__name__] = [text, figures.peak_bytes, figures.moved_bytes, seconds]
    print(json.dumps(found, default=str))
