"""``umem run --dry``: a script tells whether it fits on a GPU, by running without arithmetic."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from umem._common.as_json import plain
from umem._common.files import reason
from umem._common.printable import short
from umem.choosing import Trial
from umem.cli.dry_run import DryRun
from umem.cli.files_and_sizes import say
from umem.cli.help_layout import Names
from umem.cli.run_dry_gpus import Elsewhere, lines
from umem.cli.run_ranks import given_arguments, rank_path
from umem.dry import LEAST_STEPS, StepLimit, report, scratch_disk
from umem.errors import SizeError
from umem.launch import this_rank
from umem.memory import mode_of_environment

_OPTIONS = (
    "dry", "answers", "dry_steps", "json_file", "writes", "programs", "all_gpus",
    "technique",
)  # fmt: skip
_NOT_ELSEWHERE = (
    "dry",
    "json_file",
    "all_gpus",
    "technique",
    "vram",
    "record",
    "force",
    "traceback",
)
"""Options that a run on another GPU goes without."""
_REFUSED = ("virtual", "software", "checked", "no_model", "kernel_seconds", "resume")


def with_dry(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of dry runs to a command."""
    for option in (
        click.option(
            "--programs",
            type=Names(["stop", "run"]),
            metavar="HOW",
            help="With --dry, --budget: other programs that SCRIPT starts: stop (default) or run.",
        ),
        click.option(
            "--writes",
            type=Names(["scratch", "real"]),
            metavar="WHERE",
            help="With --dry, --budget: where SCRIPT writes files: scratch, a temporary folder "
            "(default), or real.",
        ),
        click.option(
            "--json",
            "json_file",
            metavar="FILE",
            help="With --dry: write the result to FILE as JSON; - prints it.",
        ),
        click.option(
            "--dry-steps",
            metavar="N",
            help="With --dry: run N steps, or all (default: until two steps agree).",
        ),
        click.option(
            "--answer",
            "answers",
            multiple=True,
            metavar="FILE:LINE=VALUE",
            help="With --dry, --budget: the value that a line of SCRIPT reads from the GPU. May be "
            "repeated.",
        ),
        click.option(
            "--all-gpus", is_flag=True, help="With --dry: list all GPUs that SCRIPT fits."
        ),
        # What `umem.choose` tells the process in which a technique is tried.
        click.option("--technique", metavar="FILE", hidden=True),
        click.option(
            "--dry",
            metavar="GPU",
            help="Run SCRIPT without its arithmetic, and predict whether it fits this GPU and how "
            "long a step takes.",
        ),
    ):
        command = option(command)
    return command


class DryOptions:
    """The dry run that a command asks for, if it does.

    Args:
        options: the command's; those of dry runs are taken out, and ``software`` is the GPU.
        has_ranks: the script runs as ranks of MPI, which all end after the same step.

    Raises:
        click.UsageError: an option does not go with ``--dry``, or needs it.
    """

    def __init__(self, options: dict[str, Any], *, has_ranks: bool) -> None:
        taken = {name: options.pop(name) for name in _OPTIONS}
        self.gpu: str | None = taken["dry"]
        self.run: DryRun | None = None
        options["dry"] = self.is_on
        if not self.is_on:
            names = {"answers": "answer", "json_file": "json"}
            for name, given in taken.items():
                if given:
                    option = names.get(name, name).replace("_", "-")
                    raise click.UsageError(f"--{option} needs --dry GPU")
            return
        for name in _REFUSED:
            if options[name]:
                raise click.UsageError(
                    f"--dry cannot be used with --{name.replace('_', '-')}. Leave out one of them"
                )
        options["software"] = self.gpu
        self._answers = dict(map(_answer, taken["answers"]))
        rank = this_rank()
        self._steps: str | None = taken["dry_steps"]
        if rank is not None and self._steps is None:
            self._steps = str(LEAST_STEPS)
        json_file = taken["json_file"]
        self._json = json_file
        if json_file not in (None, "-"):
            self._json = Path(json_file).absolute()  # the script may change folders
            if not self._json.parent.is_dir():
                folder = short(Path(json_file).parent)
                raise click.ClickException(f"cannot write {short(json_file)}: no folder {folder}")
            if rank is not None:
                self._json = rank_path(self._json, rank.number)
        self._disk = {
            name: taken[name] for name in ("writes", "programs") if taken[name] is not None
        }
        self._trial = None if taken["technique"] is None else Trial(taken["technique"])
        self._elsewhere: Elsewhere | None = None
        if taken["all_gpus"]:
            if has_ranks or rank is not None:
                raise click.UsageError("--all-gpus runs one process. Leave out -n")
            if options["mode"] or mode_of_environment() not in (None, "off"):
                raise click.UsageError(
                    "--all-gpus compares VRAM alone. Leave out --mode and UMEM_MODE"
                )
            if options["recompute"] == "card":
                raise click.UsageError(
                    "--recompute card is a different budget on each GPU of --all-gpus. Give a size"
                )
            arguments = given_arguments(click.get_current_context(), _NOT_ELSEWHERE)
            self._elsewhere = Elsewhere(arguments)
        try:
            StepLimit.parse(self._steps)
        except SizeError as error:
            raise click.BadParameter(str(error), param_hint="--dry-steps") from error

    @property
    def is_on(self) -> bool:
        """Tell whether there is one."""
        return self.gpu is not None

    def begin(self, stack: ExitStack, gpu: Any, mode: str | None, least: int | None) -> None:
        """Follow the script until the stack unwinds.

        Args:
            stack: undoes it.
            gpu: the dry software GPU.
            mode: where allocations come from; None is as without umem.
            least: the step that a recording ends with; None without one.
        """
        if self._trial is not None:
            self._trial.begin(stack)
        limit = StepLimit.parse(self._steps, max(LEAST_STEPS, least or 0))
        notes = () if this_rank() is None else (_NO_LINKS,)
        self.run = DryRun(gpu, mode or "unmanaged", limit, self._answers, notes)
        self.run.begin(stack, stack.enter_context(scratch_disk(**self._disk)))

    def report(self, script: str) -> int:
        """Print the report and write the JSON; returns the exit status."""
        assert self.run is not None
        outcome = self.run.outcome
        assert outcome is not None
        say(report(outcome, script), err=True)
        found = plain(outcome)
        if self._elsewhere is not None:
            found["gpus"] = self._elsewhere.which_fit(found)
            say("\n".join(lines(found["gpus"])), err=True)
        if self._json is not None:
            found |= {} if self._trial is None else plain(self._trial.facts())
            text = json.dumps(found, indent=1)
            if isinstance(self._json, Path):
                try:
                    self._json.write_text(text + "\n", encoding="utf-8")
                except OSError as error:
                    why = f"cannot write {short(self._json)}: {reason(error)}"
                    raise click.ClickException(why) from error
            else:
                say(text)
        return outcome.exit_status

    def leave_threads(self, code: int) -> None:
        """End the process if threads of a script that was ended in the middle go on without it."""
        assert self.run is not None
        if self.run.ended == "script":
            return  # they have ended
        here = threading.current_thread()
        threads = [one for one in threading.enumerate() if one is not here and not one.daemon]
        until = time.monotonic() + _PATIENCE_SECONDS
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


_NO_LINKS = "the time leaves out the communication between ranks"
_PATIENCE_SECONDS = 5.0
"""Threads of a script that was ended have so long: loaders look for an end every second or so. A
choice that no measurement supports."""


def _answer(text: str) -> tuple[str, float]:
    """Read ``FILE:LINE=VALUE``; a whole number stays one."""
    line, _, value = text.rpartition("=")
    file, _, number = line.rpartition(":")
    if not (file and number.isdecimal()):
        raise click.BadParameter(
            f"write FILE:LINE=VALUE, such as train.py:41=1000; got {text!r}", param_hint="--answer"
        )
    for kind in (int, float):
        try:
            return line.removeprefix("./"), kind(value)
        except ValueError:
            pass
    raise click.BadParameter(f"{value!r} in {text!r} is not a number", param_hint="--answer")
