"""Sizes that follow from values that a dry run does not know are never smaller than they can be."""

from __future__ import annotations

from pathlib import Path

import software_programs as programs
from software_programs import needs_software_gpu

START = """
import numpy as np
import umem
gpu = umem.software_gpu("t4", "256MiB", force=True, dry=True)
import cupy as cp
"""


@needs_software_gpu
def test_a_mask_of_few_unknown_flags_selects_all_rows(tmp_path: Path) -> None:
    program = """
x = cp.ones((800, 700)) + 1
sums = x.sum(axis=1)
print(x[sums > 0].shape, x[sums.argsort() == 3].shape, cp.nonzero(sums)[0].shape)
print(bool(cp.isnan(sums).any()), bool(cp.isfinite(sums).all()), bool((sums > 5).any()))
"""
    shown = programs.lines(program, tmp_path, start=START)
    assert shown == ["(800, 700) (800, 700) (800,)", "False True False"]
