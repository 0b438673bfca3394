"""``umem choose SCRIPT``: what makes a program, or a model in ONNX, fit a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from umem.cli.choose_onnx import choose_onnx, is_onnx, model_options
from umem.cli.choose_script import choose_script
from umem.cli.files_and_sizes import gpu_asked_for
from umem.cli.script_options import of_a_script

NOTHING_FITS = 3
"""Exit status if nothing makes the step fit; 1 and 2 are errors."""
_OF_MODELS = ("sizes", "optimizer", "inference")


@click.command("choose", context_settings={"allow_interspersed_args": False})
@model_options
@of_a_script
def command(program: Any, as_json: bool, **options: Any) -> None:
    """Find what makes SCRIPT fit a GPU, and how long a step then takes.

    SCRIPT runs unchanged and without its arithmetic, on the software GPU, under each technique in
    processes of their own. What follows it is its own. It writes nothing: see umem run --dry.

    SCRIPT may be a model in ONNX, MODEL.onnx, with its own options before it.

    All memory and times are simulated. The exit status is 3 where nothing makes it fit.
    """
    path = Path(program.script)
    if is_onnx(path):
        if program.arguments:
            raise click.UsageError("options go before MODEL.onnx, and nothing after it")
        gpu = gpu_asked_for(program.gpu, program.vram)
        fits = choose_onnx(path, gpu, as_json=as_json, **options)
    else:
        for name in _OF_MODELS:
            if options.get(name):
                raise click.UsageError(f"--{name.rstrip('s')} is for MODEL.onnx")
        fits = choose_script(program, as_json=as_json)
    if not fits:
        click.get_current_context().exit(NOTHING_FITS)
