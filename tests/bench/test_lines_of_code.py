"""bench/lines_of_code.py counts lines that hold code."""

from __future__ import annotations

import pytest
from bench_scripts import module

pytestmark = pytest.mark.thorough

lines_of_code = module("lines_of_code")

SOURCE = '''"""A docstring
of two lines."""

from os import path  # 1

# a comment

LIMIT = 3  # 2
"""What it is for."""


def first(x):  # 3
    """One line."""

    text = """a string

    that is no docstring"""  # 4, 5, 6
    return (  # 7
        text,  # 8

        x,  # 9
    )  # 10


def second(): "says so on its line"  # 11


class Third:  # 12
    """Größe: letters of two bytes."""; x = 1  # 13
    if LIMIT:  # 14
        "a statement"
    else:  # 15
        pass  # 16
'''


def test_blanks_comments_and_docstrings_are_no_code() -> None:
    assert lines_of_code.code_lines(SOURCE) == 16
    assert lines_of_code.code_lines("") == lines_of_code.code_lines('"""Only this."""\n') == 0
