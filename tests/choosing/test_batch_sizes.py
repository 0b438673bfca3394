"""`umem batch` and `umem advise`: a program's own arguments, changed from dry run to dry run."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Event

import pytest
from click.testing import CliRunner
from software_programs import needs_cupy

from umem.choosing.batch_sizes import halve_each, largest_batch, number_argument
from umem.choosing.child import DryProgram, DryResult
from umem.choosing.technique import Technique
from umem.cli import main
from umem.compat import find_package
from umem.errors import DryRunError, SizeError

PROGRAM = DryProgram("train.py", ("data", "--batch", "48", "--wide=10"))


@pytest.mark.parametrize(
    ("arguments", "name", "value", "given"),
    [
        (("64",), "1", 64, ("7",)),
        (("data", "64", "x"), "2", 64, ("data", "7", "x")),
        (("--batch", "64"), "--batch", 64, ("--batch", "7")),
        (("--batch=64", "x"), "--batch", 64, ("--batch=7", "x")),
        (("-b", "1", "-b", "2"), "-b", 2, ("-b", "1", "-b", "7")),
    ],
)
def test_a_number_is_found_by_its_place_or_its_option(
    arguments: tuple[str, ...], name: str, value: int, given: tuple[str, ...]
) -> None:
    found = number_argument(arguments, name)
    assert found.value == value and found.given(arguments, 7) == given


@pytest.mark.parametrize(
    ("arguments", "name", "said"),
    [
        ((), "1", "SCRIPT has no argument 1"),
        (("64",), "2", "SCRIPT has no argument 2"),
        (("64",), "0", "SCRIPT has no argument 0"),
        (("64", "--batch"), "--batch", "SCRIPT has no argument --batch"),
        (("data",), "1", "give a whole number above zero"),
        (("--batch=6.5",), "--batch", "give a whole number above zero"),
        (("0",), "1", "give a whole number above zero"),
        (("-4",), "1", "give a whole number above zero"),
    ],
)
def test_an_argument_that_is_absent_or_no_number_is_refused(
    arguments: tuple[str, ...], name: str, said: str
) -> None:
    with pytest.raises(SizeError, match=said):
        number_argument(arguments, name)


class Machine:
    """A made-up GPU that has room for a product of a program's numbers."""

    def __init__(self, room: int, fails_from: int = 10**9) -> None:
        self.room, self.fails_from = room, fails_from
        self.ran: list[tuple[int, int]] = []

    def __call__(self, program: DryProgram, technique: Technique, stop: Event) -> DryResult:
        assert technique.name == "nothing"
        batch = number_argument(program.arguments, "--batch").value
        wide = number_argument(program.arguments, "--wide").value
        self.ran.append((batch, wide))
        peak = batch * wide
        why = "out of memory at train.py:2, in step 1" if peak > self.room else None
        if batch >= self.fails_from:
            why = "fails at train.py:7, in step 1: ValueError: too many"
        seconds = () if why else (1.0 + 0.01 * batch,)
        failed = batch >= self.fails_from
        return DryResult(seconds, peak, peak, 0, why, 5 if why else None, failed, title="T4")


@pytest.mark.parametrize("room", [10, 15, 470, 480, 490, 777, 12_345])
def test_the_largest_batch_is_found_exactly_and_beside_the_one_after_it(room: int) -> None:
    machine = Machine(room)
    found = largest_batch(PROGRAM, "--batch", run_dry=machine)
    assert found.largest is not None and found.largest.value == room // 10
    tried = [one.value for one in found.tried]
    assert room // 10 + 1 in tried and tried == sorted(set(tried))
    assert len(machine.ran) <= 2 + 2 * (room // 10 + 48).bit_length()


def test_no_batch_above_the_maximum_runs() -> None:
    machine = Machine(10**6)
    found = largest_batch(PROGRAM, "--batch", maximum=200, run_dry=machine)
    assert found.is_maximum and found.largest is not None and found.largest.value == 200
    assert max(batch for batch, _ in machine.ran) == 200
    with pytest.raises(SizeError, match="above the maximum 20"):
        largest_batch(PROGRAM, "--batch", maximum=20, run_dry=machine)


def test_where_a_batch_of_one_does_not_fit_there_is_none() -> None:
    found = largest_batch(PROGRAM, "--batch", run_dry=Machine(9))
    assert found.largest is None and found.quickest is None and not found.is_maximum


def test_the_least_time_a_sample_is_that_of_the_largest_where_it_falls() -> None:
    found = largest_batch(PROGRAM, "--batch", run_dry=Machine(1000))
    assert found.quickest is found.largest


def test_an_error_of_the_scripts_own_ends_the_search_above_and_is_shown() -> None:
    found = largest_batch(PROGRAM, "--batch", run_dry=Machine(10**6, fails_from=100))
    assert found.largest is not None and found.largest.value == 99
    assert "ValueError" in str(found.tried[-1].result.why_not)
    with pytest.raises(DryRunError, match=r"cannot run train\.py.*: fails at train\.py:7"):
        largest_batch(PROGRAM, "--batch", run_dry=Machine(10**6, fails_from=48))


def test_an_argument_that_memory_does_not_depend_on_is_refused() -> None:
    def same(program: DryProgram, technique: Technique, stop: Event) -> DryResult:
        return DryResult((1.0,), 500, 500, 0)

    with pytest.raises(DryRunError, match="the argument --batch seems not to be the batch size"):
        largest_batch(PROGRAM, "--batch", run_dry=same)


def test_each_size_is_halved_in_turn() -> None:
    machine = Machine(300)
    found = halve_each(PROGRAM, ["--batch", "--wide"], run_dry=machine)
    assert sorted(machine.ran) == [(24, 10), (48, 5), (48, 10)]
    assert [half.fits for half in found.halves] == [True, True] and found.fits
    assert found.whole.why_not is not None
    assert not halve_each(PROGRAM, ["--wide"], run_dry=Machine(100)).fits


def test_sizes_that_cannot_be_halved_are_refused() -> None:
    with pytest.raises(SizeError, match="named twice"):
        halve_each(PROGRAM, ["--batch", "3"], run_dry=Machine(300))
    one = DryProgram("train.py", ("--batch", "1"))
    with pytest.raises(SizeError, match="is 1 and cannot be halved"):
        halve_each(one, ["--batch"], run_dry=Machine(300))


# -- the commands ----------------------------------------------------------------------------------

SUMS = """
import sys
import cupy

rows, columns = int(sys.argv[1]), int(sys.argv[2].partition("=")[2])
for step in range(2):
    x = cupy.ones((rows, columns, 1 << 18), "f")
    y = x * 2
    del x, y
"""


@pytest.fixture
def sums(tmp_path: Path) -> str:
    path = tmp_path / "sums.py"
    path.write_text(SUMS)
    return str(path)


@pytest.mark.skipif(find_package() is None, reason="no Chainer")
def test_batch_tries_each_size_with_what_is_given(
    sums: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def found(program: DryProgram, *_: object) -> None:
        tried.append(program.options)
        raise DryRunError("enough")

    monkeypatch.setattr("umem.cli.batch.largest_batch", found)
    given = ["--recompute", "min", "--workspace", "4MiB", "--writes", "real"]
    for more in (given, []):
        CliRunner().invoke(main, ["batch", "--argument", "1", *more, sums, "4"])
    assert tried == [("--writes", "real", *given[:4]), ()]
    bad = CliRunner().invoke(
        main, ["batch", "--argument", "1", "--workspace", "4 pages", sums, "4"]
    )
    assert bad.exit_code == 2 and "--workspace" in bad.output
    assert len(tried) == 2


@pytest.mark.slow
@needs_cupy
def test_the_commands_print_tables_and_json(sums: str) -> None:
    run_dry = ["--vram", "64MiB", "--json"]
    result = CliRunner().invoke(main, ["batch", "--argument", "1", *run_dry, sums, "4", "--c=4"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    # Two arrays of rows x 4 MiB, and the script that waits for nobody has no step.
    assert found["simulated"] and found["largest"]["value"] == 8
    assert [one["value"] for one in found["tried"]][-1] == 16
    result = CliRunner().invoke(
        main, ["advise", "--argument=--c", *run_dry[:2], sums, "9", "--c=4"]
    )
    assert result.exit_code == 0, result.output
    assert "(simulated)" in result.output and "--c: 4 to 2" in result.output
    assert "out of memory at" in result.output


def test_a_bad_argument_is_refused_before_anything_runs(sums: str) -> None:
    for words, said in (
        (["batch", "--argument", "3", sums, "4"], "SCRIPT has no argument 3"),
        (["batch", sums, "4"], "Missing option '--argument'"),
        (["batch", "--argument", "1", sums, "x"], "give a whole number above zero"),
        (["advise", "--argument", "1", sums], "SCRIPT has no argument 1"),
        (["batch", "--argument", "1", "--maximum", "2", sums, "4"], "above the maximum"),
    ):
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 2 and said in " ".join(result.output.split()), result.output
