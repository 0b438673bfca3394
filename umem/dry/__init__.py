"""Dry runs of programs: ``umem run --dry``, what it says of them, and what keeps them from harm.

The software GPU's dry mode (`umem.host_cuda.dry`) runs a program without its arithmetic.
`dry_steps` says when its steps are alike, `asked` counts what it reads of unknown values, `outcome`
is the result and `verdict` words it; `umem.cli.dry_run` follows the program.

The values of a dry run are zeros, so nothing that it writes may take the place of a file of the
user's, and no other program may be handed its results. `disk` is the public face of that,
`overlay` is the scratch folder as the program sees it, and `programs` checks other programs,
libraries that open files in C, and connections. Every Python that the program starts loads these
three before NumPy: they import the standard library alone, and umem's own where they need it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from umem.dry.disk import FLAG, ScratchDisk, scratch_disk
    from umem.dry.dry_steps import LEAST_STEPS, DrySteps, GpuReading, StepLimit, StepsOver, Turns
    from umem.dry.outcome import (
        DOES_NOT_FIT,
        FAILED,
        INTERRUPTED,
        CaughtOutOfMemory,
        DryOutcome,
        End,
        Failure,
        Holder,
        UnknownValue,
    )
    from umem.dry.unknown_reads import EndlessReads, UnknownReads, is_answered, shortest
    from umem.dry.verdict import report
else:

    def __getattr__(name):
        """Load a name of the face; `umem_software_gpu` loads this package without umem."""
        from umem._common.faces import face

        return face(
            __name__,
            unknown_reads="EndlessReads UnknownReads is_answered shortest",
            disk="FLAG ScratchDisk scratch_disk",
            dry_steps="DrySteps GpuReading LEAST_STEPS StepLimit StepsOver Turns",
            outcome=(
                "CaughtOutOfMemory DOES_NOT_FIT DryOutcome End FAILED Failure Holder UnknownValue "
                "INTERRUPTED"
            ),
            verdict="report",
        )[1](name)
