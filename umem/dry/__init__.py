"""Dry runs of programs: ``umem run --dry``, what it says of them, and what keeps them from harm.

The software GPU's dry mode (`umem.devices.software`) runs a program without its arithmetic.
`dry_steps` says when its steps are alike, `asked` counts what it reads of unknown values, `outcome`
is the result and `verdict` words it; `umem.cli.dry_run` follows the program.

The values of a dry run are zeros, so nothing that it writes may take the place of a file of the
user's, and no other program may be handed its results. `disk` is the public face of that,
`overlay` is the scratch folder as the program sees it, and `programs` judges other programs,
libraries that open files in C, and connections. Every Python that the program starts loads these
three before NumPy: they import the standard library alone, and umem's own where they need it.
"""
