"""The script that runs ChainerMN's own tests counts what happened on every rank, hangs too."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_scripts import module, written
from mpi_programs import needs_ranks

CASES = """
import mock
import chainer
import chainer.testing.attr
import chainerx
import unittest
import chainermn
import pytest

comm = chainermn.create_communicator("naive")

def test_passes():
    assert comm.allreduce_obj(1) == 2
    assert len(chainer.datasets.get_mnist()[0]) == 2000

def test_fails_on_one_rank():
    assert comm.rank == 0

def test_skips():
    pytest.skip("not here")

@chainer.testing.attr.gpu
def test_for_a_gpu(): ...

class TestChainerX(unittest.TestCase):
    def test_device(self):
        comm.mpi_comm.Barrier()
        chainer.get_device("native:0")

def test_chainerx_array():
    comm.mpi_comm.Barrier()
    chainerx.array([])

def test_another_attribute_is_missing():
    chainer.no_such_name

def test_scatter_large_dataset_naive(): ...

def test_hangs():
    if comm.rank == 1:
        comm.recv_obj(0)
    comm.mpi_comm.Barrier()

def test_after(): ...
"""


@needs_ranks
@pytest.mark.thorough
def test_own_tests_of_chainermn_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "some_tests"
    folder.mkdir(parents=True)
    (folder / "test_some.py").write_text(CASES)
    result, said = written(
        tmp_path, "chainermn_own_tests.py", str(folder.parent), "--ranks", "2", "--seconds", "30"
    )
    row = result["rows"][-1]
    assert row["case_count"] == 9 and row["left_out_count"] == 1 and row["skipped_count"] == 1
    assert row["passed_count"] == 2 and row["failed_count"] == 2 and row["hung_count"] == 1
    assert row["cut_short_count"] == 2
    failed = {case.partition("::")[2] for case in result["failures"]}
    names = ("test_fails_on_one_rank", "test_another_attribute_is_missing", "test_hangs")
    assert failed == {f"{name} on 2 ranks" for name in names}
    assert "2 of 5 pass, 2 fail and 1 hang" in said
    assert "22.2 % end where they ask for ChainerX" in said


def test_every_case_of_chainermn_left_out_has_a_reason() -> None:
    bench = module("chainermn_own_tests")
    kinds = {reason.partition(",")[0] for reason, *_ in bench.reasons()}
    assert kinds == {
        "takes more than 16 GB a rank",
        "wants one bias's gradient to be another without exchange",
    }
    halves = "links/test_batch_normalization.py::test_multi_node_bn_cpu[NaiveCommunicator-mpi-{}]"
    found = {
        (ranks, dtype): bench.reason_of(halves.format(dtype), ranks, bench.reasons()) is not None
        for ranks in (2, 3)
        for dtype in ("float16", "float32")
    }
    assert [case for case, is_left_out in found.items() if is_left_out] == [(3, "float16")]
