"""How much code is there?

Lines of umem/ (or another folder) that hold code: no blank lines, no comments, no docstrings, and
no other strings that stand as statements. By the first folder, with the number of modules and the
longest file (all its lines). ``--against COMMIT`` adds how many lines more it is than at a commit.
"""

from __future__ import annotations

import ast
import io
import subprocess
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import click
import common
from report_tables import counted, text

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


def at_commit(folder: Path, commit: str) -> dict[PurePosixPath, str]:
    """Read every module of a folder as it was at a commit.

    Raises:
        click.ClickException: git does not know the commit, or is not there.
    """
    try:
        inside = _git(folder, "ls-tree", "-r", "--name-only", "-z", commit, ".").split("\0")
        names = [name for name in inside if name.endswith(".py")]
        return {PurePosixPath(name): _git(folder, "show", f"{commit}:./{name}") for name in names}
    except (OSError, subprocess.CalledProcessError) as error:
        explanation = getattr(error, "stderr", "") or str(error)
        raise click.ClickException(f"{commit!r} cannot be read: {explanation.strip()}") from error


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout


# -- the table -----------------------------------------------------------------------------------


def measure(sources: Sources) -> list[dict[str, Any]]:
    """Count by first folder, and all together.

    Raises:
        click.ClickException: a file is not Python.
    """
    try:
        lines = {path: code_lines(source) for path, source in sources.items()}
    except (SyntaxError, tokenize.TokenError) as error:
        raise click.ClickException(f"not Python: {error}") from error
    folders = {path: path.parts[0] if len(path.parts) > 1 else TOP for path in sources}
    rows = []
    for folder in (*sorted(set(folders.values())), ALL):
        paths = [path for path in sources if folder in (folders[path], ALL)]
        if paths:
            longest = max(paths, key=lambda path: len(sources[path].splitlines()))
            rows.append(
                {
                    "folder": folder,
                    "code_lines": sum(lines[path] for path in paths),
                    "modules": len(paths),
                    "longest": str(longest),
                    "longest_lines": len(sources[longest].splitlines()),
                }
            )
    return rows


def answer(result: common.Result) -> str:
    whole = result["rows"][-1]
    growth = (
        f"{whole['code_lines']:,} lines of code in {whole['modules']:,} modules, and the longest "
        f"file has {whole['longest_lines']:,} lines."
    )
    if whole.get("more") is None:
        return growth
    return f"{growth} That is {whole['more']:+,} lines against {result['options']['against']}."


BENCH = common.Bench(
    "lines_of_code",
    __doc__,
    answer,
    (
        text("folder", "folder"),
        counted("lines of code", "code_lines"),
        counted("more than before", "more"),
        counted("modules", "modules"),
        counted("longest file's lines", "longest_lines"),
        text("longest file", "longest"),
    ),
)


@click.command(help=__doc__)
@click.argument(
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=common.HERE.parent / "umem",
)
@click.option("--against", metavar="COMMIT", help="Count what has come and gone since then.")
@click.option("--quick", is_flag=True, help="The modules that lie directly in the folder, alone.")
@common.json_option
def main(folder: Path, against: str | None, quick: bool, path: Path | None) -> None:
    """Measure, print the tables, and write the result."""

    def shown(sources: Sources) -> Sources:
        return {name: text for name, text in sources.items() if len(name.parts) == 1 or not quick}

    rows = measure(shown(in_folder(folder)))
    if against is not None:
        before = {row["folder"]: row for row in measure(shown(at_commit(folder, against)))}
        for row in rows:
            there = before.get(row["folder"], {"code_lines": 0})
            row["more"] = row["code_lines"] - there["code_lines"]
    options = {"folder": folder.resolve().name, "quick": quick, "against": against}
    BENCH.finish(rows, path, simulated=False, options=options)


if __name__ == "__main__":
    main()
