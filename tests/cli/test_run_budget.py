"""``umem run --budget SIZE``: an old script kept to a budget, unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.cli.test_run import execute
from tests.cli.test_run_recompute import TRAINER
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
wide = chainer.Sequential(L.Linear(256, 2048), L.Linear(2048, 1))
second = chainer.optimizers.SGD().setup(wide)
for _ in range(9):
    optimizer.update(loss, x)
    second.update(lambda: F.mean(wide(x) ** 2))
"""
LATER = """
optimizer.update(loss, x)
wide = chainer.Sequential(L.Linear(256, 2048), L.Linear(2048, 1))
second = chainer.optimizers.SGD().setup(wide)
for _ in range(6):
    optimizer.update(loss, x)
    second.update(lambda: F.mean(wide(x) ** 2))
"""
MIXED = """
x = np.random.rand(4096, 256).astype(np.float32)


def mixed(x):
    y = model(x)
    return F.mean((y - F.broadcast_to(F.mean(y, axis=0, keepdims=True), y.shape)) ** 2)


for _ in range(5):
    optimizer.update(mixed, x)
print(sum(float(abs(p.array).sum()) for p in model.params()))
"""
LATER_BY_HAND = """
x = np.random.rand(4096, 256).astype(np.float32)
for number in range(5):
    if number < 3:
        optimizer.update(loss, x)
    else:
        model.cleargrads()
        loss(x).backward()
        optimizer.update()
print(sum(float(abs(p.array).sum()) for p in model.params()))
"""
KEPT = """
import weakref

before, seen = [], []


def alive(x):
    seen.append(any(one() is not None for one in before))
    return x


net = L.Classifier(chainer.Sequential(alive, model), F.mean_squared_error)
net.compute_accuracy = False
optimizer = chainer.optimizers.Adam().setup(net)
for _ in range(5):
    optimizer.update(net, x, x)
    before[:] = [weakref.ref(net.loss.node), weakref.ref(net.y.node)]
print(len(seen) > 4, any(seen))
"""


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "train.py"
    path.write_text(text)
    return str(path)


def last_number(text: str) -> float:
    return float(text.strip().splitlines()[-1])


def test_a_trainer_is_dieted_from_its_first_update_and_learns_the_same(tmp_path: Path) -> None:
    dropout = "F.dropout(F.relu(self.l1(x)), 0.2)"  # would draw other masks in micro-batches
    assert dropout in TRAINER
    path = script(tmp_path, TRAINER.replace(dropout, "F.relu(self.l1(x))"))
    plain = execute("-m", "umem", "run", path, "-o", str(tmp_path / "a"), cwd=tmp_path)
    found = execute(
        "-m", "umem", "run", "--budget", "500KiB", path, "-o", str(tmp_path / "b"), cwd=tmp_path
    )
    assert plain.returncode == found.returncode == 0, found.stderr
    assert "umem diet for 500.0 KiB (all figures are simulated)" in found.stderr
    assert "on: micro-batches" in found.stderr
    assert "up to rounding, dropout's masks aside" in found.stderr
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
    assert "there are no micro-batches" in found.stderr
    assert "umem diet for 10.0 MiB" in found.stderr and "micro-batches of" not in found.stderr
    close = pytest.approx(last_number(plain.stdout), rel=1e-5)  # recomputation, or up to rounding
    assert last_number(found.stdout) == close
    assert " measured in a settled step, its update included" in found.stderr
    assert "recomputation (peaks and time of forward and backward alone): " in found.stderr


def test_what_fits_is_left_alone(tmp_path: Path) -> None:
    found = execute(
        "-m", "umem", "run", "--budget", "1GiB", script(tmp_path, HEAD + SPLIT), cwd=tmp_path
    )
    assert found.returncode == 0 and "it fits: nothing is turned on" in found.stderr
    assert "--budget 1GiB: it held: " in found.stderr


@pytest.mark.parametrize(("budget", "on"), [("1GiB", "nothing"), ("9MiB", "  on: ")])
def test_a_loss_that_the_model_keeps_is_gone_before_the_next_forward(
    budget: str, on: str, tmp_path: Path
) -> None:
    path = script(tmp_path, HEAD + KEPT)
    found = execute("-m", "umem", "run", "--budget", budget, path, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert on in found.stderr and found.stdout.split() == ["True", "False"]


def test_every_optimizer_of_the_script_is_counted(tmp_path: Path) -> None:
    found = execute(
        "-m", "umem", "run", "--budget", "24MiB", script(tmp_path, HEAD + TWO), cwd=tmp_path
    )
    assert found.returncode == 0, found.stderr
    assert "the script has 2 optimizers: a turn of all is recorded" in found.stderr
    held = 4 * 256 * (6 * 257 * 4 + 2048 * 2)  # Adam has four arrays a parameter, SGD two
    plain = found.stderr.partition("as it is: ")[2].partition(" MiB")[0]
    assert float(plain) * 2**20 > held + 512 * 256 * 4 * 6
    assert "--budget 24MiB: it held: " in found.stderr


def test_an_optimizer_that_comes_later_is_named_and_measured(tmp_path: Path) -> None:
    found = execute(
        "-m", "umem", "run", "--budget", "9MiB", script(tmp_path, HEAD + LATER), cwd=tmp_path
    )
    assert found.returncode == 0, found.stderr
    assert found.stderr.count("another optimizer, SGD, came after the choice") == 1
    assert "--budget 9MiB: it did NOT hold: " in found.stderr


def test_a_choice_that_the_script_does_not_go_with_gives_way_to_the_next(tmp_path: Path) -> None:
    path = script(tmp_path, HEAD + MIXED)
    plain = execute("-m", "umem", "run", path, cwd=tmp_path)
    found = execute("-m", "umem", "run", "--budget", "30MiB", path, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    before, _, after = found.stderr.partition("this script does not go with micro-batches: ")
    assert "on: micro-batches" in before and "mixes samples" in after
    assert "on: micro-batches" not in after and "on: recomputation" in after
    assert last_number(found.stdout) == pytest.approx(last_number(plain.stdout), rel=1e-3)


def test_a_loss_that_needs_its_whole_batch_is_recorded_as_it_goes(tmp_path: Path) -> None:
    text = HEAD + "def whole(x):\n    assert len(x) == 512\n    return loss(x)\n"
    path = script(tmp_path, text + SPLIT.replace("update(loss, x)", "update(whole, x)"))
    found = execute("-m", "umem", "run", "--budget", "10MiB", path, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "the loss does not take a part of the batch (AssertionError" in found.stderr
    assert "on: " in found.stderr


def test_a_refusal_in_a_later_update_does_not_end_the_script(tmp_path: Path) -> None:
    path = script(tmp_path, HEAD + LATER_BY_HAND)
    plain = execute("-m", "umem", "run", path, cwd=tmp_path)
    found = execute("-m", "umem", "run", "--budget", "30MiB", path, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "on: micro-batches" in found.stderr
    assert "this script does not go with micro-batches: micro_batch= takes" in found.stderr
    assert last_number(found.stdout) == pytest.approx(last_number(plain.stdout), rel=1e-5)


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


@pytest.mark.parametrize("width", [256, None])
def test_on_the_software_gpu_parameters_may_take_their_shape_from_the_batch(
    width: int | None, tmp_path: Path, kernel_cache: Path
) -> None:
    pytest.importorskip("cupy")
    head = HEAD.replace("256, 256)", f"{width}, 256)") + "model.to_gpu(0)\nx = model.xp.array(x)\n"
    path = script(tmp_path, head + SPLIT)
    options = ("--software", "t4", "--budget", "10MiB")
    variables = {"XDG_CACHE_HOME": str(kernel_cache)}
    found = execute("-m", "umem", "run", *options, path, cwd=tmp_path, **variables)
    assert found.returncode == 0, found.stderr
    assert "no other size of the step" not in found.stderr
    assert "with the pool's gaps" in found.stderr and "  on: " in found.stderr
    assert " of arrays, without pool gaps, measured in a settled step, its update" in found.stderr


def test_it_follows_a_virtual_gpu(tmp_path: Path) -> None:
    path = script(tmp_path, HEAD + SPLIT)
    found = execute("-m", "umem", "run", "--virtual", "t4", "--budget", "10MiB", path, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "umem diet for 10.0 MiB" in found.stderr and "on: " in found.stderr
    assert "whether it held was not measured: on a virtual GPU" in found.stderr


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
