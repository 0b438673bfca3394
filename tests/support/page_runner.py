"""Runs the code blocks of a page of docs/, in order, and compares what they print with the page.

python page_runner.py PAGE, in an empty folder. What a block means:

- ```python title="train.py" is a file of that name, which later blocks use.
- ```python runs, in one namespace with those before it. A ```text block right after it is its
  output; without one it prints nothing.
- ```console has commands behind "$ ", and their output below each (standard error included).
- <!-- environment: NAME=VALUE --> before the first block sets a variable for all of them.
- <!-- not run: why --> before a block leaves it out.
- Other languages are shown and not run.

In an expected output "..." stands for any text, as in doctest.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<why>[^>]+) -->\n+)?"
    r"```(?P<kind>\w*)(?: title=\"(?P<title>[^\"]+)\")?[^\n]*\n"
    r"(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
ENVIRONMENT = re.compile(r"^<!-- environment: (\w+)=(.+?) -->$", re.MULTILINE)
CHECKER = doctest.OutputChecker()


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the line it begins on, and why it is not run."""

    kind: str
    text: str
    line: int
    title: str = ""
    why: str = ""
    follows: bool = False
    """Whether only blank lines stand between it and the block before."""


def blocks_of(page: str) -> list[Block]:
    """Return the fenced blocks of a page."""
    found, end = [], 0
    for match in BLOCK.finditer(page):
        line = page.count("\n", 0, match.start("text")) + 1
        follows = bool(found) and not page[end : match.start()].strip()
        end = match.end()
        found.append(
            Block(
                match["kind"],
                match["text"],
                line,
                match["title"] or "",
                match["why"] or "",
                follows,
            )
        )
    return found


def differs(block: Block, wanted: str, got: str) -> str:
    """Return how an output differs from the page; nothing if it does not."""
    got = "".join(f"{line.rstrip()}\n" for line in got.splitlines())
    if CHECKER.check_output(wanted, got, doctest.ELLIPSIS):
        return ""
    return f"line {block.line}: the page says\n{wanted}and this is printed\n{got}"


def run_console(block: Block) -> str:
    """Run the commands of a console block, and return how their output differs."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, wanted = part.partition("\n")
        while command.endswith("\\"):
            more, _, wanted = wanted.partition("\n")
            command += "\n" + more
        done = subprocess.run(
            ["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if different := differs(block, wanted, done.stdout):
            return f"$ {command}\n{different}"
    return ""


def run_python(block: Block, names: dict[str, Any], path: str) -> str:
    """Run a block of Python among these names, and return what it prints."""
    printed = io.StringIO()
    code = compile("\n" * (block.line - 1) + block.text, path, "exec")  # the page's line numbers
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    return printed.getvalue()


def run(path: str) -> list[str]:
    """Run a page, and return what is not as it says."""
    page = Path(path).read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "__main__"}
    blocks, wrong = blocks_of(page), []
    for number, block in enumerate(blocks):
        if block.why:
            continue
        if block.title:
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(block.text, encoding="utf-8")
        elif block.kind == "console":
            wrong.append(run_console(block))
        elif block.kind == "python":
            after = blocks[number + 1 : number + 2]
            wanted = "".join(b.text for b in after if b.kind == "text" and b.follows and not b.why)
            wrong.append(differs(block, wanted, run_python(block, names, path)))
    return [text for text in wrong if text]


if __name__ == "__main__":
    # Python looks at some variables only as it starts.
    variables = dict(ENVIRONMENT.findall(Path(sys.argv[1]).read_text(encoding="utf-8")))
    if any(os.environ.get(name) != value for name, value in variables.items()):
        os.environ.update(variables)
        os.execv(sys.executable, sys.orig_argv)
    sys.path.insert(0, "")  # files of the page are modules, as for a user's script
    if found := run(sys.argv[1]):
        sys.exit("\n".join(found))
