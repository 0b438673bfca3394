"""One fault at a time in the source of a right program: each place at which a rule finds one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

END = "# a wait of the end"
"""A wait that only ends a program in good order is no place for a fault."""


class Rule(NamedTuple):
    """A kind of fault: a pattern, and by what a place that it finds is replaced."""

    kind: str
    pattern: re.Pattern[str]
    replacement: str


WAIT, INDEX, FILL, UNWRITTEN, BARRIER = (
    "a wait is missing", "an index is one too far", "a fill is too long",
    "an array is read before it is written", "a barrier is missing",
)  # fmt: skip
RULES = (
    Rule(WAIT, re.compile(r"^( *)[\w.()\[\]]+\.(?:synchronize|wait_event)\(.*$", re.M), r"\1pass"),
    Rule(INDEX, re.compile(r"\b(\w+) < (n|m)\b"), r"\1 <= \2"),
    Rule(FILL, re.compile(r"(memset_async\(0, \w+\.nbytes),"), r"\1 + 4,"),
    Rule(UNWRITTEN, re.compile(r"^( *)[\w.\[\]]+\.memset_async\(.*$", re.M), r"\1pass"),
    Rule(UNWRITTEN, re.compile(r"cp\.zeros\("), "cp.empty("),
    Rule(BARRIER, re.compile(r"__syncthreads\(\);"), ";"),
)


MOST = {WAIT: 3, INDEX: 2, FILL: 1, UNWRITTEN: 2, BARRIER: 2}
"""How many faults of a kind each program gets, at the first places: ten in all."""


class Mutant(NamedTuple):
    """A program with a fault, and the line of its source, from 1, that has it."""

    program: str
    kind: str
    line: int
    text: str
    source: str


def mutants(program: Callable[..., Any]) -> Iterator[Mutant]:
    """Yield a program's ten mutants, by rule and place."""
    source = inspect.getsource(program)
    left = dict(MOST)
    for rule in RULES:
        for found in rule.pattern.finditer(source):
            line = source.count("\n", 0, found.start()) + 1
            text = source.splitlines()[line - 1].strip()
            if END not in text and left[rule.kind]:
                left[rule.kind] -= 1
                new = found.expand(rule.replacement)
                changed = source[: found.start()] + new + source[found.end() :]
                yield Mutant(program.__name__, rule.kind, line, text, changed)


def made(mutant: Mutant, namespace: dict[str, Any]) -> Callable[..., Any]:
    """Return a mutant as a function, with the names of its module."""
    names = dict(namespace)
    exec(compile(mutant.source, f"<{mutant.program}: {mutant.kind}>", "exec"), names)
    found: Callable[..., Any] = names[mutant.program]
    return found
