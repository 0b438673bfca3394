"""Recomputation by hand: a region keeps its inputs, and runs again for its backward pass.

`checkpoint`, `checkpointed` and `checkpoint_sequential` are for users. Nothing is planned here;
`umem.chainer.recompute` plans.

    regions.py       has the three functions, and the function node of a region
    region.py        is a call that runs twice: its arguments and its results
    two_runs.py      runs a region first, and a second time, which must do the same
    calls.py         compares the function calls of the two runs
    region_state.py  keeps random numbers and links' vectors alike in both runs

Tried and rejected: a region that keeps only its inputs on the tape of `Recompute`. It is exact, and
takes no more memory if every function may run twice. But the tape keeps everything that must not
run twice, while `checkpoint` runs the program's own function again with its random state: a
residual network with zoneout would hold four times as much.
"""
