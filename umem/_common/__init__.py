"""The common ground of all rooms: files, locks, scopes, the host, the table of GPUs.

Every room imports these modules as such, because this room has no face. They import one another,
`umem.errors` and `umem.units`, and nothing else of umem.

    arithmetic.py        names the arithmetic of an operation: its type, and whether tensor cores
                         compute it
    as_json.py           turns results into plain values for JSON
    checksums.py         sums up arrays and files, and compares the sums before anything of a file
                         is used
    extras.py            knows the packages of each extra, and words the commands that install them
    faces.py             loads a name of a room's face when it is first used
    files.py             opens regular files only, and writes a file whole or not at all
    host.py              asks the host for its memory that is left, and whether it has a GPU
    locks.py             makes locks that a fork leaves neither held nor guarding something half
                         done
    nearest.py           finds the name that a misspelt one was meant to be
    printable.py         makes text from others safe to print, and short
    safetensors_file.py  writes and reads files of safetensors
    scopes.py            keeps the open blocks that the calling code is inside of
    specs.py             has the table of GPUs and every constant of cost, each with its source
    stacks.py            keeps the user's part of a call stack, and reads it later
    switch.py            is the handle of a feature that is on from a call until `undo`, or the end
                         of `with`

- A block is a scope: closing it is one assignment, in any order and from any code. Everything else
  follows from the scopes that are open.
- Whatever a block changes outside, how to undo it is recorded first. A signal inside of a block
  unwinds it like any exception. A signal between two instructions of entering or leaving may leave
  the block on.
- NumPy, click and rich are always installed. Any other package is imported where it is used; its
  absence is an error that names the extra to install.
- Of the extras, ``chainer`` is for umem.chainer, ``cuda12`` and ``cuda13`` for a GPU, ``fast`` for
  8-bit states on NumPy, ``mpi`` for several ranks and for cuts of graphs, ``data`` and ``onnx`` for
  the rooms of these names, ``dask`` for umem.dask, ``plot`` for pictures, ``software`` and
  ``software13`` for the software GPU.
- Extras are for empty machines: an importable CuPy is enough for the modes of memory, and only
  hints need cuda-core.
"""
