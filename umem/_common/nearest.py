"""The name that a misspelt one was probably meant to be."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from umem._common.printable import quoted


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question with the known name that is nearest, after a space; empty without one.

    >>> did_you_mean("managd", ["managed", "hybrid"])
    " Did you mean 'managed'?"
    >>> did_you_mean("xyz", ["managed", "hybrid"])
    ''
    """
    near = get_close_matches(name, [*known], n=1)
    return f" Did you mean {quoted(near[0])}?" if near else ""
