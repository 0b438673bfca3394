"""``umem demo``: a graph network that does not fit trains anyway."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from umem._common.as_json import json_text, named
from umem._common.files import check_folder, check_target, reason, whole
from umem._common.nearest import did_you_mean
from umem._common.printable import short
from umem.errors import MissingDependencyError
from umem.predict import ModeRow
from umem.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from umem._common.specs import GpuSpec
    from umem.chainer import Workload
    from umem.devices.software import SoftwareGPU
    from umem.trace import Trace

PICTURE, TEXT = "demo.png", "demo.json"
_OPTIONS = {
    "virtual or software": {"vram": "--vram", "nodes": "--nodes"},
    "cuda": {"size": "--bytes", "factor": "--factor"},
}


@dataclass(frozen=True)
class _Result:
    rows: list[ModeRow]
    device: str
    simulated: bool
    vram_bytes: int
    needed_bytes: int
    trace: Trace | None
    plain_seconds: float | None = None
    """Seconds of a step if all of it fits into VRAM."""
    kind: str = "cuda"

    @property
    def factor(self) -> float:
        return self.needed_bytes / self.vram_bytes

    def to_json(self) -> dict[str, Any]:
        return named(self, ("simulated", "device", "vram_bytes", "factor", "rows"))


@click.command("demo")
@click.option(
    "--device",
    default="virtual:v100-16gb",
    show_default=True,
    metavar="DEVICE",
    help="The GPU: virtual:NAME, software:NAME (CuPy without a GPU), or cuda (a real GPU).",
)
@click.option(
    "--vram", default="96MiB", show_default=True, metavar="SIZE", help="VRAM of the simulated GPU."
)
@click.option(
    "--nodes",
    type=click.IntRange(1000, 5_000_000),
    default=64_000,
    show_default=True,
    help="Nodes of the generated graph. For a simulated GPU.",
    metavar="N",
)
@click.option(
    "--steps",
    type=click.IntRange(1, 1000),
    default=10,
    show_default=True,
    metavar="N",
    help="Training steps to run.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("out"),
    show_default=True,
    metavar="FOLDER",
    help="Folder for demo.png and demo.json. Overwrites both.",
)
@click.option(
    "--bytes",
    "size",
    default="2GiB",
    show_default=True,
    metavar="SIZE",
    help="Memory that a step needs. For cuda.",
)
@click.option(
    "--factor",
    type=click.FloatRange(0, 20, min_open=True),
    default=None,
    metavar="X",
    help="Make the step need X times the VRAM. For cuda. More than 1 oversubscribes.",
)
def command(
    device: str, vram: str, nodes: int, steps: int, out: Path, size: str, factor: float | None
) -> None:
    """Train a graph network that does not fit, on a simulated GPU.

    The arithmetic is real. It runs on NumPy, or on CuPy with a software GPU. Memory and time come
    from a model of the GPU, and the output marks them as simulated. --device cuda uses a real GPU.

    \b
    Examples:

    \b
        # Train on a virtual V100 with 48 MiB of VRAM
        umem demo --vram 48MiB
        # Train with the real CuPy on a software T4
        umem demo --device software:t4
    """
    console = Console(highlight=False, markup=False, soft_wrap=False)
    try:
        gpu = _choose(device, vram)
        with _folder(out):
            if isinstance(gpu, str):
                result = _on_cuda(console, size, factor, steps)
            else:
                result = _on_model(console, *gpu, parse_bytes(vram, "--vram"), nodes, steps)
            _report(console, result, out)
    except KeyboardInterrupt:
        console.print("Interrupted. Nothing was written.")
        raise SystemExit(130) from None


def _choose(device: str, vram: str) -> tuple[GpuSpec, SoftwareGPU | None] | Literal["cuda"]:
    """Open the device of ``--device``, before any other work."""
    _refuse_options_of_others("virtual or software" if device == "cuda" else "cuda")
    if device == "cuda":
        return "cuda"
    kind, _, name = device.partition(":")
    if kind not in ("virtual", "software"):
        raise click.BadParameter(
            f"{device!r} is not virtual:NAME, software:NAME or cuda."
            f"{did_you_mean(kind, ('virtual', 'software', 'cuda'))}",
            param_hint="--device",
        )
    from umem._common.specs import gpu_spec
    from umem.memory import virtual_gpu

    spec = gpu_spec(name)
    virtual_gpu(spec, parse_bytes(vram, "--vram"))  # refuses what is less than a block
    if kind == "virtual":
        return spec, None
    from umem.devices.software import software_gpu

    return spec, software_gpu(spec, vram)


def _refuse_options_of_others(kind: str) -> None:
    context = click.get_current_context()
    for name, option in _OPTIONS[kind].items():
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"{option} needs --device {kind}")


@contextmanager
def _folder(out: Path) -> Iterator[None]:
    """Make the output folder in a block; new folders are removed if nothing was written."""
    made: list[Path] = []
    try:
        made += [path for path in (out, *out.parents) if not path.exists()]
        out.mkdir(parents=True, exist_ok=True)
        check_folder(out)
        for name in (PICTURE, TEXT):
            check_target(out / name, force=True)
    except OSError as error:
        _remove_empty(made)
        raise click.ClickException(
            f"cannot write to {short(out)}: {reason(error)}. Name another folder with --out"
        ) from error
    try:
        yield
    finally:
        _remove_empty(made)


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # it holds something, or was never made
            folder.rmdir()


def _on_model(
    console: Console,
    spec: GpuSpec,
    software: SoftwareGPU | None,
    vram_bytes: int,
    nodes: int,
    steps: int,
) -> _Result:
    """Run the demo on a simulated GPU."""
    kind, by = ("virtual", "") if software is None else ("software", ", by CuPy on this processor")
    console.print(
        f"Training a graph network of {nodes:,} nodes on a {kind} {spec.title} with "
        f"{format_bytes(vram_bytes)} of VRAM. The arithmetic is real{by}; memory and time are "
        "simulated."
    )
    with _progress(console, steps) as show:
        show("loading Chainer", 0)
        from umem.chainer import Workload, run_software, run_virtual

        show("making the graph", 0)
        workload = Workload.generate(nodes, steps)
        if software is None:
            rows, trace = run_virtual(workload, spec.name, vram_bytes, show)
        else:
            rows, trace = run_software(workload, software, vram_bytes, show)
    plain = _with_all_its_vram(trace, spec.name)
    needed = trace.peak_bytes
    return _Result(rows, spec.name, True, vram_bytes, needed, trace, plain, kind=kind)


def _with_all_its_vram(trace: Trace, gpu: str) -> float | None:
    """Return simulated seconds of a step with the table's VRAM; None if it does not fit."""
    from statistics import mean

    from umem.predict import replay

    whole = replay(trace, gpu, "unmanaged")
    return mean(whole.step_seconds) if whole.fits and whole.step_seconds else None


def _on_cuda(console: Console, size: str, factor: float | None, steps: int) -> _Result:
    """Run the demo on a real GPU."""
    from umem.devices import device_kind

    if factor is not None and math.isnan(factor):
        raise click.BadParameter("nan is not a number", param_hint="--factor")
    gpu: Any = device_kind("cuda").open()
    needed = parse_bytes(size, "--bytes")
    if factor is not None:
        needed = round(factor * gpu.vram_bytes)
    _refuse_too_much(gpu, needed, factor)
    console.print(
        f"Training a graph network that needs about {format_bytes(needed)} on {gpu.name} with "
        f"{format_bytes(gpu.vram_bytes)} of VRAM."
    )
    with _progress(console, steps) as show:
        show("loading Chainer", 0)
        from umem.chainer import BYTES_PER_NODE, Workload, run_cuda

        show("making the graph", 0)
        workload: Workload = Workload.generate(max(1000, needed // BYTES_PER_NODE), steps)
        rows = run_cuda(workload, show)
    peak = max((row.peak_bytes or 0 for row in rows), default=0)
    return _Result(rows, gpu.name, False, gpu.vram_bytes, peak, None)


def _refuse_too_much(gpu: Any, needed: int, factor: float | None) -> None:
    """Refuse more bytes than the host has, which could hang the card or get programs killed."""
    if factor is None and needed > gpu.free_bytes:
        raise click.ClickException(
            f"--bytes {format_bytes(needed)} is more than the {format_bytes(gpu.free_bytes)} of "
            "free VRAM. To oversubscribe, give --factor above 1"
        )
    room = gpu.free_bytes + round(0.8 * (gpu.host_available_bytes() or 0))
    if needed > room:
        raise click.ClickException(
            f"a step of {format_bytes(needed)} exceeds {format_bytes(room)}: free VRAM and 80% of "
            "the available host memory. Use a smaller --factor or --bytes"
        )


@contextmanager
def _progress(console: Console, steps: int) -> Iterator[Any]:
    """Show a progress bar in the block; yields the function that advances it."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:<22}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} steps"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=steps)
        label = ""

        def show(what: str, done: int) -> None:
            nonlocal label
            progress.update(task, description=what, completed=done)
            if not console.is_terminal and what != label:
                console.print(f"  {what} ...")
            label = what

        yield show


def _report(console: Console, result: _Result, out: Path) -> None:
    """Print the results, and write the files."""
    from umem.reports import mode_table

    simulated = "simulated " if result.simulated else ""
    vram = format_bytes(result.vram_bytes)
    title = (
        f"{simulated}{result.device}, {vram} of VRAM: the step needs {result.factor:.2f} times that"
    )
    console.print(mode_table(result.rows, title, simulated=result.simulated), "")
    if result.simulated:
        console.print("Moved, faults and time are the mean of all steps.\n")
    for row in result.rows:
        if not row.fits:
            console.print(f"{row.title}: {row.reason}\n")
        elif row.remote_bytes:
            read = format_bytes(row.remote_bytes)
            console.print(
                f"{row.title}: nothing moved. Each step read and wrote {read} on the host, over "
                f"the "
                f"bus ({simulated.strip()}).\n"
            )
    _print_costs(console, result)
    written = _write(console, result, title, out)
    console.print(f"Wrote {' and '.join(map(short, written))}.", soft_wrap=True)
    _print_next_commands(console, result.kind, result.device)


def _write(console: Console, result: _Result, title: str, out: Path) -> list[Path]:
    """Write the files, once all are complete."""
    picture = _picture(console, result, title)
    text = f"{json_text(result)}\n".encode()
    files = {} if picture is None else {out / PICTURE: picture}
    files[out / TEXT] = text
    try:
        with ExitStack() as stack:
            for path, content in files.items():
                stack.enter_context(whole(path, force=True)).write(content)
    except OSError as error:
        raise click.ClickException(f"cannot write to {short(out)}: {reason(error)}") from error
    return list(files)


def _picture(console: Console, result: _Result, title: str) -> bytes | None:
    """Return the picture as PNG; None without anything to draw, or without matplotlib."""
    from umem.reports import draw_modes

    if not any(row.timeline for row in result.rows):
        return None
    file = BytesIO()
    try:
        draw_modes(result.rows, result.vram_bytes, title, file, result.plain_seconds)
    except MissingDependencyError as error:
        console.print(f"No picture: {error}.")
        return None
    return file.getvalue()


def _print_costs(console: Console, result: _Result) -> None:
    """Print how much longer a step takes than with enough VRAM."""
    alone = result.plain_seconds
    fitting = [row.seconds for row in result.rows if row.fits and row.seconds is not None]
    if not fitting or alone is None:
        return
    console.print(
        f"With all of its VRAM the same GPU needs {format_seconds(alone)} a step. Within "
        f"{format_bytes(result.vram_bytes)} a step takes at least {min(fitting) / alone:.0f} times "
        "as long (simulated).\n"
    )


def _print_next_commands(console: Console, kind: str, gpu: str) -> None:
    """Print commands to try next."""
    device = "" if kind == "virtual" else f" --device {kind}:{gpu}"
    console.print("Next:")
    if kind != "cuda":
        from umem.devices import device_kind

        console.print(f"{f'  umem demo{device} --vram 48MiB':<37} use less VRAM: more moves")
        other = "v100-16gb" if gpu == "t4" else "t4"
        console.print(f"{f'  umem demo --device {kind}:{other}':<37} use another GPU")
        if kind == "virtual" and device_kind("cuda").why_not() is None:
            console.print("  umem demo --device cuda             use the GPU of this machine")
    console.print("  umem doctor                         test this machine")
