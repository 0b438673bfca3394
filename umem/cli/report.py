"""``umem report TRACE``: where the memory of a recorded step went."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from io import TextIOWrapper
from pathlib import Path
from typing import IO

import click
from rich.console import Console

from umem import __version__
from umem.as_json import json_text
from umem.cli.in_and_out import Caps, caps, refuse, refuse_picture, say, write
from umem.devices.specs import GPUS, gpu_spec
from umem.errors import UmemError
from umem.printable import command_line, shown
from umem.trace.analysis.analysis import Analysis, Vram, analyse
from umem.trace.trace import Trace
from umem.units import parse_bytes


@dataclass(frozen=True)
class _Outputs:
    """The files that were asked for."""

    png: Path | None
    html: Path | None
    perfetto: Path | None
    force: bool

    @property
    def paths(self) -> list[Path]:
        found = (self.png, self.html, self.perfetto)
        return [path for path in found if path is not None]


@click.command("report")
@click.argument(
    "traces", metavar="TRACE [OTHER]", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option("--json", "as_json", is_flag=True, help="JSON on standard output.")
@click.option(
    "--html",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="One page to explore in a browser; needs no network.",
)
@click.option("--png", type=click.Path(path_type=Path), metavar="FILE", help="A picture.")
@click.option(
    "--export",
    nargs=2,
    type=(click.Choice(["perfetto"]), click.Path(path_type=Path)),
    metavar="perfetto FILE",
    help="For ui.perfetto.dev and chrome://tracing.",
)
@click.option("--gpu", metavar="NAME", help="Compare with the VRAM of this GPU, such as t4.")
@click.option("--vram", metavar="SIZE", help="Compare with so much VRAM, such as 24GiB.")
@click.option("--force", is_flag=True, help="Overwrite files that exist.")
@caps
def command(
    traces: tuple[Path, ...],
    as_json: bool,
    html: Path | None,
    png: Path | None,
    export: tuple[str, Path] | None,
    gpu: str | None,
    vram: str | None,
    force: bool,
    max_events: int,
    max_bytes: int,
) -> None:
    """Show where the memory of a recorded step went, and the time.

    TRACE is what umem.record(), saved, or `umem run --record` has written. With a second one,
    what differs. Without --html, --png or --export the report goes to the terminal.
    """
    if isinstance(sys.stdout, TextIOWrapper):  # names may have letters that it cannot write
        sys.stdout.reconfigure(errors="backslashreplace")
    outputs = _Outputs(png, html, export[1] if export else None, force)
    if len(traces) > 2:
        raise click.UsageError(f"one trace, or two to compare; got {len(traces)}")
    if len(traces) == 2 and outputs.paths:
        raise click.UsageError(
            "--html, --png and --export are of one trace; two are compared as text, or with --json"
        )
    refuse(outputs.paths, traces, force=force)
    refuse_picture(png)
    try:
        room = _vram(gpu, vram)
        analyses = [_analyse(path, Caps(max_events, max_bytes)) for path in traces]
        if len(analyses) == 2:
            _compare(analyses, traces, room, as_json)
        else:
            _report(analyses[0], traces[0], outputs, room, as_json)
    except UmemError as error:
        raise click.ClickException(str(error)) from error


def _vram(gpu: str | None, vram: str | None) -> Vram | None:
    """What to compare with: a size that is given goes before the table's."""
    nbytes = None if vram is None else parse_bytes(vram, "--vram")
    if gpu is None:
        return None if nbytes is None else Vram("a GPU", nbytes)
    spec = gpu_spec(gpu)
    return Vram(spec.name, nbytes or spec.usable_bytes)


def _analyse(path: Path, caps: Caps) -> Analysis:
    with _no_collection():
        return analyse(Trace.load(path, **caps._asdict()))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Events are tuples by the hundred thousand, none of them in a cycle: to walk through them
    again and again costs as much as reading them."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def _report(
    analysis: Analysis, path: Path, outputs: _Outputs, vram: Vram | None, as_json: bool
) -> None:
    if as_json:
        from umem.reports.step_json import step_json

        say(json_text(step_json(analysis, path.name, vram)))
    elif not outputs.paths:
        _print_text(analysis, path.name, vram)
    for output in _write(analysis, path, outputs, vram):
        say(output, err=as_json)


def _print_text(analysis: Analysis, name: str, vram: Vram | None) -> None:
    from umem.reports.text.step import step_text

    console = Console(highlight=False, markup=False)
    plain = not (console.encoding or "").lower().startswith("utf")
    for line in step_text(analysis, name, console.width, vram=vram, plain=plain):
        console.print(line, soft_wrap=True)


def _compare(
    analyses: list[Analysis], traces: tuple[Path, ...], vram: Vram | None, as_json: bool
) -> None:
    from umem.trace.analysis.differences import compare

    before, after = (path.name for path in traces)
    comparison = compare(*analyses)
    if as_json:
        from umem.reports.step_json import comparison_json

        say(json_text(comparison_json(comparison, before, after, vram)))
        return
    from umem.reports.text.comparison import comparison_text

    console = Console(highlight=False, markup=False)
    for line in comparison_text(comparison, before, after, console.width, vram):
        console.print(line, soft_wrap=True)


# -- files -------------------------------------------------------------------------------------


def _write(analysis: Analysis, path: Path, outputs: _Outputs, vram: Vram | None) -> Iterator[str]:
    """Write the files; yields what to say of each."""
    if outputs.html is not None:
        from umem.reports.page.step_page import step_page

        page = step_page(analysis, path.name, _provenance(analysis, path, outputs, vram), vram)
        write(outputs.html, _putting(page), force=outputs.force)
        yield f"Wrote {shown(outputs.html)}. Open it in a browser; it needs no network."
    if outputs.png is not None:
        from umem.reports.pictures.timeline import draw_timeline

        write(
            outputs.png,
            lambda file: draw_timeline(analysis, path.name, file, vram),
            force=outputs.force,
        )
        yield f"Wrote {shown(outputs.png)}."
    if outputs.perfetto is not None:
        from umem.reports.perfetto import perfetto

        text = json_text(perfetto(analysis, path.name), compact=True)
        write(outputs.perfetto, _putting(text), force=outputs.force)
        yield f"Wrote {shown(outputs.perfetto)}. Open it at ui.perfetto.dev or chrome://tracing."
    if outputs.paths:
        yield _next(path, outputs)


def _putting(text: str) -> Callable[[IO[bytes]], None]:
    def put(file: IO[bytes]) -> None:
        file.write(text.encode("ascii"))

    return put


def _next(path: Path, outputs: _Outputs) -> str:
    command = command_line("umem", "report", path)
    if outputs.html is None:
        page = path.with_name(f"{path.name.split('.')[0]}.html")
        return f"Next: {command} {command_line('--html', page)}"
    return f"Next: {command} OTHER compares it with another trace"


def _vram_options(vram: Vram) -> list[str]:
    """The options that say what a page compares with."""
    spec = GPUS.get(vram.gpu)
    size = [] if spec and spec.usable_bytes == vram.nbytes else ["--vram", str(vram.nbytes)]
    return size if spec is None else ["--gpu", vram.gpu, *size]


def _provenance(
    analysis: Analysis, path: Path, outputs: _Outputs, vram: Vram | None
) -> dict[str, str]:
    """Where a page comes from; what the trace says of itself comes last."""
    command = ["umem", "report", str(path), "--html", str(outputs.html)]
    command += [] if vram is None else _vram_options(vram)
    known = {
        "umem": __version__,
        "written": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z"),
        "command": command_line(*command),
        "recorded on": analysis.trace.backend,
    }
    return {**known, **{f"trace: {key}": value for key, value in analysis.trace.meta.items()}}
