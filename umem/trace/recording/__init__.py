"""Recording: the instrumented sources, measured time and memory, and the store of events."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from umem.trace.recording.kept_steps import Keeper, Kept, Steps
    from umem.trace.recording.marks import listeners
    from umem.trace.recording.meter import BlockMeter, HeldBytes, HostMeter, MeteredPools, of_gpu
    from umem.trace.recording.recorder import (
        Audience,
        Measured,
        Recorder,
        active,
        follow_last,
        inside,
    )
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
    from umem.trace.recording.thread import thread_state
else:
    from umem._common.faces import face

    __all__, __getattr__ = face(
        __name__,
        kept_steps="Keeper Kept Steps",
        marks="listeners",
        meter="BlockMeter HeldBytes HostMeter MeteredPools of_gpu",
        recorder="Audience Measured Recorder active follow_last inside",
        recordings="mark record",
        sources="add_source",
        storage="AllocationReporter Lifetimes Reach address_of free_reporters reporters root_of",
        tally="GROUPS NAMES Tally",
        thread="thread_state",
    )
