"""Makes text from others (names in a trace, names of files) safe to print, and short.

All text that umem did not write itself passes through this module before it reaches a terminal, a
message or a picture.
"""

from __future__ import annotations

import os
import reprlib
import shlex

LONGEST = 200
"""Most characters of a text. A choice, as the next: no measurement supports it."""
LONGEST_PATH = 600
"""Most characters of a path; more than of a text, because a path must stay recognisable."""


def printable(text: str) -> str:
    """Escape characters that would move a cursor or cannot be encoded.

    >>> printable("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def short(value: str | os.PathLike[str], longest: int | None = None) -> str:
    """Make a text or path printable for a message, and cut out the middle if it is long.

    >>> short("a\nb"), short("x" * 1000, 11)
    ('a\\nb', 'xxxx...xxxx')
    """
    if longest is None:
        longest = LONGEST if isinstance(value, str) else LONGEST_PATH
    text = value if isinstance(value, str) else os.fspath(value)
    return _cut(printable(_cut(text, longest)), longest)


def quoted(value: object) -> str:
    """Return any value quoted, or as its short ``repr``.

    >>> quoted("a\x1b"), quoted([1] * 100)
    ("'a\\x1b'", '[1, 1, 1, 1, 1, 1, ...]')
    """
    return _REPR.repr(value)


def sentence(text: str, longest: int = 2000) -> str:
    """Make a command's output printable line by line."""
    return _cut("\n".join(printable(line) for line in _cut(text, longest).split("\n")), longest)


def command_line(*words: str | os.PathLike[str]) -> str:
    """Join any words to a shell command line without control characters.

    >>> print(command_line("umem", "report", "a b", "x\x1by"))
    umem report 'a b' $'x\x1by'
    """
    return " ".join(_word(os.fspath(word)) for word in words)


def _word(text: str) -> str:
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_escaped, text)) + "'"


def _escaped(char: str) -> str:
    """Escape a character inside $'...', as bash, zsh and ksh read it."""
    if char in "\\'":
        return "\\" + char
    if char.isprintable():
        return char
    is_byte = "\udc80" <= char <= "\udcff"  # from a file name that is not valid text
    code = char.encode("utf-8", "surrogateescape" if is_byte else "surrogatepass")
    return "".join(f"\\x{byte:02x}" for byte in code)


def _cut(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    half = (longest - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80
