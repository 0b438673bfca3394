"""A run with arithmetic under a technique, followed as a dry run is.

What `umem.choose` runs without arithmetic, in a process of its own, runs here with it: the same
technique is turned on by the same code, and the same figures are told, as JSON.
"""

from __future__ import annotations

import json
import pickle
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from threading import Event
from typing import Any

import click
import common

import umem
from umem._common.as_json import plain
from umem.choosing import DryProgram, DryResult, Technique, Trial
from umem.cli import DryRun, Program, run_program
from umem.compat import arm
from umem.dry import StepLimit, scratch_disk

STEPS = 6
"""Steps of a run. Recomputation has measured and planned after three; the last two count."""


def run_live(program: DryProgram, technique: Technique, stop: Event | None = None) -> DryResult:
    """Run a program with its arithmetic, in a process of its own; `umem.choose` runs it dry."""
    with tempfile.TemporaryDirectory() as folder:
        row_file = Path(folder) / "technique"
        row_file.write_bytes(pickle.dumps(technique))
        given = (program.gpu, str(row_file), str(program.vram), program.script, *program.arguments)
        path = ":".join(filter(None, sys.path))
        try:
            found = common.child(__file__, *given, PYTHONPATH=path)
        except click.ClickException as error:
            return DryResult((), 0, 0, 0, error.message.splitlines()[-1][:300], failed=True)
    result = DryResult.read(found)
    return replace(result, seconds=tuple(found["step_seconds_all"][-2:]) if result.seconds else ())


def run(gpu: str, technique: str, vram: str, *command: str) -> dict[str, Any]:
    """Train some steps; return the JSON of a dry run, and what it tells the one that asks."""
    card = umem.software_gpu(gpu, vram=vram, force=True)
    arm()
    import_module("umem.chainer")  # by which the run follows Chainer's training
    script, *arguments = command
    program = Program.found(script, tuple(arguments), is_module=False)
    trial, run = Trial(technique), DryRun(card, "unmanaged", StepLimit(STEPS))
    with ExitStack() as stack:
        trial.begin(stack)
        run.begin(stack, stack.enter_context(scratch_disk(writes="real", programs="run")))
        run_program(program, None, None, False, run)
    assert run.outcome is not None
    return {**plain(run.outcome), **plain(trial.facts())}


if __name__ == "__main__":
    print(json.dumps(run(*sys.argv[1:])))
