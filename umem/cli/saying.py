"""What a command prints."""

from __future__ import annotations

import sys

import click


def say(text: str, *, err: bool = False) -> None:
    """Print a text.

    `click.echo` keeps every stream that it finds by itself for as long as the process lives, and
    where many commands run in one, as in tests, all that they printed with it.
    """
    click.echo(text, file=sys.stderr if err else sys.stdout)
