"""The layout of help, under headings, and suggestions for misspelt commands and values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import click

from umem._common.nearest import did_you_mean
from umem._common.printable import quoted

Headings = Mapping[str, Iterable[str]]
"""Names of commands, or of parameters, under each heading."""
WHOLE = 1000
"""More characters than any line of help has: none is cut."""


class Commands(click.Group):
    """A group that lists its commands under headings, and suggests the nearest name.

    Args:
        headings: the commands under each heading; None: all under one.
    """

    def __init__(self, *args: Any, headings: Headings | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.headings = headings

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each command with the first sentence of its help, whole."""
        names = self.list_commands(ctx)
        width = max(map(len, names))
        for heading, wanted in (self.headings or {"Commands": names}).items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), self._line(ctx, name)) for name in wanted])

    def _line(self, ctx: click.Context, name: str) -> str:
        command = self.get_command(ctx, name)
        return "" if command is None else command.get_short_help_str(WHOLE)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the arguments begin with.

        Raises:
            click.UsageError: there is none of that name.
        """
        name = args[0]
        is_known = name.startswith("-") or name in self.list_commands(ctx)
        if not (is_known or ctx.resilient_parsing):
            hint = did_you_mean(name, self.list_commands(ctx))
            if name.endswith(".py") and "run" in self.list_commands(ctx):
                hint = " To run a program: umem run SCRIPT."
            ctx.fail(f"No such command {quoted(name)}.{hint}")
        return super().resolve_command(ctx, args)


class OptionsByWish(click.Command):
    """A command whose options stand under headings.

    Args:
        headings: the names of the parameters under each heading; others follow under "Other".
    """

    def __init__(self, *args: Any, headings: Headings, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.headings = headings

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters in the order of the headings."""
        order = {
            name: at for at, name in enumerate(n for each in self.headings.values() for n in each)
        }
        return sorted(
            super().get_params(ctx), key=lambda one: order.get(one.name or "", len(order))
        )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings."""
        options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        headed = {name for names in self.headings.values() for name in names}
        rest = [one.name for one in options if one.name not in headed]
        for heading, names in {**self.headings, "Other": rest}.items():
            records = [one.get_help_record(ctx) for one in options if one.name in [*names]]
            with formatter.section(heading):
                formatter.write_dl([record for record in records if record is not None])


class Names(click.Choice):  # type: ignore[type-arg]
    """A value that is one of some names; an error suggests the nearest."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value.

        Raises:
            click.BadParameter: it is none of the names.
        """
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            hint = did_you_mean(str(value), map(str, self.choices))
            raise click.BadParameter(f"{error.message}{hint}", ctx, param) from None
