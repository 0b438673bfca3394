"""Dry runs of programs: ``umem run --dry``, what it says of them, and what keeps them from harm.

The software GPU's dry mode (`umem.host_cuda.dry`) runs a program without its arithmetic, and
`umem.cli.dry_run` follows the program. This room counts the program's steps, words the verdict, and
keeps the disk as it was: the values of a dry run are zeros, so nothing that it writes may take the
place of a file of the user's, and no other program may be handed its results.

    dry_steps.py      counts steps, and ends the run once enough of them are alike
    unknown_reads.py  counts reads of values that the run does not know, and has the answers to some
    outcome.py        is the result of a dry run
    verdict.py        words the result for a person
    disk.py           is `scratch_disk`: it redirects what Python writes, renames or removes
    overlay.py        puts the scratch folder in front of the disk
    redirected.py     has the one table of functions of `os` and of `open`, and how each treats its
                      paths
    programs.py       stops other programs and libraries that open files in C, and remembers the
                      first connection

- The state of the overlay is in its folder alone, so that processes share it.
- An audit hook stops the run, with its line, before whatever would change a file past the table.
- Every Python that the program starts loads `disk`, `overlay`, `redirected` and `programs` before
  NumPy and without umem. As they are loaded, these four and this file import the standard library
  and one another alone.
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
