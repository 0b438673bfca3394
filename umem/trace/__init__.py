"""Traces of steps: the memory that each allocated, freed, read and wrote.

A trace is a list of events without contents, so it can be replayed on any device. Predict replays
traces, planner and onnx plan from them, reports shows them, and devices and chainer record them.

    events.py      defines the events: allocations, releases, operations, hints and marks
    trace.py       is `Trace`, and checks the events of one
    walk.py        walks over the events: what is alive, and how many bytes are in use
    file.py        writes and reads the file format, and documents it
    frameworks.py  has the table of supported frameworks
    recording/     follows a running step and makes a trace of it
    analysis/      computes the figures of a trace: peak, tensors, leaks, differences

- A framework is a folder of umem, which registers one record when it is imported: its name, the
  source that reports its operations, a function that finds the arrays in its objects, its notes.
- General code knows no framework; it uses the table.
- Loading a trace parses JSON and executes nothing.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from umem.trace.events import (
        ACTIONS,
        COPIES,
        GET,
        KINDS,
        LARGEST_BYTES,
        LEAF,
        ONE_KERNEL,
        OUTSIDE,
        PATTERNS,
        PHASES,
        Access,
        Alloc,
        Checker,
        Event,
        Free,
        Hint,
        Kernels,
        Mark,
        Op,
        TapeEntry,
        check_figures,
    )
    from umem.trace.file import MAX_BYTES, MAX_EVENTS
    from umem.trace.frameworks import (
        DATA_CACHE,
        FOLDERS,
        Framework,
        framework_notes,
        names,
        parts_of,
        register,
    )
    from umem.trace.trace import Trace, check_trace
    from umem.trace.walk import allocations, renumbered, used_bytes
else:
    from umem._common.faces import face

    __all__, __getattr__ = face(
        __name__,
        events=(
            "ACTIONS Access Alloc COPIES Checker Event Free GET Hint KINDS Kernels "
            "LARGEST_BYTES LEAF Mark ONE_KERNEL OUTSIDE Op PATTERNS PHASES TapeEntry "
            "check_figures"
        ),
        file="MAX_BYTES MAX_EVENTS",
        frameworks="DATA_CACHE FOLDERS Framework framework_notes names parts_of register",
        trace="Trace check_trace",
        walk="allocations renumbered used_bytes",
    )
