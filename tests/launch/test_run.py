"""`umem run -n`: ranks start, are told apart, and get what the script gets without them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import ROOT, needs_ranks, run, start

import umem
from umem.compat import find_package

pytestmark = needs_ranks

SAYS = """
    import os, sys
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    total = comm.allreduce(comm.rank + 1)
    print(comm.rank, comm.size, total, sys.argv[1:], __name__, os.path.basename(__file__))
    print("to the other stream", file=sys.stderr)
"""


def test_each_rank_runs_the_script_with_its_arguments(tmp_path: Path) -> None:
    ended = run(tmp_path, SAYS, n=3, arguments=("--flag", "-n", "7", "--", "x"))
    assert (ended.status, ended.left) == (0, set()), ended.err
    for rank in range(3):
        expected = f"{rank} 3 6 ['--flag', '-n', '7', '--', 'x'] __main__ script.py"
        assert ended.of(rank) == [expected]
        assert f"[{rank}] to the other stream" in ended.err.splitlines()


@pytest.mark.thorough
def test_lines_stay_whole_and_in_order_however_many(tmp_path: Path) -> None:
    code = """
        import os, sys
        rank = os.environ["OMPI_COMM_WORLD_RANK"] if "OMPI_COMM_WORLD_RANK" in os.environ else "?"
        for i in range(2000):
            print(i, rank * 60)
        sys.stdout.write("no end \\udcff")
        sys.stdout.flush()
    """
    variables = {"PYTHONIOENCODING": "utf-8:surrogateescape"}
    job = start(tmp_path, code, environment=variables)
    out = job.process.stdout
    assert out is not None
    out.reconfigure(errors="surrogateescape")  # type: ignore[attr-defined]
    ended = job.finish()
    assert ended.status == 0, ended.err
    for rank in range(2):
        lines = ended.of(rank)
        assert [line.split()[0] for line in lines[:-1]] == [str(i) for i in range(2000)]
        assert lines[-1] == "no end \udcff"
    assert len(ended.out.splitlines()) == 2 * 2001


@pytest.mark.thorough
def test_standard_output_may_be_closed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print('lost'); print('kept', file=sys.stderr)")
    command = [sys.executable, "-m", "umem", "run", "-n", "2", "--allow-root", "script.py"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert (done.returncode, sorted(done.stderr.splitlines())) == (0, ["[0] kept", "[1] kept"])


@pytest.mark.thorough
def test_a_job_waits_for_who_reads_its_output(tmp_path: Path) -> None:
    """As a pager or Ctrl-S have it: for longer than a network may be silent."""
    job = start(tmp_path, "for _ in range(4000): print('x' * 5000)")
    time.sleep(15)
    ended = job.finish()
    assert (ended.status, ended.out.count("\n")) == (0, 8000), ended.err


@pytest.mark.thorough
def test_a_script_without_mpi_is_run_as_often_as_asked(tmp_path: Path) -> None:
    ended = run(tmp_path, "import sys; print('here'); sys.exit(0)", n=2)
    assert (ended.status, ended.out.count("here"), ended.left) == (0, 2, set()), ended.err


@pytest.mark.thorough
def test_more_ranks_than_cores_are_said_once(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    ended = run(tmp_path, "print('here')", n=cores + 1)
    assert ended.err == f"umem: {cores + 1} ranks on {cores} cores: they take turns\n"


THREADS = """
    import os, json
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "UMEM_LAUNCH_RANK",
        "UMEM_MODE")
    print(json.dumps([os.environ.get(name) for name in names]))
"""
UNSET = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"), ""
)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "given", "expected"),
    [
        ((), {}, ["1", "1", "1", None, None]),
        ((), {"OMP_NUM_THREADS": "3"}, ["3", "", "", None, None]),
        (("--threads", "2"), {"OMP_NUM_THREADS": "3"}, ["2", "2", "2", None, None]),
    ],
)
def test_a_rank_has_one_thread_of_blas_unless_told(
    tmp_path: Path, options: tuple[str, ...], given: dict[str, str], expected: list[str]
) -> None:
    ended = run(tmp_path, THREADS, *options, n=1, environment={**UNSET, **given})
    assert [json.loads(line) for line in ended.of(0)] == [expected], ended.err


@pytest.mark.thorough
@pytest.mark.skipif(find_package() is None, reason="Chainer is not installed")
def test_reports_traces_and_the_live_view_are_a_ranks_own(tmp_path: Path) -> None:
    code = """
        import numpy as np, chainer, chainer.links as L, chainer.functions as F
        import chainermn
        comm = chainermn.create_communicator("naive")
        model = L.Linear(4, 2)
        optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm)
        optimizer.setup(model)
        x = np.full((3 + comm.rank, 4), 1.0 + comm.rank, np.float32)
        for _ in range(5):
            model.cleargrads()
            F.sum(model(x) ** 2).backward()
            optimizer.update()
        print(len(set(comm.mpi_comm.allgather(model.W.array.tobytes()))))
    """
    options = ("--record", "run.umem.gz", "--report", "--watch")
    ended = run(tmp_path, code, *options)
    assert (ended.status, ended.of(0), ended.of(1)) == (0, ["1"], ["1"]), ended.err
    traces = [umem.Trace.load(tmp_path / f"run.rank{rank}.umem.gz") for rank in range(2)]
    assert traces[0].peak_bytes < traces[1].peak_bytes  # of one row more
    for rank in range(2):
        tag = f"[{rank}] "
        lines = [line for line in ended.err.splitlines() if line.startswith(tag)]
        assert any("steps in" in line for line in lines)  # the live view's summary
        assert any("mode" in line for line in lines)  # the report


MULTIPROCESSING = """
    import multiprocessing, os, sys
    from mpi4py import MPI
    comm = MPI.COMM_WORLD

    def twice(x):
        return 2 * x, MPI.COMM_WORLD.size

    if __name__ == "__main__":
        for method in ("fork", "spawn", "forkserver"):
            with multiprocessing.get_context(method).Pool(1) as pool:
                print(method, *pool.apply(twice, (comm.rank,)))
        child = os.fork()
        if not child:
            sys.exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        print(comm.allreduce(1))
"""


@pytest.mark.thorough
def test_a_rank_may_fork_and_use_multiprocessing(tmp_path: Path) -> None:
    """A worker that starts anew sees itself alone: it is no rank, and must not join as one."""
    ended = run(tmp_path, MULTIPROCESSING)
    assert ended.status == 0, ended.err
    for rank in range(2):
        twice = 2 * rank
        expected = [f"fork {twice} 2", f"spawn {twice} 1", f"forkserver {twice} 1", "7", "2"]
        assert ended.of(rank) == expected
