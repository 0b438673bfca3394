"""Dry runs: what keeps a program that runs without arithmetic from doing harm.

The values of a dry run are zeros, so nothing that it writes may take the place of a file of the
user's, and no other program may be handed its results. `disk` is the public face, `overlay` is
the scratch folder as the program sees it, and `programs` judges other programs, libraries that
open files in C, and connections. Every Python that the program starts loads this room before
NumPy: its modules import the standard library alone, and umem's own where they need it.
"""
