"""Ranks killed at random moments, from before MPI_Init to the end: no process is ever left.

`kill_once` is the harness: a script writes its process's number to a file named after a phase as
it comes to it, such as ``init0``, and is killed a random moment later.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from pathlib import Path

import pytest
from ranks import HANGS_AFTER_SECONDS, Ended, needs_ranks, start

from umem.compat import find_package

pytestmark = needs_ranks

SCRIPT = """
    import os
    from pathlib import Path

    def at(phase, rank):
        Path(f"{phase}{rank}.part").write_text(str(os.getpid()))
        os.replace(f"{phase}{rank}.part", f"{phase}{rank}")

    at("init", os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")))
    import numpy as np
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    comm.Barrier()
    weights, gradient = np.zeros(100_000), np.empty(100_000)
    at("training", comm.rank)
    for step in range(1_000_000):
        comm.Allreduce(weights + comm.rank, gradient)
        weights -= 1e-3 * gradient
"""
TRAINS = """
    import os, time
    from pathlib import Path

    def at(phase, rank):
        Path(f"{phase}{rank}.part").write_text(str(os.getpid()))
        os.replace(f"{phase}{rank}.part", f"{phase}{rank}")

    at("init", os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")))
    import chainer, chainermn, numpy as np
    import chainer.functions as F
    import umem.chainer
    comm = chainermn.create_communicator("naive")
    np.random.seed(comm.rank)
    data = np.random.RandomState(5).rand(64, 40).astype("f")[comm.rank :: comm.size]
    layers = chainer.links.Linear(40, 3000), chainer.links.Linear(3000, 1)
    model = chainer.Sequential(layers[0], F.relu, layers[1])
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(), comm)
    optimizer.setup(model)
    batches = chainer.iterators.SerialIterator(data, 8)
    parts = dict(comm=comm, model=model, optimizer=optimizer, batches=batches)
    done = umem.chainer.resume_run("run", **parts)
    log = open(f"log{comm.rank}", "a")
    for step in range(done.step, 24):
        if step == done.step + 2:
            at("training", comm.rank)
        x = np.stack(batches.next())
        loss = F.mean((model(x) - x.sum(1, keepdims=True)) ** 2)
        model.cleargrads()
        loss.backward()
        optimizer.update()
        time.sleep(0.05)  # so that 22 steps outlast the longest wait for a kill
        print(step, float(loss.array).hex(), file=log, flush=True)
        if step % 4 == 3:
            if step > done.step + 4:
                at("snapshot", comm.rank)
            umem.chainer.save_run("run", step=step + 1, **parts)
"""
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)
SPREAD_SECONDS = {"init": 0.3, "training": 1.0, "snapshot": 0.1}
"""How long after the beginning of a phase a rank is killed, at most."""


def kill_once(
    folder: Path, code: str, phase: str, chance: random.Random, ranks: int = 2
) -> tuple[Ended, int]:
    """Kill one of the ranks a moment after it has come to a phase.

    Returns:
        How the job ended, and which rank was killed.
    """
    rank, number = chance.randrange(ranks), chance.choice(SIGNALS)
    job = start(folder, code, n=ranks)
    path = folder / f"{phase}{rank}"
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline and job.process.poll() is None, job.finish().err
        time.sleep(0.005)
    time.sleep(chance.uniform(0, SPREAD_SECONDS[phase]))
    os.kill(int(path.read_text()), number)
    return job.finish(HANGS_AFTER_SECONDS), rank


def check(folder: Path, code: str, phase: str, seed: int) -> None:
    ended, rank = kill_once(folder, code, phase, random.Random(seed))
    assert ended.left == set() and ended.status != 0, ended.err
    beginning = f"umem: rank {rank} on {socket.gethostname()} "
    assert ended.last.startswith(beginning), ended.err
    assert any(f"SIG{name}" in ended.last for name in ("KILL", "SEGV", "TERM")), ended.err


@pytest.mark.thorough
@pytest.mark.parametrize(("phase", "seed"), [("init", 0), ("training", 1), ("training", 4)])
def test_a_killed_rank_ends_all(tmp_path: Path, phase: str, seed: int) -> None:
    check(tmp_path, SCRIPT, phase, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_a_killed_rank_ends_all_whenever_it_is_killed(tmp_path: Path, seed: int) -> None:
    check(tmp_path, SCRIPT, "init" if seed % 4 == 0 else "training", seed)


def curve(folder: Path, rank: int) -> dict[str, set[str]]:
    """The losses that were logged of each step, of which each should have one, to the bit."""
    found: dict[str, set[str]] = {}
    for line in (folder / f"log{rank}").read_text().splitlines():
        step, loss = line.split()
        found.setdefault(step, set()).add(loss)
    return found


@pytest.fixture(scope="module")
def whole_curves(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, set[str]]]:
    """The losses of a run that nobody kills."""
    folder = tmp_path_factory.mktemp("whole")
    ended = start(folder, TRAINS).finish()
    assert ended.status == 0, ended.err
    return [curve(folder, rank) for rank in range(2)]


GOES_ON = [
    pytest.param("snapshot", 0, marks=pytest.mark.thorough),
    *(pytest.param("snapshot", n, marks=pytest.mark.slow) for n in range(1, 12)),
    *(pytest.param("init", n, marks=pytest.mark.slow) for n in range(12, 17)),
    *(pytest.param("training", n, marks=pytest.mark.slow) for n in range(17, 25)),
]


@pytest.mark.skipif(find_package() is None, reason="Chainer is not installed")
@pytest.mark.parametrize(("phase", "seed"), GOES_ON)
def test_a_run_goes_on_to_the_bit_wherever_a_rank_was_killed(
    tmp_path: Path, phase: str, seed: int, whole_curves: list[dict[str, set[str]]]
) -> None:
    check(tmp_path, TRAINS, phase, seed)
    ended = start(tmp_path, TRAINS).finish()
    assert ended.status == 0, ended.err
    assert [curve(tmp_path, rank) for rank in range(2)] == whole_curves
