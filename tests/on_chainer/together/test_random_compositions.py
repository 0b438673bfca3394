"""Some random compositions of techniques; tests/conformance/compositions.py runs two thousand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import random_compositions as compositions
from bench_scripts import CONFORMANCE, run

pytestmark = pytest.mark.thorough
COUNT, FIRST = 40, 100_000
FEW = 15
"""So many of them are not slow tests."""
MENDED = (18, 52, 56, 215, 225)
"""A share in a pass without a plan; saved_in undone after Recompute; compared under saved_in."""
RESULT = CONFORMANCE / "results" / "compositions.json"


@pytest.mark.parametrize(
    "seed",
    [
        *(*MENDED, *range(FIRST, FIRST + FEW)),
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(FIRST + FEW, FIRST + COUNT)),
    ],
)
def test_a_composition_gives_what_the_pages_say(seed: int) -> None:
    drawn = compositions.composition(seed)
    found = compositions.judged(drawn)
    assert found.outcome != "unexplained", f"{drawn}\n{found.message}"


def test_every_technique_is_drawn_and_most_compositions_have_several() -> None:
    drawn = [compositions.composition(seed).techniques for seed in range(300)]
    of_all = {name for one in drawn for name in one}
    assert of_all == {
        *compositions.EXACT, *compositions.ROUNDING, *compositions.FEWER_BITS, *compositions.MODEL
    }  # fmt: skip
    assert sum(len(one) >= 2 for one in drawn) > 200


def test_what_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge that finds nothing would find everything right."""
    seed = next(s for s in range(99) if "chunked" in compositions.composition(s).techniques)
    turn_on = compositions.turn_on

    def spoiling(name: str, options: object, net: object, optimizer: object, folder: str) -> object:
        if name == "chunked":
            next(net.params()).array.reshape(-1)[0] += 1e-3  # type: ignore[attr-defined]
        return turn_on(name, options, net, optimizer, folder)

    monkeypatch.setattr(compositions, "turn_on", spoiling)
    found = compositions.judged(compositions.composition(seed))
    assert found.outcome == "unexplained" and "other bits" in found.message


def test_the_bench_counts_and_names_a_composition(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = run("compositions.py", "--count", "4", "--json", str(path))
    (row,) = json.loads(path.read_text())["rows"]
    assert done.returncode == (0 if row["passed"] else 1), done.stderr
    assert row["all"][0]["compositions"] == 4 and "random compositions" in done.stdout
    first, second = (run("compositions.py", "--composition", "3") for _ in range(2))
    assert first.stdout == second.stdout and first.stdout.startswith("3: ")


@pytest.mark.skipif(not RESULT.exists(), reason="the long run has not been made")
def test_of_the_kept_result_none_is_unexplained() -> None:
    result = json.loads(RESULT.read_text())
    (row,) = result["rows"]
    assert row["all"][0]["compositions"] == result["options"]["count"] > 1_700 and row["passed"]
