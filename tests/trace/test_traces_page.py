"""docs/reference/traces.md: the options and figures that it names are the program's."""

from __future__ import annotations

import re

from click.testing import CliRunner
from project import ROOT

from umem._common.stacks import USER_DEPTH
from umem.cli import main
from umem.trace.recording.kept_steps import CALIBRATION_LIMIT, EVENT_LIMIT

PAGE = (ROOT / "docs" / "reference" / "traces.md").read_text(encoding="utf-8")


def test_the_options_and_figures_of_the_page_are_the_programs() -> None:
    commands = ("run", "report", "replay")
    text = "".join(CliRunner().invoke(main, [of, "--help"]).output for of in commands)
    named = set(re.findall(r"`(--[a-z-]+)", PAGE))
    assert named >= {"--steps", "--stacks", "--no-workspace", "--stop", "--force"}
    assert all(option in text for option in named)
    assert (EVENT_LIMIT, CALIBRATION_LIMIT, USER_DEPTH) == (1_000_000, 4, 5)
