"""Recording: the instrumented sources, measured time and memory, and the store of events.

A recorder turns a running step into events. `umem.record` and ``umem run --record`` make traces
with it; chainer and the devices follow programs with it.

    recordings.py  is `record` and `mark`
    recorder.py    turns a running step into events
    sources.py     starts and stops the sources of events with the first and the last recorder
    storage.py     finds the memory behind an array: its tensor, the bytes of a view, its lifetime
    buffer.py      stores events as few plain values, and decodes them on demand
    meter.py       measures bytes: live ones, the peak, and the workspace between two readings
    thread.py      has the state of a recorded thread
    marks.py       lists the other listeners to `umem.mark`
    kept_steps.py  records some steps of a run, and then stops
    tally.py       keeps running totals of live bytes, operations and steps

- A source is anything that can be instrumented. The virtual GPU's arrays, CuPy's pools and
  Chainer's functions are sources.
- Only `HostMeter` uses tracemalloc. `PoolMeter` (devices/cuda/pool_meter.py) reads the pools of a
  GPU by CuPy's memory hooks. `meter_of` (chainer/recompute/facts.py) chooses between them by the
  arrays.
- A recording measures each operation with the GPU's meter if `of_gpu` has one and the first array
  is CuPy's, otherwise with the host's.
- devices/cuda_source.py starts the source of CuPy's blocks on a machine with a GPU; the software
  GPU adds a source of its own.
- A recorder follows the thread, and in it the asyncio task, that entered it, and the tasks that
  this task creates.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from umem.trace.recording.kept_steps import Keeper, Kept, Steps
    from umem.trace.recording.marks import listeners
    from umem.trace.recording.meter import BlockMeter, HeldBytes, HostMeter, MeteredPools, of_gpu
    from umem.trace.recording.recorder import Audience, Measured, Recorder, active, follow_last
    from umem.trace.recording.recordings import mark, record
    from umem.trace.recording.sources import add_source
    from umem.trace.recording.storage import (
        AllocationReporter,
        Lifetimes,
        Reach,
        address_of,
        free_reporters,
        reporters,
        root_of,
    )
    from umem.trace.recording.tally import GROUPS, NAMES, Tally
    from umem.trace.recording.thread import inside, thread_state
else:
    from umem._common.faces import face

    __all__, __getattr__ = face(
        __name__,
        kept_steps="Keeper Kept Steps",
        marks="listeners",
        meter="BlockMeter HeldBytes HostMeter MeteredPools of_gpu",
        recorder="Audience Measured Recorder active follow_last",
        recordings="mark record",
        sources="add_source",
        storage="AllocationReporter Lifetimes Reach address_of free_reporters reporters root_of",
        tally="GROUPS NAMES Tally",
        thread="inside thread_state",
    )
