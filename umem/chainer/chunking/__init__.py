"""Convolutions, poolings and batch normalisation in parts, under a cap on their workspace.

`workspace` is for users; techniques of `umem.choosing` also turn it on. The tap looks up in
`functions.RULES` which methods of Chainer may be computed here.

    capped.py       is `workspace`, the cap
    functions.py    lists Chainer's functions under a cap, and how each is computed
    pieces.py       splits a call's work so that its workspace stays under the cap
    convolving.py   computes convolutions, their adjoints and their kernels' gradients
    pooling.py      computes poolings and their gradients on NumPy, without columns
    normalizing.py  computes batch normalisation some channels at a time
    windows.py      makes columns on NumPy, a copy for each place of the window
    gpu_windows.py  makes them on CuPy in one kernel, with the same bits

- The tap reports these methods as ``compute``: a subscriber replaces the computing method, and need
  not proceed.
- Chainer computes a convolution on a GPU itself if its whole workspace stays under the cap.
- chainer/forward_state.py restores the cap for functions that run again, with Chainer's
  configuration.
"""
