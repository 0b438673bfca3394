"""Text from others, such as names in a trace, made safe to print."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with what would move a cursor, or cannot be encoded, written as escapes.

    >>> printable("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
