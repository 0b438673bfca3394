"""One rank: trains on a cut with several numbers of ranks in turn, and writes what it saw.

A job has as many ranks as the largest number; for a smaller one the first ranks train and the
others sleep, so that they take no time from them.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import umem.chainer  # isort: skip
import chainer
import numpy as np
from mpi4py import MPI

from umem.graphs import halo_plan, open_cut


class Trainee:
    """A model on this rank's parts, as some ranks train it."""

    def __init__(self, folder: str, comm: Any, hidden: int) -> None:
        self.graph = umem.chainer.ParallelGraph(folder, comm)
        np.random.seed(0)
        graph = self.graph
        self.model = umem.chainer.ParallelGCN(comm, graph.feature_count, hidden, graph.class_count)
        self.optimizer = chainer.optimizers.Adam(0.01).setup(self.model)
        self.features = graph.load_features()
        self.labels = graph.labels_where(graph.train_mask)
        self.losses: list[str] = []

    def step(self) -> None:
        self.optimizer.update(self._loss)

    def _loss(self) -> Any:
        scores = self.model(self.graph, self.features)
        loss = self.graph.cross_entropy(scores, self.labels)
        self.losses.append(float(loss.array).hex())
        return loss

    def kept_bytes(self) -> int:
        """Bytes of weights and of the optimizer's state."""
        state = [v for p in self.model.params() for v in p.update_rule.state.values()]
        arrays = [p.array for p in self.model.params()] + state
        return sum(a.nbytes for a in arrays if isinstance(a, np.ndarray))

    def weights(self) -> str:
        arrays = [p.array.tobytes() for _, p in sorted(self.model.namedparams())]
        return hashlib.sha256(b"".join(arrays)).hexdigest()


def trained(folder: str, comm: Any, hidden: int, updates: int) -> dict[str, Any]:
    """Losses, weights, bytes sent a step and planned, and the peak above weights and state."""
    tracemalloc.start(1)
    trainee = Trainee(folder, comm, hidden)
    loading = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    sent = []
    for _ in range(updates):
        before = trainee.graph.ranks.sent_bytes["halo"]
        trainee.step()
        sent.append(trainee.graph.ranks.sent_bytes["halo"] - before)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    plan = halo_plan(open_cut(folder), comm.size)
    return {
        "losses": trainee.losses,
        "weights": trainee.weights(),
        "sent_bytes": sent,
        "planned_bytes": plan.sent_bytes(
            comm.rank, trainee.model.exchanged_widths(trainee.features)
        ),
        "peak_bytes": max(loading, peak) - trainee.kept_bytes(),
    }


def wait_asleep(comm: Any) -> None:
    """Return when every rank is here; MPI's own barrier keeps a core busy."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.002)


def main(folder: str, out: str, counts: str, hidden: str, updates: str, repeats: str) -> None:
    """Train as one rank, and write what it measured."""
    world = MPI.COMM_WORLD
    numbers = [int(count) for count in counts.split(",")]
    comms = {n: world.Split(int(world.rank >= n), world.rank) for n in numbers}
    found: dict[str, Any] = {"trained": {}}
    found |= {name: {n: [] for n in numbers} for name in ("seconds", "processor_seconds")}
    for n, comm in comms.items():
        if world.rank < n:
            found["trained"][n] = trained(folder, comm, int(hidden), int(updates))
        wait_asleep(world)
    if int(repeats):
        time_steps(world, comms, folder, int(hidden), int(repeats), found)
    Path(out, f"{world.rank}.json").write_text(json.dumps(found), encoding="utf-8")


def time_steps(
    world: Any, comms: dict[int, Any], folder: str, hidden: int, repeats: int, found: Any
) -> None:
    """Time steps of each number of ranks in turn."""
    trainees = {n: Trainee(folder, c, hidden) for n, c in comms.items() if world.rank < n}
    for repeat in range(repeats + 1):
        for n, comm in comms.items():
            if world.rank < n:
                comm.Barrier()
                start, busy = time.perf_counter(), time.process_time()
                trainees[n].step()
                busy = time.process_time() - busy
                comm.Barrier()
                if repeat:  # the first makes buffers and states
                    found["seconds"][n].append(time.perf_counter() - start)
                    found["processor_seconds"][n].append(busy)
            wait_asleep(world)


if __name__ == "__main__":
    main(*sys.argv[1:])
