"""Planned recomputation in random programs on CuPy: every number is that of plain CuPy."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from software_programs import needs_compiler, needs_cupy, run

pytestmark = [needs_compiler, needs_cupy]
FEW, MANY, AT_ONCE = 3, 500, 25
"""Programs that always run, and those of the slow test, each of them in blocks of one process."""
START = f"""
import json, sys, warnings
sys.path.insert(0, {str(Path(__file__).parents[2] / "support")!r})
import umem
umem.software_gpu("t4", "1GiB", force=True, model=False)
from random_programs import beside_plain
import umem.chainer
warnings.simplefilter("ignore")
BUDGETS = "min", "80%", "card", "50%", "100%", "min", "60%"

def outcome(seed):
    # How a program ends under Recompute, and what is wrong.
    memories = []
    def memory(number):
        budget = BUDGETS[(seed + number) % len(BUDGETS)]
        if (seed + number) % 3 == 1:  # a size that a graph may fit, or not
            known = memories[-1].predicted_bytes if memories else None
            budget = round(1.3 * (known or 200_000 + 20_000 * (seed % 20)))
        memories.append(umem.chainer.Recompute(budget))
        return memories[-1]
    program, wrong, refused = beside_plain(seed, memory, "@cupy:0")
    end = f"refused: {{type(refused).__name__}}" if refused else "unplanned"
    if any(one.planned_count for one in memories):
        end = "planned"
    about = f"{{program.likely}}, {{program.model.kinds}}"
    return end, f"seed {{seed}}: {{wrong[:4]}} ({{about}})" if wrong else ""
"""


def ends_of(seeds: range, cache: Path) -> tuple[Counter[str], list[str]]:
    """How the programs of some seeds end, and what of them is wrong."""
    program = f"print(json.dumps([outcome(seed) for seed in {seeds!r}]))"
    found = json.loads(run(program, cache, start=START))
    return Counter(end for end, _ in found), [wrong for _, wrong in found if wrong]


def test_a_few_random_programs_on_cupy_have_plain_bits(kernel_cache: Path) -> None:
    ends, wrong = ends_of(range(FEW), kernel_cache)
    assert not wrong
    assert ends["planned"] > 0


@pytest.mark.slow
def test_hundreds_of_random_programs_on_cupy_have_plain_bits(
    kernel_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = int(os.environ.get("UMEM_FIRST_SEED", FEW))
    count = int(os.environ.get("UMEM_SEEDS", MANY))
    ends: Counter[str] = Counter()
    wrong: list[str] = []
    for begin in range(first, first + count, AT_ONCE):
        found, different = ends_of(range(begin, min(begin + AT_ONCE, first + count)), kernel_cache)
        ends += found
        wrong += different
    with capsys.disabled():
        print(f"\nseeds {first} to {first + count - 1}: {dict(ends)}, {len(wrong)} wrong")
    assert not wrong
    assert ends["planned"] > count / 3
