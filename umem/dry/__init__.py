"""Dry runs of programs: ``umem run --dry``, its report, and the protection of the user's files.

The software GPU's dry mode (`umem.host_cuda.dry`) runs a program without its arithmetic, and
`umem.cli.dry_run` follows the program. This package counts the program's steps, writes the report,
and protects the disk: a dry run's values are zeros, so its output must not replace the user's files
or reach other programs.

    dry_steps.py      counts steps, and ends the run once two of them agree
    unknown_reads.py  counts reads of unknown values, and matches answers to lines
    outcome.py        is the result of a dry run
    verdict.py        formats the result as text
    disk.py           is `scratch_disk`: it redirects files that Python writes, renames or removes
    overlay.py        puts the scratch folder in front of the disk
    redirected.py     has the one table of functions of `os` and of `open`, and how each treats its
                      paths
    programs.py       stops other programs and libraries that open files in C, and notes the first
                      connection

- The overlay's state is only in its folder, so processes share it.
- An audit hook stops the run, naming its line, before any change of a file that the table misses.
- Every Python that the program starts loads `disk`, `overlay`, `redirected` and `programs` before
  NumPy and without umem. When loaded, these four and this file import only the standard library and
  one another.
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
        """Load a public name; `umem_software_gpu` loads this package without umem."""
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
