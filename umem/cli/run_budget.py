"""``umem run --budget SIZE``: what keeps a script to that much VRAM, chosen dry, and turned on."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

import click

from umem._common.specs import spec_of_driver
from umem.choosing import DryProgram, Technique, within
from umem.cli.choose_script import tried
from umem.cli.files_and_sizes import say, spec_with_vram
from umem.cli.run_script import Program
from umem.cli.script_options import OF_DRY_RUNS, dry_options
from umem.errors import BudgetError, DeviceNotFoundError, UnknownGpuError
from umem.units import format_bytes, format_seconds, parse_bytes

_REFUSED = (
    "dry",
    "mode",
    "limit",
    "prefetch",
    "virtual",
    "recompute",
    "workspace",
    "devices",
    "no_model",
)


class BudgetOption:
    """A technique that keeps a script to a budget of VRAM, if a command asks for one.

    Args:
        options: the command's; ``budget`` and ``gpu`` are taken out.

    Raises:
        click.UsageError: an option does not go with ``--budget``, or needs it.
        SizeError: the budget is no size.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._budget: str | None = options.pop("budget")
        self._gpu: str | None = options.pop("gpu")
        self._software: str | None = options["software"]
        self._technique: Technique | None = None
        self._meter: Any = None
        if self._budget is None:
            if self._gpu is not None:
                raise click.UsageError("--gpu needs --budget SIZE")
            return
        self._budget_bytes = parse_bytes(self._budget, "--budget")
        for name in _REFUSED:
            if options[name]:
                raise click.UsageError(
                    f"--budget cannot be used with --{name.replace('_', '-')}. Leave out one of "
                    f"them"
                )
        self._options = dry_options({name: options[name] for name in OF_DRY_RUNS})
        options |= {"answers": (), "writes": None, "programs": None}  # of the dry part alone

    def choose(self, program: Program, *, is_module: bool) -> None:
        """Choose the technique, by dry runs in other processes; does nothing without a budget.

        Raises:
            BudgetError: nothing keeps the script to the budget.
            DryRunError: see `umem.choose`.
        """
        if self._budget is None:
            return
        script = program.argv[1] if is_module else program.argv[0]
        gpu = self._software or self._gpu or _gpu_here()
        target = DryProgram(script, program.arguments, gpu, self._budget, is_module, self._options)
        spec_with_vram(gpu, self._budget)
        techniques = within(self._budget)
        choice = tried(target, techniques)
        best = choice.best
        if best is None:
            raise BudgetError(
                f"{choice.summary} (simulated). umem choose --gpu {gpu} --vram {self._budget} also "
                "tries managed memory"
            )
        self._technique = next(row for row in techniques if row.name == best.name)
        say(
            f"umem: --budget {self._budget}: uses {best.name}, {format_seconds(best.seconds)} a "
            f"step, "
            f"{format_bytes(best.reserved_peak_bytes)} reserved by CuPy's pool (simulated "
            f"{choice.title})",
            err=True,
        )

    def begin(self, stack: ExitStack) -> None:
        """Turn the technique on until the stack unwinds, which prints the measured peak."""
        if self._technique is None:
            return
        from umem.devices.cuda import PoolMeter

        self._technique.turn_on(stack)
        meter = stack.enter_context(PoolMeter())
        stack.callback(self._report, meter, os.getpid())

    def _report(self, meter: Any, process: int) -> None:
        if os.getpid() != process:  # a child by fork that came to the end of the script
            return
        peak = meter.held().peak
        over = peak - self._budget_bytes
        held = f"{format_bytes(over)} above the budget" if over > 0 else "within the budget"
        say(f"umem: --budget {self._budget}: the peak was {format_bytes(peak)}, {held}", err=True)


def _gpu_here() -> str:
    """Return the name in the table of the GPU that is there.

    Raises:
        DeviceNotFoundError: there is none. UnknownGpuError: it is not in the table.
    """
    from umem.devices.cuda import cuda_reason, open_cuda

    reason = cuda_reason()
    if reason is not None:
        raise DeviceNotFoundError(
            f"--budget needs a GPU, and there is none: {reason}. Add --software t4 to run the "
            f"script "
            "on a simulated GPU"
        )
    name = str(open_cuda().name)
    spec = spec_of_driver(name)
    if spec is None:
        raise UnknownGpuError(
            f"umem does not know the GPU {name}. Name a similar one with --gpu NAME"
        )
    return spec.name
