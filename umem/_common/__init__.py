"""Modules that every room uses: files, locks, scopes, the host, the table of GPUs.

Rooms import these modules directly, because this room has no face. The modules import one another,
`umem.errors` and `umem.units`, and nothing else of umem.

    arithmetic.py        names the arithmetic of an operation: its type, and whether tensor cores
                         compute it
    as_json.py           converts results to plain values for JSON
    checksums.py         computes checksums of arrays and files, and compares them before a file is
                         used
    extras.py            knows the packages of each extra, and the commands that install them
    faces.py             loads a name of a room's face when it is first used
    files.py             opens regular files only, and writes a file completely or not at all
    host.py              reads the host's available memory, and whether it has a GPU
    locks.py             makes locks that are safe across forks
    nearest.py           finds the name closest to a misspelt one
    printable.py         makes text from others safe to print, and short
    safetensors_file.py  writes and reads safetensors files
    scopes.py            keeps the open blocks around the calling code
    specs.py             has the table of GPUs and every constant of cost, each with its source
    stacks.py            keeps the user's part of a call stack, and reads it later
    switch.py            has the handle of a feature that is on from a call until `undo`, or the end
                         of `with`

- A block is a scope. Closing it is one assignment, in any order and from any code. Everything else
  follows from the scopes that are open.
- Before a block changes state outside of itself, it records how to undo the change. A signal inside
  of a block unwinds it like any exception. A signal between two instructions of entering or leaving
  may leave the block on.
- NumPy, click and rich are always installed. Any other package is imported where it is used; if it
  is missing, the error names the extra to install.
- Of the extras, ``chainer`` is for umem.chainer, ``cuda12`` and ``cuda13`` for a GPU, ``fast`` for
  8-bit states on NumPy, ``mpi`` for several ranks and for cuts of graphs, ``data`` and ``onnx`` for
  the rooms of these names, ``dask`` for umem.dask, ``plot`` for pictures, ``software`` and
  ``software13`` for the software GPU.
- Extras are for machines without these packages: the memory modes need only an importable CuPy, and
  only hints need cuda-core.
"""
