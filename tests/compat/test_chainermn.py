"""Old ChainerMN scripts on two ranks: what they compute, and what is refused on all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
from mpi_programs import needs_ranks, run_ranks
from software_programs import needs_compiler, needs_cupy

pytestmark = needs_ranks

# The umem that an old script does not know has been imported by `umem run` or a start-up file.
SCRIPT = """
import umem.compat
umem.compat.install()
import json, sys
from pathlib import Path
import chainer, chainermn
import chainer.functions as F, chainer.links as L
import numpy as np
from chainer import training
from chainer.training import extensions

out = Path(sys.argv[1])
comm = chainermn.create_communicator("naive")
np.random.seed(comm.rank)  # a model starts as on rank 0

class Net(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.first = L.Linear(4, 8)
            self.norm = chainermn.links.MultiNodeBatchNormalization(8, comm)
            self.last = L.Linear(8, 3)

    def forward(self, x):
        return self.last(F.relu(self.norm(self.first(x))))

model = L.Classifier(Net())
optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(0.2), comm)
optimizer.setup(model)
rng = np.random.RandomState(3)
x = rng.rand(24, 4).astype("f")
samples = chainer.datasets.TupleDataset(x, x[:, :3].argmax(1).astype("i"))
mine = chainermn.scatter_dataset(samples if comm.rank == 0 else None, comm)
assert (mine[0][0] == x[len(mine) * comm.rank]).all()
iterator = chainer.iterators.SerialIterator(mine, 4, shuffle=False)
updater = training.StandardUpdater(iterator, optimizer)
trainer = training.Trainer(updater, (6, "iteration"), out=str(out))
test = chainer.iterators.SerialIterator(mine, 4, repeat=False, shuffle=False)
evaluator = chainermn.create_multi_node_evaluator(extensions.Evaluator(test, model), comm)
trainer.extend(evaluator, trigger=(6, "iteration"))
trainer.extend(chainermn.extensions.ObservationAggregator(comm, "main/loss"))
trainer.extend(chainermn.extensions.AllreducePersistent(model, comm), trigger=(6, "iteration"))
with_state = chainermn.create_multi_node_checkpointer("old", comm, path=str(out / "points"))
trainer.extend(with_state, trigger=(3, "iteration"))
log = extensions.LogReport(trigger=(1, "iteration"), filename=f"log{comm.rank}")
trainer.extend(log)
trainer.run()
weights = [p.array.astype("d").ravel().tolist() for _, p in sorted(model.namedparams())]
losses = [entry["main/loss"] for entry in log.log]
found = {"weights": weights, "losses": losses, "accuracy": evaluator()["validation/main/accuracy"]}
(out / f"{comm.rank}.json").write_text(json.dumps({k: v for k, v in found.items()}))
"""


def oracle() -> tuple[list[np.ndarray], list[float]]:
    """Train by one process on the batches of both ranks, without ChainerMN."""
    import umem.chainer  # noqa: F401, I001
    import chainer
    import chainer.functions as F
    import chainer.links as L

    np.random.seed(0)
    net = chainer.Chain()
    with net.init_scope():
        net.first, net.norm, net.last = L.Linear(4, 8), L.BatchNormalization(8), L.Linear(8, 3)
    optimizer = chainer.optimizers.SGD(0.2).setup(net)
    rng = np.random.RandomState(3)
    x = rng.rand(24, 4).astype("f")
    t = x[:, :3].argmax(1).astype("i")
    losses = []
    for step in range(6):
        rows = [12 * rank + (4 * step + i) % 12 for rank in range(2) for i in range(4)]
        y = net.last(F.relu(net.norm(net.first(x[rows]))))
        loss = F.softmax_cross_entropy(y, t[rows])
        losses.append(float(loss.array))
        if step:  # the first update of a multi-node optimizer only sends rank 0's weights
            net.cleargrads()
            loss.backward()
            optimizer.update()
    return [p.array for _, p in sorted(net.namedparams())], losses


@pytest.mark.thorough
def test_an_old_script_trains_as_one_process_on_both_batches(tmp_path: Path) -> None:
    done = run_ranks(2, SCRIPT, tmp_path)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = [
        json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)
    ]
    assert found[0] == found[1]
    weights, losses = oracle()
    np.testing.assert_allclose(found[0]["losses"][1:], losses[1:], rtol=1e-4)
    for ours, theirs in zip(found[0]["weights"], weights, strict=True):
        np.testing.assert_allclose(ours, theirs.ravel(), rtol=1e-3, atol=1e-5)
    # The checkpointer cleans up behind a run that ended well.
    assert list((tmp_path / "points").iterdir()) == []


REFUSED = """
import sys
import umem.chainer
import chainermn
import numpy as np
from pathlib import Path

said = []
for name in ("pure_nccl", "non_cuda_aware", "flat", "dummy", "hierarchical", "two_dimensional",
             "single_node"):
    try:
        chainermn.create_communicator(name)
    except (RuntimeError, ValueError) as error:
        said.append(f"{type(error).__name__}: {error}")
comm = chainermn.create_communicator("naive")
large = np.broadcast_to(np.float32(0), (2**31,))
for call in (lambda: comm.bcast(large), lambda: comm.allreduce(large),
             lambda: comm.send(large, 1, 0) if comm.rank == 0 else comm.recv(0, 0)):
    try:
        call()
    except OverflowError as error:
        said.append(f"OverflowError: {error}")
    comm.mpi_comm.Barrier()
Path(sys.argv[1], f"{comm.rank}.txt").write_text("\\n".join(said))
"""


@pytest.mark.thorough
def test_communicator_choice_and_message_size_sent_refuse_on_every_rank(tmp_path: Path) -> None:
    """Not on a machine with a GPU, where some of it works."""
    import umem.chainer  # noqa: F401, I001
    import chainer

    if chainer.backends.cuda.available:
        pytest.skip("CUDA has a device here")
    done = run_ranks(2, REFUSED, tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = ((tmp_path / f"{rank}.txt").read_text() for rank in range(2))
    assert first == second
    lines = first.splitlines()
    assert [line.partition(" Use")[0].partition(", and")[0] for line in lines[:7]] == [
        "RuntimeError: The communicator 'pure_nccl' exchanges gradients by NCCL",
        "RuntimeError: The communicator 'non_cuda_aware' exchanges gradients by NCCL",
        "RuntimeError: The communicator 'flat' exchanges CuPy arrays",
        "RuntimeError: The communicator 'dummy' exchanges CuPy arrays",
        "ValueError: The communicator 'hierarchical' was removed in Chainer 7.",
        "ValueError: The communicator 'two_dimensional' was removed in Chainer 7.",
        "ValueError: The communicator 'single_node' was removed in Chainer 7.",
    ]
    assert all("'naive' on the CPU" in line for line in lines[:7])
    assert len(lines) == 10
    assert all("2,147,483,648 elements exceeds one message" in line for line in lines[7:])


ITERATORS = """
import multiprocessing, sys
import umem.chainer
import chainer, chainermn
import numpy as np
from pathlib import Path

comm = chainermn.create_communicator("naive")
multiprocessing.set_start_method("forkserver")
data = np.arange(10, dtype="f")
said = []
for kind, more in ((chainer.iterators.SerialIterator, {}),
                   (chainer.iterators.MultiprocessIterator, {"n_processes": 1})):
    for master in range(2):
        own = kind(data, 4, repeat=False, shuffle=True, **more) if comm.rank == master else None
        iterator = chainermn.iterators.create_multi_node_iterator(own, comm, master)
        batches = [list(map(float, batch)) for batch in iterator]
        assert sorted(sum(batches, [])) == data.tolist()
        said.append(batches)
        if own is not None and more:
            own.finalize()
Path(sys.argv[1], f"{comm.rank}.txt").write_text(str(said))
"""


@pytest.mark.thorough
def test_iterators_of_several_ranks_give_all_the_same_batches(tmp_path: Path) -> None:
    done = run_ranks(2, ITERATORS, tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = ((tmp_path / f"{rank}.txt").read_text() for rank in range(2))
    assert first == second


ON_GPUS = """
import sys
import umem
umem.software_gpu("t4", "64MiB", force=True)
import umem.chainer
import chainer, chainermn
import chainer.links as L
import cupy
import numpy as np
from pathlib import Path

def on_gpu(array):
    return chainer.get_device("@cupy:0").send(array)

for name in ("naive", "flat", "pure_nccl", "non_cuda_aware"):
    comm = chainermn.create_communicator(name)
    x, other = np.arange(6, dtype="f").reshape(2, 3), 1 - comm.rank
    mine = on_gpu(x + comm.rank)
    pairs = [(comm.allreduce(mine), 2 * x + 1), (comm.allgather(mine)[other], x + other),
             (comm.alltoall((mine, mine))[other], x + other)]
    if comm.rank == 0:
        comm.send(mine, 1, 0)
    else:
        pairs.append((comm.recv(0, 0), x))
    assert all(type(a) is cupy.ndarray and (a.get() == b).all() for a, b in pairs)
    for is_batched in (True, False):
        comm.set_config("batched_copy", is_batched)
        for dtype in (np.float16, np.float32):
            with chainer.using_config("dtype", dtype):
                model = L.Linear(3, 2, initialW=7 - comm.rank)
            model.W.grad[...], model.b.grad[...] = comm.rank + 1, 5 * comm.rank
            model.to_device("@cupy:0")
            comm.bcast_data(model)
            comm.multi_node_mean_grad(model)
            assert model.W.grad.dtype == dtype and (model.W.array.get() == 7).all()
            assert (model.W.grad.get() == 1.5).all() and (model.b.grad.get() == 2.5).all()
Path(sys.argv[1], f"{comm.rank}.txt").write_text("all of it")
"""


@pytest.mark.thorough
@needs_cupy
@needs_compiler
def test_nccl_types_and_unpack_copy_on_two_software_gpus(
    tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(kernel_cache))
    monkeypatch.setattr("mpi_programs.SECONDS", 400)  # its kernels are compiled
    done = run_ranks(2, ON_GPUS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["all of it"] * 2


BY_INTRA_RANK = """
import chainer, chainermn, cupy
import chainer.links as L
import numpy as np

comm = chainermn.create_communicator("flat")
device = chainer.get_device(comm.intra_rank)  # as Chainer's own ChainerMN examples have it
device.use()
model = L.Linear(3, 2, initialW=7 - comm.rank)
model.to_device(device)
optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(model)
for _ in range(2):  # the first gives all the weights of rank 0
    optimizer.update(lambda x: chainer.functions.sum(model(x)), device.send(np.ones((4, 3), "f")))
assert device.device.id == comm.intra_rank == cupy.cuda.runtime.getDevice()
assert cupy.cuda.runtime.getDeviceCount() == comm.intra_size
assert model.W.array.device.id == comm.intra_rank
print(comm.rank, float(model.W.array.sum().get()))
"""


@pytest.mark.thorough
@needs_cupy
@needs_compiler
def test_a_rank_has_the_software_gpu_of_its_number_on_the_machine(
    tmp_path: Path, kernel_cache: Path
) -> None:
    variables = {"XDG_CACHE_HOME": str(kernel_cache)}
    job = ranks.start(tmp_path, BY_INTRA_RANK, "--software", "t4", environment=variables)
    ended = job.finish(400)  # its kernels are compiled
    assert (ended.status, ended.left) == (0, set()), ended.err
    said = [line.split() for rank in range(2) for line in ended.of(rank)]
    assert [line[0] for line in said] == ["0", "1"] and said[0][1] == said[1][1]
