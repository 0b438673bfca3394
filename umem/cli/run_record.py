"""What ``umem run --record`` does beside the script."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from umem.cli.in_and_out import say
from umem.errors import TraceError
from umem.files import claimed
from umem.printable import command_line, shown
from umem.trace.frameworks import names
from umem.trace.recording.kept_steps import Keeper, Kept, Steps
from umem.units import format_bytes


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    path: Path
    steps: Steps
    force: bool
    stacks: bool
    workspace: bool
    stop: bool


class Recording:
    """Records the calling thread, writes the trace as soon as it is complete, and tells of it."""

    def __init__(self, options: Options, script: Path) -> None:
        self._options, self._script = options, script
        self._keeper = Keeper(
            options.steps, options.stacks, options.workspace, complete=self._complete
        )
        self._path = options.path.absolute()  # the script may change folders
        self._written = False
        self.error: str | None = None

    def begin(self, stack: ExitStack) -> None:
        """Record until the stack is left.

        Raises:
            TraceError: the file cannot be written; nothing has begun.
        """
        stack.enter_context(claimed(self._path, force=self._options.force))
        self._keeper.start()
        stack.callback(self._end)

    def _complete(self, kept: Kept) -> None:
        self._write(kept)
        if self._options.stop:
            raise SystemExit(0)  # the script's own clean-up runs

    def _end(self) -> None:
        kept = self._keeper.finish()
        if kept is None:
            return  # a child process by fork
        if not any(kept.trace.ops):
            self.error = (
                f"nothing was recorded: no operation of {names()} ran in the script's main thread"
            )
        elif not self._written:
            self._write(kept)
        self._tell(kept)

    def _write(self, kept: Kept) -> None:
        """Failing must not stop the training; it is told, and tried once more, at the end."""
        trace = replace(kept.trace, meta={**kept.trace.meta, "script": self._script.name})
        try:
            trace.save(self._path, force=self._options.force)
        except TraceError as error:
            self.error = str(error)
        else:
            self._written, self.error = True, None

    def _tell(self, kept: Kept) -> None:
        if self.error is not None:
            say(f"umem: {self.error}", err=True)
            return
        path, count = self._options.path, sum(1 for _ in kept.trace.ops)
        what = f"steps {kept.steps}" if "-" in kept.steps else f"step {kept.steps}"
        what = what if kept.steps else "no whole step"
        peak = format_bytes(kept.trace.peak_bytes)
        done = f"{what}, {count:,} operations, peak {peak}"
        say(f"umem: wrote {shown(path)}: {done}", err=True)
        for note in kept.notes:
            say(f"umem: {note}", err=True)
        name = command_line(path)
        say(f"  umem report {name}\n  umem choose {name} --gpu t4", err=True)
