"""Offload targets: files for NumPy, pinned host memory for CuPy, and a simulation of the latter.

`Offload` and `Recompute` open one for each class of arrays.

    tier.py             is the interface of a target
    tiers.py            opens a target, and measures its link
    file_tier.py        is a file without a name, in the user's folder
    pinned.py           is pinned host memory; it never ran on a real GPU
    simulated.py        is pinned memory of a virtual GPU: contents are copied, the time is
                        simulated
    extents.py          allocates ranges of a file or slab
    recorder_events.py  tells recorders that an array was offloaded or fetched
"""
