"""Text of others is printed so that no terminal obeys it, and short."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umem._common.printable import command_line, printable, quoted, sentence, short

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
HOSTILE = ["\x1b[31m", "a\nb", "\r", "\u202e", "\x9b2J", "\0", "\udcff", "\u2028", "\x7f"]


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_that_is_shown_moves_a_cursor(text: str) -> None:
    for made in (
        printable(text),
        short(text),
        short(Path("x" + text)),
        quoted(text),
        quoted([text]),
        command_line("umem", text),
        sentence(text),
    ):
        assert made.replace("\n", "" if made == sentence(text) else "\n").isprintable()
        made.encode()


@given(st.text(st.characters(exclude_categories=())), st.integers(11, 50))
def test_what_is_shown_is_short_and_all_of_a_short_text(text: str, longest: int) -> None:
    found = short(text, longest)
    assert found.isprintable() and len(found) <= longest
    if len(printable(text)) <= longest:
        assert found == printable(text)


def test_long_texts_keep_their_ends_and_cost_nothing() -> None:
    huge = "begin" + "\x1b" * 15_000_000 + "end"
    for made in (short(huge), quoted(huge), quoted([huge]), sentence(huge)):
        assert len(made) <= 2000
    assert short(huge).startswith("begin") and short(huge).endswith("end")
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    assert len(quoted(nested)) < 100


@needs_bash
@given(st.lists(st.text(st.characters(exclude_characters="\0"), max_size=5), max_size=3))
def test_a_command_line_is_one_for_a_shell(words: list[str]) -> None:
    words = [word.encode("utf-8", "ignore").decode() for word in words]
    line = command_line("printf", "%s\\0", *words, "end")
    assert line.isprintable()
    done = subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        check=True,
        env={"LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin"},
    )
    assert done.stdout.decode() == "".join(f"{word}\0" for word in [*words, "end"])


@needs_bash
def test_a_name_that_is_no_text_is_itself_for_a_shell() -> None:
    line = command_line("printf", "%s", "a\udcffb")
    assert subprocess.run(["bash", "-c", line], capture_output=True).stdout == b"a\xffb"
