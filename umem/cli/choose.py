"""``umem choose SCRIPT``: what makes a program, or a model in ONNX, fit a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from umem.cli.choose_onnx import choose_onnx, is_onnx, model_options
from umem.cli.choose_script import choose_script
from umem.cli.files_and_sizes import spec_with_vram
from umem.cli.script_options import NOTHING_FITS, of_a_script

_OF_MODELS = ("sizes", "optimizer", "inference")


class _ModelFirst(click.Command):
    """A command whose options may follow a model, to which no arguments of its own belong."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and is_onnx(Path(args[0])):
            args = [*args[1:], args[0]]
        return super().parse_args(ctx, args)


@click.command("choose", cls=_ModelFirst, context_settings={"allow_interspersed_args": False})
@model_options
@of_a_script
def command(program: Any, as_json: bool, **options: Any) -> None:
    """Find what makes SCRIPT fit a GPU, and how long a step then takes.

    SCRIPT runs unchanged and without its arithmetic, on the software GPU, under each technique in
    processes of their own. What follows it is its own. It writes nothing: see umem run --dry.

    SCRIPT may be a model in ONNX, MODEL.onnx, with its own options before or behind it.

    All memory and times are simulated. The exit status is 3 where nothing makes it fit.
    """
    path = Path(program.script)
    if is_onnx(path):
        if program.arguments:
            raise click.UsageError(f"MODEL.onnx takes no arguments: {program.arguments[0]}")
        gpu = spec_with_vram(program.gpu, program.vram)
        fits = choose_onnx(path, gpu, as_json=as_json, **options)
    else:
        for name in _OF_MODELS:
            if options.get(name):
                raise click.UsageError(f"--{name.rstrip('s')} is for MODEL.onnx")
        fits = choose_script(program, as_json=as_json)
    if not fits:
        click.get_current_context().exit(NOTHING_FITS)
