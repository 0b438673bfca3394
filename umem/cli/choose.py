"""``umem choose MODEL.onnx``: what makes a model fit a GPU, and what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from umem.cli.choose_onnx import choose_onnx, is_onnx, model_options
from umem.cli.files_and_sizes import gpu_asked_for

NOTHING_FITS = 3
"""Exit status if nothing makes the step fit; 1 and 2 are errors."""


@click.command("choose")
@click.argument("path", metavar="MODEL.onnx", type=click.Path(path_type=Path))
@model_options
@click.option("--gpu", default="t4", show_default=True, metavar="NAME", help="A GPU of the table.")
@click.option("--vram", metavar="SIZE", help="Usable VRAM instead of the table's, as 12GiB.")
@click.option("--json", "as_json", is_flag=True, help="JSON on standard output.")
def command(path: Path, gpu: str, vram: str | None, as_json: bool, **options: Any) -> None:
    """Find what makes a step of a model in ONNX fit a GPU, and how long it then takes.

    Nothing is run: memory and times are those of the model of a GPU, and simulated.
    The exit status is 3 where nothing makes the step fit.
    """
    if not is_onnx(path):
        raise click.UsageError("umem choose takes a model in ONNX: MODEL.onnx")
    if not choose_onnx(path, gpu_asked_for(gpu, vram), as_json=as_json, **options):
        click.get_current_context().exit(NOTHING_FITS)
