"""Sizes that follow from values that a dry run does not know are never smaller than they can be."""

from __future__ import annotations

from pathlib import Path

import pytest
import software_programs as programs
from software_programs import needs_software_gpu

START = """
import numpy as np
import umem
gpu = umem.software_gpu("t4", "256MiB", force=True, dry=True)
import cupy as cp
"""


@pytest.mark.thorough
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


@pytest.mark.thorough
@needs_software_gpu
def test_copies_of_counts_count_as_much(tmp_path: Path) -> None:
    program = """
import cupyx.scipy.sparse as sparse
x = cp.ones(300_000) + 1
print(sparse.diags([x, x[1:]], [0, 1]).tocsr().data.shape)
"""
    assert programs.lines(program, tmp_path, start=START) == ["(600000,)"]


@pytest.mark.thorough
@needs_software_gpu
def test_a_product_by_entries_has_no_fewer_than_it_can_have(tmp_path: Path) -> None:
    program = """
import cupyx.scipy.sparse as sparse
import scipy.sparse
host = scipy.sparse.random(5000, 5000, 0.01, "csr", random_state=np.random.default_rng(0))
a = sparse.csr_matrix(host)
found = a.multiply(a)
print(len(found.data) >= host.nnz, len(found.indices) >= host.nnz)
"""
    assert programs.lines(program, tmp_path, start=START) == ["True True"]


@pytest.mark.thorough
@needs_software_gpu
def test_libraries_whose_work_is_left_out_report_success_and_all_entries(tmp_path: Path) -> None:
    program = """
import cupyx.scipy.sparse as sparse
import scipy.sparse
a, b = cp.ones((200, 40, 40)) + 1, cp.ones((200, 40, 2)) + 1
print(cp.linalg.solve(a, b).shape)
s = sparse.csr_matrix(scipy.sparse.random(5000, 5000, 0.01, "csr"))
s.data = s.data * 1.0
s.eliminate_zeros()
print(s.data.shape == s.indices.shape == (250_000,))
"""
    assert programs.lines(program, tmp_path, start=START) == ["(200, 40, 2)", "True"]
