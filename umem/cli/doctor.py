"""``umem doctor``: what umem finds on this machine."""

from __future__ import annotations

import platform
from importlib import metadata

import click

import umem

_PACKAGES = ("numpy", "chainer", "scipy", "cupy-cuda12x", "cupy-cuda13x", "cuda-core")


@click.command("doctor")
def command() -> None:
    """Show what is on, on which device, and why not more."""
    click.echo(f"{'umem':<14}{umem.__version__} on Python {platform.python_version()}")
    for name in _PACKAGES:
        try:
            click.echo(f"{name:<14}{metadata.version(name)}")
        except metadata.PackageNotFoundError:
            click.echo(f"{name:<14}not installed")
    click.echo(str(umem.status()))
