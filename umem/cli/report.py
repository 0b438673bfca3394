"""``umem report TRACE``: where the memory of a recorded step went."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console

from umem import __version__
from umem._common.as_json import json_text
from umem._common.printable import command_line, short
from umem._common.specs import GPUS, gpu_spec
from umem.cli.files_and_sizes import caps, print_lines, refuse, refuse_picture, say, write
from umem.cli.help_layout import Names
from umem.reports import (
    OUTPUTS,
    Output,
    ReportRequest,
    comparison_json,
    comparison_text,
    ranks_json,
    ranks_text,
    step_json,
    step_text,
)
from umem.trace import Trace
from umem.trace.analysis import Analysis, RankedTraces, Vram, analyse, rank_files, ranked
from umem.units import parse_bytes


class _Wanted(NamedTuple):
    """An output file that was requested."""

    output: Output
    path: Path


def _exports() -> dict[str, Output]:
    return {output.name: output for output in OUTPUTS if output.is_export}


class _Export(click.ParamType):  # type: ignore[type-arg]
    """The output kinds of ``--export``, those of other packages included."""

    name = "export"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        """Check that an output kind exists."""
        choices: click.ParamType[Any] = Names(list(_exports()))
        return str(choices.convert(value, param, ctx))


def _own_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that outputs have of their own."""
    for output in reversed([output for output in OUTPUTS if not output.is_export]):
        kind: Any = click.Path(path_type=Path)
        option = click.option(f"--{output.name}", type=kind, metavar="FILE", help=output.help)
        command = option(command)
    return command


@click.command("report")
@click.argument(
    "traces", metavar="TRACE [OTHER...]", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_own_options
@click.option(
    "--export",
    nargs=2,
    type=(_Export(), click.Path(path_type=Path)),
    metavar="NAME FILE",
    help=f"Write another format. {' '.join(f'{o.name}: {o.help}' for o in _exports().values())}",
)
@click.option(
    "--gpu", metavar="NAME", help="Compare the peak with the VRAM of this GPU, such as t4."
)
@click.option("--vram", metavar="SIZE", help="Compare the peak with this much VRAM, such as 24GiB.")
@click.option("--force", is_flag=True, help="Overwrite files that exist.")
@caps
def command(
    traces: tuple[Path, ...],
    as_json: bool,
    export: tuple[str, Path] | None,
    gpu: str | None,
    vram: str | None,
    force: bool,
    max_events: int,
    max_bytes: int,
    **files: Path | None,
) -> None:
    """Show where the memory and the time of a recorded step went.

    TRACE is a file of `umem run --record` or umem.record(). With two traces, the report shows
    their differences. With the traces of all ranks of a run, or their folder, it shows the ranks
    side by side. Without --html, --png or --export the report is printed.

    \b
    Examples:

    \b
        # Print the report, and compare the peak with a T4
        umem report out/run.umem.gz --gpu t4
        # Write a page to explore in a browser
        umem report out/run.umem.gz --html out/run.html
    """
    if isinstance(sys.stdout, TextIOWrapper):  # names may have letters that it cannot write
        sys.stdout.reconfigure(errors="backslashreplace")
    wanted = [_Wanted(each, path) for each in OUTPUTS if (path := files.get(each.name)) is not None]
    wanted += [_Wanted(_exports()[export[0]], export[1])] if export else []
    ranks = rank_files(traces)
    if len(traces) > 2 and ranks is None:
        raise click.UsageError(
            "Give one trace, two traces to compare, or the traces of all ranks of a run, named "
            f"run.rank0.umem.gz, run.rank1.umem.gz, and so on; got {len(traces)} traces"
        )
    if (len(traces) == 2 or ranks) and wanted:
        raise click.UsageError(
            "--html, --png and --export take one trace. Print two traces, or ranks, as text or "
            "--json"
        )
    refuse([path for _, path in wanted], traces, force=force)
    refuse_picture(files.get("png"))
    room = _vram(gpu, vram)
    analyses = [_analyse(path, max_events, max_bytes) for path in ranks or traces]
    if ranks is not None:
        _print_ranks(ranked(analyses, ranks), room, as_json)
    elif len(analyses) == 2:
        _compare(analyses, traces, room, as_json)
    else:
        _print(analyses[0], traces[0].name, room, as_json, is_quiet=bool(wanted))
        _write(analyses[0], traces[0], wanted, room, force, as_json)


def _vram(gpu: str | None, vram: str | None) -> Vram | None:
    """Return the VRAM to compare with: a given size, or else the table's."""
    nbytes = None if vram is None else parse_bytes(vram, "--vram")
    if gpu is None:
        return None if nbytes is None else Vram("a GPU", nbytes)
    spec = gpu_spec(gpu)
    return Vram(spec.name, nbytes or spec.usable_bytes)


def _analyse(path: Path, max_events: int, max_bytes: int) -> Analysis:
    with _no_collection():
        return analyse(Trace.load(path, max_events=max_events, max_bytes=max_bytes))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Turn garbage collection off in the block: events are tuples by the hundred thousand without
    cycles, and walking them again and again costs as much as reading them.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


# -- on standard output ------------------------------------------------------------------------


def _print(
    analysis: Analysis, name: str, vram: Vram | None, as_json: bool, *, is_quiet: bool
) -> None:
    if as_json:
        say(json_text(step_json(analysis, name, vram)))
    elif not is_quiet:
        plain = not (Console().encoding or "").lower().startswith("utf")
        print_lines(lambda width: step_text(analysis, name, width, vram=vram, plain=plain))


def _compare(
    analyses: list[Analysis], traces: tuple[Path, ...], vram: Vram | None, as_json: bool
) -> None:
    """Print the comparison of two traces."""
    from umem.trace.analysis import compare

    before, after = (path.name for path in traces)
    comparison = compare(*analyses)
    if as_json:
        say(json_text(comparison_json(comparison, before, after, vram)))
    else:
        print_lines(lambda width: comparison_text(comparison, before, after, width, vram))


def _print_ranks(found: RankedTraces, vram: Vram | None, as_json: bool) -> None:
    if as_json:
        say(json_text(ranks_json(found, vram)))
    else:
        print_lines(lambda width: ranks_text(found, width, vram))


# -- files -------------------------------------------------------------------------------------


def _write(
    analysis: Analysis,
    trace: Path,
    wanted: list[_Wanted],
    vram: Vram | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write the requested files, and report each."""
    for output, path in wanted:
        command = ["umem", "report", trace, *output.option(path), *_vram_options(vram)]
        request = ReportRequest(
            analysis, trace.name, vram, _provenance(analysis, command_line(*command))
        )
        write(path, partial(output.write, request), force=force)
        say(f"Wrote {short(path)}. {output.then}".rstrip(), err=as_json)
    if wanted:
        say(_next(trace, {output.name for output, _ in wanted}), err=as_json)


def _next(trace: Path, written: set[str]) -> str:
    command = command_line("umem", "report", trace)
    if "html" in written:
        return f"Next: {command} OTHER compares it with another trace"
    page = trace.with_name(f"{trace.name.split('.')[0]}.html")
    return f"Next: {command} {command_line('--html', page)}"


def _vram_options(vram: Vram | None) -> list[str]:
    """Return the options that select the VRAM to compare with."""
    if vram is None:
        return []
    spec = GPUS.get(vram.gpu)
    size = [] if spec and spec.usable_bytes == vram.nbytes else ["--vram", str(vram.nbytes)]
    return size if spec is None else ["--gpu", vram.gpu, *size]


def _provenance(analysis: Analysis, command: str) -> dict[str, str]:
    """Describe the source of a report, the trace's own words last."""
    known = {
        "umem": __version__,
        "written": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z"),
        "command": command,
        "recorded on": analysis.trace.backend,
    }
    return {**known, **{f"trace: {key}": value for key, value in analysis.trace.meta.items()}}
