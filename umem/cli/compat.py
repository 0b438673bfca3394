"""``umem compat``: what the Chainer compatibility layer mends here, and its start-up file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from umem._common.as_json import json_text, plain
from umem._common.extras import installed_version
from umem._common.printable import short
from umem.cli.files_and_sizes import say
from umem.compat import (
    Row,
    check,
    find_package,
    get_chainer,
    import_mended,
    install_pth,
    installed_pth,
    package_version,
    remove_pth,
)


@click.command("compat")
@click.option(
    "--check", "action", flag_value="check", default="check", help="Show each fix (default)."
)
@click.option(
    "--install", "action", flag_value="install", help="Apply the fixes in every Python process."
)
@click.option("--remove", "action", flag_value="remove", help="Undo --install.")
@click.option(
    "--get-chainer", "action", flag_value="get", help="Install Chainer into this environment."
)
@click.option("--json", "as_json", is_flag=True, help="With --check: print JSON.")
def command(action: str, as_json: bool) -> None:
    """Make Chainer 7.8 run on current Python, NumPy and CuPy.

    `import umem.chainer` applies the fixes to one program. --install writes a start-up file into
    site-packages, which applies them to every program of this Python. --get-chainer installs
    Chainer, which pip alone can no longer build.

    \b
    Examples:

    \b
        # Install Chainer into this environment
        umem compat --get-chainer
        # Show each fix, and whether it is applied here
        umem compat --check
    """
    _ACTIONS[action](as_json)


def _check(as_json: bool) -> None:
    """Check every mend and print the result; exits with 1 if a mend does not fit."""
    rows = check()
    misfit = any(row.error for row in rows)
    failed = {} if misfit else import_mended(rows)
    rows = check()
    if as_json:
        say(json_text(_report(rows, failed)))
    else:
        _print(rows, failed, Console())
    if misfit:
        raise SystemExit(1)


def _install(_: bool) -> None:
    path = install_pth()
    say(f"Wrote {short(path)}\nFrom now on umem fixes every `import chainer` of this Python.")
    say("To undo this: umem compat --remove")


def _remove(_: bool) -> None:
    path = remove_pth()
    say("There is no start-up file to remove." if path is None else f"Removed {short(path)}")


def _get(_: bool) -> None:
    version = get_chainer(lambda line: say(f"umem: {line}", err=True))
    say(f"Installed Chainer {version}. Write `import umem.chainer` before `import chainer`.")


_ACTIONS = {"check": _check, "install": _install, "remove": _remove, "get": _get}


def _versions() -> dict[str, str | None]:
    package = find_package()
    names = ("python", "numpy", "scipy", "cupy")
    found: dict[str, str | None] = {name: installed_version(name) for name in names}
    return {"chainer": package_version(package) if package else None, **found}


def _report(rows: Sequence[Row], failed: dict[str, str]) -> dict[str, Any]:
    path = installed_pth()
    return {
        "versions": _versions(),
        "pth": path,
        "mends": [{**plain(row), "state": row.state} for row in rows],
        "failed_imports": failed,
    }


def _print(rows: Sequence[Row], failed: dict[str, str], console: Console) -> None:
    """Print versions, the table of mends, and errors."""
    console.print(", ".join(f"{name} {v}" for name, v in _versions().items() if v), soft_wrap=True)
    console.print(table(rows))
    for module, error in failed.items():
        console.print(f"{module} cannot be imported: {error}", markup=False)
    for row in rows:
        if row.error is not None:
            console.print(row.error, markup=False)
    path = installed_pth()
    where = "none (umem compat --install writes it)" if path is None else short(path)
    console.print(f"Start-up file: {where}", soft_wrap=True)


def table(rows: Sequence[Row]) -> Table:
    """Return the table of mends, for 80 columns or more."""
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    result.add_column("fix", no_wrap=True)
    result.add_column("for", no_wrap=True)
    result.add_column("without it", overflow="fold")
    result.add_column("here", no_wrap=True)
    for row in rows:
        cells = (row.name, row.versions, row.symptom, row.state)
        result.add_row(*(Text(cell) for cell in cells))
    return result
