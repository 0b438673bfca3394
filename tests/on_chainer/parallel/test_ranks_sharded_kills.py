"""Runs of two ranks that are killed again and again, and go on: the curve is that of one run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from ranks import Ended, needs_ranks, start

pytestmark = needs_ranks

TRAINS = """
    import os, signal, sys, threading, time
    from pathlib import Path
    import mpi4py
    mpi4py.rc.initialize = False
    from mpi4py import MPI

    where, victim, when, updates = sys.argv[1], *map(int, sys.argv[2:5])
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])

    def die():
        Path("killed").write_text(where)
        os.kill(os.getpid(), signal.SIGKILL)

    if where == "init" and rank == victim:
        threading.Timer(0.01 * when, die).start()
    if where == "init" and rank != victim:
        time.sleep(2)  # so that the other waits inside of MPI_Init
    MPI.Init()
    comm = MPI.COMM_WORLD

    import umem.chainer
    import chainer, numpy as np
    import chainer.functions as F, chainer.links as L
    from umem.chainer.resume import saver
    from umem.snapshots import FileOperations

    np.random.seed(0)
    model = chainer.Sequential(L.Linear(20, 30), F.tanh, L.Linear(30, 4))
    optimizer = umem.chainer.sharded(chainer.optimizers.Adam(), comm).setup(model)
    begun = 0

    class Deadly(FileOperations):
        calls = 0

        def __getattribute__(self, name):
            if where == "snapshot" and rank == victim and begun == 2:
                Deadly.calls += 1
                if Deadly.calls > when:
                    die()
            return super().__getattribute__(name)

    saver.FileOperations = Deadly
    done = umem.chainer.resume_run("run", comm=comm, model=model, optimizer=optimizer)
    for step in range(done.step, updates):
        begun += 1
        draw = np.random.RandomState(step)
        x, t = draw.randn(16, 20).astype("f"), draw.randint(0, 4, 16).astype("i")
        mine = slice(rank, None, 2)

        def loss():
            if where == "update" and rank == victim and begun == 2:
                threading.Timer(0.0005 * when, die).start()
            return F.softmax_cross_entropy(model(x[mine]), t[mine])

        optimizer.update(loss)
        if where == "update" and begun == 2:
            time.sleep(0.05)
        with chainer.no_backprop_mode():
            now = float(F.softmax_cross_entropy(model(x), t).array).hex()
        if rank == 0:
            with open("curve", "a") as file:
                file.write(f"{step} {now}\\n")
        umem.chainer.save_run("run", comm=comm, model=model, optimizer=optimizer)
    MPI.Finalize()
"""


def go(folder: Path, updates: int, where: str = "-", victim: int = 0, when: int = 0) -> Ended:
    arguments = where, str(victim), str(when), str(updates)
    return start(folder, TRAINS, arguments=arguments).finish()


def curve(folder: Path) -> set[str]:
    """Every line that was ever written; a step that was made again has one, if it is the same."""
    return set((folder / "curve").read_text().splitlines())


def kill_and_go_on(tmp_path: Path, kills: list[tuple[str, int, int]]) -> None:
    updates = 2 * len(kills) + 2
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    assert go(whole, updates).status == 0
    for kill in kills:
        ended = go(killed, updates, *kill)
        died = killed / "killed"
        assert died.read_text() == kill[0], (kill, ended.err)
        died.unlink()
        assert ended.status != 0 and ended.left == set(), (kill, ended.err)
        assert "was killed (SIGKILL)" in ended.last, (kill, ended.err)
    ended = go(killed, updates)
    assert ended.status == 0, ended.err
    assert curve(killed) == curve(whole) and len(curve(whole)) == updates


@pytest.mark.slow
def test_five_kills_and_the_same_curve(tmp_path: Path) -> None:
    kills = [("snapshot", 0, 4), ("init", 1, 0), ("snapshot", 1, 2), ("update", 1, 3)]
    kill_and_go_on(tmp_path, [*kills, ("snapshot", 0, 9)])


@pytest.mark.slow
def test_fifty_kills_and_the_same_curve(tmp_path: Path) -> None:
    draw = random.Random(16)
    kills = [("init", draw.randrange(2), draw.randrange(60)) for _ in range(8)]
    kills += [("snapshot", 0, draw.randrange(13)) for _ in range(16)]
    kills += [("snapshot", 1, draw.randrange(5)) for _ in range(10)]
    kills += [("update", draw.randrange(2), draw.randrange(40)) for _ in range(16)]
    draw.shuffle(kills)
    kill_and_go_on(tmp_path, kills)
