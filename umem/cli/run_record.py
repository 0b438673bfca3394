"""``umem run --record FILE``: the trace of a script's steps, and the commands that come next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from umem import extras
from umem.cli.files_and_sizes import StepSizesType, say
from umem.compat.installation import find_package
from umem.errors import TraceError, UmemError
from umem.files import claimed
from umem.printable import command_line, short
from umem.trace.frameworks import names
from umem.trace.recording.kept_steps import Kept
from umem.units import format_bytes


class Recording:
    """Records the calling thread, and writes the trace once it is complete.

    Args:
        path: where to.
        make_keeper: returns the recorder, when recording begins: one of sizes imports Chainer, and
            with it CuPy, which the software GPU has to come before.
        script: the script's short name.
        again: the words of a command that would run it so again; empty: none is offered.
        stop, force: as the command has them.
        at_end: write at the end only: what a dry run writes meanwhile does not last.
    """

    def __init__(
        self,
        path: Path,
        make_keeper: Callable[[], Any],
        script: str,
        again: Sequence[str],
        *,
        stop: bool,
        force: bool,
        at_end: bool = False,
    ) -> None:
        self._named, self._make_keeper, self._script, self._again = path, make_keeper, script, again
        self._stop, self._force, self._at_end = stop, force, at_end
        self._path = path.absolute()  # the script may change folders
        self._written = False
        self.error: str | None = None

    @property
    def last_step(self) -> int | None:
        """Return the last of the steps to keep; None where there is none."""
        return getattr(getattr(self._keeper, "steps", None), "last", None)

    def begin(self, stack: ExitStack) -> None:
        """Record until the stack unwinds.

        Raises:
            TraceError: the file cannot be written; nothing has begun.
        """
        stack.enter_context(claimed(self._path, force=self._force))
        self._keeper = self._make_keeper()
        self._keeper.complete = self._complete
        self._keeper.start()
        stack.callback(self._end)

    def _complete(self, kept: Kept) -> None:
        if not self._at_end:
            self._write(kept)
        if self._stop:
            raise SystemExit(0)  # the script's own clean-up runs

    def _end(self) -> None:
        """End the recording, write what was kept, and report it; forked children do nothing."""
        try:
            kept: Kept | None = self._keeper.finish()
        except UmemError as error:
            self.error = str(error)
            say(f"umem: {error}", err=True)
            return
        if kept is None:
            return  # a child process by fork
        if not kept.trace.peak_bytes:
            self.error = (
                f"nothing was recorded: no operation of {names()} ran in the script's main thread, "
                "and on a GPU no array of CuPy was made there"
            )
        elif not self._written:
            self._write(kept)
        self._tell(kept)

    def _write(self, kept: Kept) -> None:
        """Write the trace; a failure is reported, and tried again at the end, as training must go
        on.
        """
        trace = replace(kept.trace, meta={**kept.trace.meta, "script": self._script})
        try:
            trace.save(self._path, force=self._force)
        except TraceError as error:
            self.error = str(error)
        else:
            self._written, self.error = True, None

    def _tell(self, kept: Kept) -> None:
        """Report the written file and the commands to run next, or the error."""
        if self.error is not None:
            say(f"umem: {self.error}", err=True)
            return
        path, count = self._named, sum(1 for _ in kept.trace.ops)
        what = f"steps {kept.steps}" if "-" in kept.steps else f"step {kept.steps}"
        what = what if kept.steps else "no whole step"
        peak = format_bytes(kept.trace.peak_bytes)
        done = f"{what}, {count:,} operations, peak {peak}"
        say(f"umem: wrote {short(path)}: {done}", err=True)
        for note in kept.notes:
            say(f"umem: {note}", err=True)
        name = command_line(path)
        say(f"  umem report {name}", err=True)
        if not count:
            return
        if kept.trace.sizes:
            say(f"  umem choose {name} --size 64 --gpu t4      # at any size", err=True)
            return
        say(f"  umem choose {name} --gpu t4", err=True)
        if self._again and any(op.phase == "update" for op in kept.trace.ops):
            words = command_line(*self._again)
            say(
                "for other batches, where the script calls optimizer.update(lossfun, *arrays):\n"
                f"  umem run --record {name} --sizes 4,8 --force {words}\n"
                f"  umem choose {name} --size 64 --gpu t4",
                err=True,
            )


def batch_sizes(text: str) -> tuple[int, ...]:
    """Read the batch sizes at which the first update is recorded.

    Raises:
        click.ClickException: Chainer is missing, or these are no sizes of a batch.
    """
    sizes: tuple[Any, ...] = StepSizesType().convert(text, None, None)
    if not 2 <= len(set(sizes)) == len(sizes) <= 3 or not all(
        isinstance(size, int) and size > 0 for size in sizes
    ):
        raise click.BadParameter("two or three numbers of samples: 4,8", param_hint="--sizes")
    if find_package() is None:
        raise click.ClickException(
            f"--sizes is for Chainer, which is missing: {extras.command('chainer')}"
        )
    return sizes


def at_sizes(sizes: Sequence[int]) -> Any:
    """Return a recorder of the first update at several batch sizes, in place of a `Keeper`."""
    from umem.chainer.dial.two_sizes import TwoSizes

    return TwoSizes(sizes)
