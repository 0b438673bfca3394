"""One rank of bench/sharded_state.py: what it has of an optimizer's state, and whether bits agree.

``rank.py OUT ELEMENTS UPDATES``, under mpiexec; rank r writes OUT/r.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np

import umem.chainer  # isort: skip  (before Chainer, which it mends)
import chainer
from mpi4py import MPI

from umem.chainer import optimizers as small

COMM = MPI.COMM_WORLD
KINDS = {
    "Adam": chainer.optimizers.Adam,
    "MomentumSGD": chainer.optimizers.MomentumSGD,
    "Adam8bit": small.Adam8bit,
    "SGD": chainer.optimizers.SGD,
}
SMALL_COUNT = 200


def model(elements: int) -> Any:
    """One parameter has four fifths of the elements, and 200 small ones the rest."""
    draw = np.random.RandomState(0)
    made = chainer.Chain()
    with made.init_scope():
        made.large = chainer.Parameter(draw.randn(elements * 4 // 5 // 1000, 1000).astype("f"))
        for index in range(SMALL_COUNT):
            size = elements // 5 // SMALL_COUNT
            setattr(made, f"small{index}", chainer.Parameter(draw.randn(size).astype("f")))
    return made


def gradients(target: Any, step: int) -> None:
    draw = np.random.RandomState(1000 * step + COMM.rank)
    for _, one in sorted(target.namedparams()):
        one.grad = draw.randn(*one.shape).astype("f")


def average(target: Any) -> None:
    """In the order of ranks, one parameter after another; every rank has all."""
    for one in target.params():
        first, *others = COMM.allgather(one.grad)
        for other in others:
            first = first + other
        one.grad = first * np.float32(1.0 / COMM.size)


def trained(kind: Any, elements: int, updates: int, is_sharded: bool) -> tuple[Any, Any]:
    target = model(elements)
    optimizer = kind().setup(target)
    if is_sharded:
        umem.chainer.sharded(optimizer, COMM)
    for step in range(updates):
        gradients(target, step)
        if not is_sharded:
            average(target)
        optimizer.update()
    return target, optimizer


def state_bytes(target: Any) -> int:
    states = [one.update_rule.state or {} for one in target.params()]
    return sum(value.nbytes for state in states for value in state.values())


def weights(target: Any) -> bytes:
    return b"".join(one.array.tobytes() for _, one in sorted(target.namedparams()))


def peaks(kind: Any, target: Any, optimizer: Any, elements: int) -> tuple[int, int]:
    """Bytes above what is there, at most: while it is saved, and while a new run takes it over."""
    with tempfile.TemporaryDirectory() as place:
        folder = COMM.bcast(place)
        COMM.Barrier()
        tracemalloc.start()
        umem.chainer.save_run(folder, comm=COMM, step=1, model=target, optimizer=optimizer)
        saving = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        fresh = model(elements)
        new = umem.chainer.sharded(kind(), COMM).setup(fresh)
        tracemalloc.start()
        umem.chainer.resume_run(folder, comm=COMM, model=fresh, optimizer=new)
        resuming = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert state_bytes(fresh) == state_bytes(target)
        COMM.Barrier()
    return saving, resuming


def measured(name: str, elements: int, updates: int) -> dict[str, Any]:
    kind = KINDS[name]
    whole, _ = trained(kind, elements, updates, False)
    ours, optimizer = trained(kind, elements, updates, True)
    saving, resuming = peaks(kind, ours, optimizer, elements)
    return {
        "state_bytes": state_bytes(ours),
        "whole_bytes": state_bytes(whole),
        "is_identical": weights(whole) == weights(ours),
        "saving_bytes": saving,
        "resuming_bytes": resuming,
    }


if __name__ == "__main__":
    out, elements, updates = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    measured("SGD", elements, 1)  # what is loaded the first time counts for nobody
    found = {name: measured(name, elements, updates) for name in KINDS}
    (out / f"{COMM.rank}.json").write_text(json.dumps(found))
