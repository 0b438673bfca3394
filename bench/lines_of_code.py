"""How much code is there?

Lines of umem/ (or another folder) that hold code: no blank lines, no comments, no docstrings, and
no other strings that stand as statements. By the first folder, with the number of modules and the
longest file (all its lines). ``--against`` counts a revision of git beside it.
"""

from __future__ import annotations

import ast
import io
import subprocess
import tarfile
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import click
import common
from report_tables import Column, Table, counted, figure, quantity, text

Sources = Mapping[PurePosixPath, str]
"""The text of each file, by its path in the folder."""
TOP = "(top)"
ALL = "all"
EMPTY = frozenset(
    (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
) | {tokenize.ENDMARKER}


# -- one file ------------------------------------------------------------------------------------


def code_lines(source: str) -> int:
    """Count the lines that hold code.

    Raises:
        SyntaxError: it is not Python.
    """
    said = list(_strings_as_statements(source))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in EMPTY and not any(a <= token.start < b for a, b in said):
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def _strings_as_statements(source: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield where docstrings and their like begin and end: line and column in letters."""
    lines = source.splitlines(keepends=True)

    def place(line: int, offset: int) -> tuple[int, int]:
        return line, len(lines[line - 1].encode()[:offset].decode())

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str) and node.end_lineno and node.end_col_offset:
                start = place(node.lineno, node.col_offset)
                yield start, place(node.end_lineno, node.end_col_offset)


# -- all files -----------------------------------------------------------------------------------


def in_folder(folder: Path) -> dict[PurePosixPath, str]:
    """Read every module of a folder, but those of hidden folders."""
    paths = (PurePosixPath(path.relative_to(folder).as_posix()) for path in folder.rglob("*.py"))
    shown = (path for path in paths if not any(part.startswith(".") for part in path.parts))
    return {path: (folder / path).read_text(encoding="utf-8") for path in sorted(shown)}


def at_revision(folder: Path, revision: str) -> dict[PurePosixPath, str]:
    """Read every module of a folder as it was at a revision; nothing is written.

    Raises:
        click.ClickException: git does not know it, or the folder was not there.
    """
    packed = _git(folder, "archive", "--format=tar", revision)
    found = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.name.endswith(".py") else None
            if file is not None:
                found[PurePosixPath(member.name)] = file.read().decode()
    return found


def _git(folder: Path, *arguments: str) -> bytes:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        return subprocess.run(command, capture_output=True, check=True).stdout
    except FileNotFoundError:
        raise click.ClickException("git is not installed") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines() or ["git failed"]
        raise click.ClickException(said[0]) from None


# -- the table -----------------------------------------------------------------------------------


def measure(sources: Sources) -> dict[str, dict[str, Any]]:
    """Count by first folder, and all together.

    Raises:
        click.ClickException: a file is not Python.
    """
    try:
        lines = {path: code_lines(source) for path, source in sources.items()}
    except (SyntaxError, tokenize.TokenError) as error:
        raise click.ClickException(f"not Python: {error}") from error
    folders = {path: path.parts[0] if len(path.parts) > 1 else TOP for path in sources}
    rows = {}
    for folder in (*sorted(set(folders.values())), ALL):
        paths = [path for path in sources if folder in (folders[path], ALL)]
        if paths:
            longest = max(paths, key=lambda path: len(sources[path].splitlines()))
            rows[folder] = {
                "folder": folder,
                "code_lines": sum(lines[path] for path in paths),
                "modules": len(paths),
                "longest": str(longest),
                "longest_lines": len(sources[longest].splitlines()),
            }
    return rows


def rows(
    now: Mapping[str, dict[str, Any]], before: Mapping[str, dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """Put both beside each other, all together last; a folder that is gone has no lines."""
    found = []
    for folder in sorted({*now, *(before or {})}, key=lambda name: (name == ALL, name)):
        row = {"folder": folder, "code_lines": 0, "modules": 0, **now.get(folder, {})}
        if before is not None:
            old = before.get(folder, {})
            row["code_lines_before"] = old.get("code_lines", 0)
            row["modules_before"] = old.get("modules", 0)
        found.append(row)
    return found


def tables(result: common.Result) -> list[Table]:
    columns: list[Column] = [
        text("folder", "folder"),
        counted("lines of code", "code_lines"),
        counted("modules", "modules"),
        counted("longest file's lines", "longest_lines"),
        text("longest file", "longest"),
    ]
    if result["against"]:
        columns[2:2] = [
            counted("lines before", "code_lines_before"),
            quantity("change", _change, "%", places=1, signed=True),
        ]
        columns[5:5] = [counted("modules before", "modules_before")]
    return [Table(columns, result["rows"])]


def _change(row: Mapping[str, Any]) -> float | None:
    before = row["code_lines_before"]
    return 100 * (row["code_lines"] / before - 1) if before else None


def answer(result: common.Result) -> str:
    whole = result["rows"][-1]
    against = ""
    if result["against"]:
        change = _change(whole) or 0.0
        against = (
            f", {figure(abs(change), 1)} % {'fewer' if change < 0 else 'more'} than the "
            f"{whole['code_lines_before']:,} in {whole['modules_before']:,} at {result['against']}"
        )
    return (
        f"{whole['code_lines']:,} lines of code in {whole['modules']:,} modules{against}, "
        f"and the longest file has {whole.get('longest_lines', 0):,} lines."
    )


BENCH = common.Bench("lines_of_code", __doc__, answer, tables=tables)


@click.command(help=__doc__)
@click.argument(
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=common.HERE.parent / "umem",
)
@click.option("--against", metavar="REV", help="Count a revision of git beside it.")
@click.option("--quick", is_flag=True, help="The modules that lie directly in the folder, alone.")
@common.json_option
def main(folder: Path, against: str | None, quick: bool, path: Path | None) -> None:
    package = folder.resolve().name
    now, before, commit = in_folder(folder), None, None
    if against is not None:
        before = at_revision(folder, against)
        commit = _git(folder, "rev-parse", "--short=12", f"{against}^{{commit}}").decode().strip()
    both = [
        {name: source for name, source in found.items() if len(name.parts) == 1 or not quick}
        for found in (now, before or {})
    ]
    counted_now, counted_before = (measure(found) for found in both)
    BENCH.finish(
        rows(counted_now, counted_before if before is not None else None),
        path,
        simulated=False,
        options={"folder": package, "against": against, "quick": quick},
        against=commit,
    )


if __name__ == "__main__":
    main()
