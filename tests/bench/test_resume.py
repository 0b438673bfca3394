"""resume.py runs: killed runs go on, and every disk that may be left loads."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_scripts import module, written

from umem.compat import find_package

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(find_package() is None, reason="Chainer is not installed"),
]


def test_killed_runs_go_on_to_the_bit(tmp_path: Path) -> None:
    report, printed = written(tmp_path, "resume.py", "--quick")
    rows = {row["what"]: row for row in report["rows"]}
    kills = [row for row in report["rows"] if row["what"] == "kills"]
    assert sum(row["kills"] for row in kills) == sum(row["resumes"] for row in kills) == 6
    assert [row["wrong"] for row in kills] == [0, 0]
    cut = rows["prefixes"]
    assert cut["disks"] > 300 and (cut["lost"], cut["wrong"], cut["stuck"]) == (0, 0, 0)
    grown = rows["growth"]
    for what in ("files", "threads", "entries"):
        assert grown[f"{what}_before"] == grown[f"{what}_after"]
    assert "After 6 kills and 6 resumes" in printed


@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
def test_each_kind_of_run_goes_on_after_a_kill(number: int) -> None:
    """Killed by its disk and by the clock, with all that makes it hard to go on."""
    kinds = module("resume_parts.runs").KINDS
    assert len(kinds) == 10
    row = module("resume_parts.kills").kill(kinds[number], 3, seed=number)
    assert (row["kills"], row["resumes"], row["wrong"]) == (3, 3, 0)


def test_a_run_that_forgets_something_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the random generators the losses of a run that goes on are others."""
    state = module("umem.chainer.resume.run_state")
    monkeypatch.setattr(state, "serialize_global", lambda saver: None)
    kinds = module("resume_parts.runs").KINDS
    assert module("resume_parts.kills").kill(kinds[0], 6, seed=3)["wrong"] > 0
