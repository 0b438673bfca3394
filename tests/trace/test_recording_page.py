"""docs/recording.md: its code runs, and what it says of the command line exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from processes import printed_quietly

import umem
from umem._common.stacks import USER_DEPTH
from umem.cli import main
from umem.trace.recording.kept_steps import CALIBRATION_LIMIT, EVENT_LIMIT

pytest.importorskip("umem.chainer")
ROOT = Path(umem.__file__).parent.parent
PAGE = (ROOT / "docs/recording.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```\n", PAGE, re.DOTALL)


def run(folder: Path, code: str) -> str:
    (folder / "train.py").write_text(code, encoding="utf-8")
    return printed_quietly("train.py", cwd=folder).replace(f"{folder}/", "")


@pytest.mark.thorough
def test_the_block_prints_what_the_page_says(tmp_path: Path) -> None:
    said = re.search(r"```python\n.*?```\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert said is not None
    assert run(tmp_path, BLOCKS[0]) == said[1]


def test_the_trainer_prints_its_log(tmp_path: Path) -> None:
    *rows, last = run(tmp_path, BLOCKS[2]).replace("\x1b[J", "").splitlines()
    assert rows[0].split() == ["epoch", "memory/peak_MiB", "time/whole_run_min"]
    assert [row.split()[0] for row in rows[1:]] == ["1", "2", "3"]
    assert last == f"{2 * 4 * (100 * 10 + 10) / 1024:.1f} KiB of optimizer state"
    assert len(BLOCKS) == 3


def test_the_options_and_figures_of_the_page_are_the_programs() -> None:
    text = "".join(CliRunner().invoke(main, [of, "--help"]).output for of in ("run", "report"))
    named = set(re.findall(r"`(--[a-z-]+)", PAGE))
    assert named >= {"--steps", "--stacks", "--no-workspace", "--stop", "--force"}
    assert all(option in text for option in named)
    assert (EVENT_LIMIT, CALIBRATION_LIMIT, USER_DEPTH) == (1_000_000, 4, 5)
