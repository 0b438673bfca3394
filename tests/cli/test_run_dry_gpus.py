"""``umem run --dry GPU --all-gpus``: one run tells of all GPUs, or nearly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from umem._common.specs import GPUS
from umem.cli.run_dry_gpus import MOST_RUNS, Elsewhere, lines, which_fit
from umem.units import GIB

SIZES = {name: gpu.usable_bytes for name, gpu in GPUS.items()}


class Runs:
    """Runs of a program that needs so much VRAM, by its arrays."""

    def __init__(self, used: int, reserved: int) -> None:
        self.used, self.reserved = used, reserved
        self.gpus: list[str] = []

    def __call__(self, gpu: str) -> Mapping[str, Any]:
        self.gpus.append(gpu)
        return self.on(gpu, SIZES[gpu])

    def on(self, gpu: str, vram: int) -> Mapping[str, Any]:
        fits = self.used <= vram
        return {
            "gpu": gpu, "vram_bytes": vram, "fits": fits, "peak_bytes": self.used,
            "ended": "steady" if fits else "out of memory",
            "reserved_peak_bytes": min(self.reserved, vram),
        }  # fmt: skip


def test_one_run_is_enough_where_no_gpu_is_between_the_peaks() -> None:
    runs = Runs(12 * GIB, 12 * GIB + 1)
    assert which_fit(runs.on("t4", SIZES["t4"]), runs) == {
        name: size > 12 * GIB for name, size in SIZES.items()
    }
    assert runs.gpus == []


def test_gpus_between_the_peaks_are_run() -> None:
    runs = Runs(12 * GIB, 30 * GIB)
    found = which_fit(runs.on("h200", SIZES["h200"]), runs)
    between = {size for size in SIZES.values() if 12 * GIB <= size < 30 * GIB}
    assert 0 < len(runs.gpus) == min(len(between), MOST_RUNS)
    assert all(12 * GIB <= SIZES[gpu] < 30 * GIB for gpu in runs.gpus)
    assert found["h200"] is True and found["rtx-2080-ti"] is False
    assert all(found[gpu] is True for gpu in runs.gpus)


def test_a_run_that_runs_out_is_done_again_where_there_is_most_room() -> None:
    runs = Runs(50 * GIB, 50 * GIB)
    found = which_fit(runs.on("t4", SIZES["t4"]), runs)
    (largest,) = runs.gpus
    assert SIZES[largest] == max(size for name, size in SIZES.items() if GPUS[name].chip)
    assert found["t4"] is False and found["h200"] is True and found["a100-40gb"] is False


def test_a_script_that_ends_with_an_error_says_nothing_of_other_gpus() -> None:
    failed = {"gpu": "t4", "fits": False, "ended": "script", "exit_status": 1}
    assert Elsewhere([]).which_fit(failed) == {}


def test_a_script_that_catches_the_error_and_exits_does_not_fit() -> None:
    runs = Runs(12 * GIB, 30 * GIB)
    found = which_fit(
        runs.on("h200", SIZES["h200"]), lambda gpu: {**runs(gpu), "fits": False, "ended": "script"}
    )
    assert runs.gpus and all(found[gpu] is None for gpu in runs.gpus)


def test_what_fits_nowhere_is_said_of_none() -> None:
    runs = Runs(5000 * GIB, 5000 * GIB)
    found = which_fit(runs.on("t4", SIZES["t4"]), runs)
    assert found["t4"] is False and True not in found.values()


def test_gpus_of_one_answer_are_in_one_line() -> None:
    assert list(lines({"t4": False, "h200": True, "l4": None, "b200": True})) == [
        "  fits on       h200, b200",
        "  too large for t4",
        "  not tried     l4",
        "                To try one: umem run --dry l4",
    ]
