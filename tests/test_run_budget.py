"""``umem run --budget SIZE``: an old script kept to a budget, unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from test_run import execute
from test_run_recompute import TRAINER

from umem.cli import main
from umem.compat.installation import find_package

if find_package() is None:
    pytest.skip("no Chainer", allow_module_level=True)

pytestmark = pytest.mark.thorough

HEAD = """
import numpy as np
import chainer
import chainer.functions as F
import chainer.links as L

np.random.seed(0)
x = np.random.rand(512, 256).astype(np.float32)
model = chainer.Sequential(*[part for _ in range(6) for part in (L.Linear(256, 256), F.relu)])
optimizer = chainer.optimizers.Adam().setup(model)


def loss(x):
    return F.mean(model(x) ** 2)

"""
SPLIT = """
for _ in range(5):
    optimizer.update(loss, x)
print(sum(float(abs(p.array).sum()) for p in model.params()))
"""
BY_HAND = """
for _ in range(7):
    model.cleargrads()
    y = loss(x)
    y.backward()
    optimizer.update()
print(sum(float(abs(p.array).sum()) for p in model.params()))
"""
TWO = """
other = chainer.Sequential(L.Linear(256, 4))
second = chainer.optimizers.SGD().setup(other)
for _ in range(3):
    optimizer.update(loss, x)
    second.update(lambda: F.mean(other(x) ** 2))
"""


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "train.py"
    path.write_text(text)
    return str(path)


def last_number(text: str) -> float:
    return float(text.strip().splitlines()[-1])


def test_a_trainer_is_dieted_from_its_first_update_and_learns_the_same(tmp_path: Path) -> None:
    path = script(tmp_path, TRAINER)
    plain = execute("-m", "umem", "run", path, "-o", str(tmp_path / "a"), cwd=tmp_path)
    found = execute(
        "-m", "umem", "run", "--budget", "500KiB", path, "-o", str(tmp_path / "b"), cwd=tmp_path
    )
    assert plain.returncode == found.returncode == 0, found.stderr
    assert "umem diet for 500.0 KiB (all figures are simulated)" in found.stderr
    assert "on: " in found.stderr
    assert last_number(found.stdout) == pytest.approx(last_number(plain.stdout), rel=1e-6)


def test_an_update_that_is_given_the_batch_may_be_split(tmp_path: Path) -> None:
    path = script(tmp_path, HEAD + SPLIT)
    plain = execute("-m", "umem", "run", path, cwd=tmp_path)
    found = execute("-m", "umem", "run", "--budget", "9MiB", path, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "on: " in found.stderr
    assert last_number(found.stdout) == pytest.approx(last_number(plain.stdout), rel=1e-5)


def test_a_loop_that_goes_backward_itself_is_dieted_later_and_says_so(tmp_path: Path) -> None:
    path = script(tmp_path, HEAD + BY_HAND)
    plain = execute("-m", "umem", "run", path, cwd=tmp_path)
    found = execute("-m", "umem", "run", "--budget", "10MiB", path, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "the second step is recorded as it goes" in found.stderr
    assert "micro-batches need a loop that calls optimizer.update(lossfun, *arrays)" in found.stderr
    assert "umem diet for 10.0 MiB" in found.stderr and "micro-batches of" not in found.stderr
    close = pytest.approx(last_number(plain.stdout), rel=1e-5)  # recomputation, or up to rounding
    assert last_number(found.stdout) == close


def test_what_fits_is_left_alone(tmp_path: Path) -> None:
    found = execute(
        "-m", "umem", "run", "--budget", "1GiB", script(tmp_path, HEAD + SPLIT), cwd=tmp_path
    )
    assert found.returncode == 0 and "it fits: nothing is turned on" in found.stderr


def test_another_optimizer_is_left_alone_and_named(tmp_path: Path) -> None:
    found = execute(
        "-m", "umem", "run", "--budget", "9MiB", script(tmp_path, HEAD + TWO), cwd=tmp_path
    )
    assert found.returncode == 0, found.stderr
    assert found.stderr.count("another optimizer, SGD, is as it was") == 1


def test_a_budget_that_nothing_fits_ends_the_script_and_names_the_least(tmp_path: Path) -> None:
    found = execute(
        "-m", "umem", "run", "--budget", "2MiB", script(tmp_path, HEAD + SPLIT), cwd=tmp_path
    )
    assert found.returncode == 1
    assert "BudgetError" in found.stderr and "the least that was found is" in found.stderr


def test_a_script_without_updates_says_that_nothing_was_turned_on(tmp_path: Path) -> None:
    found = execute(
        "-m", "umem", "run", "--budget", "1GiB", script(tmp_path, "print(1)\n"), cwd=tmp_path
    )
    assert found.returncode == 0 and "nothing was turned on" in found.stderr


def test_it_follows_a_virtual_gpu(tmp_path: Path) -> None:
    path = script(tmp_path, HEAD + SPLIT)
    found = execute("-m", "umem", "run", "--virtual", "t4", "--budget", "10MiB", path, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "umem diet for 10.0 MiB" in found.stderr and "on: " in found.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--budget", "much"], "budget must be a size"),
        (["--budget", "0"], "above zero"),
        (["--budget", "1GiB", "--recompute", "50%"], "leave out --recompute"),
        (["--budget", "1GiB", "--workspace", "1MiB"], "leave out --recompute"),
        (["--budget", "1GiB", "--record", "x.umem.gz"], "leave out --recompute"),
    ],
)
def test_options_that_cannot_be_are_refused_before_the_script_runs(
    options: list[str], said: str, tmp_path: Path
) -> None:
    path = script(tmp_path, "raise SystemExit(7)\n")
    result = CliRunner().invoke(main, ["run", *options, path])
    assert result.exit_code == 2 and said in " ".join(result.output.split())
