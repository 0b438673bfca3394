"""``umem doctor``: what umem finds on this machine, and whether it works."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import click

import umem
from umem._common import extras
from umem._common.as_json import json_text
from umem._common.printable import short
from umem.cli.files_and_sizes import say
from umem.devices import Check, current_device, device_kind, parse_device, run_selftest
from umem.errors import DeviceError, DeviceNotFoundError, UmemError
from umem.launch import describe_mpi
from umem.memory import (
    MEMORY_VARIABLES,
    DeviceBlock,
    columns,
    limit_of_environment,
    mode_of_environment,
    prefetch_of_environment,
)

_WORDS = {True: "ok", False: "FAILED", None: "skipped"}
_WIDTH = 28
_WAYS_OUT = f"""
What to do:
  an NVIDIA GPU        install CuPy for CUDA 12 or 13 (extra cuda12 or cuda13)
    {extras.install("cuda12")}
    {extras.install("cuda13")}
  without one          umem doctor --device virtual:v100-16gb
                       with umem.virtual_gpu("v100-16gb"): ... (simulated)
  a CuPy script        umem run --software t4 SCRIPT (simulated)"""


@dataclass(frozen=True)
class _Report:
    status: umem.Status
    checks: tuple[Check, ...]
    reason: str | None
    mpi: str

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        status = self.status.to_json()
        return {
            "ok": self.reason is None,
            "reason": self.reason,
            "platform": platform.platform(),
            "versions": status.pop("versions"),
            "mpi": self.mpi,
            "features": status.pop("features"),
            "environment": _variables(),
            "status": status,
            "checks": self.checks,
        }


@click.command("doctor")
@click.option(
    "--device",
    metavar="DEVICE",
    help="The GPU: virtual:NAME, or cuda for a real GPU (default: cuda).",
)
@click.option("--vram", metavar="SIZE", help="VRAM of the virtual GPU (default: the real card's).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(device: str | None, vram: str | None, as_json: bool) -> None:
    """Show what works on this machine, and test it.

    The test allocates at most 16 MiB in each memory mode, prefetches, advises and frees it. The
    exit status is 1 if a test fails.

    \b
    Examples:

    \b
        # Test the GPU of this machine
        umem doctor
        # Test a virtual GPU, on a machine without one
        umem doctor --device virtual:v100-16gb
    """
    block = _block(device, vram)
    with ExitStack() as stack:
        stack.enter_context(block())
        report = _examine()
    if as_json:
        say(json_text(report))
    else:
        _print(report)
    raise SystemExit(0 if report.reason is None else 1)


def _block(device: str | None, vram: str | None) -> Callable[[], AbstractContextManager[Any]]:
    """Return a factory of the block that makes the device current; a null context for the real
    one.
    """
    try:
        kind, gpu = parse_device(device or "cuda")
    except DeviceError as error:
        raise click.BadParameter(str(error), param_hint="--device") from error
    if gpu is not None:
        return partial(DeviceBlock, kind.name, gpu, vram)
    if vram:
        raise click.UsageError("--vram needs --device virtual:NAME")
    return nullcontext


def _examine() -> _Report:
    """Collect status and checks; a failure becomes a failed check."""
    checks = [_environment_check()]
    status = umem.status()
    try:
        checks += run_selftest(current_device())
    except DeviceNotFoundError as error:
        why_not = device_kind("cuda").why_not() or error
        checks.append(Check("device", False, f"no CUDA device: {why_not}"))
    except Exception as error:
        checks.append(Check("device", False, f"{type(error).__name__}: {error}"))
    failed = next((check for check in checks if check.ok is False), None)
    reason = None if failed is None else f"{failed.name}: {failed.detail}"
    return _Report(status, tuple(checks), reason, describe_mpi())


def _variables() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in MEMORY_VARIABLES}


def _environment_check() -> Check:
    try:
        mode_of_environment(), limit_of_environment(), prefetch_of_environment()
    except UmemError as error:
        return Check("environment", False, str(error))
    found = [f"{name}={short(value)}" for name, value in _variables().items() if value is not None]
    return Check("environment", True, ", ".join(found) or f"no {', '.join(MEMORY_VARIABLES)}")


def _print(report: _Report) -> None:
    """Print the report."""
    say(f"{'umem':<14}{umem.__version__} on {platform.system()} {platform.machine()}")
    versions = {name: text for name, text in report.status.versions.items() if name != "umem"}
    say(columns((name, text or "not installed") for name, text in versions.items()))
    say(columns([("MPI", report.mpi)]))
    if report.status.device is not None:
        say(f"\n{report.status}")
    say("\nTests")
    for check in report.checks:
        say(columns([(check.name, f"{_WORDS[check.ok]}: {check.detail}")], _WIDTH))
    simulated = " (simulated)" if report.status.simulated else ""
    if report.reason is None:
        say(f"\nEverything works on {report.status.device}{simulated}.")
    elif report.status.device is None:
        say(_WAYS_OUT)
    else:
        say(f"\nA test failed on {report.status.device}{simulated}. See above.")
