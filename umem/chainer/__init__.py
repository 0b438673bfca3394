"""Chainer under umem: importing this package imports Chainer through the compatibility layer.

`__all__` is for users. The names after it are for umem's other packages: techniques that are
turned on from outside, the demo's workload, a dry run's steps, and the tap, which reports Chainer's
events.

    tap.py                  replaces Chainer's functions while there are subscribers, and tells
                            them of each event
    recompute/              keeps a training run under a budget
    checkpointing/          recomputes by hand
    offload/                moves saved tensors one tier down and back
    saved/                  finds the saved tensors on Chainer's tape, and has the offload targets
    lookahead/              prefetches managed memory by a plan
    chunking/               computes convolutions, poolings and batch normalisation in parts
    precision/              trains in float16, and stores in bfloat16
    accumulation/           computes the gradient of a batch in parts
    optimizers/             keeps optimizer states in 8 bits
    layers/                 has smaller layers, and replaces a model's layers by them
    quantization/           makes models in 8 or 4 bits
    distillation/           trains a student with a teacher
    parallel/               trains on several ranks
    resume/                 saves a run and restores it
    framework.py            registers Chainer in the table of frameworks
    source.py               is the source of recordings
    function_facts.py       has facts about functions, shared by recordings and running passes
    function_kernels.py     says which kernels a function launches on CuPy
    function_arithmetic.py  says which functions are matrix products, and in which type
    flops.py                estimates a function's operations and memory traffic
    forward_state.py        restores forward's configuration and arrays for functions that run again
    step_state.py           restores random generators and links where a loss function runs again
    parameter_updates.py    runs updates in chunks, and measures the memory that they take
    parameters_once.py      lists each parameter once, and views a model with other parameters
    finite.py               finds infinities, NaN and numbers that are too large
    agreement.py            makes the decisions that ranks of one model must make alike
    uploading.py            writes host values into arrays of NumPy or CuPy
    at_setup.py             turns techniques on when a program sets up its optimizers
    current_device.py       is `device`, the Chainer device of the current umem device
    gcn.py                  has graph convolutions
    memory_report.py        is `MemoryReport`, a trainer extension
    demo_workload.py        is the workload of ``umem demo``
    dry_training.py         reports optimizers' updates and a Trainer's extensions to a dry run
    dry_initializers.py     leaves large parameters at zero in a dry run
    host_time.py            reports the time of Chainer's own Python code to a software GPU

- The tap is the only file that replaces Chainer's functions. Subscribers come and go in any order.
- A feature that is on until ``undo()`` or the end of ``with`` is a `Switch` (_common/switch.py).
  `workspace` is a scope (_common/scopes.py). `Recompute`, `Offload` and `accumulate` are neither:
  they may be entered again, or their calls wait for others.
  Chainer.
"""

from umem.compat import install

install()

from typing import TYPE_CHECKING  # noqa: E402

import chainer  # noqa: E402  (the layer must be in place first)

from umem.chainer.dry_initializers import leave_out_initializers  # noqa: E402
from umem.chainer.framework import CHAINER  # noqa: E402
from umem.chainer.host_time import follow_python  # noqa: E402
from umem.trace import register  # noqa: E402

register(CHAINER)
follow_python()
leave_out_initializers()

if TYPE_CHECKING:
    from umem.chainer import layers as layers
    from umem.chainer import optimizers as optimizers
    from umem.chainer.accumulation.accumulating import accumulate
    from umem.chainer.accumulation.updater import AccumulatingUpdater
    from umem.chainer.at_setup import AtSetup, HalvedBatches
    from umem.chainer.checkpointing.regions import checkpoint, checkpoint_sequential, checkpointed
    from umem.chainer.chunking.capped import workspace
    from umem.chainer.current_device import device
    from umem.chainer.demo_workload import (
        BYTES_PER_NODE,
        Workload,
        run_cuda,
        run_software,
        run_virtual,
    )
    from umem.chainer.distillation.distilling_loss import DistillingLoss
    from umem.chainer.distillation.distilling_updater import DistillingUpdater
    from umem.chainer.dry_training import DryTraining
    from umem.chainer.gcn import GCN, Adjacency, GraphConvolution, sparse_matmul
    from umem.chainer.layers.slimmed import slimmer
    from umem.chainer.layers.tying import tie
    from umem.chainer.lookahead.prefetch import LookaheadPrefetch
    from umem.chainer.memory_report import MemoryReport
    from umem.chainer.offload.offload import Offload
    from umem.chainer.parallel.parallel_gcn import ParallelGCN, ParallelGraphConvolution
    from umem.chainer.parallel.parallel_graph import ParallelGraph
    from umem.chainer.parallel.sharding import sharded
    from umem.chainer.parameter_updates import CHUNKED_RULES, chunked_updates
    from umem.chainer.precision.half_precision import half_precision
    from umem.chainer.precision.saved_in import saved_in
    from umem.chainer.quantization.aware import quantization_aware
    from umem.chainer.quantization.quantized_file import load_quantized, save_quantized
    from umem.chainer.quantization.quantizing import quantize
    from umem.chainer.recompute.recompute import Recompute
    from umem.chainer.resume.loop_snapshots import resume_run, save_run
    from umem.chainer.resume.snapshot_extension import Snapshot
    from umem.chainer.tap import POINTS, Subscriber, subscribe, unsubscribe
else:
    from umem._common.faces import face

    _, __getattr__ = face(
        __name__,
        "layers optimizers",
        accumulation__accumulating="accumulate",
        accumulation__updater="AccumulatingUpdater",
        at_setup="AtSetup HalvedBatches",
        checkpointing__regions="checkpoint checkpoint_sequential checkpointed",
        chunking__capped="workspace",
        current_device="device",
        demo_workload="BYTES_PER_NODE Workload run_cuda run_software run_virtual",
        distillation__distilling_loss="DistillingLoss",
        distillation__distilling_updater="DistillingUpdater",
        dry_training="DryTraining",
        gcn="GCN Adjacency GraphConvolution sparse_matmul",
        layers__slimmed="slimmer",
        layers__tying="tie",
        lookahead__prefetch="LookaheadPrefetch",
        memory_report="MemoryReport",
        offload__offload="Offload",
        parallel__parallel_gcn="ParallelGCN ParallelGraphConvolution",
        parallel__parallel_graph="ParallelGraph",
        parallel__sharding="sharded",
        parameter_updates="chunked_updates CHUNKED_RULES",
        precision__half_precision="half_precision",
        precision__saved_in="saved_in",
        quantization__aware="quantization_aware",
        quantization__quantized_file="load_quantized save_quantized",
        quantization__quantizing="quantize",
        recompute__recompute="Recompute",
        resume__loop_snapshots="resume_run save_run",
        resume__snapshot_extension="Snapshot",
        tap="POINTS Subscriber subscribe unsubscribe",
    )

__all__ = [
    "GCN",
    "AccumulatingUpdater",
    "Adjacency",
    "DistillingLoss",
    "DistillingUpdater",
    "GraphConvolution",
    "LookaheadPrefetch",
    "MemoryReport",
    "Offload",
    "ParallelGCN",
    "ParallelGraph",
    "ParallelGraphConvolution",
    "Recompute",
    "Snapshot",
    "accumulate",
    "checkpoint",
    "checkpoint_sequential",
    "checkpointed",
    "chunked_updates",
    "device",
    "half_precision",
    "load_quantized",
    "quantization_aware",
    "quantize",
    "resume_run",
    "save_quantized",
    "save_run",
    "saved_in",
    "sharded",
    "slimmer",
    "sparse_matmul",
    "tie",
    "workspace",
]


def __dir__() -> list[str]:
    """Return names, those that are loaded on first use included."""
    return sorted({*globals(), *__all__})
