"""``umem run --record FILE``: the trace of a script's steps, and the commands that come next."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from umem._common.files import claimed
from umem._common.printable import command_line, short
from umem.cli.files_and_sizes import say
from umem.errors import TraceError, UmemError
from umem.trace import names
from umem.trace.recording import Keeper, Kept
from umem.units import format_bytes


class Recording:
    """Records the calling thread, and writes the trace once it is complete.

    Args:
        path: where to.
        keeper: the recorder.
        script: the script's short name.
        stop, force: as the command has them.
        at_end: write at the end only: what a dry run writes meanwhile does not last.
    """

    def __init__(
        self,
        path: Path,
        keeper: Keeper,
        script: str,
        *,
        stop: bool,
        force: bool,
        at_end: bool = False,
    ) -> None:
        self._named, self._keeper, self._script = path, keeper, script
        self._stop, self._force, self._at_end = stop, force, at_end
        self._path = path.absolute()  # the script may change folders
        self._written = False
        self.error: str | None = None

    @property
    def last_step(self) -> int | None:
        """Return the last of the steps to keep; None where there is none."""
        return self._keeper.steps.last

    def begin(self, stack: ExitStack) -> None:
        """Record until the stack unwinds.

        Raises:
            TraceError: the file cannot be written; nothing has begun.
        """
        stack.enter_context(claimed(self._path, force=self._force))
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
                f"nothing was recorded: the script's main thread ran no operation of {names()}, "
                f"and "
                "made no CuPy array on a GPU"
            )
        elif not self._written:
            self._write(kept)
        self._report(kept)

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

    def _report(self, kept: Kept) -> None:
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
        say(f"  umem replay {name} --gpu t4", err=True)
