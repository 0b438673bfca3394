"""``umem run --resume every=500``: an old script with a Trainer, saved and resumed unchanged."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from umem._common.extras import command
from umem._common.nearest import did_you_mean
from umem._common.printable import quoted
from umem.cli.files_and_sizes import say
from umem.compat import find_package
from umem.errors import UmemError

_OPTION = "--resume"
_KEYS = ("every", "keep", "folder")
_EXAMPLE = "every=500, every=1epoch,keep=3 or every=500,folder=out/snapshots"


class ResumeOption:
    """Adds a `umem.chainer.Snapshot` to each Trainer of a script.

    Args:
        text: the option's text, such as ``every=500,keep=3,folder=PATH``, or None.

    Raises:
        click.ClickException: Chainer is not installed, or the text is not valid.
    """

    def __init__(self, text: str | None) -> None:
        self._text = text
        self._trainers = 0
        if text is None:
            return
        if find_package() is None:
            raise click.ClickException(
                f"{_OPTION} needs Chainer, which is not installed; {command('chainer')}"
            )
        self._options = parsed(text)
        self._made(None)  # so that bad options are refused before the script runs

    def begin(self, stack: ExitStack) -> None:
        """Watch for trainers until the stack unwinds."""
        if self._text is None:
            return
        from umem.chainer import subscribe, unsubscribe

        watcher = _watcher(self)
        subscribe(watcher)
        stack.callback(self._report, os.getpid())
        stack.callback(unsubscribe, watcher)

    def extend(self, trainer: Any) -> None:
        """Add a snapshot to a trainer, unless it has one; each trainer gets its own folder."""
        import umem.chainer

        # A Trainer has no public list of its extensions.
        entries = trainer._extensions.values()
        if any(isinstance(entry.extension, umem.chainer.Snapshot) for entry in entries):
            self._trainers += 1
            return
        name = f"snapshots-{self._trainers + 1}" if self._trainers else "snapshots"
        folder = self._options.get("folder")
        self._trainers += 1
        if folder is None:
            trainer.extend(self._made(Path(trainer.out) / name))
        else:
            numbered = folder if self._trainers == 1 else f"{folder}-{self._trainers}"
            trainer.extend(self._made(Path(numbered)))

    def _made(self, folder: Path | None) -> Any:
        import umem.chainer

        options = {**self._options, "folder": folder, "comm": _all_ranks()}
        try:
            return umem.chainer.Snapshot(**options)
        except UmemError as error:
            raise click.BadParameter(str(error), param_hint=_OPTION) from error

    def _report(self, process: int) -> None:
        if os.getpid() == process and not self._trainers:  # no child by fork
            say(
                f"umem: {_OPTION} {self._text}: nothing was saved, because no Trainer ran. In a "
                "loop of your own, call umem.chainer.save_run and resume_run",
                err=True,
            )


def _all_ranks() -> Any:
    """Return the communicator of all ranks, if the script has begun MPI on several; else None."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.COMM_WORLD.Get_size() == 1:
        return None
    return mpi.COMM_WORLD


def parsed(text: str) -> dict[str, Any]:
    """Parse the value of ``--resume``.

    Raises:
        click.BadParameter: it is not valid.
    """
    options: dict[str, Any] = {}
    for part in text.split(","):
        name, given, value = part.partition("=")
        if name not in _KEYS and (given or "every" in options):
            raise click.BadParameter(
                f"unknown key {quoted(name)}; known are {', '.join(_KEYS)}."
                f"{did_you_mean(name, _KEYS)}",
                param_hint=_OPTION,
            )
        if not given or name in options or not value:
            raise _unreadable(text)
        options[name] = value if name == "folder" else _number(name, value, text)
    if "folder" in options:
        options["folder"] = os.path.abspath(options["folder"])  # the script may change folders
    return options


def _number(name: str, value: str, text: str) -> Any:
    digits = value.removesuffix("epoch") if name == "every" else value
    if not digits.isascii() or not digits.isdigit() or len(digits) > 9:
        raise _unreadable(text)
    return int(digits) if digits == value else (int(digits), "epoch")


def _unreadable(text: str) -> click.BadParameter:
    return click.BadParameter(f"cannot read {text!r}. Write {_EXAMPLE}", param_hint=_OPTION)


def _watcher(resuming: ResumeOption) -> Any:
    """Make the subscriber that adds snapshots to trainers; imports Chainer."""
    from umem.chainer import Subscriber

    class TrainerWatcher(Subscriber):
        """Subscriber that adds snapshots to starting trainers."""

        def train(self, proceed: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
            resuming.extend(trainer)
            proceed(trainer, *args, **kwargs)

    return TrainerWatcher()
