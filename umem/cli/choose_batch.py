"""``umem choose TRACE --batch, --advise``: the batch that fits, and what half of each size saves.

Also what doubling each size costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

import umem
from umem.as_json import json_text
from umem.cli.in_and_out import say
from umem.devices.specs import GpuSpec
from umem.predict.batches.finding import batches_of
from umem.predict.batches.halved_sizes import HalvedSizes
from umem.printable import quoted
from umem.trace.axes import StepSize
from umem.trace.trace import Trace


class BatchOptions(NamedTuple):
    """What ``--batch`` may be told besides."""

    effective: int | None
    maximum: int | None
    margin: float

    @property
    def given(self) -> list[str]:
        """The options that were given, by name."""
        known = {"--effective": self.effective, "--maximum": self.maximum, "--margin": self.margin}
        return [name for name, value in known.items() if value is not None and value != 0.0]


def batch_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``--batch`` and what goes with it."""
    options = (
        click.option(
            "--batch", is_flag=True, help="The largest batch that fits, and the quickest."
        ),
        click.option(
            "--effective",
            type=int,
            metavar="N",
            help="With --batch: which micro-batch and recomputation give a batch of N.",
        ),
        click.option(
            "--maximum", type=int, metavar="N", help="With --batch: no batch above N is asked for."
        ),
        click.option(
            "--margin",
            type=float,
            default=0.0,
            metavar="SHARE",
            help="With --batch: the share of VRAM that is left free, as 0.05.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def check_batch_options(batch: bool, told: BatchOptions, others: dict[str, bool]) -> None:
    """Refuse what does not go with ``--batch``, and what goes only with it.

    Raises:
        click.UsageError: names the options.
    """
    if not batch and told.given:
        raise click.UsageError(f"{', '.join(told.given)}: only with --batch")
    wrong = [name for name, is_given in others.items() if is_given]
    if batch and wrong:
        raise click.UsageError(f"--batch finds batches of one GPU: leave {', '.join(wrong)} out")


def say_batches(
    trace: Trace, gpu: GpuSpec, size: StepSize | None, told: BatchOptions, *, as_json: bool
) -> None:
    """Say which batches fit.

    Raises:
        UmemError: see `batches_of`.
    """
    found = batches_of(trace, gpu, size=size, **told._asdict())
    if as_json:
        say(json_text(found))
        return
    say(str(found))
    for line in doublings(trace, gpu, found.size):
        say(line)


def doublings(trace: Trace, gpu: GpuSpec, size: StepSize | None) -> Iterator[str]:
    """Yield what doubling each size of a step costs, a line each; nothing for one size."""
    for doubled in umem.double_each(trace, gpu, size) if trace.sizes else ():
        yield f"  {doubled}"


class AdviseOptions(NamedTuple):
    """``--advise``, and what it may be told besides."""

    advise: bool
    halved: tuple[tuple[str, Path], ...]


class _HalfType(click.ParamType):  # type: ignore[type-arg]
    """The name of an axis and a file."""

    name = "half"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, Path]:
        axis, _, path = str(value).partition("=")
        if not axis.isidentifier() or not path:
            raise click.BadParameter(
                f"half of an axis is its name and a file, such as depth=half.umem.gz; "
                f"got {quoted(value)}",
                ctx,
                param,
            )
        return axis, Path(path)


def advise_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``--advise`` and what goes with it."""
    advise = click.option("--advise", is_flag=True, help="What half of each size would save.")
    halved = click.option(
        "--halved",
        type=_HalfType(),
        multiple=True,
        metavar="AXIS=FILE",
        help="With --advise: the trace of the step with half of an axis, as depth.",
    )
    return advise(halved(command))


def check_advise_options(told: AdviseOptions, others: dict[str, bool]) -> None:
    """Refuse what does not go with ``--advise``, and what goes only with it.

    Raises:
        click.UsageError: names the options.
    """
    if told.halved and not told.advise:
        raise click.UsageError("--halved: only with --advise")
    names = [axis for axis, _ in told.halved]
    if len(set(names)) < len(names):
        raise click.UsageError(f"--halved names an axis twice: {', '.join(names)}")
    wrong = [name for name, is_given in others.items() if is_given]
    if told.advise and wrong:
        raise click.UsageError(f"--advise is of one GPU and size: leave {', '.join(wrong)} out")


def say_halves(
    traces: Sequence[Trace],
    gpu: GpuSpec,
    size: StepSize | None,
    halved: dict[str, Trace],
    *,
    as_json: bool,
) -> bool:
    """Say what half of each size saves; return whether the step fits then, or as it is.

    Raises:
        UmemError: see `umem.halve_each`.
    """
    found: HalvedSizes = umem.halve_each(traces, gpu, size, halved=halved)
    say(json_text(found) if as_json else str(found))
    return found.helps
