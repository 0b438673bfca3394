"""Choosing what makes a program fit a GPU: it runs dry under each technique.

`technique` is a row of the table, `technique_rows` the table, and `child` a dry run under one, from
both sides. `choosing` orders what was tried, and `batch_sizes` looks for the largest batch that
fits, and halves sizes.
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
