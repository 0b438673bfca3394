"""``umem run --resume every=500``: an old script goes on where it was, unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.cli.test_run import execute
from tests.cli.test_run_recompute import LOOP, TRAINER, Run
from umem.cli import main
from umem.compat import find_package

if find_package() is None:
    pytest.skip("no Chainer", allow_module_level=True)

pytestmark = pytest.mark.thorough


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run(code: str, *options: str, arguments: tuple[str, ...] = ()) -> object:
        (tmp_path / "script.py").write_text(code)
        return execute("-m", "umem", "run", *options, "script.py", *arguments, cwd=tmp_path)

    return run


def test_an_old_script_goes_on_to_the_bit(run: Run, tmp_path: Path) -> None:
    whole = run(TRAINER, arguments=("-e", "3"))
    part = run(TRAINER, "--resume", "every=3,keep=2", arguments=("-e", "2", "-o", "again"))
    assert part.returncode == 0, part.stderr
    rest = run(TRAINER, "--resume", "every=3,keep=2", arguments=("-e", "3", "-o", "again"))
    assert "umem: resumed from " in rest.stderr and "again/snapshots/step-6" in rest.stderr
    assert rest.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1]
    names = {path.name for path in (tmp_path / "again/snapshots").iterdir()}
    assert names == {"run.lock", "step-9", "step-12"}


def test_a_script_without_a_trainer_is_told_what_to_call(run: Run) -> None:
    result = run(LOOP, "--resume", "every=3")
    assert result.returncode == 0
    assert "nothing was saved, because no Trainer ran" in result.stderr


def test_a_folder_of_its_own_and_epochs(run: Run, tmp_path: Path) -> None:
    result = run(TRAINER, "--resume", "every=1epoch,folder=here", arguments=("-e", "1"))
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "here/step-4/manifest.json").is_file()


def test_each_trainer_of_a_script_has_a_folder_of_its_own(run: Run, tmp_path: Path) -> None:
    result = run(TRAINER + "\n    main()\n", "--resume", "every=2", arguments=("-e", "1"))
    assert result.returncode == 0, result.stderr
    for name in ("snapshots", "snapshots-2"):
        assert (tmp_path / "result" / name / "step-4/manifest.json").is_file()


def test_it_goes_with_a_budget(run: Run) -> None:
    options = ("--resume", "every=3", "--recompute", "min")
    whole = run(TRAINER, arguments=("-e", "2", "-o", "whole"))
    assert run(TRAINER, *options, arguments=("-e", "1")).returncode == 0
    rest = run(TRAINER, *options, arguments=("-e", "2"))
    assert "umem: resumed from" in rest.stderr
    assert rest.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("500", "cannot read '500'. Write every=500"),
        ("every=", "cannot read"),
        ("every=2,every=3", "cannot read"),
        ("every=0", "every must be a whole number from 1 on"),
        ("every=half", "cannot read"),
        ("keep=0", "keep must be a whole number from 1 on"),
        ("steps=3", "unknown key 'steps'"),
    ],
)
def test_bad_options_are_refused_before_the_script_runs(
    asked: str, said: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    result = CliRunner().invoke(main, ["run", "--resume", asked, str(script)])
    assert result.exit_code == 2 and "ran" not in result.output
    assert said in " ".join(result.output.replace("│", " ").split())
