"""The ``umem`` command: one small file a subcommand, loaded when it is called."""

from __future__ import annotations

import importlib

import click

from umem import __version__

COMMANDS = ("choose", "compat", "demo", "doctor", "report", "run")


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"umem.cli.{name}").command
        return command


@click.command(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="umem")
def main() -> None:
    """CuPy and Chainer programs that use more memory than the GPU has."""
