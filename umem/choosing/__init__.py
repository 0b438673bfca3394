"""Find the techniques that make a program fit a GPU, by a dry run under each.

`umem.choose`, ``umem choose``, ``umem batch``, ``umem advise`` and ``umem run --budget`` use it.
Each dry run is a process of its own.

    technique.py       is a row of the table: a name, the line to type, and the function that turns
                       it on
    technique_rows.py  has the table, and `register_technique`
    child.py           runs a program dry under a technique, from both sides of the process
    choosing.py        is `choose`, and orders the rows that were tried
    batch_sizes.py     finds the largest batch that fits, and halves each size of a program

- The child is ``umem run --dry`` with the hidden option ``--technique``, which names the file of
  the pickled technique.
- chainer/at_setup.py has the techniques that are turned on at ``optimizer.setup``.
  devices/cuda/large_arrays.py follows CuPy's large arrays for the techniques that need them.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from umem.choosing.batch_sizes import (
        BatchSearch,
        HalvedArguments,
        TriedSize,
        halve_each,
        largest_batch,
        number_argument,
    )
    from umem.choosing.child import DryProgram, DryResult, Trial, run_dry
    from umem.choosing.choosing import ScriptChoice, TriedTechnique, choose, choose_for
    from umem.choosing.technique import Technique
    from umem.choosing.technique_rows import TECHNIQUES, nothing, register_technique, within
else:
    from umem._common.faces import face

    __all__, __getattr__ = face(
        __name__,
        batch_sizes=(
            "BatchSearch HalvedArguments TriedSize halve_each largest_batch number_argument"
        ),
        child="DryProgram DryResult Trial run_dry",
        choosing="ScriptChoice TriedTechnique choose choose_for",
        technique="Technique",
        technique_rows="TECHNIQUES nothing register_technique within",
    )
