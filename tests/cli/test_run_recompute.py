"""``umem run --recompute BUDGET``: an old script within a budget, unchanged."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.cli.test_run import execute
from umem.cli import main
from umem.compat import find_package

if find_package() is None:
    pytest.skip("no Chainer", allow_module_level=True)

pytestmark = pytest.mark.thorough

TRAINER = """
#!/usr/bin/env python
from __future__ import print_function
import argparse
import chainer
import chainer.functions as F
import chainer.links as L
from chainer import training
from chainer.training import extensions
import numpy as np


class MLP(chainer.Chain):

    def __init__(self, n_units, n_out):
        super(MLP, self).__init__()
        with self.init_scope():
            self.l1 = L.Linear(None, n_units)
            self.l2 = L.Linear(None, n_units)
            self.l3 = L.Linear(None, n_units)
            self.l4 = L.Linear(None, n_out)

    def __call__(self, x):
        h = F.dropout(F.relu(self.l1(x)), 0.2)
        h = F.tanh(self.l2(h))
        h = F.tanh(self.l3(h))
        return self.l4(h)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--epoch', '-e', type=int, default=3)
    parser.add_argument('--out', '-o', default='result')
    args = parser.parse_args()
    np.random.seed(0)
    x = np.random.rand(2000, 50).astype(np.float32)
    t = np.random.randint(0, 10, 2000).astype(np.int32)
    train = chainer.datasets.TupleDataset(x, t)
    test = chainer.datasets.TupleDataset(x[:100], t[:100])
    model = L.Classifier(MLP(40, 10))
    optimizer = chainer.optimizers.Adam()
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-4))
    train_iter = chainer.iterators.SerialIterator(train, 500)
    test_iter = chainer.iterators.SerialIterator(test, 50, repeat=False, shuffle=False)
    updater = training.StandardUpdater(train_iter, optimizer, device=-1)
    trainer = training.Trainer(updater, (args.epoch, 'epoch'), out=args.out)
    trainer.extend(extensions.Evaluator(test_iter, model, device=-1))
    trainer.extend(extensions.snapshot(), trigger=(args.epoch, 'epoch'))
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.PrintReport(
        ['epoch', 'main/loss', 'validation/main/loss', 'main/accuracy']))
    trainer.run()
    print(sum(float(abs(p.array).sum()) for p in model.params()))


if __name__ == '__main__':
    main()
"""
LOOP = """
import sys
import numpy as np
import chainer, chainer.functions as F, chainer.links as L

np.random.seed(0)
link = chainer.Sequential(*[L.Linear(20, 20) for _ in range(4)])
optimizer = chainer.optimizers.SGD().setup(link)
for step in range(6):
    h = np.ones((500, 20), "f")
    for layer in link:
        h = F.tanh(layer(h))
    link.cleargrads()
    F.sum(h).backward()
    del h
    optimizer.update()
"""

CONVOLUTIONS = """
import tracemalloc
import numpy as np
import chainer, chainer.functions as F, chainer.links as L

link = chainer.Sequential(*[L.Convolution2D(8, 8, 3, pad=1) for _ in range(3)])
optimizer = chainer.optimizers.SGD(1e-3).setup(link)
x = np.ones((32, 8, 32, 32), "f")
for step in range(4):
    tracemalloc.start()
    optimizer.update(lambda: F.mean(link(x) ** 2))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
print(peak)
"""

Run = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run(code: str, *options: str, arguments: tuple[str, ...] = ()) -> Any:
        (tmp_path / "script.py").write_text(code)
        command = ("-m", "umem", "run", *options, "script.py", *arguments)
        return execute(*command, cwd=tmp_path)

    return run


def told(result: Any) -> str:
    """The line at the end."""
    (line,) = [one for one in result.stderr.splitlines() if one.startswith("umem: --recompute")]
    return str(line)


def mib(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"B": 2**-20, "KiB": 2**-10, "MiB": 1.0}[unit]


def test_a_trainer_of_old_runs_within_a_budget_and_the_results_stay(run: Run) -> None:
    plain = run(TRAINER, arguments=("-e", "3"))
    under = run(TRAINER, "--recompute", "min", arguments=("-e", "3"))
    assert plain.returncode == under.returncode == 0, under.stderr
    assert plain.stdout == under.stdout and "main/loss" in plain.stdout
    line = told(under)
    found = re.search(
        r"(\d+) of 12 passes followed a plan; peak (.+) predicted for a plain step, (.+) for the "
        r"plan, (.+) measured; forward and backward took (.+) times as long as without",
        line,
    )
    assert found, under.stderr
    assert int(found[1]) >= 8
    assert mib(found[3]) < mib(found[2])
    assert mib(found[4]) == pytest.approx(mib(found[3]), rel=0.1)
    assert 1 < float(found[5]) < 3


def test_a_step_that_fits_is_left_alone(run: Run) -> None:
    result = run(LOOP, "--recompute", "1GiB")
    assert result.returncode == 0
    assert "0 of 6 passes followed a plan; 4 fit without a plan" in told(result)
    assert "times as long" not in told(result)


def test_graphs_that_never_repeat_are_told_of(run: Run) -> None:
    code = LOOP.replace("for layer in link:", "for layer in [*link] * (step + 1):")
    code += "print([p.array.tobytes() for p in link.params()])"
    plain, under = run(code), run(code, "--recompute", "60%")
    assert plain.returncode == under.returncode == 0, under.stderr
    assert plain.stdout == under.stdout
    found = re.search(r"0 of 6 passes followed a plan.*; (\d) had no plan", told(under))
    assert found and int(found[1]) >= 2, under.stderr


def test_a_script_that_never_trains_is_told_so(run: Run) -> None:
    result = run("import sys; print('hello'); sys.exit(3)", "--recompute", "60%")
    assert result.returncode == 3 and result.stdout == "hello\n"
    assert told(result).endswith("no pass was seen: no backward ran in the block's thread")


def test_the_line_comes_after_an_error_and_the_exit_code_is_the_scripts(run: Run) -> None:
    result = run(LOOP + "\nraise KeyError('mine')\n", "--recompute", "min")
    assert result.returncode == 1
    assert result.stderr.index("KeyError: 'mine'") < result.stderr.index("umem: --recompute min")
    assert "passes followed a plan" in told(result)


def test_a_size_that_is_too_small_is_the_scripts_error_and_names_the_least(run: Run) -> None:
    result = run(LOOP, "--recompute", "1KiB")
    assert result.returncode == 1
    assert "BudgetError" in result.stderr and "the least budget is" in result.stderr
    assert "not planned: a budget of 1.0 KiB" in told(result)


def test_a_script_with_a_budget_of_its_own_is_told_what_to_do(run: Run) -> None:
    code = "import umem.chainer\nwith umem.chainer.Recompute('min'): pass\n"
    result = run(code, "--recompute", "60%")
    assert result.returncode == 1
    assert "StateError: a Recompute is on already" in result.stderr
    assert "Run it without --recompute" in result.stderr


def test_a_child_by_fork_says_nothing(run: Run) -> None:
    code = LOOP + "\nimport os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\n"
    assert run(code, "--recompute", "min").stderr.count("umem: --recompute") == 1


def test_a_cap_on_workspace_holds_for_the_script_with_and_without_a_budget(run: Run) -> None:
    plain, capped, both = (
        run(CONVOLUTIONS, *options)
        for options in ((), ("--workspace", "1MiB"), ("--workspace", "1MiB", "--recompute", "min"))
    )
    assert both.returncode == 0, both.stderr
    assert int(both.stdout) <= int(capped.stdout) < 0.6 * int(plain.stdout)
    assert "umem: --recompute" not in capped.stderr
    assert "passes followed a plan" in told(both)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--recompute", "60"), "passed"),
        (("--recompute", "much"), "Invalid value for --recompute"),
        (("--recompute", "0%"), "Invalid value for --recompute"),
        (("--recompute", "120%"), "budget must be at most 100%"),
        (("--recompute", "0"), "Invalid value for --recompute"),
        (("--recompute", "60%", "--record", "x.umem.gz"), "cannot be used with --recompute"),
        (("--workspace", "little"), "Invalid value for --workspace"),
        (("--workspace", "0"), "Invalid value for --workspace"),
        (("--workspace", "60%"), "Invalid value for --workspace"),
    ],
)
def test_bad_options_are_refused_before_the_script_runs(
    options: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    result = CliRunner().invoke(main, ["run", *options, str(script)])
    if said == "passed":  # sixty bytes
        assert "ran" in result.output
        return
    assert result.exit_code == 2 and "ran" not in result.output
    assert said in " ".join(result.output.split())


def test_it_goes_with_other_options(run: Run) -> None:
    result = run(LOOP, "--recompute", "min", "--watch", "--virtual", "t4", "--report")
    assert result.returncode == 0, result.stderr
    assert "passes followed a plan" in told(result)
