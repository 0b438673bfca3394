"""Chainer under umem: importing this package imports Chainer through the compatibility layer.

`__all__` is for users. What follows it is for other rooms: techniques that are turned on from
outside, the demo's workload, a dry run's steps, and the tap, by which anybody follows Chainer.
"""

from umem.compat import install

install()

from typing import TYPE_CHECKING  # noqa: E402

import chainer  # noqa: E402  (the layer must be in place first)

from umem.chainer import layers as layers  # noqa: E402
from umem.chainer import optimizers as optimizers  # noqa: E402
from umem.chainer.accumulation.accumulating import accumulate  # noqa: E402
from umem.chainer.accumulation.updater import AccumulatingUpdater  # noqa: E402
from umem.chainer.checkpointing.regions import checkpoint, checkpoint_sequential, checkpointed  # noqa: E402
from umem.chainer.chunking.capped import workspace  # noqa: E402
from umem.chainer.current_device import device  # noqa: E402
from umem.chainer.distillation.distilling_loss import DistillingLoss  # noqa: E402
from umem.chainer.distillation.distilling_updater import DistillingUpdater  # noqa: E402
from umem.chainer.dry_initializers import leave_out_initializers  # noqa: E402
from umem.chainer.framework import CHAINER  # noqa: E402
from umem.chainer.gcn import GCN, Adjacency, GraphConvolution, sparse_matmul  # noqa: E402
from umem.chainer.host_time import follow_python  # noqa: E402
from umem.chainer.layers.slimmed import slimmer  # noqa: E402
from umem.chainer.layers.tying import tie  # noqa: E402
from umem.chainer.lookahead.prefetch import LookaheadPrefetch  # noqa: E402
from umem.chainer.memory_report import MemoryReport  # noqa: E402
from umem.chainer.offload.offload import Offload  # noqa: E402
from umem.chainer.parallel.parallel_gcn import ParallelGCN, ParallelGraphConvolution  # noqa: E402
from umem.chainer.parallel.parallel_graph import ParallelGraph  # noqa: E402
from umem.chainer.parallel.sharding import sharded  # noqa: E402
from umem.chainer.parameter_updates import chunked_updates  # noqa: E402
from umem.chainer.precision.half_precision import half_precision  # noqa: E402
from umem.chainer.precision.saved_in import saved_in  # noqa: E402
from umem.chainer.quantization.aware import quantization_aware  # noqa: E402
from umem.chainer.quantization.quantized_file import load_quantized, save_quantized  # noqa: E402
from umem.chainer.quantization.quantizing import quantize  # noqa: E402
from umem.chainer.recompute.recompute import Recompute  # noqa: E402
from umem.chainer.resume.loop_snapshots import resume_run, save_run  # noqa: E402
from umem.chainer.resume.snapshot_extension import Snapshot  # noqa: E402
from umem.trace import register  # noqa: E402

register(CHAINER)
follow_python()
leave_out_initializers()

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

if TYPE_CHECKING:
    from umem.chainer.at_setup import AtSetup, HalvedBatches
    from umem.chainer.demo_workload import (
        BYTES_PER_NODE,
        Workload,
        run_cuda,
        run_software,
        run_virtual,
    )
    from umem.chainer.dry_training import DryTraining
    from umem.chainer.parameter_updates import CHUNKED_RULES
    from umem.chainer.tap import POINTS, Subscriber, subscribe, unsubscribe
else:
    from umem._common.faces import face

    _, __getattr__ = face(
        __name__,
        at_setup="AtSetup HalvedBatches",
        demo_workload="BYTES_PER_NODE Workload run_cuda run_software run_virtual",
        dry_training="DryTraining",
        parameter_updates="CHUNKED_RULES",
        tap="POINTS Subscriber subscribe unsubscribe",
    )
