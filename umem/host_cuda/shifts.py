"""Shifts as in PTX: shifting by the type's width or more gives zero, or the sign.

In C++ these are undefined. An object between a shift and its amount defines the operators
(umem_shifts.h), which keeps the precedence of the shift.
"""

from __future__ import annotations

import re

_TOKENS = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'|<{3,}|>{3,}|<<=?|>>=?", re.DOTALL
)
_SMALL = re.compile(r"\s*(0[xX][\da-fA-F]+|\d+)[uUlL]*(?![\w.])(?!\s*[-+*/%])")
"""A number without an operation that precedes the shift."""
_LEAST_WIDTH = 32
_OPERATOR = re.compile(r"\boperator\s*$")
HEADER = '#include "umem_shifts.h"\n'


def clamped(source: str) -> tuple[str, bool]:
    """Rewrite shifts by more than a small number; returns whether there are any."""
    parts, at = [], 0
    for found in _TOKENS.finditer(source):
        token = found[0]
        if token[:2] not in ("<<", ">>") or token[:3] in ("<<<", ">>>"):
            continue
        by = _SMALL.match(source, found.end())
        is_small = (
            by is not None and int(by[1], 0 if by[1][:2] in ("0x", "0X") else 10) < _LEAST_WIDTH
        )
        if is_small or _OPERATOR.search(source, max(0, found.start() - 20), found.start()):
            continue
        if token == ">>" and _closes_templates(source, found.start()):
            continue
        parts += [source[at : found.end()], f" umem_shift {token}"]
        at = found.end()
    return "".join((*parts, source[at:])), bool(parts)


def _closes_templates(code: str, at: int) -> bool:
    """Tell whether ``>>`` ends two lists of template arguments that are open before it."""
    depth = opened = closed = 0
    for i in range(at - 1, -1, -1):
        letter, pair = code[i], code[max(0, i - 1) : i + 1]
        depth += (letter in ")]") - (letter in "([")
        if depth < 0 or (not depth and (letter in ";{}?" or pair in ("&&", "||"))):
            return False
        if depth or pair in ("->", ">=", "<="):
            continue
        closed += letter == ">"
        if letter == "<" and "<" not in (code[i - 1 : i], code[i + 1]):
            opened, closed = opened + (not closed), closed - bool(closed)
        if opened == 2:
            return True
    return False
