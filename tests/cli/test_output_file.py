"""What a command refuses to write before it does any work."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import pytest

from umem.cli.files_and_sizes import refuse_picture


@pytest.mark.parametrize("name", ["a.foo", "a", "a.png.gz", "png", "a.svg"])
def test_a_picture_that_is_not_named_one_is_refused(name: str) -> None:
    with pytest.raises(click.UsageError, match=r"a picture is a PNG: name it .*\.png"):
        refuse_picture(Path(name))


def test_matplotlib_is_missed_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(click.ClickException, match=r"pip install .*matplotlib"):
        refuse_picture(Path("a.png"))


def test_what_can_be_drawn_is_let_through() -> None:
    pytest.importorskip("matplotlib")
    refuse_picture(None)
    refuse_picture(Path("folder/A.PNG"))
