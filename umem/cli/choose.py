"""``umem choose SCRIPT``: what makes a program, or a model in ONNX, fit a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from umem._common.printable import quoted
from umem.cli.choose_onnx import choose_onnx, is_onnx, model_options
from umem.cli.choose_script import choose_script
from umem.cli.files_and_sizes import spec_with_vram
from umem.cli.script_options import NOTHING_FITS, of_a_script

_OF_MODELS = ("sizes", "optimizer", "inference")


class _ModelFirst(click.Command):
    """A command whose options may follow a model, which takes no arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and is_onnx(Path(args[0])):
            args = [*args[1:], args[0]]
        return super().parse_args(ctx, args)


@click.command("choose", cls=_ModelFirst, context_settings={"allow_interspersed_args": False})
@model_options
@of_a_script
def command(program: Any, as_json: bool, **options: Any) -> None:
    """Find the techniques with which a program fits a GPU.

    SCRIPT runs unchanged on the software GPU, without its arithmetic, once with each technique. The
    fastest technique that fits comes first. SCRIPT writes its files to a scratch folder. SCRIPT
    may also be a model in ONNX. Memory and times are simulated. The exit status is 3 if nothing
    fits.

    \b
    Examples:

    \b
        # Which techniques make train.py fit 8 GiB of a T4?
        umem choose --gpu t4 --vram 8GiB train.py --batch 64
        # The same for a training step of a model in ONNX
        umem choose --gpu t4 model.onnx --size batch=32
    """
    path = Path(program.script)
    if is_onnx(path):
        if program.arguments:
            raise click.UsageError(
                f"A model in ONNX takes no arguments; got {quoted(program.arguments[0])}"
            )
        gpu = spec_with_vram(program.gpu, program.vram)
        fits = choose_onnx(path, gpu, as_json=as_json, **options)
    else:
        for name in _OF_MODELS:
            if options.get(name):
                raise click.UsageError(f"--{name.rstrip('s')} needs a model in ONNX, not a script")
        fits = choose_script(program, as_json=as_json)
    if not fits:
        click.get_current_context().exit(NOTHING_FITS)
